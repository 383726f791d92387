"""The package as a package: layers, size, side effects of importing it."""

import ast
import os
import pathlib
import subprocess
import sys
import tomllib

import pytest

import jaxspec
import pallas_kernels
from jaxspec import models

ROOT = pathlib.Path(jaxspec.__file__).parent
PACKAGES = (ROOT, pathlib.Path(pallas_kernels.__file__).parent)
PROJECT = pathlib.Path(__file__).parents[1]

# An import may stay in its layer or go to one that stands before it.
LAYERS = (
    ("pallas_kernels",),
    ("jaxspec.config", "jaxspec.errors"),
    ("jaxspec.cache", "jaxspec.metadata", "jaxspec.attention", "jaxspec.recurrent"),
    ("jaxspec.models", "jaxspec.drafting", "jaxspec.verification"),
    ("jaxspec.steps",),
    ("jaxspec.generation",),
    ("jaxspec",),  # the public names
    ("jaxspec.cli", "jaxspec.__main__"),
)
# Programs beside the package that they belong to: they drive the library from above.
PROGRAMS = "jaxspec.drafting.train"


def source_files():
    """Every module of the packages by its dotted name."""
    files = {}
    for package in PACKAGES:
        for path in sorted(package.rglob("*.py")):
            parts = path.relative_to(package.parent).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


FILES = source_files()


def imports_of(name):
    """Modules of the packages that `name` imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            # `from package import x` means the module package.x if there is one.
            found |= {full if (full := f"{node.module}.{a.name}") in FILES else node.module for a in node.names}
    return {module for module in found if module in FILES}


GRAPH = {name: imports_of(name) for name in FILES}


def layer(module):
    ranks = {name: rank for rank, names in enumerate(LAYERS) for name in names}
    if module.startswith(PROGRAMS):
        return len(LAYERS)
    while module not in ranks:
        module = module.rpartition(".")[0]
    return ranks[module]


def reached_from(start):
    seen, todo = set(), [start]
    while todo:
        for module in GRAPH[todo.pop()] - seen:
            seen.add(module)
            todo.append(module)
    return seen


@pytest.mark.parametrize("module", FILES)
def test_imports_only_go_down(module):
    up = {other for other in GRAPH[module] if layer(other) > layer(module)}
    assert not up, f"{module} imports {up} of a higher layer"


def test_no_module_reaches_itself():
    assert [module for module in GRAPH if module in reached_from(module)] == []


def test_the_kernels_know_nothing_of_the_library():
    for module in GRAPH:
        if module.split(".")[0] == "pallas_kernels":
            assert not any(other.startswith("jaxspec") for other in reached_from(module))


def test_metadata_knows_nothing_of_the_cache():
    for module in GRAPH:
        if module.startswith("jaxspec.metadata"):
            assert not any(other.startswith("jaxspec.cache") for other in reached_from(module))


@pytest.mark.parametrize("module", FILES)
def test_no_module_is_large(module):
    assert FILES[module].stat().st_size <= 30_000


def test_package_data_is_small():
    """Three targets, one of them with an MTP block, a draft model, and drafts that feed on features."""

    def size(folder):
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    data = ROOT / "models/data"
    assert size(data / "drafts") <= 8_000_000
    assert size(data) - size(data / "drafts") <= 32_000_000
    kpool = models.embedded_path("kpool") / "model.safetensors"
    assert kpool.stat().st_size <= 9_000_000


def test_the_embedded_models_are_there():
    assert set(models.embedded_names()) >= {"target", "draft", "hybrid", "kpool"}
    assert (ROOT / "models/data/prompts.jsonl").is_file()
    assert (ROOT / "models/data/NOTICE").is_file()
    for name in ("target", "draft", "hybrid", "kpool"):
        folder = models.embedded_path(name)
        assert all((folder / file).is_file() for file in ("model.safetensors", "tokenizer.json", "training.json"))


def test_importing_changes_no_option():
    code = """
import os
before_flags = os.environ.get("XLA_FLAGS")
import jax
before = dict(jax.config.values)
import jaxspec, jaxspec.cli, pallas_kernels
after = dict(jax.config.values)
assert before == {name: after[name] for name in before}, "an option of jax has another value"
assert os.environ.get("XLA_FLAGS") == before_flags, "XLA_FLAGS has another value"
assert not jax.config.jax_enable_x64
jax.config.update("jax_num_cpu_devices", 2)  # refused once a backend is up
assert jax.local_device_count("cpu") == 2
"""
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_ENABLE_X64")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, stdin=subprocess.DEVNULL)


def test_every_public_name_exists_and_is_documented():
    for package in (jaxspec, pallas_kernels):
        for name in package.__all__:
            value = getattr(package, name)
            assert not callable(value) or value.__doc__, f"{package.__name__}.{name} has no docstring"


def test_the_distribution_is_not_that_of_the_astronomers():
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "jaxspec-decode"
    assert project["version"] == jaxspec.__version__
    assert {"cuda12", "cuda13", "test", "notebooks", "parity"} <= project["optional-dependencies"].keys()
