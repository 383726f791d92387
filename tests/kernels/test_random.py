"""Random contents over fixed shapes: every metadata operation against the oracle, a forward's against its parts."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from kernel_forward import ENDLESS
from kernel_problems import FORWARDS, ORACLES, POOLED, Problem, Shape, plan, tiny_blocks

from pallas_kernels import checked

SMALL = [  # few programs each, so that NumPy can run them one after another
    Shape(4, 3, 6, 37, (4, 5), 9, page_size=4, granularity="page", maps="pair", form="packed", zero_tail=True),
    Shape(5, 4, 7, 41, (3, 1500), 11, 256, "token", "tokens", "wide", zero_tail=False, max_pages=5),
    Shape(3, 7, 5, 90, (5, 17), 6, 4, "token", "pages", "strided", zero_tail=True),
    Shape(1, 1, 1, 1, (1, 1), 1, 1, "page", "full", "arrays", zero_tail=False),
]
LARGE = [
    Shape(2, 5, 600, 700, (4, 590), 610, 1, "page", "pair", "arrays", zero_tail=False),  # several blocks a row
    Shape(70, 3, 37, 500, (66, 41), 300, 16, "page", "pages", "strided", zero_tail=False, max_pages=33),
    Shape(33, 5, 19, 333, (9, 17), 64, 64, "page", "tokens", "wide", zero_tail=True),
    Shape(17, 40, 9, 1000, (18, 21), 31, 2, "token", "full", "strided", zero_tail=True),
    Shape(66, 1, 1030, 2000, (3, 1025), 99, 1, "token", "identity", "arrays", zero_tail=False),  # a row takes turns
]
EMPTY = Shape(0, 2, 3, 5, (2, 3), 4, 2, "page", "identity", "packed", zero_tail=True)
SHAPES = [*SMALL, *LARGE, EMPTY]
QUICK = [SMALL[0], SMALL[1], LARGE[0], LARGE[1], EMPTY]  # each form, table granularity and end of the sizes
QUIET = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


def each(shapes, *, modes=1):
    """Every operation at every shape; of a forward's modes, which compile long, `modes` of each kind take turns."""
    return pytest.mark.parametrize(
        ("operation", "shape"),
        [
            pytest.param(
                operation, s, id=f"{operation},B={s.B},P={s.P},page={s.page_size},{s.granularity},{s.maps},{s.form}"
            )
            for number, s in enumerate(shapes)
            for operation in ORACLES
            if operation not in FORWARDS or _turn(operation, number) < modes
        ],
    )


def _turn(operation, number):
    """When a mode's turn is at the shape of a number; pooled attention is a mode ahead of plain layouts."""
    return (FORWARDS.index(operation) + (operation in POOLED) - number) % 3


@st.composite
def contents(draw, operation, shape: Shape):
    """What changes between calls; the edges of pages, tables and sources are as likely as all between them."""
    most = 2 * shape.N // max(shape.B, 1) + 2
    page, full, inputs = shape.page_size, shape.P * shape.page_size, plan(operation, shape).inputs.keys()

    def each(inputs_made_of_it, low, high, *edges):
        if not inputs & inputs_made_of_it:  # drawing is slow
            return np.zeros(shape.B, np.int32)
        inside = [edge for edge in (low, high, *edges) if low <= edge <= high]
        return draw(arrays(np.int32, shape.B, elements=st.sampled_from(inside) | st.integers(low, high)))

    return {
        "lengths": each(
            {"seq_lens", "anchor", "page_table"}, 0, full + 2 * page, 1, page - 1, page, page + 1, full - 1, full
        ),
        "rows": each({"req_rows"}, -2, shape.source[0] + 1, 0, shape.source[0] - 1),
        "starts": each({"start", "kv_start", "q_len"}, -2, shape.reach + 2, 0, page - 1, shape.reach - shape.D),
        "spans": each({"end", "indptr", "extend_seq_lens", "extend_lens", "pool_pages"}, 0, most, 1, page),
        "delta": np.int32(draw(st.integers(0, shape.D))),
        "limit": np.int32(draw(st.integers(-1, shape.reach + 2))),
        "bad": draw(st.sampled_from([0.0, 0.15, 0.9])),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


def sweep(operation, shape, backends, examples):
    @settings(max_examples=examples, **QUIET)
    @given(contents(operation, shape))
    def check(values):
        problem = Problem(operation, shape, values)
        order = np.random.default_rng(values["seed"]).permutation(shape.B)
        after = {backend: problem.check(backend) for backend in backends}
        before = problem.requests(after[backends[0]])
        for backend in backends:
            again = problem.permuted(order)
            moved = again.requests(again.run(backend))
            pairs = [(moved[i], before[b]) for i, b in enumerate(order)]
            assert all(x == y for x, y in pairs if x is not None and y is not None)

    check()


def sweep_checked(operation, shape, examples):
    @settings(max_examples=examples, **QUIET)
    @given(contents(operation, shape))
    def check(values):
        problem = Problem(operation, shape, values)
        with checked.declare(dead=problem.dead(), seed=values["seed"]):
            problem.check("checked")

    check()


def sweep_parts(operation, shape, backend, examples):
    @settings(max_examples=examples, **QUIET)
    @given(contents(operation, shape))
    def check(values):
        if operation in POOLED:
            values["limit"] = np.int32(ENDLESS)
        problem = Problem(operation, shape, values)
        found, parts = problem.run(backend)["packed"], problem.in_parts(backend)["packed"]
        np.testing.assert_array_equal(found, parts, strict=True)

    check()


@pytest.mark.parametrize("backend", [pytest.param("reference", marks=pytest.mark.slow), "checked"])
@pytest.mark.parametrize("shape", [SMALL[0], SMALL[2], SMALL[3], EMPTY], ids=lambda shape: shape.form)
@pytest.mark.parametrize("operation", FORWARDS)
def test_one_launch_equals_its_parts(operation, shape, backend):
    sweep_parts(operation, shape, backend, examples=4)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"B={shape.B},P={shape.P},{shape.form}")
@pytest.mark.parametrize("operation", FORWARDS)
@pytest.mark.parametrize("backend", ["triton", "mosaic"])
def test_one_launch_equals_its_parts_on_a_gpu(operation, shape, backend):
    sweep_parts(operation, shape, backend, examples=4)


@each(QUICK)
def test_backends_that_run_anywhere(operation, shape):
    slow = operation in POOLED and shape in LARGE  # to compile for the interpreter
    sweep(operation, shape, ("reference",) if slow else ("reference", "interpret"), examples=5)


@pytest.mark.gpu
@each(SHAPES)
@pytest.mark.parametrize("backend", ["triton", "mosaic"])
def test_compiled_backends(operation, shape, backend):
    sweep(operation, shape, (backend,), examples=10)


@pytest.mark.slow
@each(SHAPES)
def test_backends_that_run_anywhere_at_length(operation, shape):
    """10,000 examples an operation, few of them where the oracle's loops are long or nothing can differ."""
    sweep(operation, shape, ("reference", "interpret"), examples={LARGE[-1]: 90, EMPTY: 10}.get(shape, 1100))


@each(SMALL)
def test_checked_reads_nothing_that_no_request_needs(operation, shape):
    sweep_checked(operation, shape, examples=4)


@each(SMALL)
def test_checked_in_tiny_blocks(operation, shape, monkeypatch):
    tiny_blocks(monkeypatch)
    sweep_checked(operation, shape, examples=4)


@pytest.mark.slow
@each(SMALL, modes=3)
@pytest.mark.parametrize("tiny", [False, True])
def test_checked_at_length(operation, shape, tiny, monkeypatch):
    if tiny:
        tiny_blocks(monkeypatch)
    sweep_checked(operation, shape, examples=200)
