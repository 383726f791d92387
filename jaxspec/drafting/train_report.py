"""How good a draft under training is: by real speculative rounds, by teacher forcing on held-out text, and drawn."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.drafting.base import Drafter
from jaxspec.drafting.train_common import Batch, Learner
from jaxspec.errors import InputError
from jaxspec.generation import Generation, generate
from jaxspec.generation.accounting import distinct_4gram_ratio
from jaxspec.models.checkpoint import Checkpoint
from jaxspec.models.corpus import END_OF_TEXT_ID, read_tokens
from jaxspec.models.heldout import Windows
from jaxspec.steps import Params

Array = jax.Array

_EVERY = 8  # one anchor in so many positions of held-out text


def heldout_prompts(corpus: pathlib.Path, count: int, length: int, new: int) -> list[np.ndarray]:
    """Prompts int32[length]: starts of held-out documents that go on for `new` tokens at least, spread over all of
    them.

    Raises:
      InputError: no document is long enough.
    """
    ids = read_tokens(corpus / "heldout.tokens.xz").astype(np.int32)
    ends = np.flatnonzero(ids == END_OF_TEXT_ID)
    starts = np.concatenate([[0], ends[:-1] + 1])
    long = starts[ends - starts >= length + new]
    if not len(long):
        raise InputError(f"{corpus} has no held-out document of {length + new} tokens: ask for shorter prompts")
    chosen = long[np.linspace(0, len(long) - 1, min(count, len(long))).astype(int)]
    return [ids[start : start + length] for start in chosen]


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Measures drafts by real rounds: greedy completions of held-out prompts through `jaxspec.generate`.

    Fields:
      target: who decides.
      prompts: token ids.
      new: tokens of a completion.
      num_draft_tokens: D.
    """

    target: Checkpoint
    prompts: tuple[np.ndarray, ...]
    new: int
    num_draft_tokens: int

    def run(self, drafter: Drafter, draft: Any) -> Generation:
        """The generation itself."""
        return generate(
            self.target.model,
            Params(self.target.params, draft),
            self.prompts,
            drafter=drafter,
            num_draft_tokens=self.num_draft_tokens,
            max_new_tokens=self.new,
        )

    def figures(self, drafter: Drafter, draft: Any) -> dict[str, Any]:
        """`accept_length`, completion tokens over rounds; `acceptance`, for each draft position the share of rounds
        that accepted it; `distinct_4grams`, the share of distinct ones in the completions."""
        found = self.run(drafter, draft)
        distinct = distinct_4gram_ratio(found.token_ids)
        return {
            "accept_length": round(found.accept_length, 4),
            "acceptance": [round(share, 4) for share in found.acceptance_per_position],
            "distinct_4grams": None if distinct is None else round(distinct, 4),
        }

    def describe(self) -> str:
        """One sentence on how the figures are measured."""
        return (
            f"greedy completions of {self.new} tokens of {len(self.prompts)} held-out prompts of "
            f"{len(self.prompts[0])} tokens, num_draft_tokens {self.num_draft_tokens}; acceptance counts rounds"
        )


def make_same(
    learner: Learner, batch: Callable[[Any, Array], Batch], options: dict[str, Any] | None = None
) -> Callable[[Any, Any, Array, Array], Array]:
    """The jitted `same(params, target_params, tokens int32[B, T], anchors int32[B, A]) -> bool[B, A, gamma]`.

    Args:
      learner: kind of draft.
      batch: from `jaxspec.drafting.train_target.make_batch`.
      options: XLA's.
    """

    @functools.partial(jax.jit, compiler_options=options)
    def same(params, target_params, tokens, anchors):
        return learner.same(params, batch(target_params, tokens), anchors)

    return same


def teacher_forced(
    same: Callable[[Any, Any, Array, Array], Array],
    gamma: int,
    params: Any,
    target_params: Any,
    windows: Windows,
    size: int,
) -> dict[str, Any]:
    """How often each draft is the target's most likely id, the held-out text itself being the context.

    Args:
      same: from `make_same`.
      gamma: drafts.
      params: the draft's.
      target_params: the target's.
      windows: held-out text.
      size: windows a forward.

    Returns:
      `agreement`: share of anchors at which draft j is right; `acceptance`: at which drafts 1 .. j all are;
      `tokens_per_verify`, 1 + the sum of the latter: tokens of a step if the target continued as the text does.
      `anchors`: how many were counted, one in eight positions.
    """
    length = windows.tokens.shape[1]
    count = (length - gamma - 1) // _EVERY
    right, runs, total = np.zeros(gamma), np.zeros(gamma), 0
    for start in range(0, len(windows.tokens), size):
        tokens, lengths = (x[start : start + size] for x in (windows.tokens, windows.lengths))
        rows = len(tokens)
        tokens = np.pad(tokens, ((0, size - rows), (0, 0)))  # one shape, one compilation
        first = 1 + np.arange(size)[:, None] % _EVERY
        anchors = first + _EVERY * np.arange(count)
        found = np.asarray(same(params, target_params, jnp.asarray(tokens), jnp.asarray(anchors, jnp.int32)))[:rows]
        found = found[anchors[:rows] + gamma < lengths[:, None]]
        right, runs, total = right + found.sum(0), runs + np.cumprod(found, axis=1).sum(0), total + len(found)
    shares = {"agreement": right / max(total, 1), "acceptance": runs / max(total, 1)}
    figures: dict[str, Any] = {name: np.round(share, 4).tolist() for name, share in shares.items()}
    return figures | {"tokens_per_verify": round(float(1 + shares["acceptance"].sum()), 4), "anchors": total}


def plot(path: pathlib.Path, record: dict[str, Any]) -> str | None:
    """Draws loss, teacher-forced agreement and the acceptance of real rounds over the steps into a PNG.

    Args:
      path: file to write; it appears whole or not at all.
      record: as training.json holds it.

    Returns:
      None, or, where matplotlib is not installed, a line that says so.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return "no plot: matplotlib is not installed (pip install 'jaxspec-decode[train]')"
    curve, rounds = record["curve"], record["rounds"]
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    loss, agree, real = figure.subplots(1, 3)
    steps = [point["step"] for point in curve]
    loss.plot(steps, [point["nats"] for point in curve])
    loss.set(title="cross-entropy with the target's choice", ylabel="nats a draft", xlabel="step")
    _by_position(agree, steps, [point["agree"] for point in curve], "")
    agree.set(title="agreement, teacher-forced", ylabel="share of anchors")
    _by_position(real, [point["step"] for point in rounds], [point["acceptance"] for point in rounds], "o")
    real.set(title="acceptance in real rounds", ylabel="share of rounds")
    part = path.with_suffix(".part")
    figure.savefig(part, format="png", dpi=110)
    part.replace(path)
    return None


def _by_position(axes, steps, shares, marker):
    """One line a draft position."""
    for j, share in enumerate(zip(*shares, strict=True), 1):
        axes.plot(steps, share, marker=marker or None, markersize=3, label=f"draft {j}")
    axes.set(ylim=(0, 1), xlabel="step")
    if shares:
        axes.legend(fontsize=7)
