"""The command line: settings that sample, drafts for a target, and the switch of fused metadata."""

import json
import logging

import cli_cases
import pytest
import tiny_models
from cli_cases import CONTEXT, SHAPES, fake_runs, run, write_models

from jaxspec import models
from jaxspec.cli import environment, switches
from jaxspec.models import draft_checkpoint
from jaxspec.models.block_config import BlockDraftConfig
from jaxspec.models.eagle_config import Eagle3Config
from jaxspec.steps import fusion
from pallas_kernels import BackendChoice


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
    choice = BackendChoice("forward_metadata", backend, f"found {device}")
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
