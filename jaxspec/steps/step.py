"""`make_spec_step`: a target, a drafter and shapes, bound into compiled functions of (params, state)."""

import dataclasses
import functools
import logging
from typing import Any, NamedTuple

import jax

from jaxspec.cache.layers import POSITION
from jaxspec.config import SpecConfig
from jaxspec.drafting import Drafter, DraftLM, MTPDrafter
from jaxspec.errors import InputError
from jaxspec.models.contract import Model
from jaxspec.steps.admission import admit
from jaxspec.steps.fusion import decide_fusion
from jaxspec.steps.memory import place
from jaxspec.steps.prefill import prefill
from jaxspec.steps.round import StepOutput, run_round
from jaxspec.steps.state import SpecState

_LOG = logging.getLogger(__name__)

# The classes of operation that XLA may record into one command buffer (a CUDA graph), WHILE among them: without it the
# host drives every turn of a device loop. The option replaces XLA's list, so the defaults are repeated.
#
# Left as they are, since a round of an 8B shape in bfloat16 (one request, D = 8, 4,885 us on an H200 then) gained less
# than 1 % or lost by each alone: dependent launches (4,872), loops unrolled in the command buffer, cuBLASLt, an
# exhaustive search of tiles, other emitters of fusions (4,877 to 5,047). Without products in Triton it lost 27 %,
# without those that split their sum 9 %. Joining all products of one input gains 3 %, by a copy of their weights that
# doubles them: `pallas_kernels.row_products` has this without the copy.
_COMMAND_BUFFER = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,WHILE,DYNAMIC_SLICE_FUSION"


def compiler_options(platform: str | None = None) -> dict[str, Any]:
    """XLA options with which a generation becomes one command buffer on an NVIDIA GPU.

    Args:
      platform: "cpu", "gpu" or "cuda"; the default backend's by default.

    Returns:
      Options for `jax.jit(..., compiler_options=...)`; empty off the GPU. They concern one function, no global flag is
      set.

    Example:
      >>> compiler_options("cpu"), compiler_options("cuda")["xla_gpu_command_buffer_scheduling_mode"]
      ({}, 'CONCURRENT')
    """
    platform = jax.default_backend() if platform is None else platform
    if platform not in ("gpu", "cuda"):
        return {}
    # CONCURRENT: a command waits for what it reads, not for all before it. 22 us less of 4,622 in such a round.
    return {
        "xla_gpu_enable_command_buffer": _COMMAND_BUFFER,
        "xla_gpu_graph_min_graph_size": 1,
        "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
    }


class Params(NamedTuple):
    """Weights of a step: the target's, and the drafter's (an empty tuple if it has none)."""

    target: Any
    draft: Any = ()


@functools.lru_cache(maxsize=256)
def jit_with_state(function, options: tuple[tuple[str, Any], ...]):
    """`function(spec, params, state)` compiled with a static spec and a donated state, one wrapper per function and
    options."""
    return jax.jit(function, static_argnums=0, donate_argnums=2, compiler_options=dict(options) or None)


@dataclasses.dataclass(frozen=True)
class SpecStep:
    """A speculative step. Call it as `state, out = step(params, state)`.

    The call is one compiled round; the state is donated (do not use the old one again). `step.prefill(params, state)`
    compiles the prefill. The phases `jaxspec.prepare`, `draft`, `verify`, `extend` and `commit` take the step as first
    argument and may be called, jitted or not, by a script that wants to stand between them.

    Attributes:
      target: the model that decides, tapped for a drafter that looks at its layers.
      drafter: who proposes, its layers placed; None with D = 1 is plain decoding.
      config: shapes.
      options: XLA options, as sorted pairs.
    """

    target: Model
    drafter: Drafter | None
    config: SpecConfig
    options: tuple[tuple[str, Any], ...] = ()

    def __call__(self, params: Params, state: SpecState) -> tuple[SpecState, StepOutput]:
        return jit_with_state(run_round, self.options)(self, params, state)

    def prefill(self, params: Params, state: SpecState) -> tuple[SpecState, jax.Array]:
        return jit_with_state(prefill, self.options)(self, params, state)


def make_spec_step(
    target: Model, drafter: Drafter | None, config: SpecConfig, *, options: dict[str, Any] | None = None
) -> SpecStep:
    """Binds a target, a drafter and shapes into a step.

    Args:
      target: the model that decides.
      drafter: `NgramDrafter`, `DraftLM`, another of `jaxspec.drafting` or your own; None proposes nothing.
      config: shapes. One compiled program serves every batch of these shapes, whatever lengths, tables and mappings it
        holds.
      options: XLA options for the compiled functions; `compiler_options()` by default.

    Raises:
      InputError: the draft's vocabulary, context or depth, the layers it looks at, or what prediction blocks select,
        does not match the target's or the shapes, or `jaxspec.admit` denies the combination; or the
        configuration's verifier asks what drafts were drawn from and the drafter cannot say.

    Example:
      >>> import jaxspec
      >>> target = jaxspec.load_model("target")
      >>> config = jaxspec.SpecConfig(batch_size=1, num_draft_tokens=4, context_len=64, max_new_tokens=8)
      >>> step = jaxspec.make_spec_step(target.model, jaxspec.NgramDrafter(), config)
      >>> params = jaxspec.Params(target.params)
      >>> state = jaxspec.init_state(target.model, step.drafter, config, [target.encode("for i in range(10):")])
      >>> state, status = step.prefill(params, state)
      >>> state, out = step(params, state)
      >>> 1 <= int(out.num_tokens[0]) <= 4
      True
    """
    if isinstance(drafter, str | type):
        raise InputError(f"drafter={drafter!r}: give an instance, jaxspec.NgramDrafter() say, or None")
    if config.context_len > target.context_len:
        raise InputError(f"context_len={config.context_len} is more than the model's {target.context_len}")
    drafter = place(target, drafter, config)
    placement = getattr(drafter, "placement", None)
    if placement is not None:
        for note in filter(None, (placement.reason, *placement.notes)):
            _LOG.info("%s: %s", drafter.algorithm, note)
    lanes = tuple(getattr(drafter, "cache_layers", ()))
    admit(
        "none" if drafter is None else getattr(drafter, "algorithm", "draft_lm"),
        memory=config.memory,
        kinds={
            "full",
            *(spec.storage for spec in (*target.layers, *lanes) if spec.carries == POSITION),
            *(["state"] if target.has_state else []),
        },
        mla=any(spec.carries == POSITION and spec.value_shape[1] == 0 for spec in target.layers),
        kpool=target.sparse is not None,
        fuses=bool(lanes),
        declined="" if placement is None else placement.reason,
    ).require()
    if config.asks_probs and not getattr(drafter, "has_probs", False):
        raise InputError(
            f"sampling={config.sampling!r} asks what drafts were drawn from, which "
            f"{'plain decoding' if drafter is None else type(drafter).__name__} cannot say (it has no has_probs): "
            "choose sampling='match'"
        )
    if taps := getattr(drafter, "taps", ()):
        target = target.tapped(taps)
    if isinstance(drafter, MTPDrafter):
        _check_blocks(target, drafter)
    if isinstance(drafter, DraftLM):
        draft = drafter.model
        if draft.vocab_size != target.vocab_size:
            raise InputError(
                f"the draft model has {draft.vocab_size} tokens, the target {target.vocab_size}: "
                "they must share a vocabulary"
            )
        if draft.context_len < config.context_len:
            raise InputError(
                f"the draft model's context of {draft.context_len} is below context_len={config.context_len}"
            )
    options = compiler_options() if options is None else options
    config = dataclasses.replace(config, kpool_metadata_fusion=decide_fusion(target, config))
    return SpecStep(target, drafter, config, tuple(sorted(options.items())))


def _check_blocks(target: Model, drafter: MTPDrafter) -> None:
    """Raises InputError unless prediction blocks can run with the target's metadata."""
    blocks, sparse = drafter.blocks, target.sparse
    if blocks.vocab_size != target.vocab_size:
        raise InputError(
            f"the prediction blocks have {blocks.vocab_size} tokens, the target {target.vocab_size}: use its own"
        )
    pairs = {(spec.pool, spec.topk) for spec in blocks.layers}
    if sparse is None or pairs != {(sparse.pool, sparse.topk)}:
        wanted = "it has no sparse layer" if sparse is None else f"its layers have {(sparse.pool, sparse.topk)}"
        raise InputError(
            f"the prediction blocks select by (pool, topk) = {sorted(pairs)}, and of the target {wanted}: they share "
            "its metadata, so use the target's own blocks"
        )
