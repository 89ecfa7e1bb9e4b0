"""The same with penzai_shard: the state dict's arrays are named, and laid out by their names."""

from typing import Any

import jax
import optax
from penzai import pz

import penzai_shard as pzs
from benchmarks.contenders import Contender
from benchmarks.parallel_training.work import Layout
from benchmarks.torch_mlp.work import NAMES, OUTPUTS, Shape, optimizer


def build(shape: Shape, layout: Layout) -> Contender:
    """The step with penzai_shard."""
    mesh = layout.mesh
    pin = pzs.ConstrainShardingByName(mesh, layout.activations)

    def loss_fn(model: Any, rng: Any, state: Any, x: Any, y: Any) -> Any:
        x = x.unwrap("batch", "pixels")
        for layer, axis in OUTPUTS.items():
            weight, bias = (model[f"{layer}.{kind}"] for kind in ("weight", "bias"))
            x = x @ weight.unwrap(*NAMES[f"{layer}.weight"]).T + bias.unwrap(axis)
            x = pin(pz.nx.wrap(x, "batch", axis)).unwrap("batch", axis)
            if axis != "classes":
                x = jax.nn.relu(x)
        losses = optax.softmax_cross_entropy_with_integer_labels(x, y.unwrap("batch"))
        return losses.mean(), state, losses.mean()

    by_name = pzs.Layout(parameters=layout.parameters, compute=layout.activations, blocks=())

    def build_again() -> Any:
        return by_name.build(
            lambda: pzs.name_axes(shape.weights, NAMES),
            mesh=mesh,
            loss_fn=loss_fn,
            optimizer=optimizer(),
            rng=jax.random.key(0),
        )

    x, y = shape.inputs
    batch = pzs.name_axes({"x": x, "y": y}, {"x": ("batch", "pixels"), "y": ("batch",)})
    batch = by_name.shard_batch(batch, mesh)
    state, step = build_again()
    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    compiled = step.lower(state, **batch).compile()
    return Contender(count, compiled, lambda: build_again()[0], lambda state: step(state, **batch))
