"""Reads and writes the folders of drafts that are trained for one target: DSPARK, DFLASH and EAGLE-3.

They hold what the draft has of its own; embedding and head are the target's arrays. What kind a folder is,
`architectures` of its config.json says. Tensors are counted, as those of models are: with a weight that is silently
skipped a draft still runs, and all that shows is that little of it is accepted.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.errors import InputError
from jaxspec.models.block_config import BlockDraftConfig
from jaxspec.models.block_draft import BlockDraft
from jaxspec.models.block_format import DFLASH_FORMAT, DSPARK_FORMAT
from jaxspec.models.checkpoint import Checkpoint
from jaxspec.models.draft_tensors import DraftFormat
from jaxspec.models.eagle import EAGLE3_FORMAT, Eagle3
from jaxspec.models.eagle_config import Eagle3Config
from jaxspec.models.folder import put, read_json, read_tree, refuse, stored_tensors, tensor_files, write_folder

_DATA = Path(__file__).parent / "data" / "drafts"

FORMATS = {form.kind: form for form in (DSPARK_FORMAT, DFLASH_FORMAT, EAGLE3_FORMAT)}

DraftConfig = BlockDraftConfig | Eagle3Config


@dataclasses.dataclass(frozen=True, eq=False)
class DraftCheckpoint:
    """A draft in memory.

    Fields:
      kind: "dspark", "dflash" or "eagle3".
      draft: the network, which a drafter of that kind takes.
      params: `{"draft": tree, "embed_tokens": [V, H]}`, and `lm_head` where the target has one of its own; the last two
        are the target's arrays. The tree is in the dtype asked for.
      folder: where it was read from.
      notes: a line each on what the folder holds and the draft does without.
    """

    kind: str
    draft: BlockDraft | Eagle3
    params: dict[str, Any]
    folder: Path
    notes: tuple[str, ...] = ()


def load_draft(
    source: str | os.PathLike, target: Checkpoint, dtype: Any = jnp.float32, *, kind: str | None = None
) -> DraftCheckpoint:
    """Reads a draft of a target.

    Args:
      source: a folder with config.json and model.safetensors (or model.safetensors.index.json and its shards);
        `embedded_draft` gives those that ship with the library.
      target: the model it shall draft for.
      dtype: float32 or bfloat16; its weights are cast to it and it computes in it.
      kind: refuse a folder of another kind; None takes any.

    Returns:
      A `DraftCheckpoint` whose arrays lie, uncommitted, on jax's default device.

    Raises:
      InputError: no such folder; no config.json or one of no kind of draft, or of another one than asked for; a draft
        whose sizes are not those of the target; weights that are missing, unexpected, misshapen or of another type. The
        message names the folder and at most five tensors.

    Example:
      >>> target = load("target")                                           # doctest: +SKIP
      >>> draft = load_draft(embedded_draft("dspark", "target"), target)    # doctest: +SKIP
      >>> drafter = jaxspec.DSparkDrafter(draft.draft)                      # doctest: +SKIP
      >>> params = jaxspec.Params(target.params, draft.params)              # doctest: +SKIP
    """
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
        raise InputError(f"dtype is {jnp.dtype(dtype).name}: a draft is loaded in float32 or bfloat16")
    folder = Path(source)
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} has no config.json: a folder with a draft is needed")
    try:
        settings = read_json(folder / "config.json")
        form = _format_of(settings, kind)
        config = form.read(settings, target.config)
    except InputError as error:
        raise InputError(f"{folder}: {error}") from None

    files, spelled = tensor_files(folder), {}
    for name in files:
        spelled.setdefault(form.alias(name.removeprefix("model.")), []).append(name)
    twice = [names for names in spelled.values() if len(names) > 1]
    refuse(folder, "has tensors under two names", (" and ".join(sorted(names)) for names in twice))
    table = form.tensors(config)
    wanted = {name for name, tensor in table.items() if not tensor.optional}
    refuse(folder, "lacks tensors", wanted - spelled.keys())
    extra = spelled.keys() - table.keys()
    refuse(folder, f"has tensors that a draft of kind {form.kind} has no place for", extra - set(form.ignored))
    table = {spelled[name][0]: tensor for name, tensor in table.items() if name in spelled}
    tree = read_tree(folder, table, files, dtype)
    try:
        form.check(config, tree)
    except InputError as error:
        raise InputError(f"{folder}: {error}") from None

    notes = (*form.notes(settings), *([f"not read: {', '.join(sorted(extra))}"] if extra else []))
    return DraftCheckpoint(
        form.kind, form.build(config, dtype), {"draft": tree, **shared_arrays(target.params)}, folder, notes
    )


def save_draft(
    folder: str | os.PathLike, config: DraftConfig, params: Mapping[str, Any], dtype: Any = jnp.bfloat16
) -> Path:
    """Writes a folder that `load_draft` and public software read back to the same draft.

    Args:
      folder: made if absent. config.json and model.safetensors are replaced, each in one step and config.json last, so
        that a run that dies leaves no half file. Other files stay.
      config: the draft's shape.
      params: the draft's own tree, `DraftCheckpoint.params["draft"]`, in any floating dtype.
      dtype: what the weights are stored in.

    Returns:
      The folder.

    Raises:
      InputError: arrays of the draft are missing, unknown or misshapen; a shape that the format cannot say.
    """
    folder, form = Path(folder), _format_for(config)
    settings = {**config.to_dict(), "dtype": jnp.dtype(dtype).name}
    table = form.tensors(config)
    optional = [name for name, tensor in table.items() if tensor.optional]
    write_folder(folder, stored_tensors(folder, table, params, dtype, optional=optional), settings)
    return folder


def random_draft_params(config: DraftConfig, seed: int, dtype: Any = jnp.float32) -> dict[str, Any]:
    """The draft's own tree drawn by numpy from `seed`: the same on every backend and jax version.

    Matrices keep the scale of what they multiply, and every norm scale differs from 1, so that mixing two of them up
    shows. Arrays that a draft can do without are left out; ids of a draft's own vocabulary are the target's first ones.

    Example:
      >>> config = BlockDraftConfig("dspark", block_size=3, target_layer_ids=(0, 2), mask_token_id=0, vocab_size=64,
      ...                           hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
      ...                           num_key_value_heads=1, head_dim=8, markov_rank=4)
      >>> random_draft_params(config, 0)["fc"].shape
      (32, 16)
    """
    rng = np.random.default_rng(seed)
    tree: dict[str, Any] = {}
    for name, tensor in _format_for(config).tensors(config).items():
        if tensor.optional:
            continue
        value = rng.standard_normal(tensor.shape, np.float32)
        if tensor.integer:
            value = np.zeros(tensor.shape, np.int64)
        elif len(tensor.shape) == 1:
            value = value / 8 + (0 if name.endswith("bias") else 1)
        else:
            value = value / np.sqrt(tensor.shape[-1], dtype=np.float32)
        put(tree, tensor.path, jnp.asarray(tensor.to_tree(value, dtype)))
    return tree


def embedded_draft(kind: str, target_name: str) -> Path | None:
    """Folder of the draft of a kind for an embedded target that ships with the library, or None if there is none.

    Args:
      kind: "dspark", "dflash" or "eagle3".
      target_name: `Checkpoint.name` of the target.

    Example:
      >>> embedded_draft("dspark", "no such target") is None
      True
    """
    folder = _DATA / f"{kind}_{target_name}"
    return folder if (folder / "config.json").is_file() else None


def _format_of(settings: Mapping[str, Any], kind: str | None) -> DraftFormat:
    names = settings.get("architectures")
    names = names if isinstance(names, list) else []
    forms = [form for form in FORMATS.values() if set(form.architectures) & set(map(str, names))]
    if len(forms) != 1:
        known = ", ".join(name for form in FORMATS.values() for name in form.architectures)
        raise InputError(f"architectures is {settings.get('architectures')!r}: a draft's folder names one of {known}")
    if kind not in (None, forms[0].kind):
        raise InputError(
            f"architectures is {names!r}, a draft of kind {forms[0].kind!r}, and {kind!r} is asked for: give another "
            f"folder, or draft with {forms[0].kind!r}"
        )
    return forms[0]


def _format_for(config: DraftConfig) -> DraftFormat:
    return FORMATS[config.algorithm] if isinstance(config, BlockDraftConfig) else EAGLE3_FORMAT


def shared_arrays(params: Mapping[str, Any]) -> dict[str, Any]:
    """Of a target's params the arrays that a draft computes with: embedding, and head where it is one of its own."""
    return {name: value for name, value in params["params"].items() if name in ("embed_tokens", "lm_head")}
