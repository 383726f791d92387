"""The command line: what a user sees, what lands in the JSON file, and what is refused how."""

import io
import json
import logging
import os
import pathlib
import signal
import subprocess
import sys

import pytest
import tiny_models
import tokenizers

from jaxspec import Generation, InputError, RequestResult, cli, models
from jaxspec.cli import environment, prompts, report, switches
from jaxspec.cli import generate as command
from jaxspec.cli.jsonfile import JsonFile
from jaxspec.cli.screen import Screen
from jaxspec.cli.stream import Completions, TextStream
from jaxspec.models import draft_checkpoint
from jaxspec.models.block_config import BlockDraftConfig
from jaxspec.models.eagle_config import Eagle3Config
from jaxspec.steps import fusion
from pallas_kernels import BackendChoice

CONTEXT = 128
# Shapes that the tests share, so that they share compiled programs.
SHAPES = ["--num_draft_tokens=3", "--max_new_tokens=9", "--page_size=16", "--batch_size=2"]


@pytest.fixture(scope="module", autouse=True)
def quick_compile():
    """What runs here is small; a process of its own compiles as users do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxspec.steps.step.compiler_options", lambda: tiny_models.FAST_COMPILE)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with two random models over one byte-level vocabulary: target and draft."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["import os\nimport sys\n\ndef main():\n    return 1\n"], trainer)
    root = tmp_path_factory.mktemp("models")
    for name, windows, seed in (("target", (8, None), 0), ("draft", (None,), 1)):
        config = models.Qwen3Config(
            vocab_size=280,
            hidden_size=24,
            intermediate_size=32,
            num_hidden_layers=len(windows),
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            max_position_embeddings=CONTEXT,
            windows=windows,
            eos_token_ids=(0,),
        )
        models.save(root / name, config, models.random_params(config, seed), tokenizer=tokenizer)
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


def run(capsys, *words):
    """Exit status, standard output and standard error of a command line."""
    status = cli.main([str(word) for word in words])
    return status, *capsys.readouterr()


def fake_runs(monkeypatch, *completions, reason="length", stop_string=None):
    """Replaces decoding: call i answers every prompt with `completions[i]`. Returns the settings of all calls."""
    answers, asked = iter(completions), []

    def answer(target, params, batch, *, config, max_new_tokens, temperature, **settings):
        if max_new_tokens == 1:  # one token is asked for to compile
            ids = [0]
        else:
            ids = next(answers)
            asked.append({"config": config, "temperature": temperature, **settings})
        rounds = len(ids) - 1
        results = [
            RequestResult(
                ids,
                reason,
                rounds,
                [1] * rounds,
                [0] * rounds,
                rule=config.sampling if t > 0 else "greedy",
                stop_string=stop_string,
            )
            for t in temperature
        ]
        return Generation(results, config.num_draft_tokens, 0.5, 3)

    monkeypatch.setattr(command, "run_generation", answer)
    return asked


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


# Sampling and stops


def test_every_prompt_has_a_seed_of_its_own_and_settings_reach_the_run(capsys, monkeypatch, folder):
    asked = fake_runs(monkeypatch, [5, 6, 7], [5, 6, 7], stop_string="\n\n", reason="stop_string")
    words = ["--prompt=import", "--prompt=def", "--temperature=0.7", "--top_k=9", "--top_p=0.9", f"--seed={2**32 - 1}"]
    status, out, err = run(
        capsys, "generate", f"--model={folder / 'target'}", *words, "--stop=\n\n", "--stop=end", "--json=-"
    )
    assert status == 0
    both = asked  # speculative and plain
    assert [each["seed"] for each in both] == [[2**32 - 1, 0]] * 2
    assert [(each["temperature"], each["top_k"], each["top_p"]) for each in both] == [
        ([0.7] * 2, [9] * 2, [0.9] * 2)
    ] * 2
    assert [each["config"].sampling for each in both] == ["match"] * 2  # look-up has no distribution
    assert all(each["stop_strings"].strings == ("\n\n", "end") for each in both)
    result = json.loads(out)
    assert [r["sampling"]["seed"] for r in result["requests"]] == [2**32 - 1, 0]
    assert [(r["rule"], r["stop_string"]) for r in result["requests"]] == [("match", "\n\n")] * 2
    assert result["environment"]["flags"]["temperature"] == 0.7
    assert "== prompt-0: 1 prompt tokens, temperature 0.7, top_k 9, top_p 0.9, seed 4294967295, rule match" in err
    assert "stop '\\n\\n'" in err and "yes, all 2" in err


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_what_is_drawn_by_another_rule_is_not_compared(capsys, monkeypatch, folder, rule):
    """One line says so; no plain decoding runs, and the ids are no error."""
    asked = fake_runs(monkeypatch, [5, 6, 7])
    words = [f"--model={folder / 'target'}", f"--draft_model={folder / 'draft'}", "--prompt=import"]
    words += ["--temperature=0.7"] + (["--verifier=block"] if rule == "block" else [])
    status, out, err = run(capsys, "generate", *words)
    assert (status, len(asked)) == (0, 1)
    assert asked[0]["config"].sampling == rule
    lines = [line for line in err.splitlines() if "same law" in line]
    assert lines == [f"{rule} draws other ids than plain decoding, by the same law: no request is compared"]
    assert f"rule {rule}" in out and "ids equal plain    not checked" in out


def test_greedy_rows_of_a_mixed_run_are_compared(capsys, monkeypatch, folder, tmp_path):
    """Each line of a prompt file may sample its own way."""
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "temperature": 1.5, "seed": 9}\n{"prompt": "b"}\n')
    words = ["generate", f"--model={folder / 'target'}", f"--draft_model={folder / 'draft'}", f"--prompt_file={path}"]
    asked = fake_runs(monkeypatch, [5, 6, 7], [5, 6, 7])
    status, out, err = run(capsys, *words, "--json=-")
    assert status == 0
    assert [(each["temperature"], each["seed"]) for each in asked] == [([1.5, 0], [9, 1])] * 2
    assert [each["config"].sampling for each in asked] == ["rejection", "match"]
    assert [r["exact_match"] for r in json.loads(out)["requests"]] == [None, True]
    assert json.loads(out)["aggregate"]["exact_match"] is True
    assert "of 2 requests 1 is compared" in err and "ids equal plain    yes\n" in err
    fake_runs(monkeypatch, [5, 6, 7], [5, 6, 8])
    status, _, err = run(capsys, *words)
    assert status == 1
    assert "request line-2 differs from plain decoding at completion token 2: speculative 7, plain 8" in err


@pytest.mark.slow
def test_sampled_ids_equal_plain_decoding_and_end_at_a_string(capsys, folder):
    words = ["generate", f"--model={folder / 'target'}", "--drafter=ngram", *SHAPES, "--loop=device", "--json=-"]
    words += ["--prompt=import os", "--temperature=2", "--seed=5", "--ignore_eos"]
    status, out, _ = run(capsys, *words)
    request = json.loads(out)["requests"][0]
    assert (status, request["exact_match"], request["rule"]) == (0, True, "match")
    assert request["finish_reason"] == "length" and len(set(request["token_ids"])) > 2
    target = models.load(folder / "target")
    texts = [target.decode([i]) for i in request["token_ids"]]
    string = next(text for text in texts[3:] if text and "\ufffd" not in text)
    status, out, _ = run(capsys, *words, f"--stop={string}")
    stopped = json.loads(out)["requests"][0]
    assert (status, stopped["finish_reason"], stopped["stop_string"]) == (0, "stop_string", string)
    count = len(stopped["token_ids"])
    assert stopped["token_ids"] == request["token_ids"][:count]
    assert string in target.decode(stopped["token_ids"]) and string not in target.decode(stopped["token_ids"][:-1])


# Drafts that are trained for a target


@pytest.fixture(scope="module")
def drafts(folder):
    """Folders of random drafts for the target: blocks of 4 tokens, of 3 behind an anchor's row, and a chain."""
    common = {
        "target_layer_ids": (0, 1),
        "vocab_size": 280,
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": CONTEXT,
    }
    block = common | {"mask_token_id": 1, "num_hidden_layers": 1}
    configs = {
        "dspark": BlockDraftConfig("dspark", block_size=4, markov_rank=4, **block),
        "dflash": BlockDraftConfig("dflash", block_size=4, sample_from_anchor=False, **block),
        "eagle3": Eagle3Config(target_hidden_size=24, **common),
    }
    for kind, config in configs.items():
        draft_checkpoint.save_draft(folder / kind, config, draft_checkpoint.random_draft_params(config, 0))
    return folder


@pytest.mark.parametrize(
    ("kind", "drafter", "most"),
    [("dspark", "DSparkDrafter", 5), ("dflash", "DFlashDrafter", 4), ("eagle3", "Eagle3Drafter", 8)],
)
def test_trained_drafts_by_their_folder(capsys, monkeypatch, drafts, kind, drafter, most):
    """The rows of a round are by default no more than a block proposes; who asks for more is told."""
    words = ["generate", f"--model={drafts / 'target'}", f"--drafter={kind}", f"--draft_model={drafts / kind}"]
    words += ["--prompt=import"]
    asked = fake_runs(monkeypatch, [5, 6], [5, 6])
    status, out, _ = run(capsys, *words, "--temperature=0.5", "--json=-")
    ran = json.loads(out)["environment"]
    assert (status, ran["drafter"], ran["config"]["num_draft_tokens"]) == (0, drafter, most)
    assert asked[0]["config"].sampling == "rejection"
    if most < 8:
        status, _, err = run(capsys, *words, "--num_draft_tokens=8")
        assert status == 2 and f"use at most {most}" in err.splitlines()[-1]
    status, _, err = run(capsys, *words[:2], f"--drafter={kind}", "--prompt=a")
    assert status == 2 and f"drafter={kind}: no draft of this kind ships" in err.splitlines()[-1]


def test_a_draft_of_another_kind_is_refused(capsys, drafts):
    words = ["generate", f"--model={drafts / 'target'}", "--drafter=dspark", f"--draft_model={drafts / 'eagle3'}"]
    status, _, err = run(capsys, *words, "--prompt=a")
    assert status == 2 and "a draft of kind 'eagle3'" in err.splitlines()[-1]


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


# Sparse layers, prediction blocks and the switch of their metadata


@pytest.fixture(scope="module")
def sparse(folder):
    """The words of a run of a model with sparse layers and a prediction block, without a tokenizer."""
    models.save(folder / "glm", tiny_models.GLM_CONFIG, models.random_params(tiny_models.GLM_CONFIG, 0))
    (folder / "ids.jsonl").write_text('{"token_ids": [1, 2, 3]}')
    return ["generate", f"--model={folder / 'glm'}", f"--prompt_file={folder / 'ids.jsonl'}", "--json=-"]


def test_prediction_blocks_draft_by_default_and_pages_hold_64_pools(capsys, monkeypatch, sparse):
    monkeypatch.delenv(switches.KPOOL_METADATA_FUSION, raising=False)
    for words in ([], ["--drafter=mtp"]):
        fake_runs(monkeypatch, [5, 6], [5, 6])
        status, out, err = run(capsys, *sparse, *words)
        ran = json.loads(out)["environment"]
        assert status == 0
        assert (ran["drafter"], ran["config"]["page_size"]) == ("MTPDrafter", 256)
        assert (ran["kpool_metadata"], ran["config"]["kpool_metadata_fusion"]) == ("ordinary", False)
        assert "kpool_metadata_fusion" not in err
    fake_runs(monkeypatch, [5, 6], [5, 6])
    ran = json.loads(run(capsys, *sparse, "--drafter=ngram", "--page_size=32")[1])["environment"]
    assert (ran["drafter"], ran["config"]["page_size"]) == ("NgramDrafter", 32)


def test_a_dense_model_has_no_metadata_to_fuse_and_pages_of_64(capsys, monkeypatch, folder):
    monkeypatch.setenv(switches.KPOOL_METADATA_FUSION, "1")
    fake_runs(monkeypatch, [5, 6], [5, 6])
    _, out, err = run(capsys, "generate", f"--model={folder / 'target'}", "--prompt=import", "--json=-")
    ran = json.loads(out)["environment"]
    assert (ran["kpool_metadata"], ran["config"]["page_size"]) == (None, 64)
    assert "kpool_metadata_fusion" not in err


@pytest.mark.parametrize(
    ("device", "words", "ran", "line"),
    [
        ("cpu", [], "ordinary", "warning: kpool_metadata_fusion is not used: it takes a CUDA device"),
        ("gpu", ["--page_size=64"], "ordinary", "warning: kpool_metadata_fusion is not used: pool 4, attention pages"),
        ("gpu", [], "fused", "kpool_metadata_fusion: one kernel a forward prepares the metadata, 4 tokens a pool"),
    ],
)
def test_the_switch_asks_for_fused_metadata_and_is_answered_once(capsys, monkeypatch, sparse, device, words, ran, line):
    monkeypatch.setenv(switches.KPOOL_METADATA_FUSION, "1")
    backend = {"cpu": "reference", "gpu": "triton"}[device]
    choice = BackendChoice("kpool_metadata", backend, f"found {device}")
    monkeypatch.setattr(fusion, "explain_backends", lambda: [choice])
    fake_runs(monkeypatch, [5, 6], [5, 6])
    status, out, err = run(capsys, *sparse, *words)
    environment = json.loads(out)["environment"]
    assert status == 0
    assert environment["kpool_metadata"] == ran and environment["config"]["kpool_metadata_fusion"]
    assert [told for told in err.splitlines() if "kpool_metadata_fusion" in told] == [
        told for told in err.splitlines() if told.startswith(line)
    ]
    assert err.count("kpool_metadata_fusion") == 1


def test_lines_of_the_log_end_with_the_command(capsys, monkeypatch, sparse):
    logger = logging.getLogger("jaxspec")
    before = logger.level, list(logger.handlers)
    fake_runs(monkeypatch, [5, 6], [5, 6])
    run(capsys, *sparse)
    assert (logger.level, logger.handlers) == before


@pytest.mark.parametrize("value", ["yes", "2", " "])
@pytest.mark.parametrize("command", ["generate", "doctor", "bench unified-ab", "bench launches"])
def test_another_value_of_the_switch_is_one_line_and_exit_status_2(capsys, monkeypatch, command, value):
    monkeypatch.setenv(switches.KPOOL_METADATA_FUSION, value)
    status, out, err = run(capsys, *command.split())
    assert (status, out) == (2, "")
    assert err.splitlines()[-1].startswith(f"error: {switches.KPOOL_METADATA_FUSION}={value!r}: must be 1")


@pytest.mark.parametrize(
    ("value", "device", "parts"),
    [
        (None, "cpu", ["separate operations", "=1 asks for"]),
        ("0", "cpu", ["separate operations", "=1 asks for"]),
        ("1", "cpu", ["separate operations", "takes a CUDA device", "cpu"]),
        ("1", "gpu", ["one kernel a forward"]),
    ],
)
def test_doctor_tells_of_the_switch(capsys, monkeypatch, value, device, parts):
    monkeypatch.delenv(switches.KPOOL_METADATA_FUSION, raising=False)
    if value is not None:
        monkeypatch.setenv(switches.KPOOL_METADATA_FUSION, value)
    described = environment.describe() | {"backend": device}
    monkeypatch.setattr(environment, "describe", lambda: described)
    status, out, _ = run(capsys, "doctor")
    line = next(line for line in out.splitlines() if line.startswith("metadata of sparse layers"))
    assert status == 0
    assert all(part in line for part in (*parts, switches.KPOOL_METADATA_FUSION))
    found = json.loads(run(capsys, "doctor", "--json=-")[1])["kpool_metadata_fusion"]
    assert found == {"switch": switches.KPOOL_METADATA_FUSION, "requested": value == "1"}


def test_a_model_without_prediction_blocks_cannot_draft_with_them(capsys, folder):
    status, _, err = run(capsys, "generate", f"--model={folder / 'target'}", "--prompt=a", "--drafter=mtp")
    assert status == 2
    assert "has no MTP block" in err.splitlines()[-1]


def test_characters_that_span_tokens_are_held_back():
    word = "né — 汉字 🙂"
    stream = TextStream(lambda ids: bytes(ids).decode(errors="replace"))
    parts = [stream.push([byte]) for byte in word.encode()]
    assert "".join(parts) == word
    assert not any("\ufffd" in part for part in parts)
    assert stream.end() == ""


def test_bytes_that_never_become_a_character_are_shown_at_the_end():
    stream = TextStream(lambda ids: bytes(ids).decode(errors="replace"))
    assert [stream.push([97]), stream.push([0xF0]), stream.end()] == ["a", "", "\ufffd"]


def lines_of(*events):
    """What `Completions` prints for two requests 'a' and 'b' under a byte decoder."""
    out = io.StringIO()
    requests = [prompts.Prompt(name, name, text=name, token_ids=[ord(name)]) for name in "ab"]
    completions = Completions(Screen(out, io.StringIO()), requests, lambda ids: bytes(ids).decode(errors="replace"))
    seen = []
    for index, text in events:
        completions.end(index) if text is None else completions.add(index, text.encode())
        seen.append(out.getvalue())
    return seen


def test_the_first_request_streams_by_lines_and_the_second_waits():
    seen = lines_of((0, "one\ntw"), (1, "other\n"), (0, "o\n"), (1, "end"), (0, None), (1, None), (1, None))
    title = "== a: 1 prompt tokens\n| a\n-> "
    assert seen[0] == seen[1] == title + "one\n"
    assert seen[2] == seen[3] == title + "one\ntwo\n"
    assert seen[4] == seen[2] + "\n== b: 1 prompt tokens\n| b\n-> other\n"
    assert seen[5] == seen[6] == seen[4] + "end\n\n"


def test_an_empty_completion_still_has_its_title():
    assert lines_of((0, None))[0].startswith("== a:")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_progress_line_that_is_taken_away():
    out, err = io.StringIO(), Terminal()
    screen = Screen(out, err)
    with screen.task("work", "compiling"):
        screen.progress(0.5, "accept length 2.50")
        screen.write("a line\n")
        assert "[##########..........]  50%" in err.getvalue()
        assert "accept length 2.50" in err.getvalue()
    assert err.getvalue().endswith("\r\x1b[K")
    assert out.getvalue() == "a line\n"


def test_escape_sequences_in_a_completion_are_shown_and_not_obeyed():
    out = io.StringIO()
    Screen(out, io.StringIO()).write("a\x1b[2J\tb\r\x9b\n")
    assert out.getvalue() == "a\\x1b[2J\tb\\x0d\\x9b\n"


def test_json_has_no_word_for_what_is_not_a_number(tmp_path):
    path = tmp_path / "out.json"
    JsonFile(str(path)).write({"a": [float("nan"), float("inf"), 1.0], "b": "é \ud800"})
    assert json.loads(path.read_text()) == {"a": [None, None, 1.0], "b": "é ?"}


def test_a_device_is_written_to_and_not_replaced():
    JsonFile(os.devnull).write({"a": 1})
    assert pathlib.Path(os.devnull).is_char_device()


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    JsonFile(str(tmp_path / "link.json")).write({"a": 1})
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "real.json").read_text()) == {"a": 1}


def test_distinct_4gram_ratio():
    assert report.distinct_4gram_ratio([]) is None
    assert report.distinct_4gram_ratio([[1, 2, 3]]) is None
    assert report.distinct_4gram_ratio([[1, 2, 3, 4]]) == 1
    assert report.distinct_4gram_ratio([[1] * 7]) == 1 / 4
    # The same run in two completions is no repetition.
    assert report.distinct_4gram_ratio([[1, 2, 3, 4], [1, 2, 3, 4]]) == 1


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
