"""The one exception that stands for bad input by the user, and how a program ends that meets it."""

import functools
import sys
from collections.abc import Callable, Sequence


class InputError(ValueError):
    """Something the user gave cannot be used: a folder, a setting, a prompt.

    The message is one line that names the value, the rule it breaks and the way out. The command line prints that line
    and exits with status 2; a script catches it as any `ValueError`.
    """


def exits_with_2(main: Callable[[Sequence[str]], None]) -> Callable[[Sequence[str]], None]:
    """`main` of a program: an `InputError` becomes one line on standard error and exit status 2."""

    @functools.wraps(main)
    def guarded(argv: Sequence[str]) -> None:
        try:
            main(argv)
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)

    return guarded
