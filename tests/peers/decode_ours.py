"""Our side: `jaxspec.generate` with the device loop, plain and with drafters. `python decode_ours.py FOLDER`."""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # read when jax starts; leaves the GPU to others, too

import concurrent.futures
from typing import Any

import jax
from decode_job import PLAIN, Arm, Job, Side, run_side
from peer_job import Refused

import jaxspec
from jaxspec import InputError
from jaxspec.cli import environment
from jaxspec.drafting.block import BlockDrafter
from jaxspec.drafting.choose import make_drafter
from jaxspec.generation.accounting import distinct_4gram_ratio
from jaxspec.generation.generate import default_config


def measure(job: Job) -> Side:
    """Runs every dtype and batch."""
    try:
        if jax.default_backend() != "gpu" and not job.check:
            raise Refused("jax sees no GPU: install its CUDA plugin, or give --check to compare ids only")
        arms = run(job)
    except (RuntimeError, InputError) as error:
        raise Refused(f"jax cannot run our side: {' '.join(str(error).split())}") from None
    machine = environment.describe()
    about = {"device": machine["devices"][0], "driver": environment.nvidia_driver()}
    return Side({**about, "versions": machine["versions"]}, arms)


def run(job: Job) -> list[Arm]:
    """All arms; at each dtype and batch their samples are taken in turn."""
    calls = {}
    for dtype in job.dtypes:
        target = jaxspec.load_model(job.model, dtype)
        for batch in job.batches:
            calls[dtype, batch] = {name: call_of(job, target, name, dtype, batch) for name in job.arms}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:  # compiles
        list(pool.map(lambda call: call(1), [call for group in calls.values() for call in group.values()]))
    found = []
    for (dtype, batch), group in calls.items():
        arms = []
        for name, call in group.items():
            said = call(job.new)
            arms.append(Arm(name, dtype, batch, said.token_ids, about=describe(said)))
        for _ in range(job.runs if job.timed(dtype) else 0):
            for arm in arms:
                arm.whole.append(group[arm.name](job.new).seconds)
                arm.prefill.append(group[arm.name](1).seconds)
        found += arms
    return found


def call_of(job: Job, target: jaxspec.Checkpoint, name: str, dtype: str, batch: int):
    """`f(tokens)`: a generation of so many tokens a request. All calls of it run one compiled program, and one token is
    what prefill gives, so the call with 1 is prefill alone."""
    drafter, draft_params = make_drafter("none" if name == PLAIN else name, target, dtype=dtype)
    rows = 1 if drafter is None else job.rows
    if isinstance(drafter, BlockDrafter):
        rows = min(rows, drafter.draft.config.num_drafts + 1)
    prompts, params = job.prompts[:batch], jaxspec.Params(target.params, draft_params)
    config = default_config(target.model, prompts, num_draft_tokens=rows, max_new_tokens=job.new)

    def call(tokens: int) -> jaxspec.Generation:
        return jaxspec.generate(
            target.model, params, prompts, drafter=drafter, max_new_tokens=tokens, config=config, loop="device"
        )

    return call


def describe(found: jaxspec.Generation) -> dict[str, Any]:
    """What tells how easy the text was to draft for."""
    return {
        "num_draft_tokens": found.num_draft_tokens,
        "accept_length": found.accept_length,
        "distinct_4grams": distinct_4gram_ratio(found.token_ids),
        "finish_reasons": sorted({request.finish_reason for request in found.requests}),
    }


if __name__ == "__main__":
    run_side("ours", measure)
