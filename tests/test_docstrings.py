"""Every example in a docstring does what it says."""

import doctest
import importlib
import pkgutil

import pytest
from tiny_models import FAST_COMPILE

import jaxspec
import pallas_kernels
from jaxspec import models

OPTIONAL = {"optax"}  # what only the training script needs


def examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    for package in (jaxspec, pallas_kernels):
        for info in [None, *pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]:
            name = info.name if info else package.__name__
            if name.endswith("__main__"):
                continue
            try:
                module = importlib.import_module(name)
            except ModuleNotFoundError as error:
                if error.name not in OPTIONAL:
                    raise
                continue
            yield from (test for test in finder.find(module, name) if test.examples)


def needs_embedded_model(test):
    return any('load_model("' in example.source for example in test.examples)


@pytest.mark.parametrize("test", [pytest.param(test, id=test.name) for test in examples()])
def test_example(test, monkeypatch):
    if needs_embedded_model(test):
        if "target" not in models.embedded_names():
            pytest.skip("the embedded models are not there")
        monkeypatch.setattr("jaxspec.steps.step.compiler_options", lambda: FAST_COMPILE)
    report = []
    failed, _ = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=report.append)
    assert not failed, "".join(report)
