"""Checkpoints of plain Orbax, which store no logical axes; and what Orbax itself restores."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
import pytest

import penzai_shard as pzs
from tests.models import model

MESH = pzs.make_mesh({"data": 4, "model": 2})
RULES = {"features": "data"}


def save_v0(path, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


PARAMS = pzs.param_dict(model("penzai mlp"))
ARRAYS = {path: value.data_array for path, value in PARAMS.items()}
# One level down, with the slashes that the paths have.
NESTED = {"mlp": {path.removeprefix("mlp/"): array for path, array in ARRAYS.items()}}
PLAIN = {
    "flat": (ocp_v1.save, ARRAYS, {}),
    "nested": (ocp_v1.save, NESTED, {}),
    "nested v0": (save_v0, NESTED, {}),
    "named arrays": (ocp_v1.save, PARAMS, {"names": {"**/data_array": "**"}}),
    "boxes": (
        save_v0,
        {path: nn.Partitioned(x, (None,) * x.ndim) for path, x in ARRAYS.items()},
        {"names": {"**/value": "**"}},
    ),
}


@pytest.mark.parametrize("form", PLAIN)
def test_restore_params_of_plain_orbax(tmp_path, form):
    save, tree, options = PLAIN[form]
    save(tmp_path / "plain", tree)
    with pytest.warns(pzs.ShardingWarning):
        restored = pzs.restore_params(
            tmp_path / "plain", model("penzai mlp"), MESH, RULES, **options
        )
    for path, value in pzs.param_dict(restored).items():
        np.testing.assert_array_equal(value.data_array, ARRAYS[path])
        assert value.named_shape == PARAMS[path].named_shape


def test_restore_params_of_plain_orbax_compares_shapes(tmp_path):
    ocp_v1.save(tmp_path / "plain", {"w": jnp.ones((2, 3)), "v": jnp.ones(2)})
    wanted = {"w": jnp.ones((3, 2)), "v": jnp.ones(2, "int32")}
    with pytest.raises(pzs.CheckpointMismatchError) as caught:
        pzs.restore_params(tmp_path / "plain", wanted)
    assert {p.path: p.kind for p in caught.value.problems} == {"w": "sizes", "v": "dtype"}
    with pytest.warns(pzs.ShardingWarning):
        pzs.restore_params(tmp_path / "plain", {"w": jnp.zeros((2, 3)), "v": jnp.zeros(2)})


def test_restore_train_state_of_plain_orbax(tmp_path):
    state = model("linen state")
    plain = {"step": state.step, "params": state.params, "opt_state": state.opt_state}
    save_v0(tmp_path / "state", plain)
    # Orbax stores the number of steps with 64 bits.
    options = {"on_unnamed": "replicate", "names": {"**/value": "**"}, "allow": "cast"}
    with pytest.warns(pzs.ShardingWarning):
        restored = pzs.restore_train_state(tmp_path / "state", state, MESH, {}, **options)
    jax.tree.map(np.testing.assert_array_equal, restored, state)


def test_restore_structs_with_orbax(tmp_path):
    save_v0(tmp_path / "params", PARAMS)
    structs = pzs.restore_structs(pzs.abstract_model(lambda: model("penzai mlp")), MESH, RULES)
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        restored = checkpointer.restore(tmp_path / "params", args=ocp.args.StandardRestore(structs))
    assert restored.keys() == PARAMS.keys()
    for path, value in restored.items():
        np.testing.assert_array_equal(value.data_array, ARRAYS[path])
        assert value.data_array.sharding == structs[path].data_array.sharding
    assert structs["mlp/Affine_0/Linear.weights"].data_array.sharding.spec == jax.P("data")
    pzs.with_params(model("penzai mlp"), restored)
