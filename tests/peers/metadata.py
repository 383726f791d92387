"""Times the reference peer's metadata kernels beside ours, on one GPU in one run. See README.md beside this script."""

import argparse
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import peer_kernels
import peer_verdict
from peer_inputs import PAGE, POOL, SHAPES, TOPK, for_peer, problem
from peer_job import OUTPUTS, REFUSAL, Arrays, Job, Refused, Shape, Side, flat

from jaxspec import InputError
from jaxspec.cli.bench import align
from jaxspec.cli.jsonfile import JsonFile

HERE = Path(__file__).parent
SIDES = {"theirs": "peer_theirs.py", "ours": "peer_ours.py"}
LEAST_RUNS = 10  # a median of fewer says little


def main(words: list[str] | None = None) -> int:
    """Runs the command; returns its exit status: 1 where outputs differ, 2 for what cannot be done."""
    try:
        options = parse(words)
        output = JsonFile(options.json)
        peer_kernels.check(Path(options.peer))
        for package in ("torch", "triton"):
            if importlib.util.find_spec(package) is None:
                raise Refused(f"{package} is not installed, and the peer's kernels need it: pip install torch triton")
        with tempfile.TemporaryDirectory() as folder:
            job = Job(
                peer=str(Path(options.peer).resolve()),
                shapes=options.shapes,
                runs=options.runs,
                check=options.check,
                page=PAGE,
                pool=POOL,
                topk=TOPK,
            )
            job.save(Path(folder))
            inputs = [flat({work: for_peer(problem(work, shape)) for work in OUTPUTS}) for shape in job.shapes]
            for number, arrays in enumerate(inputs):
                np.savez(Path(folder) / f"inputs_{number}.npz", **arrays)
            theirs, ours = (run_side(name, Path(folder), job) for name in SIDES)
        return report(job, inputs, theirs, ours, output)
    except (Refused, InputError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def parse(words: list[str] | None) -> argparse.Namespace:
    """Reads the command line.

    Raises:
      Refused: a value that cannot be.
    """
    parser = argparse.ArgumentParser(prog="metadata.py", description=__doc__)
    parser.error = _refuse
    parser.add_argument("--peer", required=True, metavar="FOLDER", help="an unpacked sglang wheel")
    parser.add_argument("--json", metavar="FILE", help="where results go as JSON; - is standard output")
    parser.add_argument("--runs", type=int, default=20, help=f"samples of each program, {LEAST_RUNS} or more")
    what = "requests, committed tokens of the longest, rows a request; by default those of the project's goals"
    parser.add_argument("--shapes", nargs="+", type=Shape.parse, default=SHAPES, metavar="B,LIVE,D", help=what)
    parser.add_argument("--check", action="store_true", help="compare outputs only; needs no GPU")
    options = parser.parse_args(words)
    if options.runs < LEAST_RUNS:
        raise Refused(f"--runs={options.runs}: it must be {LEAST_RUNS} or more, since medians are compared")
    options.shapes = tuple(options.shapes)
    return options


def _refuse(message: str):
    raise Refused(message)


def run_side(name: str, folder: Path, job: Job) -> Side:
    """Runs one side in a process of its own, since each library wants the GPU for itself."""
    print(f"{name}: {'  '.join(map(str, job.shapes))} ...", file=sys.stderr, flush=True)
    words = [sys.executable, str(HERE / SIDES[name]), str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if (folder / REFUSAL).is_file():
        raise Refused((folder / REFUSAL).read_text())
    if done.returncode:
        print(done.stdout + done.stderr, file=sys.stderr, end="")
        raise Refused(f"{SIDES[name]} ended with status {done.returncode}, for what it says above")
    return Side.load(folder, name, len(job.shapes))


def report(job: Job, inputs: list[Arrays], theirs: Side, ours: Side, output: JsonFile) -> int:
    """Prints the tables, writes the JSON; returns the exit status."""
    rows = peer_verdict.judge(job, inputs, theirs, ours)
    failures = [f"{row.work} {row.shape}: outputs differ, {line}" for row in rows for line in row.differences]
    failures += [f"{name}: {line}" for name, side in (("theirs", theirs), ("ours", ours)) for line in side.failures]
    versions = {**theirs.environment["versions"], **ours.environment["versions"]}
    lines = [f"{name} {version}" for name, version in versions.items() if version]
    devices = f"theirs on {theirs.environment['device']}, ours on {ours.environment['device']}"
    text = ["  ".join(lines), f"{devices}, driver {ours.environment['driver'] or 'unknown'}"]
    text += ["\n" + "\n".join(align(table)) for table in peer_verdict.tables(rows)]
    print("\n".join(text), file=sys.stderr if output.to_stdout else sys.stdout)
    results = {
        "rows": peer_verdict.results(rows),
        "failures": failures,
        "settings": {"runs": job.runs, "check": job.check},
        "environment": {"theirs": theirs.environment, "ours": ours.environment},
    }
    output.write(results)
    for line in failures:
        print(f"error: {line}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
