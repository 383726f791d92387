"""BENCHMARKS.md says what the JSON files beside it say."""

import json
import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = ROOT / "benchmarks" / "h200"


def numbers(value):
    """All numbers of a JSON value, and of each list of samples its median."""
    if isinstance(value, dict):
        for part in value.values():
            yield from numbers(part)
    elif isinstance(value, list):
        for part in value:
            yield from numbers(part)
        if value and all(isinstance(part, float) for part in value):
            yield statistics.median(value)
    elif isinstance(value, int | float):
        yield value


def rows_of(name):
    """{(which table, first cell): the numbers in the file that a table's row may show}."""
    found = {}
    for row in json.loads((FILES / name).read_text())["rows"]:
        shape = row.get("shape") or {key: row[key] for key in ("B", "live", "D")}
        kind = row.get("work") or row["kind"]
        found[kind, ",".join(str(shape[key]) for key in ("B", "live", "D"))] = list(numbers(row))
    return found


def tables(text):
    """Of each table its rows, split into cells."""
    for block in re.split(r"\n(?!\|)", text):
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines() if line.startswith("|")]
        if len(rows) > 2:
            yield rows[2:]


TABLES = [row for row in tables((ROOT / "BENCHMARKS.md").read_text()) if re.fullmatch(r"\d+,\d+,\d+", row[0][0])]


@pytest.mark.parametrize(
    ("number", "file", "kind"),
    [
        (0, "metadata.json", "full+swa"),
        (1, "metadata.json", "kpool"),
        (2, "peers.json", "step"),
        (3, "peers.json", "kpool"),
    ],
)
def test_a_table_has_the_numbers_of_its_file(number, file, kind):
    found = {shape: values for (of, shape), values in rows_of(file).items() if of == kind}
    rows = TABLES[number]
    assert [row[0] for row in rows] == list(found)
    for shape, *cells in rows:
        for shown in re.findall(r"\d+\.\d+", " ".join(cells)):
            digits = len(shown.partition(".")[2])
            assert shown in {f"{value:.{digits}f}" for value in found[shape]}, (shape, shown)


def test_the_files_say_where_they_come_from():
    for path in sorted(FILES.glob("*.json")):
        text = path.read_text()
        assert "NVIDIA H200" in text and '"versions"' in text, path.name
        assert json.loads(text).get("failures") == [], path.name
