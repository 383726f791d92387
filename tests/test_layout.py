"""The pool: where its rows are, byte by byte; what no layout may be; and that no program copies it."""

import dataclasses
import importlib
import itertools
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from jaxspec.cache import Entry, KPoolSpec, LayerSpec, PoolCache, PoolLayout, Span, init_cache, init_pool

sys.path.append(str(Path(__file__).parent / "kernels"))
aot = importlib.import_module("kernel_aot")

ASYMMETRIC = LayerSpec(2, 64, value_dim=32)
WINDOWED = LayerSpec(2, 64, 16, "swa")


# An oracle: addresses by the definition of the entry, from byte sizes alone


def up(size, multiple):
    return -(-size // multiple) * multiple


def entry_of(kind, layers, draft_layers, itemsize):
    """Size of the kind's entry and {(draft, layer, part): (first byte, bytes)}, a running sum over the rows."""
    rows, end = {}, 0
    for draft, specs in ((False, layers), (True, draft_layers)):
        end = up(end, 16)
        for index, spec in enumerate(specs):
            if spec.storage == kind:
                value = spec.value_dim
                for part, width in (("K", spec.head_dim), ("V", spec.head_dim if value is None else value)):
                    size = spec.num_kv_heads * width * itemsize
                    rows[draft, index, part] = end, size
                    end += size
    return max(up(end, 32), 32), rows


def beside_entries(page_size, layers, draft_layers):
    """Bytes of a FULL page's section and of a state, and {(draft, layer): (first byte, bytes)} of the index keys in the
    section and of the rings in the state."""
    keys, rings, section, state = {}, {}, 0, 0
    for draft, specs in ((False, layers), (True, draft_layers)):
        for index, spec in enumerate(specs):
            if isinstance(spec, KPoolSpec):
                keys[draft, index] = section, up(page_size // spec.pool * (spec.index_dim + 4), 32)
                rings[draft, index] = state, spec.ring * 2 * spec.index_dim * 2
                section, state = section + keys[draft, index][1], state + rings[draft, index][1]
    return section, keys, up(state, 32), rings


def assert_matches_the_oracle(layout):
    itemsize = np.dtype(jnp.dtype(layout.dtype)).itemsize
    section, keys, state, rings = beside_entries(layout.page_size, layout.layers, layout.draft_layers)
    assert ("state" in layout.kinds) == (state > 0)
    tokens = [kind for kind in layout.kinds if kind != "state"]
    entries = {kind: entry_of(kind, layout.layers, layout.draft_layers, itemsize) for kind in tokens}
    page = {kind: size * layout.page_size for kind, (size, _) in entries.items()}
    page["full"] += section
    if state:
        page["state"], entries["state"] = state, (state, {})
    floor = max(page.values())
    assert layout.nbytes == layout.units * layout.unit_bytes and layout.unit_bytes == layout.unit * itemsize
    for kind, (size, rows) in entries.items():
        assert layout.entry_units(kind) * layout.unit_bytes == size
        assert layout.page_units(kind) * layout.unit_bytes == page[kind]
        assert layout.num_pages(kind) == layout.nbytes // page[kind]
        assert layout.min_page(kind) == -(-floor // page[kind])
        slot = 5 * layout.page_size + layout.page_size // 2 if kind != "state" else 5
        offset = layout.page_size // 2 * size if kind != "state" else 0
        assert layout.slot_units(kind, slot) * layout.unit_bytes == 5 * page[kind] + offset
        for draft, layer in {key[:2] for key in rows}:
            row = layout.row(layer, draft)
            assert row.kind == kind
            got = [n * layout.unit_bytes for n in (row.key, row.key_units, row.value, row.value_units)]
            assert got == [*rows[draft, layer, "K"], *rows[draft, layer, "V"]]
            assert row.value == row.key + row.key_units
    for (draft, layer), (first, size) in keys.items():
        spec, entry = (layout.draft_layers if draft else layout.layers)[layer], entries["full"][0] * layout.page_size
        assert [n * layout.unit_bytes for n in layout.index_row(layer, draft)] == [entry + first, size]
        assert [n * layout.unit_bytes for n in layout.ring_row(layer, draft)] == [*rings[draft, layer]]
        assert spec.index_dim % layout.unit_bytes == 0
        assert layout.storage == f"uint{8 * itemsize}"


def test_worked_example():
    """K rows of 256 bytes, V rows of 128, three layers: an entry of 1152 bytes."""
    layout = PoolLayout.for_pages([ASYMMETRIC] * 3, full=9, page_size=4, dtype="bfloat16")
    assert layout.entry_units("full") * layout.unit_bytes == 1152
    assert layout.row(2) == ("full", 6, 8, 2, 1) and layout.unit_bytes == 128
    assert 5 * 1152 + layout.row(2).value * layout.unit_bytes == 6784
    assert_matches_the_oracle(layout)


def test_worked_example_with_a_draft():
    """Two lanes of 256 bytes behind the model's rows: the entry grows to 1664 bytes, the model's offsets stay."""
    host = PoolLayout.for_pages([ASYMMETRIC] * 3, full=9, page_size=4, dtype="bfloat16")
    fused = PoolLayout.for_pages(
        [ASYMMETRIC] * 3, draft_layers=[LayerSpec(1, 64)] * 2, full=9, page_size=4, dtype="bfloat16"
    )
    assert fused.entry_units("full") * fused.unit_bytes == 1664
    assert [fused.row(layer) for layer in range(3)] == [host.row(layer) for layer in range(3)]
    assert 5 * 1664 + fused.row(2).value * fused.unit_bytes == 9344
    assert 5 * 1664 + fused.row(1, draft=True).key * fused.unit_bytes == 9728
    assert_matches_the_oracle(fused)


def test_worked_example_of_padding():
    """Rows of 48 and 32 bytes: 80 are padded to 96, and a unit is no more than 16 bytes."""
    layout = PoolLayout.for_pages([LayerSpec(1, 24, value_dim=16)], full=9, page_size=4, dtype="bfloat16")
    assert (layout.unit, layout.entry_units("full") * layout.unit_bytes) == (8, 96)
    assert_matches_the_oracle(layout)


def test_worked_example_of_the_sinks():
    """Entries of 1152 and 512 bytes in 100 000: three SWA pages overlap the larger sink."""
    layers = [ASYMMETRIC] * 3 + [LayerSpec(2, 64, 16, "swa")]
    layout = PoolLayout.for_budget(layers, budget=100_000, page_size=4, dtype="bfloat16")
    assert layout.kinds == ("full", "swa") and layout.nbytes <= 100_000
    assert [layout.num_pages(kind) for kind in layout.kinds] == [21, 48]
    assert [layout.min_page(kind) for kind in layout.kinds] == [1, 3]


def test_worked_example_of_a_section():
    """A latent row of 1152 bytes, 64 index keys of 128 bytes and 64 scales of 4 a page: 8448 bytes, 66 units."""
    layer = KPoolSpec(1, 576, value_dim=0, pool=4, index_dim=128).with_rows(6)
    layout = PoolLayout.for_pages([layer], full=9, state=2, page_size=256, dtype="bfloat16")
    assert (layout.unit_bytes, layout.page_units("full"), layout.row(0)) == (128, 2370, ("full", 0, 9, 9, 0))
    assert layout.slot_units("full", 517) == 4785 and layout.index_row(0) == (2304, 66)
    assert layout.ring_row(0) == (0, 10 * 512 // 128) and layout.entry_units("state") == 40
    assert_matches_the_oracle(layout)


HEADS, WIDTHS = st.integers(1, 4), st.sampled_from([8, 16, 24, 32, 64, 80, 128])


@st.composite
def layer(draw, storages=("full", "swa")):
    storage = draw(st.sampled_from(storages))
    window = draw(st.integers(1, 40)) if storage == "swa" else draw(st.sampled_from([None, 5]))
    heads, width, value = draw(HEADS), draw(WIDTHS), draw(st.none() | st.just(0) | WIDTHS)
    if storage == "full" and draw(st.booleans()):
        pool, index_dim = draw(st.sampled_from([2, 4])), draw(st.sampled_from([16, 32, 64, 128]))
        return KPoolSpec(heads, width, value_dim=value, pool=pool, index_dim=index_dim).with_rows(
            draw(st.integers(1, 9))
        )
    return LayerSpec(heads, width, window, storage, value)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(layer(), max_size=6),
    st.lists(layer(("full",)), max_size=3),
    st.sampled_from([1, 2, 4, 64, 128]),
    st.sampled_from(["float32", "bfloat16"]),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 9),
)
def test_any_layers(layers, draft_layers, page_size, dtype, full, swa, state):
    layers, draft_layers = (
        [spec for spec in specs if page_size % getattr(spec, "pool", 1) == 0] for specs in (layers, draft_layers)
    )
    arguments = {"draft_layers": draft_layers, "page_size": page_size, "dtype": dtype}
    layout = PoolLayout.for_pages(layers, full=full, swa=swa, state=state, **arguments)
    assert_matches_the_oracle(layout)
    assert layout == dataclasses.replace(layout) and hash(layout) == hash(dataclasses.replace(layout))

    def room(units):
        """Whether such a pool has room: intervals from the bottom and from the top, clear of the sinks."""
        pages = {kind: layout.page_units(kind) for kind in layout.kinds}
        used = [(0, max(pages.values()))]
        for kind, count in (("state", state), ("swa", swa)):
            if kind in pages:
                first = -(-used[-1][1] // pages[kind])
                used.append((first * pages[kind], (first + count) * pages[kind]))
        last = units // pages["full"]
        used.append(((last - full) * pages["full"], last * pages["full"]))
        return all(a[1] <= b[0] for a, b in itertools.pairwise(used))

    assert room(layout.units) and not room(layout.units - 1)
    assert PoolLayout.for_budget(layers, budget=layout.nbytes, **arguments) == layout
    assert PoolLayout.for_budget(layers, budget=layout.nbytes + layout.unit_bytes - 1, **arguments) == layout


def test_a_folded_layer_lies_in_full():
    """A draft's windowed layer stored in FULL has a lane there and none in SWA, whatever its window."""
    folded = LayerSpec(1, 64, window=100)
    layout = PoolLayout.for_pages([LayerSpec(2, 64), WINDOWED], draft_layers=[folded], full=4, swa=4, page_size=4)
    assert layout.row(0, draft=True).kind == "full"
    assert [span.owner for span in layout.entries["swa"].spans] == [("layers", 1)] * 2


def test_full_exists_without_layers():
    """It mints the virtual ids: 32 bytes a token where no layer lives there."""
    layout = PoolLayout.for_pages([WINDOWED], full=4, swa=4, page_size=4)
    assert layout.kinds == ("full", "swa") and layout.entry_units("full") * layout.unit_bytes == 32


# What no layout may be


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (LayerSpec(1, 12), "kind 'full': K of {0}, bytes 32 to 56, a row of 24 bytes"),
        (LayerSpec(1, 16, value_dim=4), "kind 'full': V of {0}, bytes 64 to 72, a row of 8 bytes"),
        (LayerSpec(3, 4, 8, "swa"), "kind 'swa': K of {0}, bytes 32 to 56, a row of 24 bytes"),
    ],
)
def test_rows_are_multiples_of_16_bytes(spec, message):
    """The message names the kind, the row and its size, in the model and in the draft."""
    sound = [LayerSpec(1, 8), LayerSpec(1, 8, 9, "swa")]
    arguments = {"full": 4, "swa": 4, "page_size": 4, "dtype": "bfloat16"}
    with pytest.raises(ValueError, match=re.escape(message.format("layers[2]"))):
        PoolLayout.for_pages([*sound, spec], **arguments)
    with pytest.raises(ValueError, match=re.escape(message.format("draft_layers[0]"))):
        PoolLayout.for_pages(sound, draft_layers=[spec], **arguments)


@pytest.mark.parametrize(
    ("spans", "size", "message"),
    [
        (
            [(0, 32), (16, 32)],
            64,
            r"part 1 of parts\[0\], bytes 16 to 48, overlaps part 0 of parts\[0\], bytes 0 to 32",
        ),
        ([(32, 32), (0, 48)], 64, "part 0 .* overlaps part 1"),
        ([(0, 64), (16, 16)], 64, "part 1 .* overlaps part 0"),
        ([(0, 32), (32, 48)], 64, "part 1 .* ends outside the entry of 64 bytes"),
        ([(8, 16)], 32, "part 0 .* start at multiples of 16"),
        ([(0, 8)], 32, "a row of 8 bytes"),
        ([(0, 0)], 32, "a row of 0 bytes"),
        ([(0, 16)], 48, "an entry of 48 bytes"),
        ([], 0, "an entry of 0 bytes"),
    ],
)
def test_rows_of_any_kind_are_disjoint_and_inside(spans, size, message):
    with pytest.raises(ValueError, match=f"kind 'state': .*{message}"):
        Entry("state", 1, size, tuple(Span(("parts", 0), f"part {i}", *span) for i, span in enumerate(spans)))


@pytest.mark.parametrize(
    ("span", "size", "message"),
    [
        ((0, 32), 48, "a section of 48 bytes is not a multiple of 32"),
        ((0, 48), 32, r"index of layers\[0\], bytes 0 to 48, ends outside the section of 32 bytes"),
        ((8, 16), 32, "start at multiples of 16"),
    ],
)
def test_sections_obey_the_same_rules(span, size, message):
    with pytest.raises(ValueError, match=f"kind 'full': .*{message}"):
        Entry("full", 4, 32, (), size, (Span(("layers", 0), "index", *span),))


def test_an_entry_need_not_be_a_token():
    """One state a page, convolution and recurrence of two layers, stream by stream."""
    parts = [("conv", 0, 48), ("conv", 48, 48), ("temporal", 96, 1024), ("temporal", 1120, 1024)]
    entry = Entry("state", 1, 2144, tuple(Span(("layers", i % 2), *part) for i, part in enumerate(parts)))
    assert max(span.start + span.size for span in entry.spans) == entry.size


@pytest.mark.parametrize("page_size", [0, 3, -4, 96])
def test_page_sizes_are_powers_of_two(page_size):
    with pytest.raises(ValueError, match=f"page_size={page_size}: must be a power of two"):
        PoolLayout.for_pages([WINDOWED], full=4, swa=4, page_size=page_size)


def test_indices_fit_int32():
    arguments = {"page_size": 128, "dtype": "bfloat16"}
    layout = PoolLayout.for_budget([LayerSpec(8, 128)], budget=2**38 - 128, **arguments)
    assert layout.units == 2**31 - 1
    with pytest.raises(ValueError, match=rf"units={2**31}: a pool of {2**38} bytes has more than 2\*\*31 - 1 units"):
        PoolLayout.for_budget([LayerSpec(8, 128)], budget=2**38, **arguments)


@pytest.mark.parametrize("short", [0, 1])
def test_a_pool_has_pages_besides_the_sinks(short):
    """2 kB entries and 4 of them a page: a sink and one more are 16 kB."""
    make = lambda: PoolLayout.for_budget([LayerSpec(4, 64)], budget=16384 - short, page_size=4)  # noqa: E731
    if short:
        with pytest.raises(ValueError, match="no page of kind 'full' besides the sinks; it takes 16384 bytes"):
            make()
    else:
        assert make().num_pages("full") == 2


def test_a_drafts_swa_layer_sees_no_freed_page():
    draft = [LayerSpec(1, 64, 17, "swa")]
    with pytest.raises(ValueError, match=r"draft_layers\[0\]: its window of 17 .* freed 16 tokens back"):
        PoolLayout.for_pages([WINDOWED], draft_layers=draft, full=4, swa=4, page_size=4)
    PoolLayout.for_pages([WINDOWED], draft_layers=[LayerSpec(1, 64, 16, "swa")], full=4, swa=4, page_size=4)


def test_layers_that_are_not_there():
    layout = PoolLayout.for_pages([WINDOWED], full=4, swa=4, page_size=4)
    for arguments in ((1,), (-1,), (0, True)):
        for find in (layout.row, layout.index_row, layout.ring_row):
            with pytest.raises(ValueError, match=f"layer={arguments[0]}: "):
                find(*arguments)
    for find in (layout.index_row, layout.ring_row, layout.state_rows):
        with pytest.raises(ValueError, match="layer=0: "):
            find(0)
    layout = PoolLayout.for_pages([KPoolSpec(1, 16).with_rows(1)], full=4, state=1, page_size=4)
    with pytest.raises(ValueError, match="layer=0: no recurrent layer"):
        layout.state_rows(0)


@pytest.mark.parametrize(("field", "size"), [("num_kv_heads", 0), ("head_dim", 0), ("value_dim", -1)])
def test_layers_keep_something(field, size):
    with pytest.raises(ValueError, match=f"{field}={size}"):
        LayerSpec(**{"num_kv_heads": 1, "head_dim": 16, field: size})


# Reading and writing


LAYERS = (ASYMMETRIC, WINDOWED, LayerSpec(1, 24, value_dim=40), LayerSpec(2, 16, 4))
DRAFT = (LayerSpec(1, 64), LayerSpec(1, 16, 7, value_dim=8))


def make_pool(page_size=4, dtype="bfloat16", pages=8):
    return init_pool(
        PoolLayout.for_pages(LAYERS, draft_layers=DRAFT, full=pages, swa=pages, page_size=page_size, dtype=dtype)
    )


def rows_for(rng, spec, shape, dtype):
    return (jnp.asarray(rng.standard_normal((*shape, *s)), dtype) for s in (spec.key_shape, spec.value_shape))


def cells(array):
    """The array's bytes."""
    return np.frombuffer(np.asarray(array).tobytes(), np.uint8)


@pytest.mark.parametrize(("page_size", "dtype"), [(1, "bfloat16"), (4, "float32"), (128, "bfloat16")])
def test_rows_land_at_their_bytes(page_size, dtype):
    """Every layer of model and draft, in scattered slots: those bytes hold the rows and no other byte changes."""
    rng = np.random.default_rng(page_size)
    cache = make_pool(page_size, dtype)
    layout, itemsize = cache.layout, jnp.dtype(dtype).itemsize
    noise = rng.integers(0, 2**16, cache.buffer.shape)
    cache = cache.replace(buffer=jnp.asarray(noise, dtype))
    expected = cells(cache.buffer).copy()
    write = jax.jit(PoolCache.write, static_argnums=1)
    slots = {  # the FULL slots lie behind the SWA slots' bytes
        "full": rng.permutation(np.arange(layout.num_pages("full") - 8, layout.num_pages("full")) * page_size)[:6],
        "swa": rng.permutation(np.arange(layout.min_page("swa"), layout.min_page("swa") + 8) * page_size)[:6],
    }
    for draft, lanes in ((False, "host"), (True, "draft")):
        cache = cache.replace(lanes=lanes)
        for index, spec in enumerate(cache.layers):
            entry, rows = entry_of(spec.storage, LAYERS, DRAFT, itemsize)
            places = slots[spec.storage].reshape(2, 3) + rng.integers(0, page_size, (2, 3))
            k, v = map(np.asarray, rows_for(rng, spec, (2, 3), dtype))
            cache = write(cache, index, jnp.asarray(places, jnp.int32), k, v)
            for b, j in np.ndindex(2, 3):
                for part, row in (("K", k[b, j]), ("V", v[b, j])):
                    start, size = rows[draft, index, part]
                    expected[places[b, j] * entry + start :][:size] = cells(row)
            read = cache.read(index, jnp.asarray(places, jnp.int32))
            assert all(np.array_equal(cells(got), cells(put)) for got, put in zip(read, (k, v), strict=True))
    np.testing.assert_array_equal(cells(cache.buffer), expected)


def test_slots_may_repeat_when_read_and_be_none():
    cache = make_pool()
    k, v = rows_for(np.random.default_rng(0), ASYMMETRIC, (1, 1), "bfloat16")
    cache = cache.write(0, jnp.full((1, 1), 17), k, v)
    keys, values = cache.read(0, jnp.full((2, 3), 17))
    assert (keys == k[0, 0]).all() and (values == v[0, 0]).all()
    none = jnp.zeros((0, 3), jnp.int32)
    assert [rows.shape for rows in cache.read(0, none)] == [(0, 3, 2, 64), (0, 3, 2, 32)]
    same = cache.write(0, none, *(rows[:0].repeat(3, 1) for rows in (k, v)))
    np.testing.assert_array_equal(cells(same.buffer), cells(cache.buffer))


@pytest.mark.parametrize("kind", ["split", "pool"])
def test_rows_of_the_wrong_shape(kind):
    cache = make_pool() if kind == "pool" else init_cache(LAYERS, page_size=4, num_pages=3, num_swa_pages=3)
    k, v = jnp.zeros((1, 1, 2, 64)), jnp.zeros((1, 1, 2, 32))
    with pytest.raises(ValueError, match=r"v has shape \(1, 1, 2, 64\): the layer keeps \[B, D, 2, 32\]"):
        cache.write(0, jnp.zeros((1, 1), jnp.int32), k, k)
    with pytest.raises(ValueError, match=r"k has shape \(1, 1, 2, 32\): the layer keeps \[B, D, 2, 64\]"):
        cache.write(0, jnp.zeros((1, 1), jnp.int32), v, v)


def test_only_pages_with_a_section_are_counted():
    """Where none has one, a row's place is one product."""
    plain = PoolLayout.for_pages([ASYMMETRIC, WINDOWED], full=4, swa=4, page_size=4)
    pooled = PoolLayout.for_pages([KPoolSpec(1, 16).with_rows(1)], full=4, state=1, page_size=4)
    for layout, operations in ((plain, {"mul"}), (pooled, {"mul", "shift_right_arithmetic", "add"})):
        program = jax.make_jaxpr(lambda slots: layout.slot_units("full", slots))(jnp.zeros(3, jnp.int32))  # noqa: B023
        assert {equation.primitive.name for equation in program.eqns} == operations


WIDE = LayerSpec(24, 128)  # 12 288 bytes in bfloat16; 16 layers are an entry of 196 608


def test_offsets_do_not_wrap():
    """From slot 21 846 on, an index of elements would leave int32: 21 846 * 98 304 = 2**31 + 65 536."""
    layout = PoolLayout.for_budget([WIDE] * 16, budget=200 * 2**30, page_size=128, dtype="bfloat16")
    assert layout.entry_units("full") * layout.unit_bytes == 196608
    cache = PoolCache(buffer=jnp.zeros(()), layout=layout)
    last = layout.num_pages("full") * 128 - 1
    assert last > 21846
    place, slots = cache.rows(15).place, jnp.array([0, 21845, 21846, last], jnp.int32)
    places = jax.jit(place.row)(slots) + place.key // layout.unit
    assert places.dtype == jnp.int32
    assert places.tolist() == [slot * 1536 + 15 * 96 for slot in (0, 21845, 21846, last)]
    assert int(places[-1]) + 96 == layout.num_pages("full") * layout.page_units("full")


@pytest.mark.gpu
def test_rows_beyond_int32_elements():
    """The same on the device: rows on both sides of 2**31 elements, 4 GiB into the pool."""
    if jax.default_backend() != "gpu":
        pytest.skip("no NVIDIA GPU")
    layout = PoolLayout.for_budget([WIDE] * 16, budget=5 * 2**30, page_size=128, dtype="bfloat16")
    rng = np.random.default_rng(0)
    slots = jnp.array([[300, 21845, 21846, layout.num_pages("full") * 128 - 1]], jnp.int32)
    k, v = rows_for(rng, WIDE, (1, 4), "bfloat16")
    step = jax.jit(lambda cache, k, v: cache.write(15, slots, k, v), donate_argnums=0)
    keys, values = jax.jit(lambda cache: cache.read(15, slots))(step(init_pool(layout), k, v))
    assert (keys == k).all() and (values == v).all()


# In place


def shapes_of(pages, dtype):
    """A pool and the arguments of the functions below, as shapes."""
    layers, draft_layers = (ASYMMETRIC, WINDOWED) * 2, (LayerSpec(1, 64),)
    layout = PoolLayout.for_pages(
        layers, draft_layers=draft_layers, full=pages, swa=pages // 4, page_size=16, dtype=dtype
    )
    shape = jax.ShapeDtypeStruct
    slots, rows = shape((4, 4), jnp.int32), shape((4, 4, 2, 64), jnp.dtype(dtype))
    cache = PoolCache(buffer=shape((layout.units, layout.unit), jnp.dtype(dtype)), layout=layout)
    return cache, slots, shape((4, 64), jnp.int32), rows


def step(cache, slots, seen, rows):
    """Each layer writes rows that depend on what the layer before has read; at the end the draft's lane, too."""
    for lanes in ("host", "draft"):
        cache = cache.replace(lanes=lanes)
        for layer, spec in enumerate(cache.layers):
            heads = slice(spec.num_kv_heads)
            cache = cache.write(layer, slots, rows[:, :, heads], rows[:, :, heads, : spec.value_shape[1]])
            keys, values = cache.read(layer, seen)
            rows = rows + (keys.sum() + values.sum()).astype(rows.dtype)
    return cache.replace(lanes="host"), rows


def loop(cache, slots, seen, rows):
    """The same in a loop on the device."""

    def body(carry):
        i, cache, rows = carry
        return i + 1, *step(cache, slots + i, seen, rows)

    return lax.while_loop(lambda carry: carry[0] < 9, body, (jnp.int32(0), cache, rows))[1:]


def wasteful(cache, slots, seen, rows):
    """Reads a slice of the pool, a column of every slot, and writes the slice back."""
    part = cache.buffer[:, :32] * 2
    return cache.replace(buffer=cache.buffer.at[:, 32:].set(part)), rows


# A result as large as the pool may come from these: they write into their operand, or only name a value.
IN_PLACE = {"parameter", "tuple", "get-tuple-element", "while", "call", "fusion", "bitcast"}
IN_PLACE |= {"scatter", "dynamic-update-slice"}


def large_results(text, elements):
    """Instructions of a program, those inside fusions included, that make an array of so many elements."""
    found = []
    for line in text.splitlines():
        made = re.match(r"\s+(?:ROOT )?%?\S+ = \w+\[([\d,]+)\]\S* ([a-z][a-z\-]*)\(", line)
        # A kernel may, where its result is its operand.
        in_place = made and (made[2] in IN_PLACE or "output_to_operand_aliasing" in line)
        if made and np.prod([int(n) for n in made[1].split(",")]) >= elements and not in_place:
            found.append(line.strip()[:120])
    return found


def assert_in_place(function, dtype, compile):
    temporaries = set()
    for pages in (256, 1024):
        arguments = shapes_of(pages, dtype)
        layout, compiled = arguments[0].layout, compile(function, *arguments)
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= layout.nbytes
        assert large_results(compiled.as_text(), layout.units * layout.unit // 16) == []
        temporaries.add(memory.temp_size_in_bytes)
    assert len(temporaries) == 1 and temporaries.pop() < layout.nbytes // 16


def compile_here(function, *arguments):
    return jax.jit(function, donate_argnums=0).lower(*arguments).compile()


def dtypes_here():
    """Before 0.11 XLA has no bfloat16 scatter on CPUs: it converts the whole operand to float32 and back."""
    old = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="this XLA has no bfloat16 scatter on CPUs")
    return ["float32", pytest.param("bfloat16", marks=old)]


@pytest.mark.parametrize("function", [step, loop], ids=["step", "loop"])
@pytest.mark.parametrize("dtype", dtypes_here())
def test_the_pool_stays_in_place(function, dtype):
    assert_in_place(function, dtype, compile_here)


@pytest.mark.parametrize("function", [step, loop], ids=["step", "loop"])
def test_the_pool_stays_in_place_on_sm_90(function):
    if reason := aot.missing():
        pytest.skip(reason)
    assert_in_place(function, "bfloat16", aot.compile_for_h200)


def test_a_copied_pool_would_be_seen():
    arguments = shapes_of(256, "float32")
    compiled = compile_here(wasteful, *arguments)
    assert large_results(compiled.as_text(), arguments[0].buffer.size // 16)
    assert compiled.memory_analysis().temp_size_in_bytes > arguments[0].layout.nbytes // 16


def test_views_are_few_leaves():
    assert len(jax.tree.leaves(make_pool())) == 1
    assert len(jax.tree.leaves(init_cache(LAYERS, page_size=4, num_pages=3, num_swa_pages=3))) == len(LAYERS)
