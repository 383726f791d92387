"""Runs recorded calls of metadata kernels through the public functions of pallas_kernels and compares what they write.

    python tests/conformance.py FILE.npz [--backend reference|interpret|checked|triton|mosaic] [--kernel NAME]

NAME is a recorded kernel. With `fused_` before it, its cases go through the one launch that a forward uses,
forward_metadata, into a packed buffer. It may hold wildcards, as in 'kpool_*' and 'fused_*'.

tests/data/README.md describes the format. Every destination cell holds -7 before a call and whole arrays are compared,
so a cell that the contract does not name must still be -7 afterwards. A case passes when the forms of its call do:
destinations as arrays of their own; packed, where the kernel has that form; for decode_metadata, the state indices and
pooled attention also everything as views of wider buffers. The cells around views and packed sections must stay as they
were. `reference` and `interpret`, which compile each form, run one form a case, in turn over a kernel's cases;
`checked`, which compiles none of them, and the GPU's backends run every form of every case.

Each failed case is one line, and the last line is `N passed, N failed`: together the cases of the file, or those of
--kernel. Whatever cannot be run has failed: an unknown kernel; a parameter, input or output that its adapter does not
use; a backend that declines. A --kernel that selects no case is one failure.

Exit status: 0 all passed, 1 something failed, 2 nothing was run (no GPU for a GPU backend, unreadable file, usage).
"""

import argparse
import dataclasses
import fnmatch
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np
import quick_compile
from conformance_cases import STALE, BadFile, Call, Case, Failed, File
from conformance_fused import FUSED_ADAPTERS
from conformance_kpool import KPOOL_ADAPTERS
from conformance_selection import SELECTION_ADAPTERS

import pallas_kernels as pk

GUARD = -99  # in the cells around views and between packed sections
GAP = 3  # guard cells between two views of a buffer
GPU_BACKENDS = ("triton", "mosaic")
QUIET_SECONDS = 1  # before progress is shown


# Forms of a call ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Place:
    """The cells of an array in a buffer of one dimension; the same three numbers as those of a View."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def cells(self) -> np.ndarray:
        return self.offset + np.tensordot(self.strides, np.indices(self.shape), axes=1)

    def view(self, buffer) -> pk.View:
        return pk.View(buffer, self.offset, self.shape, self.strides)


def lay_out(arrays: dict[str, np.ndarray]) -> tuple[dict[str, Place], int]:
    """Places one after another, with guard cells between arrays, between rows and between columns; and their end."""
    places, end = {}, GAP
    for name, array in arrays.items():
        strides = (2,) if array.ndim == 1 else (2 * array.shape[1] + GAP, 2)
        places[name] = Place(end, array.shape, strides)
        end += array.shape[0] * strides[0] + GAP
    return places, end


def embed(places: dict[str, Place], size: int, arrays: dict[str, np.ndarray]) -> jax.Array:
    buffer = np.full(size, GUARD, np.int32)
    for name, place in places.items():
        buffer[place.cells] = arrays[name]
    return on_device(buffer)


def on_device(array: np.ndarray) -> jax.Array:
    """A copy; unlike jnp.asarray it compiles nothing."""
    return jax.device_put(array, may_alias=False)


def extract(places: dict[str, Place], buffer: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays in a buffer, or Failed when a guard cell has changed."""
    guards = np.ones(buffer.shape, bool)
    for place in places.values():
        guards[place.cells] = False
    if changed := np.flatnonzero(guards & (buffer != GUARD)).tolist():
        raise Failed(f"guard cell {changed[0]} of the buffer around {', '.join(places)} became {buffer[changed[0]]}")
    return {name: buffer[place.cells] for name, place in places.items()}


def surround(array: np.ndarray) -> pk.View:
    """An input inside a wider buffer."""
    places, size = lay_out({"input": array})
    return places["input"].view(embed(places, size, {"input": array}))


class Separate:
    """Destinations as arrays of their own. `held` is what the call is given and may overwrite."""

    def __init__(self, call: Call):
        self.call = call
        self.held = {name: on_device(array) for name, array in call.before.items()}

    def inputs(self, arrays: dict[str, np.ndarray]) -> dict:
        """The input arrays as the function gets them."""
        return arrays

    def out(self, held):
        """`out` of the function."""
        return self.call.out(held)

    def after(self, result):
        """What is held after the call, from what the function returned."""
        return self.call.by_name(result)

    def read(self, held) -> dict[str, np.ndarray]:
        """The destinations by name."""
        return {name: np.asarray(array) for name, array in held.items()}


class Views(Separate):
    """Destinations as views of one buffer, and every input as a view of a buffer of its own."""

    def __init__(self, call: Call):
        self.call = call
        self.places, size = lay_out(call.before)
        self.held = embed(self.places, size, call.before)

    def inputs(self, arrays):
        return {name: surround(array) for name, array in arrays.items()}

    def out(self, held):
        return self.call.out({name: place.view(held) for name, place in self.places.items()})

    def after(self, result):
        return next(iter(self.call.by_name(result).values())).buffer

    def read(self, held):
        return extract(self.places, np.asarray(held))


class Packed(Views):
    """Destinations in a PackedMetadata; its other sections are guards."""

    def __init__(self, call: Call):
        self.call = call
        sections = call.layout.sections
        self.places = {n: Place(s.offset, s.shape, s.strides) for n, s in sections.items() if n in call.before}
        self.held = embed(self.places, call.layout.size, call.before)

    def inputs(self, arrays):
        return arrays

    def out(self, held):
        return pk.PackedMetadata(held, self.call.layout)

    def after(self, result):
        return result.buffer


FORMS = {"separate": Separate, "views": Views, "packed": Packed}


# Kernels --------------------------------------------------------------------------------------------------------------


MAPS = ("full_v2p", "swa_v2p", "full_to_swa")


def decode_metadata(case: Case) -> Iterator[Call]:
    lengths_only = case.meta.pop("skip_page_table", False)
    options = case.options("page_size", "zero_tail", "seq_len_delta")
    width = {"max_pages": case.meta.pop("max_seq_pages", None)}
    lengths, rest = case.inputs.pop("seq_lens"), case.requests() | case.arrays(*MAPS)
    delta = options.get("seq_len_delta", 0)
    if lengths_only:  # nothing else is used, and both tables stay as they are whatever zero_tail says
        options, width, rest = {"seq_len_delta": delta}, {}, {}
    elif not options["zero_tail"]:
        case.expect_stale_past(lengths + delta, options["page_size"])
    before = case.before(*pk.DecodeTables._fields)
    arguments = {"seq_lens": lengths} | rest | options | width
    function = pk.decode_lengths if lengths_only else pk.decode_metadata
    forms = ("separate", "views", "packed")
    yield Call(function, arguments, before, pk.DecodeTables, forms, decode_layout(before))


def draft_extend_metadata(case: Case) -> Iterator[Call]:
    options = case.options("page_size", "zero_tail", "max_pages")
    lengths, slots = case.inputs.pop("seq_lens"), case.inputs.get("full_to_swa")
    arguments = {"seq_lens": lengths} | case.arrays("extend_seq_lens", *MAPS) | case.requests() | options
    if not options.get("zero_tail"):
        case.expect_stale_past(lengths, options["page_size"])
    if tokens := case.arrays("out_cache_loc"):
        yield translation(tokens["out_cache_loc"], slots, case.before("swa_out_cache_loc"))
    before = case.before(*pk.DecodeTables._fields)
    forms = ("separate", "packed")
    yield Call(pk.draft_extend_metadata, arguments, before, pk.DecodeTables, forms, decode_layout(before))


def kv_read_table(case: Case) -> Iterator[Call]:
    options = case.options("page_size", "zero_tail", "seq_len_delta", "max_pages")
    lengths = case.inputs.pop("seq_lens")
    if not options["zero_tail"]:
        case.expect_stale_past(lengths + options.get("seq_len_delta", 0), options["page_size"])
    arguments = {"seq_lens": lengths} | case.requests() | case.arrays("v2p", "full_to_swa") | options
    yield Call(pk.kv_read_table, arguments, case.before("out"))


def kv_read_stream(case: Case) -> Iterator[Call]:
    arrays = case.arrays("seq_lens", "indptr", "kv_start", "v2p", "full_to_swa")
    yield Call(pk.kv_read_stream, arrays | case.requests() | case.options("page_size"), case.before("out"))


def draft_write_window(case: Case) -> Iterator[Call]:
    arguments = case.arrays("start", "anchor", "full_v2p", "swa_v2p") | case.requests() | case.options("page_size")
    shape = len(arguments["start"]), case.meta.pop("num_draft_tokens")
    names = {"anchor": "anchor_ids"}
    case.expected = {names.get(name, name): array.reshape(shape) for name, array in case.expected.items()}
    before = {name: np.full(shape, STALE, np.int32) for name in ("virtual_loc", "full_loc", "positions")}
    before |= case.before(*pk.WindowBuffers._fields)
    layout = pk.MetadataLayout(B=shape[0], D=shape[1], P=1, has_swa="swa_loc" in before)
    yield Call(pk.draft_write_window, arguments, before, pk.WindowBuffers, ("separate", "packed"), layout)


def extend_cache_locs(case: Case) -> Iterator[Call]:
    yield Call(pk.extend_cache_locs, case.arrays("start", "end") | case.requests(), case.before("out"))


class Replayed(NamedTuple):
    """The destinations of replay_state_indices."""

    state_indices: jax.Array | pk.View
    req_pool_indices: jax.Array | pk.View


def replay_state_indices(case: Case) -> Iterator[Call]:
    def replay(*, out, **arguments):
        return Replayed(*pk.replay_state_indices(out.req_pool_indices, out=out.state_indices, **arguments))

    rows = case.inputs.pop("req_pool_indices").astype(np.int32)
    arguments = {"valid": case.meta.pop("valid_bs")} | case.arrays("slot_of_req", "v2p")
    before = case.before("state_indices") | {"req_pool_indices": rows}
    yield Call(replay, arguments, before, Replayed, ("separate", "views"))


def commit_track_indices(case: Case) -> Iterator[Call]:
    arguments = case.arrays("accept_lens", "seq_lens", "accept_index") | case.options("num_draft_tokens", "interval")
    before = case.before(*pk.CommitSteps._fields)
    yield Call(pk.commit_track_indices, arguments, before, pk.CommitSteps, ("separate", "views"))


def state_scatter(case: Case) -> Iterator[Call]:
    """The destination is half of the recorded array, dst[:, :, 0]; the other half must stay as it was."""
    if not case.meta.pop("strided"):
        raise Failed("only destinations dst[:, :, 0] are known")
    arrays, before = case.arrays("src", "step", "dst_index"), {"dst": case.inputs.pop("dst")}
    layers, slots, parts, *inner = before["dst"].shape
    size = math.prod(inner)
    place = 0, (layers, slots, size), (slots * parts * size, parts * size, 1)
    buffer = ((-1,), (-1, parts * size))[case.turn % 2]

    def scatter(*, out, **arguments):
        view = pk.View(out.reshape(buffer), *place)
        return pk.state_scatter(**arguments, out=view).buffer.reshape(out.shape)

    yield Call(scatter, arrays, before)


def translation(tokens: np.ndarray, slots: np.ndarray, before: dict[str, np.ndarray]) -> Call:
    """SWA slots of virtual tokens: what a read stream of one request with pages of one token holds."""
    row = np.append(tokens, 0)[None]  # a source needs a column, also for no tokens
    request = {"seq_lens": np.array([tokens.size]), "req_rows": np.array([0]), "source": row, "granularity": "token"}
    arguments = request | {"indptr": np.array([0, tokens.size]), "page_size": 1, "full_to_swa": slots}
    return Call(pk.kv_read_stream, arguments, before)


def decode_layout(before: dict[str, np.ndarray]) -> pk.MetadataLayout:
    pages = before["page_table"].shape[1] if "page_table" in before else 0
    return pk.MetadataLayout(B=before["cache_seqlens"].size, D=1, P=pages, has_swa="swa_page_table" in before)


ADAPTERS: dict[str, Callable[[Case], Iterator[Call]]] = {
    adapter.__name__: adapter
    for adapter in (
        decode_metadata,
        draft_extend_metadata,
        kv_read_table,
        kv_read_stream,
        draft_write_window,
        extend_cache_locs,
        replay_state_indices,
        commit_track_indices,
        state_scatter,
        *KPOOL_ADAPTERS,
        *SELECTION_ADAPTERS,
        *FUSED_ADAPTERS,
    )
}
FUSED = "fused_"


# Running --------------------------------------------------------------------------------------------------------------


def run(call: Call, form_name: str, backend: str) -> dict[str, np.ndarray]:
    """The destinations by name after one form of a call."""
    arrays = {name: a for name, a in call.arguments.items() if isinstance(a, np.ndarray)}
    static = {name: a for name, a in call.arguments.items() if name not in arrays}
    form = FORMS[form_name](call)

    def invoke(arrays, held):
        return form.after(call.function(**arrays, **static, out=form.out(held), backend=backend))

    if backend != "checked":  # which is eager
        invoke = jax.jit(invoke, donate_argnums=1, compiler_options=quick_compile.options())
    return form.read(invoke(form.inputs(arrays), form.held))


def compare(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name in sorted(actual.keys() & expected.keys()):
        if different := np.argwhere(actual[name] != expected[name]).tolist():
            first, more = tuple(different[0]), len(different) - 1
            raise Failed(
                f"{name}{list(first)} is {actual[name][first]}, expected {expected[name][first]}"
                f"{f' ({more} more cells differ)' if more else ''}"
            )


def check(kernel: str, case: Case, backend: str) -> None:
    """Return when the case passes, or raise Failed or whatever else went wrong."""
    if kernel not in ADAPTERS:
        raise Failed(f"unknown kernel; known are {', '.join(ADAPTERS)}")
    try:
        calls = list(ADAPTERS[kernel](case))
    except KeyError as error:
        raise Failed(f"the case has no {error}") from error
    outputs = {name for call in calls for name in call.before}
    unused = {"parameter": set(case.meta), "input": set(case.inputs), "output": set(case.expected) - outputs}
    for what, names in unused.items():
        if names:
            raise Failed(f"unknown {what} {', '.join(sorted(names))}")
    if not case.expected:
        raise Failed("no output was recorded")
    for call in calls:
        forms = call.forms
        if backend in ("reference", "interpret"):
            forms = (forms[case.turn % len(forms)],)
        for form in forms:
            try:
                compare(run(call, form, backend), case.expected)
            except Exception as error:
                kind = "" if isinstance(error, Failed) else f"{type(error).__name__}: "
                raise Failed(f"{form}: {kind}{error}") from error


def run_file(file: File, numbers: list[int], backend: str, prefix: str = "") -> list[str]:
    """A line for each of the numbered cases that failed. `prefix`: before the names of their kernels."""
    failures, started = [], time.monotonic()
    show = sys.stderr.isatty()
    for done, number in enumerate(numbers):
        if show and time.monotonic() - started > QUIET_SECONDS:
            print(f"\r{done} of {len(numbers)} cases", end="", file=sys.stderr, flush=True)
        try:
            check(prefix + file.kernel(number), file.case(number), backend)
        except Exception as error:
            words = " ".join(f"{name}={value}" for name, value in file.meta[number].items() if name != "kernel")
            reason = str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
            failures.append(" ".join(f"case {number}: {prefix}{file.kernel(number)} {words}: {reason}".split()))
    if show:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    return failures


def has_gpu() -> bool:
    logging.disable()  # a CUDA plugin without a GPU fails with a traceback, in the log
    try:
        return jax.default_backend() == "gpu"
    except (RuntimeError, AssertionError):  # JAX_PLATFORMS names a platform that is missing
        return False
    finally:
        logging.disable(logging.NOTSET)


def main(argv: list[str] | None = None) -> int:
    usage, details = __doc__.split("\n", 1)
    parser = argparse.ArgumentParser(
        description=usage, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", metavar="FILE.npz")
    parser.add_argument("--backend", choices=pk.BACKENDS, default="reference")
    parser.add_argument("--kernel", metavar="NAME", help="run the cases of this kernel, or of those that match, only")
    arguments = parser.parse_args(argv)
    try:
        file = File(arguments.file)
    except BadFile as error:
        print(f"{arguments.file}: {error}", file=sys.stderr)
        return 2
    if arguments.backend in GPU_BACKENDS and not has_gpu():
        why = "`python -c 'import jax; jax.devices()'` may say why"
        print(f"--backend {arguments.backend}: jax finds no GPU on this machine ({why})", file=sys.stderr)
        return 2
    wanted = "*" if arguments.kernel is None else arguments.kernel
    prefix = FUSED if wanted.startswith(FUSED) else ""
    names = [prefix + file.kernel(i) for i in range(len(file.meta))]
    numbers = [
        i for i, name in enumerate(names) if fnmatch.fnmatchcase(name, wanted) and (not prefix or name in ADAPTERS)
    ]
    if numbers:
        failures = run_file(file, numbers, arguments.backend, prefix)
    else:
        known = ", ".join(dict.fromkeys(map(file.kernel, range(len(file.meta)))))
        numbers, failures = [None], [f"--kernel {arguments.kernel}: {arguments.file} has no such case, only {known}"]
    print(*failures, f"{len(numbers) - len(failures)} passed, {len(failures)} failed", sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
