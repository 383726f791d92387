"""Trains the embedded models.

    python -m jaxspec.models.train --role target --corpus CORPUS --out TARGET --minutes 6
    python -m jaxspec.models.train --role draft --corpus CORPUS --out DRAFT --distill_from TARGET --minutes 1.5
    python -m jaxspec.models.train --role hybrid --corpus CORPUS --out HYBRID --minutes 6
    python -m jaxspec.models.train --role kpool --corpus CORPUS --out KPOOL --minutes 6

One process, one device. The whole corpus lies on the device and a dispatch runs many optimiser steps, so Python only
watches. The model computes in bfloat16 on a GPU and in float32 on a CPU. With ``--minutes`` or ``--until`` the learning
rate follows the clock, so that its decay always completes; with ``--steps`` it follows the step count and the run is
the same every time on one machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import pathlib
import platform
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from absl import app, flags

from jaxspec.errors import InputError, exits_with_2
from jaxspec.models import heldout, train_sparse
from jaxspec.models.checkpoint import Config, load, make_module, save
from jaxspec.models.config import FULL, SLIDING, Qwen3Config
from jaxspec.models.corpus import END_OF_TEXT_ID
from jaxspec.models.glm_config import SPARSE, GlmConfig
from jaxspec.models.hybrid_config import LINEAR, HybridConfig
from jaxspec.models.train_attention import attend_with, choose_attend
from jaxspec.models.train_step import Settings, TrainState, init_state, load_data, make_dispatch, make_logits

_WARMUP_STEPS = 100
_DECAY_FROM = 0.3  # share of the run after which the learning rate falls linearly to 0


def preset(name: str, vocab_size: int) -> Config:
    """The configuration called `name`.

    Of parameters target has 5.6 M, draft 0.6 M, hybrid 4.3 M and kpool 4.3 M, its MTP block among them. tiny,
    tiny_hybrid and tiny_kpool are for tests.
    """
    common = {"vocab_size": vocab_size, "tie_word_embeddings": True, "eos_token_ids": (END_OF_TEXT_ID,)}
    common |= {"max_position_embeddings": 4096}
    sizes = {
        "target": {
            "hidden_size": 256,
            "intermediate_size": 576,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "windows": (256, 256, 256, None) * 2,
        },
        "draft": {
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "windows": (None, None),
        },
        "tiny": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "max_position_embeddings": 256,
            "windows": (16, None),
        },
        "hybrid": {
            "hidden_size": 256,
            "intermediate_size": 480,
            "layer_types": (LINEAR, SLIDING, LINEAR, FULL, LINEAR, FULL),
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "sliding_window": 256,
            "partial_rotary_factor": 0.5,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        },
        "tiny_hybrid": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "layer_types": (LINEAR, SLIDING, FULL),
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "max_position_embeddings": 256,
            "sliding_window": 16,
            "partial_rotary_factor": 0.5,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
        "kpool": {
            "hidden_size": 192,
            "intermediate_size": 384,
            "layer_types": ((LINEAR,) * 3 + (SPARSE,)) * 2,
            "num_attention_heads": 3,
            "q_lora_rank": 96,
            "kv_lora_rank": 128,
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
            "linear_num_heads": 3,
            "linear_head_dim": 64,
            "index_n_heads": 2,
            "index_head_dim": 128,
            "index_topk": 128,
            "index_kpool": 4,
            "num_nextn_predict_layers": 1,
            "index_share_for_mtp_iteration": True,
        },
        "tiny_kpool": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "layer_types": (LINEAR, SPARSE),
            "num_attention_heads": 2,
            "q_lora_rank": 16,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "linear_num_heads": 2,
            "linear_head_dim": 16,
            "index_n_heads": 2,
            "index_head_dim": 32,
            "index_topk": 16,
            "index_kpool": 4,
            "num_nextn_predict_layers": 1,
            "index_share_for_mtp_iteration": True,
            "max_position_embeddings": 256,
        },
    }
    if name not in sizes:
        raise InputError(f"preset {name!r}: there are {', '.join(sizes)}")
    family = Qwen3Config if "windows" in sizes[name] else GlmConfig if "index_kpool" in sizes[name] else HybridConfig
    return family(**(common | sizes[name]))


def learning_rate(progress: np.ndarray, step: np.ndarray, warmup: int = _WARMUP_STEPS) -> np.ndarray:
    """Share of the peak rate at `progress` (0 to 1 of the run) and `step`: a ramp of `warmup` steps, level, then down
    to 0."""
    falling = np.clip((1 - progress) / (1 - _DECAY_FROM), 0, 1)
    return (np.minimum(1, (step + 1) / warmup) * falling).astype(np.float32)


def plain_schedule(progress: np.ndarray, step: np.ndarray) -> dict[str, np.ndarray]:
    """What each step of a dispatch is told: its learning rate."""
    return {"rate": learning_rate(progress, step)}


@dataclasses.dataclass
class Budget:
    """How long a run lasts: `steps`, or `seconds` of training from the first dispatch on (compilation counts)."""

    steps: int | None = None
    seconds: float | None = None

    def progress(self, step: np.ndarray, elapsed: np.ndarray) -> np.ndarray:
        """0 at the start, 1 or more when the run is over."""
        return step / self.steps if self.steps is not None else elapsed / self.seconds


class StopRequest:
    """Turns the first Ctrl-C or SIGTERM into `asked`, so that no dispatch is torn apart; the second one kills."""

    def __enter__(self):
        self.asked = False
        self._before = {}
        with contextlib.suppress(ValueError):  # only the main thread may set handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *exception):
        self._restore()

    def _ask(self, number, frame):
        self.asked = True
        self._restore()

    def _restore(self):
        while self._before:
            signal.signal(*self._before.popitem())


def fit(
    dispatch: Callable,
    state: TrainState,
    teacher_params: Any,
    data: Any,
    settings: Settings,
    budget: Budget,
    *,
    bytes_per_token: float,
    keep: Callable[[Any], None],
    keep_seconds: float = 150.0,
    schedule: Callable[[np.ndarray, np.ndarray], dict[str, np.ndarray]] = plain_schedule,
    report: Callable[[str], None] = print,
) -> tuple[TrainState, list[dict[str, float]], bool]:
    """Runs dispatches until the budget is spent; returns the state, the curve, and whether it ran to the end.

    While one dispatch runs the next is already queued, so the device never waits for the host. `schedule` says, of each
    step's place in the run, what the step is told. Every `keep_seconds` the weights go to `keep`. Ctrl-C or SIGTERM
    ends the loop after the dispatches under way.

    Raises:
      FloatingPointError: the loss is no longer finite; what `keep` got last is from before.
    """
    count, tokens_a_step = settings.steps_a_dispatch, settings.batch * settings.length
    curve: list[dict[str, float]] = []
    start = kept = last = time.monotonic()
    seconds = 0.0  # that a dispatch takes

    def collect(figures, done):
        nonlocal last, seconds
        losses = np.asarray(figures["nats"])
        seconds, last = time.monotonic() - last, time.monotonic()
        elapsed, means = last - start, {name: round(float(np.mean(each)), 4) for name, each in figures.items()}
        nats = means["nats"]
        curve.append({"step": done, "tokens": done * tokens_a_step, "seconds": round(elapsed, 2), **means})
        others = "".join(f"  {name} {mean:.3f}" for name, mean in means.items() if name != "nats")
        progress = float(budget.progress(done, elapsed))
        report(
            f"step {done:5d}  loss {nats:.4f}  {nats / np.log(2) / bytes_per_token:.4f} bits/byte{others}  "
            f"{count * tokens_a_step / seconds / 1e6:.3f} M tokens/s  {elapsed:.0f} s  "
            f"ETA {max(elapsed / progress - elapsed, 0):.0f} s"
        )
        if not np.isfinite(losses).all():
            raise FloatingPointError(f"the loss is {losses.max()} at step {done}: a lower learning rate may help")

    step, queued, inside = 0, None, np.arange(count)
    with StopRequest() as stop:
        while not stop.asked:
            begins = last - start + (seconds if queued else 0.0)  # when the dispatch made now will start to run
            progress = budget.progress(step + inside, begins + inside / count * seconds)
            if progress[0] >= 1:
                break
            control = jax.tree.map(jnp.asarray, schedule(progress, step + inside))
            state, figures = dispatch(state, teacher_params, data, control)
            step += count
            if queued:
                collect(*queued)
            queued = figures, step
            if time.monotonic() - kept > keep_seconds:
                collect(*queued)
                queued = None
                keep(state.params)
                kept = last = time.monotonic()
        if queued:
            collect(*queued)
    if stop.asked:
        report("stopped on request: keeping what there is")
    return state, curve, not stop.asked


def prove(make: Callable[[dict[str, str]], Callable], choices: Sequence[dict[str, str]], arguments, report=print):
    """The first of `make(choice)` that compiles and runs on `arguments()`, with its choice; says how long that took."""
    for choice in choices:
        start = time.monotonic()
        dispatch = make(choice)
        try:
            losses = np.asarray(dispatch(*arguments())[1]["nats"])
        except Exception as failure:
            report(f"attention {choice} fails in the training step: {' '.join(str(failure).split())[:500]}")
            if choice == choices[-1]:
                raise
            continue
        report(f"attention {choice}: compiled and ran in {time.monotonic() - start:.1f} s, first loss {losses[0]:.4f}")
        return dispatch, choice
    raise AssertionError("choices is empty")


def train(
    corpus: pathlib.Path,
    out: pathlib.Path,
    config: Config,
    settings: Settings,
    *,
    steps: int | None = None,
    seconds: float | None = None,
    until: float | None = None,
    distill_from: pathlib.Path | None = None,
    attention: str = "auto",
    eval_tokens: int | None = None,
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Trains a model on a corpus folder, writes a Hugging Face folder and training.json; returns what the latter says.

    Args:
      corpus: folder written by `jaxspec.models.corpus`.
      out: folder to write; made if absent.
      config: shape of the model; its vocabulary is the corpus tokenizer's.
      settings: batch, learning rates, seed.
      steps, seconds, until: exactly one of them: optimiser steps, seconds of training after compilation, or the Unix
        time at which training ends.
      distill_from: folder of the frozen target whose distribution a draft follows (`settings.distill_weight`).
      attention: auto, cudnn or blocks.
      eval_tokens: held-out tokens to score; None is all of them.
      report: called with lines of progress.

    Raises:
      InputError: the corpus is not there or too small, the target has another vocabulary, or no budget is given.
    """
    if sum(limit is not None for limit in (steps, seconds, until)) != 1:
        raise InputError("give exactly one of steps, minutes and until")
    for name in ("manifest.json", "tokenizer.json", "tokenizer_config.json"):
        if not (corpus / name).is_file():
            raise InputError(f"{corpus} has no {name}: write the corpus with python -m jaxspec.models.corpus")
    manifest = json.loads((corpus / "manifest.json").read_text())
    tokenizer = tokenizers.Tokenizer.from_file(str(corpus / "tokenizer.json"))
    if tokenizer.get_vocab_size() != config.vocab_size:
        raise InputError(f"the model has {config.vocab_size} ids and the tokenizer {tokenizer.get_vocab_size()}")
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    target = load(distill_from, dtype) if distill_from else None
    if target and target.config.vocab_size != config.vocab_size:
        raise InputError(f"{distill_from} has {target.config.vocab_size} ids and the draft {config.vocab_size}")
    report(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {jnp.dtype(dtype).name}")
    data = load_data(corpus, settings.length)
    indexed = isinstance(config, GlmConfig)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(lambda: init_state(config, settings).params)))
    report(f"{parameters} parameters, {len(data.tokens)} training tokens in {len(data.starts)} documents")

    def make(choice):
        if indexed:
            return train_sparse.make_sparse_dispatch(make_module(config, dtype), settings, **choice)
        own = make_logits(make_module(config, dtype), attend_with(config.windows, **choice))
        teacher = target and make_logits(target.module, attend_with(target.config.windows, **choice))
        return make_dispatch(own, teacher, settings)

    def fresh():
        return init_state(config, settings)

    def schedule(progress, step):
        return plain_schedule(progress, step) | (train_sparse.schedule(settings, progress, step) if indexed else {})

    teacher_params = target.params if target else None
    kinds, choose = (("masked",), train_sparse.choose_masked) if indexed else (("sliding", "full"), choose_attend)
    plain = dict.fromkeys(kinds, "blocks")
    choice = dict.fromkeys(kinds, attention)
    if attention == "auto":
        choice = choose((target.config if target else config), settings.length, dtype, report=report)
    none = jax.tree.map(jnp.zeros_like, schedule(*np.zeros((2, settings.steps_a_dispatch))))
    choices = [choice] if choice == plain else [choice, plain]
    dispatch, choice = prove(make, choices, lambda: (fresh(), teacher_params, data, none), report)

    def keep(params):
        save(out, config, jax.device_get(params), jnp.bfloat16, tokenizer)
        shutil.copyfile(corpus / "tokenizer_config.json", out / "tokenizer_config.json")
        (out / "generation_config.json").write_text(json.dumps({"eos_token_id": END_OF_TEXT_ID}) + "\n")

    start = fresh()  # takes its time, which is not training's
    budget = Budget(steps, max(until - time.time(), 1.0) if until is not None else seconds)
    bytes_per_token = manifest["bytes_per_token"]
    state, curve, finished = fit(
        dispatch, start, teacher_params, data, settings, budget,
        bytes_per_token=bytes_per_token, keep=keep, schedule=schedule, report=report,
    )  # fmt: skip
    keep(state.params)
    record = {
        # Folders by their own name: where they lay on the machine says nothing.
        "flags": [pathlib.PurePath(word).name if "/" in word else word for word in sys.argv[1:]],
        "settings": dataclasses.asdict(settings),
        "budget": dataclasses.asdict(budget),
        "finished": finished,
        "attention": choice,
        "parameters": parameters,
        "distilled": target is not None,
        "versions": {
            "python": platform.python_version(),
            **{m.__name__: m.__version__ for m in (jax, flax, optax, np, tokenizers)},
        },
        "device": jax.devices()[0].device_kind,
        "corpus": {k: manifest[k] for k in ("seed", "files", "train", "bytes_per_token", "sources")},
        "curve_is": "means over one dispatch of training steps; nats a token of the text",
        "curve": curve,
    }
    write_json(out / "training.json", record)
    if finished:
        record["heldout"] = measure(corpus, out, distill_from, tokenizer, eval_tokens, report)
        write_json(out / "training.json", record)
    return record


def measure(
    corpus: pathlib.Path,
    folder: pathlib.Path,
    target: pathlib.Path | None,
    tokenizer: tokenizers.Tokenizer,
    eval_tokens: int | None,
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Held-out figures of a written model, in float32 and bfloat16, and of a draft its agreement with the target.

    Of a model with sparse layers also those it has when it attends to everything, and of its MTP blocks their
    agreement with it.
    """
    model = load(folder)
    length = model.config.max_position_embeddings
    windows = heldout.read_windows(corpus, tokenizer, length, eval_tokens)
    batch = max(1, min(8, len(windows.tokens)) if jax.default_backend() != "cpu" else 1)
    figures: dict[str, Any] = {"how": heldout.describe(windows, corpus / "manifest.json")}
    for dtype in (jnp.float32, jnp.bfloat16):
        name = jnp.dtype(dtype).name
        figures[name] = heldout.evaluate(load(folder, dtype), windows, batch)
        report(f"held out, {name}: {json.dumps(figures[name])}")
    if isinstance(model.config, GlmConfig):
        figures["dense"] = heldout.evaluate(model, windows, batch, sparse=False)
        report(f"held out, float32, dense: {json.dumps(figures['dense'])}")
    if model.blocks:
        figures["ahead"] = heldout.look_ahead(model, windows, batch)
        report(f"held out, MTP blocks and model: {json.dumps(figures['ahead'])}")
    if target is not None:
        _, draft_ids = heldout.score(model, windows, batch)
        _, target_ids = heldout.score(load(target), windows, batch)
        figures["teacher_forced"] = heldout.agreement(draft_ids, target_ids, windows)
        report(f"held out, draft and target: {json.dumps(figures['teacher_forced'])}")
    return figures


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes the whole file or nothing."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, indent=1) + "\n")
    part.replace(path)


def define_flags() -> None:
    """Declares the command line; done when it is run and not on import, so that other programs keep their names."""
    flags.DEFINE_string("corpus", None, "Folder written by jaxspec.models.corpus.", required=True)
    flags.DEFINE_string("out", None, "Folder to write the model into.", required=True)
    flags.DEFINE_enum("role", "target", ["target", "draft", "hybrid", "kpool"], "What is trained.")
    flags.DEFINE_string("preset", None, "Size: a role, tiny, tiny_hybrid or tiny_kpool (default: the role's).")
    flags.DEFINE_string("distill_from", None, "Folder of the target that a draft follows.")
    flags.DEFINE_float("distill_weight", 0.75, "Share of a draft's or MTP block's loss that follows the target.")
    flags.DEFINE_integer("chain", Settings.chain, "Steps for which an MTP block is trained.")
    flags.DEFINE_float("dense_share", Settings.dense_share, "Share of the run before sparse layers turn sparse.")
    flags.DEFINE_integer("steps", None, "Train for so many steps (repeatable).")
    flags.DEFINE_float("minutes", None, "Train for so many minutes after compilation.")
    flags.DEFINE_float("until", None, "Train until this Unix time.")
    flags.DEFINE_integer("length", 4096, "Tokens of a training sequence.")
    flags.DEFINE_integer("batch", 32, "Sequences a step.")
    flags.DEFINE_integer("steps_a_dispatch", 20, "Steps between two progress lines.")
    flags.DEFINE_float("muon_rate", Settings.muon_rate, "Peak learning rate of matrices.")
    flags.DEFINE_float("adam_rate", Settings.adam_rate, "Peak learning rate of embeddings and norms.")
    flags.DEFINE_enum("attention", "auto", ["auto", "cudnn", "blocks"], "Attention kernels.")
    flags.DEFINE_integer("eval_tokens", None, "Held-out tokens to score (default: all).")
    flags.DEFINE_integer("seed", 0, "Seed of weights and text order.")


def main(argv: Sequence[str]) -> None:
    """Entry point of ``python -m jaxspec.models.train``."""
    del argv
    given = flags.FLAGS
    corpus, distill = pathlib.Path(given.corpus), given.distill_from
    if given.role != "draft" and distill:
        raise InputError("distill_from goes with role draft: a target follows the text alone")
    if not (corpus / "manifest.json").is_file():
        raise InputError(f"{corpus} has no manifest.json: write the corpus with python -m jaxspec.models.corpus")
    config = preset(given.preset or given.role, json.loads((corpus / "manifest.json").read_text())["vocab_size"])
    if given.length > config.max_position_embeddings:
        raise InputError(f"length={given.length}: the model's context is {config.max_position_embeddings}")
    settings = Settings(
        length=given.length,
        batch=given.batch,
        steps_a_dispatch=given.steps_a_dispatch,
        muon_rate=given.muon_rate,
        adam_rate=given.adam_rate,
        distill_weight=given.distill_weight if distill or given.role == "kpool" else 0.0,
        chain=given.chain,
        dense_share=given.dense_share,
        seed=given.seed,
    )
    train(
        corpus,
        pathlib.Path(given.out),
        config,
        settings,
        steps=given.steps,
        seconds=None if given.minutes is None else 60 * given.minutes,
        until=given.until,
        distill_from=pathlib.Path(distill) if distill else None,
        attention=given.attention,
        eval_tokens=given.eval_tokens,
        report=functools.partial(print, flush=True),
    )


def run() -> None:
    """`main` with one clear line and exit status 2 on bad input."""
    define_flags()
    app.run(exits_with_2(main))


if __name__ == "__main__":
    run()
