"""What the allocator of a unified pool costs as a compiled program: nothing that grows with the pool, no transfer."""

import importlib
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import quick_compile
from pool_cases import pool, round_of_pages, state

from jaxspec.cache import LayerSpec, PoolCache, PoolLayout, init_unified

sys.path.append(str(Path(__file__).parent / "kernels"))
aot = importlib.import_module("kernel_aot")


def shapes(num_pages, *, lanes=6, dtype="bfloat16"):
    layers = [LayerSpec(2, 64)] * 3 + [LayerSpec(2, 64, 20, "swa")] * 2
    layout = PoolLayout.for_pages(layers, full=num_pages, swa=num_pages // 8, page_size=16, dtype=dtype)
    pages = init_unified(layout, rows=lanes + 1, pages_per_row=12)
    pages = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), pages)
    cache = PoolCache(buffer=jax.ShapeDtypeStruct((layout.units, layout.unit), layout.dtype), layout=layout)
    lane = jax.ShapeDtypeStruct((lanes,), jnp.int32)
    return (pages, cache), lane, lane, jax.ShapeDtypeStruct((lanes + 1,), bool)


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


LONG = 4000  # longer than all that does not grow with the pool
IN_PLACE = {"gather", "scatter", "scatter-add", "dynamic_slice", "dynamic_update_slice"}
PASSED_ON = {"while", "jit", "optimization_barrier"}


def test_long_arrays_are_only_gathered_from_and_scattered_into():
    seen = set()
    for equation in equations(jax.make_jaxpr(round_of_pages)(*shapes(LONG)).jaxpr):
        if any(max(variable.aval.shape, default=0) >= LONG for variable in (*equation.invars, *equation.outvars)):
            seen.add(equation.primitive.name)
    assert seen <= IN_PLACE | PASSED_ON and seen >= {"gather", "scatter", "dynamic_update_slice", "while"}


def check_in_place(compiled, carried):
    """All that is donated is aliased, nothing as long as a table is copied or converted; bytes of temporaries."""
    memory = compiled.memory_analysis()
    nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(carried))
    assert memory.alias_size_in_bytes == nbytes
    for dims, kind in re.findall(r"= \w+\[([\d,]+)\]\S* (copy|convert|copy-start|transpose)\(", compiled.as_text()):
        assert max(map(int, dims.split(","))) < LONG, f"{kind} of [{dims}]"
    return memory.temp_size_in_bytes


def compile_for_cpu(function, *arguments):
    """The program as XLA makes it by default; only its machine code is not optimised."""
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(function, donate_argnums=0, compiler_options=options).lower(*arguments).compile()


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
def test_cost_does_not_grow_with_the_pool(target):
    """Compiled, a round of pages works in place and needs the same temporaries for any size of pool."""
    if target == "sm_90" and (reason := aot.missing()):
        pytest.skip(reason)
    compile_ = aot.compile_for_h200 if target == "sm_90" else compile_for_cpu
    dtype = "bfloat16" if target == "sm_90" else "float32"  # XLA for CPUs may convert what it cannot compute with
    temporary = []
    for num_pages in (LONG, 16 * LONG):
        arguments = shapes(num_pages, dtype=dtype)
        temporary.append(check_in_place(compile_(round_of_pages, *arguments), arguments[0]))
    assert temporary[0] == temporary[1]


def test_a_copy_would_be_seen():
    """The check above can fail: a pool turned upside down is a copy of it."""

    def spoil(carried, *_):
        pages, cache = carried
        return (pages, cache.replace(buffer=cache.buffer[::-1])), 0

    arguments = shapes(LONG)
    with pytest.raises(AssertionError):
        check_in_place(compile_for_cpu(spoil, *arguments), arguments[0])


def test_no_transfer():
    """Sixty-four rows grow, retire and end without a word to the host."""
    layout = pool(4, 1, 1, full=256, swa=256)
    pages, cache = state(layout, rows=65, columns=4)
    compiled = jax.jit(round_of_pages, compiler_options=quick_compile.options())
    arguments = jax.device_put((jnp.arange(1, 65), jnp.full(64, 12), jnp.arange(65) % 2 > 0))
    jax.block_until_ready(compiled((pages, cache), *arguments))
    with jax.transfer_guard("disallow"):
        (pages, cache), ok = jax.block_until_ready(compiled((pages, cache), *arguments))
    assert ok and int(pages.num_pages.sum()) == 32 * 3
