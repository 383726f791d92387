"""Static against unified memory: the same requests, the same bytes, must give the same tokens in the same rounds.

The static arm has a pool for each kind of page, the SWA pool `swa_ratio` times as large as the FULL pool in tokens. Its
SWA pool is what all requests need at once, so the FULL pool is larger than they need: what a fixed ratio wastes. The
same holds of the states of a model with recurrent layers, `state_ratio` times the bytes of K and V. The unified arm
has one pool of as many bytes, the draft's buffers counted, since its lanes hold the draft's rows.

    warm-up      each arm, a few tokens: compiles the programs that are timed, and runs them once
    exact run    each arm, with log-probabilities
    throughput   the arms in turn, without
    plain        the requests once more as `jaxspec.generate` runs them with a static pool of its own choice

Every run starts from a fresh state. Stop ids are ignored, so every request emits `max_new_tokens` tokens.

The experiment is that of SGLang pull request 44973, with a drafter of this library.
"""

import bisect
import dataclasses
import fractions
import json
import math
import statistics
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxspec import (
    Generation,
    Model,
    Params,
    SpecConfig,
    generate,
    init_state,
    load_model,
    make_spec_step,
)
from jaxspec.benchmarks.base import Report, Task, quiet, setting
from jaxspec.cache.layers import ACCUMULATED
from jaxspec.drafting import Drafter
from jaxspec.drafting.choose import DRAFTERS, make_drafter
from jaxspec.models import Checkpoint, embedded_path
from jaxspec.steps.fusion import metadata_path
from jaxspec.steps.memory import memory_bytes

SUMMARY = "Compares unified with static memory of equal size: ids, verify counts, log-probabilities, tokens/s."

ARMS = ("static", "unified")
WARM_UP, EXACT, THROUGHPUT, PLAIN = "warm-up", "exact", "throughput", "plain"


@dataclasses.dataclass(frozen=True)
class Settings:
    """The experiment's numbers; the defaults are those of the reference."""

    num_requests: int = setting(48, "Requests, all decoded together: as many batch slots.", least=1)
    prompt_len: int = setting(512, "Tokens a prompt.", least=1)
    max_new_tokens: int = setting(2048, "Tokens a completion; stop ids are ignored.", least=1)
    drafter: str = setting("draft_lm", "Who proposes tokens.", choices=DRAFTERS[:-1])  # not "none"
    num_draft_tokens: int = setting(8, "D, tokens verified per request and round.", least=1)
    page_size: int = setting(128, "Tokens a page, a power of two.", least=1)
    swa_ratio: float = setting(0.1, "Tokens of the static arm's SWA pool / those of its FULL pool.", least=1e-6, most=1)
    state_ratio: float = setting(
        0.1, "Bytes of the static arm's states, if the model has any, / those of its K and V.", least=1e-6, most=1
    )
    warmup_tokens: int = setting(128, "Tokens a completion in the warm-up of each arm.", least=1)
    runs: int = setting(2, "Throughput runs of each arm, the arms in turn.", least=1)
    seed: int = setting(1234, "Seed of the prompts.", least=0)
    dtype: str = setting("float32", "What is computed in.", choices=("float32", "bfloat16"))
    model: str = setting("target", "The target: an embedded model's name, or a Hugging Face folder.")
    draft_model: str | None = setting(None, "The draft: a folder, or for draft_lm a name; by default what ships.")
    kpool_metadata_fusion: bool = False


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Models, requests and a configuration for "static", "unified" and "plain"."""

    target: Model
    drafter: Drafter
    params: Params
    prompts: list[list[int]]
    configs: dict[str, SpecConfig]
    warmup_tokens: int
    runs: int


@dataclasses.dataclass(frozen=True)
class Run:
    """One generation: `arm` is a name of `Experiment.configs`, `kind` one of WARM_UP, EXACT, THROUGHPUT, PLAIN."""

    arm: str
    kind: str
    number: int = 1
    result: Generation | None = None

    def __str__(self):
        number = f" {self.number}" if self.kind == THROUGHPUT else ""
        return f"{self.arm}, {self.kind}{number}" if self.arm != self.kind else self.arm


def run(settings: Settings, task: Task = quiet) -> Report:
    """Runs the experiment.

    Raises:
      InputError: models, requests or shapes that cannot be; nothing has run then.
    """
    with task("models", "loading"):
        experiment = prepare(settings)
    plan = schedule(experiment.runs)
    done = []
    for count, item in enumerate(plan, start=1):
        with task(f"run {count} of {len(plan)}", str(item)):
            done.append(execute(experiment, item))
    return report(experiment, done)


def prepare(settings: Settings) -> Experiment:
    """Loads the models, draws the prompts and sizes the arms."""
    target = load_model(settings.model, settings.dtype)
    drafter, draft_params = make_drafter(
        settings.drafter, target, draft_model=settings.draft_model, dtype=settings.dtype
    )
    prompts = draw_prompts(target, settings.num_requests, settings.prompt_len, settings.seed)
    base = SpecConfig(
        batch_size=settings.num_requests,
        num_draft_tokens=settings.num_draft_tokens,
        context_len=settings.prompt_len + settings.max_new_tokens,
        max_new_tokens=settings.max_new_tokens,
        page_size=settings.page_size,
        kpool_metadata_fusion=settings.kpool_metadata_fusion,
    )
    configs = size_arms(target.model, drafter, base, settings.swa_ratio, settings.state_ratio)
    for config in configs.values():
        jax.eval_shape(lambda config=config: init_state(target.model, drafter, config, prompts))  # complains now
    warmup_tokens = min(settings.warmup_tokens, settings.max_new_tokens)
    params = Params(target.params, draft_params)
    return Experiment(target.model, drafter, params, prompts, configs, warmup_tokens, settings.runs)


def draw_prompts(target: Checkpoint, count: int, length: int, seed: int) -> list[list[int]]:
    """`count` prompts of `length` ids that depend on nothing but the arguments.

    They are cut from the text of the package's own prompts, code that the embedded models have not seen: for each
    request in another order, one text after the other as in training, starting anywhere. So the models are asked for
    what they know, and drafts are accepted at a rate that means something. A model without a tokenizer gets random ids.
    """
    rng = np.random.default_rng(seed)
    if not (target.folder / "tokenizer.json").is_file():
        return rng.integers(target.config.vocab_size, size=(count, length)).tolist()
    lines = (embedded_path("target").parent / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    end = list(target.config.eos_token_ids[:1])
    texts = [target.encode(json.loads(line)["prompt"]) + end for line in lines]
    prompts = []
    for _ in range(count):
        stream = [token for index in rng.permutation(len(texts)) for token in texts[index]]
        prompts.append(np.resize(np.roll(stream, -rng.integers(len(stream))), length).tolist())
    return prompts


def size_arms(
    target: Model, drafter: Drafter, base: SpecConfig, swa_ratio: float, state_ratio: float
) -> dict[str, SpecConfig]:
    """Configurations of both arms and of plain `generate`, which is `base`: static pools of just what is needed.

    The static arm's SWA pool is at least what `base` asks for, its FULL pool as many tokens as `swa_ratio` makes of
    that, at least what `base` asks for, and at least as large as makes the states, one a request row, `state_ratio` of
    the bytes of K and V. The unified arm's pool has the bytes of all the static arm's buffers.
    """
    least, windows = base.full_pages() - 1, base.swa_pages(target.swa_window) - 1  # without the sinks
    ratio = fractions.Fraction(str(swa_ratio))

    def sized(full: int) -> SpecConfig:
        """The static arm with so many FULL pages."""
        swa = windows if target.swa_window is None else min(max(windows, math.ceil(full * ratio)), full)
        return dataclasses.replace(base, num_pages=1 + full, num_swa_pages=1 + swa)

    full = least if target.swa_window is None else max(least, math.ceil(windows / ratio))
    states = base.rows * sum(
        part.nbytes for spec in target.layers if spec.carries == ACCUMULATED for part in spec.parts
    )
    wanted = states * (1 + 1 / state_ratio)
    have, one_more = (
        kv_bytes(target, drafter, dataclasses.replace(sized(full), num_pages=1 + pages)) for pages in (full, full + 1)
    )
    most = full + math.ceil(max(wanted - have, 0) / (one_more - have))
    full += bisect.bisect_left(range(full, most), wanted, key=lambda pages: kv_bytes(target, drafter, sized(pages)))
    static = sized(full)
    unified = dataclasses.replace(base, memory="unified", pool_bytes=kv_bytes(target, drafter, static))
    return {"static": static, "unified": unified, PLAIN: base}


def kv_bytes(target: Model, drafter: Drafter, config: SpecConfig) -> int:
    """Bytes of all buffers of K, V and states that a configuration makes, the drafter's included. Makes none."""
    sizes = []

    def measure():
        state = init_state(target, drafter, config, [])
        sizes.append(memory_bytes(state.cache, state.draft))
        return state

    jax.eval_shape(measure)
    return sizes[0]


def schedule(runs: int) -> list[Run]:
    """The runs in their order.

    Example:
      >>> print(*schedule(1), sep="; ")
      static, warm-up; unified, warm-up; static, exact; unified, exact; static, throughput 1; unified, throughput 1; \
plain, warm-up; plain
    """
    plan = [Run(arm, kind) for kind in (WARM_UP, EXACT) for arm in ARMS]
    plan += [Run(arm, THROUGHPUT, number) for number in range(1, runs + 1) for arm in ARMS]
    return [*plan, Run(PLAIN, WARM_UP), Run(PLAIN, PLAIN)]


def execute(experiment: Experiment, item: Run) -> Run:
    """Does one run, in one dispatch and from a fresh state; returns it with its result."""
    config = experiment.configs[item.arm]
    result = generate(
        experiment.target,
        experiment.params,
        experiment.prompts,
        drafter=experiment.drafter,
        max_new_tokens=experiment.warmup_tokens if item.kind == WARM_UP else config.max_new_tokens,
        loop="device",
        config=dataclasses.replace(config, logprobs=item.kind == EXACT),
    )
    return dataclasses.replace(item, result=result)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One run of each arm over the same requests, request by request.

    Attributes:
      ids, verify_counts: whether they are equal.
      logprobs: whether all log-probabilities are; None if there are none.
      max_logprob_difference: the largest, over the tokens that both emitted; None if there are no log-probabilities.
      accept_lengths: completion tokens / verify count of each arm, over all requests; None if there was no round.
    """

    ids: list[bool]
    verify_counts: list[bool]
    logprobs: list[bool] | None
    max_logprob_difference: float | None
    accept_lengths: tuple[float | None, float | None]

    @property
    def failures(self) -> list[str]:
        """What differs although it must not, a line each."""
        found = []
        for name, equal in (("ids", self.ids), ("verify counts", self.verify_counts)):
            if not all(equal):
                first = equal.index(False)
                found.append(f"{name} differ in {equal.count(False)} of {len(equal)} requests, request {first} first")
        static, unified = self.accept_lengths
        if static != unified:
            found.append(f"accept length is {_number(static, '.8f')} static, {_number(unified, '.8f')} unified")
        return found


def compare(static: Generation, unified: Generation) -> Comparison:
    """Compares a run of each arm."""
    pairs = list(zip(static.requests, unified.requests, strict=True))
    equal, differences = None, []
    if all(request.logprobs is not None for pair in pairs for request in pair):
        equal = [a.logprobs == b.logprobs for a, b in pairs]
        for a, b in pairs:
            common = min(len(a.logprobs), len(b.logprobs))
            differences.append(np.abs(np.subtract(a.logprobs[:common], b.logprobs[:common])).max(initial=0.0))
    return Comparison(
        ids=[a.token_ids == b.token_ids for a, b in pairs],
        verify_counts=[a.verify_count == b.verify_count for a, b in pairs],
        logprobs=equal,
        max_logprob_difference=None if equal is None else float(np.max(differences, initial=0.0)),
        accept_lengths=(static.accept_length, unified.accept_length),
    )


def report(experiment: Experiment, runs: Sequence[Run]) -> Report:
    """The figures of an executed schedule."""
    results = {(item.arm, item.kind, item.number): item.result for item in runs}
    pairs = [("exact", *(results[arm, EXACT, 1] for arm in ARMS))]
    for number in range(1, experiment.runs + 1):
        pairs.append((f"throughput {number}", *(results[arm, THROUGHPUT, number] for arm in ARMS)))
    comparisons = [compare(static, unified) for _, static, unified in pairs]
    rates = {
        arm: [results[arm, THROUGHPUT, number].tokens_per_second for number in range(1, experiment.runs + 1)]
        for arm in ARMS
    }
    plain = results[PLAIN, PLAIN, 1]
    failures = _short_runs(experiment, runs)
    for (name, *_), comparison in zip(pairs, comparisons, strict=True):
        failures += [f"{name}: {line}" for line in comparison.failures]

    memory = {name: _memory(experiment, config) for name, config in experiment.configs.items()}
    mean = {arm: statistics.fmean(values) for arm, values in rates.items()}
    throughput = {
        "tokens_per_second": {**rates, PLAIN: plain.tokens_per_second},
        "mean": mean,
        "spread": {arm: (max(values) - min(values)) / mean[arm] for arm, values in rates.items()},
        "unified_over_static": mean["unified"] / mean["static"],
        "static_over_plain": mean["static"] / plain.tokens_per_second,
    }
    exact = {"comparison": dataclasses.asdict(comparisons[0])}
    exact |= {arm: results[arm, EXACT, 1].to_json() for arm in ARMS}
    return Report(
        tables=[
            _memory_table(memory),
            _exact_table(pairs[0], comparisons[0]),
            _throughput_table(pairs, comparisons, throughput, compare(pairs[0][1], plain)),
        ],
        results={
            "memory": memory,
            "exact": exact,
            "throughput": throughput,
            "throughput_runs": [
                {
                    "comparison": dataclasses.asdict(comparison),
                    "static": static.to_json()["aggregate"],
                    "unified": unified.to_json()["aggregate"],
                }
                for (_, static, unified), comparison in list(zip(pairs, comparisons, strict=True))[1:]
            ],
            "plain": plain.to_json()["aggregate"],
            "configs": {name: dataclasses.asdict(config) for name, config in experiment.configs.items()},
            "prompts": experiment.prompts,
        },
        failures=failures,
        environment={"kpool_metadata": _metadata(experiment)},
    )


def _metadata(experiment: Experiment) -> str | None:
    """Who prepared the metadata of sparse layers, the same in all arms; None without such layers."""
    step = make_spec_step(experiment.target, experiment.drafter, experiment.configs[PLAIN])
    return metadata_path(step.target, step.config)


def _short_runs(experiment: Experiment, runs: Sequence[Run]) -> list[str]:
    """A line for each run in which requests emitted fewer tokens than were asked for."""
    lines = []
    for item in runs:
        wanted = experiment.warmup_tokens if item.kind == WARM_UP else experiment.configs[item.arm].max_new_tokens
        short = [request for request in item.result.requests if len(request.token_ids) < wanted]
        if short:
            lines.append(f"{item}: {len(short)} requests ended early, {short[0].finish_reason}")
    return lines


def _memory(experiment: Experiment, config: SpecConfig) -> dict[str, Any]:
    """Size of a configuration's pools: pages without the sinks, None where pages of any kind share the pool."""
    static = config.memory == "static"
    return {
        "full_pages": config.full_pages() - 1 if static else None,
        "swa_pages": config.swa_pages(experiment.target.swa_window) - 1 if static else None,
        "kv_bytes": kv_bytes(experiment.target, experiment.drafter, config),
    }


def _memory_table(memory: dict[str, dict[str, Any]]) -> list[Sequence[str]]:
    names = (*ARMS, PLAIN)
    rows = [("memory", "static", "unified", "plain generate")]
    for title, key in (
        ("FULL pages", "full_pages"),
        ("SWA pages", "swa_pages"),
        ("bytes, the draft's too", "kv_bytes"),
    ):
        rows.append((title, *("any" if memory[name][key] is None else str(memory[name][key]) for name in names)))
    return rows


def _exact_table(pair: tuple[str, Generation, Generation], comparison: Comparison) -> list[Sequence[str]]:
    results, lengths = pair[1:], comparison.accept_lengths
    difference = _number(comparison.max_logprob_difference, "g")
    return [
        ("exact run", "static", "unified", "equal"),
        ("ids", *(str(sum(map(len, result.token_ids))) for result in results), _share(comparison.ids)),
        (
            "verify counts",
            *(str(sum(request.verify_count for request in result.requests)) for result in results),
            _share(comparison.verify_counts),
        ),
        ("accept length", *(_number(length, ".8f") for length in lengths), "yes" if lengths[0] == lengths[1] else "NO"),
        ("logprobs", "max abs difference", difference, _share(comparison.logprobs)),
    ]


def _throughput_table(
    pairs: Sequence[tuple[str, Generation, Generation]],
    comparisons: Sequence[Comparison],
    throughput: dict[str, Any],
    plain: Comparison,
) -> list[Sequence[str]]:
    rows = [("tokens/s", "static", "unified", "unified / static", "ids equal", "verify counts equal")]
    for (name, static, unified), comparison in zip(pairs, comparisons, strict=True):
        rates = static.tokens_per_second, unified.tokens_per_second
        shares = _share(comparison.ids), _share(comparison.verify_counts)
        rows.append((name, *(f"{rate:.1f}" for rate in rates), f"{rates[1] / rates[0]:.4f}", *shares))
    mean, spread = throughput["mean"], throughput["spread"]
    return [
        *rows,
        ("mean, exact left out", *(f"{mean[arm]:.1f}" for arm in ARMS), f"{throughput['unified_over_static']:.4f}"),
        ("(max - min) / mean", *(f"{spread[arm]:.2%}" for arm in ARMS)),
        (
            "plain generate",
            f"{throughput['tokens_per_second'][PLAIN]:.1f}",
            "",
            "",
            _share(plain.ids),
            _share(plain.verify_counts),
        ),
        ("static / plain", f"{throughput['static_over_plain']:.4f}"),
    ]


def _share(equal: Sequence[bool] | None) -> str:
    return "-" if equal is None else f"{sum(equal)}/{len(equal)}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
