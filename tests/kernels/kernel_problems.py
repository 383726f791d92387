"""Random problems for the metadata operations: inputs, what the oracle makes of them, which cells it never looked at.

A problem's `Shape` is static, so that it compiles once; its contents are free. Inputs and destinations lie in named
buffers, each filling one or with other cells around it, so that comparing whole buffers watches the guard cells too.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import kernel_forward as forward
import kernel_kpool as kpool
import kernel_oracle as oracle
import numpy as np
import quick_compile
from numpy.lib.stride_tricks import as_strided

import pallas_kernels
from pallas_kernels import (
    DecodeTables,
    KPoolShape,
    MetadataLayout,
    PackedMetadata,
    RaggedLayout,
    View,
    WindowBuffers,
    checked,
    kpool_lengths,
    kpool_places,
    kpool_selection,
    kpool_tables,
    state_indices,
    streams,
    tables,
    window,
)

STALE = -7  # in every cell of a destination before a call
WINDOW = ("virtual_loc", "full_loc", "swa_loc", "positions", "anchor_ids")
DECODE = ("cache_seqlens", "cu_seqlens_k", "page_table", "swa_page_table")
STATE_TABLES = ("slot_of_req", "state_v2p")
TABLES = ("source", "v2p", "full_v2p", "swa_v2p", "full_to_swa", "topk_result", "page_table", *STATE_TABLES)
PLAIN = tuple(f"forward_metadata, {mode}" for mode in forward.MODES)
POOLED = tuple(f"forward_metadata, pooled {mode}" for mode in forward.MODES)
FORWARDS = PLAIN + POOLED
STATES = {"arrays": STATE_TABLES, "wide": STATE_TABLES[:1], "strided": STATE_TABLES[1:], "packed": ()}  # by form
ORACLES = {
    "decode_metadata": oracle.decode,
    "decode_lengths": oracle.lengths,
    "draft_extend_metadata": oracle.draft_extend,
    "kv_read_table": oracle.read_table,
    "kv_read_stream": oracle.read_stream,
    "draft_write_window": oracle.window,
    "extend_cache_locs": oracle.extend_locs,
    **dict.fromkeys(FORWARDS, forward.metadata),
    "kpool_append_tail": kpool.append_tail,
    "kpool_ragged_layout": kpool.ragged,
}
OUTPUTS = {  # the others have one, `out`
    "decode_metadata": DECODE,
    "decode_lengths": DECODE[:2],
    "draft_extend_metadata": (*DECODE, "cu_seqlens_q"),
    "draft_write_window": WINDOW,
    "kpool_ragged_layout": RaggedLayout._fields,
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Everything about a problem that is known at compile time.

    B, D, P   requests, rows of a write window, pages of a row of a table
    N         cells of a stream
    source    (rows, columns) of the request table
    NV        virtual pages
    maps      'identity', 'full' (FULL pages alone), 'pages' (FULL and SWA apart), 'pair' (interleaved) or 'tokens'
    form      'arrays'; 'packed' (one buffer of a MetadataLayout); 'wide' (a buffer with a row a request, which holds
              all destinations side by side); 'strided' (transposed, every other cell of one vector). In the last two
              the inputs are parts of buffers too
    """

    B: int
    D: int
    P: int
    N: int
    source: tuple[int, int]
    NV: int
    page_size: int
    granularity: str
    maps: str
    form: str
    zero_tail: bool
    max_pages: int | None = None

    @property
    def reach(self) -> int:
        """Tokens of a row of the request table."""
        return self.source[1] * (self.page_size if self.granularity == "page" else 1)

    @property
    def pool(self) -> int:
        """Tokens of a pool."""
        return min(self.page_size, 4)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an array lies: all of a buffer, or, with strides, a part of one."""

    buffer: str
    shape: tuple[int, ...]
    offset: int = 0
    strides: tuple[int, ...] | None = None

    def argument(self, buffers):
        """The array as a kernel is given it."""
        buffer = buffers[self.buffer]
        return buffer if self.strides is None else View(buffer, self.offset, self.shape, self.strides)

    def cells(self, buffers) -> np.ndarray:
        """The array in NumPy; writing to it writes to the buffer."""
        buffer = buffers[self.buffer]
        if self.strides is None:
            return buffer
        return as_strided(buffer.reshape(-1)[self.offset :], self.shape, [n * buffer.itemsize for n in self.strides])


class Plan:
    """How an operation is called for a shape: the places of all arrays and the static arguments."""

    def __init__(self, operation: str, shape: Shape):
        self.operation, self.shape = operation, shape
        self.function, _, mode = operation.replace("pooled ", "").partition(", ")
        self.buffers: dict[str, tuple[int, ...]] = {}
        self.inputs: dict[str, Place] = {}
        self.static = {"page_size": shape.page_size, "granularity": shape.granularity, "zero_tail": shape.zero_tail}
        self.layout = None
        one, B = (1,), (shape.B,)
        takes = {"req_rows": B, "source": shape.source}
        match operation:
            case "decode_metadata":
                takes |= {"seq_lens": B, "seq_len_delta": one}
            case "decode_lengths":
                takes = {"seq_lens": B, "seq_len_delta": one}
                self.static = {}
            case "draft_extend_metadata":
                takes |= {"seq_lens": B, "extend_seq_lens": B}
            case "kv_read_table":
                takes |= {"seq_lens": B}
                self.static["seq_len_delta"] = shape.D
            case "kv_read_stream":
                takes |= {"seq_lens": B, "indptr": (shape.B + 1,)} | ({} if shape.form == "arrays" else {"kv_start": B})
            case "draft_write_window":
                takes |= {"start": B, "anchor": B, "limit": one}
            case "extend_cache_locs":
                takes |= {"start": B, "end": B}
            case "kpool_append_tail":
                takes = {"topk_result": (shape.B, 6 * shape.pool), "seq_lens": B, "pool_lens": B}
                takes |= {} if shape.form == "arrays" else {"page_table": (shape.B, shape.P * shape.page_size)}
                self.static = {"pool": shape.pool}
            case "kpool_ragged_layout":
                takes = {"page_table": (shape.B, shape.P * shape.pool), "pooled_seq_lens": (shape.N,)}
                takes |= dict.fromkeys(("cu_pages_excl", "pool_pages", "cu_q_len_excl", "q_len"), B)
                self.static = {"pool": shape.pool, "index_page_size": shape.page_size}
            case _:
                takes |= {"seq_lens": B, "anchor": B, "limit": one} | ({"extend_lens": B} if "extend" in mode else {})
                takes |= {n: {"slot_of_req": shape.source[:1], "state_v2p": (shape.NV,)}[n] for n in STATES[shape.form]}
                self.static |= {"mode": mode}
                self.static |= {"pool": shape.pool, "topk": 6 * shape.pool} if operation in POOLED else {}
        if "page_table" in OUTPUTS.get(operation, ()) or operation == "kv_read_table":
            self.static["max_pages"] = shape.max_pages
        elif operation not in FORWARDS:
            self.static.pop("zero_tail", None)
        for name, size in takes.items():
            self.inputs[name] = self._input(name, size)
        self._place_maps()
        self._place_outputs()

    @property
    def has_swa(self) -> bool:
        by_token = self.shape.maps == "tokens" and self.operation not in ("draft_write_window", *FORWARDS)
        return self.operation not in POOLED and (self.shape.maps in ("pages", "pair") or by_token)

    def _input(self, name: str, shape: tuple) -> Place:
        parts = {"wide": _beside, "strided": _apart}.get(self.shape.form)
        if parts is None or name in ("seq_len_delta", "limit"):
            self.buffers[name] = shape
            return Place(name, shape)
        self.buffers[name], (place,) = parts(name, [shape])
        return place

    def _place_maps(self) -> None:
        shape, tables = self.shape, "source" in self.inputs and self.operation != "extend_cache_locs"
        pages, fewer, tokens = (shape.NV,), (max(shape.NV - 2, 1),), (max(shape.NV * shape.page_size - 3, 1),)
        if not tables or shape.maps == "identity":
            return
        if self.operation in ("kv_read_table", "kv_read_stream"):
            if shape.maps == "pair":  # the second column of an interleaved map
                self.buffers["v2p"] = (shape.NV, 2)
                self.inputs["v2p"] = Place("v2p", pages, 1, (2,))
            else:
                name, size = ("full_to_swa", tokens) if shape.maps == "tokens" else ("v2p", pages)
                self.inputs[name] = self._input(name, size)
            return
        sizes = {
            "full": {"full_v2p": pages},
            "pages": {"full_v2p": pages} | ({"swa_v2p": fewer} if self.has_swa else {}),
            "pair": {"v2p": (shape.NV, 2)},
            "tokens": {"full_to_swa": tokens} if self.has_swa else {},
        }[shape.maps]
        self.inputs |= {name: self._input(name, size) for name, size in sizes.items()}

    def _place_outputs(self) -> None:
        shape, operation = self.shape, self.operation
        table, window = (shape.B, shape.P), (shape.B, shape.D)
        sizes = {"cache_seqlens": (shape.B,), "cu_seqlens_k": (shape.B + 1,), "cu_seqlens_q": (shape.B + 1,)}
        sizes |= {"page_table": table, "swa_page_table": table} | dict.fromkeys(WINDOW, window)
        sizes |= dict.fromkeys(("out", *RaggedLayout._fields), (shape.N,))
        if operation in ("kv_read_table", "kpool_append_tail"):
            sizes["out"] = table if operation == "kv_read_table" else (shape.B, 7 * shape.pool - 1)
        names = [n for n in OUTPUTS.get(operation, ("out",)) if self.has_swa or not n.startswith("swa_")]
        if operation in FORWARDS:
            rows = 1 if self.static["mode"] == "chain" else shape.D
            pooled = KPoolShape(shape.pool, rows, sms=12) if operation in POOLED else None
            self.layout = MetadataLayout(shape.B, shape.D, shape.P, self.has_swa, pooled, has_state=True)
            names = [n for n in self.layout.sections if n != "cu_seqlens_q" or "extend_lens" in self.inputs]
        elif shape.form == "packed" and set(names) <= {*OUTPUTS["draft_extend_metadata"], *WINDOW}:
            self.layout = MetadataLayout(shape.B, shape.D, shape.P, self.has_swa)
        if self.layout is not None:
            self.buffers["packed"] = (self.layout.size,)
            sections = {name: self.layout.sections[name] for name in names}
            self.outputs = {n: Place("packed", s.shape, s.offset, s.strides) for n, s in sections.items()}
        elif shape.form in ("arrays", "packed"):
            self.buffers |= {name: sizes[name] for name in names}
            self.outputs = {name: Place(name, sizes[name]) for name in names}
        else:
            parts = {"wide": _beside, "strided": _apart}[shape.form]
            self.buffers["outputs"], places = parts("outputs", [sizes[name] for name in names])
            self.outputs = dict(zip(names, places, strict=True))

    def call(self, buffers: dict, backend: str | None) -> dict:
        """The destination buffers after the call."""
        arguments = {name: place.argument(buffers) for name, place in self.inputs.items()}
        out = {name: place.argument(buffers) for name, place in self.outputs.items()}
        if self.layout is not None:
            out = PackedMetadata(buffers["packed"], self.layout)
        elif list(out) == ["out"]:
            (out,) = out.values()
        else:
            kinds = {"kpool_ragged_layout": RaggedLayout, "draft_write_window": WindowBuffers}
            kind = kinds.get(self.function, DecodeTables)
            out = kind(**dict.fromkeys(kind._fields) | out)
        result = getattr(pallas_kernels, self.function)(**arguments, out=out, **self.static, backend=backend)
        if self.layout is not None:
            return {"packed": result.buffer}
        fields = result._asdict() if isinstance(result, tuple) else {"out": result}
        return {p.buffer: getattr(fields[n], "buffer", fields[n]) for n, p in self.outputs.items()}


def _beside(buffer: str, shapes: list) -> tuple[tuple, list[Place]]:
    """Arrays side by side in a matrix, with a row above, two below and a column around each."""
    columns = [shape[1] if len(shape) == 2 else 1 for shape in shapes]
    width, places, column = sum(columns) + len(shapes) + 1, [], 1
    for shape, own in zip(shapes, columns, strict=True):
        places.append(Place(buffer, shape, width + column, (width, 1)[: len(shape)]))
        column += own + 1
    return (max(shape[0] for shape in shapes) + 3, width), places


def _apart(buffer: str, shapes: list) -> tuple[tuple, list[Place]]:
    """Arrays one after the other in a vector, transposed, in every other cell."""
    places, end = [], 3
    for shape in shapes:
        strides = (2, 2 * shape[0] + 1)[: len(shape)]
        places.append(Place(buffer, shape, end, strides))
        end += sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 4 if 0 not in shape else 1
    return (end + 5,), places


plan = functools.cache(Plan)


class Watched:
    """An array as the oracle sees it: every cell that is looked at is noted."""

    def __init__(self, cells: np.ndarray, seen: np.ndarray):
        self.cells, self.seen, self.shape = cells, seen, cells.shape

    def __len__(self):
        return len(self.cells)

    def __getitem__(self, index):
        self.seen[index] = True
        return self.cells[index]


class Problem:
    """Contents for a plan. `contents` holds, one a request: lengths, rows, starts, spans; and delta, limit, bad, seed.

    buffers    what the call is given, by name
    expected   the destination buffers after it, by the oracle
    seen       for every buffer of inputs the cells that the oracle looked at
    """

    def __init__(self, operation: str, shape: Shape, contents: dict):
        self.plan, self.contents = plan(operation, shape), contents
        rng = np.random.default_rng(contents["seed"])
        wild = lambda size: rng.integers(-9, 1000, size).astype(np.int32)  # noqa: E731
        self.buffers = {name: wild(size) for name, size in self.plan.buffers.items()}
        for name, place in self.plan.inputs.items():
            place.cells(self.buffers)[...] = self._input(name, shape, contents, rng, place.shape)
        for place in self.plan.outputs.values():
            self.buffers[place.buffer][...] = STALE
        self.expected = {p.buffer: self.buffers[p.buffer].copy() for p in self.plan.outputs.values()}
        self.seen = {p.buffer: np.zeros(self.plan.buffers[p.buffer], bool) for p in self.plan.inputs.values()}
        self._ask_oracle()

    @staticmethod
    def _input(name: str, shape: Shape, contents: dict, rng, size: tuple):
        spans, starts = contents["spans"], np.maximum(contents["starts"], 0)
        if name in ("topk_result", "page_table"):  # whose rows belong to requests, and move with them
            column = np.arange(size[1])
            return (contents["lengths"][:, None] * 31 + column * 7) % 1009 - 5
        match name:
            case "pool_lens":
                return contents["lengths"] // shape.pool
            case "pool_pages":
                return spans
            case "q_len":
                return starts
            case "cu_pages_excl":
                return np.cumsum(spans) - spans
            case "cu_q_len_excl":
                return np.cumsum(starts) - starts
            case "pooled_seq_lens":
                return rng.integers(0, 3 * shape.N, size)
            case "extend_lens":
                return np.minimum(spans, shape.D)
            case "seq_lens":
                return contents["lengths"]
            case "req_rows":
                return contents["rows"]
            case "start":
                return contents["starts"]
            case "kv_start":
                return starts
            case "end":
                return contents["starts"] + spans - 1
            case "extend_seq_lens":
                return spans
            case "indptr":
                return np.concatenate([[0], np.cumsum(spans)]) + contents["delta"]
            case "anchor":
                return contents["lengths"] + 7
            case "seq_len_delta":
                return contents["delta"]
            case "limit":
                return contents["limit"]
        if name in STATE_TABLES:  # state slots, some of them 0, unbound or past every map
            return rng.choice([-1, 0, *range(1, shape.NV + 2)], size)
        # Ids: tokens or pages, some of them unbound or past every map; the largest still has its tokens in an int32.
        by_token = {"source": shape.granularity == "token", "full_to_swa": True}.get(name, False)
        largest = 2**31 - 1 if by_token else (2**31 - 1) // shape.page_size
        most = shape.NV * (shape.page_size if by_token else 1)
        good, wrong = rng.integers(0, most, size), rng.choice([-1, -2, most, most + 5, largest], size)
        return np.where(rng.random(size) < contents["bad"], wrong, good)

    def _ask_oracle(self) -> None:
        see = lambda p: Watched(p.cells(self.buffers), p.cells(self.seen))  # noqa: E731
        arguments = {name: see(place) for name, place in self.plan.inputs.items()}
        if (pair := arguments.get("v2p")) is not None and len(pair.shape) == 2:
            del arguments["v2p"]
            arguments["full_v2p"] = Watched(pair.cells[:, 0], pair.seen[:, 0])
            if self.plan.has_swa:
                arguments["swa_v2p"] = Watched(pair.cells[:, 1], pair.seen[:, 1])
        arguments |= {name: int(arguments[name][0]) for name in ("seq_len_delta", "limit") if name in arguments}
        out = {name: place.cells(self.expected) for name, place in self.plan.outputs.items()}
        out = out["out"] if list(out) == ["out"] else out
        ORACLES[self.plan.operation](out, **arguments, **self.plan.static)

    def dead(self) -> dict[str, np.ndarray]:
        """For the request table and each map, the cells of its buffer that no request needs."""
        return {n: ~self.seen[p.buffer] for n, p in self.plan.inputs.items() if n in TABLES}

    def run(self, backend: str | None) -> dict[str, np.ndarray]:
        """The destination buffers after a call."""
        call = _compiled(self.plan.operation, self.plan.shape)
        buffers = self.buffers
        if backend == "checked":
            call, buffers = self.plan.call, {name: jnp.asarray(cells) for name, cells in buffers.items()}
        return {name: np.asarray(cells) for name, cells in call(buffers, backend).items()}

    def check(self, backend: str | None) -> dict[str, np.ndarray]:
        """Run, and compare every cell of every destination with the oracle's."""
        after = self.run(backend)
        for name, cells in self.expected.items():
            message = f"{self.plan.operation}, {backend}, {name}"
            np.testing.assert_array_equal(after[name], cells, err_msg=message, strict=True)
        return after

    def in_parts(self, backend: str | None) -> dict[str, np.ndarray]:
        """The destination buffers after the operations that a forward is made of, one launch after the other."""
        arguments = {name: np.array(place.cells(self.buffers)) for name, place in self.plan.inputs.items()}
        if self.plan.operation in POOLED:  # whose parts know no limit
            del arguments["limit"]
        out = PackedMetadata(self.buffers["packed"], self.plan.layout)
        sections = forward.in_parts(out=out, **arguments, **self.plan.static, backend=backend)
        after = {"packed": self.buffers["packed"].copy()}
        for name, place in self.plan.outputs.items():
            place.cells(after)[...] = sections[name]
        return after

    def requests(self, after: dict[str, np.ndarray]) -> list[list[int] | None]:
        """What each request has in the destinations; None where a stream is cut off inside it."""
        cells = {name: place.cells(after) for name, place in self.plan.outputs.items()}
        B = self.plan.shape.B
        if self.plan.operation == "kpool_ragged_layout":
            return [None] * B
        if self.plan.operation in ("kv_read_stream", "extend_cache_locs"):
            out, sizes = cells["out"], np.maximum(self.contents["spans"], 0)
            first = self.contents["delta"]
            if self.plan.operation == "extend_cache_locs":
                sizes, first = np.maximum(sizes - 1, 0), 0
            ends = first + np.cumsum(sizes)
            parts = [out[end - size : end].tolist() for end, size in zip(ends, sizes, strict=True)]
            return [part if end <= len(out) else None for part, end in zip(parts, ends, strict=True)]
        each = [x for name, x in cells.items() if len(x) == B and name != "schedule"]  # without prefix sums
        return [[x[b].tolist() for x in each] for b in range(B)]

    def permuted(self, order: np.ndarray) -> "Problem":
        """The same requests in another order, and the same tables."""
        rows = {name: self.contents[name][order] for name in ("lengths", "rows", "starts", "spans")}
        return Problem(self.plan.operation, self.plan.shape, self.contents | rows)


@functools.cache
def _compiled(operation: str, shape: Shape):
    return jax.jit(plan(operation, shape).call, static_argnums=1, compiler_options=quick_compile.options())


def ordinary(operation: str, shape: Shape, seed: int) -> Problem:
    """A problem without a strategy: lengths up to full, a few bad ids, and rows beside the table."""
    rng = np.random.default_rng(seed)
    full = shape.P * shape.page_size
    each = lambda low, high: rng.integers(low, high + 1, shape.B).astype(np.int32)  # noqa: E731
    contents = {"lengths": each(0, full), "rows": each(-1, shape.source[0]), "starts": each(-1, shape.reach)}
    contents |= {
        "spans": each(0, 2 * shape.N // max(shape.B, 1)),
        "delta": rng.integers(0, 3),
        "limit": rng.integers(1, full + 1),
    }
    return Problem(operation, shape, contents | {"bad": 0.2, "seed": seed})


def tiny_blocks(monkeypatch) -> None:
    """Blocks of 4 lanes and 3 programs: small checked problems take every turn of every loop that large ones take, and
    more than 5 requests are many."""
    monkeypatch.setattr(checked.CheckedLanes, "least", 4)
    sizes = {"PROGRAMS": 3, "HEAD_LANES": 4, "WARP_LANES": 4, "FEW": 5, "BLOCK": 4, "COLUMNS": 4}
    pooled = kpool_lengths, kpool_places, kpool_selection, kpool_tables
    for module in (tables, streams, window, state_indices, *pooled):
        for name in sizes.keys() & vars(module).keys():
            monkeypatch.setattr(module, name, sizes[name])
