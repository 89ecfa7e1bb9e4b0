"""Blocks one by one and stacked: dictionaries of parameters, and checkpoints restored across."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from penzai import pz

from penzai_shard.checkpointing import (
    param_dict,
    restore_params,
    restore_train_state,
    save_params,
    save_train_state,
    stack_blocks,
    unstack_blocks,
    with_params,
)
from penzai_shard.checkpointing.array_records import ArrayRecord
from penzai_shard.checkpointing.block_conversion import find_conversions
from penzai_shard.errors import CheckpointMismatchError, RuleTypeError
from penzai_shard.placement import abstract_model, place
from penzai_shard.planning import make_plan
from penzai_shard.training import TrainState
from tests.model_families import GLOBAL, transformer

P = PartitionSpec
BLOCKS = 4


def build_block(name, init_base_rng):
    return pz.nn.Affine.from_config(f"{name}/mlp", init_base_rng, {"embedding": 8}, {"neurons": 16})


def build_net(*, stacked, blocks=BLOCKS):
    key = jax.random.key(0)
    head = pz.nn.Linear.from_config("net/head", key, {"embedding": 8}, {"vocabulary": 2})
    if stacked:
        builder = functools.partial(build_block, "net/blocks")
        stack = pz.nn.LayerStack.from_sublayer_builder(builder, "blocks", blocks, key, {})
        return pz.nn.Sequential([head, stack])
    return pz.nn.Sequential([head, *(build_block(f"net/block_{i}", key) for i in range(blocks))])


def numbers_for(model):
    """The model with a different number at every place."""
    start, values = 0, {}
    for name, value in sorted(param_dict(model).items()):
        shape = value.data_array.shape
        data = start + np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        values[name] = pz.nx.wrap(jnp.asarray(data), *value.named_shape)
        start += data.size
    return with_params(model, values)


@pytest.fixture(scope="module")
def single():
    return numbers_for(abstract_model(build_net, stacked=False))


@pytest.fixture(scope="module")
def stack():
    return abstract_model(build_net, stacked=True)


@pytest.fixture(scope="module")
def single_path(tmp_path_factory, single):
    return save_params(tmp_path_factory.mktemp("single") / "params", single)


@pytest.fixture(scope="module")
def stack_path(tmp_path_factory, single):
    return save_params(
        tmp_path_factory.mktemp("stack") / "params", stack_blocks(param_dict(single))
    )


def numpy_of(values):
    """By name: logical axes and numbers."""
    return {name: (tuple(v.named_shape), np.asarray(v.data_array)) for name, v in values.items()}


def stacked_by_numpy(values):
    """The definition, for names of the form ``net/block_0/...``."""
    made = {}
    for name, (axes, _) in values.items():
        if "block_" not in name:
            made[name] = values[name]
            continue
        names = [re.sub(r"block_\d+", f"block_{i}", name) for i in range(BLOCKS)]
        made[re.sub(r"block_\d+", "blocks", name)] = (
            ("blocks", *axes),
            np.stack([values[n][1] for n in names]),
        )
    return made


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, (axes, numbers) in found.items():
        assert axes == expected[name][0], name
        np.testing.assert_array_equal(numbers, expected[name][1], err_msg=name)


def assert_planned(model, mesh, rules):
    plan = make_plan(model, mesh, rules)
    values = param_dict(model)
    for leaf in plan.leaves:
        array = values[leaf.path].data_array if leaf.path in values else None
        if array is not None:
            assert array.sharding == NamedSharding(mesh, leaf.spec), leaf.path
            assert array.addressable_shards[0].data.shape == leaf.shard_shape


def test_stacking_gives_the_names_axes_and_values_of_penzai(single, stack):
    values = param_dict(single)
    made = stack_blocks(values)
    assert_same(numpy_of(made), stacked_by_numpy(numpy_of(values)))
    assert list(param_dict(stack)) == list(made)
    with_params(stack, made)  # Refuses other axes, another order of them, other sizes.


def test_the_names_and_shapes_are_those_of_penzai_s_transformers():
    key = jax.random.key(0)
    for family in ("gemma_2", "gpt_neox"):
        options = {} if family == "gpt_neox" else {"attention_type": GLOBAL}
        single, stack = (
            param_dict(abstract_model(transformer, family, key, use_layer_stack=use, **options))
            for use in (False, True)
        )
        assert shapes_of(stack_blocks(single)) == shapes_of(stack)
        assert shapes_of(unstack_blocks(stack)) == shapes_of(single)


def shapes_of(values):
    return {name: (list(value.named_shape.items()), value.dtype) for name, value in values.items()}


def test_unstacking_is_the_inverse(single):
    values = param_dict(single)
    made = unstack_blocks(stack_blocks(values))
    assert list(made) == list(values)
    assert_same(numpy_of(made), numpy_of(values))


def test_a_layer_stack_is_taken_apart_as_penzai_slices_it():
    stack = param_dict(numbers_for(abstract_model(build_net, stacked=True, blocks=3)))
    made = unstack_blocks(stack)
    for name, value in made.items():
        expected = stack[re.sub(r"block_\d", "blocks", name)]
        if "block_" in name:
            # What LayerStack gives to each call of its sublayers.
            expected = expected.untag("blocks").with_positional_prefix()
            number = int(re.search(r"block_(\d)", name)[1])
            expected = jax.tree.map(lambda x, number=number: x[number], expected)
        assert tuple(value.named_shape) == tuple(expected.named_shape)
        np.testing.assert_array_equal(value.data_array, expected.data_array)
    assert_same(numpy_of(stack_blocks(made)), numpy_of(stack))


def test_the_stack_axis_is_found_wherever_it_is():
    rows = pz.nx.wrap(jnp.arange(24).reshape(2, 3, 4), "in", "blocks", "out")
    made = unstack_blocks({"blocks/w": rows})
    for i in range(3):
        assert tuple(made[f"block_{i}/w"].named_shape) == ("in", "out")
        np.testing.assert_array_equal(
            made[f"block_{i}/w"].data_array, np.arange(24).reshape(2, 3, 4)[:, i]
        )


def test_other_names_of_blocks_and_only_some_of_them():
    values = {f"{side}/layer{i}.w": pz.nx.ones({"a": 2}) * i for side in "xy" for i in range(2)}
    options = {"block": "layer*", "stacked_name": "layers", "axis": "depth"}
    made = stack_blocks(values, within="x", **options)
    assert list(made) == ["x/layers.w", "y/layer0.w", "y/layer1.w"]
    assert dict(made["x/layers.w"].named_shape) == {"depth": 2, "a": 2}
    assert list(unstack_blocks(made, within="x", **options)) == list(values)


def test_blocks_are_in_the_order_of_their_numbers():
    values = {f"block_{i}/w": pz.nx.wrap(jnp.full(2, i), "a") for i in reversed(range(12))}
    (stack,) = stack_blocks(values).values()
    np.testing.assert_array_equal(np.asarray(stack.data_array)[:, 0], range(12))
    singles = {name: record(a=2) for name in values}
    stacks = {"blocks/w": record(blocks=12, a=2)}
    for stored, wanted in ((singles, stacks), (stacks, singles)):
        (conversion,) = find_conversions(stored, wanted)[0]
        assert conversion.blocks == tuple(f"block_{i}/w" for i in range(12))


def test_sharded_arrays_stay_sharded(single, wide):
    placed = place(param_dict(single), wide, {"embedding": "data", "neurons": "model"})
    made = stack_blocks(placed)
    for name, value in made.items():
        other = placed[name.replace("blocks", "block_0")].data_array
        spec = P(None, *other.sharding.spec) if "blocks" in name else other.sharding.spec
        assert value.data_array.sharding.is_equivalent_to(
            NamedSharding(wide, spec), value.data_array.ndim
        )
        assert value.data_array.sharding.spec == spec or not other.sharding.spec
    assert_same(numpy_of(made), stacked_by_numpy(numpy_of(placed)))
    again = unstack_blocks(made)
    for name, value in again.items():
        assert value.data_array.sharding == placed[name].data_array.sharding
    split = place(made, wide, {"blocks": "data", "neurons": "model"})
    assert_same(numpy_of(unstack_blocks(split)), numpy_of(placed))


def test_structs_are_stacked_without_values(single, stack, wide):
    abstract = param_dict(abstract_model(build_net, stacked=False))
    made = stack_blocks(abstract)
    assert shapes_of(made) == shapes_of(param_dict(stack))
    assert all(isinstance(v.data_array, jax.ShapeDtypeStruct) for v in made.values())
    assert list(unstack_blocks(made)) == list(abstract)
    sharding = NamedSharding(wide, P("data"))
    w = pz.nx.wrap(jnp.ones(8), "a")
    struct = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), w)
    (one,) = stack_blocks({"block_0/w": struct}).values()
    assert one.data_array.sharding == NamedSharding(wide, P(None, "data"))


def test_donated_blocks_are_deleted_once_they_are_stacked():
    values = {f"block_{i}/w": pz.nx.ones({"a": 4}) + i for i in range(2)}
    stack = stack_blocks(values, donate=True)
    assert all(value.data_array.is_deleted() for value in values.values())
    unstacked = unstack_blocks(stack, donate=True)
    assert stack["blocks/w"].data_array.is_deleted()
    np.testing.assert_array_equal(unstacked["block_1/w"].unwrap("a"), np.full(4, 2.0))


ONE = pz.nx.ones({"a": 2})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"block_0/w": ONE, "block_2/w": ONE}, "block_1/w: is missing, and 'block_0/w' is there"),
        ({"block_1/w": ONE}, "block_0/w: is missing"),
        ({"block_0/w": ONE, "block_1/w": ONE, "block_1/b": ONE}, "block_0/b: is missing"),
        ({"block_0/w": ONE, "block_1/w": pz.nx.ones({"a": 3})}, "block_1/w: is (a=3) float32, and"),
        ({"block_0/w": ONE, "block_1/w": pz.nx.ones({"b": 2})}, "block_1/w: is (b=2) float32, and"),
        ({"block_0/w": ONE, "block_1/w": ONE.astype("int32")}, "block_1/w: is (a=2) int32, and"),
        ({"block_0/w": ONE, "block_01/w": ONE}, "block_01/w: is written with another number than"),
        ({"block_0/w": ONE, "blocks/w": ONE}, "blocks/w: is there already"),
        (
            {"block_0/w": jnp.ones(2)},
            "has no logical axes. Name it: name_axes(params, {'block_0/w'",
        ),
        ({"block_0/w": pz.nx.ones({"blocks": 2})}, "has a logical axis 'blocks' already"),
        ({"block_0/block_1/w": ONE}, "several parts of it may be that of the blocks"),
        ({"layer_0/w": ONE}, "no array has a part that is named 'block_*'. There are 'layer_0/w'."),
        ({}, "There are none"),
    ],
)
def test_blocks_that_cannot_be_stacked_are_refused(values, said):
    with pytest.raises(CheckpointMismatchError, match=re.escape(said)):
        stack_blocks(values)


def test_all_that_keeps_blocks_apart_is_said_at_once():
    values = {
        "block_0/w": ONE,
        "block_1/v": ONE,
        "block_2/w": pz.nx.ones({"a": 3}),
        "blocks/v": ONE,
    }
    with pytest.raises(CheckpointMismatchError) as caught:
        stack_blocks(values)
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "block_1/w",
        "block_2/w",
        "block_0/v",
        "block_2/v",
        "blocks/v",
    ]


STACK = pz.nx.ones({"blocks": 2, "a": 2})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"blocks/w": ONE}, "blocks/w: has no logical axis 'blocks', (a=2)"),
        ({"blocks/w": jnp.ones(2)}, "blocks/w: has no logical axis 'blocks'"),
        (
            {"blocks/w": STACK, "blocks/v": STACK, "blocks/b": pz.nx.ones({"blocks": 3})},
            "blocks/b: has 3 blocks, and 'blocks/w' beside it 2",
        ),
        ({"blocks/w": STACK, "block_1/w": ONE}, "block_1/w: is there already"),
        ({"blocks/blocks/w": STACK}, "Say which: within=''."),
        ({"w": STACK}, "no array has a part that is named 'blocks'. There are 'w'."),
    ],
)
def test_stacks_that_cannot_be_taken_apart_are_refused(values, said):
    with pytest.raises(CheckpointMismatchError, match=re.escape(said)):
        unstack_blocks(values)


@pytest.mark.parametrize("change", [stack_blocks, unstack_blocks])
def test_models_are_refused_with_what_to_write(change, single):
    with pytest.raises(RuleTypeError, match=rf"{change.__name__}\(param_dict\(model\)\)"):
        change(single)
    with pytest.raises(RuleTypeError, match="both are one part of a name"):
        change({"block_0/w": ONE}, block="net/block_*")


RULES = {"embedding": "data", "neurons": "model"}
SPLIT_STACKS = {"blocks": "data", "neurons": "model"}


@pytest.mark.parametrize("rules", [RULES, SPLIT_STACKS, {"blocks": "model", "embedding": "data"}])
def test_blocks_are_stacked_straight_into_place(single, stack, single_path, wide, rules):
    restored = restore_params(single_path, stack, wide, rules, on_block_mismatch="convert")
    assert_same(numpy_of(param_dict(restored)), stacked_by_numpy(numpy_of(param_dict(single))))
    assert_planned(restored, wide, rules)


def test_a_stack_axis_split_over_two_mesh_axes(tmp_path, wide):
    values = {f"block_{i}/w": pz.nx.wrap(jnp.arange(2) + 2 * i, "a") for i in range(8)}
    path = save_params(tmp_path / "params", values)
    wanted = {"blocks/w": pz.nx.wrap(jnp.zeros((2, 8), int), "a", "blocks")}
    rules = {"blocks": ("model", "data")}
    restored = restore_params(path, wanted, wide, rules, on_block_mismatch="convert")
    np.testing.assert_array_equal(restored["blocks/w"].data_array, np.arange(16).reshape(8, 2).T)
    assert_planned(restored, wide, rules)


def test_stacks_are_taken_apart_straight_into_place(single, stack_path, tall):
    abstract = abstract_model(build_net, stacked=False)
    restored = restore_params(stack_path, abstract, tall, RULES, on_block_mismatch="convert")
    assert_same(numpy_of(param_dict(restored)), numpy_of(param_dict(single)))
    assert_planned(restored, tall, RULES)


def test_stacking_is_refused_unless_it_is_asked_for(stack, single_path, stack_path, wide):
    said = "Pass on_block_mismatch='convert' to have them stacked."
    with pytest.raises(CheckpointMismatchError, match=re.escape(said)) as caught:
        restore_params(single_path, stack, wide, RULES)
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "net/blocks/mlp/AddBias.bias",
        "net/blocks/mlp/Linear.weights",
    ]
    abstract = abstract_model(build_net, stacked=False)
    said = "net/block_0/mlp/AddBias.bias to net/block_3/mlp/AddBias.bias. Pass"
    with pytest.raises(CheckpointMismatchError, match=re.escape(said)):
        restore_params(stack_path, abstract, wide, RULES)


def test_blocks_of_another_number_are_refused(single_path, stack_path, wide):
    options = {"on_block_mismatch": "convert"}
    for count, said in (
        (5, "net/block_4/mlp/AddBias.bias: the model wants"),
        (3, "net/block_3"),
    ):
        larger = abstract_model(build_net, stacked=True, blocks=count)
        with pytest.raises(CheckpointMismatchError, match=said):
            restore_params(single_path, larger, wide, RULES, **options)
    fewer = abstract_model(build_net, stacked=False, blocks=3)
    with pytest.raises(CheckpointMismatchError, match=r"has \(blocks=4, .* wants \(blocks=3, "):
        restore_params(stack_path, fewer, wide, RULES, **options)


@pytest.mark.parametrize("stacked", [False, True])
def test_what_an_optimizer_keeps_of_blocks_follows_them(tmp_path, single, wide, tall, stacked):
    def state_of(model, added):
        def more(x):
            return x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x + added

        state = TrainState.initial_state(model, optax.adam(1e-2), jax.random.key(added))
        return jax.tree.map(more, state)

    values = {True: stack_blocks(param_dict(single)), False: param_dict(single)}
    abstract = {kind: abstract_model(build_net, stacked=kind) for kind in (False, True)}
    models = {kind: with_params(abstract[kind], values[kind]) for kind in (False, True)}
    state = place(state_of(models[stacked], 3), wide, RULES)
    path = save_train_state(tmp_path / "state", state)
    other = state_of(numbers_for(abstract[not stacked]), 0)
    with pytest.raises(CheckpointMismatchError, match="Pass on_block_mismatch='convert'"):
        restore_train_state(path, other, tall, RULES)
    restored = restore_train_state(path, other, tall, RULES, on_block_mismatch="convert")
    expected = state_of(models[not stacked], 3)
    assert jax.tree.structure(restored.opt_state) == jax.tree.structure(expected.opt_state)
    jax.tree.map(np.testing.assert_array_equal, restored.opt_state, expected.opt_state)
    assert_same(numpy_of(param_dict(restored.model)), numpy_of(param_dict(expected.model)))


def test_a_stack_with_the_blocks_last_is_taken_apart(tmp_path, wide):
    numbers = np.arange(24).reshape(2, 4, 3)
    path = save_params(tmp_path / "params", {"blocks/w": pz.nx.wrap(numbers, "a", "b", "blocks")})
    rules, options = {"b": "data"}, {"on_block_mismatch": "convert"}
    wanted = {f"block_{i}/w": pz.nx.zeros({"a": 2, "b": 4}, int) for i in range(3)}
    restored = restore_params(path, wanted, wide, rules, **options)
    turned = {f"block_{i}/w": pz.nx.zeros({"b": 4, "a": 2}, int) for i in range(3)}
    with pytest.raises(CheckpointMismatchError, match="same logical axes in another order"):
        restore_params(path, turned, wide, rules, **options)
    transposed = restore_params(path, turned, wide, rules, **options, on_axis_mismatch="transpose")
    for i in range(3):
        name = f"block_{i}/w"
        np.testing.assert_array_equal(restored[name].data_array, numbers[:, :, i])
        np.testing.assert_array_equal(transposed[name].data_array, numbers[:, :, i].T)


def record(**axes):
    return ArrayRecord(tuple(axes.values()), "float32", tuple(axes))


@pytest.mark.parametrize(
    ("stored", "wanted", "said"),
    [
        (
            {"blocks/w": record(blocks=3, a=2)},
            {"block_1/w": record(a=2), "block_2/w": record(a=2)},
            "and the model wants block_1/w, block_2/w of them alone",
        ),
        (
            {"blocks/w": record(blocks=2, a=2)},
            {"block_0/w": record(a=2), "block_1/w": record(a=3)},
            "the model's blocks differ: block_0/w is (a=2) float32; block_1/w is (a=3) float32",
        ),
        (
            {"blocks/x/block_0/w": record(a=2), "block_0/x/blocks/w": record(a=2)},
            {"blocks/x/blocks/w": record(blocks=1, a=2)},
            "its blocks may be 'block_0/x/blocks/w' or 'blocks/x/block_0/w' and so on",
        ),
        (
            {"blocks/x/block_0/w": record(blocks=1), "block_0/x/blocks/w": record(blocks=1)},
            {"block_0/x/block_0/w": record()},
            "2 stacked arrays of the checkpoint may hold it",
        ),
    ],
)
def test_conversions_that_are_not_clear_are_refused(stored, wanted, said):
    problems = find_conversions(stored, wanted)[1]
    assert len(problems) == 1
    assert said in problems[0]


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        ({"block_0/w": record(a=2)}, {"blocks/w": record(a=2)}),
        ({"blocks/w": record(blocks=1, a=2)}, {"blocks/w": record(blocks=1, a=2)}),
        ({"blocks/w": record(a=2), "block_0/w": record(a=2)}, {"block_0/w": record(a=2)}),
        ({"block_0/w": record(a=2)}, {"blocks/v": record(blocks=1, a=2)}),
        ({"block_x/w": record(a=2)}, {"blocks/w": record(blocks=1, a=2)}),
    ],
)
def test_nothing_is_converted_that_is_there_or_no_stack(stored, wanted):
    assert find_conversions(stored, wanted) == ([], [])


def test_one_block_of_a_stack_and_the_model_s_others(single, stack_path, wide):
    own = jax.tree.map(lambda x: -x, param_dict(single))
    restored = restore_params(
        stack_path,
        own,
        wide,
        RULES,
        only=["net/block_1/**", "net/head*/**"],
        others="keep",
        on_block_mismatch="convert",
    )
    for name, value in numpy_of(restored).items():
        sign = 1 if "block_1" in name or "head" in name else -1
        np.testing.assert_array_equal(
            value[1], sign * np.asarray(param_dict(single)[name].data_array)
        )


def test_blocks_of_a_stack_that_is_not_asked_for_stay_in_the_checkpoint(single, single_path, wide):
    own = jax.tree.map(lambda x: -x, stack_blocks(param_dict(single)))
    bias = "net/blocks/mlp/AddBias.bias"
    options = {"others": "keep", "on_block_mismatch": "convert"}
    restored = restore_params(single_path, own, wide, RULES, except_=bias, **options)
    expected = {name: value if name == bias else -value for name, value in own.items()}
    assert_same(numpy_of(restored), numpy_of(expected))


def test_stacking_goes_with_other_names_orders_and_dtypes(tmp_path, single, stack, wide):
    values = {
        name.replace("net/block_", "model.layers."): value.order_as(*reversed(value.named_shape))
        for name, value in param_dict(single).items()
    }
    path = save_params(tmp_path / "params", values)
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), param_dict(stack))
    restored = restore_params(
        path,
        wanted,
        wide,
        SPLIT_STACKS,
        names={"model.layers.*.**": "net/block_*/**"},
        on_axis_mismatch="transpose",
        on_dtype_mismatch="cast",
        on_block_mismatch="convert",
    )
    expected = stacked_by_numpy(numpy_of(param_dict(single)))
    for name, (axes, numbers) in numpy_of(restored).items():
        assert axes == expected[name][0]
        np.testing.assert_array_equal(numbers, expected[name][1].astype(jnp.bfloat16))
