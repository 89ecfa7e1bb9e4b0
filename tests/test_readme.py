"""The README's commands are those that CI runs, and its tour works as printed."""

import os
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

import penzai_shard
from tests.simulated_devices import EIGHT_DEVICES, EIGHT_DEVICES_FAST, UNFINISHED_ENTRY

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_readme_begins_with_the_two_commands_and_ci_runs_the_second_word_for_word():
    main_job, tests = (block.strip() for block in blocks("sh")[:2])
    assert "\n" not in main_job
    assert "\n" not in tests
    assert main_job.endswith("penzai-shard demo")
    assert tests.endswith("-m pytest")
    assert tests in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-newest.txt"])
def test_the_constraints_pin_exact_versions_and_name_no_index(name):
    lines = (ROOT / name).read_text(encoding="utf-8").split()
    assert lines
    for line in lines:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line)


@pytest.mark.long
def test_every_python_block_runs_as_pasted_twice_in_one_process_and_one_folder(tmp_path):
    """In a fresh interpreter, as somebody would who pastes the blocks in their order."""
    pasted = "\n".join(blocks("python"))
    # As pasted but for the compiler's flags.
    assert pasted.count(f'"{EIGHT_DEVICES}"') == 1
    pasted = pasted.replace(EIGHT_DEVICES, EIGHT_DEVICES_FAST)
    script = f"{pasted}\n{pasted}\n" + textwrap.dedent(
        """
        import numpy as np

        trained, again = pzs.param_dict(model), pzs.param_dict(restored)
        assert trained.keys() == again.keys()
        for name, value in trained.items():
            np.testing.assert_array_equal(
                np.asarray(value.data_array), np.asarray(again[name].data_array)
            )
        assert same == recipe
        # Nothing of the tour is left without its memory.
        for kept in (model, state, restored, tokens, logits, bare, edited):
            for leaf in jax.tree_util.tree_leaves(pz.freeze_variables(kept)):
                assert not (isinstance(leaf, jax.Array) and leaf.is_deleted())
        """
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={
            **environment,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": f"error,{UNFINISHED_ENTRY}",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"^loss ([\d.]+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 6
    assert losses[:3] == losses[3:]
    assert losses[2] < losses[0]
    for shown in ("each device holds", "4 edits of TransformerLM, 7 places\n", "\nequivalent"):
        assert done.stdout.count(shown) == 2, shown


def test_the_extras_that_the_readme_lists_are_those_of_the_package():
    listed = set(
        re.findall(r"^\| `(\w+)` \| .* \| .* \|$", README.split("## A tour")[0], re.MULTILINE)
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert listed | {"test"} == set(project["optional-dependencies"])


def test_the_version_is_reported_in_one_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" not in project["project"]
    assert project["tool"]["hatch"]["version"]["path"] == "penzai_shard/__init__.py"
    assert re.fullmatch(r"\d+\.\d+\.\d+", penzai_shard.__version__)


def test_the_versions_that_were_tried_are_within_the_bounds_of_the_package():
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["train"], *extras["checkpoint"], *extras["cli"]]
    bounds = {one.name: one.specifier for one in map(Requirement, wanted)}
    for name in ("constraints.txt", "constraints-newest.txt"):
        lines = (ROOT / name).read_text(encoding="utf-8").split()
        pins = dict(line.split("==") for line in lines)
        for library in ("jax", "penzai", "treescope", "optax", "orbax-checkpoint", "rich"):
            assert pins[library] in bounds[library], (name, library)
            assert any(one.operator == "<" for one in bounds[library]), library
