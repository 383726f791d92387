"""The gate of Kimi Delta Attention: from a projection to how much each key channel forgets."""

import jax
import jax.numpy as jnp

Array = jax.Array


def kda_gate(f: Array, A_log: Array, dt_bias: Array, lower_bound: float | None = None) -> Array:
    """Logarithms of decays, one a key channel.

    Without a bound -exp(A_log) softplus(f + dt_bias), which may fall as far as it likes; with one, a number below 0,
    lower_bound sigmoid(exp(A_log) (f + dt_bias)), which stays above it.

    Args:
      f: [..., HV, K], the projection's rows.
      A_log: [HV].
      dt_bias: [HV, K].
      lower_bound: the least that a row may get, or None.

    Returns:
      float32 [..., HV, K], the `log_decay` of `gated_delta`.

    Raises:
      ValueError: shapes that do not fit, or a bound that is not below 0.

    Example:
      >>> f, A_log, dt_bias = jnp.zeros((1, 2)), jnp.zeros(1), jnp.zeros((1, 2))
      >>> print(kda_gate(f, A_log, dt_bias).round(3), kda_gate(f, A_log, dt_bias, lower_bound=-5.0))
      [[-0.693 -0.693]] [[-2.5 -2.5]]

    Source: "Kimi Linear: An Expressive, Efficient Attention Architecture" (arXiv 2510.26692).
    """
    HV, K = f.shape[-2:]
    if A_log.shape != (HV,) or dt_bias.shape != (HV, K):
        raise ValueError(
            f"A_log and dt_bias have shapes {A_log.shape} and {dt_bias.shape}: beside f {f.shape} they must be "
            f"[HV] and [HV, K], here {(HV,)} and {(HV, K)}"
        )
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"lower_bound is {lower_bound}: a decay's logarithm has a bound below 0, or None for none")
    rate = jnp.exp(A_log.astype(jnp.float32))[:, None]
    step = f.astype(jnp.float32) + dt_bias.astype(jnp.float32)
    if lower_bound is None:
        return -rate * jax.nn.softplus(step)
    return lower_bound * jax.nn.sigmoid(rate * step)
