"""Where the rows of one forward are written: virtual, FULL and SWA locations, positions and the anchor, in one launch.

A program handles 128 of the B * D rows, whatever request they belong to, so D need not be a power of two.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax

from pallas_kernels import backend as backends
from pallas_kernels import buffers, operands
from pallas_kernels.buffers import Destination, PackedMetadata, WindowBuffers
from pallas_kernels.lanes import Lanes
from pallas_kernels.operands import Inputs, PageMap, Source, scalar_array, scalar_value
from pallas_kernels.span import Span
from pallas_kernels.views import Array, Section

BLOCK = 128  # rows of the forward a program handles


def draft_write_window(
    start: Array,
    req_rows: Array,
    source: Array,
    out: WindowBuffers | PackedMetadata,
    *,
    page_size: int,
    granularity: str = "page",
    anchor: Array | None = None,
    v2p: Array | None = None,
    full_v2p: Array | None = None,
    swa_v2p: Array | None = None,
    limit=None,
    backend: str | None = None,
):
    """Write where the D rows of each request go: positions start[b] .. start[b] + D - 1, and the cache slots of each.

    For row j of request b, at position p = start[b] + j, with e the source's entry for p:

        positions[b, j]   = p
        virtual_loc[b, j] = e                                    granularity 'token'
                          = e * page_size + p % page_size        granularity 'page' (e itself when negative)
        full_loc[b, j]    = physical FULL page * page_size + offset in the page
        swa_loc[b, j]     = the same in the SWA pool
        anchor_ids[b, 0]  = anchor[b]                            the other columns stay as they are

    An id that is negative, unbound or past the end of a map is written to slot 0, the sink; the virtual location keeps
    its value. A position past the source's last column, below 0 or at or past `limit` has the sink in all three
    locations. A request row outside the source reads row 0, the sink row.

    Args:
      start: int[B], tokens committed to each request's cache, the position of its first row.
      req_rows: int[B], row of `source` of each request. Padded rows use row 0.
      source: the request table, int[R, columns]: virtual pages ('page') or virtual token ids ('token').
      out: destination, WindowBuffers or PackedMetadata. Donate it to the surrounding jit and it is written in place.
      page_size: tokens a page, a power of two.
      granularity: 'page' or 'token', what a column of `source` stands for.
      anchor: int[B], the token each request starts from, or None to leave anchor_ids as it is.
      v2p: int[NV, 2], physical FULL and SWA page of each virtual page, -1 where unbound; or instead
      full_v2p: int[NV], physical FULL page of each virtual page; without it they are equal; and
      swa_v2p: int[NV'], physical SWA page of each virtual page.
      limit: end of the context in tokens, a Python integer or an integer array of one element.
      backend: as in decode_metadata.

    Returns:
      The same type as `out`.

    Raises:
      ValueError: for arguments against these rules; the message names the argument and the rule.

    Source: the draft write window of SGLang's unified KV memory, its contract restated; the design is our own.

    >>> import jax.numpy as jnp
    >>> out = WindowBuffers(*(jnp.zeros((1, 4), jnp.int32) for _ in range(2)), None, jnp.zeros((1, 4), jnp.int32))
    >>> pages, v2p = jnp.array([[0, 0, 0], [5, 9, 2]]), jnp.array([0, 0, 3, 0, 0, 7, 0, 0, 0, 5])
    >>> window = draft_write_window(jnp.array([6]), jnp.array([1]), pages, out, page_size=4, full_v2p=v2p)
    >>> window.virtual_loc.tolist(), window.full_loc.tolist()
    ([[38, 39, 8, 9]], [[22, 23, 12, 13]])
    """
    backends.check(backend)
    operands.check_integers("start", start, 1)
    batch = start.shape[0]
    operands.check_integers("req_rows", req_rows, 1, batch)
    buffers.check(out, WindowBuffers, batch, "start")
    flat, destination = buffers.flatten(out, WindowBuffers._fields)
    inputs = Inputs()
    starts = inputs.add("start", start, 1, batch)
    rows = inputs.add("req_rows", req_rows, 1, batch)
    table = operands.make_source(inputs, source, granularity, page_size)
    full, swa = operands.make_maps(inputs, v2p, full_v2p, swa_v2p, None, "swa_loc" in destination)
    if anchor is not None and "anchor_ids" not in destination:
        raise ValueError("anchor was given but out.anchor_ids is None: give a destination or leave anchor out")
    anchors = None if anchor is None else inputs.add("anchor", anchor, 1, batch)
    end = None if limit is None else inputs.scalar("limit", limit)
    D = destination["positions"].shape[1]
    span = Span(B=batch, rows=D, tokens=starts, new=None, first=1, start=0, cached=0, limit=end)
    operation = Window(destination, span, rows, table, named_maps(full, swa), anchors, labels=tuple(inputs.labels))
    if batch * D == 0:
        return out
    return buffers.unflatten(out, backends.run(operation, backend, inputs.arrays, flat), destination)


def named_maps(full: PageMap, swa: PageMap | None) -> tuple[tuple[str, PageMap], ...]:
    """The maps of the physical locations, by the names of their destinations."""
    return tuple(pair for pair in (("full_loc", full), ("swa_loc", swa)) if pair[1] is not None)


@dataclasses.dataclass(frozen=True)
class Window:
    """One call, or a piece of one: an `Operation` (see lanes.py). Row j of a request is at position start + j.

    span      where rows start and how many there are: those that a request does not have are written to the sink
    maps      pairs of a destination with its map
    anchor    tokens for column 0 of anchor_ids, or None
    fill      whether the other columns of anchor_ids become 0, and do not stay as they are
    """

    destination: Destination
    span: Span
    req_rows: Section
    source: Source
    maps: tuple[tuple[str, PageMap], ...]
    anchor: Section | None
    fill: bool = False
    labels: tuple[str, ...] = ()
    name = "draft_write_window"
    reference_is_faster = False

    @property
    def D(self) -> int:
        return self.destination["positions"].shape[1]

    @property
    def programs(self) -> int:
        return -(-self.span.B * self.D // BLOCK)

    def body(self, lanes: Lanes, program, ins: tuple, outs: tuple) -> None:
        item = lanes.iota(lanes.width(self.span.B * self.D, BLOCK)) + program * BLOCK
        valid = item < self.span.B * self.D
        b = lanes.div(item, self.D)
        j = item - b * self.D
        start, new = self.span.load_start(lanes, ins, b, valid)
        row = self.source.row(lanes, self.req_rows.load(lanes, ins, (b,), valid))
        position = start + j
        live = valid if new is None else valid & (j < new)
        if self.span.limit is not None:
            live = live & (position < scalar_value(self.span.limit, lanes, ins))
        entry, live = self.source.load(lanes, ins, row, position, live)
        page, offset = self.source.split(entry, position)
        values = {"positions": position, "virtual_loc": lanes.where(live, self.source.virtual(lanes, entry, offset), 0)}
        for name, page_map in self.maps:
            physical = page_map.load(lanes, ins, page, offset, self.source.shift, live)
            values[name] = lanes.where(physical < 0, 0, (physical << self.source.shift) + offset)
        masks = dict.fromkeys(values, valid)
        if self.anchor is not None:
            first = valid & (j == 0)
            masks["anchor_ids"] = valid if self.fill else first
            values["anchor_ids"] = self.anchor.load(lanes, ins, (b,), first)
        for name, value in values.items():  # after every load: a store would hold the later ones back
            self.destination[name].store(lanes, outs, (b, j), value, masks[name])

    def reference(self, inputs: tuple, outputs: tuple) -> tuple:
        if not self.span.B * self.D:
            return outputs
        start, new = self.span.read_start(inputs)
        j = lax.iota(jnp.int32, self.D)[None, :]
        position = start[:, None] + j
        live = jnp.ones(position.shape, bool) if new is None else j < new[:, None]
        if self.span.limit is not None:
            live = live & (position < scalar_array(self.span.limit, inputs))
        entry, live = self.source.gather(inputs, self.req_rows.read(inputs)[:, None], position, live)
        page, offset = self.source.split(entry, position)
        page = jnp.where(live, page, -1)
        values = {"positions": position, "virtual_loc": jnp.where(live, self.source.virtual(jnp, entry, offset), 0)}
        for name, page_map in self.maps:
            physical = page_map.gather(inputs, page, offset, self.source.shift)
            values[name] = jnp.where(physical < 0, 0, (physical << self.source.shift) + offset)
        if self.anchor is not None:
            others = 0 if self.fill else self.destination.read(outputs, "anchor_ids")
            values["anchor_ids"] = jnp.where(j == 0, self.anchor.read(inputs)[:, None], others)
        return self.destination.write(outputs, values)
