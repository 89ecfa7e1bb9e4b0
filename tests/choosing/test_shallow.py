"""A deep model cut to one and to two blocks: what is cut, what is left, what is not cut."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from penzai import pz

import penzai_shard as pzs
from penzai_shard.arrays.structure import leaves_of
from penzai_shard.choosing.shallow import cut_model
from penzai_shard.choosing.workload import read_workload
from tests.choosing.models import read_llama


def labels(model):
    return [leaf.path for leaf in leaves_of(model) if leaf.role == "parameter"]


# Penzai


def cut_llama(**options):
    workload = read_llama(8, 8, **options)
    return workload, cut_model(workload)


def keep(paths, *blocks):
    kept = tuple(f"/block_{number}/" for number in blocks)
    return [path for path in paths if "/block_" not in path or any(map(path.__contains__, kept))]


def test_cut_model_keeps_the_first_blocks_of_a_transformer_and_all_around_them():
    workload, found = cut_llama(blocks=5)
    every = labels(workload.model)
    assert found.blocks == 5
    assert (labels(found.models[0]), labels(found.models[1])) == (keep(every, 0), keep(every, 0, 1))


def test_cut_model_leaves_a_stack():
    assert cut_llama(blocks=5, stacked=True)[1].blocks == 1


def test_cut_model_leaves_three_blocks():
    assert cut_llama(blocks=3)[1].blocks == 1
    # Of the layers only three in a row are 8 wide on both sides.
    assert cut_layers(lambda: chain((8, 8, 16, 8, 8, 8, 8, 16, 8))).blocks == 1


def linear(label, inputs=8, outputs=8):
    sizes = {"embedding": inputs}, {"embedding_out": outputs}
    return pz.nn.Linear.from_config(label, jax.random.key(0), *sizes)


def rename():
    return pz.nn.RenameAxes(("embedding_out",), ("embedding",))


def mean_loss(model, rng, state, x):
    return jnp.mean(model(x).unwrap("batch", "embedding")), state, {}


def cut_layers(build):
    model = pzs.abstract_model(lambda: pz.nn.Sequential(build()))
    x = pz.nx.ones({"batch": 8, "embedding": 8})
    return cut_model(read_workload(model, mean_loss, optax.sgd(0.1), {"x": x}))


def chain(widths):
    pairs = enumerate(itertools.pairwise(widths))
    return [pz.nn.Sequential([linear(f"b{i}", *pair), rename()]) for i, pair in pairs]


@pytest.mark.parametrize(
    ("widths", "blocks", "one", "two"),
    [
        ((8, 8, 16, 8, 8, 8, 8, 8, 16, 8), 4, (0, 1, 2, 3, 7, 8), (0, 1, 2, 3, 4, 7, 8)),
        # As attention with a window and without, in turn; the last turn is not finished.
        ((8, 16, 8, 16, 8, 16, 8, 16, 8, 16), 4, (0, 1, 8), (0, 1, 2, 3, 8)),
    ],
)
def test_cut_model_keeps_what_does_not_repeat(widths, blocks, one, two):
    found = cut_layers(lambda: chain(widths))
    assert found.blocks == blocks
    for model, kept in ((found.models[0], one), (found.models[1], two)):
        assert labels(model) == [f"b{i}.weights" for i in kept]


def test_cut_model_traces_all_of_a_sequence_that_runs_some_blocks_twice():
    @pz.pytree_dataclass(has_implicitly_inherited_fields=True)
    class Twice(pz.nn.Sequential):
        def __call__(self, value, /, **side_inputs):
            for number, layer in enumerate(self.sublayers):
                for _ in range(1 + (number % 4 == 3)):
                    value = layer(value, **side_inputs)
            return value

    assert cut_layers(lambda: [Twice(chain((8,) * 9))]).blocks == 1


def test_cut_model_leaves_blocks_with_other_settings():
    @pz.pytree_dataclass
    class Repeat(pz.nn.Layer):
        body: pz.nn.Layer
        times: int = dataclasses.field(metadata={"pytree_node": False})

        def __call__(self, x, /, **side_inputs):
            for _ in range(self.times):
                x = self.body(x)
            return x

    def build(times):
        return [Repeat(block, n) for block, n in zip(chain([8] * 7), times, strict=True)]

    assert cut_layers(lambda: build([1, 1, 1, 50, 50, 50])).blocks == 1
    assert cut_layers(lambda: build([2] * 6)).blocks == 6


def test_cut_model_keeps_a_parameter_that_all_blocks_share():
    def build(*names):
        shared = [linear(name) for name in names] * 4
        blocks = [[shared[i], rename(), linear(f"b{i}"), rename()] for i in range(4)]
        return [pz.nn.Sequential(block) for block in blocks]

    found = cut_layers(lambda: build("shared"))
    assert sorted(labels(found.models[1])) == ["b0.weights", "b1.weights", "shared.weights"]
    # Blocks some of which share a parameter are not cut.
    assert cut_layers(lambda: build("even", "odd")).blocks == 1


# Others


class NnxLayer(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)


class Nnx(nnx.Module):
    def __init__(self, layers=4):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([NnxLayer(rngs) for _ in range(layers)])


def build_dict():
    layer = {"up": np.ones((8, 16), "f4"), "down": np.ones((16, 8), "f4")}
    return {f"layer_{i}": jax.tree.map(np.copy, layer) for i in range(12)}


def name(model):
    paths = {leaf.path: (None,) * len(leaf.shape) for leaf in leaves_of(model)}
    return pzs.name_axes(model, paths)


def run_all(layers, x, run):
    for layer in layers:
        x = x + run(layer, x)
    return x


def run_nnx(layer, x):
    return layer.down(jax.nn.relu(layer.up(x)))


def run_dict(layer, x):
    return jax.nn.relu(x @ layer["up"]) @ layer["down"]


PROGRAMS = {
    "nnx": (Nnx, lambda m, x: run_all(m.layers, x, run_nnx), 4),
    "dict": (build_dict, lambda m, x: run_all(m.values(), x, run_dict), 12),
    "some": (Nnx, lambda m, x: run_all(m.layers[:3], x, run_nnx), 1),
    "by number": (Nnx, lambda m, x: x + run_nnx(m.layers[3], x), 1),
    "by names": (
        build_dict,
        lambda m, x: run_all([m[f"layer_{i}"] for i in range(12)], x, run_dict),
        1,
    ),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_cut_model_of_another_library_asks_what_the_loss_computes(program):
    build, run, blocks = PROGRAMS[program]

    def loss_fn(model, rng, state, x):
        return jnp.mean(run(model, x) ** 2), state, {}

    batch = {"x": np.ones((8, 8), "f4")}
    given = name(build()), loss_fn, optax.sgd(0.1), batch
    workload = read_workload(*given, plain_arrays=build is build_dict)
    found = cut_model(workload)
    assert found.blocks == blocks
    sizes = [len(leaves_of(model)) for model in (*found.models, workload.model)]
    assert sizes == [n * sizes[0] for n in ((1, 2, blocks) if blocks > 1 else (1, 1))]
