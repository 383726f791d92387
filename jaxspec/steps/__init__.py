"""The speculative step: prefill, prepare, draft, verify, extend, commit, over one device-resident state."""

from jaxspec.steps.admission import Admission, admit
from jaxspec.steps.prefill import prefill
from jaxspec.steps.round import StepOutput, commit, draft, extend, prepare, run_round, verify
from jaxspec.steps.sizing import PoolConfig
from jaxspec.steps.state import Requests, SpecState, init_state, requests_of
from jaxspec.steps.step import Params, SpecStep, compiler_options, make_spec_step

__all__ = [
    "Admission",
    "Params",
    "PoolConfig",
    "Requests",
    "SpecState",
    "SpecStep",
    "StepOutput",
    "admit",
    "commit",
    "compiler_options",
    "draft",
    "extend",
    "init_state",
    "make_spec_step",
    "prefill",
    "prepare",
    "requests_of",
    "run_round",
    "verify",
]
