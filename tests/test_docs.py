"""The code of README and of the pages of docs runs, and prints what stands below it."""

import contextlib
import io
import pathlib
import re
import sys

import jax
import pytest

import penzai_shard as pzs
from penzai_shard import errors
from penzai_shard.cli import inputs

ROOT = pathlib.Path(__file__).parent.parent
PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
# Python or a command, and the text that stands directly below it.
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```\n(?:\n?```text\n(.*?)^```\n)?", re.M | re.S)


def run(code, page, namespace):
    """What a block prints; an error that it ends with is the last line."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(code, page, "exec"), namespace)
        except SystemExit:
            pass
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
    return printed.getvalue()


def write_call(line):
    """A command of the shell as Python."""
    assert line.startswith("penzai-shard ")
    return f"""
import contextlib, sys
from penzai_shard.cli.main import main
sys.argv = {line.split()}
with contextlib.redirect_stderr(sys.stdout):
    main()
"""


@pytest.mark.filterwarnings("ignore:jax:DeprecationWarning:haliax")
@pytest.mark.parametrize("page", PAGES)
def test_blocks_print_what_stands_below_them(page, tmp_path, monkeypatch):
    if page == "docs/other_libraries.md" and jax.__version_info__ >= (0, 12):
        pytest.skip("Haliax calls what this JAX lacks")
    monkeypatch.chdir(tmp_path)
    # What a page imports from its folder, and a command from its file.
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "argv", sys.argv)
    inputs._import_file.cache_clear()
    namespace = {"__name__": "page"}
    for kind, code, text in BLOCK.findall((ROOT / page).read_text()):
        if kind == "sh" and not text:
            continue
        code = code if kind == "python" else write_call(code)
        assert run(code, page, namespace).replace(f"{tmp_path}/", "") == text


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "benchmarks/README.md"])
def test_links_lead_to_files(page):
    folder = (ROOT / page).parent
    targets = re.findall(r"\]\((?!http)([^)#]+)[^)]*\)", (ROOT / page).read_text())
    assert [target for target in targets if not (folder / target).is_file()] == []


def test_commands_of_the_readme_are_those_of_the_ci():
    commands = re.search(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)[1]
    demo, tests = (line for line in commands.splitlines() if not line.startswith("#"))
    assert demo.endswith("penzai-shard demo")
    assert (ROOT / ".ci/run").read_text().rstrip().endswith(tests)


def test_every_public_name_is_in_the_reference():
    reference = (ROOT / "docs/api.md").read_text()
    listed = re.findall(r"^\.\. auto(?:class|function|data):: (\w+)$", reference, re.M)
    own_errors = {name for name in pzs.__all__ if hasattr(errors, name)}
    assert sorted([*listed, *own_errors, "__version__"]) == sorted(pzs.__all__)
