"""What the command line shows as it goes, and how its JSON file is written."""

import io
import json
import os
import pathlib

from jaxspec.cli import prompts, report
from jaxspec.cli.jsonfile import JsonFile
from jaxspec.cli.screen import Screen
from jaxspec.cli.stream import Completions, TextStream


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
