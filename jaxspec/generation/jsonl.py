"""Results as JSON Lines: one line a finished prompt, appended when it is finished, with the fields of Spec-Bench.

A record, with more line breaks than it has:

    {"question_id": 81, "category": "writing", "answer_id": "1f..", "model_id": "my-model", "choices": [{"index": 0,
     "turns": ["text"], "decoding_steps": [20], "new_tokens": [64], "wall_time": [0.8], "accept_lengths": [4, 3, ..],
     "token_ids": [[7, 9, ..]], "accepted_drafts": [3, 2, ..], "finish_reason": "length", "rule": "greedy",
     "stop_string": null, "logprobs": null}], "tstamp": 1750000000.0, "settings": "9b.."}

What Spec-Bench's own scripts read is `question_id` and, of the first choice, `new_tokens`, `wall_time` and
`accept_lengths`; the rest of the choice makes the result whole again. `settings` is a digest of the prompt and of all
that its tokens hang on; a file that holds a record of other settings is not continued.

Source: the answer files of Spec-Bench (https://github.com/hemingkx/Spec-Bench).
"""

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.errors import InputError
from jaxspec.generation.results import RequestResult

_BEGIN = b'{"question_id": '  # of every line


def digest(settings: Mapping[str, Any]) -> str:
    """A short name for settings that JSON can hold: equal for equal ones.

    Example:
      >>> digest({"a": 1, "b": [2]}) == digest({"b": [2], "a": 1}), len(digest({}))
      (True, 24)
    """
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def to_record(
    result: RequestResult,
    *,
    question_id: int | str,
    settings: str,
    wall_time: float,
    category: str | None = None,
    model_id: str = "",
    decode: Callable[[list[int]], str] | None = None,
) -> dict[str, Any]:
    """The record of a result.

    Args:
      result: of the prompt.
      question_id: the prompt's name.
      settings: its `digest`.
      wall_time: seconds from the dispatch that let the prompt in to the arrival of its last token.
      category: of the prompt.
      model_id: who answers.
      decode: the text of token ids; without it the turn is null.
    """
    return {
        "question_id": question_id,
        "category": category,
        "answer_id": digest({"question_id": question_id, "settings": settings}),
        "model_id": model_id,
        "choices": [
            {
                "index": 0,
                "turns": [None if decode is None else decode(result.token_ids)],
                "decoding_steps": [result.verify_count],
                "new_tokens": [len(result.token_ids)],
                "wall_time": [wall_time],
                "accept_lengths": result.accept_lengths,
                "token_ids": [result.token_ids],
                "accepted_drafts": result.accepted_drafts,
                "finish_reason": result.finish_reason,
                "rule": result.rule,
                "stop_string": result.stop_string,
                "logprobs": result.logprobs,
            }
        ],
        "tstamp": time.time(),
        "settings": settings,
    }


def to_result(record: Mapping[str, Any]) -> RequestResult:
    """The result that a record of `to_record` was made of.

    Example:
      >>> result = RequestResult([5, 6, 7], "length", 1, [2], [1])
      >>> to_result(to_record(result, question_id=0, settings="", wall_time=0.5)) == result
      True
    """
    choice = record["choices"][0]
    same = [field.name for field in dataclasses.fields(RequestResult) if field.name in choice]
    values = {name: choice[name] for name in same}
    return RequestResult(**values | {"token_ids": choice["token_ids"][0], "verify_count": choice["decoding_steps"][0]})


class ResultFile:
    """A file of records that is appended to, and continued after a kill.

    Opening it reads what is there. A last line without its line break was being written when the process died: it is
    taken away, and its prompt is as good as never begun.

    Args:
      path: of the file; it is made if it is not there.
      settings: `digest` of each prompt's settings, by its question_id.

    Attributes:
      records: what was there, by question_id.

    Raises:
      InputError: the file cannot be read or written, holds a line that is no record, a question twice or one that is
        not asked, or a record of other settings.

    Example:
      >>> import tempfile
      >>> path = tempfile.mkdtemp() + "/results.jsonl"
      >>> result = RequestResult([5], "length", 0, [], [])
      >>> with ResultFile(path, {"q": "s"}) as file:
      ...     file.append(to_record(result, question_id="q", settings="s", wall_time=0.5))
      >>> with ResultFile(path, {"q": "s"}) as file:
      ...     list(file.records)
      ['q']
    """

    def __init__(self, path: str | os.PathLike, settings: Mapping[int | str, str]):
        self.path = Path(path)
        try:
            # Unbuffered: a line is one write, which an interrupt cannot cut.
            self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise InputError(f"out={str(path)!r} cannot be written: {error.strerror or error}") from None
        try:
            self.records = self._load(settings)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "ResultFile":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds a record as one line. Once this returns, no kill of the process can lose it."""
        line = memoryview(json.dumps(record).encode() + b"\n")
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            raise InputError(f"out={str(self.path)!r} cannot be written: {error.strerror or error}") from None

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _load(self, settings: Mapping[int | str, str]) -> dict[int | str, dict[str, Any]]:
        self._file.seek(0)
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        records = {}
        for number, line in enumerate(data[:whole].splitlines(), start=1):
            where = f"out={str(self.path)!r}, line {number}"
            try:
                record = json.loads(line)
                name, found = record["question_id"], record["settings"]
                to_result(record)
            except (ValueError, KeyError, TypeError, IndexError):
                raise InputError(f"{where}: no record of a result; give another file") from None
            if name in records:
                raise InputError(f"{where}: question_id {name!r} is there twice; give another file")
            if name not in settings:
                raise InputError(f"{where}: question_id {name!r} is not among the prompts; give another file")
            if found != settings[name]:
                raise InputError(
                    f"{where}: question_id {name!r} was answered with another prompt or other settings; give another "
                    "file, or the settings that it was begun with"
                )
            records[name] = record
        if torn := data[whole:]:
            if torn[: len(_BEGIN)] != _BEGIN[: len(torn)]:
                raise InputError(f"out={str(self.path)!r}: its last line is no record of a result; give another file")
            self._file.truncate(whole)
        return records


def check_names(ids: Sequence[int | str]) -> None:
    """Raises InputError unless the names of the prompts are all different, and numbers or texts."""
    seen = set()
    for name in ids:
        if isinstance(name, bool) or not isinstance(name, int | str):
            raise InputError(f"ids: {name!r} is neither an integer nor a text")
        if name in seen:
            raise InputError(f"ids: {name!r} is there twice; each prompt needs a name of its own")
        seen.add(name)
