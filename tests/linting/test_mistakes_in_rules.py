"""Seeded mistakes in rules, meshes and layouts: each is found, and its fix works when pasted."""

import jax
import pytest
from penzai import pz

import penzai_shard as pzs

MESH = jax.sharding.AbstractMesh((4, 2), ("data", "model"))


def weights(**arrays):
    return {
        name: pz.nx.NamedArray(axes, jax.ShapeDtypeStruct(tuple(axes.values()), "float32"))
        for name, axes in arrays.items()
    }


MODEL = weights(up={"embedding": 8, "neurons": 16}, down={"neurons": 16, "embedding": 8})


@pytest.mark.parametrize(
    ("rules", "wanted"),
    [
        ({"embedding": "data", "neurons": "modle"}, {"embedding": "data", "neurons": "model"}),
        ({"data": "embedding", "neurons": "model"}, {"embedding": "data", "neurons": "model"}),
        ({"embedding": "data", "neurons": "tensor"}, {"embedding": "data", "neurons": "model"}),
    ],
)
def test_an_unknown_mesh_axis_is_found_with_rules_that_mend_it(rules, wanted):
    report = pzs.lint(MODEL, MESH, rules)
    assert [each.kind for each in report.findings] == ["unknown"]
    assert not report.ok
    fixed = {"rules": rules}
    exec(str(report.findings[0]).partition(" Fix: ")[2], {}, fixed)
    assert pzs.AxisRules(fixed["rules"]) == pzs.AxisRules(wanted)
    assert pzs.lint(MODEL, MESH, fixed["rules"]).ok
