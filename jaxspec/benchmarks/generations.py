"""Whole generations, plain and with each drafter: tokens a second, accept length, dispatches; ids compared first.

Every generation is one call of `jaxspec.generate` with its device loop. Each arm runs once untimed, which compiles its
program and gives the ids that are compared with those of plain decoding; then the arms run in turn. Stop ids are
ignored, so every request emits `max_new_tokens` tokens.

In float32 the ids are equal whoever drafts, and a difference is an error. In bfloat16 the products of a plain step and
of a verify, of other shapes, may round otherwise, so a near-tie may go either way; how many requests differ is told.
Random weights say nothing of a drafter: of them time and dispatches are worth a look, accept lengths are not.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from jaxspec import Generation, InputError, Params, SpecConfig, generate, make_spec_step
from jaxspec.benchmarks.base import Report, Task, quiet, setting
from jaxspec.benchmarks.round_problem import Models, bytes_needed
from jaxspec.benchmarks.shapes import CONFIGS, draw_ids, is_random, make_target, memory_there
from jaxspec.benchmarks.traces import check_folder, traced
from jaxspec.drafting import Drafter
from jaxspec.drafting.choose import DRAFTERS, fitting_drafters, make_drafter

SUMMARY = "Times whole generations, plain and with each drafter: tokens/s, accept length, dispatches; ids are compared."

PLAIN = "none"


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is generated, and how often."""

    config: str = setting("embedded", "The embedded target, or public shapes with random weights.", choices=CONFIGS)
    drafter: str = setting("fitting", "Who proposes tokens; by default all that fit.", choices=("fitting", *DRAFTERS))
    num_requests: int = setting(8, "Requests decoded together.", least=1)
    prompt_len: int = setting(256, "Tokens a prompt.", least=1)
    max_new_tokens: int = setting(512, "Tokens a completion; stop ids are ignored.", least=1)
    num_draft_tokens: int = setting(8, "D, tokens verified per request and round.", least=1)
    dtype: str = setting("float32", "What is computed in.", choices=("float32", "bfloat16"))
    page_size: int = setting(64, "Tokens a page, a power of two.", least=1)
    runs: int = setting(3, "Timed generations of each arm, the arms in turn.", least=1)
    profile: str | None = setting(
        None, "Folder for a trace of one more generation, the last arm's, which xprof opens; it is made."
    )
    seed: int = setting(1234, "Seed of the prompts and of random weights.", least=0)


@dataclasses.dataclass(frozen=True)
class Arm:
    """Who drafts, and the shapes."""

    name: str
    drafter: Drafter | None
    params: Params
    config: SpecConfig


@dataclasses.dataclass(frozen=True)
class Result:
    """What an arm did: the untimed generation, then the timed ones."""

    name: str
    first: Generation
    timed: tuple[Generation, ...]

    @property
    def tokens_per_second(self) -> float:
        """The median."""
        return statistics.median(each.tokens_per_second for each in self.timed)

    def equal(self, other: "Result") -> int:
        """Requests with equal ids."""
        return sum(a == b for a, b in zip(self.first.token_ids, other.first.token_ids, strict=True))


def run(settings: Settings, task: Task = quiet) -> Report:
    """Compares, then times.

    Raises:
      InputError: shapes that cannot be, models that do not fit, a folder that holds something. Nothing has run then.
    """
    check_folder(settings.profile)
    check_memory(settings)
    with task("models", "drawing" if is_random(settings.config) else "loading"):
        target = make_target(settings.config, settings.dtype, settings.seed)
        arms = make_arms(settings, target)
    prompts = draw_ids(settings.config, target, settings.num_requests, settings.prompt_len, settings.seed)
    first, timed = {}, {arm.name: [] for arm in arms}
    for arm in arms:
        with task(arm.name, "compiling"):
            first[arm.name] = execute(target.model, arm, prompts)
    for number in range(1, settings.runs + 1):
        with task(f"run {number} of {settings.runs}", f"{len(arms)} arms in turn"):
            for arm in arms:
                timed[arm.name].append(execute(target.model, arm, prompts))
    if settings.profile is not None:
        with task(arms[-1].name, "tracing one generation"), traced(settings.profile):
            execute(target.model, arms[-1], prompts)
    return report(settings, [Result(name, first[name], tuple(timed[name])) for name in timed])


def make_config(settings: Settings, num_draft_tokens: int) -> SpecConfig:
    """The shapes of an arm."""
    return SpecConfig(
        batch_size=settings.num_requests,
        num_draft_tokens=num_draft_tokens,
        context_len=settings.prompt_len + settings.max_new_tokens,
        max_new_tokens=settings.max_new_tokens,
        page_size=settings.page_size,
    )


def check_memory(settings: Settings) -> None:
    """Raises InputError where the target's weights and its state are more than there is room for."""
    target = make_target(settings.config, settings.dtype, None)
    config = make_config(settings, settings.num_draft_tokens)
    needed, there = bytes_needed(Models(settings.config, target, None, None), [config]), memory_there()
    if needed > there:
        raise InputError(
            f"config={settings.config}, num_requests={settings.num_requests}: needs {needed / 1e9:.1f} GB in "
            f"{settings.dtype}, and jax has {there / 1e9:.1f}; take a smaller one, --config=embedded say"
        )


def make_arms(settings: Settings, target: Any) -> list[Arm]:
    """Plain decoding first. Binds every step once, so that what cannot be is told before anything runs."""
    names = fitting_drafters(target) if settings.drafter == "fitting" else [settings.drafter]
    arms = []
    for name in dict.fromkeys((PLAIN, *names)):
        drafter, params = make_drafter(name, target, dtype=settings.dtype)
        config = make_config(settings, settings.num_draft_tokens if drafter else 1)
        make_spec_step(target.model, drafter, config)
        arms.append(Arm(name, drafter, Params(target.params, params), config))
    return arms


def execute(model: Any, arm: Arm, prompts: Sequence[Sequence[int]]) -> Generation:
    """One generation, in one dispatch."""
    return generate(model, arm.params, prompts, drafter=arm.drafter, loop="device", config=arm.config)


def report(settings: Settings, results: Sequence[Result]) -> Report:
    """The table, all figures, and ids that differ where they must not."""
    plain, count = results[0], settings.num_requests
    weights = "random" if is_random(settings.config) else "own"
    title = f"{settings.config}, {weights} weights, {settings.dtype}, {count} requests of {settings.prompt_len} tokens"
    title += f" and {settings.max_new_tokens} more, D = {settings.num_draft_tokens}"
    table: list[Sequence[str]] = [
        ("drafter", "tokens/s", "of plain", "accept length", "rounds", "dispatches", "ids equal")
    ]
    entries, failures = [], []
    most = max(each.dispatches for result in results for each in result.timed)
    for result in results:
        equal, length = result.equal(plain), result.first.accept_length
        rounds = sum(request.verify_count for request in result.first.requests)
        ratio = result.tokens_per_second / plain.tokens_per_second if plain.tokens_per_second else None
        if equal < count and settings.dtype == "float32":
            failures.append(f"{result.name}: ids differ from plain decoding's in {count - equal} of {count} requests")
        table.append(
            (
                result.name,
                f"{result.tokens_per_second:.1f}",
                "-" if ratio is None else f"{ratio:.3f}",
                "-" if length is None else f"{length:.4f}",
                str(rounds),
                str(max(each.dispatches for each in result.timed)),
                f"{equal}/{count}",
            )
        )
        entries.append(
            {
                "drafter": result.name,
                "tokens_per_second": [each.tokens_per_second for each in result.timed],
                "seconds": [each.seconds for each in result.timed],
                "over_plain": ratio,
                "accept_length": length,
                "rounds": rounds,
                "dispatches": [each.dispatches for each in result.timed],
                "equal": equal,
                "ids": result.first.token_ids,
            }
        )
    goal = {"goal": "dispatches of a generation", "bound": "at most", "limit": 1, "value": most, "met": most <= 1}
    goals = [
        ("goal", "limit", "value", ""),
        (goal["goal"], "at most 1", str(most), "met" if goal["met"] else "MISSED"),
    ]
    notes = [
        f"Medians of {settings.runs} generations, arms in turn, compilation excluded. Rounds: of all requests together."
    ]
    if weights == "random":
        notes.append("Weights are random: accept lengths, and so tokens/s, say nothing of a drafter.")
    if settings.dtype != "float32":
        notes.append(f"In {settings.dtype} near-ties may go either way, so ids that differ are no error.")
    named = {"weights": weights}
    return Report(
        tables=[[(title,)], table, goals, [(line,) for line in notes]],
        results={"title": title, **named, "arms": entries, "goals": [goal], "notes": notes},
        failures=failures,
        environment=named,
    )
