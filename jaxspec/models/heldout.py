"""How well a model predicts held-out text, and how well a draft model predicts its target there.

Documents are cut from their start into windows of at most the context; nothing is carried from one window to the next.
The first token of a window has no context and is not scored, nor are its bytes counted.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from jaxspec.models.checkpoint import Checkpoint, Module
from jaxspec.models.corpus import END_OF_TEXT_ID, read_tokens
from jaxspec.models.glm import Glm, dense_attend_pooled
from jaxspec.models.qwen3 import dense_attend

LATE = (2048, 2600)  # positions reported apart: past the length most small models are trained at


@dataclasses.dataclass(frozen=True)
class Windows:
    """Held-out text ready to be scored.

    Fields:
      tokens: int32 [N, T], padded at the end with id 0.
      lengths: int32 [N], real tokens a window.
      widths: int32 [V], UTF-8 bytes of each token.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    widths: np.ndarray


def token_widths(tokenizer: tokenizers.Tokenizer) -> np.ndarray:
    """UTF-8 bytes that each id stands for, int32 [V]; 0 for the end of text.

    A byte-level vocabulary writes each byte as one character, so a token's length in characters is its width.
    """
    widths = np.zeros(tokenizer.get_vocab_size(), np.int32)
    for token, index in tokenizer.get_vocab().items():
        widths[index] = len(token)
    widths[END_OF_TEXT_ID] = 0
    return widths


def read_windows(corpus: pathlib.Path, tokenizer: tokenizers.Tokenizer, length: int, limit: int | None) -> Windows:
    """The held-out documents of a corpus folder as windows of at most `length` tokens, the long windows first.

    Args:
      corpus: folder written by `jaxspec.models.corpus`.
      tokenizer: its tokenizer.
      length: T.
      limit: keep the first windows up to this many tokens; None keeps all.
    """
    ids = read_tokens(corpus / "heldout.tokens.xz").astype(np.int32)
    ends = np.flatnonzero(ids == END_OF_TEXT_ID)
    parts = []
    for start, end in zip(np.concatenate([[0], ends[:-1] + 1]), ends, strict=True):
        parts += [ids[at : min(at + length, end)] for at in range(start, end, length)]
    parts = sorted((p for p in parts if len(p) > 1), key=len, reverse=True)
    if limit is not None:
        kept = int(np.searchsorted(np.cumsum([len(p) for p in parts]), limit)) + 1
        parts = parts[:kept]
    tokens = np.zeros((len(parts), length), np.int32)
    for row, part in zip(tokens, parts, strict=True):
        row[: len(part)] = part
    return Windows(tokens, np.array([len(p) for p in parts], np.int32), token_widths(tokenizer))


def text_attend(module: Module, sparse: bool = True):
    """The `attend` argument of a module for whole texts; sparse layers select unless `sparse` is False."""
    if isinstance(module, Glm):
        return dense_attend_pooled(module.config, sparse=sparse)
    return dense_attend(module.config.windows)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _score(module, sparse, params, tokens):
    """Nats of every token given those before it, float32 [B, T - 1], and the most likely next id, int32 [B, T - 1]."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    logits, _, _ = module.apply(params, tokens, positions, text_attend(module, sparse))
    logits = logits[:, :-1]
    picked = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked, jnp.argmax(logits, axis=-1).astype(jnp.int32)


def score(model: Checkpoint, windows: Windows, batch: int, *, sparse: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Nats and most likely next ids of every window, [N, T - 1] both; entries past a window's length mean nothing."""
    return _by_batch(functools.partial(_score, model.module, sparse, model.params), windows, batch)


def _by_batch(run, windows, batch):
    """`run(tokens [batch, T]) -> tuple of arrays [batch, ...]` over all windows, joined."""
    parts = []
    for start in range(0, len(windows.tokens), batch):
        tokens = windows.tokens[start : start + batch]
        rows = len(tokens)
        tokens = np.pad(tokens, ((0, batch - rows), (0, 0)))  # one shape, one compilation
        parts.append([each[:rows] for each in jax.device_get(run(tokens))])
    return tuple(np.concatenate(each) for each in zip(*parts, strict=True))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _ahead(module, blocks, steps, params, block_params, tokens):
    """Most likely next ids of the model, int32 [B, T], and of each step of its MTP blocks, [B, T] each.

    Row p of step s is given the text up to token p + s and says token p + s + 1, which row p + s of the model says.
    """
    attend = text_attend(module)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    logits, hidden, _ = module.apply(params, tokens, positions, attend)
    found = [jnp.argmax(logits, axis=-1).astype(jnp.int32)]
    for step in range(steps):
        tokens = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
        block = min(step, len(blocks.layers) - 1)
        logits, hidden, _ = blocks.apply(block_params, block, tokens, hidden, positions, attend)
        found.append(jnp.argmax(logits, axis=-1).astype(jnp.int32))
    return tuple(found)


def look_ahead(model: Checkpoint, windows: Windows, batch: int, steps: int = 3) -> dict[str, Any]:
    """How often each step of the MTP blocks says what the model says, with the held-out text itself as context.

    `acceptance` is that share, step by step; `tokens_per_verify` is 1 + the mean number of steps in a row that agree,
    counted from every position: what a chain of so many drafts would bring if the model continued as the text does.
    Steps after the first select anew, by the rows they are at.
    """
    run = functools.partial(_ahead, model.module, model.mtp, steps, model.params, model.mtp_params)
    target, *ahead = _by_batch(run, windows, batch)
    rows = np.arange(target.shape[1])[None, :]
    inside, run, total, shares = None, None, 0.0, []
    for step, ids in enumerate(ahead, 1):
        same = ids[:, :-step] == target[:, step:]
        counted = (rows + step < windows.lengths[:, None])[:, :-step]
        shares.append(round(float(same[counted].mean()), 4))
        run = same & counted if run is None else run[:, :-1] & same & counted
        inside = int(counted.sum()) if inside is None else inside
        total += float(run.sum())
    return {"acceptance": shares, "tokens": inside, "tokens_per_verify": round(1 + total / inside, 4)}


def _scored(windows: Windows) -> np.ndarray:
    """True where column i, which predicts position i + 1, is inside the window: bool [N, T - 1]."""
    return np.arange(1, windows.tokens.shape[1])[None, :] < windows.lengths[:, None]


def bits_per_byte(nats: np.ndarray, windows: Windows, first: int = 1, last: int | None = None) -> dict[str, float]:
    """Bits per byte and nats per token of the tokens at positions `first` to `last` - 1 of their windows.

    Bytes are those of the scored tokens. Without any such token the figures are None.
    """
    position = np.arange(1, windows.tokens.shape[1])[None, :]
    counted = _scored(windows) & (position >= first) & (position < (last or windows.tokens.shape[1]))
    count, size = int(counted.sum()), int((windows.widths[windows.tokens[:, 1:]] * counted).sum())
    total = float(np.where(counted, nats, 0).sum(dtype=np.float64))
    return {
        "bits_per_byte": round(total / math.log(2) / size, 4) if size else None,
        "nats_per_token": round(total / count, 4) if count else None,
        "tokens": count,
        "bytes": size,
    }


def agreement(draft: np.ndarray, target: np.ndarray, windows: Windows, depths: Sequence[int] = (4, 8)) -> dict:
    """How often the draft's most likely id is the target's, with the held-out text itself as context (teacher-forced).

    `tokens_per_verify` for a depth K is 1 + the mean number of agreeing positions in a row, at most K, counted from
    every position: what a chain of K drafts would bring if the target continued as the text does.
    """
    inside = _scored(windows)
    same = (draft == target) & inside
    result = {"acceptance": round(float(same.sum() / max(inside.sum(), 1)), 4), "tokens": int(inside.sum())}
    result["tokens_per_verify"] = {}
    for depth in depths:
        run, total = np.ones_like(same), 0
        for step in range(depth):
            run = run[:, : same.shape[1] - step] & same[:, step:] if step else run & same
            total += run.sum()
        result["tokens_per_verify"][str(depth)] = round(1 + float(total / max(inside.sum(), 1)), 4)
    return result


def evaluate(model: Checkpoint, windows: Windows, batch: int, *, sparse: bool = True) -> dict[str, Any]:
    """Bits per byte over all positions and over those from 2048 to 2599; `sparse` as in `text_attend`."""
    nats, _ = score(model, windows, batch, sparse=sparse)
    return {"all": bits_per_byte(nats, windows), f"positions_{LATE[0]}_{LATE[1]}": bits_per_byte(nats, windows, *LATE)}


def describe(windows: Windows, manifest: pathlib.Path) -> str:
    """One sentence on how the figures were measured."""
    documents = len(json.loads(manifest.read_text())["heldout"]["documents"])
    return (
        f"{len(windows.tokens)} windows of at most {windows.tokens.shape[1]} tokens from {documents} held-out files, "
        "cut from each file's start; the first token of a window is not scored; whole windows without a cache, weights "
        "as stored"
    )
