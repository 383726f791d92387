"""How the tests of benchmarks run one and read what it prints."""

import io
import json
import sys

import pytest
import quick_compile
import tiny_models

from jaxspec import cli
from jaxspec.benchmarks import timing
from jaxspec.steps import step


def run_for_real(words, path):
    """Exit status, output, messages and JSON, written to `path`, of a command line that is run with nothing planted."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        patch.setattr(step, "compiler_options", lambda: tiny_models.FAST_COMPILE)
        patch.setattr(timing, "compiler_options", quick_compile.options)
        status = cli.main([*words, "--json", str(path)])
    return status, out.getvalue(), err.getvalue(), json.loads(path.read_text())


def rows_of(text):
    """The rows of all tables by their first column; cells stand two spaces apart."""
    lines = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines() if line]
    return {first: cells for first, *cells in lines}
