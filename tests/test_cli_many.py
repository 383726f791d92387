"""`python -m jaxspec generate-many`: the same ids as `generate`, in a file that the next call goes on with."""

import json

import cli_cases
import pytest
from cli_cases import run

WORDS = ["--num_draft_tokens=3", "--max_new_tokens=9", "--page_size=16"]


@pytest.fixture(scope="module", autouse=True)
def fast_compile():
    patch = cli_cases.quick_compile()
    yield
    patch.undo()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    cli_cases.write_models(root)
    lines = [{"id": f"p{i}", "token_ids": list(range(1, 4 + 3 * i))} for i in range(5)]
    lines[3]["temperature"] = 0.9
    (root / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return root


def words_for(folder, count=5):
    lines = (folder / "prompts.jsonl").read_text().splitlines()[:count]
    (folder / f"{count}.jsonl").write_text("\n".join(lines))
    models = ["--model", folder / "target", "--drafter=draft_lm", "--draft_model", folder / "draft"]
    return [*models, "--prompt_file", folder / f"{count}.jsonl", *WORDS]


def test_the_same_ids_as_generate(capsys, folder, tmp_path):
    """In two calls, of which the second does what the first has left."""
    out, plain = tmp_path / "out.jsonl", tmp_path / "plain.json"
    status, text, _ = run(capsys, "generate-many", *words_for(folder, 3), "--slots=2", "--out", out)
    assert status == 0 and text.startswith(f"3 prompts in {out}, 0 of them from earlier runs\naccept length ")
    status, text, err = run(capsys, "generate-many", *words_for(folder), "--slots=2", "--out", out)
    assert status == 0 and f"5 prompts in {out}, 3 of them from earlier runs\n" in text and "slots busy" in text
    assert "completions: 5 prompts" in err
    status, *_ = run(capsys, "generate", *words_for(folder), "--nocheck_exact", "--json", plain)
    assert status == 0
    records = {record["question_id"]: record for record in map(json.loads, out.read_text().splitlines())}
    requests = json.loads(plain.read_text())["requests"]
    assert len(records) == len(requests) == 5
    for request in requests:
        (choice,) = records[request["id"]]["choices"]
        assert choice["token_ids"] == [request["token_ids"]] and choice["turns"] == [request["text"]]
        assert choice["accept_lengths"] == request["accept_lengths"] and choice["rule"] == request["rule"]
        assert records[request["id"]]["model_id"] == "target draft_lm draft"


def test_bad_input_is_one_line_and_exit_status_2(capsys, folder, tmp_path):
    status, _, err = run(capsys, "generate-many", *words_for(folder))
    assert status == 2 and err == "error: --out is missing: name the JSONL file for the results\n"
    out = tmp_path / "out.jsonl"
    out.write_text("my notes\n")
    status, _, err = run(capsys, "generate-many", *words_for(folder), "--out", out)
    assert status == 2 and "line 1: no record of a result" in err and out.read_text() == "my notes\n"
    status, _, err = run(capsys, "generate-many", *words_for(folder), "--loop=device", "--out", out)
    assert status == 2 and "loop" in err
