"""The command line, the top layer: `python -m jaxspec COMMAND [--flag ...]`.

A command is a module with a SUMMARY, `define_flags(flag_values)` and `run(flag_values) -> exit status`. Exit statuses:
0 done, 1 the output is not what it should be, 2 bad input, 130 interrupted. Whatever the user got wrong is one line on
standard error.
"""

import contextlib
import os
import sys
from collections.abc import Sequence

from absl import flags

import jaxspec
from jaxspec.cli import doctor, generate
from jaxspec.cli.command import flag_help, parse_flags

__all__ = ["COMMANDS", "main"]

COMMANDS = {"generate": generate, "doctor": doctor}


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
    name, *words = argv or ["--help"]
    if name in ("--help", "-h", "help"):
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


def _overview() -> str:
    lines = [f"  {name:10} {command.SUMMARY}" for name, command in COMMANDS.items()]
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
