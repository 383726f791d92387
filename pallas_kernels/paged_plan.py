"""What is static of a call of `paged_attention`: shapes, and how they are cut into tiles, blocks and parts."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.lanes import power
from pallas_kernels.paged_rows import RowPlace


class Sizes(NamedTuple):
    """How work is cut. No result depends on it but in its last bits; chosen by measurement on an H200.

    waves         how often, at least and at most, the programs of contexts that are not long should fill the device
    processors    of the device; those of an H200. Another number costs time alone
    full_wave     share of processors in use on the average of all waves that is good enough to look no further
    least_keys    so many, begun, may have a part of their own; less than twice as many at most are one part, since
                  little is not worth a second launch
    most_keys     of a part, so that one long context among short ones does not run alone on a few processors
    scratch       float32 cells of all parts; 2**26 are 256 MB
    tile          most rows of a tile
    tile_bytes    most bytes of a tile's queries
    block         most keys a block, and most where there is a window: its loop has masks, and more programs side by
                  side hide what they cost
    block_bytes   most bytes of a block of K
    stages        blocks on their way at a time
    shared_bytes  of a program's queries and blocks: what a processor has for it
    few_parts     parts that one warp combines; of more each four
    chunk         parts that the second launch loads at a time
    """

    waves: tuple[int, int] = (2, 8)
    processors: int = 132
    full_wave: float = 0.93
    least_keys: int = 128
    most_keys: int = 8192
    scratch: int = 2**26
    tile: int = 64
    tile_bytes: int = 2**15
    block: tuple[int, int] = (128, 64)
    block_bytes: int = 2**15
    stages: int = 3
    shared_bytes: int = 220_000
    few_parts: int = 8
    chunk: int = 32


SIZES = Sizes()
LEAST = 16  # rows, lanes and keys of the smallest product


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that is static of a call.

    Attributes:
      B, D, H: requests, rows a request, query heads.
      P: columns of the table.
      by_slot: whether the table has a column a key, its slot, and not one a page.
      rows: where K and V lie.
      window, causal, scale: as in `paged_attention`.
      dtype: of the queries, as a string.
      sizes: how the work is cut.
    """

    B: int
    D: int
    H: int
    P: int
    by_slot: bool
    rows: RowPlace
    window: int | None
    causal: bool
    scale: float
    dtype: str
    sizes: Sizes = SIZES

    @property
    def capacity(self) -> int:
        """Keys that a row of the table has columns for."""
        return self.P if self.by_slot else self.P * self.rows.page_size

    @property
    def group(self) -> int:
        """G, query heads a K/V head."""
        return self.H // self.rows.kv_heads

    @property
    def key(self) -> int:
        """Lanes of a K row."""
        return power(self.rows.head_dim, LEAST)

    @property
    def out(self) -> int:
        """Lanes of a V row."""
        return power(self.rows.out_dim, LEAST)

    @property
    def _itemsize(self) -> int:
        return max(jnp.dtype(self.rows.dtype).itemsize, jnp.dtype(self.dtype).itemsize)

    @property
    def _row_bytes(self) -> int:
        """Of the wider of a K and a V row."""
        return max(self.key, self.out) * self._itemsize

    @property
    def tile(self) -> int:
        """Rows of a tile, spare ones included."""
        most = min(self.sizes.tile, self.sizes.tile_bytes // self._row_bytes)
        return min(power(self.D * self.group, LEAST), max(most, LEAST))

    @property
    def tiles(self) -> int:
        """Tiles of a request's rows, of one K/V head."""
        return -(-self.D * self.group // self.tile)

    @property
    def crowded(self) -> bool:
        """Whether processors have several programs of float32 each. Such a program is best small: what it loads goes
        through registers, to be split in two, and while it waits the others work."""
        return self._itemsize == 4 and self.programs * min(self.usual_parts, self.parts) > self.sizes.processors

    @property
    def block(self) -> int:
        """Keys a block."""
        block_bytes = self.sizes.block_bytes // (2 if self.crowded else 1)
        most = min(self.sizes.block[self.window is not None], block_bytes // self._row_bytes)
        return min(max(most, LEAST), power(self.capacity, LEAST))

    @property
    def stages(self) -> int:
        """Blocks on their way at a time: as many as there is room for, one of crowded programs or where parts are of
        one block."""
        if self.crowded or self._keys <= min(self.usual_parts, self.parts) * self.block:
            return 1
        block = self.block * self._itemsize * (self.key if self.rows.values_are_keys else self.key + self.out)
        room = self.sizes.shared_bytes - self.tile * self.key * self._itemsize
        return max(1, min(self.sizes.stages, room // block))

    @property
    def warps(self) -> int:
        """Of a program: as many as keep its sums in registers, of a small one with a window two."""
        sums = self.tile * self.out
        return 8 if sums > 64 * 128 else 2 if self.window is not None and sums <= 32 * 128 else 4

    @property
    def combine_warps(self) -> int:
        """Of a program of the second launch."""
        return 1 if self.parts <= self.sizes.few_parts else 4

    @property
    def programs(self) -> int:
        """Programs of a launch in which each context is one part."""
        return self.B * self.tiles * self.rows.kv_heads

    @property
    def _keys(self) -> int:
        """Keys that a tile sees at most."""
        if self.window is None or not self.causal:
            return self.capacity
        return min(self.capacity, self.window + self.D - 1)

    @functools.cached_property
    def usual_parts(self) -> int:
        """Parts of a context that is not very long: the least number that leaves few processors idle at the end."""
        least, most = (max(1, waves * self.sizes.processors // self.programs) for waves in self.sizes.waves)

        def in_use(parts):
            waves = self.programs * parts / self.sizes.processors
            return waves / math.ceil(waves)

        good = (parts for parts in range(least, most + 1) if in_use(parts) >= self.sizes.full_wave)
        usual = next(good, max(range(least, most + 1), key=in_use))
        # A few keys more than those of one part are not worth a second launch.
        keys, each = self._keys, self.sizes.least_keys
        return max(1, min(usual, -(-keys // each))) if keys >= 2 * each else 1

    @functools.cached_property
    def parts(self) -> int:
        """Most parts of a context."""
        room = self.sizes.scratch // (self.programs * self.tile * self.out)
        return max(1, min(max(self.usual_parts, -(-self._keys // self.sizes.most_keys)), room))
