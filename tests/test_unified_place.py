"""The unified pool stays where it is: no compiled step or generation copies it, on a CPU, for sm_90, or on a GPU."""

import importlib
import math
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from tiny_models import CONTEXT, HYBRID_TARGET, TARGET, drafter_and_params, make_step, prompt
from unified_cases import BATCH, CHUNK, NEW, PAGE, PROMPTS, D, initial, observed_round, prompts_for, run

import jaxspec
from jaxspec.generation.loops import run_to_end
from jaxspec.steps import run_round
from jaxspec.steps.step import compiler_options, jit_with_state

sys.path.append(str(Path(__file__).parent / "kernels"))
aot = importlib.import_module("kernel_aot")

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}


def large_copies(text, limit):
    """Instructions of optimised HLO that copy, convert or rearrange `limit` bytes or more."""
    found = []
    for line in text.splitlines():
        made = re.search(
            r"= (.*?) (copy|copy-start|convert|bitcast-convert|transpose|concatenate|pad|slice|dynamic-slice)\(", line
        )
        if made is None:
            continue
        sizes = [
            math.prod(map(int, filter(None, shape.split(",")))) * BYTES[kind]
            for kind, shape in re.findall(r"(\w+)\[([\d,]*)\]", made[1])
            if kind in BYTES
        ]
        if max(sizes, default=0) >= limit:
            found.append(line.strip())
    return found


def test_a_copy_of_the_pool_would_be_seen():
    """A loop that needs the pool as it was before and after an update has to copy it."""

    def wasteful(pool):
        def body(i, carry):
            pool, other = carry
            return other.at[i].set(pool[0] + 1), pool.at[i].set(other[1] + 2)

        return lax.fori_loop(0, 3, body, (pool, pool + 1))

    pool = jnp.zeros((4096, 16))
    text = jax.jit(wasteful, donate_argnums=0).lower(pool).compile().as_text()
    assert large_copies(text, pool.nbytes // 16)


LARGE = {"pool_bytes": 1 << 24, "memory": "unified", "logprobs": True}
# The choice of tiles for a product and ptxas take most of the time, and have no say in what XLA copies.
QUICK = {"xla_gpu_autotune_level": 0, "xla_gpu_disable_gpuasm_optimizations": True}


@pytest.fixture(scope="module")
def large():
    spec, params = make_step("draft_lm", batch=BATCH, page=PAGE, D=D, new=NEW, **LARGE)
    return spec, jax.device_put(params)


def check_in_place(compiled, state, aliased):
    pool = state.cache.buffer.nbytes
    assert pool > (1 << 24) - 4096
    assert not large_copies(compiled.as_text(), pool // 16)
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < pool // 16
    assert memory.alias_size_in_bytes >= aliased * sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    return memory


def test_a_round_leaves_the_pool_in_place(tight, large):
    """A pool two hundred times as large takes no more temporary memory."""
    spec, params = large
    state = initial(spec, PROMPTS)
    memory = check_in_place(observed_round.lower(spec, params, state).compile(), state, 0.999)
    small = observed_round.lower(*tight, initial(tight[0], PROMPTS)).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= small.temp_size_in_bytes + 1024


def test_a_generation_leaves_the_pool_in_place(large):
    spec, params = large
    state = initial(spec, PROMPTS)
    program = jit_with_state(run_to_end, spec.options)
    check_in_place(program.lower(spec, params, state).compile(), state, 0.999)
    leaves = jax.tree.leaves(state)
    program(spec, params, state)
    assert all(leaf.is_deleted() for leaf in leaves)


@pytest.mark.parametrize(
    "function",
    [pytest.param(run_round, marks=pytest.mark.slow), run_to_end],  # a generation holds the round
    ids=["round", "generation"],
)
def test_the_pool_stays_in_place_on_sm_90(function):
    if reason := aot.missing():
        pytest.skip(reason)
    drafter, params = drafter_and_params("draft_lm")
    config = jaxspec.SpecConfig(
        batch_size=2, num_draft_tokens=3, context_len=64, max_new_tokens=8, page_size=8, prefill_chunk=16, **LARGE
    )
    spec = jaxspec.make_spec_step(TARGET, drafter, config, options=compiler_options("cuda"))
    state = initial(spec, [prompt(9)])
    lowered = aot.lower_for_h200(jit_with_state(function, spec.options), spec, params, state)
    check_in_place(aot.compile_lowered(lowered, **QUICK), state, 1)


def copies_of_states(text, state):
    """Instructions of optimised HLO that copy a whole buffer of states."""
    parts = [part for buffer in state.cache.buffers if isinstance(buffer, tuple) for part in buffer]
    rows, shapes = parts[0].shape[0], [part.shape for part in parts]
    shapes += [(rows, math.prod(shape[1:])) for shape in shapes]  # as kernels see them
    wanted = "|".join(r"f32\[(1,)?" + ",".join(map(str, shape)) + r"\]" for shape in shapes)
    assert re.search(rf"({wanted})\S* (parameter|get-tuple-element)\(", text)
    return re.findall(rf".*= ({wanted})\S* (?:copy|copy-start)\(.*", text)


@pytest.mark.parametrize("memory", ["unified", pytest.param("static", marks=pytest.mark.slow)])
def test_a_hybrids_generation_leaves_states_in_place(memory):
    """States are read, kept aside, committed, written by prefill, and never copied with all the others."""
    others = LARGE if memory == "unified" else {"logprobs": True}
    spec, params = make_step("ngram", target=HYBRID_TARGET, batch=BATCH, page=PAGE, D=D, new=NEW, **others)
    state = initial(spec, PROMPTS)
    compiled = jit_with_state(run_to_end, spec.options).lower(spec, params, state).compile()
    if memory == "unified":
        check_in_place(compiled, state, 0.999)
    else:
        assert not copies_of_states(compiled.as_text(), state)


@pytest.mark.parametrize("memory", ["unified", pytest.param("static", marks=pytest.mark.slow)])
def test_a_hybrids_states_stay_in_place_on_sm_90(memory):
    if reason := aot.missing():
        pytest.skip(reason)
    config = jaxspec.SpecConfig(
        batch_size=2,
        num_draft_tokens=3,
        context_len=64,
        max_new_tokens=8,
        page_size=8,
        prefill_chunk=16,
        kernel_backend="triton",
        **(LARGE if memory == "unified" else {}),
    )
    drafter, params = drafter_and_params("ngram", HYBRID_TARGET)
    spec = jaxspec.make_spec_step(HYBRID_TARGET, drafter, config, options=compiler_options("cuda"))
    state = initial(spec, [prompt(9)])
    lowered = aot.lower_for_h200(jit_with_state(run_to_end, spec.options), spec, params, state)
    compiled = aot.compile_lowered(lowered, **QUICK)
    if memory == "unified":
        check_in_place(compiled, state, 1)
    else:
        assert not copies_of_states(compiled.as_text(), state)


def test_unified_state_has_few_leaves(tight):
    """One pool in place of a buffer for each layer of target and draft."""
    assert len(jax.tree.leaves(initial(tight[0], []))) <= 1 + 14


# On an NVIDIA GPU


@pytest.fixture
def gpu():
    if jax.default_backend() != "gpu":
        pytest.skip("no NVIDIA GPU")


def compiled_for_users(drafter, page, memory, backend=None):
    """A step with the options that users get, if no fixture changes them."""
    drafter, params = drafter_and_params(drafter)
    config = jaxspec.SpecConfig(
        batch_size=BATCH,
        num_draft_tokens=D,
        context_len=CONTEXT,
        max_new_tokens=NEW,
        page_size=page,
        prefill_chunk=CHUNK,
        memory=memory,
        logprobs=True,
        kernel_backend=backend,
    )
    return jaxspec.make_spec_step(TARGET, drafter, config), params


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu", "untuned")
@pytest.mark.parametrize(("drafter", "page"), [("ngram", 1), ("draft_lm", 16), ("draft_lm", 64), ("wide", 128)])
def test_backends_are_equal_on_a_gpu(greedy, drafter, page):
    prompts = prompts_for(BATCH, page)
    split = run(*compiled_for_users(drafter, page, "static"), prompts)
    assert [r.token_ids for r in split] == [greedy(ids, NEW) for ids in prompts]
    for backend in ("triton", "mosaic", "reference"):
        spec, params = compiled_for_users(drafter, page, "unified", backend)
        # The reference attends by other sums: log-probabilities differ in their last bits.
        same = texts if backend == "reference" else list
        for seed in (None, 1):
            assert same(run(spec, params, prompts, seed=seed)) == same(split), (backend, seed)


def texts(results):
    return [(r.token_ids, r.accepted_drafts, r.finish_reason) for r in results]


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
def test_the_pool_has_one_address_on_a_gpu():
    spec, params = compiled_for_users("draft_lm", 16, "unified")
    state = initial(spec, PROMPTS)
    address = state.cache.buffer.unsafe_buffer_pointer()
    state, _ = spec.prefill(params, state)
    for _ in range(4):
        assert state.cache.buffer.unsafe_buffer_pointer() == address
        state, _ = spec(params, state)
    state, _ = jit_with_state(run_to_end, spec.options)(spec, params, state)
    assert state.cache.buffer.unsafe_buffer_pointer() == address
