"""The problems of `jaxspec bench metadata`, and the same requests and tables as the peer takes them."""

import numpy as np
from peer_job import Arrays, Shape

from jaxspec.benchmarks import metadata, metadata_problem
from jaxspec.benchmarks.metadata_problem import FULL_SWA, KPOOL, Problem

PAGE, POOL, TOPK = metadata_problem.PAGE, metadata_problem.POOL, metadata_problem.TOPK
SHAPES = tuple(map(Shape.parse, metadata.SHAPES.split()))
KINDS = {"step": FULL_SWA, "kpool": KPOOL}


def problem(work: str, shape: Shape) -> Problem:
    """What the bench builds for a kind of work at a shape."""
    return Problem(KINDS[work], shape.B, shape.live, shape.D)


def for_peer(problem: Problem) -> Arrays:
    """The problem's arrays with the peer's types.

    seq_lens, req_rows, anchor  int64[B]          tokens committed, rows of the table, a token; padding has 0 and row 0
    tokens                      int32[R, width]   virtual token id of each position; of KPool, whose kernel has no map,
                                                  the FULL slot
    full_v2p, swa_v2p           int64[NV]         physical page of each virtual page, -1 where unbound
    slot_of_req                 int32[R]          virtual state slot of each row
    state_v2p                   int64[R]          physical state slot of each virtual one
    real                        int64[]           requests that are no padding; they come first
    """
    vectors, tables = problem.arrays
    full, swa = tables["v2p"].T
    source = tables["source"] if problem.kind == FULL_SWA else full[tables["source"]]
    tokens = source[:, :, None] * problem.page + np.arange(problem.page, dtype=np.int32)
    return {
        **{name: array.astype(np.int64) for name, array in vectors.items()},
        "tokens": tokens.reshape(len(source), -1),
        "full_v2p": full.astype(np.int64),
        "swa_v2p": swa.astype(np.int64),
        "slot_of_req": tables["slot_of_req"],
        "state_v2p": tables["state_v2p"].astype(np.int64),
        "real": np.array(problem.real),
    }
