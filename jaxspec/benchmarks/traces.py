"""A trace of what runs on the device, written by jax's profiler into a folder that xprof opens."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxspec.errors import InputError


def check_folder(folder: str | None) -> None:
    """Complains if no trace could be written there.

    Raises:
      InputError: a file, a folder that holds something, or one that cannot be made.
    """
    if folder is None:
        return
    path = Path(folder)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(
            f"profile={folder}: {'it is no folder' if not path.is_dir() else 'the folder is not empty'}; name one that "
            "is not there"
        )
    there = next(parent for parent in (*path.absolute().parents,) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"profile={folder}: nothing can be written in {there}; name another folder")


@contextlib.contextmanager
def traced(folder: str) -> Iterator[None]:
    """Traces the block. The folder appears when the trace is whole; if the block ends early there is none.

    Args:
      folder: made, with those above it. An empty one may be there.
    """
    path = Path(folder).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".trace-") as part:
        place = Path(part) / "trace"
        with jax.profiler.trace(place):
            yield
        if path.exists():
            path.rmdir()
        shutil.move(place, path)
