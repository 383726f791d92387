"""The loop that trains a draft: compiled dispatches of many steps, the target's own text renewed, progress kept.

Nothing that is learned depends on the clock if the budget is a number of steps: step n draws its texts with a key of
n, chunk k of the target's own text is written by seed and k, and both the state and the current texts are in the
checkpoint. So a run that was killed and resumed ends with the weights of one that was not.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxspec.drafting.train_common import Batch, DraftSettings, Learner
from jaxspec.drafting.train_target import Writer
from jaxspec.models.checkpoint import Checkpoint
from jaxspec.models.train import Budget, StopRequest, learning_rate
from jaxspec.models.train_step import Data, TrainState, draw, make_optimiser

Array = jax.Array
Report = Callable[[str], None]


@flax.struct.dataclass
class Texts:
    """What sequences are drawn from, on the device: the corpus, and texts of the target, uint16[P, T]."""

    corpus: Data
    own: Array


def make_state(learner: Learner, settings: DraftSettings, target: Checkpoint, scales: Array) -> TrainState:
    """Fresh weights of the seed, and their optimiser's state."""
    params = learner.init(jax.random.key(settings.seed), target, scales)
    return TrainState(params, make_optimiser(settings).init(params), jnp.zeros((), jnp.int32))


def draw_texts(texts: Texts, key: Array, settings: DraftSettings) -> Array:
    """Sequences int32[B, T]: the first ones the target's own, the others pieces of the corpus."""
    own = round(settings.own_share * settings.batch)
    pieces, choice = jax.random.split(key)
    drawn = []
    if own:
        drawn.append(texts.own[jax.random.randint(choice, (own,), 0, texts.own.shape[0])].astype(jnp.int32))
    if own < settings.batch:
        drawn.append(draw(texts.corpus, pieces, settings.batch - own, settings.length - 1))
    return jnp.concatenate(drawn)


def make_dispatch(
    learner: Learner,
    batch: Callable[[Any, Array], Batch],
    settings: DraftSettings,
    options: dict[str, Any] | None = None,
) -> Callable:
    """The jitted `dispatch(state, target_params, texts, rate float32[K]) -> (state, figures)`, K optimiser steps.

    Figures are those of the learner's loss with an axis K in front. `state` is donated. `options` are XLA's.
    """
    optimiser = make_optimiser(settings)

    @functools.partial(jax.jit, donate_argnums=0, compiler_options=options)
    def dispatch(state, target_params, texts, rate):
        def one(state, rate):
            key = jax.random.fold_in(jax.random.key(settings.seed + 1), state.step)
            of_texts, of_loss = jax.random.split(key)
            seen = batch(target_params, draw_texts(texts, of_texts, settings))

            def loss(params):
                return learner.loss(params, seen, of_loss, settings)

            gradients, figures = jax.grad(loss, has_aux=True)(state.params)
            updates, inner = optimiser.update(gradients, state.optimiser, state.params)
            params = jax.tree.map(lambda p, u: p + rate * u, state.params, updates)
            return TrainState(params, inner, state.step + 1), figures

        return jax.lax.scan(one, state, rate)

    return dispatch


@dataclasses.dataclass
class Keeper:
    """Checkpoints of a run, written by orbax: a folder appears whole or not at all, and the last two are kept.

    Fields:
      folder: where they are.
    """

    folder: pathlib.Path

    def __post_init__(self):
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(self.folder.absolute(), options=options)

    def save(self, state: TrainState, own: Array, record: dict[str, Any]) -> None:
        """Keeps a state, the current own texts, and what else the run needs, a JSON value."""
        arrays = {"state": state, "own": own}
        kept = ocp.args.Composite(arrays=ocp.args.StandardSave(arrays), record=ocp.args.JsonSave(record))
        step = int(state.step)
        if step not in self._manager.all_steps():
            self._manager.save(step, args=kept)

    def latest(self) -> int | None:
        """Step of the last checkpoint, or None."""
        return self._manager.latest_step()

    def record(self) -> dict[str, Any]:
        """What the last checkpoint says besides its arrays."""
        args = ocp.args.Composite(record=ocp.args.JsonRestore())
        return self._manager.restore(self.latest(), args=args)["record"]

    def restore(self, state: TrainState, own: Array) -> tuple[TrainState, Array]:
        """The arrays of the last checkpoint; `state` and `own` say their shapes."""
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, {"state": state, "own": own})
        args = ocp.args.Composite(arrays=ocp.args.StandardRestore(like))
        found = self._manager.restore(self.latest(), args=args)["arrays"]
        return found["state"], found["own"]

    def close(self) -> None:
        self._manager.close()


@dataclasses.dataclass
class Progress:
    """How far a run is; what a checkpoint says besides its arrays.

    Fields:
      chunks: chunks of own text written so far.
      seconds: of training, those of earlier starts included.
      curve: of each dispatch, the means of its figures.
      rounds: what real rounds gave, as training went on.
    """

    chunks: int = 0
    seconds: float = 0.0
    curve: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    rounds: list[dict[str, Any]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Loop:
    """A run. `fit` may be called once.

    Fields:
      dispatch: from `make_dispatch`.
      target_params: of the target.
      settings: of the run.
      budget: steps, or seconds of training.
      writer: of the target's own text; None where there is none.
      renew_every: dispatches between two chunks of own text.
      measure: `measure(params) -> figures of real rounds`.
      measure_every: dispatches between two of them; 0 for none.
      keeper: where checkpoints go.
      keep_seconds: between two checkpoints.
      about: what every checkpoint says of the run.
      write: `write(params)`: writes the draft itself, with every checkpoint.
      report: called with lines of progress.
    """

    dispatch: Callable
    target_params: Any
    settings: DraftSettings
    budget: Budget
    writer: Writer | None
    renew_every: int
    measure: Callable[[Any], dict[str, Any]]
    measure_every: int
    keeper: Keeper
    keep_seconds: float
    about: dict[str, Any]
    write: Callable[[Any], None]
    report: Report = print

    def fit(self, state: TrainState, texts: Texts, progress: Progress) -> tuple[TrainState, bool]:
        """Runs dispatches until the budget is spent; returns the state, and whether it ran to the end.

        While one dispatch runs the next one is queued. Ctrl-C or SIGTERM ends the loop after the dispatches under way.

        Raises:
          FloatingPointError: the loss is no longer finite; the last checkpoint is from before.
        """
        count = self.settings.steps_a_dispatch
        inside = np.arange(count)
        if self.writer and not progress.chunks:  # compiles, which is not training's time
            texts = texts.replace(own=self._renewed(texts.own, progress))
        start = last = kept = time.monotonic()
        before, took = progress.seconds, 0.0
        step = int(state.step)
        queued = None

        def collect():
            nonlocal queued, last, took
            if queued is None:
                return
            figures, done = jax.device_get(queued[0]), queued[1]
            queued = None
            took, last = time.monotonic() - last, time.monotonic()
            progress.seconds = before + last - start
            self._note(progress, figures, done, took)

        with StopRequest() as stop:
            while not stop.asked:
                begins = before + time.monotonic() - start + (took if queued else 0.0)
                share = self.budget.progress(step + inside, begins + inside / count * took)
                if share[0] >= 1:
                    break
                number = step // count
                if self.writer and number % self.renew_every == 0 and progress.chunks <= number // self.renew_every:
                    collect()
                    texts = texts.replace(own=self._renewed(texts.own, progress))
                    last = time.monotonic()
                rate = jnp.asarray(learning_rate(share, step + inside, self.settings.warmup))
                state, figures = self.dispatch(state, self.target_params, texts, rate)
                step += count
                collect()
                queued = figures, step
                if self.measure_every and (step // count) % self.measure_every == 0:
                    collect()
                    self._measure(progress, state.params, step)
                    last = time.monotonic()
                if time.monotonic() - kept > self.keep_seconds:
                    collect()
                    self.keep(state, texts, progress)
                    kept = last = time.monotonic()
            collect()
        if stop.asked:
            self.report("stopped on request: keeping what there is")
        self.keep(state, texts, progress)
        return state, not stop.asked

    def keep(self, state: TrainState, texts: Texts, progress: Progress) -> None:
        """Writes a checkpoint, and the draft as it is."""
        self.write(state.params)
        self.keeper.save(state, texts.own, {**self.about, "progress": dataclasses.asdict(progress)})

    def _renewed(self, own, progress):
        """The pool with its older half replaced, or with one chunk in both halves at the start."""
        begin = time.monotonic()
        chunk = jnp.asarray(self.writer.write(progress.chunks))
        first = progress.chunks == 0
        progress.chunks += 1
        self.report(
            f"own text, chunk {progress.chunks}: {chunk.size} tokens written in {time.monotonic() - begin:.1f} s"
        )
        return jnp.concatenate([chunk if first else own[chunk.shape[0] :], chunk])

    def _measure(self, progress, params, step):
        begin = time.monotonic()
        found = {"step": step, "seconds": round(progress.seconds, 2), **self.measure(params)}
        progress.rounds.append(found)
        shares = " ".join(f"{share:.3f}" for share in found["acceptance"])
        self.report(
            f"step {step:5d}  real rounds: {found['accept_length']:.3f} tokens a step, acceptance {shares} "
            f"({time.monotonic() - begin:.1f} s)"
        )

    def _note(self, progress, figures, done, took):
        """Appends to the curve and says how it goes."""
        count, settings = self.settings.steps_a_dispatch, self.settings
        means = {name: np.mean(each, axis=0) for name, each in figures.items()}
        point = {"step": done, "seconds": round(progress.seconds, 2)}
        progress.curve.append(point | {name: np.round(mean, 4).tolist() for name, mean in means.items()})
        share = float(self.budget.progress(done, progress.seconds))
        left = max(progress.seconds / share - progress.seconds, 0) if share else float("nan")
        self.report(
            f"step {done:5d}  loss {means['nats']:.4f}  agree {' '.join(f'{x:.3f}' for x in means['agree'])}  "
            f"{1 + means['accept'].sum():.3f} tokens a step, teacher-forced  "
            f"{count * settings.batch * settings.length / max(took, 1e-9) / 1e6:.3f} M tokens/s  "
            f"{progress.seconds:.0f} s  ETA {left:.0f} s"
        )
        if not np.isfinite(figures["nats"]).all():
            raise FloatingPointError(f"the loss is not finite at step {done}: a lower learning rate may help")
