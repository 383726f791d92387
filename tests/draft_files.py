"""config.json of small block drafts of each kind, and the targets that they belong to."""

import functools
import pathlib

import safetensors.numpy
from tiny_models import CONFIG, HYBRID_CONFIG, HYBRID_MODULE, MODULE, hybrid_params, target_params

from jaxspec import models
from jaxspec.models.block_format import read_block_config

V, H = CONFIG.vocab_size, CONFIG.hidden_size
SIZES = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-3,
    "rope_theta": 50.0,
    "max_position_embeddings": 256,
}
DSPARK_FILE = {
    **SIZES,
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "block_size": 5,
    "target_layer_ids": [1, 0],
    "mask_token_id": 3,
    "markov_rank": 6,
    "markov_head_type": "vanilla",
}
DFLASH_FILE = {
    **SIZES,
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 5,
    "num_target_layers": 2,
    "dflash_config": {"target_layer_ids": [1, 0], "mask_token_id": 3},
}
SLIDES = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4}


@functools.cache
def target():
    """A target of two layers."""
    return models.Checkpoint(MODULE, target_params(), CONFIG, pathlib.Path("tiny"))


@functools.cache
def hybrid():
    """One of three layers and the same sizes otherwise."""
    return models.Checkpoint(HYBRID_MODULE, hybrid_params(), HYBRID_CONFIG, pathlib.Path("hybrid"))


def dspark(**changes):
    return read_block_config({**DSPARK_FILE, **changes})


def dflash(**changes):
    return read_block_config({**DFLASH_FILE, **changes})


def file_with(kind, *absent, **changes):
    settings = {"dspark": DSPARK_FILE, "dflash": DFLASH_FILE}[kind]
    return {key: value for key, value in {**settings, **changes}.items() if key not in absent}


def tensors_of(folder):
    return safetensors.numpy.load_file(pathlib.Path(folder) / "model.safetensors")
