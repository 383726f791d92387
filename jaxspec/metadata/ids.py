"""Ids that know which space they belong to, for finding a translation that happens twice or not at all.

A token location or page number is virtual, or physical in FULL or in SWA, or names a state: int32 arrays that look
alike. With `SpecConfig(check_ids=True)` the step marks the virtual ids it starts from; builders mark what they make of
them, and who reads a mark it does not expect raises while the program is traced. The compiled program is the same.
"""

import flax.struct
import jax

Array = jax.Array


@flax.struct.dataclass
class Ids:
    """Ids of one space.

    Attributes:
      value: int32 array of any shape.
      space: "virtual", or the kind of page: "full", "swa" or "state" (static).
    """

    value: Array
    space: str = flax.struct.field(pytree_node=False)


def marked(ids: Array | Ids | None, space: str, like: Array | Ids) -> Array | Ids | None:
    """`ids` with a mark if `like` has one, else as they are. None stays None."""
    return Ids(ids, space) if isinstance(like, Ids) and ids is not None else ids


def unmarked(ids: Array | Ids, space: str) -> Array:
    """The array behind ids that must be of `space`; an array without a mark passes.

    Raises:
      TypeError: the ids are of another space.

    Example:
      >>> import jax.numpy as jnp
      >>> unmarked(Ids(jnp.array([3]), "full"), "full").tolist()
      [3]
      >>> unmarked(Ids(jnp.array([3]), "virtual"), "full")
      Traceback (most recent call last):
      ...
      TypeError: ids are 'virtual' where 'full' ones are needed: translate virtual ids once, by the map of their kind
    """
    if not isinstance(ids, Ids):
        return ids
    if ids.space != space:
        raise TypeError(
            f"ids are {ids.space!r} where {space!r} ones are needed: translate virtual ids once, by the map of their "
            "kind"
        )
    return ids.value
