"""Where prompts come from, and what is refused before anything runs."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import jaxspec.models
from jaxspec.errors import InputError
from jaxspec.models import Checkpoint

SETTINGS = ("temperature", "top_k", "top_p", "seed")


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A request to complete.

    Attributes:
      id: its name in the output.
      place: how an error message calls it.
      text: the prompt, None if it came as ids.
      token_ids: its ids, None until `encode` has made them.
      settings: how it samples where the flags shall not decide: temperature, top_k, top_p, seed.
    """

    id: str
    place: str
    text: str | None = None
    token_ids: list[int] | None = None
    settings: dict[str, float] = dataclasses.field(default_factory=dict)


def shipped_file() -> Path:
    """The prompts that come with the package: beginnings of code that the embedded models have not seen."""
    return Path(jaxspec.models.__file__).parent / "data" / "prompts.jsonl"


def collect(texts: Sequence[str], file: str | None) -> list[Prompt]:
    """The prompts of the flags, in their order; the shipped ones if there are none."""
    prompts = [Prompt(id=f"prompt-{i}", place=f"--prompt {i}", text=text) for i, text in enumerate(texts)]
    if file is not None:
        prompts += read_file(Path(file))
    return prompts or read_file(shipped_file())


def read_file(path: Path) -> list[Prompt]:
    """Reads a JSONL file; each line holds an object with "prompt" (text) or "token_ids" (a list), and perhaps "id" and
    any of "temperature", "top_k", "top_p" and "seed".

    Raises:
      InputError: the file cannot be read or holds no prompts, or a line, named by its number, is not such an object.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InputError(f"prompt file {path} cannot be read: {error.strerror or error}") from None
    prompts = [_parse(line, path, number) for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise InputError(f'prompt file {path} holds no prompts: write one JSON object a line, with a field "prompt"')
    return prompts


def _parse(line: bytes, path: Path, number: int) -> Prompt:
    place = f"{path} line {number}"
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise InputError(f"{place} is not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise InputError(
            f'{place} holds a {type(entry).__name__}: it must be an object with a field "prompt" or "token_ids"'
        )
    if ("prompt" in entry) == ("token_ids" in entry):
        raise InputError(
            f'{place} must have one of the fields "prompt" and "token_ids"; it has {", ".join(entry) or "no field"}'
        )
    name = entry.get("id", f"line-{number}")
    if not isinstance(name, str | int) or isinstance(name, bool):
        raise InputError(f'{place}: "id" is {json.dumps(name)[:40]}: it must be a string or a whole number')
    settings = {key: entry[key] for key in SETTINGS if key in entry}
    if "prompt" in entry:
        if not isinstance(entry["prompt"], str):
            raise InputError(f'{place}: "prompt" is {json.dumps(entry["prompt"])[:40]}: it must be a string')
        return Prompt(str(name), place, text=entry["prompt"], settings=settings)
    ids = entry["token_ids"]
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        raise InputError(f'{place}: "token_ids" must be a list of whole numbers')
    return Prompt(str(name), place, token_ids=ids, settings=settings)


def encode(prompts: Sequence[Prompt], target: Checkpoint) -> list[Prompt]:
    """The prompts with their token ids.

    White space at the end of a text is left out: in training text the line break or indent after a word is one token
    with what follows it, so a prompt that ends in it is something the model has never seen.

    Raises:
      InputError: a prompt is empty, leaves no room in the model's context, or has an id that the model does not know.
    """
    encoded = []
    for prompt in prompts:
        ids = prompt.token_ids
        if ids is None:
            try:
                prompt.text.encode()
            except UnicodeEncodeError as error:
                half = error.object[error.start]
                raise InputError(f"{prompt.place} holds {half!r}, half a character: write it as UTF-8") from None
            ids = target.encode(prompt.text.rstrip())
        if not ids:
            raise InputError(f"{prompt.place} is empty, white space at the end aside: give at least one token")
        limit, size = target.config.max_position_embeddings, target.config.vocab_size
        if len(ids) >= limit:
            raise InputError(
                f"{prompt.place} has {len(ids)} tokens: the model's context of {limit} leaves room for {limit - 1} "
                "and one new token"
            )
        bad = [i for i in ids if not 0 <= i < size]
        if bad:
            raise InputError(f"{prompt.place} holds token id {bad[0]}, outside the model's 0 .. {size - 1}")
        encoded.append(dataclasses.replace(prompt, token_ids=ids))
    return encoded
