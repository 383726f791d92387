"""What a whole speculative round costs: time, bytes over the measured bandwidth, what the host does.

    us         of a round: a call's time over its rounds, medians of all calls
    weights    bytes that the round's forwards read, each once a forward; of an embedding that is no head a row a token
    K/V        bytes of the keys and values that some row sees, once a forward, and of the rows written
    of copy    both over the bandwidth of a copy, measured in turn with the rounds, over the time of a round
    host       until a call returns to Python, which waits for nothing

A call is one dispatch of some rounds in a loop on the device, on a GPU one command buffer, and ends as it began (see
`jaxspec.benchmarks.round_problem`). Weights of public shapes are random, so drafts are never right and a round emits
one token a request. What a round costs does not depend on that. `simulated_acceptance` lets rounds advance like real
ones, to see longer lengths; which figures are then made up is said wherever they stand.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.benchmarks.base import Report, Task, quiet, setting
from jaxspec.benchmarks.round_problem import (
    DRAFTERS,
    Models,
    bytes_needed,
    kv_bytes,
    make_config,
    make_models,
    make_state,
    refuse_simulation,
    rounds_of,
    simulate,
    weight_bytes,
)
from jaxspec.benchmarks.shapes import CONFIGS, draw_ids, is_random, memory_there
from jaxspec.benchmarks.timing import COPY_TURNS, Chain, Samples, copy_chain
from jaxspec.benchmarks.traces import check_folder, traced
from jaxspec.config import SpecConfig
from jaxspec.errors import InputError
from jaxspec.steps import SpecState, make_spec_step
from jaxspec.steps.round import OK

SUMMARY = "Times a speculative round of a public shape: its bytes against the measured bandwidth, and the host's part."

SHARE = 0.85  # of the copy bandwidth, of
JUDGED = {"config": "8b", "dtype": "bfloat16", "num_draft_tokens": 8, "context": 2048}  # with one request
MOST_LEAVES, BASE_LEAVES, LAYER_LEAVES = 24, 8, 2
WARM_UP = 3  # calls before the first that is timed


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is timed, and how often."""

    config: str = setting("8b", "Public shapes with random weights, or the embedded target.", choices=CONFIGS)
    batch: str = setting("1 16", "B, requests decoded together, a number or several.")
    num_draft_tokens: int = setting(8, "D, tokens verified per request and round; 1 with drafter none.", least=1)
    context: int = setting(2048, "Committed tokens of a request before the rounds of a call.", least=1)
    drafter: str = setting("ngram", "Who proposes tokens.", choices=DRAFTERS)
    dtype: str = setting("bfloat16", "What is computed in.", choices=("float32", "bfloat16"))
    page_size: int = setting(64, "Tokens a page, a power of two.", least=1)
    rounds: int = setting(32, "Rounds a call.", least=1)
    runs: int = setting(20, "Timed calls.", least=2)
    copy_mb: int = setting(0, "MiB of the array that is copied; 0: 4096 on a GPU, 256 elsewhere.", least=0)
    simulated_acceptance: str | None = setting(
        None,
        "Counts each draft as accepted with this probability, 0 to 1, whatever the target says: no measured figure. By "
        "default the target decides.",
    )
    profile: str | None = setting(None, "Folder for a trace of one more call, which xprof opens; it is made.")
    seed: int = setting(1234, "Seed of weights, prompts and simulated acceptance.", least=0)

    @property
    def D(self) -> int:
        """Rows a request in a forward."""
        return 1 if self.drafter == "none" else self.num_draft_tokens

    @property
    def copy_bytes(self) -> int:
        """Of the array that is copied. A call that copies less takes a good part of its time to start."""
        return (self.copy_mb or (4096 if jax.default_backend() == "gpu" else 256)) << 20


@dataclasses.dataclass(frozen=True)
class Row:
    """A batch size, timed.

    Attributes:
      B: requests.
      us: microseconds a round.
      host_us: microseconds until a call returns.
      copied: bytes a microsecond of the copy, call by call.
      weights, kv: bytes a round.
      emitted: int[B, rounds], tokens.
      proposed: drafts, all rounds together.
      rounds: that ran in a call.
      leaves, layers: arrays of the state; layers of target and draft model.
      transfers: that stopped a call in which none was allowed, "" if nothing did.
    """

    B: int
    us: Samples
    host_us: Samples
    copied: Samples
    weights: int
    kv: float
    emitted: np.ndarray
    proposed: int
    rounds: int
    leaves: int
    layers: int
    transfers: str

    @property
    def of_copy(self) -> float:
        """Bytes over the bandwidth of the copy, over the time of a round."""
        return (self.weights + self.kv) / self.copied.median / self.us.median

    @property
    def accept_length(self) -> float:
        """Tokens a round and request."""
        return float(self.emitted.mean())

    @property
    def tokens_per_second(self) -> float:
        return self.B * self.accept_length / self.us.median * 1e6

    @property
    def leaves_allowed(self) -> int:
        return max(MOST_LEAVES, BASE_LEAVES + LAYER_LEAVES * self.layers)


def run(settings: Settings, task: Task = quiet) -> Report:
    """Times.

    Raises:
      InputError: shapes that cannot be, models that do not fit, a folder that holds something. Nothing has run then.
    """
    batches, rate = parse_batch(settings.batch), parse_rate(settings)
    check_folder(settings.profile)
    sizes = settings.D, settings.context, settings.rounds, settings.page_size
    configs = [make_config(B, *sizes) for B in batches]
    check_memory(settings, configs)
    with task("weights", "drawing" if is_random(settings.config) else "loading"):
        models = make_models(settings.config, settings.drafter, settings.dtype, settings.seed)
        copy = copy_chain(settings.copy_bytes)
    rows = []
    for config in configs:
        # The first batch size is what is traced.
        folder = settings.profile if not rows else None
        rows.append(measure(settings, models, config, rate, copy, folder, task))
    return report(settings, rows, rate)


def parse_batch(words: str) -> list[int]:
    """Batch sizes, each once, in the order given.

    Example:
      >>> parse_batch("1 16")
      [1, 16]
    """
    if wrong := [word for word in words.split() if not word.isdecimal() or int(word) < 1]:
        raise InputError(f"batch: {wrong[0]!r} is no number of requests, which is at least 1")
    if not words.split():
        raise InputError(f"batch={words!r}: there is nothing to time; give a number of requests")
    return list(dict.fromkeys(map(int, words.split())))


def parse_rate(settings: Settings) -> float | None:
    """The rate of simulated acceptance; None where the target decides."""
    word = settings.simulated_acceptance
    if word is None:
        return None
    try:
        rate = float(word)
    except ValueError:
        rate = math.nan
    if not 0 <= rate <= 1:
        raise InputError(f"simulated_acceptance={word!r}: must be a probability, 0 to 1; leave it out to simulate none")
    refuse_simulation(settings.drafter, settings.D)
    return rate


def check_memory(settings: Settings, configs: Sequence[SpecConfig]) -> None:
    """Raises InputError where weights, states and the copied array are more than there is room for."""
    shapes = make_models(settings.config, settings.drafter, settings.dtype, None)
    needed, there = bytes_needed(shapes, configs) + settings.copy_bytes, memory_there()
    if needed > there:
        raise InputError(
            f"config={settings.config}, batch={settings.batch!r}, context={settings.context}: needs "
            f"{needed / 1e9:.1f} GB in {settings.dtype}, and jax has {there / 1e9:.1f} on {jax.default_backend()}; "
            "take a smaller one, --config=embedded say"
        )


# What is timed


def measure(
    settings: Settings,
    models: Models,
    config: SpecConfig,
    rate: float | None,
    copy: Chain,
    folder: str | None,
    task: Task,
) -> Row:
    """One batch size: a state, a compiled loop, timed calls in turn with the copy.

    Args:
      copy: what `copy_chain` makes.
      folder: for a trace of one more call; None for no trace.
    """
    B, D = config.batch_size, config.num_draft_tokens
    spec = make_spec_step(models.target.model, models.drafter, config)
    table = None if rate is None else simulate(rate, settings.rounds, B, D - 1, settings.seed)
    with task(f"B={B}", "filling the cache"):
        state = make_state(
            spec, models, draw_ids(settings.config, models.target, B, settings.context, settings.seed), settings.seed
        )
    call, leaves = rounds_of(spec, settings.rounds, table), len(jax.tree.leaves(state))
    with task(f"B={B}", f"compiling {settings.rounds} rounds"):
        for _ in range(WARM_UP):
            state, told = jax.block_until_ready(call(models.params, state))
    us, host, copied = [], [], []
    with task(f"B={B}", f"timing {settings.runs} calls"):
        for _ in range(settings.runs):
            copied.append(2 * copy.carried[0].nbytes / copy.advance())
            start = time.perf_counter()
            state, told = call(models.params, state)
            returned = time.perf_counter()
            jax.block_until_ready((state, told))
            us.append((time.perf_counter() - start) * 1e6 / settings.rounds)
            host.append((returned - start) * 1e6)
    with task(f"B={B}", "a call in which no transfer is allowed"):
        state, told, transfers = guarded(call, models.params, state, told)
    if folder is not None:
        with task(f"B={B}", "tracing one call"), traced(folder):
            state, told = jax.block_until_ready(call(models.params, state))
    done, emitted, proposed = int(told.rounds), np.asarray(told.emitted), int(told.proposed)
    if int(told.status) != OK:
        done = 0
    return Row(
        B=B,
        us=Samples(tuple(us)),
        host_us=Samples(tuple(host)),
        copied=Samples(tuple(copied)),
        weights=weight_bytes(models, B, D),
        kv=kv_bytes(models, emitted, settings.context, D),
        emitted=emitted,
        proposed=proposed,
        rounds=done,
        leaves=leaves,
        layers=len(spec.target.layers) + (0 if models.draft is None else models.draft.config.num_hidden_layers),
        transfers=transfers,
    )


def guarded(call: Callable, params: Any, state: SpecState, told: Any) -> tuple[SpecState, Any, str]:
    """A call that may move nothing between host and device: state, what it tells, and the error if it tried."""
    try:
        with jax.transfer_guard("disallow_explicit"):
            state, told = call(params, state)
        return *jax.block_until_ready((state, told)), ""
    except jax.errors.JaxRuntimeError as error:
        return state, told, str(error).splitlines()[0]


# What is told


def goals(settings: Settings, rows: Sequence[Row], judged: bool) -> list[dict[str, Any]]:
    """What was to be reached, and whether it was; `met` is None where it is not judged.

    Args:
      judged: whether times mean anything.
    """
    found = []
    for row in rows:
        moved = None if row.transfers else 0
        found.append(_goal("host transfers of a call", row, "at most", 0, moved, not row.transfers))
        fits = row.leaves <= row.leaves_allowed
        found.append(_goal("leaves of the state", row, "at most", row.leaves_allowed, row.leaves, fits))
        alike = all(getattr(settings, name) == value for name, value in JUDGED.items())
        if alike and row.B == 1 and settings.drafter == "ngram":
            met = row.of_copy >= SHARE if judged else None
            found.append(_goal("share of the copy bandwidth", row, "at least", SHARE, row.of_copy, met))
    return found


def _goal(goal: str, row: Row, bound: str, limit: float, value: float | None, met: bool | None) -> dict[str, Any]:
    return {"goal": goal, "at": f"B={row.B}", "bound": bound, "limit": limit, "value": value, "met": met}


def acceptance_of(rate: float | None) -> str:
    """What decides how many drafts count, in words that stand beside every figure of it."""
    return "the target's" if rate is None else f"SIMULATED at {rate:g}, not measured"


def title_of(settings: Settings, rate: float | None) -> str:
    """What was timed, and what in it is not real."""
    weights = "random weights" if is_random(settings.config) else "its own weights"
    title = f"{settings.config}, {weights}, {settings.dtype}, drafter {settings.drafter}"
    return title if rate is None else f"{title}, acceptance {acceptance_of(rate)}"


def report(settings: Settings, rows: Sequence[Row], rate: float | None) -> Report:
    """Tables, samples, goals, and what is wrong."""
    on_gpu = jax.default_backend() == "gpu"
    reached = goals(settings, rows, on_gpu)
    failures = [
        f"B={row.B}: {row.rounds} of {settings.rounds} rounds ran; pages ran out or requests ended, so no time is a "
        "round's"
        for row in rows
        if row.rounds != settings.rounds
    ]
    failures += [f"B={row.B}: a transfer between host and device: {row.transfers}" for row in rows if row.transfers]
    weights = "random" if is_random(settings.config) else "own"
    named = {"weights": weights, "acceptance": acceptance_of(rate), "acceptance_is_simulated": rate is not None}
    lines = _notes(settings, rows, rate, on_gpu)
    results = {
        "title": title_of(settings, rate),
        **named,
        "rows": [_entry(row) for row in rows],
        "copy": {"bytes": settings.copy_bytes, "turns": COPY_TURNS},
        "goals": reached,
        "notes": lines,
    }
    tables = [
        [(title_of(settings, rate),)],
        _table(settings, rows, rate),
        _host_table(rows),
        _goal_table(reached),
        [(line,) for line in lines],
    ]
    return Report(tables, results, failures, environment=named)


def _entry(row: Row) -> dict[str, Any]:
    return {
        "batch": row.B,
        "us_a_round": row.us.to_json(),
        "host_us_a_call": row.host_us.to_json(),
        "copy_gb_per_s": [each / 1e3 for each in row.copied.us],
        "weight_bytes": row.weights,
        "kv_bytes": row.kv,
        "of_copy": row.of_copy,
        "tokens_a_round": row.accept_length,
        "tokens_per_second": row.tokens_per_second,
        "proposed_drafts": row.proposed,
        "emitted": row.emitted.tolist(),
        "rounds_a_call": row.rounds,
        "dispatches_a_call": 1,
        "state_leaves": row.leaves,
        "state_leaves_allowed": row.leaves_allowed,
        "host_transfers": None if row.transfers else 0,
    }


def _table(settings: Settings, rows: Sequence[Row], rate: float | None) -> list[Sequence[str]]:
    said = "" if rate is None else "SIMULATED "
    head = ("round" if rate is None else "round, SIMULATED acceptance", "D", "context", "us a round", "quartiles")
    head += ("GB weights", "GB K/V", "GB/s copy", "of copy", f"{said}tokens a round", f"{said}tokens/s")
    table: list[Sequence[str]] = [head]
    for row in rows:
        table.append(
            (
                f"B={row.B}",
                str(settings.D),
                str(settings.context),
                f"{row.us.median:.1f}",
                " to ".join(f"{each:.1f}" for each in row.us.quartiles),
                f"{row.weights / 1e9:.3f}",
                f"{row.kv / 1e9:.3f}",
                f"{row.copied.median / 1e3:.1f}",
                f"{row.of_copy:.3f}",
                f"{row.accept_length:.2f}",
                f"{row.tokens_per_second:.1f}",
            )
        )
    return table


def _host_table(rows: Sequence[Row]) -> list[Sequence[str]]:
    table = [("host, a call", "rounds", "dispatches", "transfers", "state leaves", "us until it returns")]
    for row in rows:
        transfers = "some" if row.transfers else "0"
        table.append((f"B={row.B}", str(row.rounds), "1", transfers, str(row.leaves), f"{row.host_us.median:.1f}"))
    return table


def _goal_table(found: Sequence[dict[str, Any]]) -> list[Sequence[str]]:
    said = {True: "met", False: "MISSED", None: "not judged"}
    table = [("goal", "at", "limit", "value", "")]
    for goal in found:
        value = "some" if goal["value"] is None else f"{goal['value']:.3g}"
        table.append((goal["goal"], goal["at"], f"{goal['bound']} {goal['limit']:g}", value, said[goal["met"]]))
    return table


def _notes(settings: Settings, rows: Sequence[Row], rate: float | None, on_gpu: bool) -> list[str]:
    found = []
    if rate is not None:
        found.append(
            f"Acceptance is SIMULATED: each draft counts with probability {rate:g}, whatever the target says. Tokens a "
            "round and tokens/s are made up of it; they say nothing of a drafter or a model."
        )
    elif is_random(settings.config):
        found.append("Weights are random: nobody's drafts are right, so tokens a round and tokens/s are the least.")
    if not on_gpu:
        found.append("There is no GPU: these times mean nothing.")
    copies = statistics.median(row.copied.median for row in rows) / 1e3
    found += [
        f"Copy: {copies:.1f} GB/s read and written, calls of {COPY_TURNS} x {settings.copy_bytes >> 20} MiB, in turn "
        "with the rounds.",
        f"Medians of {settings.runs} calls of {settings.rounds} rounds, one dispatch each, from {settings.context} "
        "committed tokens on; the state is put back within the call.",
        "Transfers: one more call ran with every transfer between host and device forbidden.",
    ]
    if settings.drafter == "draft_lm":
        found.append("Weights and K/V include the draft model's, once for each of its D - 1 forwards.")
    return found
