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


def attention(row):
    """Microseconds over the floor of the kernel and of XLA, if it was timed, and what follows from them."""
    mine, other = over_floor(row, "kernel"), over_floor(row, "xla")
    cells = ["-", "-"] if other is None else [f"{other:.1f}", f"{mine / other:.3f}"]
    numbers = [f"{mine:.1f}", cells[0], f"{of_copy(row):.3f}", cells[1], f"{row['errors']['kernel']:.4f}"]
    return [request(row), str(row["D"]), f"{row['live_tokens']:,}", *numbers]


def request(row):
    return f"{row['B']},{row['context']}{',ragged' if row['ragged'] else ''}"


def over_floor(row, arm):
    arms = row["arms"]
    return median(arms[arm]["us"]) - median(arms["floor"]["us"]) if arm in arms else None


def of_copy(row):
    copied = median(read("attention.json")["copy"]["all_gb_per_s"]) * 1e3  # bytes a microsecond
    return row["live_bytes"] / copied / over_floor(row, "kernel")


def over_xla(row):
    return over_floor(row, "kernel") / over_floor(row, "xla")


def many(rows):
    return [row for row in rows if row["live_tokens"] >= 1 << 18]


def growth(rows):
    """How much longer D = 8 takes than D = 1, by the row of D = 8."""
    few = {(request(row), row["window"]): over_floor(row, "kernel") for row in rows if row["D"] == 1}
    pairs = [(row, few[request(row), row["window"]]) for row in rows if row["D"] == 8]
    return [(over_floor(row, "kernel") / one, row) for row, one in pairs]


def attention_goals():
    """The goals as the file names them, with what its samples say."""
    found = read("attention.json")
    rows, goals = found["rows"], found["goals"]
    long = [row for row in rows if row["window"] is None and row["context"] >= 32768]
    worst = [min(((of_copy(row), row) for row in many(rows)), key=by_number)]
    worst += [max(((over_xla(row), row) for row in rows if "xla" in row["arms"]), key=by_number)]
    worst += [max(growth(long), key=by_number)]
    worst += [max(((row["errors"]["kernel"], row) for row in rows), key=by_number)]
    cells = []
    for goal, (number, row) in zip(goals, worst, strict=True):
        met = number >= goal["limit"] if goal["bound"] == "at least" else number <= goal["limit"]
        at = f"{request(row)} D={row['D']} window {row['window'] or 'none'}"
        shown = f"{number:.4f}" if goal["limit"] < 0.1 else f"{number:.3f}"
        cells.append([goal["goal"], f"{goal['bound']} {goal['limit']:g}", shown, at, "met" if met else "missed"])
    return cells


def by_number(pair):
    return pair[0]


def speculative_round(config, row):
    us, host = row["us_a_round"]["us"], row["host_us_a_call"]["us"]
    needed, copied = row["weight_bytes"] + row["kv_bytes"], median(row["copy_gb_per_s"])
    numbers = [f"{median(us):.0f}", f"{min(us):.0f} to {max(us):.0f}", f"{needed / 1e9:.2f}", f"{copied:,.0f}"]
    share = needed / (copied * 1e3) / median(us)
    return [str(row["batch"]), config, *numbers, f"{share:.3f}", str(row["state_leaves"]), f"{median(host):,.0f}"]


def decoding(row, new):
    seconds = row["seconds"]
    speed, first = {}, {}
    for side, samples in seconds.items():
        alone = [whole - prefill for whole, prefill in zip(samples["whole"], samples["prefill"], strict=True)]
        speed[side], first[side] = (new - 1) * row["batch"] / median(alone), median(samples["prefill"]) * 1e3
    theirs, ours = speed["theirs"], speed["ours"]
    numbers = [
        f"{theirs:,.0f}",
        f"{ours:,.0f}",
        f"{ours / theirs:.2f}",
        f"{first['theirs']:.1f}",
        f"{first['ours']:.1f}",
    ]
    return [str(row["batch"]), row["arm"], f"{row['about']['ours']['accept_length']:.2f}", *numbers]


def generation(found, arm):
    numbers = [f"{median(arm['tokens_per_second']):,.0f}", f"{arm['over_plain']:.2f}", f"{arm['accept_length']:.2f}"]
    counts = [f"{arm['rounds']:,}", str(max(arm["dispatches"])), str(arm["equal"])]
    return [str(found["settings"]["num_requests"]), arm["drafter"], *numbers, *counts]


def unified_runs(name="unified_ab"):
    speed = read(f"{name}.json")["throughput"]["tokens_per_second"]
    return list(zip(speed["static"], speed["unified"], strict=True))


def unified_ratio(name="unified_ab"):
    return median(unified / static for static, unified in unified_runs(name))


def unified_with(name):
    """Of the runs with one drafter: medians, and microseconds of a round of the request that takes most of them."""
    found, runs = read(f"{name}.json"), unified_runs(name)
    ratios = [unified / static for static, unified in runs]
    rounds = max(request["verify_count"] for request in found["exact"]["static"]["requests"])
    static, unified = (
        median(run[arm]["seconds"] for run in found["throughput_runs"]) * 1e6 / rounds for arm in ("static", "unified")
    )
    speeds = [f"{median(samples):,.0f}" for samples in zip(*runs, strict=True)]
    spread = f"{min(ratios):.4f} to {max(ratios):.4f}"
    numbers = [*speeds, f"{median(ratios):.4f}", spread, str(rounds), f"{static:,.0f}", f"{unified - static:.1f}"]
    return [found["settings"]["drafter"], f"{found['memory']['static']['kv_bytes'] / 1e6:,.0f}", *numbers]


def fusion(name):
    found = read(f"{name}.json")
    off, on = (found["arms"][arm] for arm in ("off", "on"))
    speeds = [arm["all_tokens_per_second"] for arm in (off, on)]
    middle = [median(samples) for samples in speeds]
    spread = [f"{(max(samples) - min(samples)) / median(samples):.1%}".replace("%", " %") for samples in speeds]
    numbers = [*(f"{speed:,.0f}" for speed in middle), f"{middle[1] / middle[0]:.3f}", *spread]
    numbers += [f"{arm['round_us']:.0f}" for arm in (off, on)]
    numbers += [*two(off["metadata_us"], on["metadata_us"]), f"{on['metadata_us'] / off['metadata_us']:.3f}"]
    return [found["settings"]["dtype"], *numbers]


def blocks():
    """All tables, cell by cell."""
    for block in re.split(r"\n(?!\|)", (ROOT / "BENCHMARKS.md").read_text()):
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines() if line.startswith("|")]
        if len(rows) > 2:
            yield rows


def tables():
    """The bodies of the tables of numbers."""
    return [rows[2:] for rows in blocks() if re.fullmatch(r"[\d,]+", rows[2][0])]


def table(head):
    """The body of the table whose first column is called so."""
    (found,) = [rows[2:] for rows in blocks() if rows[0][0] == head]
    return found


def expected():
    """The same as the files have them."""
    found, peers = read("metadata.json"), read("peers.json")["rows"]
    yield [full_swa(row) for row in found["rows"] if row["kind"] == "full+swa"]
    yield [[shape(row), *metadata(row)] for row in found["rows"] if row["kind"] == "kpool"]
    yield [width(row) for row in found["widths"]]
    yield [peer(row, "window", "tables", "state") for row in peers if row["work"] == "step"]
    yield [peer(row) for row in peers if row["work"] == "kpool"]
    rows = read("attention.json")["rows"]
    for window in (None, 1024):
        yield [attention(row) for row in rows if row["window"] == window]
    configs = ("8b", "1b", "embedded")
    yield [speculative_round(config, row) for config in configs for row in read(f"round_{config}.json")["rows"]]
    found = read("decode.json")
    yield [decoding(row, found["settings"]["new"]) for row in found["rows"]]
    found = read("generate.json")
    yield [generation(found, arm) for arm in found["arms"]]
    runs = enumerate(unified_runs(), start=1)
    yield [[str(number), f"{a:,.0f}", f"{b:,.0f}", f"{b / a:.4f}"] for number, (a, b) in runs]


@pytest.mark.parametrize(("shown", "found"), [*zip(tables(), expected(), strict=True)])
def test_a_table_says_what_its_file_says(shown, found):
    assert shown == found


def test_memories_with_each_drafter_are_those_of_the_files():
    names = ("unified_ab", "unified_ab_dspark", "unified_ab_ngram")
    assert table("drafter") == [unified_with(name) for name in names]
    for name in names:
        found = read(f"{name}.json")
        runs = [found["exact"], *found["throughput_runs"]]
        assert all(all(run["comparison"]["ids"] + run["comparison"]["verify_counts"]) for run in runs)


def test_rounds_with_fused_metadata_are_those_of_the_files():
    assert table("dtype") == [fusion(name) for name in ("fusion_ab", "fusion_ab_bfloat16")]


def test_the_goals_of_attention_are_those_of_its_file():
    shown = table("goal")
    assert shown == attention_goals()
    assert [row[-1] == "met" for row in shown] == [goal["met"] for goal in read("attention.json")["goals"]]


def test_sentences_about_attention_say_what_its_file_says():
    rows = read("attention.json")["rows"]
    shares, timed = [of_copy(row) for row in many(rows)], [row for row in rows if "xla" in row["arms"]]
    faster = [1 / over_xla(row) for row in timed]
    among, even = ([1 / over_xla(row) for row in some] for some in (many(timed), [r for r in timed if not r["ragged"]]))
    copied = median(read("attention.json")["copy"]["all_gb_per_s"])
    windows = [ratio for ratio, _ in growth([row for row in rows if row["window"]])]
    spread = max((max(us) - min(us)) / median(us) for us in (row["arms"]["kernel"]["us"] for row in rows))
    xla = [row["errors"]["xla"] for row in timed]
    fewest = min(map(of_copy, rows))
    (at,) = [row["live_tokens"] for row in rows if of_copy(row) == fewest and row["context"] == 32768]
    said = [
        f"{copied:,.0f} GB/s",
        f"was {min(xla):.4f} to {max(xla):.4f}",
        f"largest is {max(map(of_copy, rows)) * copied:,.0f} GB/s",
        f"For {at:,} tokens the share is {fewest:.2f}",
        f"so that {max(faster):.1f} times as fast, the most, is partly this; of equal lengths it is {max(even):.1f}",
        f"eight rows take {min(windows):.2f} to {max(windows):.2f} times",
        f"by up to {spread:.0%}".replace("%", " %"),
    ]
    text = " ".join((ROOT / "BENCHMARKS.md").read_text().split())
    assert [sentence for sentence in said if sentence not in text] == []
    said = [
        f"{min(shares):.2f} to {max(shares):.2f} times the bandwidth of a copy",
        f"{min(among):.1f} to {max(among):.1f} times as fast as XLA's gather",
        f"{min(faster):.1f} to {max(faster):.1f} over all shapes",
    ]
    text = " ".join((ROOT / "README.md").read_text().split())
    assert [sentence for sentence in said if sentence not in text] == []


def test_what_was_aimed_at_for_rounds_is_said():
    """The share and the ratios that were met, and the one that was missed."""
    (goal,) = [goal for goal in read("round_8b.json")["goals"] if goal["goal"].startswith("share")]
    text = " ".join((ROOT / "BENCHMARKS.md").read_text().split())
    assert goal["met"] and f"the share of 8b was to be {goal['limit']} at least: **met**" in text
    ratio = unified_ratio()
    assert ratio < 1 and f"was to be 1.0 at least: **missed**, {ratio:.4f}." in text
    readme = " ".join((ROOT / "README.md").read_text().split())
    static, unified = (f"{round(median(samples), -2):,.0f}" for samples in zip(*unified_runs(), strict=True))
    assert f"{static} tokens/s over static and {unified} over unified memory" in readme
    dspark, ngram = (f"{100 * (1 - unified_ratio(f'unified_ab_{name}')):.1f} %" for name in ("dspark", "ngram"))
    assert f"is {100 * (1 - ratio):.1f} % slower, {dspark} with `dspark` and {ngram} with `ngram`" in readme
    (row,) = [row for row in read("round_8b.json")["rows"] if row["batch"] == 1]
    took = median(row["us_a_round"]["us"]) / 1000
    assert f"takes {took:.1f} ms: {goal['value']:.3f} of what the bandwidth" in readme
    over_plain = read("unified_ab.json")["throughput"]["static_over_plain"]
    assert abs(over_plain - 1) < 0.03 and f"The static arm is {over_plain:.4f} times as fast" in text
    assert f"static is within {100 * abs(over_plain - 1):.1f} % of plain" in readme
    by_median = (
        median(a for a, _ in unified_runs()) / read("unified_ab.json")["throughput"]["tokens_per_second"]["plain"]
    )
    assert f"by its median {by_median:.4f}." in text
    rows = read("decode.json")["rows"]
    assert all(row["difference"] is None and row["met"] for row in rows)
    over = {"plain": [], "drafts": []}
    for row in rows:
        cells = decoding(row, read("decode.json")["settings"]["new"])
        assert float(cells[5]) >= (1.0 if row["arm"] == "plain" else 1.5)
        over["plain" if row["arm"] == "plain" else "drafts"].append(float(cells[5]))
    one, many = over["plain"]
    assert f"decodes {one:.1f} and {many:.1f} times (1 and 16 requests)" in readme
    assert f"without drafts, {min(over['drafts']):.1f} to {max(over['drafts']):.1f} times with them" in readme
    one, many = (row["ratio_with_prefill"] for row in rows if row["arm"] == "plain")
    whole = [row["ratio_with_prefill"] for row in rows if row["arm"] != "plain"]
    drafts = f"{min(whole):.1f} to {max(whole):.1f}"
    assert f"With prefill the ratios are {one:.1f} and {many:.1f} without drafts and {drafts} with them." in text
    assert f"times with them, {drafts} with prefill." in readme


def test_what_fused_metadata_do_to_a_round_is_said():
    text, readme = (" ".join((ROOT / name).read_text().split()) for name in ("BENCHMARKS.md", "README.md"))
    longer = []
    for name in ("fusion_ab", "fusion_ab_bfloat16"):
        off, on = (read(f"{name}.json")["arms"][arm]["round_us"] for arm in ("off", "on"))
        longer.append((f"{on - off:.0f} us", f"{100 * (on / off - 1):.1f}"))
    (more, share), (more_16, share_16) = longer
    assert f"{more} ({share} %) longer in float32 and {more_16} ({share_16} %) in bfloat16" in text
    assert f"{share_16} % longer in bfloat16 and {share} in float32" in readme


def test_the_files_say_where_they_come_from():
    for path in sorted(FILES.glob("*.json")):
        text = path.read_text()
        assert "NVIDIA H200" in text and '"versions"' in text, path.name
        assert json.loads(text).get("failures") == [], path.name
