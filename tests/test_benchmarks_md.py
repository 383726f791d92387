"""BENCHMARKS.md says what the JSON files beside it say, cell by cell."""

import json
import re
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[1]
FILES = ROOT / "benchmarks" / "h200"


def read(name):
    return json.loads((FILES / name).read_text())


def shape(row):
    return ",".join(str(row[key]) for key in ("B", "live", "D"))


def metadata(row, *more):
    """Touch, empty, fused, its spread and its cost over the empty kernel, then the medians of more arms."""
    arms, fused = row["arms"], row["arms"]["fused, triton"]
    cells = [median(arms[name]["us"]) for name in ("touch", "empty, triton", "fused, triton")]
    spread = f"{min(fused['us']):.2f} to {max(fused['us']):.2f}"
    rest = [cells[2] - cells[1], *(median(arms[name]["us"]) for name in more)]
    return [*two(*cells), spread, *two(*rest)]


def two(*numbers):
    return [f"{number:.2f}" for number in numbers]


def full_swa(row):
    arms = ("separate, triton", "reference", "reference apart")
    touch, mine, separate, *references = (median(row["arms"][a]["us"]) for a in ("touch", "fused, triton", *arms))
    ratios = (mine - touch) / (separate - touch), (mine - touch) / (min(references) - touch)
    return [shape(row), *metadata(row, *arms), *(f"{ratio:.3f}" for ratio in ratios)]


def width(row):
    columns = row["columns"] * row["page_size"]
    return [str(columns), "cleared" if row["zero_tail"] else "left alone", *metadata(row)]


def peer(row, *parts):
    theirs, ours = ({k: median(v) for k, v in row["samples_us"][side].items()} for side in ("theirs", "ours"))
    net = theirs["all"] - theirs["tiny op"], ours["all"] - ours["empty"]
    ratios = net[1] / net[0], (ours["all"] - ours["touch"]) / theirs["all"]
    cells = [*(theirs[part] for part in parts), theirs["all"], theirs["tiny op"], ours["all"], ours["empty"], *net]
    return [shape(row["shape"]), *two(*cells), *(f"{ratio:.3f}" for ratio in ratios)]


def tables():
    """The bodies of the tables of numbers, cell by cell."""
    for block in re.split(r"\n(?!\|)", (ROOT / "BENCHMARKS.md").read_text()):
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines() if line.startswith("|")]
        if len(rows) > 2 and re.fullmatch(r"[\d,]+", rows[2][0]):
            yield rows[2:]


def expected():
    """The same as the files have them."""
    found, peers = read("metadata.json"), read("peers.json")["rows"]
    yield [full_swa(row) for row in found["rows"] if row["kind"] == "full+swa"]
    yield [[shape(row), *metadata(row)] for row in found["rows"] if row["kind"] == "kpool"]
    yield [width(row) for row in found["widths"]]
    yield [peer(row, "window", "tables", "state") for row in peers if row["work"] == "step"]
    yield [peer(row) for row in peers if row["work"] == "kpool"]


@pytest.mark.parametrize(("shown", "found"), [*zip(tables(), expected(), strict=True)])
def test_a_table_says_what_its_file_says(shown, found):
    assert shown == found


def test_the_files_say_where_they_come_from():
    for path in sorted(FILES.glob("*.json")):
        text = path.read_text()
        assert "NVIDIA H200" in text and '"versions"' in text, path.name
        assert json.loads(text).get("failures") == [], path.name
