"""Folders of drafts: written and read, tensors counted, kinds and targets told apart."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from draft_files import SLIDES, H, V, dflash, dspark, hybrid, target, tensors_of
from tiny_models import CONFIG, target_params

from jaxspec import models
from jaxspec.errors import InputError
from jaxspec.models.block_format import block_tensors
from jaxspec.models.eagle import Eagle3Config

EAGLE = Eagle3Config(
    vocab_size=V,
    draft_vocab_size=20,
    hidden_size=H,
    target_hidden_size=H,
    intermediate_size=40,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    target_layer_ids=(1, 0),
)


def edit(folder, change):
    tensors = tensors_of(folder)
    change(tensors)
    (folder / "model.safetensors").write_bytes(safetensors.numpy.save(tensors, metadata={"format": "pt"}))


def settle(folder, **changes):
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, **changes}))


def assert_same(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


def stored(array):
    """What is left of an array by a file of bfloat16; ids stay as they are."""
    array = np.asarray(array)
    return array if array.dtype == np.int32 else array.astype(jnp.bfloat16).astype(array.dtype)


@pytest.fixture
def folder(tmp_path):
    return models.save_draft(tmp_path / "draft", dspark(), models.random_draft_params(dspark(), 0), jnp.float32)


@pytest.mark.parametrize("config", [dspark(), dflash(**SLIDES), EAGLE], ids=["dspark", "dflash", "eagle3"])
def test_a_saved_folder_loads_to_the_same_arrays(tmp_path, config):
    tree = models.random_draft_params(config, 0)
    folder = models.save_draft(tmp_path / "draft", config, tree)
    loaded = models.load_draft(folder, target())
    assert (loaded.kind, loaded.draft.config, loaded.notes, loaded.folder) == (
        getattr(config, "algorithm", "eagle3"),
        config,
        (),
        folder,
    )
    assert_same(loaded.params["draft"], jax.tree.map(stored, tree))
    # Embedding and head are the target's own arrays, not copies.
    assert loaded.params["embed_tokens"] is target().params["params"]["embed_tokens"]
    assert loaded.params["lm_head"] is target().params["params"]["lm_head"]
    half = models.load_draft(folder, target(), jnp.bfloat16, kind=loaded.kind)
    assert jnp.dtype(half.draft.dtype) == jnp.bfloat16
    assert {x.dtype.name for x in jax.tree.leaves(half.params["draft"])} <= {"bfloat16", "int32"}
    again = models.save_draft(tmp_path / "again", config, half.params["draft"])
    assert_same(tensors_of(again), tensors_of(folder))


def test_tensors_have_the_public_names_and_shapes(folder):
    shapes = {name: value.shape for name, value in tensors_of(folder).items()}
    assert len(shapes) == 2 * 11 + 3 + 2
    assert shapes["fc.weight"] == (H, 2 * H)
    assert shapes["layers.1.self_attn.k_proj.weight"] == (16, H)
    assert shapes["layers.0.mlp.down_proj.weight"] == (H, 20)
    assert shapes["markov_head.markov_w1.weight"] == shapes["markov_head.markov_w2.weight"] == (V, 6)
    public = dflash(num_hidden_layers=5)
    assert len(block_tensors(public)) == 58


def test_other_spellings_of_names_load_to_the_same_draft(folder):
    expected = models.load_draft(folder, target()).params

    def respell(tensors):
        tensors["encoder.fc.weight"] = tensors.pop("fc.weight")
        tensors["encoder.output_norm_enc.weight"] = tensors.pop("hidden_norm.weight")
        for name in [name for name in tensors if not name.startswith("encoder.")]:
            tensors[f"model.{name}"] = tensors.pop(name)

    edit(folder, respell)
    assert_same(models.load_draft(folder, target()).params, expected)
    edit(folder, lambda tensors: tensors.update({"fc.weight": np.zeros((H, 2 * H), np.float32)}))
    with pytest.raises(InputError, match=r"under two names: encoder.fc.weight and fc.weight"):
        models.load_draft(folder, target())


def test_shards_load_as_one_file_does(folder):
    expected, tensors = models.load_draft(folder, target()).params, tensors_of(folder)
    names = sorted(tensors)
    index = {}
    for shard, part in (("a.safetensors", names[::2]), ("b.safetensors", names[1::2])):
        (folder / shard).write_bytes(safetensors.numpy.save({name: tensors[name] for name in part}))
        index |= dict.fromkeys(part, shard)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert_same(models.load_draft(folder, target()).params, expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("layers.1.mlp.up_proj.weight"), r"lacks tensors: layers.1.mlp.up_proj.weight"),
        (lambda t: t.pop("markov_head.markov_w2.weight"), r"lacks tensors: markov_head.markov_w2.weight"),
        (lambda t: t.update(more=np.zeros(1, np.float32)), r"kind dspark has no place for: more"),
        (
            lambda t: t.update({"markov_head.gate_proj.weight": np.zeros((6, 6), np.float32)}),
            r"no place for: markov_head.gate_proj.weight",
        ),
        (
            lambda t: t.update({"fc.weight": np.zeros((H, 3 * H), np.float32)}),
            rf"fc.weight \({H}, {3 * H}\) instead of \({H}, {2 * H}\)",
        ),
        (lambda t: t.update({"norm.weight": np.zeros(H, np.int32)}), r"not floating point: norm.weight \(I32\)"),
    ],
)
def test_wrong_tensors_are_named(folder, change, words):
    edit(folder, change)
    with pytest.raises(InputError, match=words):
        models.load_draft(folder, target())


def test_tensors_that_are_passed_over_are_named(folder):
    expected = models.load_draft(folder, target())
    edit(
        folder,
        lambda tensors: tensors.update(
            {
                "confidence_head.proj.weight": np.zeros((1, H + 6), np.float32),
                "model.confidence_head.proj.bias": np.zeros(1, np.float32),
                "lm_head.weight": np.zeros((V, H), np.float32),
            }
        ),
    )
    settle(folder, enable_confidence_head=True, confidence_head_with_markov=True)
    loaded = models.load_draft(folder, target())
    assert loaded.notes == ("not read: confidence_head.proj.bias, confidence_head.proj.weight, lm_head.weight",)
    assert_same(loaded.params, expected.params)


def test_layers_by_default_are_said(tmp_path):
    # The default of 2 draft layers and 5 target layers is (1, 2); here it would repeat a layer.
    config = dataclasses.replace(dflash(), num_hidden_layers=1, windows=(), causal=(), target_layer_ids=(1,))
    folder = models.save_draft(tmp_path / "draft", config, models.random_draft_params(config, 0))
    assert models.load_draft(folder, target()).notes == ()
    settle(folder, dflash_config={"mask_token_id": 3})
    loaded = models.load_draft(folder, target())
    assert loaded.draft.config.target_layer_ids == (1,)
    assert loaded.notes == ("target_layer_ids is absent: those of the default are taken",)


def test_a_draft_of_another_target_is_refused(tmp_path, folder):
    assert models.load_draft(folder, hybrid()).kind == "dspark"  # same sizes: nothing tells them apart
    settle(folder, num_target_layers=3)
    with pytest.raises(InputError, match="num_target_layers is 3 and that of the target 2"):
        models.load_draft(folder, target())
    assert models.load_draft(folder, hybrid()).draft.config.num_target_layers == 3
    for changes, words in (
        ({"vocab_size": V + 3}, f"vocab_size is {V + 3} and that of the target {V}"),
        ({"hidden_size": 2 * H}, f"hidden_size is {2 * H} and that of the target {H}"),
        ({"target_layer_ids": [0, 3]}, r"\[0, 3\] and the target has 3 layers"),
    ):
        config = dspark(**changes)
        other = models.save_draft(tmp_path / words[:6], config, models.random_draft_params(config, 0))
        with pytest.raises(InputError, match=words) as caught:
            models.load_draft(other, hybrid())
        assert str(other) in str(caught.value)


def test_architectures_decides_the_kind(tmp_path, folder):
    eagle = models.save_draft(tmp_path / "eagle", EAGLE, models.random_draft_params(EAGLE, 0))
    assert models.load_draft(eagle, target(), kind="eagle3").kind == "eagle3"
    with pytest.raises(InputError, match="kind 'eagle3', and 'dspark' is asked for"):
        models.load_draft(eagle, target(), kind="dspark")
    with pytest.raises(InputError, match="kind 'dspark', and 'eagle3' is asked for"):
        models.load_draft(folder, target(), kind="eagle3")
    # Another name on the same weights does not make another draft of them.
    settle(folder, architectures=["LlamaForCausalLMEagle3"])
    with pytest.raises(InputError, match="num_hidden_layers is 2"):
        models.load_draft(folder, target())
    settle(folder, architectures=["DFlashDraftModel"])
    with pytest.raises(InputError, match="say which it is"):
        models.load_draft(folder, target())
    settle(eagle, architectures=["DSparkDraftModel"])
    with pytest.raises(InputError, match="draft_vocab_size is 20"):
        models.load_draft(eagle, target())
    model = models.save(tmp_path / "model", CONFIG, target_params())
    with pytest.raises(InputError, match=r"\['Qwen3ForCausalLM'\]: a draft's folder names one of"):
        models.load_draft(model, target())


def test_folders_that_are_none_and_types_that_are_not_computed(tmp_path, folder):
    with pytest.raises(InputError, match=r"no config.json"):
        models.load_draft(tmp_path / "nowhere", target())
    with pytest.raises(InputError, match="float32 or bfloat16"):
        models.load_draft(folder, target(), jnp.float16)
    (folder / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"config.json cannot be read"):
        models.load_draft(folder, target())


def test_save_refuses_what_it_cannot_write_and_writes_nothing(tmp_path):
    tree = models.random_draft_params(dspark(), 0)
    new = tmp_path / "new"
    for params, words in (
        ({**tree, "layers_0": {}}, "lack: layers_0/"),
        ({**tree, "lm_head": jnp.zeros((V, H))}, "unknown: lm_head"),
        ({**tree, "norm": jnp.zeros(H + 1)}, rf"norm.weight \({H + 1},\) instead of \({H},\)"),
    ):
        with pytest.raises(InputError, match=words):
            models.save_draft(new, dspark(), params)
    assert not new.exists()


def test_random_params_follow_the_seed():
    assert_same(models.random_draft_params(dspark(), 3), models.random_draft_params(dspark(), 3))
    one, other = (models.random_draft_params(dspark(), seed)["fc"] for seed in (3, 4))
    assert not np.array_equal(one, other)


def test_the_drafts_that_ship_are_small_and_belong_to_their_targets():
    drafts = models.embedded_path("target").parent / "drafts"
    folders = sorted(path.parent for path in drafts.glob("*/config.json"))
    if not folders:
        pytest.skip("no draft ships")
    assert sum(path.stat().st_size for path in drafts.rglob("*") if path.is_file()) <= 8_000_000
    for folder in folders:
        kind, _, name = folder.name.partition("_")
        assert models.embedded_draft(kind, name) == folder
        loaded = models.load_draft(folder, models.load(name, jnp.bfloat16), jnp.bfloat16, kind=kind)
        assert loaded.notes == ()
