"""The documentation site builds without a warning, is complete, and its code runs as pasted."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import penzai_shard
from penzai_shard import errors
from tests.simulated_devices import EIGHT_DEVICES, EIGHT_DEVICES_FAST, UNFINISHED_ENTRY

ROOT = Path(__file__).parents[1]
ONE_NAME = """
Reference
=========

.. autosummary::
   :toctree: generated

   penzai_shard.Checkpointed
"""
SHORT_TEXTS = ["lay_out", "edit", "train", "save", "restore"]


def built(folder, *options):
    """The site of a folder with the documentation, which builds without a warning."""
    command = ["-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", *options]
    done = subprocess.run(
        [sys.executable, *command, "docs", "site"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return folder / "site"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built from a copy: what is generated stays out of the checkout.

    In Sphinx' plain theme. That of the readers draws the contents of the whole site anew on each
    page, which takes longer than all else: see ``front``.
    """
    folder = tmp_path_factory.mktemp("documentation")
    generated = shutil.ignore_patterns("generated", "notebooks")
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=generated)
    shutil.copytree(ROOT / "notebooks", folder / "notebooks")
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, folder)
    return built(folder, "-D", "html_theme=basic")


@pytest.fixture(scope="module")
def front(tmp_path_factory):
    """The site in the theme of its readers: the front page, and one of a public name.

    Of the other pages it has the titles.
    """
    folder = tmp_path_factory.mktemp("front")
    for name in ("_templates", "_static"):
        shutil.copytree(ROOT / "docs" / name, folder / "docs" / name)
    for name in ("conf.py", "index.md"):
        shutil.copy(ROOT / "docs" / name, folder / "docs")
    (folder / "docs" / "reference").mkdir()
    (folder / "docs" / "reference" / "index.rst").write_text(ONE_NAME)
    texts = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "guide").glob("*.md")]
    for path in [*texts, *(ROOT / "notebooks").glob("*.ipynb")]:
        where = "notebooks" if path.suffix == ".ipynb" else path.parent.relative_to(ROOT / "docs")
        page = folder / "docs" / where / f"{path.stem}.md"
        if not page.exists():
            page.parent.mkdir(exist_ok=True)
            page.write_text(f"# {path.stem}\n")
    return built(folder)


def is_error(kind):
    return isinstance(kind, type) and issubclass(kind, Exception)


@pytest.mark.long
def test_every_public_name_has_its_page(site):
    names = {name for name in penzai_shard.__all__ if not name.startswith("__")}
    pages = {path.stem for path in (site / "reference" / "generated").glob("*.html")}
    kinds = {page for page in pages if page.startswith("penzai_shard.errors.")}
    readers = {"penzai_shard.readers.ArrayReader", "penzai_shard.readers.ReadArray"}
    assert pages - kinds == {f"penzai_shard.{name}" for name in names} | readers
    every = {
        f"{kind.__module__}.{kind.__name__}" for kind in vars(errors).values() if is_error(kind)
    }
    assert kinds == {name for name in every if name.rpartition(".")[2] not in names}
    for name in names:
        page = (site / "reference" / "generated" / f"penzai_shard.{name}.html").read_text("utf-8")
        assert f'id="penzai_shard.{name}"' in page, name


def test_the_front_page_leads_to_the_short_texts_and_the_reference(front):
    page = (front / "index.html").read_text("utf-8")
    assert "furo" in page
    links = re.findall(r'href="([^"#]+)', page)
    for name in SHORT_TEXTS:
        assert f"guide/{name}.html" in links
    for page in (
        "tour",
        "rules",
        "surgery",
        "choosing",
        "training",
        "checkpoints",
        "reference/index",
    ):
        assert f"{page}.html" in links


@pytest.mark.long
def test_every_notebook_is_shown_with_its_pictures(site):
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        page = (site / "notebooks" / f"{notebook.stem}.html").read_text("utf-8")
        assert "<img" in page


def test_the_short_texts_run_as_pasted_one_after_the_other(tmp_path):
    texts = [(ROOT / "docs" / "guide" / f"{name}.md").read_text("utf-8") for name in SHORT_TEXTS]
    script = "\n".join(
        block for text in texts for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    )
    # As pasted but for the compiler's flags.
    assert script.count(f'"{EIGHT_DEVICES}"') == 1
    script = script.replace(EIGHT_DEVICES, EIGHT_DEVICES_FAST)
    inherited = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={
            **inherited,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": f"error,{UNFINISHED_ENTRY}",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [
        float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("loss")
    ]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 3
    for shown in (
        "each device holds",
        "3 edits of MLP, 5 places",
        "\nequivalent",
        "step 8/8: loss",
        "step 8\n",
    ):
        assert shown in done.stdout
