"""The notebook runs from top to bottom, and is kept with what it shows."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="reads the notebook")
nbclient = pytest.importorskip("nbclient", reason="runs the notebook")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def notebook():
    return nbformat.read(EXAMPLES / "inspect_memory.ipynb", as_version=4)


def pictures(notebook):
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    return sum("image/png" in out.get("data", {}) for out in outputs)


def test_every_cell_runs(notebook):
    shown = pictures(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    places = {"metadata": {"path": str(EXAMPLES)}}
    client = nbclient.NotebookClient(notebook, timeout=200, startup_timeout=200, resources=places)
    client.execute()  # raises where a cell does
    assert pictures(notebook) == shown == 4


def test_it_is_kept_with_its_outputs_and_without_a_trace_of_a_machine(notebook):
    for cell in notebook.cells:
        for out in cell.get("outputs", []):
            assert out.output_type != "error"
            assert out.get("name") != "stderr"
    text = (EXAMPLES / "inspect_memory.ipynb").read_text(encoding="utf-8")
    assert "/tmp" not in text
    assert "/home" not in text
