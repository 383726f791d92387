"""Times a decode loop of plain PyTorch, captured in a CUDA graph, beside ours. See README.md beside this script."""

import argparse
import dataclasses
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import decode_inputs
import decode_verdict
from decode_job import BFLOAT16, FLOAT32, Job, Side
from peer_job import REFUSAL, Refused

from jaxspec import InputError
from jaxspec.cli.bench import align
from jaxspec.cli.jsonfile import JsonFile
from jaxspec.drafting.choose import DRAFTERS
from jaxspec.models import embedded_names

HERE = Path(__file__).parent
SIDES = {"theirs": "decode_theirs.py", "ours": "decode_ours.py"}
LEAST_RUNS = 5  # a median of fewer says little
BATCHES, NEW = (1, 16), 256
CHECK_BATCHES, CHECK_NEW = (1, 3), 16


def main(words: list[str] | None = None) -> int:
    """Runs the command; returns its exit status: 1 where float32 ids differ, 2 for what cannot be done."""
    try:
        options = parse(words)
        output = JsonFile(options.json)
        job = make_job(options)
        if importlib.util.find_spec("torch") is None:
            raise Refused("torch is not installed, and the loop that ours is compared with needs it: pip install torch")
        with tempfile.TemporaryDirectory() as folder:
            job.save(Path(folder))
            theirs, ours = (run_side(name, Path(folder), job) for name in SIDES)
        return report(job, theirs, ours, output)
    except (Refused, InputError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def parse(words: list[str] | None) -> argparse.Namespace:
    """Reads the command line.

    Raises:
      Refused: a value that cannot be.
    """
    parser = argparse.ArgumentParser(prog="decode.py", description=__doc__)
    parser.error = _refuse
    parser.add_argument("--model", default="target", help="an embedded model's name, or a folder of a Qwen3 dense one")
    parser.add_argument("--json", metavar="FILE", help="where results go as JSON; - is standard output")
    parser.add_argument("--runs", type=int, default=20, help=f"samples of each arm, {LEAST_RUNS} or more")
    what = f"requests decoded together, by default {BATCHES} and with --check {CHECK_BATCHES}"
    parser.add_argument("--batch", nargs="+", type=int, metavar="B", help=what)
    what = f"tokens that each request emits, by default {NEW} and with --check {CHECK_NEW}"
    parser.add_argument("--new", type=int, metavar="N", help=what)
    drafters = [name for name in DRAFTERS if name != "none"]
    what = "who drafts, by default ngram, and for the embedded target draft_lm and dspark as well"
    parser.add_argument("--drafters", nargs="+", choices=drafters, help=what)
    parser.add_argument("--num_draft_tokens", type=int, default=8, metavar="D", help="tokens verified a round")
    what = "what the times are taken in; ids are compared in float32 first"
    parser.add_argument("--dtype", choices=(BFLOAT16, FLOAT32), default=BFLOAT16, help=what)
    parser.add_argument("--check", action="store_true", help="compare ids only, on the CPU")
    options = parser.parse_args(words)
    options.batch = options.batch or list(CHECK_BATCHES if options.check else BATCHES)
    options.new = (CHECK_NEW if options.check else NEW) if options.new is None else options.new
    for name, value, least, why in (
        ("runs", options.runs, LEAST_RUNS, "since medians are compared"),
        ("batch", min(options.batch), 1, "requests are decoded"),
        ("new", options.new, 2, "since the first token is prefill's"),
        ("num_draft_tokens", options.num_draft_tokens, 2, "the newest token and a draft"),
    ):
        if value < least:
            raise Refused(f"--{name}={value}: it must be {least} or more, {why}")
    return options


def _refuse(message: str):
    raise Refused(message)


def make_job(options: argparse.Namespace) -> Job:
    """What both sides are to do.

    Raises:
      Refused: a model that the loop does not run, or a context that is too short.
    """
    folder, shape = decode_inputs.find(options.model), decode_inputs.read_shape(options.model)
    prompts = decode_inputs.read_prompts(options.model, max(options.batch))
    longest = max(map(len, prompts))
    if longest + options.new > shape.max_position_embeddings:
        raise Refused(
            f"--new={options.new}: with the longest prompt's {longest} tokens it is more than the model's context of "
            f"{shape.max_position_embeddings}"
        )
    return Job(
        model=options.model if options.model in embedded_names() else str(folder),
        folder=str(folder),
        shape=dataclasses.asdict(shape),
        prompts=prompts,
        batches=list(dict.fromkeys(options.batch)),
        new=options.new,
        drafters=list(dict.fromkeys(options.drafters or decode_inputs.drafters_for(options.model))),
        rows=options.num_draft_tokens,
        dtype=options.dtype,
        runs=options.runs,
        check=options.check,
    )


def run_side(name: str, folder: Path, job: Job) -> Side:
    """Runs one side in a process of its own, since each library wants the GPU for itself."""
    print(f"{name}: batch {', '.join(map(str, job.batches))}, {job.new} tokens ...", file=sys.stderr, flush=True)
    words = [sys.executable, str(HERE / SIDES[name]), str(folder)]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"} if job.check else None
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=env)
    if (folder / REFUSAL).is_file():
        raise Refused((folder / REFUSAL).read_text())
    if done.returncode:
        print(done.stdout + done.stderr, file=sys.stderr, end="")
        raise Refused(f"{SIDES[name]} ended with status {done.returncode}, for what it says above")
    return Side.load(folder, name)


def report(job: Job, theirs: Side, ours: Side, output: JsonFile) -> int:
    """Prints the table, writes the JSON; returns the exit status."""
    rows = decode_verdict.judge(job, theirs, ours)
    failures = [
        f"batch {row.batch}, {row.ours.name}: float32 ids differ, {row.difference}" for row in rows if row.difference
    ]
    versions = {**theirs.environment["versions"], **ours.environment["versions"]}
    devices = f"theirs on {theirs.environment['device']}, ours on {ours.environment['device']}"
    text = ["  ".join(f"{name} {version}" for name, version in versions.items() if version)]
    text += [f"{devices}, driver {ours.environment['driver'] or 'unknown'}"]
    text += [f"{job.model}, {job.new} new tokens a request, prompts of {_lengths(job)} tokens", ""]
    text += align(decode_verdict.table(rows))
    if any(row.timed for row in rows):
        text += ["", "tokens/s of decoding, prefill apart; the last column with it", *decode_verdict.notes(rows)]
    print("\n".join(text), file=sys.stderr if output.to_stdout else sys.stdout)
    settings = {name: getattr(job, name) for name in ("model", "batches", "new", "drafters", "rows", "dtype", "runs")}
    results = {
        "rows": decode_verdict.results(rows),
        "failures": failures,
        "settings": {**settings, "check": job.check, "prompt_lengths": [len(prompt) for prompt in job.prompts]},
        "environment": {"theirs": theirs.environment, "ours": ours.environment},
    }
    output.write(results)
    for line in failures:
        print(f"error: {line}", file=sys.stderr)
    return 1 if failures else 0


def _lengths(job: Job) -> str:
    lengths = [len(prompt) for prompt in job.prompts]
    return f"{min(lengths)} to {max(lengths)}"


if __name__ == "__main__":
    sys.exit(main())
