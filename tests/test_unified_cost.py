"""What the allocator of a unified pool costs as a compiled program: nothing that grows with the pool, no transfer."""

import functools
import importlib
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import quick_compile
from jax import lax
from pool_cases import pool, round_of_pages, state
from unified_cases import initial, tight_step

from jaxspec.cache import LayerSpec, PoolCache, PoolLayout, StatePart, StateSpec, init_unified
from jaxspec.steps import requests_of, run_round
from jaxspec.steps.round import run_provided_round
from jaxspec.steps.upkeep import hand_out

sys.path.append(str(Path(__file__).parent / "kernels"))
aot = importlib.import_module("kernel_aot")


POOLS = ["full, swa", "full, state", "full, swa, state"]
LONG = 4000  # longer than all that does not grow with the pool


def shapes(kinds, num_pages, *, lanes=6, dtype="bfloat16"):
    """Arguments of `round_of_pages`, as shapes."""
    layers = [LayerSpec(2, 64)] * 3
    if "swa" in kinds:
        layers += [LayerSpec(2, 64, 20, "swa")] * 2
    if "state" in kinds:
        layers += [StateSpec((StatePart("conv", (3, 48), dtype), StatePart("temporal", (2, 16, 16))))] * 2
    some = num_pages // 8
    layout = PoolLayout.for_pages(layers, full=num_pages, swa=some, state=some, page_size=16, dtype=dtype)
    pages = init_unified(layout, rows=lanes + 1, pages_per_row=12)
    pages = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), pages)
    cache = PoolCache(buffer=jax.ShapeDtypeStruct((layout.units, layout.unit), layout.storage), layout=layout)
    lane = jax.ShapeDtypeStruct((lanes,), jnp.int32)
    return (pages, cache), lane, lane, jax.ShapeDtypeStruct((lanes + 1,), bool)


def rounds(carried, rows, lengths, ended, backend=None):
    """Ten rounds in a loop on the device, some of which hand nothing out."""

    def turn(number, carry):
        carried, granted = carry
        carried, ok = round_of_pages(carried, rows, lengths + 7 * number, ended & (number % 3 == 0), backend)
        return carried, granted & ok

    return lax.fori_loop(jnp.int32(0), jnp.int32(10), turn, (carried, jnp.bool_(True)))


def equations(jaxpr):
    """All of them but those in kernels, which store in place."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name == "pallas_call":
            continue
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


IN_PLACE = {"gather", "scatter", "scatter-add", "dynamic_slice", "dynamic_update_slice"}
PASSED_ON = {"while", "cond", "jit", "optimization_barrier", "pallas_call"}


@pytest.mark.parametrize("kinds", POOLS)
def test_long_arrays_are_only_gathered_from_and_scattered_into(kinds):
    seen = set()
    for equation in equations(jax.make_jaxpr(rounds)(*shapes(kinds, LONG, dtype="float32")).jaxpr):
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


@pytest.mark.parametrize("kinds", POOLS)
def test_cost_does_not_grow_with_the_pool(kinds):
    """Compiled, rounds of pages work in place and need the same temporaries for any size of pool."""
    temporary = []
    for num_pages in (LONG, 16 * LONG):
        arguments = shapes(kinds, num_pages, dtype="float32")  # XLA for CPUs may convert what it cannot compute with
        temporary.append(check_in_place(compile_for_cpu(rounds, *arguments), arguments[0]))
    assert temporary[0] == temporary[1]


@pytest.mark.parametrize("backend", [None, pytest.param("mosaic", marks=pytest.mark.slow)])
def test_cost_does_not_grow_with_the_pool_on_sm_90(backend):
    """There is not even room for a copy of the shortest table; `None` is Triton there."""
    if reason := aot.missing():
        pytest.skip(reason)
    arguments = shapes(POOLS[-1], 16 * LONG)
    program = functools.partial(rounds, backend=backend)
    assert check_in_place(aot.compile_for_h200(program, *arguments), arguments[0]) < 4 * 16 * LONG


def test_a_copy_would_be_seen():
    """The check above can fail: a pool turned upside down is a copy of it."""

    def spoil(carried, *_):
        pages, cache = carried
        return (pages, cache.replace(buffer=cache.buffer[::-1])), 0

    arguments = shapes(POOLS[0], LONG)
    with pytest.raises(AssertionError):
        check_in_place(compile_for_cpu(spoil, *arguments), arguments[0])


def test_no_transfer():
    """Sixty-four rows grow, retire and end without a word to the host."""
    layout = pool(4, 1, 1, 10, full=256, swa=256, states=64)
    pages, cache = state(layout, rows=65, columns=4)
    compiled = jax.jit(round_of_pages, compiler_options=quick_compile.options())
    arguments = jax.device_put((jnp.arange(1, 65), jnp.full(64, 12), jnp.arange(65) % 2 > 0))
    jax.block_until_ready(compiled((pages, cache), *arguments))
    with jax.transfer_guard("disallow"):
        (pages, cache), ok = jax.block_until_ready(compiled((pages, cache), *arguments))
    assert ok and int(pages.num_pages.sum()) == 32 * 3


def branches(function, *arguments):
    """Branches in a program, those between platforms left out, and loops."""
    names = [
        equation.primitive.name
        for equation in equations(jax.make_jaxpr(function)(*arguments).jaxpr)
        if equation.params.get("branches_platforms") is None
    ]
    return names.count("cond"), names.count("while")


def test_a_round_that_was_provided_for_asks_nothing_about_pages():
    """The rounds of a stretch neither branch nor move pages: one asks for them twice, and its pages move in loops."""
    spec, params = tight_step()
    state = initial(spec, [[1, 2, 3]])
    conds, whiles = branches(lambda p, s: run_provided_round(spec, p, s), params, state)
    assert conds == 0
    assert branches(lambda p, s: run_round(spec, p, s), params, state)[0] == 2
    pages = branches(lambda p, s: hand_out(spec, requests_of(s), s.pages, s.cache), params, state)
    assert branches(lambda p, s: run_round(spec, p, s), params, state)[1] == whiles + pages[1] and pages[1] > 0
