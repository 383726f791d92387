"""`python -m jaxspec generate`: completes prompts, shows what was accepted, checks that the output is exact."""

import concurrent.futures
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from absl import flags

from jaxspec import (
    Generation,
    InputError,
    Params,
    SpecConfig,
    StopStrings,
    embedded_names,
    init_state,
    load_model,
    make_spec_step,
)
from jaxspec import generate as run_generation
from jaxspec.cli import environment, prompts, report, sampling, switches
from jaxspec.cli.jsonfile import JsonFile
from jaxspec.cli.screen import Screen
from jaxspec.cli.stream import Completions
from jaxspec.config import MEMORIES, VERIFIERS
from jaxspec.drafting import Drafter
from jaxspec.drafting.block import BlockDrafter
from jaxspec.drafting.choose import DRAFTERS, make_drafter, page_size_for
from jaxspec.generation import LOOPS
from jaxspec.generation.generate import default_verifier
from jaxspec.models import Checkpoint
from jaxspec.steps.fusion import metadata_path

SUMMARY = "Completes prompts by speculative decoding and checks that the ids equal plain decoding."

_ROUNDS = 8  # rounds a dispatch of the chunked loop: how often a completion grows on the screen
CONTEXT_STEP = 256  # contexts are rounded up to this, so that similar runs share a compiled program


def define_flags(values: flags.FlagValues) -> None:
    """Declares the command's flags."""

    def define(kind: str, *arguments, **settings):
        getattr(flags, f"DEFINE_{kind}")(*arguments, flag_values=values, **settings)

    define("string", "model", "target", "The target: an embedded model's name, or a Hugging Face folder.")
    define(
        "enum",
        "drafter",
        None,
        list(DRAFTERS),
        "Who proposes tokens: a small draft model (draft_lm), a draft that was trained on this target's features "
        "(dspark, dflash, eagle3), the target's own prediction blocks (mtp), a look-up in the text so far (ngram), or "
        "nobody (plain decoding). By default mtp for a model that has such blocks, draft_lm for another embedded one "
        "or with --draft_model, else ngram.",
    )
    define(
        "string",
        "draft_model",
        None,
        "The draft model of draft_lm, a name or a folder, the embedded 'draft' by default; or the folder of a draft "
        "that was trained for the target, by default the one that ships for it.",
    )
    define(
        "integer",
        "num_draft_tokens",
        8,
        "D, tokens verified per request and round: the newest one and D - 1 drafts. By default no more than a dspark "
        "or dflash draft proposes.",
        lower_bound=1,
    )
    define(
        "multi_string",
        "prompt",
        [],
        "Text to complete. White space at its end is left out, since the model has seen a line break or indent only "
        "together with what follows",
    )
    define(
        "string",
        "prompt_file",
        None,
        'JSONL file of prompts: {"prompt": "text"} or {"token_ids": [1, 2]} a line, with an "id" if you like. '
        "Without --prompt and --prompt_file the prompts that come with the package are completed.",
    )
    define("integer", "max_new_tokens", 128, "Tokens a completion may have at most.", lower_bound=1)
    define(
        "float",
        "temperature",
        0.0,
        "What logits are divided by before a token is drawn; 0 takes the most likely one. A line of --prompt_file may "
        'have a "temperature", "top_k", "top_p" and "seed" of its own.',
        lower_bound=0.0,
    )
    define("integer", "top_k", 0, "Draw from so many of the most likely tokens; 0 for all.", lower_bound=0)
    define("float", "top_p", 1.0, "Draw from the most likely tokens that have this mass, of what --top_k has left.")
    define(
        "integer",
        "seed",
        0,
        "Of the draws: the first prompt has this seed, the next one the next, and so on.",
        lower_bound=0,
        upper_bound=2**32 - 1,
    )
    define(
        "enum",
        "verifier",
        None,
        list(VERIFIERS),
        "Who decides on drafts where tokens are drawn: draft by draft, all of a round together, or by a draw of the "
        "target's own. By default rejection where the drafter knows what it drew from, else match.",
    )
    define(
        "multi_string",
        "stop",
        [],
        "Text that ends a completion, found on the device; the token that completes it is kept. May be given several "
        "times.",
    )
    define("boolean", "check_exact", True, "Run plain decoding too and compare the ids; a difference is exit status 1.")
    define("boolean", "ignore_eos", False, "Do not stop at the model's end-of-text ids.")
    define(
        "string",
        "json",
        None,
        "File to write results to as JSON; - is standard output, all else then goes to standard error.",
    )
    define(
        "enum",
        "loop",
        "chunked",
        list(LOOPS),
        f"chunked shows tokens every {_ROUNDS} rounds; device is one dispatch and shows them at the end; "
        "python is one dispatch a round.",
    )
    define(
        "integer",
        "batch_size",
        8,
        "Prompts decoded together at most; more prompts run in several batches.",
        lower_bound=1,
    )
    define(
        "integer",
        "page_size",
        None,
        "Tokens a page of the K/V cache, a power of two; by default 64, or 64 pools of a model with sparse layers.",
        lower_bound=1,
    )
    define(
        "integer", "num_pages", None, "Pages of the K/V cache; by default as many as the batch can need.", lower_bound=1
    )
    define(
        "enum",
        "memory",
        "static",
        list(MEMORIES),
        "static keeps a pool for each kind of page, unified one for all of them; no token depends on it.",
    )
    define("boolean", "logprobs", False, "Keep the log-probability of every token, for --json.")
    define(
        "enum",
        "dtype",
        "float32",
        ["float32", "bfloat16"],
        "What is computed in. In bfloat16 a near-tie may fall either way, so ids can differ from plain decoding.",
    )


@dataclasses.dataclass(frozen=True)
class _Job:
    """A decoding of all prompts, with a drafter or without.

    Attributes:
      settings: for each prompt its temperature, top_k, top_p and seed.
    """

    name: str
    target: Checkpoint
    drafter: Drafter | None
    params: Params
    config: SpecConfig
    stop_ids: tuple[int, ...]
    stop_strings: StopStrings | None
    settings: tuple[dict[str, float], ...]
    loop: str


def run(values: flags.FlagValues) -> int:
    """Runs the command. Exit status 0, or 1 if ids differ from plain decoding or pages ran out."""
    output = JsonFile(values.json)
    screen = Screen(out=sys.stderr if output.to_stdout else None)
    with screen.log_lines():
        return _run(values, screen, output)


def _run(values: flags.FlagValues, screen: Screen, output: JsonFile) -> int:
    fusion = switches.kpool_metadata_fusion()
    loaded = load(values, screen)
    requests, target, drafter = loaded.requests, loaded.target, loaded.drafter
    job = _Job(
        name="speculative decoding" if drafter else "plain decoding",
        target=target,
        drafter=drafter,
        params=loaded.params,
        config=_config(values, target, requests, drafter, fusion, loaded.settings),
        stop_ids=loaded.stop_ids,
        stop_strings=loaded.stop_strings,
        settings=loaded.settings,
        loop=values.loop,
    )
    _check_pool(job, requests)
    has_text = (target.folder / "tokenizer.json").is_file()
    rules = [sampling.rule_of(each, job.config.sampling) for each in job.settings]
    jobs = [job]
    if values.check_exact and any(rule in report.COMPARED for rule in rules):
        # A draw of the target's own, whatever the verifier: with "match" it is the same one.
        verifier = job.config.sampling and "match"
        config = dataclasses.replace(job.config, num_draft_tokens=1, num_pages=None, sampling=verifier)
        jobs.append(dataclasses.replace(job, name="plain decoding to compare", drafter=None, config=config))
    if values.check_exact and (line := sampling.not_compared(rules)):
        screen.say(line)
    setup_seconds = _compile(jobs, requests, screen)
    notes = [sampling.describe(*pair) for pair in zip(job.settings, rules, strict=True)]
    completions = Completions(screen, requests, target.decode if has_text else None, notes)
    result = _decode(job, requests, screen, completions)
    plain = _decode(jobs[1], requests, screen) if jobs[1:] else None
    outcome = report.Outcome(requests, result, setup_seconds, plain, target.decode if has_text else None, job.settings)
    screen.write(report.to_text(outcome))
    output.write(report.to_json(outcome, _environment(values, job)))
    starved = sum(request.finish_reason == "out_of_pages" for request in result.requests)
    if starved:
        screen.say(f"error: pages ran out for {starved} requests: raise --num_pages or lower --batch_size")
    mismatch = report.mismatch_line(outcome)
    if mismatch:
        screen.say(f"error: {mismatch}")
    return 1 if starved or mismatch else 0


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What the flags name, in memory.

    Attributes:
      requests: the prompts, encoded.
      target, drafter, params: the model, who drafts for it, and the weights of both.
      stop_ids, stop_strings: what ends a completion.
      settings: for each prompt its temperature, top_k, top_p and seed.
    """

    requests: list[prompts.Prompt]
    target: Checkpoint
    drafter: Drafter | None
    params: Params
    stop_ids: tuple[int, ...]
    stop_strings: StopStrings | None
    settings: tuple[dict[str, float], ...]


def load(values: flags.FlagValues, screen: Screen) -> Loaded:
    """Reads prompts and models."""
    requests = prompts.collect(values.prompt, values.prompt_file)
    if advice := environment.idle_gpu_advice():
        screen.say(advice)
    try:
        jax.devices()
    except RuntimeError as error:
        raise InputError(f"jax finds no device: {' '.join(str(error).split())}") from None
    with screen.task("models", "loading"):
        target = load_model(values.model, values.dtype)
        requests = prompts.encode(requests, target)
        drafter, draft_params = _drafter(values, target, screen)
        stop_strings = StopStrings(target.tokenizer, values.stop) if values.stop else None
    return Loaded(
        requests=requests,
        target=target,
        drafter=drafter,
        params=Params(target.params, draft_params),
        stop_ids=() if values.ignore_eos else target.config.eos_token_ids,
        stop_strings=stop_strings,
        settings=sampling.settings_of(values, requests),
    )


def _drafter(values: flags.FlagValues, target: Checkpoint, screen: Screen) -> tuple[Drafter | None, Any]:
    """The drafter that the flags ask for, and its weights."""
    kind = values.drafter
    if kind is None:
        if values.draft_model is not None:
            kind = "draft_lm"
        elif target.blocks:
            kind = "mtp"
        elif values.model in embedded_names():
            kind = "draft_lm"
        else:
            kind = "ngram"
            screen.say("drafting by n-gram look-up; --draft_model names a model that shares the target's vocabulary")
    return make_drafter(kind, target, draft_model=values.draft_model, dtype=values.dtype)


def _config(
    values: flags.FlagValues,
    target: Checkpoint,
    requests: Sequence[prompts.Prompt],
    drafter: Drafter | None,
    fusion: bool,
    settings: Sequence[dict[str, float]],
) -> SpecConfig:
    """Shapes that fit every prompt, so that all batches run in one compiled program."""
    context = target.config.max_position_embeddings
    longest = max(len(request.token_ids) for request in requests)
    wanted = -(-(longest + values.max_new_tokens) // CONTEXT_STEP) * CONTEXT_STEP
    batches = -(-len(requests) // values.batch_size)
    return SpecConfig(
        batch_size=-(-len(requests) // batches),  # even batches: 9 prompts of at most 8 run as 5 and 4
        num_draft_tokens=num_draft_tokens_of(values, drafter),
        context_len=min(wanted, context),
        max_new_tokens=min(values.max_new_tokens, context),
        page_size=page_size_for(target) if values.page_size is None else values.page_size,
        num_pages=values.num_pages,
        memory=values.memory,
        logprobs=values.logprobs,
        sampling=values.verifier or default_verifier(drafter, [each["temperature"] for each in settings]),
        kpool_metadata_fusion=fusion,
    )


def num_draft_tokens_of(values: flags.FlagValues, drafter: Drafter | None) -> int:
    """D: what the flag says, which for a block draft is by default not more than it proposes; 1 without a drafter."""
    if drafter is None:
        return 1
    if isinstance(drafter, BlockDrafter) and values["num_draft_tokens"].using_default_value:
        return min(values.num_draft_tokens, drafter.draft.config.num_drafts + 1)
    return values.num_draft_tokens


def _check_pool(job: _Job, requests: Sequence[prompts.Prompt]) -> None:
    """Raises InputError now for what would stop a later batch; builds no arrays."""
    config = dataclasses.replace(job.config, batch_size=len(requests))
    ids = [request.token_ids for request in requests]
    model, drafter = job.target.model, job.drafter
    jax.eval_shape(
        lambda: init_state(model, drafter, config, ids, stop_ids=job.stop_ids, stop_strings=job.stop_strings)
    )


def _compile(jobs: Sequence[_Job], requests: Sequence[prompts.Prompt], screen: Screen) -> float:
    """Compiles the programs of all jobs side by side; returns how many seconds it took."""
    start = time.perf_counter()

    def compile_one(job: _Job) -> None:
        # The configuration fixes the shapes, so the shortest call compiles the same programs.
        _generate(job, [requests[0].token_ids[:1]], job.settings[:1], max_new_tokens=1)

    with screen.task("programs", "compiling"), concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
        for future in [pool.submit(compile_one, job) for job in jobs]:
            future.result()
    return time.perf_counter() - start


def _decode(
    job: _Job, requests: Sequence[prompts.Prompt], screen: Screen, completions: Completions | None = None
) -> Generation:
    """Decodes all prompts, batch after batch; returns the results as one."""
    config, size = job.config, job.config.batch_size
    meter = _Meter(screen, len(requests), config.max_new_tokens, _ROUNDS if job.loop == "chunked" else 1)
    results = []
    with screen.task(job.name, f"{len(requests)} requests, {size} at a time"):
        for first in range(0, len(requests), size):
            batch = [request.token_ids for request in requests[first : first + size]]
            on_tokens = None if job.loop == "device" else _listener(first, meter, completions)
            settings = job.settings[first : first + size]
            result = _generate(job, batch, settings, config.max_new_tokens, on_tokens)
            results.append(result)
            for index, request in enumerate(result.requests, start=first):
                if completions is not None:
                    if job.loop == "device":
                        completions.add(index, request.token_ids)
                    completions.end(index)
                meter.finish(index)
    return Generation(
        requests=[request for result in results for request in result.requests],
        num_draft_tokens=config.num_draft_tokens,
        seconds=sum(result.seconds for result in results),
        dispatches=sum(result.dispatches for result in results),
    )


def _generate(
    job: _Job,
    batch: Sequence[Sequence[int]],
    settings: Sequence[dict[str, float]],
    max_new_tokens: int,
    on_tokens=None,
) -> Generation:
    return run_generation(
        job.target.model,
        job.params,
        batch,
        drafter=job.drafter,
        max_new_tokens=max_new_tokens,
        stop_ids=job.stop_ids,
        stop_strings=job.stop_strings,
        loop=job.loop,
        config=job.config,
        rounds_per_dispatch=_ROUNDS,
        on_tokens=on_tokens,
        **{name: [each[name] for each in settings] for name in prompts.SETTINGS},
    )


def _listener(first: int, meter: "_Meter", completions: Completions | None) -> Callable[[int, list[int], bool], None]:
    def on_tokens(index: int, ids: list[int], finished: bool) -> None:
        meter.add(first + index, len(ids), finished)
        if completions is not None:
            completions.add(first + index, ids)
            if finished:
                completions.end(first + index)

    return on_tokens


class _Meter:
    """Tokens so far and the running accept length, for the progress line."""

    def __init__(self, screen: Screen, requests: int, limit: int, rounds: int):
        self._screen, self._limit, self._rounds = screen, limit, rounds
        self._tokens = [0] * requests
        self._counted_tokens = self._counted_rounds = 0

    def add(self, index: int, count: int, finished: bool) -> None:
        # A request that goes on took part in every round of a dispatch. The call that finishes it may cover fewer, and
        # the first one is prefill: neither counts.
        if self._tokens[index] and not finished:
            self._counted_tokens += count
            self._counted_rounds += self._rounds
        self._tokens[index] = self._limit if finished else self._tokens[index] + count
        self._show()

    def finish(self, index: int) -> None:
        self._tokens[index] = self._limit
        self._show()

    def _show(self) -> None:
        note = f"accept length {self._counted_tokens / self._counted_rounds:.2f}" if self._counted_rounds else ""
        self._screen.progress(sum(self._tokens) / (self._limit * len(self._tokens)), note)


def _environment(values: flags.FlagValues, job: _Job) -> dict[str, Any]:
    bound = make_spec_step(job.target.model, job.drafter, job.config)
    return {
        **environment.describe(),
        "model": {
            "name": job.target.name,
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(job.target.params)),
            "dtype": values.dtype,
        },
        "drafter": type(job.drafter).__name__ if job.drafter else "none",
        "kpool_metadata": metadata_path(job.target.model, bound.config),  # who prepared it; the config is the wish
        "config": dataclasses.asdict(job.config),
        "flags": {name: values[name].value for name in values if name not in ("h", "help")},
    }
