"""What the folder of a draft holds: the tensors of a kind of draft, and where they go in its parameter tree."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class DraftTensor:
    """A tensor of the file.

    Attributes:
      path: its place in the tree.
      shape: in the file, matrices as [out, in].
      transposed: whether the tree holds the matrix as [in, out].
      optional: whether the draft does without it: an embedding that may be the target's, say.
      integer: whether it holds ids, int32 in the tree and int64 in the file, rather than weights.

    Example:
      >>> tensor = DraftTensor(("layer", "q_proj"), (4, 2), transposed=True)
      >>> tensor.to_tree(np.zeros((4, 2)), "float32").shape
      (2, 4)
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    transposed: bool = False
    optional: bool = False
    integer: bool = False

    def to_tree(self, value: np.ndarray, dtype: Any) -> np.ndarray:
        """The file's array as the tree holds it, weights in `dtype`."""
        value = value.T if self.transposed else value
        return np.ascontiguousarray(value).astype(np.int32 if self.integer else jnp.dtype(dtype))

    def to_file(self, value: np.ndarray, dtype: Any) -> np.ndarray:
        """The inverse of `to_tree`."""
        value = value.T if self.transposed else value
        return np.ascontiguousarray(value).astype(np.int64 if self.integer else jnp.dtype(dtype))


@dataclasses.dataclass(frozen=True)
class DraftFormat:
    """A kind of draft to whoever reads or writes its folder.

    Attributes:
      kind: its name, as "eagle3".
      architectures: what `architectures` of its config.json names, any of these.
      read: `(settings, target_config) -> config`: the parsed config.json, checked against the target's configuration.
      tensors: `config -> {name: DraftTensor}`, names as they are without a leading "model.".
      alias: `name -> name`, another spelling of a tensor's name as the one in `tensors`.
      ignored: names of tensors that the file may hold and nobody reads.
      notes: `settings -> lines`, what the parsed config.json leaves to a default that a user may want to know of.
      check: `(config, tree)`: raises InputError where values that were read make no sense together.
      build: `(config, dtype) -> draft`, the network.
    """

    kind: str
    architectures: tuple[str, ...]
    read: Callable[[Mapping[str, Any], Any], Any]
    tensors: Callable[[Any], dict[str, DraftTensor]]
    build: Callable[[Any, Any], Any]
    alias: Callable[[str], str] = lambda name: name
    ignored: tuple[str, ...] = ()
    notes: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda settings: ()
    check: Callable[[Any, Mapping[str, Any]], None] = lambda config, tree: None
