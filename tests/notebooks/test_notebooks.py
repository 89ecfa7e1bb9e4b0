"""Every notebook runs from top to bottom in a fresh kernel, and is stored without outputs."""

import asyncio
import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SECONDS_PER_NOTEBOOK = 180

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path):
    return nbformat.read(path, as_version=nbformat.NO_CONVERT)


def run(notebook, folder):
    """Runs a notebook in place: a new kernel with 8 simulated devices, in a folder of its own."""
    client = NotebookClient(
        notebook, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONWARNINGS": "default",
    }
    execution = client.async_execute(env=environment)
    asyncio.run(asyncio.wait_for(execution, SECONDS_PER_NOTEBOOK))


def texts_on_stderr(notebook):
    return [
        output.text
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "stream" and output.name == "stderr"
    ]


def test_the_notebooks_are_where_the_readme_says():
    assert FOLDER / "jitting_and_sharding.ipynb" in NOTEBOOKS


@pytest.mark.notebook
@each_notebook
def test_notebook_runs_without_error_or_warning(path, tmp_path):
    notebook = read(path)
    run(notebook, tmp_path)
    # A warning in a tutorial is a thing that its reader cannot judge.
    assert texts_on_stderr(notebook) == []
    assert list(tmp_path.iterdir()) == []


@each_notebook
def test_notebook_is_stored_without_outputs(path):
    cells = [cell for cell in read(path).cells if cell.cell_type == "code"]
    assert cells
    assert [cell.id for cell in cells if cell.outputs or cell.execution_count is not None] == []
    assert [cell.id for cell in cells if cell.metadata] == []


@each_notebook
def test_notebook_is_well_formed_and_runs_in_any_python_3_kernel(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert notebook.metadata.kernelspec.name == "python3"
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
