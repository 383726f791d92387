"""The command line: what a user sees, what lands in the JSON file, and what is refused how."""

import io
import json
import signal
import subprocess
import sys

import cli_cases
import pytest
from cli_cases import CONTEXT, SHAPES, fake_runs, run, write_models

from jaxspec import InputError, cli, models
from jaxspec.cli import environment, prompts
from jaxspec.cli import generate as command


@pytest.fixture(scope="module", autouse=True)
def quick_compile():
    patch = cli_cases.quick_compile()
    yield
    patch.undo()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with two random models: target and draft."""
    root = tmp_path_factory.mktemp("models")
    write_models(root)
    return root


@pytest.fixture(scope="module")
def prompt_file(folder):
    path = folder / "prompts.jsonl"
    lines = [
        {"id": "text", "prompt": "import os\nimport sys\n\n    ", "source": "ignored"},
        {"token_ids": [40, 50, 60]},
        {"id": 7, "prompt": "def main():"},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    return path


@pytest.fixture(scope="module")
def run_of_three(folder, prompt_file, tmp_path_factory):
    """Three prompts in two batches, with a draft model, checked against plain decoding."""
    path = tmp_path_factory.mktemp("out") / "out.json"
    words = ["generate", f"--model={folder / 'target'}", f"--draft_model={folder / 'draft'}", *SHAPES]
    words += [f"--prompt_file={prompt_file}", f"--json={path}"]
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        status = cli.main(words)
    return status, out.getvalue(), err.getvalue(), json.loads(path.read_text()), path


def test_generate_succeeds_and_says_so(run_of_three):
    status, out, err, *_ = run_of_three
    assert status == 0
    assert "ids equal plain    yes, all 3" in out
    assert "compiling" in err
    assert "error" not in err


def test_completions_come_in_the_order_of_the_prompts(run_of_three):
    out = run_of_three[1]
    titles = [line for line in out.splitlines() if line.startswith("== ")]
    assert [title.split(":")[0] for title in titles] == ["== text", "== line-2", "== 7"]
    assert "| import sys\n-> " in out


def test_json_names_every_request_and_adds_up(run_of_three):
    result = run_of_three[3]
    requests, aggregate = result["requests"], result["aggregate"]
    assert [request["id"] for request in requests] == ["text", "line-2", "7"]
    for request in requests:
        assert request["exact_match"] is True
        assert request["verify_count"] == len(request["accept_lengths"]) == len(request["accepted_drafts"])
        assert sum(request["accept_lengths"]) + 1 == len(request["token_ids"]) <= 9
        assert request["finish_reason"] in ("length", "stop")
        assert request["accept_length"] == len(request["token_ids"]) / request["verify_count"]
    tokens = sum(len(request["token_ids"]) for request in requests)
    rounds = sum(request["verify_count"] for request in requests)
    assert aggregate["exact_match"] is True
    assert aggregate["first_mismatch"] is None
    assert aggregate["accept_length"] == tokens / rounds
    assert len(aggregate["acceptance_per_position"]) == 2
    assert len(aggregate["accept_length_histogram"]) == 3
    assert sum(aggregate["accept_length_histogram"]) == rounds
    assert aggregate["tokens_per_second"] > 0
    assert aggregate["plain_tokens_per_second"] > 0
    assert 0 < aggregate["distinct_4gram_ratio"] <= 1
    assert result["environment"]["flags"]["num_draft_tokens"] == 3
    assert result["environment"]["versions"]["jax"]


def test_text_in_json_is_the_decoded_ids(run_of_three, folder):
    target = models.load(folder / "target")
    for request in run_of_three[3]["requests"]:
        assert request["text"] == target.decode(request["token_ids"])
    ids_only = run_of_three[3]["requests"][1]
    assert ids_only["prompt"] == target.decode([40, 50, 60])
    assert ids_only["prompt_tokens"] == 3


def test_nothing_but_the_json_file_is_left(run_of_three):
    path = run_of_three[4]
    assert list(path.parent.iterdir()) == [path]


def test_json_on_standard_output_is_alone_there(capsys, monkeypatch, folder):
    fake_runs(monkeypatch, [5, 6, 7, 8], [5, 6, 7, 8])
    status, out, err = run(capsys, "generate", f"--model={folder / 'target'}", "--prompt=import", "--json=-")
    assert status == 0
    assert json.loads(out)["requests"][0]["token_ids"] == [5, 6, 7, 8]
    assert "ids equal plain    yes" in err


def test_a_model_of_ones_own_is_drafted_for_by_look_up(capsys, monkeypatch, folder):
    fake_runs(monkeypatch, [5, 6], [5, 6])
    status, out, err = run(capsys, "generate", f"--model={folder / 'target'}", "--prompt=import", "--json=-")
    assert status == 0
    assert "n-gram" in err
    assert json.loads(out)["environment"]["drafter"] == "NgramDrafter"


def test_device_loop_prints_the_same_completions(capsys, run_of_three, folder, prompt_file):
    words = ["generate", f"--model={folder / 'target'}", "--drafter=none", *SHAPES, f"--prompt_file={prompt_file}"]
    status, out, _ = run(capsys, *words, "--loop=device", "--nocheck_exact", "--json=-")
    assert status == 0
    result = json.loads(out)
    assert [r["token_ids"] for r in result["requests"]] == [r["token_ids"] for r in run_of_three[3]["requests"]]
    assert "exact_match" not in result["aggregate"]
    assert "exact_match" not in result["requests"][0]


def test_a_difference_is_named_and_is_exit_status_1(capsys, monkeypatch, folder, tmp_path):
    fake_runs(monkeypatch, [5, 6, 7, 8, 9], [5, 6, 9, 8, 9])
    path = tmp_path / "out.json"
    status, out, err = run(capsys, "generate", f"--model={folder / 'target'}", "--prompt=import", f"--json={path}")
    assert status == 1
    assert "request prompt-0 differs from plain decoding at completion token 2: speculative 7, plain 9" in err
    assert "NO, 1 of 1 differ" in out
    result = json.loads(path.read_text())
    assert result["aggregate"]["exact_match"] is False
    assert result["requests"][0]["exact_match"] is False
    assert result["aggregate"]["first_mismatch"] == {"id": "prompt-0", "position": 2, "speculative": 7, "plain": 9}


def test_a_completion_that_ends_early_differs_at_its_end(capsys, monkeypatch, folder):
    fake_runs(monkeypatch, [5, 6], [5, 6, 7])
    status, _, err = run(capsys, "generate", f"--model={folder / 'target'}", "--prompt=import")
    assert status == 1
    assert "at completion token 2: speculative the end, plain 7" in err


def test_running_out_of_pages_is_exit_status_1(capsys, monkeypatch, folder):
    fake_runs(monkeypatch, [5, 6], reason="out_of_pages")
    status, _, err = run(capsys, "generate", f"--model={folder / 'target'}", "--prompt=import", "--nocheck_exact")
    assert status == 1
    assert "raise --num_pages" in err


def test_ctrl_c_leaves_no_file(capsys, monkeypatch, folder, tmp_path):
    def interrupted(*arguments, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_generation", interrupted)
    words = ["generate", f"--model={folder / 'target'}", "--prompt=import", f"--json={tmp_path / 'out.json'}"]
    status, _, err = run(capsys, *words)
    assert status == 130
    assert err.splitlines()[-1] == "interrupted"
    assert list(tmp_path.iterdir()) == []


def test_a_failed_run_keeps_the_file_of_the_last_one(capsys, monkeypatch, folder, tmp_path):
    path = tmp_path / "out.json"
    path.write_text("old")

    def broken(*arguments, **settings):
        raise InputError("planted")

    monkeypatch.setattr(command, "run_generation", broken)
    status, _, err = run(capsys, "generate", f"--model={folder / 'target'}", "--prompt=import", f"--json={path}")
    assert (status, err.splitlines()[-1]) == (2, "error: planted")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--prompt="], ["--prompt 0", "empty"]),
        (["--prompt= \n\t "], ["--prompt 0", "empty"]),
        (["--prompt=" + "0 1 " * CONTEXT], ["--prompt 0", f"context of {CONTEXT}", f"{CONTEXT - 1}"]),
        (["--prompt=a", "--num_draft_tokens=0"], ["num_draft_tokens=0", "positive"]),
        (["--prompt=a", "--num_draft_tokens=500"], ["num_draft_tokens=500", f"{CONTEXT}"]),
        (["--prompt=a", "--num_draft_tokens=few"], ["num_draft_tokens=few"]),
        (["--prompt=a", "--max_new_tokens=0"], ["max_new_tokens=0"]),
        (["--prompt=a", "--batch_size=0"], ["batch_size=0"]),
        (["--prompt=a", "--page_size=12"], ["page_size=12", "power of two"]),
        (["--prompt=a", "--page_size=16", "--num_pages=2"], ["pages", "the pool has 1", "num_pages"]),
        (["--prompt=a", "--drafter=magic"], ["magic", "ngram"]),
        (["--prompt=a", "--drafter=ngram", "--draft_model=draft"], ["draft_model=draft", "ngram"]),
        (["--prompt=a", "--draft_model=/nowhere"], ["/nowhere"]),
        (["--prompt=a", "--loop=fast"], ["fast", "chunked"]),
        (["--prompt=a", "--dtype=int8"], ["int8", "bfloat16"]),
        (["--prompt=a", "--temperature=-1"], ["temperature=-1"]),
        (["--prompt=a", "--temperature=hot"], ["temperature=hot"]),
        (["--prompt=a", "--temperature=nan"], ["--temperature: temperature=nan: must be a finite number"]),
        (["--prompt=a", "--temperature=inf"], ["temperature=inf", "finite"]),
        (["--prompt=a", "--temperature=1", "--top_k=-1"], ["top_k=-1"]),
        (["--prompt=a", "--temperature=1", "--top_k=0.5"], ["top_k=0.5"]),
        (["--prompt=a", "--temperature=1", "--top_p=0"], ["top_p=0.0: must be above 0 and at most 1"]),
        (["--prompt=a", "--temperature=1", "--top_p=1.5"], ["top_p=1.5"]),
        (["--prompt=a", "--top_p=0.9"], ["top_p=0.9: of no use without --temperature"]),
        (["--prompt=a", "--top_k=4"], ["top_k=4: of no use without --temperature"]),
        (["--prompt=a", "--seed=-1"], ["seed=-1"]),
        (["--prompt=a", f"--seed={2**32}"], [f"seed={2**32}"]),
        (["--prompt=a", "--verifier=luck"], ["luck", "rejection"]),
        (["--prompt=a", "--drafter=ngram", "--temperature=1", "--verifier=rejection"], ["'match'"]),
        (["--prompt=a", "--stop="], ["stop string is empty"]),
        (["--prompt=a", "--stop=<|endoftext|>"], ["special token", "id 0"]),
        (["--prompt=a", "--stop=" + "a" * 2048], ["stop strings of 2049 bytes"]),
        (["--prompt=a", "--spin"], ["spin"]),
        (["--prompt=a", "b"], ["'b'"]),
        (["--prompt_file=/nowhere.jsonl"], ["/nowhere.jsonl"]),
        (["--prompt=a", "--json=/nowhere/out.json"], ["/nowhere/out.json"]),
        (["--prompt=a", "--json=/"], ["--json=/", "folder"]),
        (["--prompt=a", "--json="], ["--json"]),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_bad_input_is_one_line_and_exit_status_2(capsys, folder, words, parts):
    status, out, err = run(capsys, "generate", f"--model={folder / 'target'}", *words)
    assert status == 2
    assert out == ""
    *notes, message = err.splitlines()
    assert message.startswith("error: ")
    assert all(part in message for part in parts), message
    assert not any("error" in note.lower() or "Traceback" in note for note in notes)


def test_an_unknown_model_and_a_folder_without_a_configuration(capsys, tmp_path):
    status, _, err = run(capsys, "generate", "--model=nobody", "--prompt=a")
    assert status == 2
    assert "'nobody' is neither an embedded model" in err
    status, _, err = run(capsys, "generate", f"--model={tmp_path}", "--prompt=a")
    assert status == 2
    assert "no config.json" in err


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("{", "is not JSON"),
        ("\\xff", "is not JSON"),
        ("3", "holds a int"),
        ("{}", "no field"),
        ('{"text": "a"}', "text"),
        ('{"prompt": "a", "token_ids": [1]}', "one of the fields"),
        ('{"prompt": 3}', '"prompt" is 3'),
        ('{"prompt": "a", "id": [1]}', '"id" is [1]'),
        ('{"token_ids": "12"}', "list of whole numbers"),
        ('{"token_ids": [1, true]}', "list of whole numbers"),
        ('{"token_ids": [1.5]}', "list of whole numbers"),
        ('{"prompt": "a", "temperature": -1}', "temperature=-1: must be a finite number"),
        ('{"prompt": "a", "temperature": "hot"}', "temperature='hot'"),
        ('{"prompt": "a", "top_k": 1.5}', "top_k=1.5: must be an integer"),
        ('{"prompt": "a", "top_p": 2}', "top_p=2: "),
        ('{"token_ids": [1], "seed": -1}', "seed=-1: must be an integer"),
        ('{"token_ids": []}', "empty"),
        ('{"token_ids": [1, 280]}', "token id 280, outside the model's 0 .. 279"),
        ('{"token_ids": [-1]}', "token id -1"),
        ('{"prompt": "\\ud800"}', "half a character"),
        (json.dumps({"token_ids": [1] * CONTEXT}), f"{CONTEXT} tokens"),
    ],
)
def test_a_bad_line_of_a_prompt_file_is_named_by_its_number(capsys, folder, tmp_path, line, part):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "import"}\n\n' + line.encode().replace(rb"\xff", b"\xff") + b"\n")
    status, _, err = run(capsys, "generate", f"--model={folder / 'target'}", f"--prompt_file={path}")
    assert status == 2
    message = err.splitlines()[-1]
    assert f"{path} line 3" in message
    assert part in message


def test_a_prompt_file_without_prompts(tmp_path):
    (tmp_path / "p.jsonl").write_text("\n \n")
    with pytest.raises(InputError, match="holds no prompts"):
        prompts.read_file(tmp_path / "p.jsonl")


def test_the_longest_prompt_that_fits_is_taken(folder):
    target = models.load(folder / "target")
    longest = prompts.Prompt("a", "a", token_ids=[1] * (CONTEXT - 1))
    assert prompts.encode([longest], target) == [longest]


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_the_commands_are_listed(capsys, words):
    status, out, _ = run(capsys, *words)
    assert status == 0
    assert "generate" in out and "doctor" in out


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_command_lists_its_flags(capsys, name):
    status, out, err = run(capsys, name, "--help")
    assert (status, err) == (0, "")
    assert "--json" in out


def test_an_unknown_command(capsys):
    status, out, err = run(capsys, "fly")
    assert (status, out) == (2, "")
    assert err == f"error: 'fly' is no command: there are {', '.join(cli.COMMANDS)}\n"


def test_flags_of_one_call_do_not_reach_the_next(capsys):
    assert run(capsys, "doctor", "--json=-")[0] == 0
    assert run(capsys, "doctor")[1].startswith("jaxspec ")


def test_doctor_names_versions_devices_and_kernels(capsys):
    status, out, _ = run(capsys, "doctor", "--json=-")
    findings = json.loads(out)
    assert status == 0
    assert {"jaxspec", "python", "jax", "jaxlib", "flax"} <= findings["versions"].keys()
    assert findings["devices"]
    assert {k["kernel"] for k in findings["kernels"]} >= {"decode_metadata", "draft_write_window"}
    assert all(k["backend"] and k["reason"] for k in findings["kernels"])
    assert findings["embedded_models"] == list(models.embedded_names())


def driver_at(root, text):
    (root / "proc/driver/nvidia").mkdir(parents=True)
    (root / "proc/driver/nvidia/version").write_text(text)


@pytest.mark.parametrize(
    ("text", "extra"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n", "cuda12"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n", "cuda13"),
        ("NVRM version: unreadable\n", "cuda12"),
    ],
)
def test_an_idle_gpu_is_reported_with_the_command_that_mends_it(monkeypatch, tmp_path, text, extra):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(environment, "_has_cuda_device", lambda: False)
    monkeypatch.setattr(environment, "_version", lambda name: None)
    driver_at(tmp_path, text)
    advice = environment.idle_gpu_advice(tmp_path)
    assert f"pip install '.[{extra}]'" in advice
    assert "\n" not in advice


def test_no_advice_without_a_gpu_or_with_one_in_use(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "_nvidia_smi", lambda: None)
    monkeypatch.setattr(environment, "_has_cuda_device", lambda: False)
    assert environment.idle_gpu_advice(tmp_path) is None
    driver_at(tmp_path, "Kernel Module  580.95.05  ")
    monkeypatch.setattr(environment, "_has_cuda_device", lambda: True)
    assert environment.idle_gpu_advice(tmp_path) is None


def test_a_gpu_that_the_user_hid_is_not_blamed_on_the_installation(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "_has_cuda_device", lambda: False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    driver_at(tmp_path, "Kernel Module  580.95.05  ")
    assert "unset JAX_PLATFORMS" in environment.idle_gpu_advice(tmp_path)


def test_generate_gives_the_advice_once(capsys, monkeypatch, folder):
    monkeypatch.setattr(environment, "idle_gpu_advice", lambda: "planted advice")
    fake_runs(monkeypatch, [5, 6], [5, 6])
    _, out, err = run(capsys, "generate", f"--model={folder / 'target'}", "--prompt=import")
    assert err.splitlines().count("planted advice") == 1
    assert "planted" not in out


def python_m(*words, **settings):
    return subprocess.Popen(
        [sys.executable, "-m", "jaxspec", *map(str, words)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **settings,
    )  # fmt: skip


def test_the_module_runs_and_its_status_is_that_of_the_process(tmp_path):
    process = python_m("generate", "--model=nobody", cwd=tmp_path)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert out == ""
    assert len([line for line in err.splitlines() if line.startswith("error: ")]) == 1
    assert "Traceback" not in err


def test_a_real_interrupt(folder, tmp_path):
    # A shell starts background jobs with SIGINT ignored, and children inherit that: undo it, whoever runs the tests.
    start = (
        "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "runpy.run_module('jaxspec', run_name='__main__', alter_sys=True)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", start, "generate", f"--model={folder / 'target'}", "--prompt=a",
         f"--json={tmp_path / 'out.json'}"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while "compiling" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "interrupted"
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
