"""Every block of the README runs, and prints what stands below it."""

import contextlib
import io
import itertools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
PAIRS = [
    (code, text)
    for (kind, code), (below, text) in itertools.pairwise(BLOCKS)
    if (kind, below) == ("python", "text")
]


def run_block(code: str, namespace: dict) -> str:
    """What a block prints, or the error that it ends with."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(code, "README.md", "exec"), namespace)
        except ValueError as error:
            print(f"{type(error).__name__}: {error}")
    return printed.getvalue()


def test_readme_blocks_print_what_stands_below_them():
    assert len(PAIRS) == [kind for kind, _ in BLOCKS].count("python") > 0
    namespace = {"__name__": "readme"}
    for code, text in PAIRS:
        assert run_block(code, namespace) == text


def test_readme_commands_are_those_of_the_ci():
    ((_, commands),) = [block for block in BLOCKS if block[0] == "sh"]
    demo, tests = (line for line in commands.splitlines() if not line.startswith("#"))
    assert demo.endswith("penzai-shard demo")
    assert (ROOT / ".ci/run").read_text().rstrip().endswith(tests)


@pytest.mark.parametrize(
    "target", re.findall(r"\]\((?!http)([^)]+)\)", (ROOT / "README.md").read_text())
)
def test_readme_links_lead_to_files(target):
    assert (ROOT / target).is_file()


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 85
