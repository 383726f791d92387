"""Where the rows of one forward are written: virtual, FULL and SWA locations, positions and the anchor, in one launch.

A program handles 128 of the B * D rows, whatever request they belong to, so D need not be a power of two.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import backend as backends
from pallas_kernels import buffers, lanes, operands, reference
from pallas_kernels.buffers import Destination, PackedMetadata, WindowBuffers
from pallas_kernels.operands import PageMap, Source

BLOCK = 128  # rows of the forward a program handles


@dataclasses.dataclass(frozen=True)
class _Spec:
    """Static description of a call; limit is None, a number of tokens, or 'operand' for one known at run time."""

    B: int
    D: int
    source: Source
    full: PageMap
    swa: PageMap | None
    destination: Destination
    map_operands: int
    has_anchor: bool
    limit: int | str | None


def draft_write_window(
    start,
    req_rows,
    source,
    out: WindowBuffers | PackedMetadata,
    *,
    page_size: int,
    granularity: str = "page",
    anchor=None,
    v2p=None,
    full_v2p=None,
    swa_v2p=None,
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
    buffers.check(out, WindowBuffers, batch)
    flat, destination = buffers.flatten(out, WindowBuffers._fields)
    tables, full, swa = operands.make_maps(v2p, full_v2p, swa_v2p, None, "swa_loc" in destination)
    extra = []
    if anchor is not None:
        operands.check_integers("anchor", anchor, 1, batch)
        if "anchor_ids" not in destination:
            raise ValueError("anchor was given but out.anchor_ids is None: give a destination or leave anchor out")
        extra.append(anchor)
    limit = _check_limit(limit)
    if isinstance(limit, jax.Array):
        extra.append(limit)
        limit = "operand"
    spec = _Spec(
        B=batch,
        D=destination["positions"].shape[1],
        source=operands.make_source(source, granularity, page_size),
        full=full,
        swa=swa,
        destination=destination,
        map_operands=len(tables),
        has_anchor=anchor is not None,
        limit=limit,
    )
    if spec.B * spec.D == 0:
        return out
    inputs = tuple(map(operands.as_int32, (start, req_rows, source, *tables, *extra)))
    return buffers.unflatten(out, _window(spec, backend, inputs, flat), destination)


def draft_write_window_reference(*args, **kwargs):
    """`draft_write_window` with backend='reference': the same arguments and result, computed with plain jnp."""
    return draft_write_window(*args, **kwargs, backend="reference")


@functools.partial(jax.jit, static_argnums=(0, 1))
def _window(spec: _Spec, backend: str | None, inputs: tuple, flat: tuple) -> tuple:
    launch, plain = functools.partial(_launch, spec), functools.partial(reference.window, spec)
    return backends.run(backend, launch, plain, inputs, flat)


def _launch(spec: _Spec, inputs: tuple, flat: tuple, *, interpret: bool) -> tuple:
    """One pallas_call over all rows, its outputs aliasing the destination buffers."""
    count = lanes.width(spec.B * spec.D, BLOCK)

    def kernel(*refs):
        _write(spec, pl.program_id(0) * count + lanes.iota(count), refs[: len(inputs)], refs[len(inputs) + len(flat) :])

    return tuple(
        pl.pallas_call(
            kernel,
            grid=(-(-spec.B * spec.D // count),),
            name="draft_write_window",
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in flat],
            input_output_aliases={len(inputs) + i: i for i in range(len(flat))},
            compiler_params=lanes.compiler_params(),
            interpret=interpret,
        )(*inputs, *flat)
    )


def _write(spec: _Spec, item, ins: tuple, outs: tuple) -> None:
    """Rows `item` (a vector of lanes) of the B * D rows, request by request."""
    start, req_rows, source, *rest = ins
    tables, rest = rest[: spec.map_operands], rest[spec.map_operands :]
    shift = spec.source.shift
    valid = item < spec.B * spec.D
    batch_row = lanes.div(item, spec.D)
    draft = item - batch_row * spec.D
    first = lanes.load(start, (batch_row,), valid, 0)
    source_row = spec.source.row(lanes.load(req_rows, (batch_row,), valid, 0))
    position = first + draft
    column = spec.source.column(position)
    live = valid & (column >= 0) & (column < spec.source.columns)
    if spec.limit is not None:
        live &= position < (lanes.load_scalar(rest[-1], (0,)) if spec.limit == "operand" else spec.limit)
    entry = lanes.load(source, (source_row, column), live, -1)
    page, offset = spec.source.split(entry, position)
    values = {"positions": position, "virtual_loc": jnp.where(live, spec.source.virtual(entry, offset), 0)}
    for name, page_map in (("full_loc", spec.full), ("swa_loc", spec.swa)):
        if page_map is not None:
            physical = page_map.lookup(tables, page, offset, shift, live)
            values[name] = jnp.where(physical < 0, 0, (physical << shift) + offset)
    masks = dict.fromkeys(values, valid)
    if spec.has_anchor:
        masks["anchor_ids"] = valid & (draft == 0)
        values["anchor_ids"] = lanes.load(rest[0], (batch_row,), masks["anchor_ids"], 0)
    for name, value in values.items():  # after every load: a store would hold the later ones back
        section = spec.destination[name]
        lanes.store(outs[section.buffer], (item + section.offset,), value, masks[name])


def _check_limit(limit):
    """None, a Python integer that fits int32, or an int32[1] array."""
    if limit is None:
        return None
    if not hasattr(limit, "dtype"):
        return min(max(operands.check_static("limit", limit), 0), 2**31 - 1)
    if limit.size != 1 or not jnp.issubdtype(limit.dtype, jnp.integer):
        raise ValueError(f"limit is {limit.dtype}{list(limit.shape)}: it must be one integer, a number of tokens")
    return operands.as_int32(limit).reshape(1)
