"""The lane language in Pallas Mosaic GPU, compiled on CUDA, from jax 0.11.2 on.

A program is one warpgroup of 128 threads. Thread t holds lanes t, t + 128, t + 256, ... of every vector, a register
each, so that neighbouring threads touch neighbouring cells. A scalar is the same in all threads.

Mosaic GPU lowers scalars, branches, loops, sums and arithmetic as the language has them. It has no vector of indices,
no mask and no prefix sum. The first two are written here as MLIR, a few operations a lane; the third is made of them.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.lanes import Lanes, Operation

try:
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import arith, memref, scf, vector
except ImportError:  # jax.extend promises less than jax
    ir = None

THREADS = 128  # of a program
LONGEST = 1024  # lanes of a vector that has prefix sums


@dataclasses.dataclass(frozen=True)
class MosaicLanes(Lanes):
    """Vectors spread over the threads of a warpgroup.

    cells   int32[LONGEST] in shared memory, through which the lanes of a prefix sum meet
    """

    cells: Any

    least = THREADS
    longest = LONGEST

    def iota(self, count):
        return _plgpu().layout_cast(lax.iota(jnp.int32, count), _layout(count))

    def load(self, ref, index, mask=None, other=0):
        if mask is None:
            return ref[index]
        if ref.dtype.itemsize == 1:
            raise ValueError(
                f"backend='mosaic': {ref.dtype} elements are of one byte, which it cannot select among; use 'triton'"
            )
        # A masked lane reads cell 0 (of its column, if that is static), all of them in one transaction, and drops the
        # value. Skipping the loads would take a branch for each register of a thread, and each would wait for the last.
        index = [i if isinstance(i, int) else self.where(mask, i, np.int32(0)) for i in index]
        return jnp.where(mask, _gather(ref, index, mask.size), ref.dtype.type(other))

    def where(self, condition, a, b):
        # Mosaic's select takes its sign from the first of (a, condition, b) that is spread over threads. A condition
        # has none: after a constant `a` the result would be compared, divided and clamped as an unsigned number.
        return jnp.where(condition, _spread(a, condition.size) if jnp.ndim(condition) else a, b)

    def store(self, ref, index, value, mask=None):
        if mask is None:
            ref[index] = lax.convert_element_type(value, ref.dtype)
        else:
            _scatter(ref, index, ref.dtype.type(value) if isinstance(value, int) else value, mask)

    def sum(self, vector):
        return super().sum(_spread(vector, vector.size))

    def prefix_sum(self, vector):
        # In each round a lane adds three earlier ones, and the sum that it holds reaches four times as far back:
        #     v[i]                            at first
        #     v[i - 3] + ... + v[i]           with lanes i - 1, i - 2, i - 3 added
        #     v[i - 15] + ... + v[i]          with lanes i - 4, i - 8, i - 12 added; five rounds reach 1024 lanes
        count = vector.size
        lane, total, reach = self.iota(count), _spread(vector, count), 1
        while reach < count:
            # Mosaic puts a barrier before and after the store: nobody still reads the last round, all see this one.
            self.cells[pl.ds(0, count)] = total
            for back in range(reach, min(4 * reach, count), reach):
                total += self.load(self.cells, (lane - back,), lane >= back)
            reach *= 4
        return total


def unavailable() -> str | None:
    """Why this jax cannot lower Mosaic GPU kernels, or None."""
    if jax.__version_info__ < (0, 11, 2):
        return f"Mosaic GPU kernels need jax 0.11.2 or newer; this is {jax.__version__}"
    if ir is None:
        return "this jax has no MLIR bindings (jax.extend.mlir)"
    try:
        _plgpu()
    except ImportError as error:
        return f"this jax has no Pallas Mosaic GPU: {error}"
    return None


def launch(operation: Operation, inputs: tuple, outputs: tuple) -> tuple:
    """Run all programs of the operation in one launch; the results alias `outputs`."""
    plgpu = _plgpu()
    inputs, outputs = _apart(inputs), _apart(outputs)
    refs = tuple(map(jax.new_ref, outputs))  # written in place; results of the kernel itself would be new arrays

    def kernel(*operands):
        *arrays, cells = operands
        ins, outs = tuple(arrays[: len(inputs)]), tuple(arrays[len(inputs) :])
        operation.body(MosaicLanes(cells), lax.axis_index("program"), ins, outs)

    plgpu.kernel(
        kernel,
        out_type=(),
        scratch_types=(plgpu.SMEM((LONGEST,), jnp.int32),),
        grid=(operation.programs,),
        grid_names=("program",),
        kernel_name=operation.name,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(*inputs, *refs)
    return _apart(tuple(map(jax.freeze, refs)))


def _apart(arrays: tuple) -> tuple:
    """The same arrays; where one is a slice of a larger array, or becomes a part of one, XLA must copy it.

    XLA would else give the kernel the address inside the larger array, for x[1:65] of int32 the one 4 bytes after the
    start of x. Mosaic refuses an address that is no multiple of 256, at run time. And a result that does not lie where
    its operand lies lacks the cells that the kernel leaves alone. Whole arrays start at such a multiple and stay where
    they are.
    """
    # One barrier each: behind one for all, newer XLAs look for slices, too.
    return tuple(map(lax.optimization_barrier, arrays))


def _plgpu():
    """Pallas Mosaic GPU, imported at its first use: half a second that no other executor should pay."""
    from jax.experimental.pallas import mosaic_gpu

    return mosaic_gpu


def _layout(count: int):
    """How `count` lanes lie in the threads."""
    return _plgpu().Layout.WG_STRIDED((count,), vec_size=1)


def _spread(value, count: int):
    """The value in `count` lanes, each in its register. Mosaic keeps a broadcast scalar as one until it is told so."""
    value = np.int32(value) if isinstance(value, int) else value  # an int would have 64 bits when x64 is on
    return _plgpu().layout_cast(jnp.broadcast_to(value, (count,)), _layout(count))


def _lanes(arrays):
    """For each lane of a thread: its value in each of the arrays."""
    for registers in zip(*(array.registers for array in arrays), strict=True):
        yield [vector.extract(register, dynamic_position=[], static_position=[0]) for register in registers]


def _cell(index: list):
    """Operands of a memref access. They have 64 bits before a row is multiplied: an array may exceed 2^31 cells."""
    return [arith.index_cast(ir.IndexType.get(), i) for i in index]


def _gather(ref, index, count: int):
    """ref[index] in all `count` lanes."""
    plgpu, layout = _plgpu(), _layout(count)
    result = plgpu.ShapeDtypeStruct((count,), ref.dtype, layout)
    signed = jnp.issubdtype(ref.dtype, jnp.signedinteger) if jnp.issubdtype(ref.dtype, jnp.integer) else None

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[layout] * len(index)), return_type=result)
    def gather(_, ref, *index):
        values = iter([memref.load(ref, _cell(lane)) for lane in _lanes(index)])
        return index[0].foreach(lambda *_: next(values), create_array=True, is_signed=signed)

    return gather(ref, *(_spread(i, count) for i in index))


def _scatter(ref, index, value, mask) -> None:
    """ref[index] = value in the lanes of the mask."""
    plgpu, arrays = _plgpu(), [_spread(x, mask.size) for x in (*index, value, mask)]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[_layout(mask.size)] * len(arrays)))
    def scatter(_, ref, *arrays):
        for *index, value, live in _lanes(arrays):
            with ir.InsertionPoint(scf.IfOp(live).then_block):
                memref.store(value, ref, _cell(index))
                scf.yield_([])

    scatter(ref, *arrays)
