"""Values of a live tree in another: to the bit, with the fewest bytes, under any names."""

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from penzai import pz

import penzai_shard as pzs
from penzai_shard.arrays.structure import leaves_of
from penzai_shard.checkpoints.moving import move
from tests.checkpoints import trees
from tests.checkpoints.trees import blank, contents, numbers, params, pointers, refused_kinds
from tests.models import OPTIMIZERS, counted_mlp, linen, llama, model, penzai_mlp
from tests.refusals import problems_of, refused

WIDE, TALL = (pzs.make_mesh({"data": n, "model": 8 // n}) for n in (4, 2))
FEW = pzs.make_mesh({"data": 3}, jax.devices()[2:5])
RULES = {"features": "data", "features_out": "model", "embedding": "data", "neurons": "model"}
MLP = model("penzai mlp")
RELAXED = {"on_indivisible": "replicate", "on_unnamed": "replicate"}


@pytest.fixture
def sent(monkeypatch):
    """The bytes of each array that goes from one device to another."""
    found, put = [], jax.device_put

    def spy(value, device=None, **options):
        if isinstance(device, jax.Device) and value.device != device:
            found.append(value.nbytes)
        return put(value, device, **options)

    monkeypatch.setattr(jax, "device_put", spy)
    return found


def structs_on(tree, mesh, rules):
    return pzs.make_plan(tree, mesh, rules, **RELAXED).restore_structs()


# Onto other devices

SPECS = [P("data", "model"), P("data"), P(("data", "model")), P(None, "model"), P()]
LAYOUTS = [NamedSharding(mesh, spec) for mesh in (WIDE, TALL) for spec in SPECS]
LAYOUTS += [NamedSharding(FEW, P(None, "data")), SingleDeviceSharding(jax.devices()[6])]
PAIRS = random.Random(0).sample([*itertools.permutations(LAYOUTS, 2)], 8)


def count_lacking(before, after, shape):
    """How many elements the devices of a layout lack that have those of another."""
    lacking = 0
    for device, index in after.devices_indices_map(shape).items():
        mask = np.zeros(shape, bool)
        mask[index] = True
        if device in before.device_set:
            mask[before.devices_indices_map(shape)[device]] = False
        lacking += mask.sum()
    return lacking


def test_move_sends_what_devices_lack_and_no_more(sent):
    shape = (24, 24)
    array = jnp.arange(576.0).reshape(shape)
    pairs = {f"{i:02}": pair for i, pair in enumerate(PAIRS)}
    tree = {path: jax.device_put(array, before) for path, (before, _) in pairs.items()}
    into = {path: jnp.zeros(shape, device=after) for path, (_, after) in pairs.items()}
    least = sum(4 * count_lacking(*pair, shape) for pair in pairs.values())
    moved = move(tree, into)
    assert contents(moved) == contents(tree)
    trees.assert_lies_as(moved, {path: after for path, (_, after) in pairs.items()})
    assert sum(sent) == least > 0
    # A step that donates what was sent takes its memory, and not that of the array it comes from.
    double = jax.jit(lambda x: 2 * x, donate_argnums=0)
    for path, array in moved.items():
        before = pointers(array)
        if before != pointers(tree[path]):
            assert pointers(double(array)) == before
    assert contents(tree) == contents(dict.fromkeys(tree, jnp.arange(576.0).reshape(shape)))


def test_move_leaves_what_lies_right_where_it_is(sent):
    explicit = pzs.make_mesh({"data": 4, "model": 2}, explicit=True)
    tree = pzs.place(pzs.param_dict(MLP), WIDE, RULES, **RELAXED) | {"n": jnp.ones(2)}
    into = structs_on(tree, explicit, RULES) | {"n": jnp.zeros(2), "own": jnp.ones(3)}
    moved = move(tree, into, others="keep")
    assert contents(moved) == contents(tree) | contents({"own": into["own"]})
    assert not sent
    assert moved["own"] is into["own"]
    assert moved["n"] is tree["n"]
    for leaf, own in zip(leaves_of(moved), leaves_of(tree | {"own": into["own"]}), strict=True):
        assert pointers(leaf.value) == pointers(own.value), leaf.path


def test_move_stays_with_the_values_where_nothing_else_is_said():
    tree = pzs.place(MLP, WIDE, RULES, **RELAXED)
    for into in (penzai_mlp(1), pzs.abstract_model(penzai_mlp)):
        moved = move(tree, into)
        assert params(moved) == params(MLP)
        trees.assert_lies(moved, WIDE, RULES, **RELAXED)
        assert all(isinstance(x, pz.Parameter) for x in pz.unbind_params(moved)[1])


def test_move_refuses():
    ones, struct = jnp.ones(2), jax.ShapeDtypeStruct((2,), "float32")
    gone = {"w": ones, "v": jnp.ones(2)}
    gone["v"].delete()
    devices = jax.devices()
    blocks = {f"block_{i}/w": jax.device_put(ones, devices[i]) for i in range(3)}
    nowhere = structs_on(MLP, pzs.make_mesh({"data": 8}, abstract=True), {})
    mismatch = pzs.CheckpointMismatchError
    # What is moved, with options; the error, and the paths of its problems.
    for arguments, options, error, paths in [
        ([gone | {"u": struct}, dict.fromkeys("uvw", ones)], {}, pzs.ShardingError, {*"uv"}),
        ([{"w": ones}, dict.fromkeys("vw", struct)], {"others": "keep"}, mismatch, {"v"}),
        ([MLP, nowhere], {}, pzs.MeshError, {""}),
        ([blocks, {"blocks/w": jnp.ones((3, 2))}], {"allow": "blocks"}, pzs.MeshError, None),
        ([{"w": ones / 2}, {"w": jnp.int8([1, 1])}], {"allow": "cast"}, mismatch, {"w"}),
        ([MLP, WIDE], {}, pzs.RuleTypeError, {""}),
    ]:
        problems = refused(error, move, *arguments, **options)
        assert problems.keys() == (paths or {"block_1/w", "block_2/w"})


def test_move_casts_on_the_side_with_fewer_bytes(sent):
    row, whole = LAYOUTS[1], NamedSharding(WIDE, P())
    tree = {"w": jnp.ones((8, 8), jnp.bfloat16, device=row), "v": jnp.ones((8, 8), device=row)}
    dtypes = {"w": jnp.float32, "v": jnp.bfloat16}
    into = {path: jnp.zeros((8, 8), dtype, device=whole) for path, dtype in dtypes.items()}
    assert contents(move(tree, into, allow="cast")) == contents({k: x + 1 for k, x in into.items()})
    assert sum(sent) == 2 * 8 * 6 * 8 * 2


def test_move_to_the_memory_of_the_host_and_back(tmp_path):
    device, host = (
        NamedSharding(WIDE, P("data"), memory_kind=kind) for kind in (None, "pinned_host")
    )
    tree = {"w": jnp.ones((256, 256), device=device), "v": jnp.ones(8, device=device)}
    there = move(tree, trees.structs_of(tree, host))
    trees.assert_lies_as(there, dict.fromkeys(tree, host))
    back = move(there, trees.structs_of(tree, device))
    trees.assert_lies_as(back, dict.fromkeys(tree, device))
    assert contents(back) == contents(tree)
    path = pzs.save_params(tmp_path / "host", there)
    for layout in (device, host):
        restored = pzs.restore_params(path, trees.structs_of(tree, layout))
        trees.assert_lies_as(restored, dict.fromkeys(tree, layout))
        assert contents(restored) == contents(tree)


# Into other structures


def test_linen_into_penzai_and_back(tmp_path):
    """Another library, names, axes, order, on another mesh; the inverse comes free."""
    flax = pzs.place(linen(), TALL, {"embed": "model"}, **RELAXED)
    shapes = {"Dense_0": {"width": 16, "embed": 8}, "Dense_1": {"embed": 8, "width": 16}}
    into = {f"net/{name}/Linear.weights": pz.nx.zeros(shapes[name]) for name in shapes}
    into = structs_on(into, WIDE, {"embed": "data", "width": "model"})
    names, axes = {"params/*/kernel": "net/*/Linear.weights"}, {"mlp": "width"}
    options = {"names": names, "rename_axes": axes, "allow": ("extra", "transpose")}
    carried = move(flax, into, **options)
    path = pzs.save_params(tmp_path / "flax", flax)
    assert params(pzs.restore_params(path, into, **options)) == params(carried)
    for name in shapes:
        kernel = numbers(flax["params"][name]["kernel"].value).reshape(-1)
        order = ("embed", "width") if name == "Dense_0" else ("width", "embed")
        found = carried[f"net/{name}/Linear.weights"].untag(*order).unwrap()
        np.testing.assert_array_equal(found.reshape(-1), kernel)
    inverse, axes = ({new: old for old, new in each.items()} for each in (names, axes))
    options = {"names": inverse, "rename_axes": axes, "allow": "transpose", "others": "keep"}
    back = move(carried, blank(flax), **options)
    for name in shapes:
        pairs = (tree["params"][name]["kernel"].value for tree in (back, flax))
        np.testing.assert_array_equal(*map(numbers, pairs))


def test_move_blocks_into_the_other_structure():
    rules = [{"neurons": axis} for axis in ("data", "model")]
    tree, like = (
        pzs.place(llama(seed, stacked=bool(seed)), WIDE, rules[seed], on_unnamed="replicate")
        for seed in (1, 0)
    )
    problems = problems_of(pzs.CheckpointMismatchError, move, tree, like)
    assert {problem.kind for problem in problems} == {"blocks"}
    moved = move(tree, like, allow="blocks")
    trees.assert_lies(moved, WIDE, rules[0], on_unnamed="replicate")
    assert params(moved) != params(like)
    assert params(move(moved, blank(tree), allow="blocks")) == params(tree)


def test_move_state_variables_that_both_have():
    trained = counted_mlp()
    trained.count.value = jnp.ones(()) * 7
    moved = move(trained, counted_mlp(1))
    assert params(moved) == params(trained)
    assert int(moved.count.value) == 7
    # Constants are those of the other model, if it has values.
    scaled, other = ({"mlp": MLP, "s": pz.nn.ConstantRescale(jnp.float32(x))} for x in (1, 2))
    assert float(move(scaled, other)["s"].by) == 2
    assert float(move(scaled, structs_on(other, WIDE, RULES))["s"].by) == 1
    assert params(move(trained, penzai_mlp(1))) == params(move(MLP, counted_mlp(1))) == params(MLP)


def test_move_train_states():
    def state_of(names, first):
        w = jnp.arange(48.0).reshape(2, 4, 6) + first
        tree = {path: pz.nx.wrap(w[i], "a", "b") for i, path in enumerate(names)}
        return pzs.TrainState.initial_state(
            tree, OPTIMIZERS["adafactor"](1e-3), jax.random.key(first)
        )

    state = pzs.place(state_of(["up/w", "down/w"], 1), WIDE, {"a": "data", "b": "model"}, **RELAXED)
    like = state_of(["net/up/w", "net/down/w"], 0)
    like = pzs.place(like, TALL, {"a": "data"}, **RELAXED)
    refused(pzs.CheckpointMismatchError, move, state, like)
    moved = move(state, like, names={"**/*/w": "**/net/*/w"})
    assert {path.replace("net/", ""): x for path, x in contents(moved).items()} == contents(state)
    trees.assert_lies(moved, TALL, {"a": "data"}, **RELAXED)
    for pair in ((state, like.model), (state.model, like)):
        assert refused_kinds(pzs.CheckpointMismatchError, move, *pair) == {"": "kind"}
