"""What an optimizer keeps has the names of the dimensions of its parameter."""

import json
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from penzai import pz

from penzai_shard.arrays.statistics import kept_dimensions, name_statistics
from penzai_shard.arrays.structure import leaves_of
from tests import models

# Made by code that shares nothing with this library's and walks optimizers' states node by node.
# Two of its answers were wrong: it gave the latest values of lbfgs no names in linen's boxes, and
# left its ten weights, which belong to no parameter, to the user to name.
ANSWERS = json.loads(
    pathlib.Path(__file__).parents[1].joinpath("data", "leaves.json").read_text(encoding="utf-8")
)
NAMES = {"up": ("embed", "mlp"), "square": ("embed", "heads"), "bias": ("mlp",)}
SIZES = {"embed": 8, "mlp": 16, "heads": 8}


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


PARAMETERS = {path: struct(*(SIZES[name] for name in names)) for path, names in NAMES.items()}
HOLDERS = {
    "plain": lambda array, names: array,
    "named": lambda array, names: pz.nx.wrap(array).tag(*names),
    "linen": nn.LogicallyPartitioned,
}


def state_of(parameters, optimizer):
    return {"params": parameters, "opt_state": jax.eval_shape(optimizer.init, parameters)}


def row(leaf, names):
    names = None if names is None else [*names]
    return [leaf.path, names, [*leaf.shape], str(leaf.dtype)]


def names_by_parameter(leaf):
    """The names that a leaf would have if its parameter had them."""
    if leaf.statistic is None:
        return leaf.names
    names = NAMES[leaf.statistic.parameter.removeprefix("params/")]
    return [None if dim is None else names[dim] for dim in leaf.statistic.kept]


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("name", models.OPTIMIZERS)
def test_name_statistics_of_optimizers(name, holder):
    hold = HOLDERS[holder]
    parameters = jax.eval_shape(
        lambda: {path: hold(jnp.zeros(x.shape), NAMES[path]) for path, x in PARAMETERS.items()}
    )
    state = state_of(parameters, models.OPTIMIZERS[name](1e-3))
    leaves = [x for x in name_statistics(leaves_of(state)) if x.path.startswith("opt_state")]
    of_leaf = names_by_parameter if holder == "plain" else lambda leaf: leaf.names
    assert [row(leaf, of_leaf(leaf)) for leaf in leaves] == ANSWERS[name]
    if holder == "plain":
        assert not any(leaf.names for leaf in leaves if leaf.statistic)


@pytest.mark.parametrize("name", models.MODELS)
def test_name_statistics_of_models(name):
    leaves = name_statistics(leaves_of(models.model(name)))
    assert [row(leaf, leaf.names) for leaf in leaves] == ANSWERS[f"model {name}"]


@pytest.mark.parametrize("name", ["adamw", "adafactor", "sm3", "multi_steps"])
@pytest.mark.parametrize(
    "parameters",
    [
        {"w": struct(4, 6), "mu": {"w": struct(6, 4)}, "v_row": [struct(4, 4)]},
        [{"w": struct(8, 16)}, {"w": struct(16, 8)}, struct(8)],
    ],
    ids=["called like fields", "layers"],
)
def test_name_statistics_finds_the_parameter_of_each(parameters, name):
    leaves = name_statistics(leaves_of(state_of(parameters, models.OPTIMIZERS[name](1e-3))))
    found = [(leaf.path, leaf.statistic.parameter) for leaf in leaves if leaf.statistic]
    wanted = {leaf.path for leaf in leaves if leaf.path.startswith("params/")}
    assert {parameter for _, parameter in found} == wanted
    assert all(f"/{parameter.removeprefix('params/')}" in path for path, parameter in found)


def test_name_statistics_of_nnx_beside_its_module():
    optimizer = models.nnx_optimizer(optimizer=models.OPTIMIZERS["adafactor"](1e-3))
    leaves = name_statistics(leaves_of((models.nnx_block(), optimizer)))
    names = {leaf.path: leaf.names for leaf in leaves}
    assert names["0/first/kernel"] == ("embed", "mlp")
    assert names["1/opt_state/0/v_row/first/kernel"] == ("embed",)
    assert names["1/opt_state/0/v_col/first/kernel"] == ("mlp",)


@pytest.mark.parametrize(
    ("sizes", "shape", "path", "kept"),
    [
        ((4, 6), (4, 1), "", (0, None)),
        ((4, 6, 8), (4, 8), "", (0, 2)),
        ((4, 4), (4,), "", None),
        ((4, 4), (4,), "v_col/w", (1,)),
        ((4, 4), (4,), "mu/w/1", (1,)),
        ((2, 8, 8), (2, 8), "v_row/w", (0, 1)),
        ((4, 6), (5,), "", None),
    ],
)
def test_kept_dimensions(sizes, shape, path, kept):
    assert kept_dimensions(sizes, shape, path) == kept
