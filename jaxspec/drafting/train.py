"""Trains a draft for a frozen target, from the target's own features and partly on its own text.

    python -m jaxspec.drafting.train --drafter dspark --target target --corpus CORPUS --out DRAFT --minutes 10
    python -m jaxspec.drafting.train --drafter mtp --target kpool --corpus CORPUS --out KPOOL --minutes 5
    python -m jaxspec.drafting.train --drafter dspark --target target --corpus CORPUS --out DRAFT --preset tiny
        --length 256 --batch 8 --anchors 32 --steps 200

One process, one device. Acceptance is measured as training goes on, by real speculative rounds on held-out prompts. The
draft is written in its public format, with training.json and a plot beside it. A run that was killed goes on with
--resume; of one with a number of steps the weights are those that it would have had without the kill.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import pathlib
import platform
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import tokenizers
from absl import flags

from jaxspec.cli.command import flag_help, parse_flags
from jaxspec.drafting import DraftLM, NgramDrafter
from jaxspec.drafting.train_common import SHAPES, DraftSettings, Learner
from jaxspec.drafting.train_loop import Keeper, Loop, Progress, Texts, make_dispatch, make_state
from jaxspec.drafting.train_report import Rounds, heldout_prompts, make_same, plot, teacher_forced
from jaxspec.drafting.train_target import Writer, feature_scales, make_batch
from jaxspec.errors import InputError
from jaxspec.models.checkpoint import Checkpoint, load
from jaxspec.models.draft_checkpoint import shared_arrays
from jaxspec.models.glm_config import GlmConfig
from jaxspec.models.heldout import describe, read_windows
from jaxspec.models.train import Budget, prove, write_json
from jaxspec.models.train_attention import choose_attend
from jaxspec.models.train_sparse import choose_masked
from jaxspec.models.train_step import draw, load_data

DRAFTERS = {
    "dspark": "jaxspec.drafting.train_block",
    "dflash": "jaxspec.drafting.train_block",
    "mtp": "jaxspec.drafting.train_mtp",
    "eagle3": "jaxspec.drafting.train_eagle",
}
_CORPUS_FILES = ("manifest.json", "tokenizer.json", "train.tokens.xz", "heldout.tokens.xz")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run does besides `DraftSettings`.

    Fields:
      kind: which drafter, a key of `DRAFTERS`.
      preset: a key of `jaxspec.drafting.train_common.SHAPES`.
      num_drafts: gamma.
      taps: target layers that feed the draft; None for the kind's own choice.
      attention: "auto", or the name of a kernel.
      own_batch: texts that the target writes together.
      renew_every: dispatches between two such chunks.
      rounds_every: dispatches between two measurements by real rounds; 0 for none.
      rounds_prompts, rounds_length, rounds_new: held-out prompts of these, their tokens, and tokens of a completion.
      eval_tokens: held-out tokens for the figures with teacher forcing; None is all.
      keep_seconds: between two checkpoints.
      compare: embedded name or folder of a draft language model that is measured beside the draft at the end, as n-gram
        lookup is then too; None for neither.
    """

    kind: str
    preset: str = "small"
    num_drafts: int = 7
    taps: tuple[int, ...] | None = None
    attention: str = "auto"
    own_batch: int = 128
    renew_every: int = 200
    rounds_every: int = 100
    rounds_prompts: int = 32
    rounds_length: int = 192
    rounds_new: int = 128
    eval_tokens: int | None = None
    keep_seconds: float = 120.0
    compare: str | None = None


def train(
    target: Checkpoint,
    corpus: pathlib.Path,
    out: pathlib.Path,
    plan: Plan,
    settings: DraftSettings,
    *,
    steps: int | None = None,
    seconds: float | None = None,
    until: float | None = None,
    resume: bool = False,
    options: dict[str, Any] | None = None,
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Trains a draft, writes its folder, training.json and training.png; returns what training.json says.

    Args:
      target: the frozen target, in the dtype to compute in.
      corpus: folder written by `jaxspec.models.corpus`, with the target's vocabulary.
      out: folder to write; made if absent. Checkpoints go to `checkpoints` in it.
      plan, settings: of the run.
      steps, seconds, until: exactly one of them: optimiser steps, seconds of training after compilation, or the Unix
        time before which everything is done, saving and the last figures included.
      resume: go on from the last checkpoint in `out`.
      options: XLA options of the training step.
      report: called with lines of progress.

    Raises:
      InputError: a budget or sizes that make no sense, a corpus that is not there or has another vocabulary, `out`
        holds another run.
    """
    begin = time.monotonic()
    if sum(limit is not None for limit in (steps, seconds, until)) != 1:
        raise InputError("give exactly one of steps, minutes and until")
    _check(target, corpus, plan, settings)
    manifest = json.loads((corpus / "manifest.json").read_text())
    tokenizer = _tokenizer(corpus, target)
    config, dtype = target.config, target.module.dtype
    report(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {jnp.dtype(dtype).name}")

    data = load_data(corpus, settings.length)
    indexed = isinstance(config, GlmConfig)
    names, choose = (("masked",), choose_masked) if indexed else (("sliding", "full"), choose_attend)
    plain = dict.fromkeys(names, "blocks")
    choice = dict.fromkeys(names, plan.attention)
    if plan.attention == "auto":
        choice = choose(config, settings.length, dtype, report=report)

    def make_learner(choice) -> Learner:
        module = importlib.import_module(DRAFTERS[plan.kind])
        return module.make_learner(plan.kind, target, SHAPES[plan.preset], plan.num_drafts, plan.taps, choice)

    learner, shared = make_learner(choice), shared_arrays(target.params)
    keeper = Keeper(out / "checkpoints")
    try:
        progress, about = Progress(), _about(target, plan, settings, learner)
        if keeper.latest() is None and resume:
            raise InputError(f"{out} has no checkpoint to resume from")
        if keeper.latest() is not None:
            kept = keeper.record()
            if not resume:
                raise InputError(f"{out} holds a run of {keeper.latest()} steps: go on with --resume, or name another")
            _same_run(out, {k: v for k, v in kept.items() if k != "progress"}, about)
            progress = Progress(**kept["progress"])

        first = draw(data, jax.random.key(settings.seed), min(settings.batch, 8), settings.length - 1)
        seen = jax.jit(make_batch(target, learner.taps, plain), compiler_options=options)(target.params, first)
        state = make_state(learner, settings, target, feature_scales(seen.features, learner.taps))
        parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
        report(f"{parameters} parameters, target layers {list(learner.taps)}, {len(data.tokens)} training tokens")
        writer = None
        own = jnp.zeros((1, settings.length), jnp.uint16)
        if round(settings.own_share * settings.batch):
            writer = Writer(target, np.asarray(data.tokens), settings.length, plan.own_batch, settings.seed)
            own = jnp.zeros((2 * plan.own_batch, settings.length), jnp.uint16)
        if resume:
            state, own = keeper.restore(state, own)
            report(f"resumed at step {int(state.step)}")

        texts = Texts(data, own)
        none = jnp.zeros((settings.steps_a_dispatch,), jnp.float32)

        def make(choice):
            return make_dispatch(make_learner(choice), make_batch(target, learner.taps, choice), settings, options)

        def arguments():
            return jax.tree.map(jnp.copy, state), target.params, texts, none

        dispatch, choice = prove(make, [choice] if choice == plain else [choice, plain], arguments, report)
        learner = make_learner(choice)
        prompts = heldout_prompts(corpus, plan.rounds_prompts, plan.rounds_length, plan.rounds_new)
        rounds = Rounds(target, tuple(prompts), plan.rounds_new, plan.num_drafts + 1)
        drafter = learner.drafter()

        def measure(params):
            if not plan.rounds_every:
                return None
            return rounds.figures(drafter, learner.decode_params(params, shared, dtype))

        def write(params):
            learner.save(out, params, target)

        same = make_same(learner, make_batch(target, learner.taps, choice), options)
        windows = read_windows(corpus, tokenizer, settings.length, plan.eval_tokens)
        size = max(1, min(settings.batch, len(windows.tokens)))

        def force(params, windows):
            return teacher_forced(same, learner.num_drafts, params, target.params, windows, size)

        took = _rehearse(measure, force, state, windows, size, progress, report)
        limit = seconds
        if until is not None:
            limit = max(until - time.time() - took, 1.0) + progress.seconds
            report(f"training ends {took:.0f} s before the time given, for saving and the last figures")
        loop = Loop(
            dispatch=dispatch,
            target_params=target.params,
            settings=settings,
            budget=Budget(steps, limit),
            writer=writer,
            renew_every=plan.renew_every,
            measure=measure,
            measure_every=plan.rounds_every,
            keeper=keeper,
            keep_seconds=plan.keep_seconds,
            about=about,
            write=write,
            report=report,
        )
        report(f"ready after {time.monotonic() - begin:.0f} s")
        state, finished = loop.fit(state, texts, progress)
    finally:
        keeper.close()

    record = {
        # Folders by their own name: where they lay on the machine says nothing.
        "flags": [pathlib.PurePath(word).name if "/" in word else word for word in sys.argv[1:]],
        "drafter": plan.kind,
        "target": about["target"],
        "settings": dataclasses.asdict(settings),
        "plan": about["plan"],
        "budget": {"steps": steps, "seconds": limit},
        "finished": finished,
        "attention": choice,
        "parameters": parameters,
        "versions": {
            "python": platform.python_version(),
            **{m.__name__: m.__version__ for m in (jax, flax, optax, np, tokenizers, orbax.checkpoint)},
        },
        "device": jax.devices()[0].device_kind,
        "corpus": {k: manifest[k] for k in ("seed", "files", "train", "bytes_per_token", "sources") if k in manifest},
        "curve_is": "means over one dispatch of training steps, teacher-forced; nats a draft of the target's choice",
        "curve": progress.curve,
        "rounds_are": rounds.describe(),
        "rounds": progress.rounds,
    }
    _publish(out, record, report)
    if finished:
        stored = learner.restore(out, target)
        forced = force(stored, windows)
        record["heldout"] = {
            "how": describe(windows, corpus / "manifest.json"),
            "teacher_forced": forced,
            "rounds": measure(stored),
        }
        report(f"held out: {json.dumps(record['heldout'])}")
        _publish(out, record, report)
        if plan.compare:
            record["heldout"]["others"] = _others(plan.compare, rounds, dtype, report)
            _publish(out, record, report)
    return record


def _check(target, corpus, plan, settings):
    """Raises InputError where sizes or the corpus cannot be."""
    for name in _CORPUS_FILES:
        if not (corpus / name).is_file():
            raise InputError(f"{corpus} has no {name}: write the corpus with python -m jaxspec.models.corpus")
    context = target.model.context_len
    if settings.length > context or plan.rounds_length + plan.rounds_new > context:
        raise InputError(
            f"length={settings.length}, rounds_length={plan.rounds_length}, rounds_new={plan.rounds_new}: the target's "
            f"context is {context}"
        )
    if plan.num_drafts < 1 or settings.length < plan.num_drafts + 2:
        raise InputError(f"num_drafts={plan.num_drafts}: give 1 to length - 2 = {settings.length - 2}")
    if not 1 <= settings.anchors <= settings.length - plan.num_drafts:
        raise InputError(f"anchors={settings.anchors}: give 1 to {settings.length - plan.num_drafts}")
    if plan.taps:
        target.model.tapped(plan.taps)
    for name in ("own_share", "hard_share", "reach_share"):
        if not 0 <= getattr(settings, name) <= 1:
            raise InputError(f"{name}={getattr(settings, name)}: give a share from 0 to 1")
    for name in ("batch", "steps_a_dispatch", "warmup"):
        if getattr(settings, name) < 1:
            raise InputError(f"{name}={getattr(settings, name)}: give at least 1")
    for name in ("own_batch", "renew_every", "rounds_prompts", "rounds_length", "rounds_new"):
        if getattr(plan, name) < 1:
            raise InputError(f"{name}={getattr(plan, name)}: give at least 1")


def _tokenizer(corpus, target):
    tokenizer = tokenizers.Tokenizer.from_file(str(corpus / "tokenizer.json"))
    if tokenizer.get_vocab_size() > target.config.vocab_size:
        raise InputError(
            f"the target has {target.config.vocab_size} ids and the corpus's tokenizer {tokenizer.get_vocab_size()}"
        )
    if (target.folder / "tokenizer.json").is_file() and target.tokenizer.get_vocab() != tokenizer.get_vocab():
        raise InputError(f"{corpus} has other tokens than {target.name!r}: write it with that tokenizer")
    return tokenizer


def _about(target, plan, settings, learner) -> dict[str, Any]:
    """What a run is, as its checkpoints say it: JSON values."""
    described = {"target": target.name, "plan": dataclasses.asdict(plan), "settings": dataclasses.asdict(settings)}
    described["plan"]["taps"] = list(learner.taps)
    return json.loads(json.dumps(described))


def _same_run(out, kept, about):
    """Raises InputError unless the checkpoints are of this run; how often it looks and reports may differ."""
    free = {"keep_seconds", "compare", "eval_tokens", "rounds_every", "attention"}
    for part in ("plan", "settings"):
        for name, value in about[part].items():
            if name not in free and kept[part].get(name) != value:
                raise InputError(
                    f"{out} holds a run with {name}={kept[part].get(name)!r}, this one has {value!r}: resume with the "
                    "same settings"
                )
    if kept["target"] != about["target"]:
        raise InputError(f"{out} holds a run for target {kept['target']!r}, not {about['target']!r}")


def _rehearse(measure, force, state, windows, size, progress, report) -> float:
    """Measures the fresh draft, so that everything is compiled; returns the seconds that the end of the run takes."""
    begin = time.monotonic()
    found = measure(state.params)
    compiled = time.monotonic()
    if found and not progress.rounds:
        progress.rounds.append({"step": int(state.step), "seconds": 0.0, **found})
    few = dataclasses.replace(windows, tokens=windows.tokens[:size], lengths=windows.lengths[:size])
    force(state.params, few)
    again = time.monotonic()
    force(state.params, few)
    forced = (time.monotonic() - again) * len(windows.tokens) / size
    first = f"before training {found['accept_length']:.3f} tokens a step; " if found else ""
    report(f"{first}compiled in {compiled - begin:.0f} and {again - compiled:.0f} s")
    begin = time.monotonic()
    measure(state.params)
    return 10 + forced + 2 * (time.monotonic() - begin)


def _others(compare, rounds, dtype, report) -> dict[str, Any]:
    """Real rounds of other drafters on the same prompts."""
    other = load(compare, dtype)
    found = {
        "ngram": rounds.figures(NgramDrafter(), ()),
        other.name: rounds.figures(DraftLM(other.draft_model), other.params),
    }
    report(f"others on the same prompts: {json.dumps(found)}")
    return found


def _publish(out, record, report):
    """training.json and its plot."""
    write_json(out / "training.json", record)
    failed = plot(out / "training.png", record)
    if failed:
        report(failed)


def define_flags(values: flags.FlagValues) -> None:
    """Declares the command line."""
    plan, settings = Plan("dspark"), DraftSettings()

    def define(kind, name, default, text, *, enum_values=None, **more):
        choices = [enum_values] if enum_values else []
        getattr(flags, f"DEFINE_{kind}")(name, default, *choices, text, flag_values=values, **more)

    define("enum", "drafter", None, "What to train.", enum_values=list(DRAFTERS), required=True)
    define("string", "target", None, "Embedded name or folder of the frozen target.", required=True)
    define("string", "corpus", None, "Folder written by jaxspec.models.corpus.", required=True)
    define("string", "out", None, "Folder to write.", required=True)
    define("enum", "preset", plan.preset, "Size of the draft's layers.", enum_values=list(SHAPES))
    define("integer", "num_drafts", plan.num_drafts, "gamma, drafts a round; tokens verified are one more.")
    define("list", "taps", None, "Target layers that feed the draft, counted from 0 (default: by drafter).")
    define("integer", "steps", None, "Train for so many steps (repeatable).")
    define("float", "minutes", None, "Train for so many minutes after compilation.")
    define("float", "until", None, "Be done with everything before this Unix time.")
    define("bool", "resume", False, "Go on from the last checkpoint.")
    define("integer", "length", settings.length, "Tokens of a training sequence.")
    define("integer", "batch", settings.batch, "Sequences a step.")
    define("integer", "anchors", settings.anchors, "Places of a sequence from which drafts are learned.")
    define("float", "own_share", settings.own_share, "Share of sequences that the target has written itself.")
    define("integer", "own_batch", plan.own_batch, "Texts that the target writes together.")
    define("integer", "renew_every", plan.renew_every, "Dispatches between two chunks of the target's text.")
    define("float", "hard_share", settings.hard_share, "Share of the loss that follows the target's best id.")
    define("float", "position_decay", settings.position_decay, "Draft j weighs exp(-(j - 1) / this).")
    define("float", "reach_share", settings.reach_share, "Share of the weights by expected accepted run.")
    define("integer", "steps_a_dispatch", settings.steps_a_dispatch, "Steps between two progress lines.")
    define("integer", "warmup", settings.warmup, "Steps in which the learning rate rises.")
    define("float", "muon_rate", settings.muon_rate, "Peak learning rate of matrices.")
    define("float", "adam_rate", settings.adam_rate, "Peak learning rate of everything else.")
    define("enum", "attention", plan.attention, "The target's kernels.", enum_values=["auto", "cudnn", "blocks"])
    define("integer", "rounds_every", plan.rounds_every, "Dispatches between two measurements by real rounds; 0: none.")
    define("integer", "rounds_prompts", plan.rounds_prompts, "Held-out prompts of such a measurement.")
    define("integer", "rounds_length", plan.rounds_length, "Tokens of such a prompt.")
    define("integer", "rounds_new", plan.rounds_new, "Tokens of its completion.")
    define("integer", "eval_tokens", None, "Held-out tokens for the last figures (default: all).")
    define("float", "keep_seconds", plan.keep_seconds, "Seconds between two checkpoints.")
    define("string", "compare", None, "Draft language model to measure beside the draft at the end.")
    define("integer", "seed", settings.seed, "Seed of weights and text order.")


def _layers(words) -> tuple[int, ...] | None:
    if not words:
        return None
    if not all(word.strip().isdigit() for word in words):
        raise InputError(f"taps={','.join(words)}: give layers as 1,4,7")
    return tuple(int(word) for word in words)


def _given(kind: type, values: flags.FlagValues) -> dict[str, Any]:
    """Flags that are fields of a dataclass."""
    return {field.name: values[field.name].value for field in dataclasses.fields(kind) if field.name in values}


def main(words: Sequence[str]) -> int:
    """Runs a command line and returns its exit status: 0, or 2 with one line for bad input."""
    try:
        if {"--help", "-h"} & set(words):
            values = flags.FlagValues()
            define_flags(values)
            print(f"{__doc__}\n{flag_help(values)}")
            return 0
        values = parse_flags(define_flags, words)
        plan = Plan(values.drafter, **{**_given(Plan, values), "taps": _layers(values.taps)})
        dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
        train(
            load(values.target, dtype),
            pathlib.Path(values.corpus),
            pathlib.Path(values.out),
            plan,
            DraftSettings(**_given(DraftSettings, values)),
            steps=values.steps,
            seconds=None if values.minutes is None else 60 * values.minutes,
            until=values.until,
            resume=values.resume,
            report=functools.partial(print, flush=True),
        )
    except (InputError, flags.Error) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
