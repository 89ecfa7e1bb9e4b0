"""The package as a whole: what its import loads, and what it exports."""

import ast
import pathlib
import re
import subprocess
import sys

import penzai_shard

PACKAGE = pathlib.Path(penzai_shard.__file__).parent
# Folders of somebody's machine. Within an address or a longer path they follow a word.
ABSOLUTE_PATH = re.compile(r"(?<![\w.~*}>])/(home|root|tmp|work|Users|usr|opt|var|etc|mnt)\b")


def test_import_loads_no_library_and_few_modules():
    script = "import penzai_shard, sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    loaded = done.stdout.split()
    libraries = {name.partition(".")[0] for name in loaded}
    assert "penzai_shard" in libraries
    assert not libraries & {"jax", "optax", "orbax", "rich", "flax"}
    assert len([name for name in loaded if name.startswith("penzai_shard")]) < 5


def test_public_names_resolve_and_have_docstrings():
    docstrings = {name: getattr(penzai_shard, name).__doc__ for name in penzai_shard.__all__}
    # A dataclass without a docstring gets its signature as one.
    assert not [
        name for name, text in docstrings.items() if not text or text.startswith(f"{name}(")
    ]


def test_stub_names_what_the_package_exports():
    stub = ast.parse(PACKAGE.joinpath("__init__.pyi").read_text(encoding="utf-8"))
    names = set()
    for node in stub.body:
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            names.add(ast.unparse(node.target))
    public = {name for name in penzai_shard.__all__ if not name.startswith("_")}
    assert {name for name in names if not name.startswith("_")} == public


def test_no_file_mentions_an_absolute_path():
    files = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")]
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    assert PACKAGE / "__init__.py" in texts
    assert not [path for path, text in texts.items() if ABSOLUTE_PATH.search(text)]
