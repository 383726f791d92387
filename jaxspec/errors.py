"""The one exception that stands for bad input by the user."""


class InputError(ValueError):
    """Something the user gave cannot be used: a folder, a setting, a prompt.

    The message is one line that names the value, the rule it breaks and the way out. The command line prints that line
    and exits with status 2; a script catches it as any `ValueError`.
    """
