"""`python -m jaxspec bench NAME`: runs a benchmark of `jaxspec.benchmarks`, a command each."""

import dataclasses
import sys
from collections.abc import Sequence
from types import ModuleType

import jax
from absl import flags

from jaxspec import InputError
from jaxspec.benchmarks import BENCHMARKS
from jaxspec.cli import environment, switches
from jaxspec.cli.jsonfile import JsonFile
from jaxspec.cli.screen import Screen

NAME = "bench"


class Bench:
    """A benchmark as a command: a flag for each of its settings, `--json`, its tables on standard output.

    Args:
      benchmark: a module of `jaxspec.benchmarks`.
    """

    def __init__(self, benchmark: ModuleType):
        self._benchmark = benchmark
        self.SUMMARY = benchmark.SUMMARY

    def define_flags(self, values: flags.FlagValues) -> None:
        """Declares the command's flags."""
        for field in self._flagged():
            _define(field, values)
        flags.DEFINE_string(
            "json",
            None,
            "File to write results to as JSON; - is standard output, all else then goes to standard error.",
            flag_values=values,
        )

    def run(self, values: flags.FlagValues) -> int:
        """Runs the command. Exit status 0, or 1 if something is not as it must be."""
        output = JsonFile(values.json)
        screen = Screen(out=sys.stderr if output.to_stdout else None)
        if advice := environment.idle_gpu_advice():
            screen.say(advice)
        try:
            jax.devices()
        except RuntimeError as error:
            raise InputError(f"jax finds no device: {' '.join(str(error).split())}") from None
        chosen = {field.name: values[field.name].value for field in self._flagged()}
        switched = {"kpool_metadata_fusion": switches.kpool_metadata_fusion()}
        there = {field.name for field in dataclasses.fields(self._benchmark.Settings)}
        settings = self._benchmark.Settings(**chosen, **{k: v for k, v in switched.items() if k in there})
        with screen.log_lines():
            report = self._benchmark.run(settings, screen.task)
        machine = environment.describe()
        parts = [_facts(dataclasses.asdict(settings)), _facts(machine["versions"]), f"devices: {_devices(machine)}"]
        parts += ["\n" + "\n".join(align(table)) for table in report.tables]
        screen.write("\n".join(parts) + "\n")
        output.write(
            {
                **report.results,
                "failures": report.failures,
                "settings": dataclasses.asdict(settings),
                "environment": {**machine, **report.environment},
            }
        )
        for line in report.failures:
            screen.say(f"error: {line}")
        return 1 if report.failures else 0

    def _flagged(self) -> list[dataclasses.Field]:
        """The settings that are flags; the others are switched by the environment."""
        return [field for field in dataclasses.fields(self._benchmark.Settings) if field.metadata]


COMMANDS = {f"{NAME} {name}": Bench(benchmark) for name, benchmark in BENCHMARKS.items()}


def _define(field: dataclasses.Field, values: flags.FlagValues) -> None:
    """The flag of a setting."""
    about = field.metadata
    if about["choices"]:
        flags.DEFINE_enum(field.name, field.default, list(about["choices"]), about["text"], flag_values=values)
    elif isinstance(field.default, int | float):
        define = flags.DEFINE_integer if isinstance(field.default, int) else flags.DEFINE_float
        bounds = {"lower_bound": about["least"], "upper_bound": about["most"]}
        define(field.name, field.default, about["text"], **bounds, flag_values=values)
    else:
        flags.DEFINE_string(field.name, field.default, about["text"], flag_values=values)


def _facts(facts: dict[str, object]) -> str:
    return "  ".join(f"{name} {value}" for name, value in facts.items() if value is not None)


def _devices(machine: dict[str, object]) -> str:
    return f"{', '.join(machine['devices'])} ({machine['backend']})"


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: the first column to the left, the others to the right; short rows end early.

    Example:
      >>> align([("run", "tokens/s"), ("mean", "9.5"), ("all",)])
      ['run   tokens/s', 'mean       9.5', 'all']
    """
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(max(map(len, rows)))]
    lines = []
    for row in rows:
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=False))
        lines.append("  ".join([row[0].ljust(len(first)), *others]).rstrip())
    return lines
