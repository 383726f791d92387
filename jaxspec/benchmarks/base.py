"""What every benchmark has: settings that say what they mean, a way to tell what runs, a report."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

# `with task(name, note):` around whatever may take longer than a second.
Task = Callable[[str, str], contextlib.AbstractContextManager]


def quiet(name: str, note: str) -> contextlib.AbstractContextManager:
    """A `Task` that tells nobody."""
    return contextlib.nullcontext()


def setting(
    default: int | float | str | None,
    text: str,
    *,
    choices: Sequence[str] = (),
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """A field of a benchmark's settings.

    Args:
      default: its value; None for a string that may be left out.
      text: what it means.
      choices: the strings it may be.
      least, most: the smallest and the largest number it may be.

    Example:
      >>> @dataclasses.dataclass(frozen=True)
      ... class Settings:
      ...     runs: int = setting(2, "Runs of each arm.", least=1)
      >>> Settings(runs=3)
      Settings(runs=3)
      >>> dataclasses.fields(Settings)[0].metadata["least"]
      1
    """
    return dataclasses.field(
        default=default, metadata={"text": text, "choices": tuple(choices), "least": least, "most": most}
    )


@dataclasses.dataclass(frozen=True)
class Report:
    """What a benchmark found.

    Attributes:
      tables: tables of text, each a list of rows whose first is the head; a row may be shorter than the head.
      results: the same and more, ready for JSON.
      failures: what is not as it must be, a line each; empty if all is well.
      environment: what more there is to say of how it ran, beside versions and devices.
    """

    tables: list[list[Sequence[str]]]
    results: dict[str, Any]
    failures: list[str]
    environment: dict[str, Any] = dataclasses.field(default_factory=dict)
