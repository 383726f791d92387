"""tests/peers: what the comparison with the reference peer's kernels refuses, compares and says. Needs neither."""

import dataclasses
import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxspec.benchmarks import timing
from jaxspec.cli.jsonfile import JsonFile

PEERS = Path(__file__).parent / "peers"
sys.path.append(str(PEERS))
NAMES = "metadata", "peer_inputs", "peer_job", "peer_kernels", "peer_ours", "peer_verdict"
metadata, peer_inputs, peer_job, peer_kernels, peer_ours, peer_verdict = map(importlib.import_module, NAMES)

SMALL = peer_job.Shape(9, 300, 3)  # the last request is padding


# What cannot be done


def refusal(words, capsys):
    """The one line of error that the command ends with, at status 2; before it, it may say what it does."""
    assert metadata.main(words) == 2
    out, err = capsys.readouterr()
    *before, last = err.splitlines()
    assert out == "" and last.startswith("error: ") and all(line.endswith(" ...") for line in before)
    return last


@pytest.fixture
def wheel(tmp_path):
    """A folder laid out like the wheel. Its packages cannot be imported, only the kernels' modules."""
    for path in peer_kernels.files(tmp_path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        for folder in path.relative_to(tmp_path).parents:
            (tmp_path / folder / "__init__.py").write_text("raise ImportError('a package of the wheel was imported')")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--peer"),
        (["--peer", "x", "--speed"], "--speed"),
        (["--peer", "x", "--runs", "9"], "--runs=9: it must be 10 or more"),
        (["--peer", "x", "--runs", "ten"], "'ten'"),
        (["--peer", "x", "--shapes", "8,8192"], "shape '8,8192' is not three integers"),
        (["--peer", "x", "--shapes", "8,many,4"], "shape '8,many,4' is not three integers"),
        (["--peer", "x", "--shapes", "1,2048,4", "0,8192,4"], "shape '0,8192,4': requests"),
        (["--peer", "x", "--shapes", "1,2048,257"], "rows at most 256"),
        (["--peer", "x", "--shapes", "2048,1048576,4"], "more tokens than an int32"),
        (["--peer", "x", "--json", "/nowhere/peer.json"], "--json=/nowhere/peer.json"),
        (["--peer", "/nowhere"], "--peer=/nowhere is no folder"),
    ],
)
def test_arguments_that_cannot_be(words, said, capsys):
    assert said in refusal(words, capsys)


def test_a_folder_without_the_kernels(wheel, capsys):
    gone = peer_kernels.files(wheel)[-1]
    gone.unlink()
    said = refusal(["--peer", str(wheel)], capsys)
    assert f"lacks {gone.relative_to(wheel)}: " in said


@pytest.mark.parametrize("absent", ["torch", "triton"])
def test_no_torch(wheel, absent, monkeypatch, capsys):
    found = {"torch": True, "triton": True, absent: None}
    monkeypatch.setattr(metadata.importlib.util, "find_spec", found.__getitem__)
    assert f"{absent} is not installed" in refusal(["--peer", str(wheel)], capsys)


@pytest.fixture
def torch_without_gpu(tmp_path, monkeypatch):
    """A torch and a triton that can be imported, by processes that are started too. They have no GPU."""
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "torch.py").write_text("class cuda:\n    is_available = staticmethod(lambda: False)\n")
    (folder / "triton.py").write_text("")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")


def test_no_gpu(wheel, torch_without_gpu, capsys):
    assert "torch sees no GPU" in refusal(["--peer", str(wheel), "--shapes", "1,64,2"], capsys)


def test_a_side_that_breaks(wheel, monkeypatch, capsys):
    monkeypatch.setattr(metadata.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setitem(metadata.SIDES, "theirs", "no_such_script.py")
    assert metadata.main(["--peer", str(wheel), "--shapes", "1,64,2"]) == 2
    err = capsys.readouterr().err
    assert "error: no_such_script.py ended with status 2" in err and "No such file" in err


def test_importing_the_script_imports_no_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    program = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(PEERS)!r}]; import metadata"
    root = str(PEERS.parents[1])
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# The peer's kernels


def test_the_kernels_are_loaded_without_their_packages(wheel, monkeypatch):
    texts = {
        "tables": "def normal_decode_set_metadata(): return 'tables'",
        "kpool": f"from {peer_kernels.MODULES['splits']} import splits\n"
        "def fused_dsa_target_verify_metadata_kpool(): return splits",
        "splits": "splits = 'splits'",
        "window": "from sglang.srt.utils import is_cpu, is_cuda, is_hip, is_musa, is_npu, is_xpu, next_power_of_2\n"
        "def assign_extend_cache_locs_uniform_func():\n"
        "    from sglang.srt.platforms import current_platform\n"
        "    systems = is_cpu(), is_hip(), is_musa(), is_npu(), is_xpu(), current_platform.is_out_of_tree()\n"
        "    return is_cuda(), any(systems), [next_power_of_2(n) for n in (1, 2, 3, 4, 5)]",
        "state": "def fused_replay_state_indices(): return 'state'",
    }
    for key, path in zip(peer_kernels.MODULES, peer_kernels.files(wheel), strict=True):
        path.write_text(texts[key])
    (wheel / "sglang-9.8.7.dist-info").mkdir()
    (wheel / "sglang-9.8.7.dist-info" / "METADATA").write_text("Metadata-Version: 2.4\nName: sglang\nVersion: 9.8.7\n")
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    kernels = peer_kernels.load(wheel)
    assert (kernels.tables(), kernels.kpool(), kernels.state()) == ("tables", "splits", "state")
    assert kernels.window() == (True, False, [1, 2, 4, 4, 8])
    assert peer_kernels.version(wheel) == "9.8.7"


def test_a_wheel_of_another_version(wheel, monkeypatch):
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    with pytest.raises(peer_job.Refused, match="normal_decode_set_metadata"):
        peer_kernels.load(wheel)
    assert peer_kernels.version(wheel) is None


def test_samples_are_taken_in_turn(monkeypatch):
    class Graph:
        def __init__(self, name):
            self.name = name

        def microseconds(self):
            order.append(self.name)
            return float(len(order))

    order = []
    monkeypatch.setitem(sys.modules, "torch", None)  # whether it is installed or not
    theirs = importlib.import_module("peer_theirs")
    monkeypatch.setattr(theirs, "WARM_UP_SECONDS", 0)
    samples = theirs.time_graphs({"a": Graph("a"), "b": Graph("b")}, 10)
    assert [len(taken) for taken in samples.values()] == [10, 10]
    taken = order[-20:]
    assert taken == ["a", "b"] * 10


# The same requests for both, and what counts as equal


def naive_peer(arrays, shape, page, pool, topk):
    """What the peer's contracts say of the arrays that it is given, request by request."""
    out = {work: {name: [] for name in names} for work, names in peer_job.OUTPUTS.items()}
    for work, found in out.items():
        given = peer_job.of_work(arrays, work)
        ends, rows = [0], [0]
        columns = given["tokens"].shape[1] // page
        for b in range(shape.B):
            committed, row = int(given["seq_lens"][b]), given["tokens"][given["req_rows"][b]]
            end, live = committed + shape.D, -(-(committed + shape.D) // page)
            ends.append(ends[-1] + end)
            found["cache_seqlens"].append(end)
            firsts = row[: live * page : page] // page
            if work == "kpool":
                for seen in range(committed + 1, end + 1):
                    attended = min(seen // pool * pool, topk) + seen % pool
                    rows.append(rows[-1] + attended)
                    found["seqlens_expanded"].append(seen)
                    found["dsa_cache_seqlens"].append(attended)
                    found["real_page_table"].append([*firsts, *[-7] * (columns - live)])
                continue
            maps = {"": given["full_v2p"], "swa_": given["swa_v2p"]}
            for kind, of in maps.items():
                found[f"{kind}page_table"].append([*np.maximum(of[firsts], 0), *[0] * (columns - live)])
            new = row[committed:end]
            found["virtual_loc"].append(new)
            for name, of in zip(("full_loc", "swa_loc"), maps.values(), strict=True):
                found[name].append([of[t // page] * page + t % page if of[t // page] >= 0 else 0 for t in new])
            found["positions"].append(range(committed, end))
            found["anchor_ids"].append([given["anchor"][b], *[-7] * (shape.D - 1)])
            slot = given["slot_of_req"][given["req_rows"][b]]
            found["state_slots"].append(given["state_v2p"][slot] if b < given["real"] else -1)
        found["cu_seqlens_k"] = ends
        if work == "kpool":
            found["dsa_cu_seqlens_k"] = rows
    return peer_job.flat({work: {k: np.array([*v]) for k, v in found.items()} for work, found in out.items()})


@pytest.fixture(scope="module")
def equal():
    """(job, inputs, theirs, ours) of one shape. Ours are real, theirs by definition; the samples are made up."""
    sizes = {"page": peer_inputs.PAGE, "pool": peer_inputs.POOL, "topk": peer_inputs.TOPK}
    job = peer_job.Job(peer="wheel", shapes=(SMALL,), runs=10, check=False, **sizes)
    works = peer_job.OUTPUTS
    inputs = peer_job.flat({work: peer_inputs.for_peer(peer_inputs.problem(work, SMALL)) for work in works})
    floor, floors = {"tiny op": [1.0] * 10}, {"touch": [1.4] * 10, "empty": [2.0] * 10}
    parts = {"window": [1.5] * 10, "tables": [2.25] * 10, "state": [1.25] * 10}
    their_times = {"step": {**floor, **parts, "all": [4.9, *[5.0] * 8, 5.1]}, "kpool": {**floor, "all": [3.0] * 10}}
    our_times = {"step": {**floors, "all": [2.4, *[2.5] * 8, 2.9]}, "kpool": {**floors, "all": [2.9] * 10}}
    versions = {"torch": "1", "triton": "2", "sglang": "0.5.23"}
    theirs = peer_job.Side(
        {"device": "A GPU", "versions": versions}, [their_times], [naive_peer(inputs, SMALL, **sizes)]
    )
    written = peer_job.flat({work: peer_ours.written(work, SMALL, "reference") for work in works})
    about = {"device": "A GPU", "driver": "580.1", "versions": {"jax": "3"}}
    return job, [inputs], theirs, peer_job.Side(about, [our_times], [written])


def told(sides, tmp_path, capsys, **changes):
    """Exit status, the tables' rows by their first cell, messages, and the JSON."""
    path = tmp_path / "peer.json"
    status = metadata.report(*sides, JsonFile(str(path)))
    out, err = capsys.readouterr()
    lines = [[cell for cell in line.split("  ") if cell] for line in out.splitlines()]
    return status, [[cell.strip() for cell in line] for line in lines if line], err, json.loads(path.read_text())


def test_ours_over_theirs(equal, tmp_path, capsys):
    status, lines, err, found = told(equal, tmp_path, capsys)
    assert status == 0 and err == ""
    assert "sglang 0.5.23" in lines[0] and "jax 3" in lines[0]
    assert lines[1] == ["theirs on A GPU, ours on A GPU, driver 580.1"]
    head, row = lines[2:4]
    # Theirs 5.0 - 1.0, ours 2.5 - 2.0; with the launches 5.0 and 2.5 - 1.4.
    expected = dict(
        outputs="equal",
        window="1.50",
        tables="2.25",
        state="1.25",
        theirs="5.00",
        ours="2.50",
        empty="2.00",
        spread="20%",
    )
    expected |= {"tiny op": "1.00", "theirs, net": "4.00", "ours, net": "0.50", "ratio": "0.125", "goal": "0.25"}
    assert dict(zip(head[1:], row[1:], strict=True)) == expected | {"with launches": "0.220"}
    assert row[0] == str(SMALL)
    head, row = lines[4:6]
    kpool = dict(zip(head[1:], row[1:], strict=True))
    assert kpool["ratio"] == "0.450" and kpool["goal"] == "-"
    step, kpool = found["rows"]
    assert step["ratio"] == pytest.approx(0.125) and step["met"] is True and kpool["met"] is None
    assert step["samples_us"]["theirs"] == equal[2].samples[0]["step"]
    assert found["environment"]["ours"]["driver"] == "580.1" and found["settings"]["runs"] == 10


@pytest.mark.parametrize("work", peer_job.OUTPUTS)
@pytest.mark.parametrize("names", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
def test_no_ratio_where_outputs_differ(equal, work, names, tmp_path, capsys):
    """One number of one array differs: of a table a live page, of the anchors the first column."""
    if names >= len(peer_job.OUTPUTS[work]):
        return
    job, inputs, theirs, ours = equal
    name = peer_job.OUTPUTS[work][names]
    arrays = {key: array.copy() for key, array in theirs.outputs[0].items()}
    arrays[f"{work}.{name}"].flat[0] += 1
    changed = peer_job.Side(theirs.environment, theirs.samples, [arrays])
    status, lines, err, found = told((job, inputs, changed, ours), tmp_path, capsys)
    assert status == 1
    assert f"error: {work} {SMALL}: outputs differ, {name}: 1 of " in err
    rows = {row["work"]: row for row in found["rows"]}
    other = next(key for key in rows if key != work)
    assert "ratio" not in rows[work] and rows[other]["ratio"] is not None
    assert [line for line in lines if line[0] == str(SMALL)][list(rows).index(work)] == [str(SMALL), "differ"]


def test_what_the_contracts_leave_open_does_not_count(equal):
    job, inputs, theirs, ours = equal
    arrays = {key: array.copy() for key, array in theirs.outputs[0].items()}
    for key, columns in (("kpool.real_page_table", slice(-1, None)), ("step.anchor_ids", slice(1, None))):
        assert (arrays[key][:, columns] == -7).all()
        arrays[key][:, columns] = 3
    changed = peer_job.Side(theirs.environment, theirs.samples, [arrays])
    assert [row.differences for row in peer_verdict.judge(job, inputs, changed, ours)] == [[], []]


def test_arrays_that_do_not_match(equal):
    job, inputs, theirs, ours = equal
    arrays = {key: array for key, array in ours.outputs[0].items() if key != "kpool.cu_seqlens_k"}
    arrays["kpool.cache_seqlens"] = arrays["kpool.cache_seqlens"][1:]
    arrays["kpool.real_page_table"] = arrays["kpool.real_page_table"][:, :-1]
    changed = peer_job.Side(ours.environment, ours.samples, [arrays])
    step, kpool = peer_verdict.judge(job, inputs, theirs, changed)
    assert step.differences == []
    columns = theirs.outputs[0]["kpool.real_page_table"].shape[1]
    assert kpool.differences == [
        "cache_seqlens: theirs is [9], ours [8]",
        "cu_seqlens_k: not among ours",
        f"real_page_table: theirs is [27, {columns}], ours [27, {columns - 1}]",
    ]


def test_only_outputs_wanted(equal, tmp_path, capsys):
    job, inputs, theirs, ours = equal
    sides = (peer_job.Side(side.environment, [{}], side.outputs) for side in (theirs, ours))
    status, lines, _, found = told((job, inputs, *sides), tmp_path, capsys)
    assert status == 0
    assert [line for line in lines if line[0] == str(SMALL)] == [[str(SMALL), "equal"]] * 2
    assert not any("ratio" in row for row in found["rows"])


def test_goals():
    goals = {str(shape): [peer_verdict.goal(work, shape) for work in peer_job.OUTPUTS] for shape in peer_inputs.SHAPES}
    assert goals == {
        "1,2048,4": [0.25, 0.6],
        "8,8192,4": [0.25, None],
        "48,2560,8": [0.25, None],
        "64,32768,4": [0.25, None],
        "256,8192,4": [0.1, None],
        "16,131072,6": [0.25, 0.06],
    }


@pytest.mark.parametrize(("ours", "cell", "met"), [(3.0, "0.250", True), (3.1, "0.275 missed", False)])
def test_a_missed_goal_is_marked(equal, ours, cell, met):
    theirs = equal[2].samples[0]["step"]
    row = peer_verdict.Row("step", SMALL, [], theirs, {"touch": [1.0], "empty": [2.0], "all": [ours]})
    assert row.met is met
    assert cell in peer_verdict.tables([row])[0][1]


def test_theirs_that_does_not_stand_out_has_no_ratio(equal):
    theirs = {**equal[2].samples[0]["step"], "all": [1.0]}
    row = peer_verdict.Row("step", SMALL, [], theirs, equal[3].samples[0]["step"])
    assert row.ratio is None and row.met is None


def test_json_to_standard_output(equal, capsys):
    assert metadata.report(*equal, JsonFile("-")) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["failures"] == []
    assert "ratio" in err


def test_what_the_bench_finds_wrong_is_a_failure(equal, tmp_path, capsys):
    job, inputs, theirs, ours = equal
    wrong = dataclasses.replace(ours, samples=[{"kpool": ours.samples[0]["kpool"]}], failures=["it differs"])
    status, lines, err, found = told((job, inputs, theirs, wrong), tmp_path, capsys)
    assert status == 1 and err == "error: ours: it differs\n" and found["failures"] == ["ours: it differs"]
    step, kpool = (line for line in lines if line[0] == str(SMALL))
    assert step == [str(SMALL), "equal"] and len(kpool) > 2


def test_our_side_is_timed_by_the_bench(equal, monkeypatch):
    """The bench's report is real, its samples are not: of the second shape the fused launch of KPool differs."""
    bench, fused = peer_ours.metadata, "fused, interpret"

    def run(settings):
        assert settings.widths == "" and settings.runs == 11
        rows = []
        for shape in settings.shapes.split():
            for kind in peer_inputs.KINDS.values():
                problem = peer_inputs.Problem(kind, *bench.parse_shape(shape))
                arms = "touch", "empty, interpret", fused, "reference"
                samples = {arm: timing.Samples((float(problem.B),) * 11) for arm in arms}
                wrong = {fused: "page_table[0] is wrong"} if (kind, problem.B) == (peer_inputs.KPOOL, 2) else {}
                rows.append(bench.Row(problem, {k: v for k, v in samples.items() if k not in wrong}, wrong))
        return bench.report(settings, ["interpret"], rows, [])

    monkeypatch.setattr(bench, "run", run)
    shapes = peer_job.Shape(1, 64, 2), peer_job.Shape(2, 70, 1)
    samples, failures = peer_ours.timed(dataclasses.replace(equal[0], shapes=shapes, runs=11), "interpret")
    one, two = ({"touch": [float(B)] * 11, "empty": [float(B)] * 11, "all": [float(B)] * 11} for B in (1, 2))
    assert samples == [{"step": one, "kpool": one}, {"step": two}]
    assert len(failures) == 1 and "page_table[0] is wrong" in failures[0]


# What the sides share


def test_a_job_travels(equal, tmp_path):
    job, _, theirs, _ = equal
    job.save(tmp_path)
    theirs.save(tmp_path, "theirs")
    assert peer_job.Job.load(tmp_path) == job
    back = peer_job.Side.load(tmp_path, "theirs", 1)
    assert (back.environment, back.samples) == (theirs.environment, theirs.samples)
    for name, array in theirs.outputs[0].items():
        np.testing.assert_array_equal(back.outputs[0][name], array)
