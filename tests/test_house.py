"""The package as a whole: what its import loads, what it exports, and how large its rooms are."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

import penzai_shard

PACKAGE = pathlib.Path(penzai_shard.__file__).parent
SIZE_SCRIPT = PACKAGE.parent / ".ci" / "size.py"
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


@pytest.mark.parametrize("name", penzai_shard.__all__)
def test_public_name_resolves_and_has_a_docstring(name):
    value = getattr(penzai_shard, name)
    assert name in dir(penzai_shard)
    assert value.__doc__
    # A dataclass without a docstring gets its signature as one.
    assert not value.__doc__.startswith(f"{name}(")


def test_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError):
        _ = penzai_shard.no_such_name


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


def test_size_script_fails_for_a_room_over_its_budget(tmp_path):
    def run():
        command = [sys.executable, str(SIZE_SCRIPT), str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        over = [line.split()[0] for line in done.stdout.splitlines() if "over budget" in line]
        return done.returncode, over

    room = tmp_path / "penzai_shard" / "reports"
    room.mkdir(parents=True)
    # 5 % over the budget of 410 is 430: docstrings, comments and blank lines are not counted.
    room.joinpath("text.py").write_text('"""Two\nlines."""\n' + "x = 1\n\n# y\n" * 430)
    assert run() == (0, [])
    room.joinpath("more.py").write_text("x = 1\n")
    assert run() == (1, ["reports"])
