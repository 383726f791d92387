"""What is compiled, how often, and what is in it: one program a bucket, one dispatch a generation, all in place."""

import contextlib
import functools
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import CONTEXT, make_step, prompt

import jaxspec
from jaxspec.generation.loops import Driver, reports, run_to_end
from jaxspec.steps import run_round
from jaxspec.steps.step import jit_with_state

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
TRACE_EVENT = "/jax/core/compile/jaxpr_trace_duration"


@contextlib.contextmanager
def events(*names):
    """Counts how often JAX announces each of the named events while the block runs."""
    counts, live = dict.fromkeys(names, 0), True

    def listen(name, duration, **_):
        if live and name in counts:
            counts[name] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield counts
    finally:
        live = False


def initial(spec, lengths, **settings):
    config = jaxspec.SpecConfig(**{**vars(spec.config), "pool_seed": settings.pop("pool_seed", None)})
    return jaxspec.init_state(spec.target, spec.drafter, config, [prompt(n) for n in lengths], **settings)


@pytest.fixture(scope="module")
def step():
    return make_step("draft_lm", batch=3, page=4, D=4, new=12)


@pytest.fixture(scope="module")
def compiled(step):
    """The program of a whole generation."""
    spec, params = step
    return jit_with_state(run_to_end, spec.options).lower(spec, params, initial(spec, [9])).compile()


def test_events_are_counted():
    """The two counters of the next test do count."""
    with events(COMPILE_EVENT, TRACE_EVENT) as counts:
        jax.jit(lambda x: x * 3 + 1)(np.arange(7))
    assert counts[COMPILE_EVENT] == 1 and counts[TRACE_EVENT] >= 1


def test_one_program_serves_all_batches_of_its_shape(step):
    """Other lengths, limits, stop ids, tables, lanes: prefill, step and whole generation neither compile nor trace."""
    spec, params = step
    batches = [
        initial(spec, [9, 16, 21]),
        initial(spec, [21, 9, 16], pool_seed=3, max_new_tokens=[1, 5, 12]),
        initial(spec, [CONTEXT - 1], stop_ids=[3]),
        initial(spec, [64, 1], pool_seed=1),
        initial(spec, []),
    ]
    again = [jax.tree.map(jnp.copy, state) for state in batches]

    def drive(state, whole):
        state, _ = spec.prefill(params, state)
        for _ in range(3):
            state, _ = spec(params, state)
        whole, _ = jit_with_state(run_to_end, spec.options)(spec, params, whole)
        jax.block_until_ready((state, whole))

    drive(batches[0], again[0])
    with events(COMPILE_EVENT, TRACE_EVENT) as counts:
        for state, whole in zip(batches[1:], again[1:], strict=True):
            drive(state, whole)
    assert counts == {COMPILE_EVENT: 0, TRACE_EVENT: 0}


def test_equal_steps_share_a_program(step):
    """A second `make_spec_step` of the same pieces, as every call of `generate` makes one, compiles nothing new."""
    first, params = step
    spec, _ = make_step("draft_lm", batch=3, page=4, D=4, new=12)
    assert spec == first and hash(spec) == hash(first) and spec is not first
    states = [initial(spec, [9]) for _ in range(2)]
    first.prefill(params, states[0])
    with events(COMPILE_EVENT) as counts:
        spec.prefill(params, states[1])
    assert counts == {COMPILE_EVENT: 0}


# A generation on the device

HOST = re.compile("callback|infeed|outfeed|debug|host", re.IGNORECASE)


def primitives(jaxpr):
    """Names of all primitives in a jaxpr, those of inner jaxprs included."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from primitives(inner)


def test_nothing_calls_the_host(step, compiled):
    spec, params = step
    jaxpr = jax.make_jaxpr(run_to_end, static_argnums=0)(spec, params, initial(spec, [9]))
    names = set(primitives(jaxpr.jaxpr))
    assert {"while", "dot_general", "scatter"} <= names  # inner jaxprs were seen
    assert not [name for name in names if HOST.search(name)]
    text = compiled.as_text()
    assert " while(" in text
    for word in ("infeed(", "outfeed(", "send(", "recv(", "callback"):
        assert word not in text, word


def test_a_callback_would_be_seen():
    def chatty(x):
        return jax.lax.fori_loop(0, 3, lambda i, x: x + jax.pure_callback(np.sin, x, x), x)

    assert [name for name in primitives(jax.make_jaxpr(chatty)(1.0).jaxpr) if HOST.search(name)]


def executions(folder, work):
    """How many compiled programs the runtime starts while `work()` runs, by its own trace."""
    with jax.profiler.trace(folder):
        jax.block_until_ready(work())
    (path,) = folder.glob("**/*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(path)).planes
    names = [event.name for plane in planes for line in plane.lines for event in line.events]
    return sum("LoadedExecutable::ExecuteHelper" in name for name in names)


def test_a_generation_is_one_dispatch(step, tmp_path):
    """The device loop starts one program; driven from Python it starts one a round. The driver counts both rightly."""
    spec, params = step
    for loop, work in (
        ("device", lambda driver: driver(run_to_end)),
        ("python", lambda driver: list(reports(driver, 1, 0))),
    ):
        work(Driver(spec, params, initial(spec, [9, 16, 21])))  # compiles
        driver = Driver(spec, params, initial(spec, [9, 16, 21]))
        (tmp_path / loop).mkdir()
        started = executions(tmp_path / loop, functools.partial(work, driver))
        assert started == driver.dispatches, loop
        assert (started == 1) == (loop == "device")
        assert int(jaxspec.requests_of(driver.state).num_output.sum()) == 36


# In place


def state_bytes(state):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("function", [run_round, run_to_end], ids=["step", "generation"])
def test_the_state_is_updated_in_place(step, function):
    """Donated buffers are gone after the call, and the program writes its results where its arguments were."""
    spec, params = step
    state = initial(spec, [9, 16, 21])
    program = jit_with_state(function, spec.options)
    memory = program.lower(spec, params, state).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 0.98 * state_bytes(state)
    leaves = jax.tree.leaves(state)
    program(spec, params, state)
    assert all(leaf.is_deleted() for leaf in leaves)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))


def computations(text):
    """Optimised HLO by computation: {name: its lines}."""
    parts, name = {}, None
    for line in text.splitlines():
        head = re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line)
        if head and not line.startswith(" "):
            name = head[1]
            parts[name] = []
        elif name is not None:
            parts[name].append(line)
    return parts


def copies_in_loops(text, shape):
    """Instructions in the bodies of loops that copy such an array; and whether any instruction touches one."""
    parts = computations(text)
    lines = [line for body in re.findall(r"body=%?([\w.\-]+)", text) for line in parts[body]]
    makes = re.compile(rf"(copy[\w.\-]* = {re.escape(shape)})|(= {re.escape(shape)}\S* copy)")
    made = [line for line in lines if makes.search(line)]
    return made, any(shape in line for line in lines)


def hlo_shape(array):
    return "f32[" + ",".join(map(str, array.shape)) + "]"


def test_no_kv_buffer_is_copied_in_the_loop(step, compiled):
    spec, _ = step
    state = initial(spec, [9])
    for buffer in (*state.cache.buffers, *state.draft.cache.buffers):
        copies, touched = copies_in_loops(compiled.as_text(), hlo_shape(buffer))
        assert touched
        assert not copies, copies[:2]


def test_a_copy_would_be_seen():
    """A loop that needs an array as it was before and after an update has to copy it."""

    def wasteful(x):
        def body(i, carry):
            x, y = carry
            return y.at[i].set(x[0] + 1), x.at[i].set(y[1] + 2)

        return jax.lax.fori_loop(0, 3, body, (x, x + 1))

    x = jnp.zeros((96, 2, 2, 8))
    text = jax.jit(wasteful).lower(x).compile().as_text()
    copies, touched = copies_in_loops(text, hlo_shape(x))
    assert copies and touched


def test_the_state_has_few_leaves(step):
    """The host pays for each of them at every call. Two layers, and as many of the draft."""
    spec, _ = step
    state = initial(spec, [9])
    assert len(jax.tree.leaves(state)) <= 2 + 2 + 12


def test_no_weak_types_go_in_or_out(step):
    """A weak type that comes back strong would compile the second call anew."""
    spec, params = step
    state = initial(spec, [9])
    assert not [leaf for leaf in jax.tree.leaves((params, state)) if leaf.weak_type]
    after, output = jax.eval_shape(lambda p, s: run_round(spec, p, s), params, state)
    assert not [leaf for leaf in jax.tree.leaves((after, output)) if leaf.weak_type]
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)


def test_importing_sets_no_global_option():
    code = """
        import os
        import jax
        flags = os.environ.get("XLA_FLAGS")
        before = dict(jax.config.values)
        import jaxspec, jaxspec.generation, jaxspec.models, pallas_kernels
        changed = {k for k, v in jax.config.values.items() if before.get(k, v) != v}
        assert not changed, changed
        assert os.environ.get("XLA_FLAGS") == flags
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, capture_output=True, text=True)


def test_x64_changes_no_token(greedy):
    """With 64-bit types on, arrays of the step stay 32 bits wide and the text is the same."""
    code = """
        import json, jax
        from tiny_models import make_step, prompt
        import jaxspec
        from jaxspec.generation.loops import Driver, reports, run_to_end
        from jaxspec.generation.results import read_requests
        from jaxspec.steps.step import jit_with_state
        assert jax.config.jax_enable_x64
        ids = []
        for drafter in ("ngram", "draft_lm"):
            spec, params = make_step(drafter, batch=2, page=4, D=4, new=20)
            prompts = [prompt(9), prompt(21)]
            state = jaxspec.init_state(spec.target, spec.drafter, spec.config, prompts)
            state, _ = jit_with_state(run_to_end, spec.options)(spec, params, state)
            assert {leaf.dtype.itemsize for leaf in jax.tree.leaves(state)} == {4}
            ids.append([r.token_ids for r in read_requests(state, prompts)])
        print(json.dumps(ids))
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_ENABLE_X64": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == [[greedy(prompt(9), 20), greedy(prompt(21), 20)]] * 2
