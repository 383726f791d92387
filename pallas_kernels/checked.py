"""The lane language on NumPy, eagerly, with every access checked: what interpretation and a GPU hide stops here.

Interpretation clamps an index past the end, wraps a negative one and drops a store past the end; on a GPU all three
touch somebody else's memory. Here the body runs as ordinary Python, programs one after another in a permuted order, and
`KernelFault` is raised when

* a live lane's index is negative or past the end;
* a cell declared dead is read (see `declare`);
* two live lanes of a store have one cell, or a masked lane has the cell of a live one;
* two programs write one cell, or one reads a cell that another one writes, in whatever order they run;
* something is stored to an input, an index is no integer, a stored value is neither one nor of the array's dtype, or a
  vector's lanes are no power of two.
"""

import contextlib
import contextvars
import types
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.lanes import Lanes, Operation


class KernelFault(AssertionError):
    """A kernel body touched what it must not touch; the message names kernel, program, array and indices."""


class _Declared(NamedTuple):
    dead: Mapping[str, np.ndarray] = types.MappingProxyType({})
    seed: int = 0


_NOTHING = _Declared()
_declared = contextvars.ContextVar("declared", default=_NOTHING)


@contextlib.contextmanager
def declare(*, dead: Mapping[str, np.ndarray] | None = None, seed: int = 0):
    """Settings of the checked calls inside a `with` block.

    Args:
      dead: for names of arguments, such as 'source', a bool array of the argument's buffer: True where a cell must not
        be read, because what it holds is stale.
      seed: of the order in which programs run; a result must not depend on it.

    >>> import jax.numpy as jnp, numpy as np
    >>> from pallas_kernels import checked, kv_read_table
    >>> call = dict(req_rows=jnp.array([0]), source=jnp.array([[3, 9]]), out=jnp.zeros((1, 2), jnp.int32))
    >>> with checked.declare(dead={"source": np.array([[False, True]])}):
    ...     kv_read_table(jnp.array([4]), **call, page_size=4, zero_tail=True, backend="checked").tolist()
    ...     kv_read_table(jnp.array([5]), **call, page_size=4, zero_tail=True, backend="checked")
    Traceback (most recent call last):
    ...
    pallas_kernels.checked.KernelFault: kv_read_table, program 0: load of dead cells of source[1, 2]: (0, 1)
    """
    token = _declared.set(_Declared({name: np.asarray(mask, bool) for name, mask in (dead or {}).items()}, seed))
    try:
        yield
    finally:
        _declared.reset(token)


def launch(operation: Operation, inputs: tuple, outputs: tuple) -> tuple:
    """Run all programs of the operation; `outputs` stay as they are, the results are new arrays."""
    if any(isinstance(array, jax.core.Tracer) for array in (*inputs, *outputs)):
        raise ValueError(
            "backend='checked' runs eagerly on NumPy and was given traced arrays: call it outside jit, "
            "or name 'interpret'"
        )
    if operation.programs == 0:
        return operation.reference(inputs, outputs)
    settings = _declared.get()
    if unknown := set(settings.dead) - set(operation.labels):
        raise ValueError(f"dead={sorted(unknown)}: {operation.name} reads only {', '.join(operation.labels)}")
    if len(operation.labels) != len(inputs):
        raise ValueError(f"{operation.name} has {len(operation.labels)} labels for {len(inputs)} inputs: name each")
    ins = [_Ref(n, np.asarray(x), settings.dead.get(n)) for n, x in zip(operation.labels, inputs, strict=True)]
    outs = [_Ref(f"out {i}", np.array(x), written=True) for i, x in enumerate(outputs)]
    for program in np.random.default_rng(settings.seed).permutation(operation.programs):
        try:
            with np.errstate(over="ignore"):  # ids that no live lane uses may wrap around
                operation.body(CheckedLanes(int(program)), np.int32(program), tuple(ins), tuple(outs))
        except KernelFault as fault:
            raise KernelFault(f"{operation.name}, program {program}: {fault}") from None
    return tuple(jnp.asarray(ref.cells) for ref in outs)


class CheckedLanes(Lanes):
    """NumPy in place of traced arrays, for one program."""

    def __init__(self, program: int):
        self.program = program

    def iota(self, count):
        if count < 1 or count & (count - 1):
            raise KernelFault(f"a vector of {count} lanes: their number must be a power of two")
        return np.arange(count, dtype=np.int32)

    def load(self, ref, index, mask=None, other=0):
        index, live = ref.check("load", index, mask)
        ref.check_readable(index, live, self.program)
        return np.where(live, ref.cells[index], ref.dtype.type(other))[()]

    def store(self, ref, index, value, mask=None):
        index, live = ref.check("store", index, mask)
        ref.check_writable(index, live, self.program)
        given = np.asarray(value).dtype
        integer = isinstance(value, int) or (ref.dtype == np.int32 and np.issubdtype(given, np.integer))
        if given != ref.dtype and not integer:
            raise KernelFault(f"store of {given} to {ref.name}: a value has the array's dtype, {ref.dtype}")
        cells = tuple(i[live] for i in index)
        ref.cells[cells] = np.broadcast_to(value, live.shape)[live]
        ref.owner[cells] = self.program

    def where(self, condition, a, b):
        return np.where(condition, a, b).astype(np.int32)[()]

    def minimum(self, a, b):
        return np.minimum(a, b).astype(np.int32)[()]

    def maximum(self, a, b):
        return np.maximum(a, b).astype(np.int32)[()]

    def div(self, a, b):
        return (np.sign(a) * (np.abs(a) // b)).astype(np.int32)[()]

    def sum(self, vector):
        return np.sum(vector, dtype=np.int32)

    def bits(self, value, dtype):
        return value.view(dtype)

    def total(self, vector):
        return np.sum(vector, dtype=np.float32)

    def rsqrt(self, scalar):
        return np.float32(1) / np.sqrt(scalar)

    def prefix_sum(self, vector):
        return np.cumsum(vector, dtype=np.int32)

    def when(self, condition, action):
        if condition:
            action()

    def loop(self, lower, upper, step, carry=None):
        for i in range(int(lower), int(upper)):
            carry = step(np.int32(i), carry)
        return carry


class _Ref:
    """An array of a launch: its cells, which of them are dead, which program wrote them and which read them.

    No program is -1, more than one -2. An input is not `written`.
    """

    def __init__(self, label: str, cells: np.ndarray, dead: np.ndarray | None = None, written: bool = False):
        self.label, self.cells, self.dead, self.written = label, cells, dead, written
        self.owner, self.reader = np.full((2, *cells.shape), -1, np.int32)
        if dead is not None and dead.shape != cells.shape:
            raise ValueError(f"dead[{label!r}] has shape {dead.shape}: the array has shape {cells.shape}")

    @property
    def dtype(self):
        return self.cells.dtype

    def check(self, action: str, index: tuple, mask) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
        """(index, live lanes), all of one shape and, where a lane is not live, 0. Live lanes are in range."""
        if len(index) != self.cells.ndim:
            raise KernelFault(f"{action} of {self.name} with {len(index)} indices")
        if not all(np.issubdtype(np.asarray(i).dtype, np.integer) for i in index):
            raise KernelFault(f"{action} of {self.name}: an index is an integer or a vector of them for each dimension")
        if action == "store" and not self.written:
            raise KernelFault(f"store to {self.name}, which is an input")
        if mask is None and any(np.ndim(i) for i in index):
            raise KernelFault(f"{action} of {self.name}: a vector of lanes needs a mask")
        *index, live = np.broadcast_arrays(*index, True if mask is None else mask)
        for i, size in zip(index, self.cells.shape, strict=True):
            self._refuse(f"{action} out of range", index, live & ((i < 0) | (i >= size)))
        if action == "store":
            self._check_lanes(index, live)
        return tuple(np.where(live, i, 0) for i in index), live

    def check_readable(self, index, live, program: int) -> None:
        if self.dead is not None:
            self._refuse("load of dead cells", index, live & self.dead[index])
        owner, reader = self.owner[index], self.reader[index]
        self._refuse("load of cells another program wrote", index, live & (owner >= 0) & (owner != program))
        seen = np.where((reader == -1) | (reader == program), np.int32(program), np.int32(-2))
        self.reader[tuple(i[live] for i in index)] = seen[live]

    def check_writable(self, index, live, program: int) -> None:
        owner, reader = self.owner[index], self.reader[index]
        self._refuse("store to cells another program wrote", index, live & (owner >= 0) & (owner != program))
        self._refuse("store to cells another program read", index, live & (reader != -1) & (reader != program))

    def _check_lanes(self, index, live) -> None:
        lanes = np.stack([np.ravel(i) for i in index])
        _, first, inverse, count = np.unique(lanes, axis=1, return_index=True, return_inverse=True, return_counts=True)
        shared = (count > 1)[inverse.ravel()].reshape(live.shape)
        touched = np.zeros(len(first), bool)
        np.logical_or.at(touched, inverse.ravel(), np.ravel(live))
        self._refuse("store by several lanes", index, shared & touched[inverse.ravel()].reshape(live.shape))

    def _refuse(self, what: str, index, bad: np.ndarray) -> None:
        if bad.any():
            where = [tuple(int(i[tuple(lane)]) for i in index) for lane in np.argwhere(bad)[:4]]
            raise KernelFault(f"{what} of {self.name}: {', '.join(map(str, where))}")

    @property
    def name(self) -> str:
        return f"{self.label}{list(self.cells.shape)}"
