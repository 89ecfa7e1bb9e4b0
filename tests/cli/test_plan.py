"""``penzai-shard plan``: exit status and JSON."""

import json

import pytest

from tests.pretrained.models import CONFIGS

MODEL = """
from __future__ import annotations
import dataclasses
import pickle
import jax
from penzai import pz

RULES = [("embed", "data"), ("mlp", "model")]


class Config:
    pass


def build():
    # Both look the module of this file up.
    pickle.dumps(Config())

    @dataclasses.dataclass
    class Options:
        size: int = 64

    return {"up": pz.nx.ones({"embed": 64, "mlp": 256}), "bias": pz.nx.ones({"mlp": 6})}


layer = pz.nn.Affine.from_config("layer", jax.random.key(0), {"features": 8}, {"out": 4})
tree = {"w": pz.nx.ones({"embed": 8})}
"""
CONFIG = CONFIGS["llama"] | {"hidden_size": 1024}
FILES = {"model.py": MODEL, "config.json": json.dumps(CONFIG)}
INDIVISIBLE = "model.py:build --mesh data=4,model=4 --rules model.py:RULES"


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        ("model.py:build --mesh data=64,model=2 --rules embed=data,mlp=model", "mlp=256/model"),
        ("model:layer --mesh data=4 --rules features=data", "features=8/data"),
        (f"{INDIVISIBLE} --on-indivisible replicate", "replicated"),
        # A published name, with presets, and the path of a configuration.
        ("llama-3-70b --mesh data=16,model=8 --rules fully_sharded,tensor_parallel", "131.4 GiB"),
        ("config.json --mesh data=4 --rules fully_sharded", "embedding=1024/data"),
    ],
)
def test_plan_prints_a_table_and_needs_no_devices(run, call, answer):
    status, out, _ = run("plan", *call.split())
    assert status == 0
    assert answer in out


def test_plan_json_has_rows_and_problems(run):
    call = "model.py:tree --mesh data=4 --rules embed=data --json"
    status, out, _ = run("plan", *call.split())
    data = json.loads(out)
    (row,) = data["rows"]
    assert (status, data["problems"]) == (0, [])
    assert (row["path"], row["shape"], row["spec"]) == ("w", [8], ["data"])
    # A plan without a valid layout is an answer: no.
    status, out, _ = run("plan", *INDIVISIBLE.split(), "--json")
    assert status == 1
    assert [problem["path"] for problem in json.loads(out)["problems"]] == ["bias"]
    status, out, error = run("plan", *INDIVISIBLE.split())
    assert (status, out) == (1, "")
    assert "bias" in error
