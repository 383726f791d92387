"""The files of a model's or draft's folder: config.json, and model.safetensors or its shards.

Tensors are counted on the way in and out. A kind of model says what it holds as a table, name -> tensor; a tensor has

    path                    its place in the parameter tree
    shape                   in the file
    integer                 whether it holds ids and not weights
    to_tree(value, dtype)   the file's array as the tree holds it
    to_file(value, dtype)   the inverse
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
import tokenizers

from jaxspec.errors import InputError

_FLOATS = ("F64", "F32", "F16", "BF16")
_INTEGERS = ("I64", "I32")


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
      InputError: it cannot be read, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path.name} cannot be read: {one_line(error)}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path.name} holds a {type(value).__name__}: it must be an object")
    return value


def tensor_files(folder: Path) -> dict[str, Path]:
    """Which file of the folder holds each tensor.

    Raises:
      InputError: there are no weights, or a file cannot be read.
    """
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        files = [folder / "model.safetensors"]
    elif index.is_file():
        try:
            shards = sorted({str(name) for name in read_json(index)["weight_map"].values()})
        except (InputError, KeyError, AttributeError) as error:
            raise InputError(f"{index} has no readable weight_map: {one_line(error)}") from None
        files = [folder / shard for shard in shards]
        refuse(folder, "lacks shards that its index names", (path.name for path in files if not path.is_file()))
    else:
        raise InputError(f"{folder} has neither model.safetensors nor model.safetensors.index.json: no weights to load")
    found = {}
    for path in files:
        with _open(path) as file:
            found.update(dict.fromkeys(file.keys(), path))
    return found


def read_tree(folder: Path, table: Mapping[str, Any], files: Mapping[str, Path], dtype: Any) -> dict[str, Any]:
    """The tensors of a table as a parameter tree.

    Args:
      folder: named in messages.
      table: the tensors, by the names that the files have for them; all are there.
      files: from `tensor_files`.
      dtype: of weights.

    Raises:
      InputError: a tensor has another shape, or holds something else than it should.
    """
    tree: dict[str, Any] = {}
    by_file: dict[Path, list[str]] = {}
    for name in table:
        by_file.setdefault(files[name], []).append(name)
    for path, names in by_file.items():
        with _open(path) as file:
            slices = {name: file.get_slice(name) for name in names}
            shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
            refuse(
                folder,
                "has tensors of another shape than config.json asks for",
                (f"{n} {shape} instead of {table[n].shape}" for n, shape in shapes.items() if shape != table[n].shape),
            )
            kinds = {name: part.get_dtype() for name, part in slices.items()}
            for words, known, integer in (("floating point", _FLOATS, False), ("integers", _INTEGERS, True)):
                strange = (f"{n} ({k})" for n, k in kinds.items() if table[n].integer == integer and k not in known)
                refuse(folder, f"has tensors that are not {words}", strange)
            for name in names:
                put(tree, table[name].path, jnp.asarray(table[name].to_tree(file.get_tensor(name), dtype)))
    return tree


def stored_tensors(
    folder: Path, table: Mapping[str, Any], params: Mapping[str, Any], dtype: Any, *, optional: Iterable[str] = ()
) -> dict[str, np.ndarray]:
    """The arrays of a parameter tree by their names in the file, as the file holds them.

    Args:
      folder: named in messages.
      table: the tensors, by name.
      params: the tree.
      dtype: what weights are stored in.
      optional: names that the tree may lack.

    Raises:
      InputError: arrays are missing, unknown or misshapen.
    """
    arrays = dict(_leaves(params))
    by_path = {tensor.path: name for name, tensor in table.items()}
    missing = (path for path, name in by_path.items() if path not in arrays and name not in set(optional))
    refuse(folder, "cannot be written, params lack", map(_spell, missing))
    refuse(folder, "cannot be written, params have unknown", map(_spell, arrays.keys() - by_path.keys()))
    stored = {
        name: table[name].to_file(np.asarray(arrays[path]), dtype) for path, name in by_path.items() if path in arrays
    }
    refuse(
        folder,
        "cannot be written, misshapen params",
        (f"{n} {v.shape} instead of {table[n].shape}" for n, v in stored.items() if v.shape != table[n].shape),
    )
    return stored


def write_folder(
    folder: Path,
    stored: Mapping[str, np.ndarray],
    settings: Mapping[str, Any],
    tokenizer: tokenizers.Tokenizer | None = None,
) -> None:
    """Writes model.safetensors, tokenizer.json if given, and config.json, each in one step and config.json last.

    The folder is made if absent; other files stay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # "pt" tells readers that the layout is that of the public checkpoints: matrices as [out, in].
    _replace(folder / "model.safetensors", safetensors.numpy.save(dict(stored), metadata={"format": "pt"}))
    if tokenizer is not None:
        _replace(folder / "tokenizer.json", tokenizer.to_str(pretty=False).encode())
    _replace(folder / "config.json", (json.dumps(settings, indent=2) + "\n").encode())


def refuse(folder: Path, what: str, names: Iterable[str]) -> None:
    """Raises InputError, if there are any names, with the first five of them and how many more there are."""
    names = sorted(names)
    if names:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise InputError(f"{folder} {what}: {', '.join(names[:5])}{more}")


def put(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Puts a value in its place of a tree, whose inner nodes are made as they are needed."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def one_line(error: Exception) -> str:
    """An error's message without line breaks."""
    return " ".join(str(error).split())


def _open(path: Path):
    try:
        return safetensors.safe_open(path, framework="np")
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"{path} cannot be read: {one_line(error)}") from None


def _spell(path: tuple[str, ...]) -> str:
    return "/".join(path[1:] if path[0] == "params" else path)


def _leaves(tree: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*prefix, key))
        else:
            yield (*prefix, key), value


def _replace(path: Path, data: bytes) -> None:
    """Writes `path` in one step: readers see the old file or the new one."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(data)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
