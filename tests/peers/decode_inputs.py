"""The model's shape and the prompts of the decode comparison. Puts nothing on a device."""

from pathlib import Path

import numpy as np
from peer_job import Refused

from jaxspec import InputError
from jaxspec.cli import prompts
from jaxspec.models import Checkpoint, Qwen3Config, embedded_names, embedded_path
from jaxspec.models.checkpoint import make_module
from jaxspec.models.folder import read_json

DRAFTERS = ("ngram", "draft_lm", "dspark")  # for the embedded target
CUT = 8  # tokens that the prompts lose each time that they are used again
LONGEST = 96  # tokens of a random prompt


def find(model: str) -> Path:
    """The folder of an embedded model, or the one that is named.

    Raises:
      Refused: there is none.
    """
    folder = embedded_path(model) if model in embedded_names() else Path(model).resolve()
    if not (folder / "config.json").is_file():
        known = ", ".join(embedded_names())
        raise Refused(f"--model={model} is neither an embedded model ({known}) nor a folder with config.json")
    return folder


def read_shape(model: str) -> Qwen3Config:
    """Its configuration.

    Raises:
      Refused: it is no Qwen3 dense model.
    """
    try:
        return Qwen3Config.from_dict(read_json(find(model) / "config.json"))
    except InputError as error:
        raise Refused(f"--model={model}: the loop that ours is compared with runs Qwen3 dense only; {error}") from None


def read_prompts(model: str, count: int) -> list[list[int]]:
    """Token ids of `count` prompts, all of them different.

    They are those that ship with the package, again and again, each time 8 tokens shorter. A folder without
    tokenizer.json has random ids in their place, 1 to 96 tokens a prompt.
    """
    folder, shape = find(model), read_shape(model)
    if not (folder / "tokenizer.json").is_file():
        rng = np.random.default_rng(0)
        lengths = rng.integers(1, min(LONGEST, shape.max_position_embeddings // 2), count, endpoint=True)
        return [rng.integers(0, shape.vocab_size, length).tolist() for length in lengths]
    target = Checkpoint(make_module(shape), {}, shape, folder)
    encoded = [prompt.token_ids for prompt in prompts.encode(prompts.collect([], None), target)]
    found = []
    for number in range(count):
        ids = encoded[number % len(encoded)]
        found.append(ids[: max(len(ids) - CUT * (number // len(encoded)), 1)])
    return found


def drafters_for(model: str) -> list[str]:
    """Who drafts where nobody says: of a folder's tokenizer and features the drafts that ship know nothing."""
    return list(DRAFTERS) if model == "target" else ["ngram"]
