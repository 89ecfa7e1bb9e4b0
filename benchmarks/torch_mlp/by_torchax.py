"""The same with torchax: torch's own module and loss, on JAX arrays that look like tensors."""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import torch
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.contenders import Contender
from benchmarks.parallel_training.work import Layout
from benchmarks.torch_mlp.work import NAMES, OUTPUTS, Shape, optimizer


@contextlib.contextmanager
def overloads_by_dimension_name() -> Iterator[None]:
    """Makes up the overloads for named dimensions that torch 2.13 has no more.

    torchax 0.0.13 looks them up when it is imported and set up. Nothing here calls them.
    """
    packet = type(torch.ops.aten.add)
    original = packet.__getattr__

    def lenient(self: Any, key: str) -> Any:
        try:
            return original(self, key)
        except AttributeError:
            if "name" not in key.lower() or key.startswith("_"):
                raise
            return original(self, self.overloads()[0])

    packet.__getattr__ = lenient
    try:
        yield
    finally:
        packet.__getattr__ = original


with overloads_by_dimension_name():
    torchax = importlib.import_module("torchax")
    interop = importlib.import_module("torchax.interop")
    make_train_step = importlib.import_module("torchax.train").make_train_step
    torchax.default_env()


def build(shape: Shape, layout: Layout) -> Contender:
    """The step with torchax, as its guide to distributed training writes it."""
    environment = torchax.default_env()
    constrain = interop.torch_view(jax.lax.with_sharding_constraint)
    module = torch.nn.Sequential(
        torch.nn.Linear(shape.pixels, shape.hidden),
        torch.nn.ReLU(),
        torch.nn.Linear(shape.hidden, shape.width),
        torch.nn.ReLU(),
        torch.nn.Linear(shape.width, shape.hidden),
        torch.nn.ReLU(),
        torch.nn.Linear(shape.hidden, shape.classes),
    )
    for layer, axis in OUTPUTS.items():
        of_output = layout.of_activation(("batch", axis))
        module[layer].register_forward_hook(lambda *call, of=of_output: constrain(call[-1], of))

    def model_fn(weights: Any, buffers: Any, inputs: Any) -> Any:
        return torch.func.functional_call(module, {**weights, **buffers}, inputs)

    train_step = make_train_step(model_fn, torch.nn.functional.cross_entropy, optimizer())
    step_of_arrays = interop.jax_view(train_step)
    of_parameters = {name: layout.of_parameter(axes) for name, axes in NAMES.items()}

    def start() -> Any:
        weights = {n: jax.device_put(w, of_parameters[n]) for n, w in shape.weights.items()}
        return weights, optimizer().init(weights)

    def step(state: Any, x: Any, y: Any) -> Any:
        weights, opt_state = state
        loss, weights, opt_state = step_of_arrays(weights, {}, opt_state, x, y)
        return (weights, opt_state), loss

    of_batch = layout.of_activation(("batch",))
    x, y = (jax.device_put(jnp.asarray(array), of_batch) for array in shape.inputs)
    of_state = (
        of_parameters,
        optax.tree_map_params(
            optimizer(),
            lambda _, sharding: sharding,
            jax.eval_shape(optimizer().init, start()[0]),
            of_parameters,
            transform_non_params=lambda _: NamedSharding(layout.mesh, PartitionSpec()),
        ),
    )
    with environment:
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(of_state, None))
        compiled = jitted.lower(jax.device_put(start(), of_state), x, y).compile()
    return Contender(
        sum(parameter.numel() for parameter in module.parameters()),
        compiled,
        lambda: jax.device_put(start(), of_state),
        lambda state: compiled(state, x, y),
    )
