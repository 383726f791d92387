"""Runs calls on a GPU backend, for compute-sanitizer to watch: `python sanitized.py BACKEND [--planted | NAME ...]`.

    XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async compute-sanitizer --tool memcheck --error-exitcode 99 \
        python sanitized.py triton

XLA's own allocator hands out parts of one large allocation, in which an overrun stays unseen. The platform allocator of
jax 0.11 maps whole pages of 2 MB, whose unused end hides one as well: an overrun by 512 bytes was reported with
cuda_async, whose buffers memcheck knows to the byte, and not with platform. `--planted` runs a kernel that stores one
vector past the end of its buffer instead. NAMEs are the first letters of the calls that are run;
without any, all are.
"""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import kernel_calls
import numpy as np

from pallas_kernels import backend as backends


@dataclasses.dataclass(frozen=True)
class Overrun:
    """Stores one vector behind a buffer of 128 cells."""

    name = "overrun"
    programs = 1
    labels = ("values",)
    reference_is_faster = False

    def body(self, lanes, program, ins, outs):
        lane = lanes.iota(128)
        value = lanes.load(ins[0], (lane,), lane < 128)
        lanes.store(outs[0], (lane + 128,), value, lane < 128)

    def reference(self, inputs, outputs):
        return outputs


def main(backend: str, *words: str) -> None:
    if words == ("--planted",):
        buffers = jnp.arange(128, dtype=jnp.int32), jnp.zeros(128, jnp.int32)
        jax.block_until_ready(backends.run(Overrun(), backend, buffers[:1], buffers[1:]))
        return
    chosen = {name: call for name, (call, _, _) in kernel_calls.CALLS.items() if name.startswith(words or "")}
    for name, call in chosen.items():
        print(name, flush=True)  # the last one is known if the process dies
        for seed in range(3):
            arguments = kernel_calls.values(name, seed)
            expected = call(*arguments, backend="reference")
            actual = jax.jit(call, static_argnames="backend", donate_argnums=0)(*arguments, backend=backend)
            for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
                np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=f"{name}, seed {seed}")
    print(f"{len(chosen)} calls on {backend} equal the reference")


if __name__ == "__main__":
    main(*sys.argv[1:])
