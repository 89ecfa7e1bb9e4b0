"""The code of README and of the pages of docs runs, and prints what stands below it."""

import contextlib
import io
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
# Pages whose blocks do not run yet.
NOT_YET = ["docs/bill.md", "docs/several_processes.md", "docs/troubleshooting.md"]
PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
# Python, and the text that stands directly below it.
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n?```text\n(.*?)^```\n)?", re.M | re.S)


def run(code, page, namespace):
    """What a block prints; an error that it ends with is the last line."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(code, page, "exec"), namespace)
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
    return printed.getvalue()


@pytest.mark.parametrize("page", [page for page in PAGES if page not in NOT_YET])
def test_blocks_print_what_stands_below_them(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "page"}
    for code, text in BLOCK.findall((ROOT / page).read_text()):
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
