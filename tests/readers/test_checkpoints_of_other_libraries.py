"""Checkpoints keep what other libraries put around arrays, and compare its axis names."""

import collections

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint.experimental.v1 as ocp
import pytest
from flax import nnx
from flax.training import train_state as flax_train_state
from penzai import pz

import penzai_shard as pzs
from penzai_shard.checkpointing.manifest import read_manifest
from penzai_shard.errors import CheckpointMismatchError, PlanError, ShardingError, ShardingWarning


def linen(data, names):
    return nn.LogicallyPartitioned(data, names)


def linen_of_mesh(data, names):
    return nn.Partitioned(data, names)


def nnx_param(data, names):
    with nnx.use_eager_sharding(False):
        return nnx.Param(data, out_sharding=names)


def penzai(data, names):
    return pzs.name_axes({"": data}, {"": names})[""]


def haliax_array(data, names):
    from tests.readers.haliax_model import hax

    return hax.NamedArray(data, tuple(map(hax.Axis, names, data.shape)))


LIBRARIES = {
    "linen": linen,
    "linen_of_mesh": linen_of_mesh,
    "nnx": nnx_param,
    "haliax": haliax_array,
    "name_axes": penzai,
}
MESH = {"data": 4, "model": 2}
OTHER_MESH = {"data": 2, "model": 4}
RULES = {"embed": "data", "mlp": "model"}


def numbers(*shape):
    return jnp.arange(np.prod(shape, dtype=float), dtype=jnp.float32).reshape(shape)


def tree_of(library, **changed):
    """A tree of one library's arrays: by name the shape and the axis names."""
    arrays = {
        "up": ((8, 16), ("embed", "mlp")),
        "square": ((8, 8), ("embed", "heads")),
        "norm/bias": ((8,), ("embed",)),
        **changed,
    }
    make = LIBRARIES[library]
    made = {name: make(numbers(*shape), names) for name, (shape, names) in arrays.items()}
    return {"up": made["up"], "square": made["square"], "norm": {"bias": made["norm/bias"]}}


def abstract(tree):
    return jax.eval_shape(lambda: tree)


def values(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def shard_shapes(tree):
    return [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("library", LIBRARIES)
def test_parameters_come_back_on_another_mesh_as_their_library_holds_them(library, tmp_path):
    tree = tree_of(library)
    placed = pzs.place(tree, pzs.make_mesh(MESH), RULES)
    path = pzs.save_params(tmp_path / "saved", placed)
    assert {n: record.axes for n, record in read_manifest(path).records.items()} == {
        "up": ("embed", "mlp"),
        "square": ("embed", "heads"),
        "norm/bias": ("embed",),
    }
    for like in (tree, abstract(tree)):
        restored = pzs.restore_params(path, like, pzs.make_mesh(OTHER_MESH), RULES)
        assert jax.tree.structure(restored) == jax.tree.structure(tree)
        assert all(map(np.array_equal, values(restored), values(tree)))
        # In the order of the leaves: norm/bias, square, up.
        assert shard_shapes(restored) == [(4,), (4, 8), (4, 4)]


def test_mappings_keep_their_type(tmp_path):
    tree = tree_of("linen")
    for made in (flax.core.freeze(tree), collections.OrderedDict(tree)):
        path = pzs.save_params(tmp_path / type(made).__name__, made)
        restored = pzs.restore_params(path, made, pzs.make_mesh(MESH), RULES)
        assert jax.tree.structure(restored) == jax.tree.structure(made)
        assert type(restored) is type(made)
        assert all(map(np.array_equal, values(restored), values(made)))


@pytest.mark.parametrize("library", LIBRARIES)
def test_renamed_and_swapped_axes_are_refused(library, tmp_path):
    path = pzs.save_params(tmp_path / "saved", tree_of(library))
    mesh = pzs.make_mesh(MESH)
    renamed = tree_of(library, up=((8, 16), ("embed", "neurons")))
    with pytest.raises(
        CheckpointMismatchError,
        match=r"up: .*\(embed=8, mlp=16\), and the model wants \(embed=8, neurons=16\): the "
        r"logical axes have other names. .*rename_axes={'mlp': 'neurons'}",
    ):
        pzs.restore_params(path, abstract(renamed), mesh, RULES)
    meant = pzs.restore_params(path, renamed, mesh, RULES, rename_axes={"mlp": "neurons"})
    assert jax.tree.structure(meant) == jax.tree.structure(renamed)
    swapped = tree_of(library, square=((8, 8), ("heads", "embed")))
    with pytest.raises(CheckpointMismatchError, match=r"square: .*same logical axes in another"):
        pzs.restore_params(path, abstract(swapped), mesh, RULES)
    turned = pzs.restore_params(path, swapped, mesh, RULES, on_axis_mismatch="transpose")
    assert np.array_equal(values(turned["square"])[0], numbers(8, 8).T)


def test_arrays_of_the_same_names_are_the_same_whoever_holds_them(tmp_path):
    for source in LIBRARIES:
        path = pzs.save_params(tmp_path / source, tree_of(source))
        for target in LIBRARIES:
            like = tree_of(target)
            restored = pzs.restore_params(path, abstract(like), pzs.make_mesh(MESH), RULES)
            assert jax.tree.structure(restored) == jax.tree.structure(like), (source, target)
            assert all(map(np.array_equal, values(restored), values(like)))


def box(shape, *names):
    return linen(numbers(*shape), names)


WHOLE = {
    "up": ((8, 16), "embed", "mlp"),
    "square": ((8, 8), "embed", "heads"),
    "cube": ((8, 8, 2), None, "embed", "heads"),
    "bias": ((8,), "embed"),
}
BROKEN = {
    "renamed": ({"up": box((8, 16), "embed", "neurons")}, "up: .*rename_axes={'mlp': 'neurons'}"),
    "all renamed": ({"up": box((8, 16), "a", "b")}, "up: .*{'embed': 'a', 'mlp': 'b'}"),
    "renamed like another": ({"bias": box((8,), "heads")}, "bias: .*have other names"),
    "swapped where square": ({"square": box((8, 8), "heads", "embed")}, "square: .*another order"),
    "swapped with its sizes": ({"up": box((16, 8), "mlp", "embed")}, "up: .*another order"),
    "swapped sizes alone": ({"up": box((16, 8), "embed", "mlp")}, "up: .*the sizes differ"),
    "a name fewer": ({"up": box((8, 16), "embed")}, "up: .*wants .embed=8, 16.: the logical axes"),
    "a name more": ({"cube": box((8, 8, 2), "x", "embed", "heads")}, "cube: .*the logical axes"),
    "positions moved": ({"cube": box((8, 8, 2), "embed", None, "heads")}, "cube: .*another order"),
    "no names": ({"bias": numbers(8)}, r"bias: .*name_axes\(model, {'bias': \('embed',\)}\)"),
    "no names in a box": ({"bias": box((8,), None)}, r"bias: .*name_axes\(model, {'bias'"),
    "too many names": ({"bias": box((8,), "embed", "heads")}, "bias: it has 2 axis names"),
    "one name twice": ({"square": box((8, 8), "embed", "embed")}, "square: .* have one twice"),
    "longer": ({"bias": box((16,), "embed")}, "bias: .*the sizes differ"),
    "rank more": ({"bias": box((8, 1), "embed", None)}, "bias: .*the logical axes differ"),
    "other dtype": (
        {"bias": linen(numbers(8).astype(jnp.bfloat16), ("embed",))},
        "bias: .*on_dtype_mismatch='cast'",
    ),
    "one missing": ({"more": box((8,), "embed")}, "more: "),
    "one left out": ({"bias": None}, "bias: .*on_extra='ignore'"),
    "renamed array": ({"bias": None, "offset": box((8,), "embed")}, "offset: "),
    "other nesting": ({"bias": {"bias": box((8,), "embed")}}, "bias/bias: "),
    "indivisible": (
        {"up": box((8, 16), "embed", "mlp")},
        r"up: logical axis 'mlp' .* does not",
    ),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    tree = {name: box(*form) for name, form in WHOLE.items()}
    return tree, pzs.save_params(tmp_path_factory.mktemp("whole") / "saved", tree)


@pytest.mark.parametrize(("changed", "message"), BROKEN.values(), ids=BROKEN)
def test_a_restore_that_does_not_fit_is_refused_before_anything_is_read(
    whole, changed, message, monkeypatch
):
    tree, path = whole
    monkeypatch.setattr("penzai_shard.checkpointing.restoring.load_arrays", None)
    wanted = {name: node for name, node in {**tree, **changed}.items() if node is not None}
    rules = {"mlp": "seven"} if "does not" in message else {}
    mesh = pzs.make_mesh({"seven": 7}, jax.devices()[:7]) if rules else pzs.make_mesh({"data": 8})
    with pytest.raises(ShardingError, match=message) as caught:
        pzs.restore_params(path, abstract(wanted), mesh, rules, on_unnamed="replicate")
    assert isinstance(caught.value, CheckpointMismatchError | PlanError)


def test_a_box_is_not_filled_with_an_array_that_was_saved_without_names(tmp_path):
    path = pzs.save_params(tmp_path / "saved", {"w": numbers(8, 16)})
    mesh = pzs.make_mesh(MESH)
    like = {"w": box((8, 16), "embed", "mlp")}
    fix = (
        r"on_unnamed='replicate', and name it then: name_axes\(restored, {'w': \('embed', 'mlp'\)}"
    )
    with pytest.raises(CheckpointMismatchError, match=f"w: .*the logical axes differ. If .*{fix}"):
        pzs.restore_params(path, like, mesh, {})
    bare = pzs.restore_params(path, {"w": numbers(8, 16)}, mesh, {}, on_unnamed="replicate")
    assert pzs.name_axes(bare, {"w": ("embed", "mlp")})["w"].named_shape == {"embed": 8, "mlp": 16}


def test_a_train_state_of_flax_comes_back_with_its_boxes(tmp_path):
    def build(names):
        params = {"w": linen(numbers(8, 16), names), "b": linen(numbers(16), names[1:])}
        return flax_train_state.TrainState.create(
            apply_fn=None, params=flax.core.freeze(params), tx=optax.adam(1e-3)
        )

    state = build(("embed", "mlp"))
    path = pzs.save_train_state(tmp_path / "state", state)
    assert {"params/w", "params/b", "opt_state/0/mu/w", "step"} < set(read_manifest(path).records)
    mesh = pzs.make_mesh(OTHER_MESH)
    restored = pzs.restore_train_state(path, abstract(state), mesh, RULES, on_unnamed="replicate")
    assert type(restored.params) is flax.core.FrozenDict
    assert all(map(np.array_equal, values(restored), values(state)))
    moment = restored.opt_state[0].mu["w"]
    assert moment.names == ("embed", "mlp")
    assert moment.value.sharding.shard_shape((8, 16)) == (4, 4)
    with pytest.raises(CheckpointMismatchError, match=r"opt_state/0/mu/w: .*have other names"):
        pzs.restore_train_state(path, build(("embed", "x")), mesh, {}, on_unnamed="replicate")
    # Of a train state's checkpoint the parameters, into a model of another library.
    like = {"w": pz.nx.ones({"embed": 8, "mlp": 16}), "b": pz.nx.ones({"mlp": 16})}
    taken = pzs.restore_params(path, like, mesh, RULES)
    assert np.array_equal(taken["w"].data_array, state.params["w"].value)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_train_state_of_ours_comes_back_with_the_boxes_of_its_model(library, tmp_path):
    def build(**changed):
        optimizer = optax.adam(1e-3)
        return pzs.TrainState.initial_state(
            tree_of(library, **changed), optimizer, jax.random.key(0)
        )

    state = build()
    path = pzs.save_train_state(tmp_path / "state", state)
    mesh = pzs.make_mesh(OTHER_MESH)
    restored = pzs.restore_train_state(path, state, mesh, RULES)
    assert jax.tree.structure(restored.model) == jax.tree.structure(tree_of(library))
    assert all(map(np.array_equal, values(restored.model), values(tree_of(library))))
    assert shard_shapes(restored.model) == [(4,), (4, 8), (4, 4)]
    with pytest.raises(CheckpointMismatchError, match=r"square: .*another order"):
        pzs.restore_train_state(path, build(square=((8, 8), ("heads", "embed"))), mesh, RULES)
    model = pzs.restore_params(path, abstract(tree_of(library)), mesh, RULES)
    assert jax.tree.structure(model) == jax.tree.structure(tree_of(library))


@pytest.mark.parametrize("library", LIBRARIES)
def test_parameters_by_name_are_what_the_tree_holds_and_can_be_replaced(library):
    tree = tree_of(library)
    params = pzs.param_dict(tree)
    assert set(params) == {"up", "square", "norm/bias"}
    # Variables of NNX hold values, which have names in Penzai's way.
    assert params["up"] is tree["up"] or params["up"].named_shape == {"embed": 8, "mlp": 16}
    # Values of any library do, if the names agree; the tree keeps its own boxes.
    given = {**params, "up": pz.nx.ones({"embed": 8, "mlp": 16})}
    replaced = pzs.with_params(tree, given)
    assert jax.tree.structure(replaced) == jax.tree.structure(tree)
    assert values(replaced["up"])[0].sum() == 128
    with pytest.raises(CheckpointMismatchError, match=r"up: .*have other names.*rename"):
        pzs.with_params(tree, {**params, "up": pz.nx.ones({"embed": 8, "x": 16})})


@pytest.mark.parametrize("library", LIBRARIES)
def test_boxes_that_plain_orbax_saved_are_filled_with_a_warning(library, tmp_path):
    tree = tree_of(library)
    ocp.save(tmp_path / "plain", tree)
    with pytest.warns(ShardingWarning, match="was renamed or swapped .* goes unnoticed"):
        restored = pzs.restore_params(tmp_path / "plain", tree, pzs.make_mesh(OTHER_MESH), RULES)
    assert jax.tree.structure(restored) == jax.tree.structure(tree)
    assert all(map(np.array_equal, values(restored), values(tree)))
    assert shard_shapes(restored) == [(4,), (4, 8), (4, 4)]
    wrong = tree_of(library, up=((16, 16), ("embed", "mlp")))
    with pytest.raises(CheckpointMismatchError, match=r"up: .*the sizes differ"):
        pzs.restore_params(tmp_path / "plain", wrong, pzs.make_mesh(OTHER_MESH), RULES)
