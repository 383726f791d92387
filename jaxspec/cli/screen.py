"""Two streams on one terminal: results that scroll, and a progress line that stays at the bottom."""

import contextlib
import logging
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

# Text from a model may hold escape sequences; they are shown, not obeyed. Line feed and tab stay.
_CONTROLS = {c: f"\\x{c:02x}" for c in (*range(0x20), *range(0x7F, 0xA0)) if chr(c) not in "\n\t"}


class Screen:
    """Writes results to `out` and what is going on to `err`.

    On a terminal `err` ends in a line that tells the task, how far it is and how long it has taken; it is taken away
    before anything else is written and put back after. Elsewhere a task is one line when it starts. `out` receives
    whole lines only, so that the two never mix within a line.
    """

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None):
        self.out = sys.stdout if out is None else out
        self.err = sys.stderr if err is None else err
        self._live = self.err.isatty()
        self._lock = threading.RLock()
        self._task: str | None = None
        self._start = 0.0
        self._fraction: float | None = None
        self._note = ""

    def write(self, text: str) -> None:
        """Writes whole lines of results."""
        with self._lock:
            self._erase()
            self.out.write(text.translate(_CONTROLS))
            self.out.flush()
            self._draw()

    def say(self, line: str) -> None:
        """Writes a line about what is going on."""
        with self._lock:
            self._erase()
            print(line, file=self.err, flush=True)
            self._draw()

    @contextlib.contextmanager
    def log_lines(self, name: str = "jaxspec") -> Iterator[None]:
        """Says what the package logs while the block runs, information and warnings, each line once."""
        logger, handler = logging.getLogger(name), _Sayer(self)
        level = logger.level
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.setLevel(level)
            logger.removeHandler(handler)

    @contextlib.contextmanager
    def task(self, name: str, first: str) -> Iterator[None]:
        """Shows `name` while the block runs, and that it is busy with `first` until there is progress to show."""
        if not self._live:
            self.say(f"{name}: {first} ...")
            yield
            return
        self._task, self._start, self._fraction, self._note = name, time.monotonic(), None, first
        over = threading.Event()
        # A thread of its own, because the block may sit in a compilation for many seconds.
        ticker = threading.Thread(target=self._tick, args=(over,), daemon=True)
        ticker.start()
        try:
            yield
        finally:
            over.set()
            ticker.join()
            with self._lock:
                self._erase()
                self._task = None

    def progress(self, fraction: float, note: str = "") -> None:
        """Says how far the task is, 0 to 1; it is shown within a quarter of a second."""
        self._fraction, self._note = min(max(fraction, 0.0), 1.0), note

    def _tick(self, over: threading.Event) -> None:
        while True:
            with self._lock:
                self._draw()
            if over.wait(0.25):
                return

    def _draw(self) -> None:
        if not self._live or self._task is None:
            return
        parts = [self._task]
        if self._fraction is not None:
            done = round(20 * self._fraction)
            parts += [f"[{'#' * done}{'.' * (20 - done)}] {self._fraction:4.0%}"]
        parts += [self._note] if self._note else []
        parts += [f"{time.monotonic() - self._start:.0f} s"]
        line = "  ".join(parts)[: shutil.get_terminal_size().columns - 1]
        self.err.write(f"\r\x1b[K{line}")
        self.err.flush()

    def _erase(self) -> None:
        if self._live and self._task is not None:
            self.err.write("\r\x1b[K")
            self.err.flush()


class _Sayer(logging.Handler):
    """Log records on a screen. A step is bound for every batch, and would tell the same every time."""

    def __init__(self, screen: Screen):
        super().__init__(logging.INFO)
        self._screen, self._said = screen, set()

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if line not in self._said:
            self._said.add(line)
            self._screen.say(f"warning: {line}" if record.levelno >= logging.WARNING else line)
