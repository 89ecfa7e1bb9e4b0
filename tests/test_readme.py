"""Every block of the README runs, and prints what stands below it."""

import contextlib
import io
import itertools
import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.M | re.S)
PAIRS = [
    (code, text)
    for (kind, code), (below, text) in itertools.pairwise(BLOCKS)
    if (kind, below) == ("python", "text")
]


def test_readme_blocks_print_what_stands_below_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(PAIRS) == [kind for kind, _ in BLOCKS].count("python") > 0
    namespace = {"__name__": "readme"}
    for code, text in PAIRS:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            try:
                exec(compile(code, "README.md", "exec"), namespace)
            except ValueError as error:
                print(f"{type(error).__name__}: {error}")
        assert printed.getvalue().replace(f"{tmp_path}/", "") == text


def test_readme_commands_are_those_of_the_ci():
    ((_, commands),) = [block for block in BLOCKS if block[0] == "sh"]
    demo, tests = (line for line in commands.splitlines() if not line.startswith("#"))
    assert demo.endswith("penzai-shard demo")
    assert (ROOT / ".ci/run").read_text().rstrip().endswith(tests)


def test_readme_links_lead_to_files():
    targets = re.findall(r"\]\((?!http)([^)]+)\)", README)
    assert [target for target in targets if not (ROOT / target).is_file()] == []
