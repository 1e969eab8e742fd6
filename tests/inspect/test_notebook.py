"""The notebook runs from top to bottom, and is kept with what it shows."""

import json
from pathlib import Path

import matplotlib.pyplot as plt

NOTEBOOK = Path(__file__).parents[2] / "examples" / "inspect_memory.ipynb"
TEXT = NOTEBOOK.read_text(encoding="utf-8")
CELLS = [cell for cell in json.loads(TEXT)["cells"] if cell["cell_type"] == "code"]
OUTPUTS = [output for cell in CELLS for output in cell["outputs"]]


def test_every_cell_runs(monkeypatch):
    monkeypatch.chdir(NOTEBOOK.parent)
    plt.switch_backend("agg")
    monkeypatch.setattr(plt, "show", lambda: (shown.append(plt.gcf()), plt.close()))
    names, shown = {}, []
    for cell in CELLS:
        code = (line for line in cell["source"] if not line.startswith("%"))  # for Jupyter
        exec("".join(code), names)
    assert len(shown) == sum("image/png" in output.get("data", {}) for output in OUTPUTS) == 4
    title = shown[-1].axes[1].get_title(loc="left")
    assert title.startswith(f"mask of chunk {int(names['own'][0].chunk[3])}, tokens")


def test_it_is_kept_with_its_figures_and_without_its_page_or_a_trace_of_a_machine():
    assert not [output for output in OUTPUTS if output["output_type"] == "error"]
    assert not [output for output in OUTPUTS if output.get("name") == "stderr"]
    assert "/tmp" not in TEXT
    assert "/home" not in TEXT
    assert "<iframe" not in TEXT  # the page of `show`, 150 kB
