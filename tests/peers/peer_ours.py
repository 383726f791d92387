"""Our side: the fused arm of `jaxspec bench metadata`, on the bench's problems. `python peer_ours.py FOLDER`."""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # read when jax starts; leaves the GPU to others, too

import dataclasses
from pathlib import Path

import jax
from peer_inputs import KINDS, problem
from peer_job import OUTPUTS, Arrays, Job, Refused, Samples, Shape, Side, flat, run_side

from jaxspec import InputError
from jaxspec.benchmarks import metadata, metadata_problem
from jaxspec.cli import environment


def measure(job: Job, folder: Path) -> Side:
    """Runs both kinds of work at every shape."""
    try:
        gpu = jax.default_backend() == "gpu"
        if not gpu and not job.check:
            raise Refused("jax sees no GPU: install its CUDA plugin, or give --check to compare outputs only")
        backend = metadata.choose_backends("compiled")[0] if gpu else "reference"
    except (RuntimeError, InputError) as error:
        raise Refused(f"jax cannot run our side: {' '.join(str(error).split())}") from None
    outputs = [flat({work: written(work, shape, backend) for work in OUTPUTS}) for shape in job.shapes]
    samples, failures = ([{} for _ in job.shapes], []) if job.check else timed(job, backend)
    machine = environment.describe()
    about = {"device": machine["devices"][0], "driver": environment.nvidia_driver(), "backend": backend}
    return Side({**about, "versions": machine["versions"]}, samples, outputs, failures)


def written(work: str, shape: Shape, backend: str) -> Arrays:
    """What the bench's fused arm writes."""
    of = problem(work, shape)
    call = jax.jit(metadata_problem.fused, static_argnums=0, static_argnames="backend", donate_argnums=3)
    _, out = call(of, *of.arrays, of.packed(), backend=backend)
    found = metadata_problem.read(of, out)
    return {name: found[name] for name in OUTPUTS[work]}


def timed(job: Job, backend: str) -> tuple[list[dict[str, Samples]], list[str]]:
    """The bench's samples of the touch, the empty kernel and the fused launch, and what it found to be wrong."""
    shapes = " ".join(map(str, job.shapes))
    found = metadata.run(metadata.Settings(shapes=shapes, widths="", backend=backend, runs=job.runs))
    rows = {(row["kind"], row["B"], row["live"], row["D"]): row["arms"] for row in found.results["rows"]}
    of_backend = {"empty": metadata_problem.EMPTY, "all": metadata_problem.FUSED}
    arms = {"touch": metadata_problem.TOUCH, **{program: f"{arm}, {backend}" for program, arm in of_backend.items()}}
    samples = []
    for shape in job.shapes:
        of_shape = {work: rows[KINDS[work], *dataclasses.astuple(shape)] for work in OUTPUTS}
        whole = {work: row for work, row in of_shape.items() if arms["all"] in row}  # what differs is not timed
        samples.append({work: {k: row[v]["us"] for k, v in arms.items()} for work, row in whole.items()})
    return samples, found.failures


if __name__ == "__main__":
    run_side("ours", measure)
