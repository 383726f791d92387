"""The notebooks run from top to bottom, and what they prove at their end holds."""

import pathlib

import pytest

from jaxspec import models

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

NOTEBOOKS = sorted((pathlib.Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
SECONDS_A_CELL = 300


def read(path):
    return nbformat.read(path, as_version=4)


def test_there_is_a_notebook():
    assert "01_first_step.ipynb" in [path.name for path in NOTEBOOKS]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_without_outputs(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert not [cell for cell in notebook.cells if cell.cell_type == "code" and (cell.outputs or cell.execution_count)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_and_equals_plain_decoding(path, tmp_path, monkeypatch):
    if "target" not in models.embedded_names():
        pytest.skip("the embedded models are not there")
    # This environment's kernel, not one that the user has installed elsewhere under the same name.
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")
    notebook = read(path)
    client = nbclient.NotebookClient(
        notebook, timeout=SECONDS_A_CELL, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()  # raises the first error of a cell

    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [output for cell in code for output in cell.outputs]
    complaints = [output.text for output in outputs if output.output_type == "stream" and output.name == "stderr"]
    assert not [text for text in complaints if "Warning" in text]
    for cell in code:
        if "plt.show()" in cell.source or "draw_pages(" in cell.source:
            drawn = any("image/png" in output.get("data", {}) for output in cell.outputs)
            assert drawn != ("def draw_pages" in cell.source), cell.source
    results = [output for output in code[-1].outputs if output.output_type == "execute_result"]
    assert [result.data["text/plain"] for result in results] == ["True"]  # ids equal plain decoding
