"""Reads and writes model folders: config.json, model.safetensors (or its shards), tokenizer.json.

The models that ship with the library are such folders too, under `jaxspec/models/data`. Tensors are counted on the
way in: a file that lacks one, or holds one that the model has no place for, is refused with the names, because a weight
that is silently skipped gives a model that runs and is wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import tokenizers

from jaxspec.errors import InputError
from jaxspec.models.config import Qwen3Config, eos_ids
from jaxspec.models.contract import Model, MTPBlocks, blocks_of_glm, from_glm, from_hybrid, from_qwen3
from jaxspec.models.folder import (
    one_line,
    put,
    read_json,
    read_tree,
    refuse,
    stored_tensors,
    tensor_files,
    write_folder,
)
from jaxspec.models.glm import Glm
from jaxspec.models.glm_config import SPARSE, GlmConfig
from jaxspec.models.hybrid import Hybrid
from jaxspec.models.hybrid_config import LINEAR, HybridConfig
from jaxspec.models.qwen3 import Qwen3

_DATA = Path(__file__).parent / "data"

Config = Qwen3Config | HybridConfig | GlmConfig
Module = Qwen3 | Hybrid | Glm


@dataclasses.dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model in memory.

    Fields:
      module: the flax module; `module.apply(params, tokens, positions, attend, ...)` runs it.
      params: `{"params": tree}`, every array in `module.dtype`, but for what the public format keeps in float32: the
        decays of linear layers (`A_log`, `dt_bias`) and, of a `Glm`, convolutions and the small arrays of an indexer.
      config: the model's shape; its `eos_token_ids` are those of generation_config.json where that names some.
      folder: where it was read from.
      blocks: parameters of the MTP blocks, by name; empty where there are none.
    """

    module: Module
    params: dict[str, Any]
    config: Config
    folder: Path
    blocks: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.name

    @functools.cached_property
    def model(self) -> Model:
        """The model as a target: what `jaxspec.generate` and `jaxspec.make_spec_step` take."""
        family = {Glm: from_glm, Hybrid: from_hybrid, Qwen3: from_qwen3}[type(self.module)]
        return family(self.module)

    @functools.cached_property
    def mtp(self) -> MTPBlocks:
        """The model's MTP blocks, for `jaxspec.MTPDrafter`.

        Raises:
          InputError: it has none.
        """
        if not self.blocks:
            raise InputError(f"{self.name!r} has no MTP block to draft with: draft with another model or with n-grams")
        return blocks_of_glm(self.module)

    @functools.cached_property
    def mtp_params(self) -> dict[str, Any]:
        """Parameters of `mtp`: `blocks`, and embedding and head, which are the model's own arrays."""
        shared = {k: v for k, v in self.params["params"].items() if k in ("embed_tokens", "lm_head")}
        return {"blocks": self.blocks, **shared}

    @functools.cached_property
    def draft_model(self) -> Model:
        """The same model as a draft, for `jaxspec.DraftLM`: all layers in FULL pages, windows as masks.

        Raises:
          InputError: a layer accumulates a state. A draft model follows the target's FULL page table, which has no
            place for one, and nobody would take back what rejected drafts did to it. Nor has it one for the ring of a
            layer with compressed keys.
        """
        if isinstance(self.module, Glm):
            raise InputError(
                f"{self.name!r} cannot draft as a model of its own: its layers keep more of a request than keys and "
                "values; draft with its MTP blocks, with a Qwen3 dense model, or with n-grams"
            )
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
            raise InputError(f"{path} cannot be read: {one_line(error)}") from None
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
      InputError: no such model; no config.json or one of no supported family (Qwen3 dense, Qwen3-Next or
        GLM-5.3-Flash with dense MLPs); weights that are missing, unexpected, misshapen or not floating point. The
        message names the folder and at most five tensors.

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
    found = tensor_files(folder)
    # Some writers store the rotary frequencies, or the head although it is the embedding.
    ignored = {name for name in found if name.endswith("rotary_emb.inv_freq")}
    if isinstance(config, HybridConfig):  # a draft head of its own, no part of the model
        ignored |= {name for name in found if name.startswith("mtp.")}
    if isinstance(config, GlmConfig):  # an MTP block's copies of what it shares with the model
        ignored |= {name for name in found if name.endswith((".shared_head.head.weight", ".embed_tokens.weight"))}
    if config.tie_word_embeddings:
        ignored.add("lm_head.weight")
    refuse(folder, "lacks tensors", expected.keys() - found.keys())
    refuse(folder, "has tensors that the model has no place for", found.keys() - expected.keys() - ignored)
    tree = read_tree(folder, expected, found, dtype)
    return Checkpoint(make_module(config, dtype), {"params": tree["params"]}, config, folder, tree.get("mtp", {}))


def make_module(config: Config, dtype: Any = jnp.float32) -> Module:
    """The flax module of a configuration's family."""
    return {GlmConfig: Glm, HybridConfig: Hybrid, Qwen3Config: Qwen3}[type(config)](config, dtype)


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
      params: `{"params": tree}` as the module takes it, in any floating dtype; with MTP blocks also
        `"mtp": blocks`, as `Checkpoint.blocks` holds them.
      dtype: what the weights are stored in, but for those that are always float32 (see `Checkpoint.params`).
      tokenizer: written as tokenizer.json.

    Returns:
      The folder.

    Raises:
      InputError: arrays of the model are missing, unknown or misshapen; windows that the format cannot say.
    """
    folder = Path(folder)
    settings = {**config.to_dict(), "dtype": jnp.dtype(dtype).name}
    write_folder(folder, stored_tensors(folder, _tensors(config), params, dtype), settings, tokenizer)
    return folder


def random_params(config: Config, seed: int, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Parameters `{"params": tree}` drawn by numpy from `seed`: the same on every backend and jax version.

    Those of MTP blocks, if the model has any, come under `"mtp"`.

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
        if len(tensor.tree_shape) == 1:
            value = tensor.center + value * tensor.spread
        else:
            value /= np.sqrt(tensor.shape[-1], dtype=np.float32)
        put(tree, tensor.path, jnp.asarray(tensor.to_tree(value, dtype)))
    return tree


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A tensor of the file: its place in the parameter tree, its shape in the file, and how the tree holds it.

    Matrices are transposed, a convolution [C, 1, W] and a decay [1, 1, HV, 1] lose their axes of one, and `wide` ones
    stay float32. `center` and `spread` are those of a random vector.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    transposed: bool = False
    wide: bool = False
    center: float = 1.0
    spread: float = 0.125
    integer: ClassVar[bool] = False

    @property
    def tree_shape(self) -> tuple[int, ...]:
        if self.transposed:
            return self.shape[::-1]
        return {3: self.shape[::2], 4: self.shape[2:3]}.get(len(self.shape), self.shape)

    def to_tree(self, value: np.ndarray, dtype: Any) -> np.ndarray:
        value = value.T if self.transposed else value.reshape(self.tree_shape)
        return np.ascontiguousarray(value).astype(np.float32 if self.wide else jnp.dtype(dtype))

    def to_file(self, value: np.ndarray, dtype: Any) -> np.ndarray:
        if value.shape == self.tree_shape:
            value = value.T if self.transposed else value.reshape(self.shape)
        return np.ascontiguousarray(value).astype(np.float32 if self.wide else jnp.dtype(dtype))


def _tensors(config: Config) -> dict[str, _Tensor]:
    """Every tensor of the model under its public name."""
    if isinstance(config, GlmConfig):
        return _glm_tensors(config)
    hybrid = isinstance(config, HybridConfig)
    hidden = config.hidden_size
    scale = {"center": 0.0} if hybrid else {}  # of most norms the hybrid stores what is added to 1
    tensors = {
        "model.embed_tokens.weight": _Tensor(("params", "embed_tokens"), (config.vocab_size, hidden)),
        "model.norm.weight": _Tensor(("params", "norm"), (hidden,), **scale),
    }
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = _Tensor(("params", "lm_head"), (config.vocab_size, hidden))
    for layer in range(config.num_hidden_layers):
        linear = hybrid and config.layer_types[layer] == LINEAR
        shapes = {
            "input_layernorm.weight": (hidden,),
            **(_delta_net_shapes(config) if linear else _attention_shapes(config, 2 if hybrid else 1)),
            **_mlp_shapes(config),
        }
        for name, shape in shapes.items():
            last = name.removesuffix(".weight").rpartition(".")[2]
            how: dict[str, Any] = {"transposed": len(shape) == 2}
            how |= _DECAYS.get(last, {} if last == "norm" else scale)
            tensors[f"model.layers.{layer}.{name}"] = _Tensor(("params", f"layers_{layer}", last), shape, **how)
    return tensors


def _glm_tensors(config: GlmConfig) -> dict[str, _Tensor]:
    """The model's, then those of its MTP blocks, which are stored as layers behind the last one."""
    hidden = config.hidden_size
    tensors = {
        "model.embed_tokens.weight": _Tensor(("params", "embed_tokens"), (config.vocab_size, hidden)),
        "model.norm.weight": _Tensor(("params", "norm"), (hidden,)),
    }
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = _Tensor(("params", "lm_head"), (config.vocab_size, hidden))

    def add(prefix, path, shapes):
        for name, shape in shapes.items():
            words = name.removesuffix(".weight").split(".")
            place = words[-1:] if words[:-1] != ["self_attn", "indexer"] else words[1:]
            if words[-1] == "bias":
                place = ["indexer", "k_norm_bias"]
            how: dict[str, Any] = {"transposed": len(shape) == 2} | _DECAYS.get(place[-1], _GLM_WIDE.get(place[-1], {}))
            tensors[f"{prefix}.{name}"] = _Tensor((*path, *place), shape, **how)

    def layer_shapes(kind):
        mixer = _sparse_shapes(config) if kind == SPARSE else _kimi_shapes(config)
        return {"input_layernorm.weight": (hidden,), **mixer, **_mlp_shapes(config)}

    for layer, kind in enumerate(config.layer_types):
        add(f"model.layers.{layer}", ("params", f"layers_{layer}"), layer_shapes(kind))
    for depth in range(config.num_nextn_predict_layers):
        prefix, path = f"model.layers.{config.num_hidden_layers + depth}", ("mtp", f"blocks_{depth}")
        add(prefix, path, {"eh_proj.weight": (hidden, 2 * hidden)})
        add(prefix, path, {name: (hidden,) for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")})
        add(prefix, (*path, "block"), layer_shapes(SPARSE))
    return tensors


def _mlp_shapes(config) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }


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


def _kimi_shapes(config) -> dict[str, tuple[int, ...]]:
    hidden, heads, width = config.hidden_size, config.linear_num_heads, config.linear_head_dim
    channels = heads * width
    return {
        **{f"self_attn.{name}_proj.weight": (channels, hidden) for name in "qkv"},
        **{f"self_attn.{name}_conv1d.weight": (channels, 1, config.linear_conv_kernel_dim) for name in "qkv"},
        "self_attn.b_proj.weight": (heads, hidden),
        **{f"self_attn.{name}_a_proj.weight": (width, hidden) for name in "fg"},
        **{f"self_attn.{name}_b_proj.weight": (channels, width) for name in "fg"},
        "self_attn.A_log": (1, 1, heads, 1),
        "self_attn.dt_bias": (channels,),
        "self_attn.o_norm.weight": (width,),
        "self_attn.o_proj.weight": (hidden, channels),
    }


def _sparse_shapes(config) -> dict[str, tuple[int, ...]]:
    hidden, latent, queries = config.hidden_size, config.kv_lora_rank, config.q_lora_rank
    heads, inner, outer = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim
    index_heads, width = config.index_n_heads, config.index_head_dim
    return {
        "self_attn.q_a_proj.weight": (queries, hidden),
        "self_attn.q_a_layernorm.weight": (queries,),
        "self_attn.q_b_proj.weight": (heads * inner, queries),
        "self_attn.kv_a_proj_with_mqa.weight": (latent, hidden),
        "self_attn.kv_a_layernorm.weight": (latent,),
        "self_attn.kv_b_proj.weight": (heads * (inner + outer), latent),
        "self_attn.o_proj.weight": (hidden, heads * outer),
        "self_attn.indexer.wq_b.weight": (index_heads * width, queries),
        "self_attn.indexer.wk.weight": (width, hidden),
        "self_attn.indexer.weights_proj.weight": (index_heads, hidden),
        "self_attn.indexer.k_norm.weight": (width,),
        "self_attn.indexer.k_norm.bias": (width,),
        "self_attn.indexer.index_kpool_compress_ape": (config.index_kpool, width),
        "self_attn.indexer.index_kpool_compress_gate": (width, hidden),
    }


_GLM_WIDE = {
    **{f"{name}_conv1d": {"wide": True} for name in "qkv"},
    "weights_proj": {"wide": True},
    "k_norm": {"wide": True},
    "k_norm_bias": {"wide": True, "center": 0.0},
    "index_kpool_compress_ape": {"wide": True, "transposed": False},
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
        settings = read_json(folder / "config.json")
        family = _FAMILIES.get(settings.get("model_type"), Qwen3Config)
        config = family.from_dict(settings)
        generation = folder / "generation_config.json"
        stops = eos_ids(read_json(generation)) if generation.is_file() else ()
        return dataclasses.replace(config, eos_token_ids=stops) if stops else config
    except InputError as error:
        raise InputError(f"{folder}: {error}") from None


# A folder of another type is read as Qwen3 dense, which also old folders without a type are, or refuses it.
_FAMILIES = {"qwen3_next": HybridConfig, "glm5_next_text": GlmConfig}
