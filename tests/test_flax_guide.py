"""The models of Flax's guide come to the same with penzai_shard as with the guide's own code."""

import ast
import inspect

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks.flax_guide import modules
from benchmarks.flax_guide.agreement import (
    outcome_by_flax,
    outcome_by_penzai_shard,
    spec_differences,
)
from benchmarks.flax_guide.work import works

WORKS = works(depth=16, layers=2)
SCANNED = "logical axes, scanned"


@pytest.fixture(scope="module", params=["mesh axes, unrolled", SCANNED])
def outcomes(request, tmp_path_factory):
    work = WORKS[request.param]
    own = outcome_by_penzai_shard(work, tmp_path_factory.mktemp("guide"))
    return own, outcome_by_flax(work), request.param


def test_the_models_of_the_guide_know_nothing_of_this_library():
    nodes = list(ast.walk(ast.parse(inspect.getsource(modules))))
    imported = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert "flax.linen" in imported
    assert not any("penzai" in name for name in imported)


def test_numbers_of_parameters_and_initial_values_are_those_of_flax(outcomes):
    own, theirs, _ = outcomes
    assert own.parameters == theirs.parameters == 2 * 2 * 16 * 16
    assert len(own.initial) == len(theirs.initial)
    for mine, other in zip(own.initial, theirs.initial, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-6)


def test_planned_and_actual_specs_and_boxes_are_those_of_flax(outcomes):
    own, theirs, name = outcomes
    assert own.planned == theirs.planned
    assert own.placed == theirs.placed
    assert own.boxes == theirs.boxes
    if name == SCANNED:
        assert list(own.planned.values()) == [P(None, None, "model"), P(None, "model")]
        assert ("LogicallyPartitioned", ("layer", "embed", "hidden")) in own.boxes


def test_losses_are_those_of_flax_also_after_saving_and_restoring(outcomes):
    own, theirs, _ = outcomes
    assert len(own.losses) == 4
    assert len(set(own.losses)) == 4
    np.testing.assert_allclose(own.losses, theirs.losses, rtol=1e-5)


@pytest.mark.parametrize("name", WORKS)
def test_the_plan_of_the_guides_train_state_is_what_the_helpers_of_flax_give(name):
    assert spec_differences(WORKS[name]) == []
