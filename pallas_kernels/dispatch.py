"""Who runs a kernel that is written in Pallas Triton itself, in tiles, not in the lane language.

Such a kernel has two executors, `triton` and `interpret`, beside its jnp reference; `mosaic` and `checked` run the lane
language only. Everything else is as in `pallas_kernels.backend`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from pallas_kernels import backend as backends

LANES_ONLY = ("mosaic", "checked")  # the executors of the lane language alone


def dispatch(name: str, backend: str | None, kernel: Callable, reference: Callable, arguments: tuple) -> Any:
    """What the kernel, or its reference, makes of the arguments.

    With `backend=None` the choice is made when the program is lowered: CUDA gets the kernel, any other platform the
    reference, and so does CUDA where there is no Triton or the device is too old for it.

    Args:
      name: of the function that the user called, for messages.
      backend: None, 'triton', 'interpret' or 'reference'.
      kernel: kernel(*arguments, interpret=bool), which launches it. Like `reference` a function of a module, or a
        functools.partial of one and of hashable settings: equal ones are compiled once.
      reference: reference(*arguments), the same in jnp.
      arguments: pytrees of arrays. Whoever calls sees to it that the kernel can run on them: none of them is empty.

    Raises:
      ValueError: an unknown backend, one that runs no such kernels, or 'triton' where it cannot run.

    >>> import jax.numpy as jnp
    >>> from jax.experimental import pallas as pl
    >>> def double(x, *, interpret):
    ...     def body(x, out):
    ...         out[...] = x[...] + x[...]
    ...
    ...     return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=interpret)(x)
    >>> [dispatch("double", b, double, lambda x: 2 * x, (jnp.arange(4),)).tolist() for b in (None, "interpret")]
    [[0, 2, 4, 6], [0, 2, 4, 6]]
    """
    backends.check(backend)
    if backend in LANES_ONLY:
        raise ValueError(
            f"backend={backend!r} runs kernels of the lane language, which {name} is not: leave backend out, or name "
            "'triton', 'interpret' or 'reference'"
        )
    if backend == "triton" and (reason := backends.declined("triton", tuple(jax.tree.leaves(arguments)))):
        raise ValueError(f"backend={backend!r}: {reason}; leave backend out, or name 'reference' or 'interpret'")
    return _compiled(backend, _comparable(kernel), _comparable(reference), tuple(arguments))


def supported(backend: str | None) -> str | None:
    """The backend for `dispatch` inside a program whose other kernels run on `backend`: None for those of the lane
    language alone.

    >>> supported("mosaic"), supported("interpret")
    (None, 'interpret')
    """
    return None if backend in LANES_ONLY else backend


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _compiled(backend: str | None, kernel: Callable, reference: Callable, arguments: tuple) -> Any:
    # The private parts of `backend` are this package's: one rule says what CUDA gets.
    chosen = backend or backends._fastest(backends._capability())[0]
    if chosen not in ("triton", "interpret"):
        return reference(*arguments)
    launch = functools.partial(kernel, interpret=chosen == "interpret")
    if backend is None:
        return lax.platform_dependent(*arguments, cuda=launch, default=reference)
    return launch(*arguments)


@dataclasses.dataclass(frozen=True)
class _Bound:
    """A functools.partial that equals another one of the same parts."""

    function: Callable
    positional: tuple
    named: tuple

    def __call__(self, *arguments, **more):
        return self.function(*self.positional, *arguments, **dict(self.named), **more)


def _comparable(function: Callable) -> Callable:
    if not isinstance(function, functools.partial):
        return function
    return _Bound(function.func, function.args, tuple(sorted(function.keywords.items())))
