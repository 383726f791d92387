"""Sizing: SGLang's worked example, an oracle that tries everything, and pools that hold what is promised."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import CONTEXT, DRAFT, FAST_COMPILE, TARGET, drafter_and_params, prompt
from unified_cases import run

import jaxspec
from jaxspec.cache import LayerSpec, StatePart, StateSpec
from jaxspec.steps.memory import pool_layout
from jaxspec.steps.sizing import PoolConfig, most_full_tokens

WINDOW = 8
FULL = (LayerSpec(2, 64, value_dim=32),) * 3  # 1152 bytes a token in bfloat16
SWA = (LayerSpec(2, 64, WINDOW, "swa"),)  # 512
STATE = (StateSpec((StatePart("conv", (3, 4)), StatePart("temporal", (2, 16, 16)))),)  # 48 + 2048, padded to 2112
LANES = (LayerSpec(1, 64),) * 2  # 512 more in each FULL entry
LAYERS = {"full": FULL, "full, swa": FULL + SWA, "full, state": FULL + STATE, "all": FULL + STATE + SWA}


def model(kinds, context=64):
    return jaxspec.Model(None, LAYERS[kinds], vocab_size=61, context_len=context, dtype="bfloat16")


@dataclasses.dataclass(frozen=True)
class Lanes:
    """As much of a drafter as sizing asks for."""

    cache_layers: tuple[LayerSpec, ...] = LANES


# SGLang's formula


@pytest.mark.parametrize(
    ("budget", "draft_bytes", "tokens"),
    [(100_000, 0, 80), (100_000, 256, 68), (96_256, 0, 80), (96_255, 0, 76), (98_816, 256, 68), (98_815, 256, 64)],
)
def test_worked_example(budget, draft_bytes, tokens):
    """80 FULL and 8 SWA tokens are 96 256 bytes; a draft of 256 bytes a token leaves 68, with 72 of its own."""
    sizes = {"full_bytes": 1152, "swa_bytes": 512, "ratio": 0.1, "page_size": 4}
    assert most_full_tokens(budget, **sizes, draft_bytes=draft_bytes) == tokens


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 20_000),
    st.integers(1, 300),
    st.integers(0, 300),
    st.floats(0.01, 1),
    st.sampled_from([1, 4, 16]),
    st.integers(0, 50),
)
def test_most_full_tokens_tries_as_well_as_trying_all(budget, full, swa, ratio, page, draft):
    def takes(tokens):
        swa_tokens = int(tokens * ratio)
        pool = tokens * full + (swa_tokens - swa_tokens % page) * swa
        own = max(pool // full - 1, 0)
        return pool + (own + -own % page + page) * draft

    wanted = max((tokens for tokens in range(0, budget // full + 1, page) if takes(tokens) <= budget), default=0)
    sizes = {"full_bytes": full, "swa_bytes": swa, "ratio": ratio, "page_size": page, "draft_bytes": draft}
    assert most_full_tokens(budget, **sizes) == wanted


# An oracle: intervals of bytes, and every number tried


def entries(kinds, lanes):
    """Bytes an entry of each kind, from the bottom of the pool to the top."""
    sizes = {"state": 2112, "swa": 512, "full": 1152 + 512 * lanes}
    return {kind: size for kind, size in sizes.items() if kind in kinds or kinds == "all"}


def fits(nbytes, sizes, page_size, counts):
    """Whether the pages lie one behind the other, clear of the sinks: states, SWA, and FULL at the top."""
    pages = {kind: size * (1 if kind == "state" else page_size) for kind, size in sizes.items()}
    end = max(pages.values())
    for kind, page in pages.items():
        if kind != "full":
            end = (-(-end // page) + counts[kind]) * page
    return end <= (nbytes // pages["full"] - counts["full"]) * pages["full"]


def tried(budget, kinds, lanes, *, D, requests, context, page, chunk, swa_ratio, state_ratio, states, private):
    """What a budget gives: ("least", bytes), or (FULL, SWA and state pages, requests, whole requests, bytes used)."""
    sizes = entries(kinds, lanes)
    state = sizes.get("state", 0)
    full_page = page * (sizes["full"] + private)

    def pool(n):  # bytes of the pool beside n requests' rows
        return (budget - n * D * state) // full_page * page * sizes["full"]

    window = -(-(WINDOW + max(2 * D, chunk) - 1) // page) + 1
    one = {"full": -(-context // page), "swa": min(window, -(-context // page)), "state": states}
    least = full_page
    while not fits(least // full_page * page * sizes["full"], sizes, page, one):
        least += full_page
    least += D * state
    if budget < least:
        return "least", least

    def whole(n):
        return {kind: n * count for kind, count in one.items()}

    def running(n):
        return {"full": max(n, one["full"]), "swa": max(n, one["swa"]), "state": n * states}

    if state:
        share = int(budget * state_ratio / (1 + state_ratio))
        most = 1
        while state + (most + 1) * state * (states + D) <= share:
            most += 1
        wanted, demand = min(most, requests or most), running
    else:
        wanted, demand = requests or budget, running if requests else whole
    n = 1
    while n < wanted and fits(pool(n + 1), sizes, page, demand(n + 1)):
        n += 1

    def planned(full):
        return {"full": full, "swa": int(full * page * swa_ratio) // page, "state": n * states}

    full = max(f for f in range(budget // sizes["full"] // page + 1) if fits(pool(n), sizes, page, planned(f)))
    guaranteed = max(w for w in range(n + 1) if fits(pool(n), sizes, page, whole(w)))
    used = pool(n) // sizes["full"] * private + pool(n) + n * D * state
    counts = (full, planned(full)["swa"] if "swa" in sizes else 0, n * states if state else 0)
    return *counts, n, guaranteed, used


@st.composite
def plans(draw):
    context, page = draw(st.integers(9, 64)), draw(st.sampled_from([1, 4, 16]))
    return {
        "kinds": draw(st.sampled_from(list(LAYERS))),
        "lanes": draw(st.booleans()),
        "D": draw(st.integers(1, 9)),
        "requests": draw(st.none() | st.integers(1, 9)),
        "context": context,
        "page": page,
        "chunk": draw(st.sampled_from([1, 8, 32])),
        "swa_ratio": draw(st.sampled_from([0.01, 0.1, 0.5, 0.8, 1])),
        "state_ratio": draw(st.sampled_from([0.05, 0.5, 0.9, 3.0])),
        "states": draw(st.integers(1, 3)),
        "private": draw(st.sampled_from([0, 0, 256])),
    }


def sized(budget, plan):
    return PoolConfig.from_budget(
        budget,
        model(plan["kinds"]),
        Lanes() if plan["lanes"] else None,
        num_draft_tokens=plan["D"],
        requests=plan["requests"],
        context_len=plan["context"],
        page_size=plan["page"],
        prefill_chunk=plan["chunk"],
        swa_full_tokens_ratio=plan["swa_ratio"],
        state_full_memory_ratio=plan["state_ratio"],
        states_per_request=plan["states"],
        private_draft_bytes=plan["private"],
    )


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 500_000), plans())
def test_budgets(budget, plan):
    """Every number is the one that trying all gives, the pool holds it, and one byte less than the least is refused."""
    wanted = tried(budget, **plan)
    if wanted[0] == "least":
        with pytest.raises(jaxspec.InputError) as error:
            sized(budget, plan)
        assert str(error.value) == (
            f"budget={budget}: one request of {plan['context']} tokens takes {wanted[1]} bytes; give at least as many, "
            "or lower context_len"
        )
        assert tried(wanted[1] - 1, **plan) == wanted
        budget = wanted[1]
        wanted = tried(budget, **plan)
    got = sized(budget, plan)
    assert (
        got.full_pages,
        got.swa_pages,
        got.state_pages,
        got.requests,
        got.whole_requests,
        got.bytes_used,
    ) == wanted
    assert got.bytes_used == got.layout.nbytes + got.scratch_bytes + got.draft_bytes <= budget
    assert got.whole_requests >= 1 and got.full_pages >= 1

    layout, window = got.layout, None if "swa" not in got.layout.kinds else WINDOW
    config = jaxspec.SpecConfig(**got.spec_fields(), max_new_tokens=1)
    one = {"full": config.pages_per_row, "swa": config.swa_pages_per_row(window) if window else 0}
    assert layout.holds(full=got.full_pages, swa=got.swa_pages, state=got.state_pages)
    assert layout.holds(**one, state=got.state_pages)
    assert layout.holds(full=got.requests, swa=got.requests, state=got.state_pages)
    whole = {kind: count * got.whole_requests for kind, count in one.items()}
    assert layout.holds(**whole, state=got.whole_requests * plan["states"])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300_000), st.integers(0, 20_000), plans())
def test_more_is_never_refused_where_less_is_not(budget, more, plan):
    try:
        less = sized(budget, plan)
    except jaxspec.InputError:
        return
    got = sized(budget + more, plan)
    assert got.requests >= less.requests and got.state_pages >= less.state_pages


# Worked rows


def test_full_and_swa():
    """100 000 bytes are 21 FULL pages. Three SWA pages overlap the larger sink, and a fourth one with them fills 8192
    bytes, so that 19 FULL pages are above: 76 tokens, which come with 7, so with one SWA page."""
    got = PoolConfig.from_budget(
        100_000, model("full, swa"), page_size=4, prefill_chunk=4, swa_full_tokens_ratio=0.1, num_draft_tokens=2
    )
    assert (got.full_pages, got.swa_pages, got.state_pages) == (19, 1, 0)
    assert (got.layout.nbytes, got.scratch_bytes, got.draft_bytes) == (21 * 4608, 0, 0)
    assert not got.layout.holds(full=20, swa=2)


def test_states():
    """Half of 1 000 000 bytes for states: with D = 4 each request takes 5 * 2112, so 47 run beside the sink's."""
    got = PoolConfig.from_budget(
        1_000_000, model("full, state"), num_draft_tokens=4, page_size=4, state_full_memory_ratio=1.0
    )
    assert got.requests == got.state_pages == (500_000 - 2112) // (5 * 2112) == 47
    assert got.scratch_bytes == 47 * 4 * 2112
    # 1 000 000 - 47 * 8448 leaves 130 FULL pages; the sink and 47 states fill the lowest 23.
    assert got.layout.num_pages("full") == 130 and got.full_pages == 107
    # Seven requests of 64 tokens are 112 FULL pages: there are 40 states fewer then.
    assert got.whole_requests == 7


def test_fewer_requests_leave_more_pages():
    few, many = (
        PoolConfig.from_budget(1_000_000, model("all"), requests=n, num_draft_tokens=4, page_size=4, prefill_chunk=8)
        for n in (2, 20)
    )
    assert (few.requests, many.requests) == (2, 20) and few.full_pages > many.full_pages


def test_lanes_widen_the_entries():
    alone = PoolConfig.from_budget(200_000, model("full"), page_size=4)
    fused = PoolConfig.from_budget(200_000, model("full"), Lanes(), page_size=4)
    assert (alone.full_pages, fused.full_pages) == (200_000 // 4608 - 1, 200_000 // 6656 - 1)
    private = PoolConfig.from_budget(200_000, model("full"), page_size=4, private_draft_bytes=512)
    assert private.full_pages == fused.full_pages and private.bytes_used == fused.bytes_used


# In use


def test_a_step_has_that_pool():
    drafter = jaxspec.DraftLM(DRAFT)
    got = PoolConfig.from_budget(300_000, TARGET, drafter, num_draft_tokens=4, context_len=60, page_size=4)
    config = jaxspec.SpecConfig(**got.spec_fields(), max_new_tokens=9, logprobs=True)
    assert pool_layout(TARGET, drafter, config) == got.layout
    assert (config.memory, config.batch_size, config.context_len) == ("unified", got.requests, 60)


def test_the_least_budget_runs_one_request_to_the_end_of_its_context():
    drafter, params = drafter_and_params("ngram")
    shape = {"num_draft_tokens": 4, "context_len": CONTEXT, "page_size": 4, "prefill_chunk": 20}
    with pytest.raises(jaxspec.InputError, match=r"takes \d+ bytes") as error:
        PoolConfig.from_budget(1, TARGET, drafter, **shape)
    least = int(str(error.value).split(" bytes")[0].split()[-1])
    got = PoolConfig.from_budget(least, TARGET, drafter, **shape)
    assert got.requests == got.whole_requests == 1 and got.bytes_used == least

    config = jaxspec.SpecConfig(**got.spec_fields(), max_new_tokens=CONTEXT)
    step = jaxspec.make_spec_step(TARGET, drafter, config, options=FAST_COMPILE)
    (result,) = run(step, params, [prompt(41)])
    assert result.finish_reason == "context"
    assert len(result.token_ids) == CONTEXT - 41


# What is refused


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"budget": 0}, "budget=0: must be an integer of at least 1"),
        ({"budget": 1e6}, "budget=1000000.0: must be an integer of at least 1"),
        ({"requests": 0}, "requests=0: must be an integer of at least 1"),
        ({"states_per_request": 0}, "states_per_request=0: must be an integer of at least 1"),
        ({"private_draft_bytes": -1}, "private_draft_bytes=-1: must be an integer of at least 0"),
        ({"swa_full_tokens_ratio": 0.0}, "swa_full_tokens_ratio=0.0: must be above 0 and at most 1"),
        ({"swa_full_tokens_ratio": 1.1}, "swa_full_tokens_ratio=1.1: must be above 0 and at most 1"),
        ({"swa_full_tokens_ratio": float("nan")}, "swa_full_tokens_ratio=nan: must be above 0 and at most 1"),
        ({"state_full_memory_ratio": 0}, "state_full_memory_ratio=0: must be above 0 and finite"),
        ({"state_full_memory_ratio": float("inf")}, "state_full_memory_ratio=inf: must be above 0 and finite"),
        ({"page_size": 48}, "page_size=48: must be a power of two"),
        ({"num_draft_tokens": 0}, "num_draft_tokens=0: must be at least 1"),
    ],
)
def test_arguments_out_of_range(arguments, words):
    with pytest.raises(jaxspec.InputError) as error:
        PoolConfig.from_budget(**{"budget": 10**6, "model": model("all"), **arguments})
    assert str(error.value) == words


def test_a_pool_that_int32_cannot_index():
    with pytest.raises(ValueError, match=r"more than 2\*\*31 - 1 units"):
        PoolConfig.from_budget(2**50, model("all"))
