"""What is particular to ``Jitted``: when it compiles, what it keeps, what a call costs."""

import collections
import dataclasses
import gc
import pickle
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from penzai import pz
from penzai.core.variables import VariableConflictError

from penzai_shard.layers import Jitted, clear_compiled_structures, compiled_structure
from penzai_shard.layers.model_reading import ModelReading
from penzai_shard.planning import name_to_name_sharding

TRACED = collections.Counter()


@pz.pytree_dataclass
class Traced(pz.nn.Layer):
    """Counts how often its Python code runs, by name; adds a constant."""

    name: str = dataclasses.field(metadata={"pytree_node": False})
    amount: object = 1.0

    def __call__(self, value, /, **side_inputs):
        TRACED[self.name] += 1
        return value + self.amount


@pytest.fixture
def traced(request):
    """A ``Traced`` of its own, and how often it ran."""
    clear_compiled_structures()
    TRACED.clear()
    name = request.node.name
    return Traced(name), lambda: TRACED[name]


def named(value, **names):
    return pz.nx.wrap(jnp.full(tuple(names.values()), value), *names)


@pz.pytree_dataclass
class Scale(pz.nn.Layer):
    """Multiplies by everything that it holds."""

    held: object

    def __call__(self, value, /, **side_inputs):
        for leaf in jax.tree_util.tree_leaves(self.held):
            value = value * getattr(leaf, "value", leaf)
        return value


def test_compiles_once_for_any_number_of_calls_and_values(traced):
    layer, count = traced
    model = pz.nn.Sequential([layer, Scale(pz.Parameter(value=named(2.0), label="w"))])
    jitted = Jitted(model)
    for value in (1.0, 2.0, 3.0):
        model.sublayers[1].held.value = named(value)
        assert float(jitted(named(1.0)).unwrap()) == 2 * value
    assert count() == 1


def test_an_argument_of_another_shape_compiles_again(traced):
    layer, count = traced
    jitted = Jitted(layer)
    for size in (1, 2, 1):
        jitted(jnp.ones(size))
    assert count() == 2


def test_models_of_equal_structure_share_what_was_compiled(traced):
    layer, count = traced

    def model(value):
        weight = pz.Parameter(value=named(value), label="w")
        return Jitted(pz.nn.Sequential([Traced(layer.name, value), Scale(weight)]))

    assert float(model(2.0)(named(1.0)).unwrap()) == 6
    assert float(model(3.0)(named(1.0)).unwrap()) == 12
    assert count() == 1


def test_an_edit_and_its_undoing_compile_once(traced):
    layer, count = traced
    model = Jitted(pz.nn.Sequential([layer]))
    edited = pz.select(model).at_instances_of(Traced).insert_after(Scale(3.0))
    undone = pz.select(edited).at_instances_of(Scale).remove_from_parent()
    assert [float(each(jnp.ones(()))) for each in (model, edited, undone)] == [2, 6, 2]
    assert count() == 2


def test_labels_shardings_and_names_are_structure(traced):
    layer, count = traced

    def run(label="w", axis="a", metadata=None, **options):
        weight = pz.Parameter(value=named(1.0, **{axis: 2}), label=label, metadata=metadata)
        return Jitted(pz.nn.Sequential([layer, Scale(weight)]), **options)(named(1.0))

    run()
    run()
    assert count() == 1
    run(label="other")
    run(axis="b")
    run(metadata={"learning_rate": 1.0})
    run(out_shardings=jax.sharding.SingleDeviceSharding(jax.devices()[1]))
    run()
    assert count() == 5


@pytest.mark.parametrize("edit", ["append", "replace", "reverse", "pop", "insert_equal_length"])
def test_edits_in_place_of_a_list_are_seen(traced, edit):
    layer, _ = traced
    add, scale, other = layer, Scale(3.0), Scale(5.0)
    model = pz.nn.Sequential([pz.nn.Sequential([add, scale])])
    jitted = Jitted(model)
    assert float(jitted(jnp.ones(()))) == 6
    inner = model.sublayers[0].sublayers
    expected = {
        "append": lambda: inner.append(other) or 30,
        "replace": lambda: inner.__setitem__(1, other) or 10,
        "reverse": lambda: inner.reverse() or 4,
        "pop": lambda: inner.pop() and 2,
        "insert_equal_length": lambda: inner.__setitem__(slice(0, 2), [other, add]) or 6,
    }[edit]()
    assert float(jitted(jnp.ones(()))) == expected
    assert float(jitted(jnp.ones(()))) == expected


def test_an_edit_that_keeps_the_structure_does_not_compile(traced):
    layer, count = traced
    model = pz.nn.Sequential([layer, Scale(3.0)])
    jitted = Jitted(model)
    jitted(jnp.ones(()))
    model.sublayers[1] = Scale(4.0)
    assert float(jitted(jnp.ones(()))) == 8
    assert count() == 1


@pytest.mark.parametrize(
    "container", [dict, collections.OrderedDict, lambda items: collections.defaultdict(list, items)]
)
def test_edits_in_place_of_dictionaries_are_seen(container):
    held = container({"a": 2.0, "b": pz.Parameter(value=jnp.asarray(3.0), label="b")})
    jitted = Jitted(Scale(held))
    assert float(jitted(jnp.ones(()))) == 6
    held["a"] = 5.0
    assert float(jitted(jnp.ones(()))) == 15
    held["c"] = 2.0
    assert float(jitted(jnp.ones(()))) == 30
    del held["b"]
    assert float(jitted(jnp.ones(()))) == 10


def test_an_array_in_a_list_that_was_deleted_may_be_replaced():
    held = [jnp.asarray(2.0)]
    jitted = Jitted(Scale(held))
    assert float(jitted(jnp.ones(()))) == 2
    held[0].delete()
    held[0] = jnp.asarray(3.0)
    assert float(jitted(jnp.ones(()))) == 3


def test_equal_numbers_of_another_type_in_a_list_are_another_structure():
    held = [1]
    jitted = Jitted(Scale(held))
    assert jitted(jnp.ones((), jnp.int32)).dtype == jnp.int32
    held[0] = 1.0
    assert jitted(jnp.ones((), jnp.int32)).dtype == jnp.float32


def test_edits_inside_classes_of_other_libraries_are_seen():
    @jax.tree_util.register_pytree_node_class
    class Box:
        def __init__(self, content):
            self.content = content

        def tree_flatten(self):
            return (self.content,), None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls(*children)

    box = Box(2.0)
    jitted = Jitted(Scale((box, None)))
    assert float(jitted(jnp.ones(()))) == 2
    box.content = 3.0
    assert float(jitted(jnp.ones(()))) == 3


def test_a_value_with_other_names_order_or_type_is_seen():
    weight = pz.Parameter(value=named(2.0, a=2, b=3), label="w")
    jitted = Jitted(Scale(weight))
    for value in (
        named(3.0, b=3, a=2),
        named(4.0, c=4),
        named(5.0, a=2).untag("a"),
        jnp.asarray(7.0),
        np.float32(8.0),
        named(9.0, a=2, b=3),
    ):
        weight.value = value
        output, expected = jitted(named(1.0)), Scale(weight)(named(1.0))
        assert jax.tree_util.tree_structure(output) == jax.tree_util.tree_structure(expected)
        np.testing.assert_array_equal(output.data_array, expected.data_array)


def test_state_of_any_form_is_updated():
    @pz.pytree_dataclass
    class Keeps(pz.nn.Layer):
        cache: pz.StateVariable

        def __call__(self, value, /, **side_inputs):
            old = self.cache.value
            self.cache.value = {"last": value, "count": old["count"] + 1}
            return value + old["count"]

    cache = pz.StateVariable({"last": jnp.zeros(2), "count": jnp.asarray(0)}, label="cache")
    jitted = Jitted(Keeps(cache))
    for step in range(3):
        np.testing.assert_array_equal(jitted(jnp.full(2, 5.0)), jnp.full(2, 5.0 + step))
    assert int(cache.value["count"]) == 3
    np.testing.assert_array_equal(cache.value["last"], jnp.full(2, 5.0))


def test_which_variables_are_reassigned_may_depend_on_the_argument(small):
    @pz.pytree_dataclass
    class OnlyLong(pz.nn.Layer):
        counters: list

        def __call__(self, value, /, **side_inputs):
            changed = self.counters[len(value) % 2]
            changed.value = changed.value + 1
            return value

    counters = [pz.StateVariable(jnp.asarray(0), label=str(index)) for index in range(2)]
    jitted = Jitted(OnlyLong(counters))
    for length in (1, 2, 1, 1):
        jitted(jnp.ones(length))
    assert [int(counter.value) for counter in counters] == [1, 3]


def test_state_is_untouched_by_a_call_that_fails(small):
    count = small.counter()

    @pz.pytree_dataclass
    class Fails(pz.nn.Layer):
        def __call__(self, value, /, **side_inputs):
            raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        Jitted(pz.nn.Sequential([count, Fails()]))(jnp.ones(()))
    assert float(count.count.value) == 0
    assert float(Jitted(count)(jnp.ones(()))) == 2


def test_a_layer_may_call_itself():
    @pz.pytree_dataclass
    class Twice(pz.nn.Layer):
        def __call__(self, value, /, again=None, **side_inputs):
            if value.shape[0] == 1:
                return value
            return jitted(value[:-1]).sum() + value

    jitted = Jitted(Twice())
    np.testing.assert_array_equal(jitted(jnp.ones(2)), jnp.full(2, 2.0))


def test_two_variables_with_one_label_are_refused(small):
    first, second = small.counter("same"), small.counter("same")
    with pytest.raises(VariableConflictError, match=r"two different StateVariable .* 'same'"):
        Jitted(pz.nn.Sequential([first, second]))(jnp.ones(()))
    with pytest.raises(VariableConflictError, match=r"two different StateVariable .* 'same'"):
        Jitted(first)(jnp.ones(()), other=second.count)


def test_a_shared_variable_counts_once(small):
    count = small.counter()
    jitted = Jitted(pz.nn.Sequential([count, count]))
    assert float(jitted(jnp.asarray(0.0))) == 3
    assert float(count.count.value) == 2


def test_returned_variables_are_refused(small):
    @pz.pytree_dataclass
    class Leaks(pz.nn.Layer):
        weight: pz.Parameter

        def __call__(self, value, /, **side_inputs):
            return {"w": self.weight}

    layer = Jitted(Leaks(pz.Parameter(value=jnp.ones(()), label="w")))
    with pytest.raises(ValueError, match=r"inside Jitted returned .*\['w'\]: Parameter 'w'"):
        layer(jnp.ones(()))


def test_out_shardings_hold_and_explicit_ones_mean_the_auto_twin(small):
    for mesh in (small.AUTO, small.EXPLICIT):
        sharding = NamedSharding(mesh, PartitionSpec("data", "model"))
        output = Jitted(small.mlp(), out_shardings=sharding)(small.features()).data_array
        assert output.sharding == NamedSharding(small.AUTO, PartitionSpec("data", "model"))
        assert output.sharding.shard_shape(output.shape) == (2, 2)


def test_trees_of_named_shardings_are_shared_by_equality(small, traced):
    layer, count = traced
    for _ in range(2):
        sharding = name_to_name_sharding(small.features(), small.EXPLICIT, {"batch": "data"})
        jitted = Jitted(layer, in_shardings=sharding, out_shardings=sharding)
        assert jitted(small.features()).data_array.sharding.shard_shape((8, 8)) == (2, 8)
    assert count() == 1


def test_inside_shard_map(small):
    jitted = Jitted(Scale(pz.Parameter(value=jnp.asarray(3.0), label="w")))
    split = PartitionSpec("data")
    mapped = jax.shard_map(
        lambda part: jitted(part), mesh=small.AUTO, in_specs=split, out_specs=split
    )
    np.testing.assert_array_equal(jax.jit(mapped)(jnp.arange(8.0)), 3 * jnp.arange(8.0))


def test_in_shardings_place_the_argument(small):
    for mesh in (small.AUTO, small.EXPLICIT):
        sharding = NamedSharding(mesh, PartitionSpec("data"))
        output = Jitted(pz.nn.Identity(), in_shardings=sharding)(small.features()).data_array
        assert output.sharding.shard_shape(output.shape) == (2, 8)


def test_a_donated_argument_is_gone(small):
    argument = small.features()
    Jitted(pz.nn.Elementwise(jnp.sin), donate_argument=True)(argument)
    assert argument.data_array.is_deleted()
    kept = small.features()
    Jitted(pz.nn.Elementwise(jnp.sin))(kept)
    assert not kept.data_array.is_deleted()


def live_buffers():
    """The size of each buffer on any device, those of arrays that other tests left included."""
    shards = (shard for array in jax.live_arrays() for shard in array.addressable_shards)
    return {shard.data.unsafe_buffer_pointer(): shard.data.nbytes for shard in shards}


def test_a_forward_call_makes_buffers_for_its_output_alone(small):
    jitted, argument = Jitted(small.mlp()), small.features()
    jitted(argument)
    gc.collect()
    before = live_buffers()
    output = jitted(argument)
    after = live_buffers()
    new = after.keys() - before.keys()
    assert sum(after[pointer] for pointer in new) == output.data_array.nbytes


def count_calls(call):
    count = 0

    def profile(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def test_calls_per_forward_do_not_grow_with_depth(small):
    def calls(depth):
        layers = [
            pz.nn.Sequential([Scale(pz.Parameter(value=named(1.0), label=str(index)))])
            for index in range(depth)
        ]
        jitted, argument = Jitted(pz.nn.Sequential(layers)), named(1.0)
        jitted(argument)
        return count_calls(lambda: jitted(argument))

    assert calls(3) == calls(30) < 60


def test_nothing_is_kept_alive_with_the_layer_gone(small):
    model = small.mlp()
    jitted = Jitted(model)
    jitted(small.features())
    variables = pz.unbind_variables(model)[1]
    watched = [weakref.ref(model), weakref.ref(jitted)]
    watched += [weakref.ref(variable) for variable in variables]
    watched += [weakref.ref(variable.value.data_array) for variable in variables]
    del model, jitted, variables
    gc.collect()
    assert [reference() for reference in watched] == [None] * len(watched)


def test_a_replaced_value_is_not_kept_alive(small):
    model = small.mlp()
    jitted = Jitted(model)
    jitted(small.features())
    parameter = pz.unbind_variables(model)[1][0]
    old = weakref.ref(parameter.value.data_array)
    parameter.value = jax.tree_util.tree_map(jnp.zeros_like, parameter.value)
    gc.collect()
    assert old() is None
    assert jitted(small.features()) is not None


def test_a_removed_sublayer_is_let_go_by_the_next_call(small):
    model = small.counting_mlp()
    jitted = Jitted(model)
    jitted(small.features())
    variable = weakref.ref(model.sublayers[-1].count)
    layer = weakref.ref(model.sublayers.pop())
    jitted(small.features())
    assert layer() is variable() is None


def test_a_collection_between_calls_does_not_compile_again(traced):
    layer, count = traced
    jitted = Jitted(layer)
    for _ in range(3):
        jitted(jnp.ones(()))
        gc.collect()
    assert count() == 1


def test_instances_made_from_equal_structure_after_a_call_do_not_compile(traced):
    layer, count = traced
    jitted = Jitted(layer)
    jitted(jnp.ones(()))
    for _ in range(3):
        jitted = jax.tree_util.tree_map(lambda leaf: leaf, jitted)
        jitted(jnp.ones(()))
    assert count() == 1


def test_tracers_are_not_kept(small):
    model = Jitted(small.mlp())
    with jax.checking_leaks():
        jax.jit(lambda value: model(value))(small.features())
        unbound, parameters = pz.unbind_params(model, freeze=True)
        jax.grad(
            lambda values: (
                pz.bind_variables(unbound, values)(small.features())
                .sum()
                .unwrap("batch", "features")
                .sum()
            )
        )(parameters)


def test_pickles_without_what_it_read(small):
    jitted = Jitted(pz.nn.Identity())
    jitted(jnp.ones(()))
    duplicate = pickle.loads(pickle.dumps(jitted))
    assert duplicate == jitted
    assert vars(duplicate).keys() == {"body", "in_shardings", "out_shardings", "donate_argument"}


def test_static_fields_that_cannot_be_compared_still_work():
    @pz.pytree_dataclass
    class Table(pz.nn.Layer):
        table: object = dataclasses.field(metadata={"pytree_node": False})

        def __call__(self, value, /, **side_inputs):
            return value + self.table

    for offset in (1.0, 2.0):
        jitted = Jitted(Table(np.full(3, offset)))
        for _ in range(2):
            np.testing.assert_array_equal(jitted(jnp.zeros(3)), np.full(3, offset))


def test_array_in_metadata_is_not_kept_by_what_was_compiled():
    array = jnp.arange(3.0)
    watched = weakref.ref(array)
    weight = pz.Parameter(value=named(2.0), label="w", metadata={"mask": array})
    jitted = Jitted(Scale(weight))
    assert float(jitted(named(1.0)).unwrap()) == 2
    del array, weight, jitted
    gc.collect()
    assert watched() is None


def test_works_with_jit_switched_off(small):
    jitted, bare = Jitted(small.counting_mlp()), small.counting_mlp()
    with jax.disable_jit():
        output = jitted(small.features())
    expected = bare(small.features())
    np.testing.assert_allclose(output.data_array, expected.data_array, rtol=2e-5, atol=2e-5)


def test_keeps_the_last_structures_only():
    clear_compiled_structures()
    for depth in range(compiled_structure.MOST_STRUCTURES_KEPT + 5):
        compiled_structure.compiled_structure(structure_of(pz.nn.Identity(), depth))
    assert (
        compiled_structure._shared.cache_info().currsize == compiled_structure.MOST_STRUCTURES_KEPT
    )
    clear_compiled_structures()
    assert compiled_structure._shared.cache_info().currsize == 0


def structure_of(model, depth):
    return ModelReading(pz.nn.Sequential([model] * depth)).compiled.structure
