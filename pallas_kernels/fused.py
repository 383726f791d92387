"""Several kernels in one launch: each piece gets programs of its own, so none waits for another."""

import dataclasses
from typing import Protocol

from pallas_kernels.lanes import Lanes


class Piece(Protocol):
    """A part of a launch. Its programs depend on nothing that another piece writes."""

    programs: int

    def body(self, lanes: Lanes, program, ins: tuple, outs: tuple) -> None:
        """As that of an `Operation`."""

    def reference(self, inputs: tuple, outputs: tuple) -> tuple:
        """As that of an `Operation`."""


@dataclasses.dataclass(frozen=True)
class Fused:
    """An `Operation` (see lanes.py) made of pieces. Pieces of 2, 1 and 3 programs: programs 0 1 | 2 | 3 4 5."""

    name: str
    labels: tuple[str, ...]
    pieces: tuple[Piece, ...]
    reference_is_faster = False

    @property
    def programs(self) -> int:
        return sum(piece.programs for piece in self.pieces)

    def body(self, lanes: Lanes, program, ins: tuple, outs: tuple) -> None:
        pieces = [piece for piece in self.pieces if piece.programs]
        if len(pieces) == 1:
            pieces[0].body(lanes, program, ins, outs)
            return
        first = 0
        for piece in pieces:
            self._run(piece, first, lanes, program, ins, outs)
            first += piece.programs

    @staticmethod
    def _run(piece: Piece, first: int, lanes: Lanes, program, ins: tuple, outs: tuple) -> None:
        mine = (program >= first) & (program < first + piece.programs)
        lanes.when(mine, lambda: piece.body(lanes, program - first, ins, outs))

    def reference(self, inputs: tuple, outputs: tuple) -> tuple:
        for piece in self.pieces:
            outputs = piece.reference(inputs, outputs)
        return outputs
