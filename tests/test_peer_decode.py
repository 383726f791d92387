"""tests/peers/decode.py: what the comparison with a PyTorch decode loop refuses, compares and says."""

import dataclasses
import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_models

from jaxspec import models
from jaxspec.cli.jsonfile import JsonFile

PEERS = Path(__file__).parent / "peers"
sys.path.append(str(PEERS))
NAMES = "decode", "decode_inputs", "decode_job", "decode_ours", "decode_verdict", "peer_job"
decode, inputs, decode_job, decode_ours, verdict, peer_job = map(importlib.import_module, NAMES)
Arm, Job, Side = decode_job.Arm, decode_job.Job, decode_job.Side


# What cannot be done


def refusal(words, capsys):
    """The one line of error that the command ends with, at status 2; before it, it may say what it does."""
    assert decode.main(words) == 2
    out, err = capsys.readouterr()
    *before, last = err.splitlines()
    assert out == "" and last.startswith("error: ") and all(line.endswith(" ...") for line in before)
    return last


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--speed"], "--speed"),
        (["--runs", "4"], "--runs=4: it must be 5 or more"),
        (["--runs", "ten"], "'ten'"),
        (["--batch", "1", "0"], "--batch=0: it must be 1 or more"),
        (["--new", "1"], "--new=1: it must be 2 or more, since the first token is prefill's"),
        (["--new", "0"], "--new=0: it must be 2 or more"),
        (["--num_draft_tokens", "1"], "--num_draft_tokens=1: it must be 2 or more"),
        (["--new", "4000"], "more than the model's context of 4096"),
        (["--dtype", "float16"], "'float16'"),
        (["--drafters", "none"], "'none'"),
        (["--json", "/nowhere/peer.json"], "--json=/nowhere/peer.json"),
        (["--model", "/nowhere"], "--model=/nowhere is neither an embedded model ("),
        (["--model", "hybrid"], "--model=hybrid: the loop that ours is compared with runs Qwen3 dense only"),
    ],
)
def test_arguments_that_cannot_be(words, said, capsys):
    assert said in refusal(words, capsys)


def test_no_torch(monkeypatch, capsys):
    monkeypatch.setattr(decode.importlib.util, "find_spec", lambda name: None)
    assert "torch is not installed" in refusal(["--check"], capsys)


def test_no_gpu(tmp_path, monkeypatch, capsys):
    (tmp_path / "torch.py").write_text("class cuda:\n    is_available = staticmethod(lambda: False)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    assert "torch sees no CUDA device: run on one, or give --check" in refusal([], capsys)


def test_a_side_that_breaks(monkeypatch, capsys):
    monkeypatch.setattr(decode.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setitem(decode.SIDES, "theirs", "no_such_script.py")
    assert decode.main(["--check"]) == 2
    err = capsys.readouterr().err
    assert "error: no_such_script.py ended with status 2" in err and "No such file" in err


def test_importing_the_script_imports_no_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    program = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(PEERS)!r}]; import decode, decode_ours"
    root = str(PEERS.parents[1])
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# What is decoded


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The tiny target as a folder without a tokenizer; its weights come back to the bit."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    return models.save(path, tiny_models.CONFIG, tiny_models.target_params(), dtype="float32")


def job_of(folder, *words):
    return decode.make_job(decode.parse(["--model", str(folder), *words]))


def test_a_job_by_default():
    job = job_of("target")
    assert (job.batches, job.new, job.drafters, job.rows) == ([1, 16], 256, ["ngram", "draft_lm", "dspark"], 8)
    assert job.dtypes == ["float32", "bfloat16"] and [*map(job.timed, job.dtypes)] == [False, True]
    assert job.shape["windows"][:4] == (256, 256, 256, None)
    texts = {tuple(prompt) for prompt in job.prompts}
    assert len(texts) == 16, "two requests alike would share what they say"
    assert [prompt[:-8] for prompt in job.prompts[:8]] == job.prompts[8:]


def test_a_job_of_a_check():
    job = job_of("target", "--check")
    assert (job.batches, job.new, job.dtypes, job.timed("float32")) == ([1, 3], 16, ["float32"], False)


def test_times_in_float32():
    job = job_of("target", "--dtype", "float32")
    assert job.dtypes == ["float32"] and job.timed("float32")


def test_a_folder_without_a_tokenizer(folder):
    job = job_of(folder, "--batch", "9", "--new", "5")
    assert job.drafters == ["ngram"] and job.model == str(folder)
    assert len({tuple(prompt) for prompt in job.prompts}) == 9
    assert all(0 <= token < tiny_models.VOCAB for prompt in job.prompts for token in prompt)
    assert max(map(len, job.prompts)) > tiny_models.WINDOW, "no prompt is longer than the window"


def test_a_job_travels(folder, tmp_path):
    job = job_of(folder, "--batch", "2", "--new", "5")
    job.save(tmp_path)
    assert dataclasses.replace(Job.load(tmp_path), shape=job.shape) == job
    arm = Arm("plain", "float32", 1, [[1, 2]], [0.5], [0.25], {"accept_length": 1.5})
    Side({"device": "A GPU"}, [arm]).save(tmp_path, "ours")
    assert Side.load(tmp_path, "ours") == Side({"device": "A GPU"}, [arm])


def test_our_side(folder, greedy):
    """Both arms say what the model says without a cache; samples are taken only where times are wanted."""
    job = dataclasses.replace(job_of(folder, "--batch", "2", "--new", "9", "--dtype", "float32"), runs=3)
    plain, ngram = decode_ours.run(job)
    assert [arm.name for arm in (plain, ngram)] == ["plain", "ngram"]
    assert plain.ids == ngram.ids == [np.asarray(greedy(tuple(prompt), 9)).tolist() for prompt in job.prompts]
    for arm in (plain, ngram):
        assert len(arm.whole) == len(arm.prefill) == 3 and min(arm.prefill) > 0
        assert arm.about["finish_reasons"] == ["length"]
    assert (plain.about["num_draft_tokens"], ngram.about["num_draft_tokens"]) == (1, 8)
    assert all(not arm.whole for arm in decode_ours.run(dataclasses.replace(job, check=True, drafters=[])))


def test_our_side_needs_a_gpu_for_times(folder, monkeypatch):
    monkeypatch.setattr(decode_ours.jax, "default_backend", lambda: "cpu")
    job = job_of(folder, "--new", "5")
    with pytest.raises(peer_job.Refused, match="jax sees no GPU"):
        decode_ours.measure(job)


def test_a_drafter_that_the_model_has_not(folder):
    job = job_of(folder, "--check", "--drafters", "dspark")
    with pytest.raises(peer_job.Refused, match=r"jax cannot run our side: .*no draft of this kind ships"):
        decode_ours.measure(job)


# What is told


IDS = {1: [[1, 2, 3, 4, 5]], 2: [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]}


@pytest.fixture
def sides(folder):
    """(job, theirs, ours), made up. Decoding alone takes theirs 1 s, ours 0.8 s plain and 0.5 s with drafts."""
    job = dataclasses.replace(job_of(folder, "--batch", "1", "2", "--new", "5"), runs=5)
    about = {"attention": "math"}
    theirs, ours = [], []
    for dtype in job.dtypes:
        for batch, ids in IDS.items():
            timed = job.timed(dtype)

            def arm(name, decoding, about, timed=timed, dtype=dtype, batch=batch, ids=ids):
                prefill = [0.25] * 5 if timed else []
                return Arm(name, dtype, batch, ids, [decoding + x for x in prefill], prefill, about)

            theirs.append(arm("graph", 1.0, about))
            ours.append(arm("plain", 0.8, {"accept_length": 1.25, "distinct_4grams": 0.5}))
            ours.append(arm("ngram", 0.5, {"accept_length": 2.5}))
    versions = {"device": "A GPU", "driver": "580.1"}
    return (
        job,
        Side({**versions, "versions": {"torch": "1", "cuda": None}}, theirs),
        Side({**versions, "versions": {"jax": "3"}}, ours),
    )


def changed(side, name, dtype, batch, **fields):
    """The side with other fields in one arm."""
    old = side.arm(name, dtype, batch)
    return Side(side.environment, [dataclasses.replace(arm, **fields) if arm is old else arm for arm in side.arms])


def told(sides, tmp_path, capsys):
    """Exit status, the table as dicts by its first column, messages, the lines, and the JSON."""
    path = tmp_path / "peer.json"
    status = decode.report(*sides, JsonFile(str(path)))
    out, err = capsys.readouterr()
    rows = verdict.table(verdict.judge(*sides))
    lines = {row[0]: dict(zip(rows[0][1:], row[1:], strict=len(rows[0]) == len(row))) for row in rows[1:]}
    assert all(any(line.startswith(name) for line in out.splitlines()) for name in lines)
    return status, lines, err, out, json.loads(path.read_text())


def test_ours_over_theirs(sides, tmp_path, capsys):
    status, lines, err, out, found = told(sides, tmp_path, capsys)
    assert status == 0 and err == ""
    # 2 requests of 4 tokens behind the first: 8 in 1 s, 0.8 s and 0.5 s; with prefill 10 in 1.25 s, 1.05 s, 0.75 s.
    plain, ngram = lines["2, plain"], lines["2, ngram"]
    assert plain == {
        "float32 ids": "equal",
        "bfloat16 texts differ": "0 of 2",
        "accept length": "-",
        "theirs, tokens/s": "8",
        "ours, tokens/s": "10",
        "spread": "0%",
        "ratio": "1.25",
        "goal": "1.0",
        "": "met",
        "with prefill": "1.19",
    }
    assert (ngram["accept length"], ngram["ratio"], ngram["goal"], ngram[""]) == ("2.50", "2.00", "1.5", "met")
    assert [*lines] == ["1, plain", "1, ngram", "2, plain", "2, ngram"] and lines["1, plain"]["ours, tokens/s"] == "5"
    assert "torch 1  jax 3" in out and "theirs on A GPU, ours on A GPU, driver 580.1" in out
    assert "batch 2: theirs attends by math; 50% of our text's runs of four tokens are distinct" in out
    row = found["rows"][3]
    assert (row["batch"], row["arm"], row["met"], row["texts_differ"]) == (2, "ngram", True, 0)
    assert row["tokens_per_second"] == pytest.approx({"theirs": 8, "ours": 16})
    assert row["seconds"]["theirs"] == {"whole": [1.25] * 5, "prefill": [0.25] * 5}
    assert found["settings"]["runs"] == 5 and found["environment"]["ours"]["driver"] == "580.1"


def test_no_ratio_where_float32_ids_differ(sides, tmp_path, capsys):
    job, theirs, ours = sides
    ours = changed(ours, "ngram", "float32", 2, ids=[IDS[2][0], [6, 7, 0, 9, 10]])
    status, lines, err, _, found = told((job, theirs, ours), tmp_path, capsys)
    line = "batch 2, ngram: float32 ids differ, 1 of 2 requests, the first at request 1, token 2: 8 != 0"
    assert status == 1 and err == f"error: {line}\n" and found["failures"] == [line]
    assert lines["2, ngram"]["float32 ids"] == "differ" and lines["2, ngram"]["ratio"] == "-"
    assert found["rows"][3]["ratio"] is None and found["rows"][3]["met"] is None
    assert lines["2, plain"]["ratio"] == "1.25" and lines["1, ngram"]["ratio"] == "2.00"


def test_other_texts_in_bfloat16_are_only_counted(sides, tmp_path, capsys):
    job, theirs, ours = sides
    ours = changed(ours, "plain", "bfloat16", 2, ids=[IDS[2][0], [6, 7, 0, 0, 0]])
    status, lines, err, _, found = told((job, theirs, ours), tmp_path, capsys)
    assert status == 0 and err == "" and lines["2, plain"]["bfloat16 texts differ"] == "1 of 2"
    assert lines["2, plain"]["ratio"] == "1.25" and found["rows"][2]["texts_differ"] == 1


@pytest.mark.parametrize(("seconds", "cell"), [(1.0, "met"), (1.01, "missed")])
def test_a_missed_goal_is_marked(sides, seconds, cell, tmp_path, capsys):
    job, theirs, ours = sides
    ours = changed(ours, "plain", "bfloat16", 1, whole=[seconds + 0.25] * 5)
    status, lines, _, _, _ = told((job, theirs, ours), tmp_path, capsys)
    assert status == 0 and lines["1, plain"][""] == cell


def test_the_spread_is_of_the_side_with_more(sides, tmp_path, capsys):
    job, theirs, ours = sides
    whole = [1.25, 1.25, 1.25, 1.25, 2.25]  # 4 tokens in 1 s, at last in 2 s
    theirs = changed(theirs, "graph", "bfloat16", 1, whole=whole)
    assert told((job, theirs, ours), tmp_path, capsys)[1]["1, plain"]["spread"] == "50%"


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        ([[1, 2], [3, 4]], None),
        ([[1, 2], [9, 4]], "1 of 2 requests, the first at request 1, token 0: 3 != 9"),
        ([[1], [9, 4]], "2 of 2 requests, the first at request 0, token 1: lengths 2 != 1"),
    ],
)
def test_where_ids_differ(ours, said):
    assert verdict.first_difference([[1, 2], [3, 4]], ours) == said


def test_json_to_standard_output(sides, capsys):
    assert decode.report(*sides, JsonFile("-")) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["failures"] == [] and "ratio" in err


# Against torch


@pytest.mark.parity
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize("case", ["sliding and full, untied", "all full, tied"])
def test_ids_are_equal(case, folder, tmp_path, capsys):
    """The whole command on the CPU. The requests cross the window's edge, and prompts of several lengths are padded."""
    if case == "all full, tied":
        config = dataclasses.replace(tiny_models.CONFIG, windows=(None, None), tie_word_embeddings=True)
        params = models.random_params(config, seed=3)
        folder = models.save(tmp_path / "tied", config, params, dtype="float32")
    path = tmp_path / "peer.json"
    batches = [1, 4] if case == "all full, tied" else [4]
    words = ["--model", str(folder), "--check", "--batch", *map(str, batches), "--new", "24", "--json", str(path)]
    status = decode.main(words)
    out, err = capsys.readouterr()
    assert status == 0, err
    found = json.loads(path.read_text())
    assert [(row["batch"], row["arm"], row["difference"]) for row in found["rows"]] == [
        (batch, arm, None) for batch in batches for arm in ("plain", "ngram")
    ]
    assert "ratio" not in out and all("ratio" not in row for row in found["rows"])


@pytest.mark.parity
def test_a_wrong_rival_is_found(folder, capsys, monkeypatch):
    """The rival without its sliding windows says something else."""
    pytest.importorskip("torch")
    theirs = importlib.import_module("decode_theirs")
    job = job_of(folder, "--check", "--batch", "2", "--new", "24")
    right = theirs.measure(job)
    wrong = theirs.measure(dataclasses.replace(job, shape={**job.shape, "windows": [None, None]}))
    said = verdict.first_difference(*(side.arm("graph", "float32", 2).ids for side in (right, wrong)))
    assert said is not None and said.startswith(("1 of 2", "2 of 2"))


@pytest.mark.parity
@pytest.mark.parametrize("attention", ["torch's choice", "math"])
def test_bfloat16_runs(attention, folder):
    """What a GPU times, without the graph: caches are bfloat16, and most first tokens are those of float32."""
    torch = pytest.importorskip("torch")
    theirs, model = map(importlib.import_module, ("decode_theirs", "decode_model"))
    job = job_of(folder, "--batch", "3", "--new", "6")
    tensors = model.read_tensors(folder)
    with torch.no_grad():
        loops = [theirs.Loop(job, tensors, dtype, 3, "cpu", attention) for dtype in ("float32", "bfloat16")]
        for loop in loops:
            whole, prefill = loop.generate()
            assert whole > prefill > 0
    float32, bfloat16 = (np.array(loop.ids()) for loop in loops)
    assert loops[1].model.caches[0][0].dtype == torch.bfloat16
    assert (float32[:, 0] == bfloat16[:, 0]).mean() > 0.5
    again = [loop.generate() and loop.ids() for loop in loops]
    assert again == [float32.tolist(), bfloat16.tolist()], "a second generation begins anew"


@pytest.mark.parity
def test_the_fastest_attention_counts(folder, monkeypatch):
    """Made up times; one kernel is not to be had, and the arm tells of all."""
    torch = pytest.importorskip("torch")
    theirs = importlib.import_module("decode_theirs")
    times = {"torch's choice": 3.0, "efficient": 2.0, "math": 4.0}

    class Loop:
        def __init__(self, job, tensors, dtype, batch, device, attention):
            if attention not in times:
                raise RuntimeError("No available\n kernel")
            self.name = attention

        def generate(self):
            return 1 + times[self.name], 1.0

        def ids(self):
            return [[1, 2]]

    monkeypatch.setattr(theirs, "Loop", Loop)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    job = job_of(folder, "--batch", "1", "--new", "2")
    arm = theirs.run(job, {}, "bfloat16", 1, "cuda")
    assert arm.about == {"attention": "efficient", "tried": {**times, "cudnn": "No available kernel"}}
    assert arm.whole == [3.0] * job.runs and arm.prefill == [1.0] * job.runs
    arm = theirs.run(job, {}, "float32", 1, "cuda")
    assert arm.about["attention"] == "math" and arm.whole == []
