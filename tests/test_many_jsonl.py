"""The file of `generate_many`: what is in it, and that a run that was stopped in any way can be continued."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from many_cases import LIMITS, PROMPTS, alone, make_config
from tiny_models import FAST_COMPILE, TARGET, drafter_and_params

import jaxspec
from jaxspec.generation.jsonl import to_result

IDS = [f"q{i}" for i in range(len(PROMPTS))]


@pytest.fixture(scope="module", autouse=True)
def fast_compile():
    """Programs of these tests run a few milliseconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxspec.steps.step.compiler_options", lambda: FAST_COMPILE)
        yield


def start(out, **changed):
    """A run over the tiny target's prompts into a file."""
    drafter, params = drafter_and_params("ngram")
    arguments = {"prompts": PROMPTS, "max_new_tokens": LIMITS, "ids": IDS, "config": make_config(2)}
    arguments |= {"drafter": drafter, "rounds_per_dispatch": 2, "out": out} | changed
    return jaxspec.generate_many(TARGET, params, **arguments)


def read(path):
    """The records of a file, all of whose lines must be whole."""
    data = path.read_bytes()
    assert not data or data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


def check_complete(path, ids=IDS):
    """Every prompt is there once, with what it gets alone."""
    records = {record["question_id"]: record for record in read(path)}
    assert len(read(path)) == len(ids) and set(records) == set(ids)
    for name in ids:
        assert to_result(records[name]) == alone("ngram")[IDS.index(name)]


def test_records(tmp_path):
    """The fields of Spec-Bench, and the figures that its scripts make of them."""
    categories = ["writing" if i % 2 else "math" for i in range(len(PROMPTS))]
    how = {"categories": categories, "model_id": "tiny", "decode": lambda ids: " ".join(map(str, ids))}
    run = start(tmp_path / "out.jsonl", **how)
    done = {each.question_id: each for each in run}
    check_complete(tmp_path / "out.jsonl")
    for record in read(tmp_path / "out.jsonl"):
        result, index = done[record["question_id"]].result, IDS.index(record["question_id"])
        assert record["category"] == categories[index] and record["model_id"] == "tiny"
        assert record["tstamp"] > 0 and record["answer_id"]
        (choice,) = record["choices"]
        assert choice["index"] == 0 and choice["turns"] == [" ".join(map(str, result.token_ids))]
        assert choice["new_tokens"] == [len(result.token_ids)]
        assert choice["decoding_steps"] == [result.verify_count]
        assert choice["wall_time"] == [done[record["question_id"]].wall_time]
        assert choice["accept_lengths"] == result.accept_lengths
    choices = [record["choices"][0] for record in read(tmp_path / "out.jsonl")]
    emitted = [n for choice in choices for n in choice["accept_lengths"]]
    first = sum(sum(choice["new_tokens"]) > 0 for choice in choices)  # prefill gives the first token
    assert run.progress.accept_length == pytest.approx(np.mean(emitted) + first / len(emitted))


def test_a_complete_file_is_only_read(tmp_path):
    """Names may be numbers, too; nothing runs, and the file stays as it is."""
    out, ids = tmp_path / "out.jsonl", list(range(len(PROMPTS)))
    results = start(out, ids=ids).results()
    before = out.read_bytes()
    run = start(out, ids=ids)
    again = list(run)
    assert all(done.resumed for done in again) and run.progress.dispatches == 0
    assert run.progress.finished == run.progress.resumed == len(PROMPTS)
    assert [done.result for done in sorted(again, key=lambda done: done.index)] == results == alone("ngram")
    assert out.read_bytes() == before


def stop_after(count, error=KeyboardInterrupt):
    def progress(now):
        if now.finished >= count:
            raise error

    return progress


@pytest.mark.parametrize("count", [0, 1, 4, 9])
def test_interrupted(tmp_path, count):
    """Ctrl-C leaves whole lines, and the run goes on from there, in other slots and another order if need be."""
    out = tmp_path / "out.jsonl"
    with pytest.raises(KeyboardInterrupt):
        list(start(out, progress=stop_after(count)))
    kept = read(out)
    assert count <= len(kept) < len(PROMPTS) + (count == 9)
    for record in kept:
        assert to_result(record) == alone("ngram")[IDS.index(record["question_id"])]
    order = np.random.default_rng(0).permutation(len(PROMPTS))
    moved = {name: [values[i] for i in order] for name, values in (("prompts", PROMPTS), ("ids", IDS))}
    run = start(out, **moved, max_new_tokens=[LIMITS[i] for i in order], config=make_config(3, num_pages=30))
    assert [done.question_id for done in run][: len(kept)] == [record["question_id"] for record in kept]
    assert run.progress.resumed == len(kept) and run.progress.finished == len(PROMPTS)
    check_complete(out)


def test_closed_early(tmp_path):
    """Whoever has seen enough closes the run."""
    out = tmp_path / "out.jsonl"
    with start(out) as run:
        first = next(run)
    with pytest.raises(StopIteration):
        next(run)
    assert first.question_id in {record["question_id"] for record in read(out)}
    start(out).results()
    check_complete(out)


def test_more_prompts_later(tmp_path):
    """A file of some of the prompts is continued with all of them."""
    out = tmp_path / "out.jsonl"
    start(out, prompts=PROMPTS[:4], max_new_tokens=LIMITS[:4], ids=IDS[:4]).results()
    run = start(out)
    run.results()
    assert run.progress.resumed == 4
    check_complete(out)


SCRIPT = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import jaxspec.steps.step
from tiny_models import FAST_COMPILE
jaxspec.steps.step.compiler_options = lambda: FAST_COMPILE
from test_many_jsonl import start

# A process that a shell has put into the background begins with interrupts ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

def progress(now):
    if now.finished >= 3:
        os.kill(os.getpid(), signal.{signal})

start(sys.argv[2], progress=progress).results()
"""


@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT"])
def test_killed(tmp_path, name):
    """A process that dies in the middle, and one that is interrupted from outside: the next one does the rest."""
    out, tests = tmp_path / "out.jsonl", Path(__file__).parent
    root = str(Path(jaxspec.__file__).parents[1])
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": root}
    command = [sys.executable, "-c", SCRIPT.replace("{signal}", name), str(tests), str(out)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == -getattr(signal, name), ended.stderr
    kept = read(out)
    assert 3 <= len(kept) < len(PROMPTS)
    run = start(out)
    run.results()
    assert run.progress.resumed == len(kept)
    check_complete(out)


def begin(path):
    """A file with some records."""
    with pytest.raises(KeyboardInterrupt):
        list(start(path, progress=stop_after(4)))
    return path.read_bytes()


@pytest.mark.parametrize("left", [1, 7, 40, -1])
def test_torn_last_line(tmp_path, left):
    """A line that was cut off while it was written is dropped, and its prompt done again."""
    out = tmp_path / "out.jsonl"
    *lines, last = begin(out).splitlines(keepends=True)
    out.write_bytes(b"".join(lines) + last[:left])
    run = start(out)
    run.results()
    assert run.progress.resumed == len(lines)
    check_complete(out)


def spoiled(data):
    """Contents that are not to be continued, and what is said about them."""
    lines = data.splitlines(keepends=True)
    return {
        "twice": (data + lines[0], "line 5: question_id 'q.' is there twice"),
        "unknown": (data + lines[0].replace(b': "q', b': "x'), "line 5: question_id 'x.' is not among the prompts"),
        "garbage": (lines[0] + b"{}\n", "line 2: no record"),
        "no json": (b"question\n", "line 1: no record"),
        "a text": (b"some text of mine", "its last line is no record"),
    }


def test_other_files_are_refused(tmp_path):
    """They stay as they were, byte for byte."""
    out = tmp_path / "out.jsonl"
    data = b"".join(begin(out).splitlines(keepends=True)[:4])
    for name, (content, message) in spoiled(data).items():
        out.write_bytes(content)
        with pytest.raises(jaxspec.InputError, match=message):
            start(out)
        assert out.read_bytes() == content, name
    with pytest.raises(jaxspec.InputError, match="cannot be written"):
        start(tmp_path)
    with pytest.raises(jaxspec.InputError, match="cannot be written"):
        start(tmp_path / "none" / "out.jsonl")


CHANGES = {
    "limits": {"max_new_tokens": [min(limit + 1, 24) for limit in LIMITS]},
    "prompts": {"prompts": [(*ids[:-1], (ids[-1] + 1) % 61) for ids in PROMPTS]},
    "stop ids": {"stop_ids": [3]},
    "drafter": {"drafter": None},
    "D": {"config": make_config(2, D=3)},
    "context": {"config": make_config(2, context_len=64)},
    "log-probabilities": {"config": make_config(2, logprobs=True)},
    "model": {"model_id": "another"},
    "temperature": {"config": make_config(2, sampling="match"), "temperature": 0.5},
}
SAME = {
    "slots and pages": {"config": make_config(3, page_size=16, num_pages=30, prefill_chunk=8)},
    "memory": {"config": make_config(2, memory="unified")},
    "a verifier nobody needs": {"config": make_config(2, sampling="match")},
    "dispatches": {"rounds_per_dispatch": 5, "chunks_per_dispatch": 1},
    "a longer context than anybody needs": {"config": make_config(2, context_len=150)},
}


def test_other_settings_are_refused(tmp_path):
    """Those that a token or an accept length hangs on, and no others."""
    out = tmp_path / "out.jsonl"
    data = begin(out)
    for name, change in CHANGES.items():
        with pytest.raises(jaxspec.InputError, match="other settings"):
            start(out, **change)
        assert out.read_bytes() == data, name
    for change in SAME.values():
        start(out, **change).close()
    sampled = {"config": make_config(2, sampling="match"), "temperature": 0.5}
    start(tmp_path / "sampled", **sampled, seed=3).results()
    start(tmp_path / "sampled", **sampled, seed=list(range(3, 3 + len(PROMPTS)))).close()
    with pytest.raises(jaxspec.InputError, match="other settings"):
        start(tmp_path / "sampled", **sampled, seed=4)
