"""What both sides are given and hand back. Each side is a process of its own; a folder is all that they share.

job.json           the job
inputs_I.npz       arrays of shape I for the peer, named WORK.NAME (see peer_inputs.py)
SIDE.json          where it ran, and the samples of each program
SIDE_I.npz         what its programs wrote for shape I, named WORK.NAME
refusal.txt        instead of both, why it cannot do the job
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

MOST_ROWS = 256  # rows a request that the page tables have room for
_LENGTHS = ("cache_seqlens", "cu_seqlens_k")
_PLACES = ("page_table", "swa_page_table", "virtual_loc", "full_loc", "swa_loc", "positions", "anchor_ids")
_POOLED = ("seqlens_expanded", "dsa_cache_seqlens", "dsa_cu_seqlens_k", "real_page_table")
# Two kinds of work, a verify forward of a FULL+SWA model with recurrent layers and one of a model with pooled
# attention, and what both sides write for them.
OUTPUTS = {"step": (*_LENGTHS, *_PLACES, "state_slots"), "kpool": (*_LENGTHS, *_POOLED)}

REFUSAL = "refusal.txt"
Arrays = dict[str, np.ndarray]
Samples = dict[str, list[float]]


class Refused(Exception):
    """What cannot be done, in a line: exit status 2."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """B requests of about `live` committed tokens each, D rows a request.

    >>> Shape.parse("8,8192,4")
    Shape(B=8, live=8192, D=4)
    """

    B: int
    live: int
    D: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """Reads "B,live,D"."""
        try:
            shape = cls(*map(int, text.split(",")))
        except (ValueError, TypeError):
            raise Refused(f"shape {text!r} is not three integers: give requests,tokens,rows such as 8,8192,4") from None
        if min(dataclasses.astuple(shape)) < 1 or shape.D > MOST_ROWS:
            raise Refused(f"shape {text!r}: requests, tokens and rows are at least 1, rows at most {MOST_ROWS}")
        if (shape.B + 2) * (shape.live + 2 * MOST_ROWS) > 2**31 - 1:
            raise Refused(f"shape {text!r}: it has more tokens than an int32 can number")
        return shape

    def __str__(self):
        return f"{self.B},{self.live},{self.D}"


@dataclasses.dataclass(frozen=True)
class Job:
    """What is to be done.

    Attributes:
      peer: folder of the unpacked wheel.
      shapes: what is measured.
      runs: samples of each program.
      check: only the outputs are wanted, so no GPU is needed.
      page: tokens of an attention page.
      pool: tokens of a pool.
      topk: tokens in closed pools that a row attends to.
    """

    peer: str
    shapes: tuple[Shape, ...]
    runs: int
    check: bool
    page: int
    pool: int
    topk: int

    def save(self, folder: Path) -> None:
        """Writes the job without its inputs."""
        (folder / "job.json").write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> "Job":
        """Reads it."""
        fields = json.loads((folder / "job.json").read_text())
        return cls(**{**fields, "shapes": tuple(Shape(**shape) for shape in fields["shapes"])})


@dataclasses.dataclass(frozen=True)
class Side:
    """What one side found.

    Attributes:
      environment: device, driver, versions.
      samples: for each shape {work: {program: microseconds a call, one number a sample}}; the program "all" is the
        whole work. Work that was not timed has no programs.
      outputs: for each shape {"WORK.NAME": array} with the names of OUTPUTS.
      failures: what else is not as it must be, a line each.
    """

    environment: dict
    samples: list[dict[str, Samples]]
    outputs: list[Arrays]
    failures: list[str] = dataclasses.field(default_factory=list)

    def save(self, folder: Path, name: str) -> None:
        """Writes it as the side of that name."""
        fields = {"environment": self.environment, "samples": self.samples, "failures": self.failures}
        (folder / f"{name}.json").write_text(json.dumps(fields))
        for number, arrays in enumerate(self.outputs):
            np.savez(folder / f"{name}_{number}.npz", **arrays)

    @classmethod
    def load(cls, folder: Path, name: str, count: int) -> "Side":
        """Reads the side of that name, of `count` shapes."""
        fields = json.loads((folder / f"{name}.json").read_text())
        return cls(**fields, outputs=[load_arrays(folder / f"{name}_{number}.npz") for number in range(count)])


def load_arrays(path: Path) -> Arrays:
    """The arrays of a .npz file."""
    with np.load(path) as file:
        return dict(file)


def of_work(arrays: Arrays, work: str) -> Arrays:
    """The arrays named WORK.NAME, by NAME."""
    return {name.removeprefix(f"{work}."): array for name, array in arrays.items() if name.startswith(f"{work}.")}


def flat(works: Mapping[str, Arrays]) -> Arrays:
    """Arrays of several kinds of work, named WORK.NAME."""
    return {f"{work}.{name}": array for work, arrays in works.items() for name, array in arrays.items()}


def run_side(name: str, measure: Callable[[Job, Path], Side]) -> None:
    """The program of a side, `python SIDE.py FOLDER`: measures the folder's job and leaves there what it found."""
    folder = Path(sys.argv[1])
    try:
        side = measure(Job.load(folder), folder)
    except Refused as error:
        (folder / REFUSAL).write_text(str(error))
        sys.exit(2)
    side.save(folder, name)
