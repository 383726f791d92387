"""Speculative decoding in JAX: exact, compiled into one executable, with fused Pallas metadata kernels.

    target = jaxspec.load_model("target")
    result = jaxspec.generate(target.model, jaxspec.Params(target.params), [target.encode("def main():")],
                              drafter=jaxspec.NgramDrafter())

A step of one's own: `make_spec_step`, `init_state`, then `step.prefill(params, state)` and `step(params, state)` as
often as needed; between its phases: `prepare`, `draft`, `verify`, `extend`, `commit`.

Axis letters, the same everywhere:

    B  requests of a batch           D  rows verified per request and round: the anchor and D - 1 drafts
    P  pages a row                   R  request rows, B + 1; row 0 is the sink row of padded lanes
    T  tokens a sequence may hold    C  prompt tokens a prefill chunk
    V  vocabulary                    H  hidden width
    S  keys gathered for attention   NV virtual pages

Words: the *anchor* is the newest token, which has no K/V yet; L, the *committed length*, counts tokens that have. A
*slot* is the place of one token in a buffer, a *page* is `page_size` slots, a *virtual* page names a piece of a request
whatever the pools do, `v2p` maps it to the physical page of each kind. Index 0 is the *sink* in every space: nobody
owns it, nothing depends on what it holds.
"""

from jaxspec.attention import Heads, IndexRows, attend, attend_pooled, paged_attention
from jaxspec.cache import KPoolSpec, KVCache, LayerSpec, StatePart, StateSpec
from jaxspec.config import SpecConfig
from jaxspec.drafting import (
    DFlashDrafter,
    DraftContext,
    Drafter,
    DraftLM,
    Drafts,
    DSparkDrafter,
    Eagle3Drafter,
    ExtendContext,
    MTPDrafter,
    NgramDrafter,
)
from jaxspec.errors import InputError
from jaxspec.generation import (
    Finished,
    Generation,
    ManyProgress,
    ManyRun,
    RequestResult,
    generate,
    generate_many,
)
from jaxspec.metadata import (
    DecodeMetadata,
    DraftExtendMetadata,
    ForwardMetadata,
    KPoolMetadata,
    KPoolWritePlan,
    VerifyMetadata,
    WriteWindow,
)
from jaxspec.models import (
    Checkpoint,
    DraftCheckpoint,
    Model,
    MTPBlocks,
    embedded_draft,
    embedded_names,
    from_glm,
    from_hybrid,
    from_qwen3,
    load_draft,
)
from jaxspec.models import load as load_model
from jaxspec.recurrent import gated_delta, recur, short_conv
from jaxspec.steps import (
    Admission,
    Params,
    PoolConfig,
    SpecState,
    SpecStep,
    StepOutput,
    admit,
    commit,
    compiler_options,
    draft,
    extend,
    init_state,
    make_spec_step,
    prefill,
    prepare,
    requests_of,
    verify,
)
from jaxspec.verification import Sampling, StopStrings

__version__ = "0.1.0"

__all__ = [
    "Admission",
    "Checkpoint",
    "DFlashDrafter",
    "DSparkDrafter",
    "DecodeMetadata",
    "DraftCheckpoint",
    "DraftContext",
    "DraftExtendMetadata",
    "DraftLM",
    "Drafter",
    "Drafts",
    "Eagle3Drafter",
    "ExtendContext",
    "Finished",
    "ForwardMetadata",
    "Generation",
    "Heads",
    "IndexRows",
    "InputError",
    "KPoolMetadata",
    "KPoolSpec",
    "KPoolWritePlan",
    "KVCache",
    "LayerSpec",
    "MTPBlocks",
    "MTPDrafter",
    "ManyProgress",
    "ManyRun",
    "Model",
    "NgramDrafter",
    "Params",
    "PoolConfig",
    "RequestResult",
    "Sampling",
    "SpecConfig",
    "SpecState",
    "SpecStep",
    "StatePart",
    "StateSpec",
    "StepOutput",
    "StopStrings",
    "VerifyMetadata",
    "WriteWindow",
    "admit",
    "attend",
    "attend_pooled",
    "commit",
    "compiler_options",
    "draft",
    "embedded_draft",
    "embedded_names",
    "extend",
    "from_glm",
    "from_hybrid",
    "from_qwen3",
    "gated_delta",
    "generate",
    "generate_many",
    "init_state",
    "load_draft",
    "load_model",
    "make_spec_step",
    "paged_attention",
    "prefill",
    "prepare",
    "recur",
    "requests_of",
    "short_conv",
    "verify",
]
