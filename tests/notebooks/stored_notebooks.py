"""Runs the notebooks, and makes of a run what is stored: pictures and text that a code host shows.

``python -m tests.notebooks.stored_notebooks`` runs them all and stores their outputs.
"""

import asyncio
import os
import pathlib
import re
import tempfile

import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

from tests.simulated_devices import EIGHT_DEVICES, UNFINISHED_ENTRY

FOLDER = pathlib.Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# A notebook that hangs is ended; one of a busy machine is not.
SECONDS_PER_NOTEBOOK = 600
# A long text, such as that of a whole model, is stored up to here; that of a table as it is.
STORED_LINES = 25
STORED_COLUMNS = 120

_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# What differs from run to run and says nothing to a reader.
_ADDRESSES = re.compile(r"( # Repeated python obj)? at 0x[0-9a-f]+")
_SAYS_NOTHING = re.compile(r"<(IPython\.core\.display\.HTML object|Figure size .*)>")


def read(path):
    return nbformat.read(path, as_version=nbformat.NO_CONVERT)


def run(notebook, folder, flags=EIGHT_DEVICES):
    """Runs a notebook in place: a new kernel with 8 simulated devices, in a folder of its own."""
    # Its first import on a machine takes long and says so; that is nothing of the notebook's.
    import matplotlib.font_manager  # noqa: F401

    kept = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    environment = {
        **kept,
        "JAX_PLATFORMS": "cpu",
        # Of a busy machine a device may get its turn late, and those that wait say so.
        "XLA_FLAGS": f"{flags} --xla_cpu_collective_call_warn_stuck_timeout_seconds=300",
        # treescope looks up every public name of numpy, and numpy 2.5 deprecates one of them.
        "PYTHONWARNINGS": f"default,ignore:The chararray class is deprecated,{UNFINISHED_ENTRY}",
        # This checkout, wherever the kernel's package may be installed from.
        "PYTHONPATH": str(FOLDER.parent),
    }
    with tempfile.TemporaryDirectory() as own:
        client = NotebookClient(
            notebook,
            kernel_name="python3",
            resources={"metadata": {"path": str(folder)}},
            startup_timeout=SECONDS_PER_NOTEBOOK,
            iopub_timeout=SECONDS_PER_NOTEBOOK,
            # Files in place of ports, which another program may take before the kernel does.
            config=Config(
                KernelManager={"transport": "ipc", "connection_file": f"{own}/kernel.json"}
            ),
        )
        # Nothing that a user, or another kernel, has set up for IPython.
        execution = client.async_execute(env={**environment, "IPYTHONDIR": f"{own}/ipython"})
        asyncio.run(asyncio.wait_for(execution, SECONDS_PER_NOTEBOOK))


def as_stored(notebook):
    """A copy of a notebook that was run, with what a code host shows of its outputs.

    Interactive views are scripts, which no code host runs: their text stands for them.
    """
    stored = nbformat.from_dict(notebook)
    for cell in stored.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = _stored_outputs(cell.outputs)
    stored.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return stored


def _stored_outputs(outputs):
    kept = []
    for output in outputs:
        if output.output_type == "stream":
            text = _ESCAPES.sub("", output.text)
            if kept and kept[-1].output_type == "stream" and kept[-1].name == output.name:
                kept[-1].text += text
            else:
                kept.append(nbformat.from_dict({**output, "text": text}))
            continue
        data = _stored_data(output.data)
        if data:
            kept.append(nbformat.from_dict({**output, "data": data, "metadata": {}}))
    return kept


def _stored_data(data):
    kept = {kind: data[kind] for kind in ("image/png", "image/svg+xml") if kind in data}
    if "<script" not in data.get("text/html", "<script"):
        kept["text/html"] = data["text/html"]
    text = _ADDRESSES.sub("", _ESCAPES.sub("", data.get("text/plain", "")))
    if text and not _SAYS_NOTHING.fullmatch(text):
        kept["text/plain"] = text if "text/html" in kept else _clipped(text)
    return kept


def _clipped(text):
    lines = text.splitlines()
    if len(lines) > STORED_LINES:
        kept = _outermost(lines)
        lines = [*kept, f"... and {len(lines) - len(kept)} more lines"]
    return "\n".join(
        line if len(line) <= STORED_COLUMNS else f"{line[: STORED_COLUMNS - 3]}..."
        for line in lines
    )


def _outermost(lines):
    """Of many lines the outermost, and what is in them where there is room for all of it."""
    within, parents = {None: []}, []
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        while parents and parents[-1][0] >= indent:
            parents.pop()
        within[parents[-1][1] if parents else None].append(number)
        within[number] = []
        parents.append((indent, number))
    kept, waiting = [], [None]
    for outer in waiting:
        if len(kept) + len(within[outer]) < STORED_LINES:
            kept += within[outer]
            waiting += within[outer]
    return [lines[number] for number in sorted(kept)] or lines[: STORED_LINES - 1]


def main():
    for path in NOTEBOOKS:
        notebook = read(path)
        with tempfile.TemporaryDirectory() as folder:
            run(notebook, folder)
        nbformat.write(as_stored(notebook), path)
        print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
