"""The rival: a decode loop of plain PyTorch, a step a replay of one CUDA graph. `python decode_theirs.py FOLDER`."""

import gc
import statistics
import time
from pathlib import Path

from decode_job import FLOAT32, THEIRS, Arm, Job, Side, run_side
from peer_job import Refused

try:
    import torch
except ImportError:
    torch = None  # decode.py says so before it starts this side

TRIES = 3  # samples by which one way to attend is preferred to another


def measure(job: Job) -> Side:
    """Runs every dtype and batch."""
    if not job.check and not torch.cuda.is_available():
        raise Refused("torch sees no CUDA device: run on one, or give --check to compare ids only")
    from decode_model import read_tensors  # needs more of torch than the question above

    device = "cpu" if job.check else "cuda"
    torch.backends.cuda.matmul.allow_tf32 = False
    tensors = read_tensors(Path(job.folder))
    with torch.no_grad():
        arms = [run(job, tensors, dtype, batch, device) for dtype in job.dtypes for batch in job.batches]
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    return Side({"device": "cpu" if job.check else torch.cuda.get_device_name(), "versions": versions}, arms)


def run(job: Job, tensors, dtype: str, batch: int, device: str) -> Arm:
    """The arm of a dtype and a batch, by the way to attend that takes it the least time."""
    if job.check:
        loop, about = Loop(job, tensors, dtype, batch, device, "math"), {"attention": "math"}
    else:
        loop, about = fastest(job, tensors, dtype, batch, device)
    loop.generate()
    ids = loop.ids()
    samples = [loop.generate() for _ in range(job.runs)] if job.timed(dtype) else []
    whole, prefill = ([sample[i] for sample in samples] for i in (0, 1))
    return Arm(THEIRS, dtype, batch, ids, whole, prefill, about)


def fastest(job: Job, tensors, dtype: str, batch: int, device: str) -> tuple["Loop", dict]:
    """The loop with the fastest way to attend of those that this device has, its name, and what became of each."""
    from decode_model import ATTENTIONS

    best, name_of_best, tried = None, None, {}
    # Some kernels compute float32 products of a lower precision, and ids are compared in float32.
    for name in ["math"] if dtype == FLOAT32 else ATTENTIONS:
        try:
            loop = Loop(job, tensors, dtype, batch, device, name)
            loop.generate()
            samples = [loop.generate() for _ in range(TRIES)]
        except RuntimeError as error:  # no such kernel for the device, the dtype or the shapes
            tried[name] = " ".join(str(error).split())
            continue
        seconds = statistics.median(whole - prefill for whole, prefill in samples)
        if best is None or seconds < tried[name_of_best]:
            best, name_of_best = loop, name
        tried[name] = seconds
        del loop
        gc.collect()
        torch.cuda.empty_cache()
    if best is None:
        raise Refused(f"torch has no attention for {dtype} on this device: {tried}")
    return best, {"attention": name_of_best, "tried": tried}


class Loop:
    """A model and its step, captured once where there is a CUDA device."""

    def __init__(self, job: Job, tensors, dtype: str, batch: int, device: str, attention: str):
        from decode_model import StaticQwen3

        prompts = job.prompts[:batch]
        lengths = [len(prompt) for prompt in prompts]
        padded = [[*prompt, *[0] * (max(lengths) - len(prompt))] for prompt in prompts]
        self._tokens, self._lengths = torch.tensor(padded, device=device), torch.tensor(lengths, device=device)
        self._new, self._cuda = job.new, device == "cuda"
        self.model = StaticQwen3(
            job.shape,
            tensors,
            dtype=getattr(torch, dtype),
            device=device,
            batch=batch,
            length=max(lengths) + job.new,
            new=job.new,
            attention=attention,
        )
        self._step = self._capture() if self._cuda else self.model.step

    def _capture(self):
        """A function that replays the step."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # what a library sets up when it is first called, a capture cannot
            for _ in range(3):
                self.model.prefill(self._tokens, self._lengths)
                self.model.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.model.step()
        return graph.replay

    def generate(self) -> tuple[float, float]:
        """Prefill and new - 1 steps: seconds of both, and of prefill alone. The host reads nothing in between."""
        self._wait()
        start = time.perf_counter()
        self.model.prefill(self._tokens, self._lengths)
        self._wait()
        begun = time.perf_counter()
        for _ in range(self._new - 1):
            self._step()
        self._wait()
        end = time.perf_counter()
        return end - start, begun - start

    def ids(self) -> list[list[int]]:
        """What the last generation emitted."""
        return self.model.out.tolist()

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


if __name__ == "__main__":
    run_side("theirs", measure)
