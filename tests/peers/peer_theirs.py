"""The peer's side: its kernels on a job's inputs, timed in captured CUDA graphs. `python peer_theirs.py FOLDER`."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import peer_kernels
from peer_job import Arrays, Job, Refused, Samples, Shape, Side, flat, load_arrays, of_work, run_side
from peer_kernels import Kernels

try:
    import torch
except ImportError:
    torch = None  # metadata.py says so before it starts this side

CALLS = 50  # of a program in its graph
WARM_UP_SECONDS = 0.2  # an idle GPU takes that long to reach its clock
UNWRITTEN = -7

Tensors = dict[str, "torch.Tensor"]
Program = Callable[[], Tensors]


def measure(job: Job, folder: Path) -> Side:
    """Runs the programs of every shape."""
    gpu = torch.cuda.is_available()
    if not gpu and not job.check:
        raise Refused("torch sees no GPU: run on one, or give --check to compare outputs only")
    if not gpu:
        os.environ["TRITON_INTERPRET"] = "1"
        torch.Tensor.is_cuda = property(lambda tensor: True)  # what the kernels' host functions insist on
    kernels = peer_kernels.load(Path(job.peer))
    samples, outputs = [], []
    for number, shape in enumerate(job.shapes):
        arrays = load_arrays(folder / f"inputs_{number}.npz")
        times, written = {}, {}
        for work, make in (("step", step_programs), ("kpool", kpool_programs)):
            programs = make(kernels, job, shape, of_work(arrays, work), "cuda" if gpu else "cpu")
            if gpu:
                graphs = {name: Graph(program) for name, program in programs.items()}
                tensors = graphs["all"].outputs()
                times[work] = {} if job.check else time_graphs(graphs, job.runs)
            else:
                tensors, times[work] = programs["all"](), {}
            written[work] = {name: tensor.cpu().numpy() for name, tensor in tensors.items()}
        samples.append(times)
        outputs.append(flat(written))
    return Side(describe(Path(job.peer), gpu), samples, outputs)


def tiny_op(device: str) -> Program:
    """Adds one to 32 numbers: what any launch costs."""
    numbers = torch.zeros(32, device=device)

    def add():
        numbers.add_(1)
        return {}

    return add


def step_programs(kernels: Kernels, job: Job, shape: Shape, arrays: Arrays, device: str) -> dict[str, Program]:
    """The programs of a forward of a FULL+SWA model with recurrent layers.

    tiny op  the floor
    window   write locations of the new rows, virtual, FULL and SWA, their positions, the anchor tokens
    tables   lengths, prefix sums, both page tables, cleared past the live pages
    state    state slots
    all      these three, one after the other
    """
    B, D, real = shape.B, shape.D, int(arrays["real"])
    given = on(device, arrays)
    req_rows, tokens, seq_lens = given["req_rows"], given["tokens"], given["seq_lens"]
    columns = tokens.shape[1] // job.page
    maps = {"full_v2p": given["full_v2p"], "swa_v2p": given["swa_v2p"]}
    window = unwritten(device, torch.int64, **dict.fromkeys(("full_loc", "swa_loc", "positions"), (B, D)))
    window["anchor_ids"] = torch.zeros(B, D, dtype=torch.int64, device=device)  # of which column 0 is written
    tables = unwritten(device, cache_seqlens=(B,), cu_seqlens_k=(B + 1,))
    tables |= unwritten(device, page_table=(B, columns), swa_page_table=(B, columns))
    slots = unwritten(device, state_slots=(B,))

    def write_window():
        virtual = kernels.window(
            req_rows,
            tokens,
            seq_lens,
            B,
            D,
            device,
            **maps,
            full_out=window["full_loc"],
            swa_out=window["swa_loc"],
            page_size=job.page,
            positions_out=window["positions"],
            anchor_src=given["anchor"],
            anchor_out=window["anchor_ids"],
        )
        return {"virtual_loc": virtual.reshape(B, D), **window}

    def write_tables():
        kernels.tables(
            tables["cache_seqlens"],
            tables["cu_seqlens_k"],
            tables["page_table"],
            tokens,
            req_rows,
            columns,
            seq_lens,
            D,
            job.page,
            **maps,
            swa_page_table=tables["swa_page_table"],
            zero_tail=True,
        )
        return tables

    def write_slots():
        kernels.state(
            req_pool_indices=req_rows,
            mamba_index_mapping=given["slot_of_req"],
            out_state_indices=slots["state_slots"],
            valid_bs=real,
            total_bs=B,
            v2p=given["state_v2p"],
        )
        return slots

    def write_all():
        return {**write_window(), **write_tables(), **write_slots()}

    parts = {"window": write_window, "tables": write_tables, "state": write_slots}
    return {"tiny op": tiny_op(device), **parts, "all": write_all}


def kpool_programs(kernels: Kernels, job: Job, shape: Shape, arrays: Arrays, device: str) -> dict[str, Program]:
    """The floor, and lengths and page table of pooled attention, the table once a row of the forward."""
    B, rows = shape.B, shape.B * shape.D
    given = on(device, arrays)
    width = given["tokens"].shape[1]
    tables = unwritten(device, cache_seqlens=(B,), cu_seqlens_k=(B + 1,))
    tables |= unwritten(device, seqlens_expanded=(rows,), dsa_cache_seqlens=(rows,), dsa_cu_seqlens_k=(rows + 1,))
    tables |= unwritten(device, real_page_table=(rows, width // job.page))

    def write():
        kernels.kpool(
            given["seq_lens"],
            given["req_rows"],
            given["tokens"],
            page_table_1=None,
            **tables,
            bs=B,
            max_seqlen_k=width,
            dsa_index_topk=job.topk,
            physical_page_size=job.page,
            next_n=shape.D,
            index_kpool=job.pool,
        )
        return tables

    return {"tiny op": tiny_op(device), "all": write}


def on(device: str, arrays: Arrays) -> Tensors:
    """The arrays as tensors."""
    return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}


def unwritten(device: str, dtype=None, **shapes: tuple[int, ...]) -> Tensors:
    """Tensors in which nothing is written yet, int32 unless told otherwise."""
    kind = {"dtype": dtype or torch.int32, "device": device}
    return {name: torch.full(size, UNWRITTEN, **kind) for name, size in shapes.items()}


class Graph:
    """A program, captured CALLS times in one CUDA graph."""

    def __init__(self, program: Program):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles, which a capture cannot
            program()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for _ in range(CALLS):
                self._written = program()
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def outputs(self) -> Tensors:
        """What a replay writes into tensors that hold nothing of it."""
        for name, tensor in self._written.items():
            tensor.fill_(0 if name == "anchor_ids" else UNWRITTEN)
        self._graph.replay()
        torch.cuda.synchronize()
        return {name: tensor.clone() for name, tensor in self._written.items()}

    def microseconds(self) -> float:
        """Time of a replay / CALLS."""
        self._start.record()
        self._graph.replay()
        self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end) * 1e3 / CALLS


def time_graphs(graphs: dict[str, Graph], runs: int) -> Samples:
    """`runs` samples of each graph, the graphs in turn, so that what drifts does so for all."""
    end = time.monotonic() + WARM_UP_SECONDS
    while time.monotonic() < end:
        for graph in graphs.values():
            graph.microseconds()
    samples = {name: [] for name in graphs}
    for _ in range(runs):
        for name, graph in graphs.items():
            samples[name].append(graph.microseconds())
    return samples


def describe(peer: Path, gpu: bool) -> dict:
    """Where the peer's kernels ran."""
    import triton

    versions = {"torch": torch.__version__, "triton": triton.__version__, "sglang": peer_kernels.version(peer)}
    return {"device": torch.cuda.get_device_name() if gpu else "Triton's interpreter", "versions": versions}


if __name__ == "__main__":
    run_side("theirs", measure)
