"""The round of a sparse model with fused metadata and without: the same requests, the same tokens, and the time.

The two arms differ in `SpecConfig.kpool_metadata_fusion` and in nothing else. No value may depend on it, so ids, verify
counts, accept lengths and log-probabilities must be equal, the last to the bit; where they are not, no ratio is given.

    warm-up       each arm, a few tokens: compiles the program that is timed, and runs it once
    exact run     each arm, with log-probabilities
    throughput    the arms in turn; and the same requests with one token each, which is the prefill alone
    metadata      those of a round alone, phase by phase, cut out of the round (see `jaxspec.benchmarks.metadata_cut`)
                  and timed in chains at what the first round reads (see `jaxspec.benchmarks.timing`)

A round takes what a run takes without its prefill, over the rounds of its longest request. The share of the metadata is
the sum over the phases, the chain's touch taken off, over that. What a round computes of the metadata and nobody reads,
XLA drops there and here; a kernel writes it all the same.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxspec import Generation, InputError, Params, SpecConfig, generate, init_state, load_model, make_spec_step
from jaxspec.benchmarks.base import Report, Task, quiet, setting
from jaxspec.benchmarks.metadata_cut import cut
from jaxspec.benchmarks.timing import Samples, compile_all, place_of_touch, time_in_turn
from jaxspec.benchmarks.unified_ab import draw_prompts
from jaxspec.drafting import Drafter
from jaxspec.drafting.choose import DRAFTERS, make_drafter, page_size_for
from jaxspec.models import Checkpoint
from jaxspec.steps import SpecStep

SUMMARY = "Compares a sparse model's round with fused and with ordinary metadata: outputs, time, share of metadata."

OFF, ON = "off", "on"
ARMS = (OFF, ON)
WARM_UP, EXACT, PREFILL, THROUGHPUT = "warm-up", "exact", "prefill", "throughput"


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is decoded, and how often."""

    model: str = setting("kpool", "The target, with sparse layers: an embedded model's name, or a folder.")
    drafter: str = setting("mtp", "Who proposes tokens.", choices=DRAFTERS[:-1])  # not "none"
    draft_model: str | None = setting(None, "The draft: a folder, or for draft_lm a name; by default what ships.")
    num_requests: int = setting(8, "Requests, all decoded together.", least=1)
    prompt_len: int = setting(512, "Tokens a prompt.", least=1)
    max_new_tokens: int = setting(512, "Tokens a completion; stop ids are ignored.", least=2)
    num_draft_tokens: int = setting(4, "D, tokens verified per request and round.", least=2)
    page_size: int = setting(0, "Tokens a page, a power of two; 0 is 64 pools, what fused metadata take.", least=0)
    runs: int = setting(10, "Throughput runs of each arm, the arms in turn.", least=10)
    chain_runs: int = setting(20, "Timed calls of each chain of metadata, in turn.", least=10)
    steps: int = setting(32, "Steps that a turn of a chain's loop unrolls.", least=1)
    turns: int = setting(20, "Turns of a chain's loop a call.", least=1)
    seed: int = setting(1234, "Seed of the prompts.", least=0)
    dtype: str = setting("float32", "What is computed in.", choices=("float32", "bfloat16"))
    kernel_backend: str | None = setting(
        None,
        "Who runs the kernels; by default what the device has. interpret runs on a CPU, slowly.",
        choices=("triton", "mosaic", "interpret", "reference"),
    )


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Models, requests, and a configuration for each arm."""

    target: Checkpoint
    drafter: Drafter
    params: Params
    prompts: list[list[int]]
    configs: dict[str, SpecConfig]

    def step(self, arm: str) -> SpecStep:
        return make_spec_step(self.target.model, self.drafter, self.configs[arm])


@dataclasses.dataclass(frozen=True)
class Run:
    """One generation: `arm` is one of ARMS, `kind` one of WARM_UP, EXACT, PREFILL, THROUGHPUT."""

    arm: str
    kind: str
    result: Generation


@dataclasses.dataclass(frozen=True)
class Part:
    """The metadata of one phase of an arm's round: microseconds of its chain, and of one with the touch alone."""

    work: Samples
    touch: Samples

    @property
    def cost(self) -> float:
        return self.work.median - self.touch.median


def run(settings: Settings, task: Task = quiet) -> Report:
    """Runs the experiment.

    Raises:
      InputError: models, requests or shapes that cannot be; or metadata that are not fused here.
    """
    with task("models", "loading"):
        experiment = prepare(settings)
    done = []

    def execute(arm: str, kind: str, told: str) -> None:
        with task(f"fusion {arm}", told):
            done.append(Run(arm, kind, decode(experiment, arm, kind)))

    for kind in (WARM_UP, EXACT):
        for arm in ARMS:
            execute(arm, kind, kind)
    failures = check(experiment, done)
    parts = {}
    if not failures:
        for number in range(1, settings.runs + 1):
            for kind in (PREFILL, THROUGHPUT):
                for arm in ARMS:
                    execute(arm, kind, f"{kind} {number} of {settings.runs}")
        failures = check(experiment, done)
    if not failures:
        with task("metadata", "of a round alone, in chains"):
            parts = time_metadata(experiment, settings)
    return report(settings, experiment, done, parts, failures)


def prepare(settings: Settings) -> Experiment:
    """Loads the models, draws the prompts, and makes sure that the arms differ."""
    target = load_model(settings.model, settings.dtype)
    sparse = target.model.sparse
    if sparse is None:
        raise InputError(f"model={settings.model}: it has no sparse layers, so there are no KPool metadata to fuse")
    drafter, draft_params = make_drafter(
        settings.drafter, target, draft_model=settings.draft_model, dtype=settings.dtype
    )
    prompts = draw_prompts(target, settings.num_requests, settings.prompt_len, settings.seed)
    base = SpecConfig(
        batch_size=settings.num_requests,
        num_draft_tokens=settings.num_draft_tokens,
        context_len=settings.prompt_len + settings.max_new_tokens,
        max_new_tokens=settings.max_new_tokens,
        page_size=settings.page_size or page_size_for(target),
        kernel_backend=settings.kernel_backend,
    )
    configs = {arm: dataclasses.replace(base, kpool_metadata_fusion=arm == ON) for arm in ARMS}
    if not make_spec_step(target.model, drafter, configs[ON]).config.kpool_metadata_fusion:
        raise InputError(
            f"page_size={base.page_size} on {jax.devices()[0].device_kind}: the metadata cannot be fused; it takes "
            f"{64 * sparse.pool} tokens a page and a CUDA device, or on a CPU --kernel_backend=interpret and few tokens"
        )
    return Experiment(target, drafter, Params(target.params, draft_params), prompts, configs)


def decode(experiment: Experiment, arm: str, kind: str) -> Generation:
    """One run, in one dispatch and from a fresh state."""
    config = dataclasses.replace(experiment.configs[arm], logprobs=kind == EXACT)
    few = {WARM_UP: min(32, config.max_new_tokens), PREFILL: 1}
    return generate(
        experiment.target.model,
        experiment.params,
        experiment.prompts,
        drafter=experiment.drafter,
        max_new_tokens=few.get(kind, config.max_new_tokens),
        loop="device",
        config=config,
    )


def check(experiment: Experiment, runs: Sequence[Run]) -> list[str]:
    """What differs between the arms although it must not, run by run, a line each."""
    found = []
    for kind in (WARM_UP, EXACT, PREFILL, THROUGHPUT):
        off, on = ([item.result for item in runs if (item.arm, item.kind) == (arm, kind)] for arm in ARMS)
        for number, pair in enumerate(zip(off, on, strict=True), start=1):
            told = f"{kind} {number}" if len(off) > 1 else kind
            found += [f"{told}: {line}" for line in differences(*pair)]
    for item in runs:
        short = [r for r in item.result.requests if r.finish_reason != "length"]
        if short:
            found.append(f"fusion {item.arm}, {item.kind}: {len(short)} requests ended early, {short[0].finish_reason}")
    return found


def differences(off: Generation, on: Generation) -> list[str]:
    """What differs between two generations of the same requests; log-probabilities must be the same to the bit."""
    pairs = list(zip(off.requests, on.requests, strict=True))
    found = []
    for name, field in (("ids", "token_ids"), ("verify counts", "verify_count"), ("log-probabilities", "logprobs")):
        wrong = [number for number, (a, b) in enumerate(pairs) if getattr(a, field) != getattr(b, field)]
        if wrong:
            found.append(f"{name} differ in {len(wrong)} of {len(pairs)} requests, request {wrong[0]} first")
    if off.accept_length != on.accept_length:
        found.append(f"accept length is {off.accept_length} with fusion off, {on.accept_length} with it on")
    return found


def time_metadata(experiment: Experiment, settings: Settings) -> dict[str, dict[str, Part]]:
    """{arm: {phase: its metadata}}, at what the first round behind the prefill reads."""
    params, parts, works = experiment.params, {}, {}
    config = experiment.configs[OFF]
    state = init_state(experiment.target.model, experiment.drafter, config, experiment.prompts)
    state, _ = experiment.step(OFF).prefill(params, state)
    for arm in ARMS:
        cuts, values = cut(experiment.step(arm), params, state)
        found = jax.device_get(jax.jit(values)(params, state))
        for piece, reads in zip(cuts, found, strict=True):
            work = piece.work([np.asarray(read) for read in reads], config.batch_size)
            works[arm, piece.phase, True] = work
            works[arm, piece.phase, False] = dataclasses.replace(work, run=lambda vectors, tables, out: (vectors, out))
    touch = settings.kernel_backend if settings.kernel_backend in ("interpret", "reference") else place_of_touch()
    samples = time_in_turn(
        compile_all(works, steps=settings.steps, turns=settings.turns, backend=touch), settings.chain_runs
    )
    for arm, phase, real in samples:
        if real:
            part = Part(samples[arm, phase, True], samples[arm, phase, False])
            parts.setdefault(arm, {})[phase] = part
    return parts


# What is told


def figures(runs: Sequence[Run], parts: dict[str, dict[str, Part]]) -> dict[str, Any]:
    """Medians and what follows of them, arm by arm."""
    found = {}
    for arm in ARMS:
        mine = {kind: [item.result for item in runs if (item.arm, item.kind) == (arm, kind)] for kind in _TIMED}
        rates = [result.tokens_per_second for result in mine[THROUGHPUT]]
        seconds = statistics.median(result.seconds for result in mine[THROUGHPUT])
        prefill = statistics.median(result.seconds for result in mine[PREFILL])
        rounds = max(request.verify_count for request in mine[THROUGHPUT][0].requests)
        round_us = (seconds - prefill) / rounds * 1e6
        metadata = sum(part.cost for part in parts[arm].values())
        found[arm] = {
            "tokens_per_second": {"median": statistics.median(rates), "least": min(rates), "most": max(rates)},
            "all_tokens_per_second": rates,
            "seconds": [result.seconds for result in mine[THROUGHPUT]],
            "prefill_seconds": [result.seconds for result in mine[PREFILL]],
            "rounds": rounds,
            "round_us": round_us,
            "metadata_us": metadata,
            "metadata_share": metadata / round_us,
        }
    return found


_TIMED = (PREFILL, THROUGHPUT)


def report(
    settings: Settings,
    experiment: Experiment,
    runs: Sequence[Run],
    parts: dict[str, dict[str, Part]],
    failures: list[str],
) -> Report:
    """What agrees and, if all does, what it takes."""
    exact = {arm: next(item.result for item in runs if (item.arm, item.kind) == (arm, EXACT)) for arm in ARMS}
    rows = [("exact run", *(f"fusion {arm}" for arm in ARMS), "equal")]
    rows.append(("ids", *(str(sum(map(len, exact[arm].token_ids))) for arm in ARMS), _equal(exact, "token_ids")))
    counts = (str(sum(request.verify_count for request in exact[arm].requests)) for arm in ARMS)
    rows.append(("verify counts", *counts, _equal(exact, "verify_count")))
    lengths = [exact[arm].accept_length for arm in ARMS]
    rows.append(("accept length", *map(_length, lengths), "yes" if lengths[0] == lengths[1] else "NO"))
    rows.append(("log-probabilities", "", "", _equal(exact, "logprobs")))
    results = {
        "exact": {arm: exact[arm].to_json() for arm in ARMS},
        "configs": {arm: dataclasses.asdict(config) for arm, config in experiment.configs.items()},
        "prompts": experiment.prompts,
    }
    lines = ["Equal: to the last bit, request by request."]
    if failures:
        return Report([rows, [("Outputs differ, so nothing was compared in time.",)]], results, failures)
    told = figures(runs, parts)
    off, on = told[OFF], told[ON]
    rate, spread = [("tokens/s", *(f"fusion {arm}" for arm in ARMS), "on / off")], []
    for number, pair in enumerate(zip(*(told[arm]["all_tokens_per_second"] for arm in ARMS), strict=True), start=1):
        rate.append((f"run {number}", *(f"{value:.1f}" for value in pair), f"{pair[1] / pair[0]:.4f}"))
    medians = [told[arm]["tokens_per_second"]["median"] for arm in ARMS]
    rate.append(("median", *(f"{value:.1f}" for value in medians), f"{medians[1] / medians[0]:.4f}"))
    spread = (told[arm]["tokens_per_second"] for arm in ARMS)
    rate.append(("(most - least) / median", *(f"{(s['most'] - s['least']) / s['median']:.2%}" for s in spread)))

    table = [("metadata, us", *(f"fusion {arm}" for arm in ARMS), "on / off")]
    for phase in dict.fromkeys(phase for arm in ARMS for phase in parts[arm]):
        costs = [parts[arm][phase].cost for arm in ARMS]
        table.append((phase, *(f"{cost:.2f}" for cost in costs), _ratio(*costs)))
    for title, key, form in (
        ("of a round", "metadata_us", ".2f"),
        ("a round, all in all", "round_us", ".1f"),
        ("share of the round", "metadata_share", ".2%"),
    ):
        table.append((title, *(format(told[arm][key], form) for arm in ARMS), _ratio(off[key], on[key])))
    lines += [
        f"Throughput: medians of {settings.runs} runs, in turn. A round: a run without its prefill, over its rounds.",
        f"Metadata: {settings.chain_runs} calls of {settings.turns} x {settings.steps} steps, each with the arrays at "
        "other places, less the touch.",
    ]
    if settings.kernel_backend in ("interpret", "reference"):
        lines.append(f"Kernels: {settings.kernel_backend}, not compiled ones. These times say nothing of a GPU's.")
    results |= {
        "arms": told,
        "metadata": {
            arm: {
                phase: {"us": part.cost, "chain": part.work.to_json(), "touch": part.touch.to_json()}
                for phase, part in parts[arm].items()
            }
            for arm in ARMS
        },
        "on_over_off": {
            "tokens_per_second": medians[1] / medians[0],
            "round": on["round_us"] / off["round_us"],
            "metadata": on["metadata_us"] / off["metadata_us"],
        },
        "notes": lines,
    }
    return Report([rows, rate, table, [(line,) for line in lines]], results, failures)


def _equal(exact: dict[str, Generation], field: str) -> str:
    pairs = [
        getattr(a, field) == getattr(b, field) for a, b in zip(*(exact[arm].requests for arm in ARMS), strict=True)
    ]
    return f"{sum(pairs)}/{len(pairs)}"


def _length(value: float | None) -> str:
    return "-" if value is None else f"{value:.8f}"


def _ratio(off: float, on: float) -> str:
    return f"{on / off:.4f}" if off > 0 else "-"
