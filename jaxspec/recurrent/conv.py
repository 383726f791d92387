"""The short causal convolution: each channel mixes its last W inputs."""

from typing import Literal

import jax
import jax.numpy as jnp

Array = jax.Array


def short_conv(
    x: Array,
    window: Array,
    weight: Array,
    *,
    real: Array | None = None,
    keep: Literal["last", "rows"] = "last",
) -> tuple[Array, Array]:
    """Depthwise causal convolution over the rows of each request, continued from its previous inputs, then SiLU.

    y[b, t, c] = silu(sum over w of weight[c, w] * input[b, t - W + 1 + w, c]), where the inputs before row 0 are those
    of `window`. Inputs are rounded to the window's dtype and summed in float32, always in the same order, so that rows
    taken in several calls give the bits of one call.

    Args:
      x: [B, T, C], the inputs of T rows; T may be 0.
      window: [B, W - 1, C], the inputs before row 0, the newest last; zeros at the start of a text.
      weight: [C, W]; the last tap meets the row itself.
      real: bool[B, T], or None where every row is. The real rows of a request come first. A row that is not real gives
        zeros and moves no window, whatever x holds there.
      keep: "last" or "rows", which windows to return.

    Returns:
      y, [B, T, C] in x's dtype, and in the window's dtype the window after the last real row, [B, W - 1, C], or with
      keep="rows" the one after each row, [B, T, W - 1, C].

    Example:
      >>> x, window = jnp.ones((1, 2, 1)), jnp.zeros((1, 2, 1))
      >>> y, window = short_conv(x, window, jnp.array([[0.0, 1.0, 1.0]]), real=jnp.array([[True, False]]))
      >>> [f"{value:.3f}" for value in y[0, :, 0]], window[0, :, 0].tolist()
      (['0.731', '0.000'], [0.0, 1.0])
    """
    B, T, C = x.shape
    W = weight.shape[-1]
    if weight.shape != (C, W) or window.shape != (B, W - 1, C):
        raise ValueError(
            f"x, window and weight have shapes {x.shape}, {window.shape} and {weight.shape}: "
            "they must be [B, T, C], [B, W - 1, C] and [C, W]"
        )
    if real is not None and real.shape != (B, T):
        raise ValueError(f"real has shape {real.shape}: it must be [B, T], here {(B, T)}")
    if keep not in ("last", "rows"):
        raise ValueError(f"keep is {keep!r}: it must be 'last' or 'rows'")

    inputs = x.astype(window.dtype)
    if real is not None:
        inputs = jnp.where(real[:, :, None], inputs, 0)
    inputs = jnp.concatenate([window, inputs], axis=1)  # [B, W - 1 + T, C]: row t sees the W inputs from t on
    taps = weight.astype(jnp.float32)
    y = jax.nn.silu(sum(taps[:, w] * inputs[:, w : w + T].astype(jnp.float32) for w in range(W)))
    y = y.astype(x.dtype)
    if real is not None:
        y = jnp.where(real[:, :, None], y, 0)

    # After n real rows the window is the W - 1 inputs from n on.
    span = jnp.arange(W - 1, dtype=jnp.int32)
    rows = jnp.arange(1, T + 1, dtype=jnp.int32)
    if real is None:
        return y, inputs[:, T:] if keep == "last" else inputs[:, rows[:, None] + span]
    seen = jnp.sum(real, axis=1, dtype=jnp.int32)[:, None]
    starts = seen if keep == "last" else jnp.minimum(rows, seen)  # [B, 1] or [B, T]
    lanes = jnp.arange(B, dtype=jnp.int32)[:, None, None]
    kept = inputs.at[lanes, starts[:, :, None] + span].get(mode="promise_in_bounds")
    return y, kept[:, 0] if keep == "last" else kept
