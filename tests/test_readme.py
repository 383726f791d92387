"""What the README shows is true: its Python runs, its commands exist."""

import pathlib
import re
import shlex

import pytest
from tiny_models import FAST_COMPILE

from jaxspec import cli, models
from jaxspec.cli.command import parse_flags

PROJECT = pathlib.Path(__file__).parents[1]
README = (PROJECT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_python_examples_run(tmp_path, monkeypatch, capsys):
    examples = blocks("python")
    assert examples
    assert len(examples[0].splitlines()) <= 20
    if "target" not in models.embedded_names():
        pytest.skip("the embedded models are not there")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("jaxspec.steps.step.compiler_options", lambda: FAST_COMPILE)
    names = {}  # later examples go on where earlier ones ended
    for example in examples:
        exec(compile(example, "README.md", "exec"), names)
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    "command",
    [
        "pip install . && python -m jaxspec generate",
        "pip install '.[cuda12]' && python -m jaxspec generate",
        "pip install -e '.[test]' && pytest",
    ],
)
def test_the_commands_of_a_fresh_machine_are_there(command):
    assert any(command in block for block in blocks("sh"))


def test_every_command_line_parses():
    lines = [line.partition("  #")[0] for block in blocks("sh") for line in block.splitlines() if "-m jaxspec " in line]
    assert lines
    for line in lines:
        name, words = cli.split(shlex.split(line.rpartition("-m jaxspec ")[2]))
        parse_flags(cli.COMMANDS[name].define_flags, words)


def test_no_text_installs_the_other_jaxspec():
    # PyPI's package of this name is something else. Written apart, so that this file passes its own search.
    wrong = re.compile("pip install " + r"(-\S+ )*['\"]?jaxspec(?!-decode)")
    files = [path for kind in ("*.md", "*.py", "*.ipynb", "*.toml") for path in PROJECT.rglob(kind)]
    assert not [
        str(path) for path in files if ".venv" not in str(path) and wrong.search(path.read_text(errors="ignore"))
    ]
