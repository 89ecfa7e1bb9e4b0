"""The train step with nothing but JAX: raw arrays, shardings and constraints written out."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.contenders import Contender
from benchmarks.parallel_training.work import Layout
from benchmarks.torch_mlp.work import NAMES, OUTPUTS, Shape, optimizer


def build(shape: Shape, layout: Layout) -> Contender:
    """The step by hand."""
    update = optimizer()
    of_parameters = {name: layout.of_parameter(axes) for name, axes in NAMES.items()}
    replicated = NamedSharding(layout.mesh, PartitionSpec())
    structs = {name: jax.ShapeDtypeStruct(w.shape, w.dtype) for name, w in shape.weights.items()}
    of_state = optax.tree_map_params(
        update,
        lambda _, sharding: sharding,
        jax.eval_shape(update.init, structs),
        of_parameters,
        transform_non_params=lambda _: replicated,
    )

    def start() -> Any:
        weights = {n: jax.device_put(w, of_parameters[n]) for n, w in shape.weights.items()}
        return weights, jax.jit(update.init, out_shardings=of_state)(weights)

    def loss(weights: Any, x: Any, y: Any) -> Any:
        for layer, axis in OUTPUTS.items():
            x = x @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"]
            x = layout.constrain(x, "batch", axis)
            if axis != "classes":
                x = jax.nn.relu(x)
        return optax.softmax_cross_entropy_with_integer_labels(x, y).mean()

    def step(state: Any, x: Any, y: Any) -> Any:
        weights, opt_state = state
        value, gradients = jax.value_and_grad(loss)(weights, x, y)
        updates, opt_state = update.update(gradients, opt_state, weights)
        return (optax.apply_updates(weights, updates), opt_state), value

    of_batch = layout.of_activation(("batch",))
    x, y = (jax.device_put(jnp.asarray(array), of_batch) for array in shape.inputs)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=((of_parameters, of_state), replicated))
    compiled = jitted.lower(start(), x, y).compile()
    return Contender(shape.parameters, compiled, start, lambda state: compiled(state, x, y))
