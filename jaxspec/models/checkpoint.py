"""Reads and writes model folders: config.json, model.safetensors (or its shards), tokenizer.json.

The models that ship with the library are such folders too, under `jaxspec/models/data`. Tensors are counted on the
way in: a file that lacks one, or holds one that the model has no place for, is refused with the names, because a weight
that is silently skipped gives a model that runs and is wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
import tokenizers

from jaxspec.errors import InputError
from jaxspec.models.config import Qwen3Config, eos_ids
from jaxspec.models.contract import Model, from_hybrid, from_qwen3
from jaxspec.models.hybrid import Hybrid
from jaxspec.models.hybrid_config import LINEAR, HybridConfig
from jaxspec.models.qwen3 import Qwen3

_DATA = Path(__file__).parent / "data"
_FLOATS = ("F64", "F32", "F16", "BF16")

Config = Qwen3Config | HybridConfig


@dataclasses.dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model in memory.

    Fields:
      module: the flax module; `module.apply(params, tokens, positions, attend, ...)` runs it.
      params: `{"params": tree}`, every array in `module.dtype`; a hybrid's decays (`A_log`, `dt_bias`) are float32.
      config: the model's shape; its `eos_token_ids` are those of generation_config.json where that names some.
      folder: where it was read from.
    """

    module: Qwen3 | Hybrid
    params: dict[str, Any]
    config: Config
    folder: Path

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.name

    @functools.cached_property
    def model(self) -> Model:
        """The model as a target: what `jaxspec.generate` and `jaxspec.make_spec_step` take."""
        return from_hybrid(self.module) if isinstance(self.module, Hybrid) else from_qwen3(self.module)

    @functools.cached_property
    def draft_model(self) -> Model:
        """The same model as a draft, for `jaxspec.DraftLM`: all layers in FULL pages, windows as masks.

        Raises:
          InputError: a layer accumulates a state. A draft model follows the target's FULL page table, which has no
            place for one, and nobody would take back what rejected drafts did to it.
        """
        if isinstance(self.module, Hybrid):
            layers = [i for i, kind in enumerate(self.config.layer_types) if kind == LINEAR]
            raise InputError(
                f"{self.name!r} cannot draft: its layers {layers} accumulate a state, and a draft model's layers must "
                "all keep keys and values; draft with a Qwen3 dense model, or with n-grams"
            )
        return from_qwen3(self.module, swa_pages=False)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, nothing added. Strip white space at the end of a prompt that is to be continued."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of token ids, special tokens left out."""
        return self.tokenizer.decode([int(i) for i in token_ids], skip_special_tokens=True)

    @functools.cached_property
    def tokenizer(self) -> tokenizers.Tokenizer:
        """The folder's tokenizer.json, read when first asked for.

        Raises:
          InputError: there is none, it cannot be read, or it has ids that the model has no embedding for.
        """
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise InputError(f"{self.folder} has no tokenizer.json: text needs one; token ids work without")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises plain Exception for a malformed file
            raise InputError(f"{path} cannot be read: {_one_line(error)}") from None
        if tokenizer.get_vocab_size() > self.config.vocab_size:
            raise InputError(
                f"{path} has {tokenizer.get_vocab_size()} ids but the model's vocab_size is {self.config.vocab_size}: "
                "the two do not belong together"
            )
        return tokenizer


def embedded_names() -> tuple[str, ...]:
    """Names of the models that ship with the library, sorted."""
    return tuple(sorted(path.parent.name for path in _DATA.glob("*/config.json")))


def embedded_path(name: str) -> Path:
    """Folder of the embedded model `name`; public software reads it as any other checkpoint.

    Raises:
      InputError: there is no such model; the message lists those there are.
    """
    if name not in embedded_names():
        raise InputError(f"{name!r} is no embedded model: there are {', '.join(embedded_names()) or 'none'}")
    return _DATA / name


def load(source: str | os.PathLike, dtype: Any = jnp.float32) -> Checkpoint:
    """Reads a model.

    Args:
      source: the name of an embedded model, or a folder with config.json and model.safetensors (or
        model.safetensors.index.json and its shards). A folder of the same name in the working directory is meant by
        `./name`. tokenizer.json is read only when the text side is used.
      dtype: float32 or bfloat16; the parameters are cast to it and the module computes in it.

    Returns:
      A `Checkpoint` whose arrays lie, uncommitted, on jax's default device.

    Raises:
      InputError: no such model; no config.json or one of no supported family (Qwen3 dense, Qwen3-Next with dense
        MLPs); weights that are missing, unexpected, misshapen or not floating point. The message names the folder and
        at most five tensors.

    Example:
      >>> model = load("target")                                            # doctest: +SKIP
      >>> ids = jnp.asarray([model.tokenizer.encode("import os").ids])      # doctest: +SKIP
      >>> rows = jnp.arange(ids.shape[1])[None]                             # doctest: +SKIP
      >>> logits, _, _ = model.module.apply(                                # doctest: +SKIP
      ...     model.params, ids, rows, dense_attend(model.config.windows))
    """
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
        raise InputError(f"dtype is {jnp.dtype(dtype).name}: a model is loaded in float32 or bfloat16")
    folder = _resolve(source)
    config = _read_config(folder)
    expected = _tensors(config)
    found = _tensor_files(folder)
    # Some writers store the rotary frequencies, or the head although it is the embedding.
    ignored = {name for name in found if name.endswith("rotary_emb.inv_freq")}
    if isinstance(config, HybridConfig):  # a draft head of its own, no part of the model
        ignored |= {name for name in found if name.startswith("mtp.")}
    if config.tie_word_embeddings:
        ignored.add("lm_head.weight")
    _refuse(folder, "lacks tensors", expected.keys() - found.keys())
    _refuse(folder, "has tensors that the model has no place for", found.keys() - expected.keys() - ignored)
    tree: dict[str, Any] = {}
    for path, names in _by_file(found, expected).items():
        with _open(path) as file:
            slices = {name: file.get_slice(name) for name in names}
            _refuse(
                folder,
                "has tensors of another shape than config.json asks for",
                (
                    f"{name} {tuple(part.get_shape())} instead of {expected[name].shape}"
                    for name, part in slices.items()
                    if tuple(part.get_shape()) != expected[name].shape
                ),
            )
            _refuse(
                folder,
                "has tensors that are not floating point",
                (f"{n} ({part.get_dtype()})" for n, part in slices.items() if part.get_dtype() not in _FLOATS),
            )
            for name in names:
                value = file.get_tensor(name)
                _put(tree, expected[name].path, jnp.asarray(expected[name].to_tree(value, dtype)))
    return Checkpoint(make_module(config, dtype), {"params": tree}, config, folder)


def make_module(config: Config, dtype: Any = jnp.float32) -> Qwen3 | Hybrid:
    """The flax module of a configuration's family."""
    return Hybrid(config, dtype) if isinstance(config, HybridConfig) else Qwen3(config, dtype)


def save(
    folder: str | os.PathLike,
    config: Config,
    params: Mapping[str, Any],
    dtype: Any = jnp.bfloat16,
    tokenizer: tokenizers.Tokenizer | None = None,
) -> Path:
    """Writes a folder that `load` and public software read back to the same model.

    Args:
      folder: made if absent. config.json, model.safetensors and, if given, tokenizer.json are replaced, each in one
        step and config.json last, so that a run that dies leaves no half file. Other files stay.
      config: the model's shape.
      params: `{"params": tree}` as the module takes it, in any floating dtype.
      dtype: what the weights are stored in, but for decays, which are float32.
      tokenizer: written as tokenizer.json.

    Returns:
      The folder.

    Raises:
      InputError: arrays of the model are missing, unknown or misshapen; windows that the format cannot say.
    """
    folder = Path(folder)
    settings = {**config.to_dict(), "dtype": jnp.dtype(dtype).name}
    expected = _tensors(config)
    arrays = dict(_leaves(params["params"]))
    by_path = {tensor.path: name for name, tensor in expected.items()}
    _refuse(folder, "cannot be written, params lack", ("/".join(p) for p in by_path.keys() - arrays.keys()))
    _refuse(folder, "cannot be written, params have unknown", ("/".join(p) for p in arrays.keys() - by_path.keys()))
    stored = {}
    for path, name in by_path.items():
        stored[name] = expected[name].to_file(np.asarray(arrays[path]), dtype)
    _refuse(
        folder,
        "cannot be written, misshapen params",
        (f"{n} {v.shape} instead of {expected[n].shape}" for n, v in stored.items() if v.shape != expected[n].shape),
    )
    folder.mkdir(parents=True, exist_ok=True)
    # "pt" tells readers that the layout is that of the public checkpoints: matrices as [out, in].
    _replace(folder / "model.safetensors", safetensors.numpy.save(stored, metadata={"format": "pt"}))
    if tokenizer is not None:
        _replace(folder / "tokenizer.json", tokenizer.to_str(pretty=False).encode())
    _replace(folder / "config.json", (json.dumps(settings, indent=2) + "\n").encode())
    return folder


def random_params(config: Config, seed: int, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Parameters `{"params": tree}` drawn by numpy from `seed`: the same on every backend and jax version.

    Matrices keep the scale of what they multiply, embeddings are short beside what the layers add (else a tied head
    would repeat its input for ever) and every norm scale differs from 1, so that mixing two of them up shows. States
    forget at all speeds, from a tenth of a row to a thousand rows.

    Example:
      >>> config = Qwen3Config(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
      ...                      num_attention_heads=2, num_key_value_heads=1, head_dim=8)
      >>> random_params(config, 0)["params"]["layers_0"]["k_proj"].shape
      (16, 8)
    """
    rng = np.random.default_rng(seed)
    tree: dict[str, Any] = {}
    for tensor in _tensors(config).values():
        value = rng.standard_normal(tensor.shape, np.float32)
        if len(tensor.shape) == 1:
            value = tensor.center + value * tensor.spread
        else:
            value /= np.sqrt(tensor.shape[-1], dtype=np.float32)
        _put(tree, tensor.path, jnp.asarray(tensor.to_tree(value, dtype)))
    return {"params": tree}


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A tensor of the file: its place in the parameter tree, its shape in the file, and how the tree holds it.

    Matrices are transposed, a convolution [C, 1, W] loses its middle axis, and decays stay float32. `center` and
    `spread` are those of a random vector.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    transposed: bool = False
    wide: bool = False
    center: float = 1.0
    spread: float = 0.125

    def to_tree(self, value: np.ndarray, dtype: Any) -> np.ndarray:
        value = value.T if self.transposed else value[:, 0] if value.ndim == 3 else value
        return np.ascontiguousarray(value).astype(np.float32 if self.wide else jnp.dtype(dtype))

    def to_file(self, value: np.ndarray, dtype: Any) -> np.ndarray:
        value = value.T if self.transposed else value[:, None] if len(self.shape) == 3 else value
        return np.ascontiguousarray(value).astype(np.float32 if self.wide else jnp.dtype(dtype))


def _tensors(config: Config) -> dict[str, _Tensor]:
    """Every tensor of the model under its public name."""
    hybrid = isinstance(config, HybridConfig)
    hidden, inner = config.hidden_size, config.intermediate_size
    scale = {"center": 0.0} if hybrid else {}  # of most norms the hybrid stores what is added to 1
    tensors = {
        "model.embed_tokens.weight": _Tensor(("embed_tokens",), (config.vocab_size, hidden)),
        "model.norm.weight": _Tensor(("norm",), (hidden,), **scale),
    }
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = _Tensor(("lm_head",), (config.vocab_size, hidden))
    for layer in range(config.num_hidden_layers):
        linear = hybrid and config.layer_types[layer] == LINEAR
        shapes = {
            "input_layernorm.weight": (hidden,),
            **(_delta_net_shapes(config) if linear else _attention_shapes(config, 2 if hybrid else 1)),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        for name, shape in shapes.items():
            last = name.removesuffix(".weight").rpartition(".")[2]
            how: dict[str, Any] = {"transposed": len(shape) == 2}
            how |= _DECAYS.get(last, {} if last == "norm" else scale)
            tensors[f"model.layers.{layer}.{name}"] = _Tensor((f"layers_{layer}", last), shape, **how)
    return tensors


def _attention_shapes(config, queries: int) -> dict[str, tuple[int, ...]]:
    """`queries` is 2 where each head's query is followed by the gate of its output."""
    hidden, head_dim = config.hidden_size, config.head_dim
    q_width, kv_width = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    return {
        "self_attn.q_proj.weight": (queries * q_width, hidden),
        "self_attn.k_proj.weight": (kv_width, hidden),
        "self_attn.v_proj.weight": (kv_width, hidden),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.k_norm.weight": (head_dim,),
        "self_attn.o_proj.weight": (hidden, q_width),
    }


def _delta_net_shapes(config) -> dict[str, tuple[int, ...]]:
    hidden, heads = config.hidden_size, config.linear_num_value_heads
    width = heads * config.linear_value_head_dim
    return {
        "linear_attn.in_proj_qkvz.weight": (config.conv_channels + width, hidden),
        "linear_attn.in_proj_ba.weight": (2 * heads, hidden),
        "linear_attn.conv1d.weight": (config.conv_channels, 1, config.linear_conv_kernel_dim),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (config.linear_value_head_dim,),
        "linear_attn.out_proj.weight": (hidden, width),
    }


_DECAYS = {"A_log": {"wide": True, "spread": 1.0}, "dt_bias": {"wide": True, "center": -3.0, "spread": 2.0}}


def _resolve(source) -> Path:
    if isinstance(source, str) and source in embedded_names():
        return embedded_path(source)
    folder = Path(source)
    if not folder.is_dir():
        known = ", ".join(embedded_names()) or "none"
        raise InputError(f"{str(source)!r} is neither an embedded model ({known}) nor a folder")
    return folder


def _read_config(folder: Path) -> Config:
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} has no config.json: a Hugging Face model folder is needed")
    try:
        settings = _read_json(folder / "config.json")
        family = HybridConfig if settings.get("model_type") == "qwen3_next" else Qwen3Config
        config = family.from_dict(settings)
        generation = folder / "generation_config.json"
        stops = eos_ids(_read_json(generation)) if generation.is_file() else ()
        return dataclasses.replace(config, eos_token_ids=stops) if stops else config
    except InputError as error:
        raise InputError(f"{folder}: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path.name} cannot be read: {_one_line(error)}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path.name} holds a {type(value).__name__}: it must be an object")
    return value


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Which file of the folder holds each tensor."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        files = [folder / "model.safetensors"]
    elif index.is_file():
        try:
            shards = sorted({str(name) for name in _read_json(index)["weight_map"].values()})
        except (InputError, KeyError, AttributeError) as error:
            raise InputError(f"{index} has no readable weight_map: {_one_line(error)}") from None
        files = [folder / shard for shard in shards]
        _refuse(folder, "lacks shards that its index names", (path.name for path in files if not path.is_file()))
    else:
        raise InputError(f"{folder} has neither model.safetensors nor model.safetensors.index.json: no weights to load")
    found = {}
    for path in files:
        with _open(path) as file:
            found.update(dict.fromkeys(file.keys(), path))
    return found


def _open(path: Path):
    try:
        return safetensors.safe_open(path, framework="np")
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"{path} cannot be read: {_one_line(error)}") from None


def _by_file(found, expected) -> dict[Path, list[str]]:
    files: dict[Path, list[str]] = {}
    for name in expected:
        files.setdefault(found[name], []).append(name)
    return files


def _refuse(folder: Path, what: str, names: Iterable[str]) -> None:
    """Raises, if there are any names, with the first five of them and how many more there are."""
    names = sorted(names)
    if names:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise InputError(f"{folder} {what}: {', '.join(names[:5])}{more}")


def _put(tree: dict[str, Any], path: tuple[str, ...], value) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _leaves(tree, prefix: tuple[str, ...] = ()):
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


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
