"""Files of recorded calls, and a recorded call as a call of a public function: what adapters are made of."""

import dataclasses
import io
import json
import pathlib
import zipfile
from collections.abc import Callable

import numpy as np

import pallas_kernels as pk

STALE = -7  # in every destination cell before a call


class BadFile(Exception):
    """Why a file cannot be run."""


class Failed(Exception):
    """Why a case failed."""


# Files ----------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Case:
    """One recorded call. Adapters take what they use out of `meta` and `inputs`; what is left over fails the case."""

    meta: dict
    inputs: dict[str, np.ndarray]
    expected: dict[str, np.ndarray]
    turn: int  # cases of the same kernel before this one

    def options(self, *names: str) -> dict:
        """Those of the named scalar parameters that the case has."""
        return {name: self.meta.pop(name) for name in names if name in self.meta}

    def arrays(self, *names: str) -> dict[str, np.ndarray]:
        """Those of the named inputs that the case has."""
        return {name: self.inputs.pop(name) for name in names if name in self.inputs}

    def requests(self) -> dict:
        """The request table and each request's row in it, as the public functions call them."""
        rows, source = self.inputs.pop("req_pool_indices"), self.inputs.pop("req_to_token")
        return {"req_rows": rows, "source": source, "granularity": "token"}

    def before(self, *names: str) -> dict[str, np.ndarray]:
        """A destination for each of the named outputs that was recorded."""
        return {n: np.full(a.shape, STALE, np.int32) for n, a in self.expected.items() if n in names}

    def expect_stale_past(self, lengths: np.ndarray, page_size: int) -> None:
        """Without zero_tail a table is fixed on its live prefix only, and past it must stay as it was."""
        for name, table in self.expected.items():
            if table.ndim == 2:
                live = np.arange(table.shape[1]) * page_size < lengths[:, None]
                self.expected[name] = np.where(live, table, STALE)


class File:
    """The cases of a file: `meta`, and their arrays, read one case at a time."""

    def __init__(self, path: str):
        try:
            self._archive = np.load(io.BytesIO(pathlib.Path(path).read_bytes()))
        except OSError as error:
            raise BadFile(error.strerror or str(error)) from error
        except (ValueError, EOFError, zipfile.BadZipFile) as error:
            raise BadFile("not an npz archive") from error
        if not isinstance(self._archive, np.lib.npyio.NpzFile):
            raise BadFile("one array, not an npz archive")
        if "meta" not in self._archive.files:
            raise BadFile("it has no array `meta`")
        try:
            self.meta = json.loads(bytes(self._archive["meta"]))
        except (ValueError, zipfile.BadZipFile) as error:
            raise BadFile("its `meta` is not JSON in UTF-8") from error
        if not isinstance(self.meta, list) or not self.meta or not all(isinstance(m, dict) for m in self.meta):
            raise BadFile("its `meta` is not a list of cases, one object each, or is empty")
        self._names = {}
        for name in self._archive.files:
            self._names.setdefault(name.rpartition("/")[0], []).append(name)

    def kernel(self, number: int) -> str:
        return str(self.meta[number].get("kernel"))

    def case(self, number: int) -> Case:
        meta = {name: value for name, value in self.meta[number].items() if name != "kernel"}
        turn = [self.kernel(i) for i in range(number)].count(self.kernel(number))
        return Case(meta, self._arrays(f"{number}/in"), self._arrays(f"{number}/out"), turn)

    def _arrays(self, prefix: str) -> dict[str, np.ndarray]:
        return {name.rpartition("/")[2]: self._archive[name] for name in self._names.get(prefix, [])}


# Calls ----------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Call:
    """A public function, its arguments but `out`, and the destinations by name before the call.

    kind     the tuple of named destinations that `out` is; None where `out` is the only destination itself
    forms    how the destinations are held, one run each: `separate`, `views`, `packed`
    layout   of the packed form
    """

    function: Callable
    arguments: dict
    before: dict[str, np.ndarray]
    kind: type | None = None
    forms: tuple[str, ...] = ("separate",)
    layout: pk.MetadataLayout | None = None

    def out(self, arrays: dict):
        if self.kind is None:
            return next(iter(arrays.values()))
        return self.kind(**(dict.fromkeys(self.kind._fields) | arrays))

    def by_name(self, out) -> dict:
        return {name: out if self.kind is None else getattr(out, name) for name in self.before}
