"""How each request samples: checked on the host, kept as one array of the state, opened inside the step."""

import math
import numbers
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.config import VERIFIERS, SpecConfig
from jaxspec.errors import InputError
from jaxspec.verification import Sampling

# For each setting: its type, whether a value is one, and what to say if it is not.
_SETTINGS = {
    "temperature": (
        np.float32,
        lambda x: 0 <= x < math.inf,
        "must be a finite number of at least 0; 0 takes the most likely token",
    ),
    "top_k": (
        np.int32,
        lambda x: isinstance(x, numbers.Integral) and 0 <= x < 2**31,
        "must be an integer of at least 0; 0 keeps all tokens",
    ),
    "top_p": (np.float32, lambda x: 0 < x <= 1, "must be above 0 and at most 1; 1 keeps all tokens"),
    "seed": (
        np.uint32,
        lambda x: isinstance(x, numbers.Integral) and 0 <= x < 2**32,
        f"must be an integer in 0 .. {2**32 - 1}",
    ),
}
SETTING_NAMES = tuple(_SETTINGS)
_UNUSED = {"temperature": 0, "top_k": 0, "top_p": 1, "seed": 0}  # of rows without a request


def pack_settings(config: SpecConfig, count: int, **settings: Any) -> np.ndarray | None:
    """The settings of `count` requests as they are kept in the state.

    Args:
      config: whose `sampling` says if requests may sample.
      count: number of requests, at most B.
      settings: temperature, top_k, top_p and seed, each one number or one a request.

    Returns:
      int32[4, R], the bits of the four settings by request row; None where the configuration is greedy.

    Raises:
      InputError: a setting that is none, or a temperature above 0 where the configuration is greedy.

    Example:
      >>> config = SpecConfig(batch_size=2, num_draft_tokens=4, context_len=64, max_new_tokens=8)
      >>> pack_settings(config, 1, temperature=0.7, top_k=0, top_p=1.0, seed=0)  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      ...
      jaxspec.errors.InputError: temperature=0.7: the configuration says sampling=None, so every request is greedy; ...
    """
    packed = []
    for name, (dtype, valid, rule) in _SETTINGS.items():
        value = settings[name].tolist() if hasattr(settings[name], "tolist") else settings[name]
        values = [value] * count if isinstance(value, numbers.Real) else value
        if not isinstance(values, list | tuple) or len(values) != count:
            raise InputError(f"{name}={value!r}: give one number, or one for each of {count} prompts")
        for one in values:
            if not isinstance(one, numbers.Real) or not valid(one):
                raise InputError(f"{name}={one!r}: {rule}")
        row = np.full(config.rows, _UNUSED[name], dtype)
        row[1 : count + 1] = np.asarray(values, dtype)
        packed.append(row)
        if name == "temperature" and config.sampling is None and (row > 0).any():
            raise InputError(
                f"temperature={value!r}: the configuration says sampling=None, so every request is greedy; say "
                f"{', '.join(map(repr, VERIFIERS[:-1]))} or {VERIFIERS[-1]!r} there"
            )
    return None if config.sampling is None else np.stack([row.view(np.int32) for row in packed])


def lane_settings(state) -> Sampling | None:
    """`Sampling` of the B lanes of a state; None where its configuration is greedy."""
    if state.settings is None:
        return None
    lanes = state.settings[:, 1:]
    return Sampling(
        **{name: lax.bitcast_convert_type(lanes[i], jnp.dtype(_SETTINGS[name][0])) for i, name in enumerate(_SETTINGS)}
    )
