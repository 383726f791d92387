"""Where a draft keeps its K and V: the decision and its words, and what a private pool costs."""

import dataclasses

import jax
import numpy as np
import pytest
from block_cases import T, draft, target

import jaxspec
from jaxspec import InputError, LayerSpec, PoolConfig, SpecConfig, StatePart, StateSpec, models
from jaxspec.cache.placement import Placement, place_draft
from jaxspec.drafting.choose import fitting_drafters, make_drafter
from jaxspec.models.block_draft import BlockDraft
from jaxspec.models.draft_checkpoint import save_draft
from jaxspec.steps.memory import memory_bytes

FULL, SLIDING, FAR = LayerSpec(2, 8), LayerSpec(2, 8, 16), LayerSpec(2, 8, 17)
WINDOWS = (FULL, dataclasses.replace(LayerSpec(2, 8, 12), storage="swa"), LayerSpec(4, 32, 16, "swa"))
STATES = (FULL, StateSpec((StatePart("temporal", (2, 4)),)))


def storages(placement):
    return [spec.storage for spec in placement.layers]


def test_static_memory_has_buffers_of_its_own():
    """Whatever the draft's dtype and rows, and wherever it says that its layers lie."""
    for layers in ((FULL, SLIDING), (LayerSpec(1, 2), dataclasses.replace(SLIDING, storage="swa"))):
        placement = place_draft(layers, "bfloat16", WINDOWS, "float32", memory="static")
        assert (placement.where, storages(placement), placement.reason, placement.notes) == (
            "own",
            ["full"] * 2,
            "",
            (),
        )
        assert placement.lanes == ()


def test_lanes_of_the_targets_entries():
    """A window that is as long as the longest of the target still fits its pages."""
    placement = place_draft((FULL, SLIDING, FAR), "float32", WINDOWS, "float32", memory="unified")
    assert (placement.where, storages(placement), placement.reason) == ("fused", ["full", "swa", "full"], "")
    assert placement.notes == (
        "draft layer 2 is folded into FULL entries: its window of 17 is longer than the 16 of the target",
    )
    assert placement.lanes == placement.layers and placement.token_bytes("float32") == 0
    for layers in (STATES, (FULL,)):
        placement = place_draft((SLIDING,), "float32", layers, "float32", memory="unified")
        assert storages(placement) == ["full"] and placement.layers[0].window == 16
        assert placement.notes == ("draft layer 0 is folded into FULL entries: the target has no sliding-window pages",)


def test_a_private_pool_says_why():
    words = {
        "bfloat16": "the draft keeps K and V in bfloat16, the target's entries hold float32",
        "float32": "K of draft layer 1 has rows of 8 bytes, and rows of an entry are multiples of 16",
    }
    for dtype, reason in words.items():
        placement = place_draft((FULL, LayerSpec(1, 2, 16)), dtype, WINDOWS, "float32", memory="unified")
        assert (placement.where, placement.reason, placement.lanes) == ("private", reason, ())
        assert storages(placement) == ["full", "full"]
        assert placement.token_bytes(dtype) == (2 * 16 + 2 * 2) * {"bfloat16": 2, "float32": 4}[dtype]
    wide = LayerSpec(1, 4, value_dim=2)
    assert place_draft((wide,), "float32", (FULL,), "float32", memory="unified").reason.startswith("V of draft layer 0")


def test_a_placement_is_static():
    """Equal for equal arguments, so that steps share their programs."""
    arguments = ((FULL, SLIDING), "float32", WINDOWS, "float32")
    one, other = (place_draft(*arguments, memory="unified") for _ in range(2))
    assert one == other and hash(one) == hash(other) and isinstance(one, Placement)


# A budget


@pytest.mark.parametrize("shape", ["both", "slim"])
def test_a_budget_pays_for_the_draft(shape):
    """Fused it makes entries larger, private it has its own pool, a row for each virtual slot."""
    model, *_ = target("windows")
    drafter = jaxspec.DSparkDrafter(BlockDraft(draft("dspark", "windows", shape)[0]))
    sizes = {"num_draft_tokens": 4, "context_len": T, "page_size": 8, "prefill_chunk": 16}
    pool = PoolConfig.from_budget(200_000, model, drafter, **sizes)
    config = SpecConfig(**pool.spec_fields(), max_new_tokens=8)
    state = jaxspec.init_state(model, drafter, config, [])
    used = memory_bytes(state.cache, state.draft)
    assert (pool.draft_bytes > 0) == (shape == "slim") == (state.draft.cache is not None)
    assert used <= pool.bytes_used <= 200_000
    assert pool.bytes_used - used <= 2 * pool.draft_bytes // pool.layout.num_pages("full")  # the sinks' rows
    if shape == "slim":
        slots = state.pages.v2p.shape[0] * config.page_size
        assert [buffer.shape for buffer in state.draft.cache.buffers] == [(slots, 4)] * 2
    fewer = PoolConfig.from_budget(200_000, model, **sizes)
    assert pool.full_pages < fewer.full_pages


# By name


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The tiny target as a checkpoint."""
    _, module, params, *_ = target("windows")
    folder = tmp_path_factory.mktemp("models") / "tiny"
    models.save(folder, module.config, params, dtype="float32")
    return models.load(folder)


@pytest.mark.parametrize("algorithm", ["dspark", "dflash"])
def test_a_draft_by_its_folder(algorithm, checkpoint, tmp_path):
    config, params = draft(algorithm, "windows", "both")
    save_draft(tmp_path / "draft", config, params["draft"], "float32")
    drafter, found = make_drafter(algorithm, checkpoint, draft_model=str(tmp_path / "draft"))
    kind = {"dspark": jaxspec.DSparkDrafter, "dflash": jaxspec.DFlashDrafter}[algorithm]
    assert drafter == kind(BlockDraft(config))
    assert set(found) == {"draft", "embed_tokens", "lm_head"}
    jax.tree.map(np.testing.assert_array_equal, found["draft"], params["draft"])
    other = {"dspark": "dflash", "dflash": "dspark"}[algorithm]
    with pytest.raises(InputError, match=f"a draft of kind '{algorithm}', and '{other}' is asked for"):
        make_drafter(other, checkpoint, draft_model=str(tmp_path / "draft"))


def test_no_draft_ships_for_a_model_of_ones_own(checkpoint):
    for algorithm in ("dspark", "dflash", "eagle3"):
        with pytest.raises(InputError, match=f"^drafter={algorithm}: no draft of this kind ships .*'tiny'; give"):
            make_drafter(algorithm, checkpoint)
    assert fitting_drafters(checkpoint) == ["ngram"]
