"""Checkpoints of plain Orbax, which store no logical axes; and what Orbax itself restores."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
import pytest

import penzai_shard as pzs
from tests.checkpoints.trees import assert_lies, contents, params
from tests.models import model, penzai_mlp

WIDE, RULES = pzs.make_mesh({"data": 4, "model": 2}), {"features": "data"}


def save_v0(path, tree, **form):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**form)) as checkpointer:
        checkpointer.save(path, tree)


PARAMS = pzs.param_dict(model("penzai mlp"))
ARRAYS = {path: value.data_array for path, value in PARAMS.items()}
# One level down, with the slashes that the paths have.
NESTED = {"mlp": {path.removeprefix("mlp/"): array for path, array in ARRAYS.items()}}
BOXES = {path: nn.Partitioned(x, (None,) * x.ndim) for path, x in ARRAYS.items()}
# The tree, how the older Orbax stores it, if it does, and the rules.
PLAIN = {
    "flat": (ARRAYS, None, {}),
    "named arrays": (PARAMS | {"n": 3}, None, {"n": None}),
    # Texts and empty containers are no arrays.
    "boxes": (BOXES | {"text": "a", "none": None}, {}, {"**/value": "**"}),
    "zarr": (NESTED, {"use_ocdbt": False, "use_zarr3": False}, {}),
    "zarr3": (NESTED, {"use_ocdbt": False, "use_zarr3": True}, {}),
    "zarr3 in ocdbt": (NESTED, {"use_ocdbt": True, "use_zarr3": True}, {}),
}


@pytest.mark.parametrize("form", PLAIN)
def test_restore_params_of_plain_orbax(tmp_path, form):
    tree, storage, names = PLAIN[form]
    if storage is None:
        ocp_v1.save(tmp_path / "plain", tree)
    else:
        save_v0(tmp_path / "plain", tree, **storage)
    # The biases are zeros, which some forms do not store.
    with pytest.warns(pzs.ShardingWarning):
        restored = pzs.restore_params(tmp_path / "plain", penzai_mlp(1), WIDE, RULES, names=names)
    assert params(restored) == contents(PARAMS)
    assert_lies(restored, WIDE, RULES)


def test_restore_train_state_of_plain_orbax(tmp_path):
    state = model("linen state")
    plain = {"step": state.step, "params": state.params, "opt_state": state.opt_state}
    save_v0(tmp_path / "state", plain)
    # Orbax stores the number of steps with 64 bits.
    options = {"on_unnamed": "replicate", "names": {"**/value": "**"}, "allow": "cast"}
    with pytest.warns(pzs.ShardingWarning):
        restored = pzs.restore_train_state(tmp_path / "state", state, WIDE, {}, **options)
    assert contents(restored) == contents(state)


def test_restore_structs_with_orbax(tmp_path):
    save_v0(tmp_path / "params", PARAMS)
    structs = pzs.restore_structs(pzs.abstract_model(lambda: model("penzai mlp")), WIDE, RULES)
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        restored = checkpointer.restore(tmp_path / "params", args=ocp.args.StandardRestore(structs))
    assert contents(restored) == contents(PARAMS)
    assert_lies(restored, WIDE, RULES)
    assert params(pzs.with_params(model("penzai mlp"), restored)) == contents(PARAMS)


def test_orbax_reads_what_save_params_writes(tmp_path):
    path = pzs.save_params(tmp_path / "a", {"w": jnp.arange(6.0), "b/w": jnp.ones(2)})
    with pytest.warns(UserWarning, match="Sharding info"):
        found = ocp_v1.load(path)
    expected = {"w": np.arange(6), "b/w": np.ones(2)}
    jax.tree.map(np.testing.assert_array_equal, found, expected)
