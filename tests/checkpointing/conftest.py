"""A small model with a shared parameter and a state variable, and two meshes."""

import jax
import pytest
from penzai import pz

from penzai_shard.meshes import make_mesh


@pz.pytree_dataclass
class CallCounter(pz.nn.Layer):
    """Counts its calls in a state variable and scales by a constant."""

    calls: pz.StateVariable
    scale: jax.Array

    def __call__(self, argument, **_):
        self.calls.value = self.calls.value + 1
        return argument * self.scale


def build_mlp(seed=0, neurons=16):
    up = pz.nn.Affine.from_config(
        "mlp/up", jax.random.key(seed), {"embedding": 8}, {"neurons": neurons}
    )
    down = pz.nn.Affine.from_config(
        "mlp/down", jax.random.key(seed + 1), {"neurons": neurons}, {"embedding": 8}
    )
    counter = CallCounter(pz.StateVariable(jax.numpy.int32(0), label="calls"), jax.numpy.ones(()))
    # The same layer object twice: its parameters are shared.
    return pz.nn.Sequential([up, down, counter, up, down])


@pytest.fixture
def mlp():
    return build_mlp()


@pytest.fixture(scope="session")
def wide():
    """Four by two devices."""
    return make_mesh({"data": 4, "model": 2})


@pytest.fixture(scope="session")
def tall():
    """Two by four devices."""
    return make_mesh({"data": 2, "model": 4})


@pytest.fixture
def build():
    return build_mlp
