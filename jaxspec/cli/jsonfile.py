"""JSON output: the path is tried before the work, the file appears whole or not at all."""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from jaxspec.errors import InputError


class JsonFile:
    """Where a command's JSON goes.

    Args:
      target: a path, "-" for standard output, or None for nowhere.

    Raises:
      InputError: the path cannot be written. Found out here, before a run whose result would be lost.
    """

    def __init__(self, target: str | None):
        self.to_stdout = target == "-"
        self._path = None if target is None or self.to_stdout else Path(target).resolve()
        if target == "":
            raise InputError("--json has an empty path: give a file name, or - for standard output")
        if self._path is None:
            return
        try:
            if self._path.is_dir():
                raise IsADirectoryError(f"{target} is a folder")
            if self._path.exists():
                self._path.open("ab").close()
            if self._replaces():
                self._part().touch(exist_ok=False)
                self._part().unlink()
        except OSError as error:
            raise InputError(f"--json={target} cannot be written: {error.strerror or error}") from None

    def write(self, value: dict[str, Any]) -> None:
        """Writes `value`; numbers that JSON has no word for become null.

        Raises:
          InputError: the file cannot be written after all, a full disk say.
        """
        text = json.dumps(_finite(value), indent=2, allow_nan=False, ensure_ascii=False) + "\n"
        data = text.encode("utf-8", errors="replace")  # a lone surrogate from a command line has no UTF-8
        if self.to_stdout:
            sys.stdout.write(data.decode())
            sys.stdout.flush()
        elif self._path is not None:
            try:
                self._save(data)
            except OSError as error:
                raise InputError(f"--json={self._path} cannot be written: {error.strerror or error}") from None

    def _save(self, data: bytes) -> None:
        if not self._replaces():
            self._path.write_bytes(data)
            return
        try:
            self._part().write_bytes(data)
            os.replace(self._part(), self._path)
        finally:
            self._part().unlink(missing_ok=True)

    def _replaces(self) -> bool:
        """False for a device or a pipe, which must be written to and not replaced."""
        return self._path.is_file() or not self._path.exists()

    def _part(self) -> Path:
        return self._path.with_name(f".{self._path.name}.{os.getpid()}.part")


def _finite(value):
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
