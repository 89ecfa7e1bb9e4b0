"""Small models that the layer tests share, as the fixture ``small``."""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from penzai import pz
from penzai.deprecated.v1 import pz as pz_v1
from penzai.deprecated.v1.example_models import simple_mlp as simple_mlp_v1
from penzai.models import simple_mlp

from tests.model_families import drawn, transformer

AUTO = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
EXPLICIT = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)

REPLICATED = PartitionSpec()


@pz.pytree_dataclass
class Counter(pz.nn.Layer):
    """Adds how often it was called."""

    count: pz.StateVariable

    def __call__(self, value: Any, /, **side_inputs: Any) -> Any:
        self.count.value = self.count.value + 1
        return value + self.count.value


def counter(label: str = "count") -> Counter:
    return Counter(pz.StateVariable(jnp.asarray(0.0), label=label))


def mlp(seed: int = 0) -> Any:
    return simple_mlp.MLP.from_config(
        name="mlp", init_base_rng=jax.random.key(seed), feature_sizes=[8, 16, 4]
    )


def dropout_mlp() -> Any:
    return simple_mlp.DropoutMLP.from_config(
        name="mlp", init_base_rng=jax.random.key(0), feature_sizes=[8, 16, 4], drop_rate=0.5
    )


def mlp_v1() -> Any:
    definition = simple_mlp_v1.MLP.from_config(feature_sizes=[8, 16, 4])
    return pz_v1.nn.initialize_parameters(definition, jax.random.key(0))


def counting_mlp() -> Any:
    return pz.nn.Sequential([*mlp().sublayers, counter()])


def llama(use_layer_stack: bool = False) -> Any:
    return drawn(functools.partial(transformer, "llama", name="t", use_layer_stack=use_layer_stack))


def features(batch: int = 8, seed: int = 1) -> Any:
    return pz.nx.wrap(jax.random.normal(jax.random.key(seed), (batch, 8)), "batch", "features")


def tokens() -> Any:
    return pz.nx.wrap(jnp.arange(16).reshape(4, 4) % 16, "batch", "seq")


def placed(tree: Any, mesh: Mesh, spec: PartitionSpec = REPLICATED) -> Any:
    """The tree with all arrays on a mesh; variables are given new values in place."""
    sharding = NamedSharding(mesh, spec)

    def put(leaf: Any) -> Any:
        if isinstance(leaf, pz.Parameter | pz.StateVariable):
            leaf.value = jax.device_put(leaf.value, sharding)
            return leaf
        return jax.device_put(leaf, sharding)

    return jax.tree_util.tree_map(put, tree)


def loss_and_gradients(model: Any, argument: Any) -> tuple[Any, dict[str, Any]]:
    """Loss and gradients by parameter name, the model's state advanced by one call."""
    unbound, parameters = pz.unbind_params(model)
    unbound, state = pz.unbind_state_vars(unbound)

    def loss_of(values: Any, state_values: Any) -> Any:
        variables = [value.unfreeze_as_copy() for value in state_values]
        output = pz.bind_variables(unbound, [*values, *variables])(argument)
        return (output * output).untag(*output.named_shape).sum().unwrap(), [
            variable.freeze() for variable in variables
        ]

    (loss, new_state), gradients = jax.value_and_grad(loss_of, has_aux=True)(
        tuple(variable.freeze() for variable in parameters),
        tuple(variable.freeze() for variable in state),
    )
    for variable, value in zip(state, new_state, strict=True):
        variable.update(value)
    return loss, {gradient.label: gradient.value for gradient in gradients}


@pytest.fixture(scope="session")
def small() -> types.SimpleNamespace:
    """The models, meshes and functions of this file."""
    return types.SimpleNamespace(
        **{name: value for name, value in globals().items() if not name.startswith("_")}
    )
