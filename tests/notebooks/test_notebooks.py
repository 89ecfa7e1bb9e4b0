"""Every notebook runs from its first cell to its last, and no cell warns."""

import pathlib

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# Nothing of ours: what a kernel's own start-up and treescope's look at numpy say.
ALLOWED = "default,ignore:The chararray class is deprecated"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTHONWARNINGS", ALLOWED)
    notebook = nbformat.read(path, as_version=4)
    assert len(notebook.cells) <= 40
    client = NotebookClient(
        notebook, kernel_name="python3", timeout=600, resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert [output.text for output in outputs if output.get("name") == "stderr"] == []
    assert len(outputs) > 10
