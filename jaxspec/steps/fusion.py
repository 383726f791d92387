"""Whether one kernel writes all metadata of a sparse model's forward: asked for by the configuration, decided once."""

import logging

from jaxspec.config import SpecConfig
from jaxspec.errors import InputError
from jaxspec.metadata import KPool
from jaxspec.models.contract import Model
from pallas_kernels import explain_backends, kpool_metadata_fusion_supported

_log = logging.getLogger(__name__)


def kpool_of(target: Model, config: SpecConfig) -> KPool | None:
    """How the target's sparse layers select, and who prepares it; None without such layers."""
    spec = target.sparse
    return None if spec is None else KPool(spec.pool, spec.topk, bool(config.kpool_metadata_fusion))


def metadata_path(target: Model, config: SpecConfig) -> str | None:
    """Who prepares the metadata of the target's sparse layers by a step's configuration, "fused" or "ordinary"; None
    without such layers."""
    kpool = kpool_of(target, config)
    return None if kpool is None else "fused" if kpool.fused else "ordinary"


def decide_fusion(target: Model, config: SpecConfig) -> bool:
    """Whether the step's metadata are fused. A combination that is not supported is no error.

    Asked for and possible: one line of information. Asked for, and not possible for a model that pools: one warning,
    and the step prepares the same values by separate operations. Asked for where there is nothing to fuse, or not asked
    for: silence.

    Raises:
      InputError: pages do not hold whole pools; nothing to do with fusion, but this is where the two meet.
    """
    spec = target.sparse
    if spec is None:
        return False
    if config.page_size % spec.pool:
        raise InputError(
            f"page_size={config.page_size}: the model pools {spec.pool} tokens, and a page holds whole pools; give a "
            f"multiple of {spec.pool}, {64 * spec.pool} is what the fused metadata need"
        )
    if not config.kpool_metadata_fusion or spec.pool <= 1:
        return False
    if reason := _unsupported(spec, config):
        _log.warning("kpool_metadata_fusion is not used: %s; separate operations prepare the same values", reason)
        return False
    _log.info("kpool_metadata_fusion: one kernel a forward prepares the metadata, %d tokens a pool", spec.pool)
    return True


def _unsupported(spec, config: SpecConfig) -> str | None:
    pages = config.page_size // spec.pool
    if not kpool_metadata_fusion_supported(spec.pool, pages, spec.topk):
        return (
            f"pool {spec.pool}, attention pages of {pages} tokens, topk {spec.topk}: it takes pages of 64 tokens "
            f"(page_size={64 * spec.pool}) and a pool that divides 64 and topk"
        )
    if config.kernel_backend is None:
        (choice,) = (choice for choice in explain_backends() if choice.kernel == "forward_metadata")
        if choice.backend == "reference":
            return f"it takes a CUDA device that kernels are compiled for, or a kernel_backend by name; {choice.reason}"
    return None
