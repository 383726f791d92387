"""What both sides of the decode comparison are given and hand back. A folder is all that the two processes share.

job.json           the job
SIDE.json          where it ran, and what its arms said and took
refusal.txt        instead, why it cannot do the job
"""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peer_job import REFUSAL, Refused

FLOAT32, BFLOAT16 = "float32", "bfloat16"  # ids are compared in the first, times are taken in the second by default
THEIRS, PLAIN = "graph", "plain"  # their arm, and ours without a drafter; other arms are called as their drafter


@dataclasses.dataclass(frozen=True)
class Job:
    """What is to be done.

    Attributes:
      model: an embedded model's name, or a folder.
      folder: where its files are.
      shape: its `Qwen3Config` as a dict.
      prompts: token ids of as many requests as the largest batch has.
      batches: requests decoded together; a batch of B takes the first B prompts.
      new: tokens that each request emits, the one that prefill gives included.
      drafters: who drafts for our speculative arms.
      rows: D, tokens verified a request and round; a block draft that proposes fewer takes fewer.
      dtype: what the times are taken in.
      runs: samples of each arm.
      check: only ids are wanted, on the CPU.
    """

    model: str
    folder: str
    shape: dict[str, Any]
    prompts: list[list[int]]
    batches: list[int]
    new: int
    drafters: list[str]
    rows: int
    dtype: str
    runs: int
    check: bool

    @property
    def dtypes(self) -> list[str]:
        """What is run: float32 for its ids, and what is timed."""
        return [FLOAT32] if self.check or self.dtype == FLOAT32 else [FLOAT32, self.dtype]

    @property
    def arms(self) -> list[str]:
        """Ours."""
        return [PLAIN, *self.drafters]

    def timed(self, dtype: str) -> bool:
        """Whether the times in `dtype` are wanted."""
        return not self.check and dtype == self.dtype

    def save(self, folder: Path) -> None:
        """Writes the job."""
        (folder / "job.json").write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> "Job":
        """Reads it."""
        return cls(**json.loads((folder / "job.json").read_text()))


@dataclasses.dataclass(frozen=True)
class Arm:
    """A way to decode, in one dtype, at one batch.

    Attributes:
      name: THEIRS, PLAIN, or who drafted.
      dtype, batch: what was run.
      ids: the new tokens of each request.
      whole: seconds of prefill and decoding, a sample each; empty if nothing was timed.
      prefill: seconds of prefill alone, as many.
      about: what else there is to say of it, by name.
    """

    name: str
    dtype: str
    batch: int
    ids: list[list[int]]
    whole: list[float] = dataclasses.field(default_factory=list)
    prefill: list[float] = dataclasses.field(default_factory=list)
    about: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Side:
    """What one side found.

    Attributes:
      environment: device, driver, versions.
      arms: of every dtype and batch of the job.
    """

    environment: dict[str, Any]
    arms: list[Arm]

    def arm(self, name: str, dtype: str, batch: int) -> Arm:
        """The arm of that name, in that dtype, at that batch."""
        return next(arm for arm in self.arms if (arm.name, arm.dtype, arm.batch) == (name, dtype, batch))

    def save(self, folder: Path, name: str) -> None:
        """Writes it as the side of that name."""
        (folder / f"{name}.json").write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def load(cls, folder: Path, name: str) -> "Side":
        """Reads the side of that name."""
        fields = json.loads((folder / f"{name}.json").read_text())
        return cls(fields["environment"], [Arm(**arm) for arm in fields["arms"]])


def run_side(name: str, measure: Callable[[Job], Side]) -> None:
    """The program of a side, `python SIDE.py FOLDER`: does the folder's job and leaves there what it found."""
    folder = Path(sys.argv[1])
    try:
        side = measure(Job.load(folder))
    except Refused as error:
        (folder / REFUSAL).write_text(str(error))
        sys.exit(2)
    side.save(folder, name)
