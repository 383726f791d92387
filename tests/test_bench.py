"""`python -m jaxspec bench`: what is measured, what is printed, and that a difference between the arms is found."""

import json

import jax
import pytest
import quick_compile
import tiny_models
from bench_cases import rows_of, run_for_real

import jaxspec
from jaxspec import Generation, RequestResult, cli, models
from jaxspec.benchmarks import pool_size, unified_ab
from jaxspec.models import draft_checkpoint
from jaxspec.steps import step
from jaxspec.steps.memory import pool_layout

REQUESTS, PROMPT, TOKENS = 3, 20, 12
SIZES = [f"--num_requests={REQUESTS}", f"--prompt_len={PROMPT}", f"--max_new_tokens={TOKENS}", "--num_draft_tokens=3"]
SIZES += ["--page_size=16", "--warmup_tokens=2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the tiny target and a draft for it that is right in part of the rounds; no tokenizer."""
    root = tmp_path_factory.mktemp("models")
    for name, params in (("target", tiny_models.target_params()), ("draft", tiny_models.draft_params())):
        models.save(root / name, tiny_models.CONFIG, params, dtype="float32")
    return root


@pytest.fixture(scope="module")
def words(folder):
    return ["bench", "unified-ab", f"--model={folder / 'target'}", f"--draft_model={folder / 'draft'}", *SIZES]


@pytest.fixture(scope="module")
def real(words, tmp_path_factory):
    """Exit status, output, messages and JSON of a run in which everything is real."""
    return run_for_real(words, tmp_path_factory.mktemp("out") / "out.json")


def test_the_arms_agree(real):
    status, out, err, _ = real
    assert status == 0
    assert "error" not in err
    rows, all_equal = rows_of(out), f"{REQUESTS}/{REQUESTS}"
    assert rows["ids"] == [str(REQUESTS * TOKENS)] * 2 + [all_equal]
    assert rows["verify counts"][-1] == all_equal
    assert rows["logprobs"] == ["max abs difference", "0", all_equal]
    static, unified, verdict = rows["accept length"]
    assert static == unified and len(static.partition(".")[2]) == 8 and verdict == "yes"
    for name in ("exact", "throughput 1", "throughput 2"):
        assert float(rows[name][0]) > 0 and float(rows[name][1]) > 0
        assert rows[name][3:] == [all_equal, all_equal]
    assert rows["plain generate"][1:] == [all_equal, all_equal]


def test_the_arms_agree_on_a_hybrid(tmp_path, monkeypatch, capsys):
    """States in the pool beside the K and V; the static arm's are a hundredth of its bytes of those."""
    models.save(tmp_path / "hybrid", tiny_models.HYBRID_CONFIG, tiny_models.hybrid_params(), dtype="float32")
    monkeypatch.setattr(step, "compiler_options", lambda: tiny_models.FAST_COMPILE)
    path = tmp_path / "out.json"
    words = ["bench", "unified-ab", f"--model={tmp_path / 'hybrid'}", "--drafter=ngram", "--runs=1", *SIZES]
    words += ["--state_ratio=0.01"]
    assert cli.main([*words, "--json", str(path)]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert rows["ids"][-1] == rows["verify counts"][-1] == f"{REQUESTS}/{REQUESTS}"
    assert float(rows["logprobs"][1]) < 1e-5  # the two programs may sum a state in another order
    config = json.loads(path.read_text())["configs"]["static"]
    config = jaxspec.SpecConfig(**config)
    target = tiny_models.HYBRID_TARGET
    states = config.rows * sum(p.nbytes for spec in target.layers if spec.carries == "accumulated" for p in spec.parts)
    total = unified_ab.kv_bytes(target, jaxspec.NgramDrafter(), config)
    assert 0.009 < states / (total - states) <= 0.01


def test_the_tokens_are_those_of_greedy_decoding(real, greedy):
    result = real[3]
    for arm in unified_ab.ARMS:
        for prompt, request in zip(result["prompts"], result["exact"][arm]["requests"], strict=True):
            assert len(prompt) == PROMPT
            assert request["token_ids"] == greedy(tuple(prompt), TOKENS)
            assert len(request["logprobs"]) == TOKENS


def test_json_has_it_all(real):
    result = real[3]
    assert result["failures"] == []
    assert result["settings"]["seed"] == 1234
    assert result["environment"]["versions"]["jax"]
    memory = result["memory"]
    assert memory["static"]["kv_bytes"] == memory["unified"]["kv_bytes"] == result["configs"]["unified"]["pool_bytes"]
    assert memory["static"]["swa_pages"] * 10 == memory["static"]["full_pages"]
    for arm in unified_ab.ARMS:
        aggregate = result["exact"][arm]["aggregate"]
        rounds = sum(request["verify_count"] for request in result["exact"][arm]["requests"])
        assert 0 < rounds < REQUESTS * (TOKENS - 1)  # some drafts were accepted
        assert aggregate["accept_length"] == REQUESTS * TOKENS / rounds
        assert aggregate["dispatches"] == 1
    throughput = result["throughput"]
    rates = throughput["tokens_per_second"]
    assert len(rates["static"]) == len(rates["unified"]) == 2
    assert throughput["unified_over_static"] == pytest.approx(sum(rates["unified"]) / sum(rates["static"]))
    assert throughput["static_over_plain"] == pytest.approx(sum(rates["static"]) / 2 / rates["plain"])


def test_every_run_is_announced(real):
    lines = real[2].splitlines()
    assert lines[0].startswith("models: ")
    assert "run 5 of 10: static, throughput 1 ..." in lines
    assert "run 6 of 10: unified, throughput 1 ..." in lines
    assert len(lines) == 11


def planted(monkeypatch, *, kind=unified_ab.EXACT, request=1, **changes):
    """Replaces decoding: all runs give the same, but one request of the unified arm's runs of a kind is changed."""

    def generate(target, params, prompts, *, config, max_new_tokens, **settings):
        rounds = max_new_tokens // 2
        right = RequestResult(
            token_ids=list(range(max_new_tokens)),
            finish_reason="length",
            verify_count=rounds,
            accept_lengths=[2] * rounds,
            accepted_drafts=[1] * rounds,
            logprobs=[-0.5] * max_new_tokens if config.logprobs else None,
        )
        requests = [right] * len(prompts)
        is_kind = config.logprobs == (kind == unified_ab.EXACT) and max_new_tokens == TOKENS
        unified = config.memory == "unified"
        if unified and is_kind:
            requests[request] = RequestResult(**(vars(right) | changes))
        return Generation(requests, config.num_draft_tokens, 0.5 if unified else 1.0, 1)

    monkeypatch.setattr(unified_ab, "generate", generate)


WRONG_IDS = [*range(7), 99, *range(8, TOKENS)]


@pytest.mark.parametrize(
    ("plant", "line"),
    [
        ({"token_ids": WRONG_IDS}, "exact: ids differ in 1 of 3 requests, request 1 first"),
        (
            {"token_ids": WRONG_IDS, "kind": "throughput"},
            "throughput 2: ids differ in 1 of 3 requests, request 1 first",
        ),
        ({"verify_count": 7}, "exact: verify counts differ in 1 of 3 requests, request 1 first"),
        ({"verify_count": 7}, "exact: accept length is 2.00000000 static, 1.89473684 unified"),
        ({"token_ids": [0], "finish_reason": "out_of_pages"}, "unified, exact: 1 requests ended early, out_of_pages"),
    ],
)
def test_a_planted_difference_is_named_and_is_exit_status_1(monkeypatch, capsys, words, plant, line):
    planted(monkeypatch, **plant)
    assert cli.main([*words, "--json=-"]) == 1
    out, err = capsys.readouterr()
    assert f"error: {line}" in err.splitlines()
    assert line in json.loads(out)["failures"]


def test_differences_of_log_probabilities_are_shown(monkeypatch, capsys, words):
    planted(monkeypatch, logprobs=[-0.5] * (TOKENS - 1) + [-0.75])
    assert cli.main(words) == 0
    assert rows_of(capsys.readouterr().out)["logprobs"] == ["max abs difference", "0.25", "2/3"]


def test_the_table_has_the_ratios(monkeypatch, capsys, words):
    planted(monkeypatch)
    assert cli.main(words) == 0
    rows = rows_of(capsys.readouterr().out)
    rate = REQUESTS * TOKENS  # the static arm takes a second, the unified one half of that
    assert rows["mean, exact left out"] == [f"{rate}.0", f"{2 * rate}.0", "2.0000"]
    assert rows["(max - min) / mean"] == ["0.00%", "0.00%"]
    assert rows["static / plain"] == ["1.0000"]
    assert rows["exact"][-2:] == rows["throughput 2"][-2:] == ["3/3", "3/3"]


def test_who_prepared_the_metadata_is_told(monkeypatch, capsys, words, tmp_path):
    monkeypatch.setenv("JAXSPEC_EXPERIMENTAL_DSA_KPOOL_METADATA_FUSION", "1")
    planted(monkeypatch)
    assert cli.main([*words, "--json=-"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["environment"]["kpool_metadata"] is None and "kpool_metadata_fusion is" not in err
    models.save(tmp_path / "glm", tiny_models.GLM_CONFIG, models.random_params(tiny_models.GLM_CONFIG, 0))
    words = ["bench", "unified-ab", f"--model={tmp_path / 'glm'}", "--drafter=mtp", *SIZES]
    assert cli.main([*words, "--json=-"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["environment"]["kpool_metadata"] == "ordinary"
    assert result["settings"]["kpool_metadata_fusion"] and result["configs"]["static"]["kpool_metadata_fusion"]
    assert err.count("warning: kpool_metadata_fusion is not used") == 1


@pytest.mark.parametrize("drafter", ["dspark", "dflash", "eagle3"])
def test_arms_of_a_trained_draft_have_equal_bytes(monkeypatch, capsys, folder, tmp_path, drafter):
    planted(monkeypatch)
    config = tiny_models.trained_draft(drafter)
    draft_checkpoint.save_draft(tmp_path, config, draft_checkpoint.random_draft_params(config, 0))
    words = ["bench", "unified-ab", f"--model={folder / 'target'}", f"--drafter={drafter}", f"--draft_model={tmp_path}"]
    assert cli.main([*words, *SIZES, "--json=-"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert memory["static"]["kv_bytes"] == memory["unified"]["kv_bytes"]


@pytest.fixture(scope="module")
def target():
    return jaxspec.load_model("target")


def test_the_sizes_of_the_reference(target):
    drafter = jaxspec.DraftLM(jaxspec.load_model("draft").draft_model)
    base = jaxspec.SpecConfig(
        batch_size=48, num_draft_tokens=8, context_len=2560, max_new_tokens=2048, page_size=128, prefill_chunk=128
    )
    arms = unified_ab.size_arms(target.model, drafter, base, 0.1, 0.1)
    # A window of 256 and a chunk of 128 in flight touch at most 4 pages: 192 SWA pages, so ten times as many FULL ones.
    assert (arms["static"].num_pages, arms["static"].num_swa_pages) == (1921, 193)
    # Bytes a token: 2 FULL layers and 6 SWA layers of 2 heads, 2 draft layers of 1 head, each head 64 wide in K and V.
    head = 2 * 64 * 4
    expected = 128 * (1921 * (2 * 2 + 2) * head + 193 * 6 * 2 * head)
    assert unified_ab.kv_bytes(target.model, drafter, arms["static"]) == expected
    assert arms["unified"].pool_bytes == expected
    assert pool_layout(target.model, drafter, arms["unified"]).nbytes == expected
    assert arms["plain"] == base


@pytest.mark.parametrize(("ratio", "full", "swa"), [(1.0, 8, 8), (0.5, 16, 8), (0.3, 27, 9)])
def test_pools_hold_what_the_requests_need_and_keep_the_ratio(ratio, full, swa):
    # Two requests of 60 tokens: 4 pages each, and a window of 8 with a chunk of 128 in flight needs all of them.
    base = jaxspec.SpecConfig(batch_size=2, num_draft_tokens=3, context_len=60, max_new_tokens=8, page_size=16)
    static = unified_ab.size_arms(tiny_models.TARGET, jaxspec.NgramDrafter(), base, ratio, 0.1)["static"]
    assert (static.num_pages - 1, static.num_swa_pages - 1) == (full, swa)


def test_prompts_are_fixed_by_the_seed_and_are_code(target):
    prompts = unified_ab.draw_prompts(target, 48, 512, seed=1234)
    assert prompts == unified_ab.draw_prompts(target, 48, 512, seed=1234)
    assert prompts[:2] == unified_ab.draw_prompts(target, 2, 512, seed=1234)
    assert prompts != unified_ab.draw_prompts(target, 48, 512, seed=1235)
    assert {len(prompt) for prompt in prompts} == {512}
    assert len(set(map(tuple, prompts))) == 48
    text = "\n".join(map(target.decode, prompts))
    assert all(word in text for word in ("class _DummyEvents:", "def __init__(self", "return"))
    assert len(unified_ab.draw_prompts(target, 1, 4000, seed=0)[0]) == 4000  # longer than all texts together


@pytest.mark.parametrize("words", [["bench"], ["bench", "flight"], ["bench", "--json=-"]])
def test_without_a_known_name_there_is_one_line(capsys, words):
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    names = (
        "generate, generate-many, doctor, bench acceptance, bench attention, bench fusion-ab, bench generate, "
        "bench launches, bench metadata, bench pool-size, bench round, bench unified-ab"
    )
    assert err == f"error: {' '.join(words)!r} is no command: there are {names}\n"


def test_the_overview_lists_benchmarks(capsys):
    assert cli.main(["bench", "--help"]) == 0
    assert "bench unified-ab  Compares" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flag", "parts"),
    [
        ("--max_new_tokens=250", ["context_len=270", "256"]),
        ("--num_requests=0", ["num_requests=0"]),
        ("--swa_ratio=0", ["swa_ratio=0"]),
        ("--page_size=12", ["page_size=12", "power of two"]),
        ("--drafter=ngram", ["draft_model", "ngram"]),
        ("--model=nobody", ["nobody"]),
        ("--json=/nowhere/out.json", ["/nowhere/out.json"]),
    ],
)
def test_bad_input_is_one_line_and_exit_status_2(capsys, words, flag, parts):
    assert cli.main([*words, flag]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    *_, message = err.splitlines()
    assert message.startswith("error: ")
    assert all(part in message for part in parts), message


# pool-size

POOL_SIZE = ["bench", "pool-size", "--small_pages=200", "--large_pages=2000", "--num_requests=5", "--rounds=9"]


@pytest.fixture(scope="module")
def quick_rounds():
    """Its programs compile faster, once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_begin", "_rounds"):
            function = getattr(pool_size, name).__wrapped__
            patch.setattr(pool_size, name, jax.jit(function, compiler_options=quick_compile.options()))
        yield


@pytest.mark.usefixtures("quick_rounds")
def test_pool_size_tells_medians_and_their_ratio(monkeypatch, capsys):
    monkeypatch.setattr(pool_size, "LIMIT", 1e9)
    assert cli.main([*POOL_SIZE, "--runs=10", "--json=-"]) == 0
    out, err = capsys.readouterr()
    result, rows = json.loads(out), rows_of(err)
    assert result["failures"] == [] and rows["equal tables"] == ["yes"]
    for column, size in enumerate((200, 2000)):
        arm = result["small" if column == 0 else "large"]
        assert arm["full_pages"] == size and arm["bytes"] == size * 256
        assert len(arm["us_a_round"]) == 10 and min(arm["us_a_round"]) <= arm["median"] <= max(arm["us_a_round"])
        assert rows["median"][column] == f"{arm['median']:.2f}"
    assert result["ratio"] == pytest.approx(result["large"]["median"] / result["small"]["median"])
    # 1 + 1 + 10 runs: in round 108 the five requests have 1 + (row + 108) % 16 pages and whoever had 16 is gone.
    alive = [1 + (row + 108) % 16 for row in range(1, 6) if (row + 108) % 16 != 15]
    assert result["pages_alive"] == {"full": sum(alive), "swa": sum(min(n, 2) for n in alive), "state": len(alive)}


@pytest.mark.usefixtures("quick_rounds")
def test_a_slow_large_pool_and_other_tables_are_exit_status_1(monkeypatch, capsys):
    monkeypatch.setattr(pool_size, "LIMIT", 0.0)
    tell, arms = pool_size.tell, []

    def planted(arm):
        arms.append(arm)
        return tell(arm) | ({"states": [3]} if len(arms) == 2 else {})

    monkeypatch.setattr(pool_size, "tell", planted)
    assert cli.main(POOL_SIZE) == 1
    out, err = capsys.readouterr()
    assert rows_of(out)["equal tables"] == ["NO"]
    assert "error: states differ" in err and "times as long, more than 0.0" in err


@pytest.mark.usefixtures("quick_rounds")
def test_requests_that_do_not_fit_are_exit_status_2(capsys):
    assert cli.main([*POOL_SIZE, "--num_requests=30"]) == 2
    assert "num_requests=30" in capsys.readouterr().err
