"""absl flags for a command: every command has flag values of its own, none touches the process-wide ones."""

import textwrap
from collections.abc import Callable, Sequence

from absl import flags

from jaxspec.errors import InputError


def parse_flags(define: Callable[[flags.FlagValues], None], words: Sequence[str]) -> flags.FlagValues:
    """Flags that `define` declares, with the values that `words` give them.

    Raises:
      flags.Error: an unknown flag or a value that it does not take.
      InputError: a word that is no flag.
    """
    values = flags.FlagValues()
    define(values)
    flags.DEFINE_boolean("help", False, "Show this and exit.", flag_values=values, short_name="h")
    values.set_gnu_getopt(True)  # go on after a word that is no flag, so that it can be named below
    rest = values(["jaxspec", *words])[1:]
    if rest:
        raise InputError(f"unexpected argument {rest[0]!r}: every setting is a --flag; quote values that hold spaces")
    return values


def flag_help(values: flags.FlagValues) -> str:
    """The flags of a command, in the order of their definition."""
    lines = []
    for name in values:
        flag = values[name]
        if name != flag.name:  # the short name of a flag listed already
            continue
        shown = f"--[no]{name}" if flag.boolean and name != "help" else f"--{name}"
        choices = getattr(flag.parser, "enum_values", None)
        if choices:
            shown += "=" + "|".join(choices)
        if not flag.boolean and flag.default not in (None, []):
            shown += f"  (default {flag.default})"
        elif flag.boolean and flag.default:
            shown += "  (default on)"
        text = " ".join(flag.help.removeprefix(f"<{'|'.join(choices or [])}>:").split())
        lines += [f"  {shown}", textwrap.fill(text, 100, initial_indent="      ", subsequent_indent="      ")]
    return "\n".join(lines)
