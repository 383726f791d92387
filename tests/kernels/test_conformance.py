"""Every recorded case on every backend, and the conformance runner's own rules: what it must count as failed."""

import json
import pathlib
import subprocess
import sys

import conformance
import jax
import kernel_cases as cases
import kernel_oracle as oracle
import numpy as np
import pytest

DATA = pathlib.Path(__file__).parents[1] / "data"
TABLE = {"kernel": "kv_read_table", "page_size": 4, "zero_tail": False, "seq_len_delta": 0, "max_pages": 4}
DECODE = {"kernel": "decode_metadata", "page_size": 4, "zero_tail": False, "seq_len_delta": 3, "max_seq_pages": 4}
RECORDED = {
    "translated.npz": {
        "decode_metadata": 36,
        "draft_extend_metadata": 14,
        "kv_read_table": 16,
        "kv_read_stream": 16,
        "draft_write_window": 16,
        "extend_cache_locs": 16,
    },
    "recurrent.npz": {"replay_state_indices": 14, "commit_track_indices": 14, "state_scatter": 10},
    "kpool.npz": {
        "kpool_decode": 15,
        "kpool_verify": 13,
        "kpool_draft_extend": 12,
        "kpool_write_plan": 14,
        "kpool_append_tail": 10,
        "kpool_ragged_layout": 8,
    },
}
PARTS = {  # of a forward
    "translated.npz": ("decode_metadata", "draft_extend_metadata", "draft_write_window"),
    "recurrent.npz": ("replay_state_indices",),
    "kpool.npz": ("kpool_decode", "kpool_verify", "kpool_draft_extend", "kpool_write_plan"),
}


@pytest.mark.parametrize("backend", cases.BACKENDS)
@pytest.mark.parametrize(("name", "kernel"), [(name, kernel) for name in RECORDED for kernel in RECORDED[name]])
def test_every_recorded_case(name, kernel, backend, capsys):
    status = conformance.main([str(DATA / name), "--backend", backend, "--kernel", kernel])
    assert (capsys.readouterr().out, status) == (f"{RECORDED[name][kernel]} passed, 0 failed\n", 0)


@pytest.mark.parametrize(
    "backend", [pytest.param(b, marks=pytest.mark.slow) if b == "interpret" else b for b in cases.BACKENDS]
)
@pytest.mark.parametrize(("name", "kernel"), [(name, kernel) for name in PARTS for kernel in PARTS[name]])
def test_every_recorded_case_of_a_part_through_the_launch_of_a_forward(name, kernel, backend, capsys):
    status = conformance.main([str(DATA / name), "--backend", backend, "--kernel", f"fused_{kernel}"])
    assert (capsys.readouterr().out, status) == (f"{RECORDED[name][kernel]} passed, 0 failed\n", 0)


@pytest.mark.parametrize(("name", "count"), [("translated.npz", 114), ("recurrent.npz", 38), ("kpool.npz", 72)])
def test_the_kernels_above_are_all_that_were_recorded(name, count):
    file = conformance.File(str(DATA / name))
    assert {file.kernel(i) for i in range(len(file.meta))} == set(RECORDED[name])
    assert len(file.meta) == sum(RECORDED[name].values()) == count


# Files made by hand ---------------------------------------------------------------------------------------------------


def request():
    pages = np.array([[0, 0, 0, 0], [5, 9, 2, 7]])
    return {
        "seq_lens": np.array([5, 1]),
        "req_pool_indices": np.array([1, 0]),
        "req_to_token": cases.as_tokens(pages, 4),
    }


def table_case(**meta):
    """(meta, inputs, outputs) of a kv_read_table that passes: [[8, 1, -7, -7], [3, -7, -7, -7]]."""
    inputs = request() | {"v2p": np.array([3, 0, 0, 0, 0, 8, 0, 0, 0, 1])}
    out = np.full((2, 4), -7)
    oracle.read_table(
        out, inputs["seq_lens"], inputs["req_pool_indices"], inputs["req_to_token"], page_size=4, zero_tail=False,
        granularity="token", v2p=inputs["v2p"],
    )  # fmt: skip
    return TABLE | meta, inputs, {"out": out}


def decode_case(**meta):
    """A decode_metadata that passes, or with skip_page_table one that leaves its table alone."""
    inputs = request() | {"full_v2p": np.array([3, 0, 0, 0, 0, 8, 0, 0, 0, 1])}
    shapes = {"cache_seqlens": 2, "cu_seqlens_k": 3, "page_table": (2, 4)}
    out = {name: np.full(shape, -7) for name, shape in shapes.items()}
    oracle.lengths(out, inputs["seq_lens"], seq_len_delta=3)
    if not meta.get("skip_page_table"):
        oracle.decode(
            out, inputs["seq_lens"], inputs["req_pool_indices"], inputs["req_to_token"], page_size=4, zero_tail=False,
            granularity="token", seq_len_delta=3, full_v2p=inputs["full_v2p"],
        )  # fmt: skip
    return DECODE | meta, inputs, out


@pytest.fixture
def run(tmp_path, capsys):
    """run(case, ..., options) -> (status, lines of stdout) of the runner over a file of those cases."""

    def run(*parts, options=()):
        arrays = {}
        for i, (_, inputs, outputs) in enumerate(parts):
            arrays |= {f"{i}/in/{name}": array for name, array in inputs.items()}
            arrays |= {f"{i}/out/{name}": array for name, array in outputs.items()}
        return main(write(tmp_path, [meta for meta, _, _ in parts], arrays), *options)

    def main(path, *options):
        status = conformance.main([str(path), *options])
        return status, capsys.readouterr().out.splitlines()

    return run


def write(folder, meta, arrays):
    path = folder / "cases.npz"
    np.savez(path, meta=np.frombuffer(json.dumps(meta).encode(), np.uint8), **arrays)
    return path


def test_cases_made_by_hand_pass(run):
    assert table_case()[2]["out"].tolist() == [[8, 1, -7, -7], [3, -7, -7, -7]]
    parts = table_case(), decode_case(), decode_case(skip_page_table=True, zero_tail=True)
    assert run(*parts) == (0, ["3 passed, 0 failed"])


def test_a_wrong_value_fails_its_case_alone(run):
    wrong = table_case()
    wrong[2]["out"][0, 1] = 10
    status, lines = run(table_case(), wrong, table_case())
    words = "kv_read_table page_size=4 zero_tail=False seq_len_delta=0 max_pages=4"
    assert lines == [f"case 1: {words}: separate: out[0, 1] is 1, expected 10", "2 passed, 1 failed"]
    assert status == 1


@pytest.mark.parametrize(
    ("case", "name"),
    [(table_case, "out"), (decode_case, "page_table"), (decode_case, "cache_seqlens"), (decode_case, "cu_seqlens_k")],
)
def test_every_output_counts(run, case, name):
    wrong = case()
    wrong[2][name][1:] += 1
    assert run(wrong)[1][-1] == "0 passed, 1 failed"


def test_dead_cells_must_stay_whatever_was_recorded(run):
    """Past the live prefix a recorded kernel may have written; this one must not."""
    overrun = table_case()
    overrun[2]["out"][0, 2] = 77
    assert run(overrun) == (0, ["1 passed, 0 failed"])


def test_zero_tail_makes_the_whole_table_exact(run):
    assert run(table_case(zero_tail=True))[1][-1] == "0 passed, 1 failed"
    cleared = table_case(zero_tail=True)
    cleared[2]["out"][cleared[2]["out"] == -7] = 0
    assert run(cleared) == (0, ["1 passed, 0 failed"])


def without(mapping, name):
    return {key: value for key, value in mapping.items() if key != name}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m, i, o: (m | {"kernel": "kv_read_tables"}, i, o), "unknown kernel"),
        (lambda m, i, o: (without(m, "kernel"), i, o), "unknown kernel"),
        (lambda m, i, o: (m | {"multiplier": 1}, i, o), "unknown parameter multiplier"),
        (lambda m, i, o: (m, i | {"swa_v2p": i["v2p"]}, o), "unknown input swa_v2p"),
        (lambda m, i, o: (m, i, o | {"other": o["out"]}), "unknown output other"),
        (lambda m, i, o: (m, i, {}), "no output"),
        (lambda m, i, o: (without(m, "zero_tail"), i, o), "no 'zero_tail'"),
        (lambda m, i, o: (m, without(i, "seq_lens"), o), "no 'seq_lens'"),
        (lambda m, i, o: (m | {"page_size": 3}, i, o), "page_size=3"),
        (lambda m, i, o: (m | {"page_size": "4"}, i, o), "page_size"),
    ],
)
def test_what_cannot_be_run_has_failed(run, change, reason):
    status, (line, summary) = run(table_case(), change(*table_case()))
    assert line.startswith("case 1: ") and reason in line
    assert (status, summary) == (1, "1 passed, 1 failed")


def test_kernel_filter(run):
    parts = table_case(), decode_case(), table_case()
    wrong = decode_case(multiplier=1)
    assert run(*parts, options=["--kernel", "kv_read_table"]) == (0, ["2 passed, 0 failed"])
    assert run(*parts, wrong, options=["--kernel", "kv_read_table"]) == (0, ["2 passed, 0 failed"])
    assert run(*parts, wrong, options=["--kernel", "decode_metadata"])[1][-1] == "1 passed, 1 failed"
    assert run(*parts, wrong, options=["--kernel", "kv_*_table"]) == (0, ["2 passed, 0 failed"])
    assert run(*parts, wrong, options=["--kernel", "*_*"])[1][-1] == "3 passed, 1 failed"


@pytest.mark.parametrize("name", ["draft_write_window", "no_such_kernel"])
def test_a_filter_that_selects_nothing_has_failed(run, name):
    status, (line, summary) = run(table_case(), options=["--kernel", name])
    assert name in line and "kv_read_table" in line
    assert (status, summary) == (1, "0 passed, 1 failed")


def test_a_backend_that_declines_has_failed(run, monkeypatch):
    monkeypatch.setattr(conformance, "has_gpu", lambda: True)
    monkeypatch.setattr(conformance.pk, "kv_read_table", declining)
    status, (*lines, summary) = run(table_case(), table_case(), options=["--backend", "mosaic"])
    assert all("ValueError: mosaic is not for this machine" in line for line in lines)
    assert (status, summary) == (1, "0 passed, 2 failed")


def declining(*args, backend, **kwargs):
    raise ValueError(f"{backend} is not for\nthis machine")


@pytest.mark.parametrize("form", ["views", "packed"])
def test_a_guard_cell_that_changed_fails_the_case(run, monkeypatch, form):
    """A kernel that writes right values, and one cell more that no array owns."""
    decode_metadata = conformance.pk.decode_metadata

    def careless(*args, out, **kwargs):
        packed = isinstance(out, conformance.pk.PackedMetadata)
        out = decode_metadata(*args, out=out, **kwargs)
        if form == "packed" and packed:
            return conformance.pk.PackedMetadata(out.buffer.at[2].set(0), out.layout)
        if form == "views" and isinstance(out.cache_seqlens, conformance.pk.View):
            wide = out.cache_seqlens
            view = conformance.pk.View(wide.buffer.at[0].set(0), wide.offset, wide.shape, wide.strides)
            return out._replace(cache_seqlens=view)
        return out

    monkeypatch.setattr(conformance.pk, "decode_metadata", careless)
    status, (line, summary) = run(decode_case(), options=["--backend", "checked"])  # all forms
    assert f"{form}: guard cell" in line and "became 0" in line
    assert (status, summary) == (1, "0 passed, 1 failed")


@pytest.mark.parametrize("backend", ["triton", "mosaic"])
def test_without_a_gpu_nothing_is_run(backend, monkeypatch, capsys):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert conformance.main([str(DATA / "translated.npz"), "--backend", backend]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert backend in printed.err and "GPU" in printed.err


def one_array(path):
    with path.open("wb") as file:
        np.save(file, np.zeros(3))


BAD_FILES = {
    "No such file": lambda path: None,
    "directory": lambda path: path.mkdir(),
    "not an npz": lambda path: path.write_text("kernel"),
    "not an npz archive": lambda path: path.write_bytes(b""),
    "PK": lambda path: path.write_bytes(b"PK\x03\x04 and no more"),
    "one array": one_array,
    "no array `meta`": lambda path: np.savez(path, other=np.zeros(3)),
    "not JSON": lambda path: np.savez(path, meta=np.frombuffer(b"[{", np.uint8)),
    "not a list": lambda path: np.savez(path, meta=np.frombuffer(b"[]", np.uint8)),
    "one object each": lambda path: np.savez(path, meta=np.frombuffer(b"[3]", np.uint8)),
}


@pytest.mark.parametrize("reason", BAD_FILES)
def test_a_bad_file_is_one_line(reason, tmp_path, capsys):
    path = tmp_path / "cases.npz"
    BAD_FILES[reason](path)
    assert conformance.main([str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert str(path) in printed.err
    assert reason in printed.err or reason == "PK"


def test_command_line(tmp_path):
    meta, inputs, outputs = table_case()
    arrays = {f"0/in/{n}": a for n, a in inputs.items()} | {f"0/out/{n}": a for n, a in outputs.items()}
    path = write(tmp_path, [meta, meta], arrays)  # the second case has no arrays
    command = [sys.executable, conformance.__file__, str(path), "--kernel", "kv_read_table"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[-1] == "1 passed, 1 failed"
    usage = subprocess.run([*command, "--backend", "cuda"], capture_output=True, text=True, check=False)
    assert (usage.returncode, usage.stdout) == (2, "")
