"""The command line, the top layer: `python -m jaxspec COMMAND [--flag ...]`.

A command has a SUMMARY, `define_flags(flag_values)` and `run(flag_values) -> exit status`: a module, or a benchmark,
whose name is two words. Exit statuses: 0 done, 1 the output is not what it should be, 2 bad input, 130 interrupted.
Whatever the user got wrong is one line on standard error.
"""

import contextlib
import os
import sys
from collections.abc import Sequence

from absl import flags

import jaxspec
from jaxspec.cli import bench, doctor, generate, many
from jaxspec.cli.command import flag_help, parse_flags

__all__ = ["COMMANDS", "main", "split"]

COMMANDS = {"generate": generate, "generate-many": many, "doctor": doctor, **bench.COMMANDS}

_HELP = ("--help", "-h", "help")


def main(argv: Sequence[str]) -> int:
    """Runs a command line and returns its exit status.

    Args:
      argv: the words after `python -m jaxspec`.

    Example:
      >>> main(["--version"])
      jaxspec 0.1.0
      0
    """
    for stream in (sys.stdout, sys.stderr):
        # A completion may hold any character; a terminal that cannot show one gets a question mark, not a traceback.
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")
    name, words = split(argv)
    if name in _HELP:
        print(_overview())
        return 0
    if name == "--version":
        print(f"jaxspec {jaxspec.__version__}")
        return 0
    if name not in COMMANDS:
        return _fail(f"{name!r} is no command: there are {', '.join(COMMANDS)}")
    command = COMMANDS[name]
    try:
        values = parse_flags(command.define_flags, words)
        if values.help:
            print(f"{command.SUMMARY}\n\nusage: python -m jaxspec {name} [--flag=value ...]\n\n{flag_help(values)}")
            return 0
        return command.run(values)
    except (jaxspec.InputError, flags.Error) as error:
        return _fail(" ".join(str(error).split()))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output has gone; let the interpreter's last flush go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def split(argv: Sequence[str]) -> tuple[str, list[str]]:
    """The command's name, and the words after it.

    Example:
      >>> split(["generate", "--model", "target"]), split(["bench", "unified-ab", "--runs", "1"])
      (('generate', ['--model', 'target']), ('bench unified-ab', ['--runs', '1']))
    """
    name, *words = argv or ["--help"]
    if name == bench.NAME and words:
        second, *words = words
        name = second if second in _HELP else f"{name} {second}"
    return name, words


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.SUMMARY}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: python -m jaxspec COMMAND [--flag=value ...]",
            "",
            *lines,
            "",
            "python -m jaxspec COMMAND --help lists its flags.",
        ]
    )


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2
