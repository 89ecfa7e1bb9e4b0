"""``penzai-shard lint``: exit status, JSON, rules and batches by reference."""

import json

import pytest

FILES = {
    "model.py": """
import jax
import penzai_shard as pzs
from penzai import pz

layout = pzs.Layout.data_parallel()


def build():
    return pz.nn.Affine.from_config("layer", jax.random.key(0), {"features": 8}, {"out": 4})


def batch():
    return pz.nx.ones({"batch": 6, "features": 8})
"""
}
MISSPELT = "model.py:build --mesh data=4 --rules feature=data"


@pytest.mark.parametrize(
    ("call", "status", "answer"),
    [
        ("model.py:build --mesh data=4 --rules features=data", 0, "nothing found"),
        (MISSPELT, 1, "Write rules={'features': 'data'}."),
        ("model.py:build --mesh data=4 --rules model.py:layout", 0, "nothing found"),
        ("model.py:build --mesh data=4 --rules model.py:layout --batch model.py:batch", 1, "(6)"),
    ],
)
def test_findings_are_printed_and_are_the_exit_status(run, call, status, answer):
    code, out, _ = run("lint", *call.split())
    assert (code, answer in out) == (status, True), out


def test_findings_are_json(run):
    code, out, _ = run("lint", *MISSPELT.split(), "--json")
    assert (code, json.loads(out)["rows"][0]["kind"]) == (1, "unused")
