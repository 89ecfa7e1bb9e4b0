"""Every notebook runs from top to bottom in a fresh kernel, and is stored with its outputs."""

import getpass
import json
import re
import socket

import nbformat
import pytest

from tests.notebooks.stored_notebooks import FOLDER, NOTEBOOKS, as_stored, read, run
from tests.simulated_devices import EIGHT_DEVICES_FAST

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


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


def kinds_of_outputs(notebook):
    """For each code cell, what kinds of output it has."""
    return {
        cell.id: [
            (output.output_type, sorted(output.get("data", [output.get("name")])))
            for output in cell.outputs
        ]
        for cell in notebook.cells
        if cell.cell_type == "code"
    }


@pytest.mark.long
@each_notebook
def test_notebook_runs_without_error_or_warning_and_shows_what_is_stored(path, tmp_path):
    stored = read(path)
    notebook = nbformat.from_dict(stored)
    run(notebook, tmp_path, EIGHT_DEVICES_FAST)
    # A warning in a tutorial is a thing that its reader cannot judge.
    assert texts_on_stderr(notebook) == []
    assert list(tmp_path.iterdir()) == []
    # Times and rounding differ from run to run; what is shown where does not.
    assert kinds_of_outputs(as_stored(notebook)) == kinds_of_outputs(stored)


@each_notebook
def test_notebook_is_stored_as_run_from_top_to_bottom_with_small_outputs(path):
    notebook = read(path)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert as_stored(notebook) == notebook
    assert path.stat().st_size < 300_000


def test_of_a_long_tree_the_outermost_lines_are_stored():
    lines = ["lm"]
    for i in range(10):
        lines += [f"  block_{i}", f"    mlp_{i}", "      up", "    attention"]
    shown = nbformat.v4.new_output("execute_result", {"text/plain": "\n".join([*lines, "total"])})
    cell = nbformat.v4.new_code_cell(outputs=[shown])
    (stored,) = as_stored(nbformat.v4.new_notebook(cells=[cell])).cells[0].outputs
    expected = ["lm"]
    for i in range(10):
        # What is in the first six blocks has room, and what is in that has not.
        expected += [f"  block_{i}", *([f"    mlp_{i}", "    attention"] if i < 6 else [])]
    assert stored.data["text/plain"].splitlines() == [*expected, "total", "... and 18 more lines"]


@each_notebook
def test_notebook_shows_pictures_and_tables_on_a_code_host(path):
    outputs = [output for cell in read(path).cells for output in cell.get("outputs", [])]
    shown = [kind for output in outputs for kind in output.get("data", {})]
    assert shown.count("image/png") >= 2
    assert shown.count("text/html") >= 2
    assert "stderr" not in {output.get("name") for output in outputs}


@each_notebook
def test_what_is_stored_names_no_place_or_machine_and_warns_of_nothing(path):
    for cell in read(path).cells:
        for output in cell.get("outputs", []):
            data = {k: v for k, v in output.get("data", {}).items() if not k.startswith("image/p")}
            text = json.dumps([output.get("text", ""), data])
            assert not re.search(r"(?<![\w.:/<*}])/(?:[\w.-]+/)+[\w.-]+", text), text
            assert not re.search(r"warning|\\u001b|<script", text, re.IGNORECASE), text
            assert socket.gethostname() not in text
            assert getpass.getuser() not in re.findall(r"\w+", text.replace("the root", ""))


@each_notebook
def test_notebook_is_well_formed_and_runs_in_any_python_3_kernel(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert notebook.metadata.kernelspec.name == "python3"
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
