"""Random contents over fixed shapes: the kernels against the oracle, and what a permuted batch must give."""

import kernel_cases as cases
import kernel_oracle as oracle
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pallas_kernels import MetadataLayout, decode_metadata, draft_write_window

B, D, P, COLUMNS, ROWS, VIRTUAL = 4, 3, 6, 5, 4, 9  # the table is one column wider than the source
SETTINGS = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


def ids(shape, high):
    return arrays(np.int32, shape, elements=st.integers(-1, high))


def problems(page_size):
    return st.fixed_dictionaries(
        {
            "lengths": arrays(np.int32, B, elements=st.integers(0, P * page_size)),
            "rows": arrays(np.int32, B, elements=st.integers(0, ROWS - 1)),
            "pages": ids((ROWS, COLUMNS), VIRTUAL + 2),
            "full": ids(VIRTUAL, 50),
            "swa": ids(VIRTUAL - 2, 50),
            "slots": ids(VIRTUAL * page_size - 3, 200),
            "limit": st.integers(0, COLUMNS * page_size + 2),
            "order": st.permutations(range(B)),
        }
    )


def interleaved(full, swa):
    return np.stack([full, np.append(swa, [-1, -1])], axis=1).astype(np.int32)


@pytest.mark.parametrize("backend", cases.BACKENDS)
@pytest.mark.parametrize(
    ("page_size", "style"), [(1, "pair"), (4, "pair"), (1, "separate"), (4, "static"), (4, "full_only")]
)
def test_decode_metadata(page_size, style, backend):
    zero_tail = style in ("pair", "static")

    @SETTINGS
    @given(problems(page_size))
    def check(p):
        call = {"seq_lens": p["lengths"], "req_rows": p["rows"], "source": p["pages"], "page_size": page_size}
        if style == "pair":
            call["v2p"] = interleaved(p["full"], p["swa"])
        else:
            call |= {"source": cases.as_tokens(p["pages"], page_size), "granularity": "token"}
            call |= {} if style == "static" else {"full_v2p": p["full"]}
            call |= {"static": {"full_to_swa": p["slots"]}, "separate": {"swa_v2p": p["swa"]}}.get(style, {})
        call |= {"seq_len_delta": D, "zero_tail": zero_tail}
        out = cases.decode_out(B, P, has_swa=style != "full_only")
        expected = cases.to_dict(out)
        oracle.decode(expected, **call)
        actual = cases.run(decode_metadata, out, **call, backend=backend)
        cases.assert_equal(actual, expected)

        order = np.array(p["order"])
        call |= {"seq_lens": p["lengths"][order], "req_rows": p["rows"][order]}
        permuted = cases.run(decode_metadata, out, **call, backend=backend)
        np.testing.assert_array_equal(permuted.page_table, actual.page_table[order])
        assert permuted.cu_seqlens_k[-1] == actual.cu_seqlens_k[-1]

    check()


@pytest.mark.parametrize("backend", cases.BACKENDS)
@pytest.mark.parametrize(("page_size", "packed"), [(1, True), (4, True), (1, False), (4, False)])
def test_draft_write_window(page_size, packed, backend):
    @SETTINGS
    @given(problems(page_size))
    def check(p):
        call = {"start": p["lengths"], "req_rows": p["rows"], "source": p["pages"], "page_size": page_size}
        if packed:
            call["v2p"] = interleaved(p["full"], p["swa"])
        else:
            call |= {"source": cases.as_tokens(p["pages"], page_size), "granularity": "token"}
            call |= {"full_v2p": p["full"], "swa_v2p": p["swa"]}
        call |= {"anchor": p["lengths"] + 7, "limit": np.array([p["limit"]])}
        expected = cases.to_dict(cases.window_out(B, D, has_swa=True))
        oracle.window(expected, **call)
        out = cases.packed_out(MetadataLayout(B, D, P, True)) if packed else cases.window_out(B, D, has_swa=True)
        actual = cases.run(draft_write_window, out, **call, backend=backend)
        cases.assert_equal(actual.window() if packed else actual, expected)
        if packed:
            assert (actual.decode_tables().page_table == cases.STALE).all()

    check()
