"""Every notebook runs from its first cell to its last, no cell warns, and stored outputs are so."""

import pathlib

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# Nothing of ours: what a kernel's own start-up and treescope's look at numpy say.
ALLOWED = "default,ignore:The chararray class is deprecated"


def read_texts(notebook):
    """What each cell prints, whatever pieces it comes in, and what it shows, as text."""
    texts = [
        [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs]
        for outputs in (cell.get("outputs", ()) for cell in notebook.cells)
    ]
    return ["".join(pieces) for pieces in texts]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTHONWARNINGS", ALLOWED)
    notebook = nbformat.read(path, as_version=4)
    stored = read_texts(notebook)
    assert len(notebook.cells) <= 40
    client = NotebookClient(
        notebook, kernel_name="python3", timeout=600, resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert [output.text for output in outputs if output.get("name") == "stderr"] == []
    assert len(outputs) > 10
    if any(stored):
        assert read_texts(notebook) == stored
