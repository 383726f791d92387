"""The lane language on every executor, the checked run's rules, and which executor a call gets."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_problems import STALE
from kernel_small import Small, run_small

from pallas_kernels import KERNELS, KernelFault, checked, explain_backends, kv_read_table
from pallas_kernels import backend as backends
from pallas_kernels import mosaic as mosaic_module
from pallas_kernels import triton as triton_module

GPU = [pytest.param(name, marks=pytest.mark.gpu) for name in ("triton", "mosaic")]
every_executor = pytest.mark.parametrize("executor", ["interpret", "checked", *GPU])


# The language --------------------------------------------------------------------------------------------------------


@every_executor
def test_widths_are_powers_of_two_between_a_warp_and_the_most(executor):
    lanes = {"checked": checked.CheckedLanes(0), "mosaic": mosaic_module.MosaicLanes(None)}
    lanes = lanes.get(executor, triton_module.LANES)
    least = 128 if executor == "mosaic" else 32
    assert [lanes.width(count, 256) for count in (0, 1, least, least + 1, 256, 257, 10**6)] == [
        least, least, least, 2 * least, 256, 256, 256,
    ]  # fmt: skip


EXPRESSIONS = {
    "add": (lambda lanes, a, b: a + b, lambda a, b: a + b),
    "subtract": (lambda lanes, a, b: a - b, lambda a, b: a - b),
    "constant": (lambda lanes, a, b: 7 - a * 3, lambda a, b: 7 - a * 3),
    "multiply": (lambda lanes, a, b: a * b, lambda a, b: a * b),
    "shift left": (lambda lanes, a, b: a << 3, lambda a, b: a * 8),
    "shift right": (lambda lanes, a, b: a >> 3, lambda a, b: np.floor_divide(a, 8)),
    "bits": (lambda lanes, a, b: (a & 12) | (b & 3), lambda a, b: (a & 12) | (b & 3)),
    "where": (lambda lanes, a, b: lanes.where(a < b, a, b + 1), lambda a, b: np.where(a < b, a, b + 1)),
    "where with constants": (lambda lanes, a, b: lanes.where(a == b, 5, -1), lambda a, b: np.where(a == b, 5, -1)),
    "maximum of a choice": (
        lambda lanes, a, b: lanes.maximum(lanes.where(a < b, -5, a), -1),
        lambda a, b: np.maximum(np.where(a < b, -5, a), -1),
    ),
    "comparison of a choice": (
        lambda lanes, a, b: lanes.where(lanes.where(a < b, -5, a) < 3, 1, a),
        lambda a, b: np.where(np.where(a < b, -5, a) < 3, 1, a),
    ),
    "div of a choice": (
        lambda lanes, a, b: lanes.div(lanes.where(a < b, -7, a), 2),
        lambda a, b: np.trunc(np.where(a < b, -7, a) / 2).astype(np.int32),
    ),
    "conditions": (
        lambda lanes, a, b: lanes.where(((a <= b) & (a >= -4)) | (b > 9), 1, 0),
        lambda a, b: np.where(((a <= b) & (a >= -4)) | (b > 9), 1, 0),
    ),
    "minimum": (lambda lanes, a, b: lanes.minimum(a, b), np.minimum),
    "maximum": (lambda lanes, a, b: lanes.maximum(a, 0), lambda a, b: np.maximum(a, 0)),
    "div": (lambda lanes, a, b: lanes.div(a, 5), lambda a, b: np.trunc(a / 5).astype(np.int32)),
    "cdiv": (
        lambda lanes, a, b: lanes.cdiv(lanes.maximum(a, -3), 4),
        lambda a, b: np.ceil(np.maximum(a, -3) / 4).astype(np.int32),
    ),
    "sum": (lambda lanes, a, b: a * 0 + lanes.sum(a), lambda a, b: np.full_like(a, a.sum())),
    "prefix sum": (lambda lanes, a, b: lanes.prefix_sum(a), lambda a, b: np.cumsum(a)),
}


@every_executor
@pytest.mark.parametrize("count", [5, 1000])
def test_expressions_of_vectors(executor, count):
    def write(lanes, program, ins, outs):
        lane = lanes.iota(lanes.width(count, 1024))
        live = lane < count
        a, b = (lanes.load(ref, (lane,), live) for ref in ins)
        for row, (expression, _) in enumerate(EXPRESSIONS.values()):
            lanes.store(outs[0], (row, lane), lanes.where(live, expression(lanes, a, b), 0), live)

    rng = np.random.default_rng(count)
    a, b = rng.integers(-20, 20, (2, count)).astype(np.int32)
    (out,) = run_small(Small(write, labels=("a", "b")), executor, (a, b), (len(EXPRESSIONS) + 1, count))
    for row, (name, (_, expected)) in enumerate(EXPRESSIONS.items()):
        np.testing.assert_array_equal(out[row], expected(a, b), err_msg=name)
    assert (out[-1] == STALE).all()


@every_executor
def test_expressions_of_scalars(executor):
    def write(lanes, program, ins, outs):
        a, b = lanes.load(ins[0], (program,)), lanes.load(ins[1], (program, 1))
        values = [
            a + b, a * 2 - b, a >> 1, b << 2, lanes.minimum(a, b), lanes.maximum(a, 3), lanes.div(a, 3),
            lanes.cdiv(b, 3), lanes.where(a < b, a, 0), lanes.where((a == 7) | (b <= 1), 1, 0),
        ]  # fmt: skip
        for column, value in enumerate(values):
            lanes.store(outs[0], (program, column), value)

    a, b = np.array([-7, 7, 100]), np.array([[9, 2], [9, 7], [9, 1]])
    (out,) = run_small(Small(write, 3, ("a", "b")), executor, (a, b), (3, 10))
    assert out.tolist() == [
        [-5, -16, -4, 8, -7, 3, -2, 1, -7, 0],
        [14, 7, 3, 28, 7, 7, 2, 3, 0, 1],
        [101, 199, 50, 4, 1, 100, 33, 1, 0, 1],
    ]


@every_executor
def test_masked_lanes_touch_nothing(executor):
    """Their indices may be anything: -1, or past the end of the array."""

    def write(lanes, program, ins, outs):
        lane = lanes.iota(lanes.width(8, 128))
        read = lanes.load(ins[0], (lane - 2,), (lane >= 2) & (lane < 7), other=-3)
        lanes.store(outs[0], (lane - 1,), read, (lane >= 1) & (lane < 5))

    (out,) = run_small(Small(write), executor, ([10, 11, 12, 13, 14],), (6,))
    assert out.tolist() == [-3, 10, 11, 12, STALE, STALE]


@every_executor
def test_rows_and_columns_may_be_vectors_scalars_or_constants(executor):
    def write(lanes, program, ins, outs):
        lane = lanes.iota(lanes.width(6, 128))
        live = lane < 6
        row = lanes.div(lane, 3)
        picked = lanes.load(ins[0], (row, lane - row * 3), live)  # row-major order
        column = lanes.load(ins[0], (lane, 1), lane < 2, other=9)
        lanes.store(outs[0], (program, lane), picked, live)
        lanes.store(outs[0], (lane + 2, 0), column, live)
        lanes.store(outs[1], (1, program + 2), lanes.load(ins[0], (program + 1, 2)))

    (first, second) = run_small(Small(write), executor, ([[1, 2, 3], [4, 5, 6]],), (8, 6), (2, 3))
    assert first[0].tolist() == [1, 2, 3, 4, 5, 6] and (first[1] == STALE).all()
    assert first[2:, 0].tolist() == [2, 5, 9, 9, 9, 9] and (first[2:, 1:] == STALE).all()
    assert second.tolist() == [[STALE] * 3, [STALE, STALE, 6]]


@every_executor
def test_conditions_and_loops_known_at_run_time(executor):
    """Program p writes row p: the sum of x[lower:upper], that many marks, and whether the bounds are in order."""

    def write(lanes, program, ins, outs):
        lower, upper = lanes.load(ins[1], (program, 0)), lanes.load(ins[1], (program, 1))
        total = lanes.loop(lower, upper, lambda i, total: total + lanes.load(ins[0], (i,)), program * 100)
        lanes.store(outs[0], (program, 0), total)
        lanes.loop(lower, upper, lambda i, _: lanes.store(outs[0], (program, i + 2), i))
        lanes.when(lower <= upper, lambda: lanes.store(outs[0], (program, 1), 1))

    bounds = [[0, 4], [2, 3], [3, 3], [3, 1]]
    (out,) = run_small(Small(write, 4, ("x", "bounds")), executor, ([1, 10, 100, 1000], bounds), (4, 6))
    assert out.tolist() == [
        [1111, 1, 0, 1, 2, 3],
        [200, 1, STALE, STALE, 2, STALE],
        [200, 1, STALE, STALE, STALE, STALE],
        [300, STALE, STALE, STALE, STALE, STALE],
    ]


# The checked run ----------------------------------------------------------------------------------------------------


def test_the_seed_decides_the_order_of_programs():
    ran = []

    def write(lanes, program, ins, outs):
        ran.append(int(program))
        lanes.store(outs[0], (program,), program + 1)

    def order(seed):
        ran.clear()
        with checked.declare(seed=seed):
            (out,) = run_small(Small(write, 20), "checked", ([0],), (20,))
        assert out.tolist() == list(range(1, 21))
        return tuple(ran)

    orders = [order(seed) for seed in range(5)]
    assert len(set(orders)) == 5 and tuple(range(20)) not in orders
    assert all(sorted(o) == list(range(20)) for o in orders)
    assert order(3) == orders[3]


def small_call(backend):
    arguments = {"req_rows": jnp.array([0]), "source": jnp.array([[3, 9]]), "out": jnp.zeros((1, 2), jnp.int32)}
    return lambda lengths: kv_read_table(lengths, **arguments, page_size=4, zero_tail=True, backend=backend)


def test_checked_leaves_the_destination_as_it_was():
    out = jnp.full((1, 2), STALE, jnp.int32)
    arguments = {"page_size": 4, "zero_tail": True, "backend": "checked"}
    new = kv_read_table(jnp.array([5]), jnp.array([0]), jnp.array([[3, 9]]), out, **arguments)
    assert new.tolist() == [[3, 9]] and out.tolist() == [[STALE, STALE]]


def test_checked_under_jit_is_refused():
    with pytest.raises(ValueError, match=r"backend='checked' runs eagerly .* call it outside jit, or name 'interpret'"):
        jax.jit(small_call("checked"))(jnp.array([5]))


def test_dead_cells_of_what_is_not_read_are_refused():
    with (
        checked.declare(dead={"sauce": np.zeros((1, 2), bool)}),
        pytest.raises(ValueError, match=r"dead=\['sauce'\]: kv_read_table reads only seq_lens, req_rows, source"),
    ):
        small_call("checked")(jnp.array([5]))


def test_dead_cells_of_another_shape_are_refused():
    with (
        checked.declare(dead={"source": np.zeros(2, bool)}),
        pytest.raises(ValueError, match=r"dead\['source'\] has shape \(2,\): the array has shape \(1, 2\)"),
    ):
        small_call("checked")(jnp.array([5]))


def test_declarations_end_with_their_block():
    call = small_call("checked")
    with pytest.raises(KernelFault), checked.declare(dead={"source": np.ones((1, 2), bool)}):
        call(jnp.array([5]))
    assert call(jnp.array([5])).tolist() == [[3, 9]]


# Which executor a call gets -----------------------------------------------------------------------------------------


def pretend(monkeypatch, capability, **missing):
    """A default device of this compute capability (None: no CUDA device), without the backends in `missing`."""
    monkeypatch.setattr(backends, "_capability", lambda: capability)
    for name in ("triton", "mosaic"):
        monkeypatch.setitem(backends._UNAVAILABLE, name, lambda name=name: missing.get(name))


CHOICES = [
    (None, {}, "reference", r"^the compiled kernels need a CUDA device; found "),
    ((9, 0), {}, "triton", r"^a CUDA device"),
    ((8, 0), {}, "triton", r"^a CUDA device"),
    ((12, 0), {"mosaic": "no mosaic"}, "triton", r"^a CUDA device"),
    ((9, 0), {"triton": "no triton"}, "mosaic", r"^a CUDA device; no triton$"),
    (
        (8, 9),
        {"triton": "no triton"},
        "reference",
        r"^no triton; mosaic needs compute capability 9.0 or newer; found .* \(compute capability 8.9\)$",
    ),
    (
        (7, 5),
        {},
        "reference",
        r"^triton needs compute capability 8.0 or newer; found .*7.5\); mosaic needs compute capability 9.0 or newer",
    ),
    ((9, 0), {"triton": "no triton", "mosaic": "no mosaic"}, "reference", r"^no triton; no mosaic$"),
]


@pytest.mark.parametrize(("capability", "missing", "backend", "reason"), CHOICES)
def test_explain_backends(capability, missing, backend, reason, monkeypatch):
    pretend(monkeypatch, capability, **missing)
    choices = explain_backends()
    assert [choice.kernel for choice in choices] == list(KERNELS)
    for choice in choices:
        if capability is not None and choice.kernel in backends._LEFT_TO_XLA:
            assert choice.backend == "reference"
            if backend != "reference":
                assert re.search(reason.rstrip("$") + ".*; .*XLA's (fusion of the reference|scatter)", choice.reason)
        else:
            assert choice.backend == (
                "reference" if backend == "mosaic" and choice.kernel in backends.TILED else backend
            )
            assert re.search(reason, choice.reason)


@pytest.mark.parametrize(("capability", "missing", "backend", "reason"), CHOICES[1:])
def test_none_lowers_what_explain_backends_names(capability, missing, backend, reason, monkeypatch):
    """For CUDA, whatever the machine that compiles; a CPU always runs the reference, and nothing runs the others."""
    pretend(monkeypatch, capability, **missing)
    traced = []

    def launch(name):
        return lambda operation, inputs, outputs, **_: traced.append(name) or outputs

    monkeypatch.setattr(triton_module, "launch", launch("triton"))
    monkeypatch.setattr(mosaic_module, "launch", launch("mosaic"))
    monkeypatch.setattr(checked, "launch", launch("checked"))
    monkeypatch.setattr(backends, "_interpret", launch("interpret"))
    operation = Small(lambda *_: None, programs=3)  # its own function, so that no earlier trace of it is found
    (out,) = backends.run(operation, None, (jnp.zeros(2, jnp.int32),), (jnp.zeros(4, jnp.int32),))
    assert set(traced) == {backend} - {"reference"}
    if jax.default_backend() == "cpu":
        assert out.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("backend", ["triton", "mosaic"])
@pytest.mark.parametrize("capability", [None, (9, 0)])
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the arrays must not be on a GPU")
def test_compiled_backends_decline_arrays_elsewhere(backend, capability, monkeypatch):
    pretend(monkeypatch, capability)
    with pytest.raises(
        ValueError, match=rf"backend='{backend}': it runs on arrays on a CUDA device; found .*cpu.*name 'r"
    ):
        small_call(backend)(jnp.array([5]))


@pytest.mark.parametrize(("backend", "capability", "least"), [("triton", (7, 5), "8.0"), ("mosaic", (8, 9), "9.0")])
def test_compiled_backends_decline_older_devices(backend, capability, least, monkeypatch):
    pretend(monkeypatch, capability)
    match = rf"backend='{backend}': it needs a CUDA device of compute capability {least} or newer; found .*"
    with pytest.raises(ValueError, match=match):
        small_call(backend)(jnp.array([5]))


@pytest.mark.parametrize("backend", ["triton", "mosaic"])
def test_compiled_backends_decline_a_jax_without_them(backend, monkeypatch):
    pretend(monkeypatch, (9, 0), triton="no triton here", mosaic="no mosaic here")
    with pytest.raises(ValueError, match=f"backend='{backend}': no {backend} here; leave backend out"):
        small_call(backend)(jnp.array([5]))


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match=r"backend='cuda' is unknown: use one of 'reference', 'interpret', 'checked'"):
        small_call("cuda")(jnp.array([5]))


RULES = {  # what a body does against the rules of lanes.py, whatever the order of its two programs: words of the fault
    "reads what the other writes": (
        lambda lanes, p, ins, outs: lanes.store(outs[0], (p,), lanes.load(outs[0], (p * -1 + 1,)) + p),
        "another program (wrote|read)",
    ),
    "stores to an input": (lambda lanes, p, ins, outs: lanes.store(ins[0], (p,), p), "store to x.*an input"),
    "stores a float": (lambda lanes, p, ins, outs: lanes.store(outs[0], (p,), p * 0.5), "store of float64"),
    "indexes with a slice": (
        lambda lanes, p, ins, outs: lanes.load(ins[0], (slice(2),), True),
        "an index is an integer",
    ),
    "takes five lanes": (lambda lanes, p, ins, outs: lanes.iota(5), "a vector of 5 lanes"),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rule", RULES)
def test_checked_holds_a_body_to_the_rules_in_any_order(rule, seed):
    body, words = RULES[rule]
    with checked.declare(seed=seed), pytest.raises(KernelFault, match=words):
        run_small(Small(body, programs=2), "checked", [[1, 2]], (2,))
