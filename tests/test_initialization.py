"""Building models sharded: values, layouts, sharing, and how many programs are compiled."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from penzai import pz
from penzai.models import simple_mlp

from penzai_shard.errors import MeshError, PlanError, ShardingError
from penzai_shard.meshes import has_explicit_axes, make_mesh
from penzai_shard.placement import abstract_model, initialize_parameters_sharded, sharded_init
from penzai_shard.placement.initializer_splitting import (
    flat_program,
    run_split,
    split_initializer,
)
from penzai_shard.planning import make_plan, name_to_name_sharding
from tests import model_families

RULES = {"embedding": "data", "neurons": "model", "heads": "model", "vocabulary": "model"}
MLP_RULES = {"features": "data", "features_out": "model"}
SHAPES = ({"data": 8, "model": 1}, {"data": 4, "model": 2}, {"data": 2, "model": 4})


@pytest.fixture
def mesh():
    return make_mesh({"data": 4, "model": 2})


def mlp(key, sizes=(8, 8, 8)):
    return simple_mlp.MLP.from_config(name="mlp", init_base_rng=key, feature_sizes=list(sizes))


def transformer(key, *, blocks=2):
    return model_families.transformer(
        "llama",
        key,
        name="model",
        num_kv_heads=4,
        query_head_multiplier=1,
        num_decoder_blocks=blocks,
        vocab_size=32,
    )


def layer_stack(key):
    def build(name, init_base_rng):
        return pz.nn.Affine.from_config(
            name=name,
            init_base_rng=init_base_rng,
            input_axes={"features": 8},
            output_axes={"features_out": 8},
        )

    return pz.nn.LayerStack.from_sublayer_builder(
        build,
        stack_axis="layer",
        stack_axis_size=3,
        init_base_rng=key,
        builder_kwargs={"name": "stacked"},
    )


def parameter(name, key, shape, initializer=jax.random.normal, **axes):
    key = pz.nn.derive_param_key(key, name)
    return pz.Parameter(value=pz.nx.wrap(initializer(key, shape)).tag(*axes), label=name)


def frozen(model):
    return pz.unbind_variables(model, freeze=True)


# Values are the same to the bit.
FEWER_PASSES = {"xla_backend_optimization_level": "1"}


def under_jit(initializer, *args):
    build = jax.jit(lambda *inner: frozen(initializer(*inner)), compiler_options=FEWER_PASSES)
    return build(*args)


@functools.cache
def transformer_under_jit():
    return under_jit(transformer, jax.random.key(7))


def assert_within_one_ulp(got, expected):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        assert one.aval.weak_type == other.aval.weak_type
        if jnp.issubdtype(one.dtype, jnp.floating):
            np.testing.assert_array_max_ulp(np.asarray(one), np.asarray(other), 1)
        elif jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            assert jnp.array_equal(jax.random.key_data(one), jax.random.key_data(other))
        else:
            np.testing.assert_array_equal(one, other)


def split_of(initializer, *args):
    flat = flat_program(jax.make_jaxpr(lambda: frozen(initializer(*args)))())
    return split_initializer(flat, dict.fromkeys(range(len(flat.out_avals))))


def calls_by_program(split):
    calls = collections.defaultdict(list)
    for call in split.calls:
        if call.program.traced.eqns:  # One more makes the literals, for instance epsilons.
            calls[call.program].append(call)
    return list(calls.values())


def call_counts(initializer, *args):
    return sorted(map(len, calls_by_program(split_of(initializer, *args))))


# Values and layouts.


def assert_values_on_meshes(initializer, rules, expected, shapes):
    first = None
    for shape in shapes:
        mesh = make_mesh(shape)
        model = sharded_init(
            initializer, jax.random.key(7), mesh=mesh, axis_name_to_mesh_name=rules
        )
        got = frozen(model)
        assert jax.tree.structure(got) == jax.tree.structure(expected)
        assert_within_one_ulp(got, expected)
        first = first or got
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(first), strict=True):
            np.testing.assert_array_equal(one, other)
        wanted = name_to_name_sharding(got[1], mesh, rules)
        assert [x.sharding for x in jax.tree.leaves(got[1])] == jax.tree.leaves(wanted)


@pytest.mark.parametrize(
    "initializer",
    [functools.partial(mlp, sizes=(8, 16, 16, 8)), layer_stack],
    ids=["mlp", "layer_stack"],
)
def test_values_are_those_under_jit_and_the_same_on_every_mesh(initializer):
    expected = under_jit(initializer, jax.random.key(7))
    assert_values_on_meshes(initializer, MLP_RULES, expected, SHAPES)


def test_constants_are_replicated(mesh):
    model = sharded_init(transformer, jax.random.key(0), mesh=mesh, axis_name_to_mesh_name=RULES)
    constants = jax.tree.leaves(frozen(model)[0])
    assert len(constants) == 9
    for constant in constants:
        assert constant.sharding == NamedSharding(mesh, PartitionSpec())


@pytest.mark.parametrize("number", [1.5, 2, True, np.float32(1.5), jnp.bfloat16(2)])
def test_numbers_keep_their_type_also_a_weak_one(mesh, number):
    expected = jax.jit(lambda: number)()
    built = sharded_init(lambda: number, mesh=mesh)
    assert built == expected
    for array in (built.aval, abstract_model(lambda: number)):
        assert array.weak_type == expected.aval.weak_type
        assert array.dtype == expected.dtype


def test_initialized_model_runs(mesh):
    model = sharded_init(mlp, jax.random.key(0), mesh=mesh, axis_name_to_mesh_name=MLP_RULES)
    x = pz.nx.ones({"batch": 8, "features": 8})
    expected = mlp(jax.random.key(0))(x).unwrap("batch", "features")
    np.testing.assert_allclose(model(x).unwrap("batch", "features"), expected, rtol=1e-5)


@pytest.mark.parametrize("implementation", ["rbg", "unsafe_rbg"])
def test_other_random_generators_give_the_same_on_every_mesh(implementation):
    key = jax.random.key(3, impl=implementation)
    expected = under_jit(mlp, key)
    for shape in SHAPES[1:]:
        rules = {"features_out": "model"}
        model = sharded_init(mlp, key, mesh=make_mesh(shape), axis_name_to_mesh_name=rules)
        assert_within_one_ulp(frozen(model), expected)


def test_raw_keys_work(mesh):
    key = jax.random.PRNGKey(3)
    model = sharded_init(mlp, key, mesh=mesh, axis_name_to_mesh_name=MLP_RULES)
    assert_within_one_ulp(frozen(model), under_jit(mlp, key))


def test_sums_of_floats_give_the_same_on_every_mesh():
    def normalized(key, shape):
        weights = jax.random.normal(key, shape)
        return weights / jnp.linalg.norm(weights, axis=0)

    def initializer(key):
        return parameter("w", key, (64, 8), normalized, a=None, b=None)

    (expected,) = jax.tree.leaves(under_jit(initializer, jax.random.key(0)))
    found = []
    for shape in SHAPES:
        rules = {"a": "data", "b": "model"}
        built = sharded_init(
            initializer,
            jax.random.key(0),
            mesh=make_mesh(shape),
            axis_name_to_mesh_name=rules,
        ).value.data_array
        assert built.sharding.spec == PartitionSpec("data", "model")
        np.testing.assert_array_max_ulp(built, expected, maxulp=4)
        found.append(np.asarray(built))
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)


def test_outputs_that_are_keys_integers_booleans_or_empty(mesh):
    def initializer(key):
        return {
            "key": jax.random.fold_in(key, 1),
            "keys": jax.random.split(key, 4),
            "raw": jax.random.PRNGKey(2),
            "order": jax.random.permutation(key, 8),
            "mask": jnp.tril(jnp.ones((4, 4), bool)),
            "empty": pz.nx.zeros({"a": 0, "b": 4}),
            "half": pz.nx.ones({"b": 4}).astype(jnp.bfloat16),
        }

    rules = {"a": "data", "b": "model"}
    built = sharded_init(
        initializer, jax.random.key(0), mesh=mesh, rules=rules, on_unnamed="replicate"
    )
    expected = jax.jit(initializer)(jax.random.key(0))
    assert jax.tree.structure(built) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(built), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_array_equal(one, other)
    # JAX itself writes the spec of an array of keys with one entry for each dimension.
    assert built["keys"].sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec()), 1)
    assert built["empty"].data_array.sharding.spec == PartitionSpec("data", "model")


def test_views_lie_by_their_names(mesh):
    def initializer():
        return pz.nx.ones({"a": 8, "b": 4}).untag("b")

    built = sharded_init(initializer, mesh=mesh, axis_name_to_mesh_name={"a": "data"})
    assert built.data_array.sharding.shard_shape(built.data_array.shape) in [(2, 4), (4, 2)]
    np.testing.assert_array_equal(built.data_array, np.ones(built.data_array.shape))


# Variables.


def test_shared_variables_stay_shared_and_metadata_is_kept(mesh):
    def initializer(key):
        shared = parameter("shared", key, (8, 4), a=None, b=None)
        shared.metadata["note"] = "tied"
        return [shared, {"again": shared}, parameter("own", key, (8,), a=None)]

    built = sharded_init(
        initializer, jax.random.key(0), mesh=mesh, axis_name_to_mesh_name={"a": "data"}
    )
    assert built[0] is built[1]["again"]
    assert built[0].metadata == {"note": "tied"}
    assert isinstance(built[2], pz.Parameter)


def test_state_variables_are_new_and_have_labels_of_their_own(mesh):
    def initializer():
        return [
            pz.StateVariable(value=pz.nx.zeros({"a": 8}), metadata={"m": 1}),
            pz.StateVariable(value=jnp.zeros((), jnp.int32), label="count"),
        ]

    rules = {"a": "data"}
    built = [sharded_init(initializer, mesh=mesh, axis_name_to_mesh_name=rules) for _ in range(2)]
    automatic = [model[0] for model in built]
    assert automatic[0].label != automatic[1].label
    assert automatic[0].metadata == {"m": 1}
    assert automatic[0].value.data_array.sharding.spec == PartitionSpec("data")
    assert built[0][1].label == "count"
    pz.unbind_variables(automatic)  # would raise on a conflict
    automatic[0].value = automatic[0].value + 1
    assert float(automatic[1].value.unwrap("a").sum()) == 0


def test_an_array_returned_twice_has_two_buffers(mesh):
    def initializer(key):
        weights = pz.nx.wrap(jax.random.normal(key, (512, 256))).tag("a", "b")
        return [weights, weights, jnp.ones(3), jnp.ones(3), 1.0, 1.0]

    built = sharded_init(
        initializer, jax.random.key(0), mesh=mesh, rules={"a": "data"}, on_unnamed="replicate"
    )
    pointers = [
        array.addressable_shards[0].data.unsafe_buffer_pointer() for array in jax.tree.leaves(built)
    ]
    assert len(set(pointers)) == len(pointers)


@pytest.mark.parametrize("placed", [False, True])
def test_an_argument_that_is_returned_survives_donation_of_the_result(mesh, placed):
    kept = jnp.ones((8,))
    if placed:
        kept = jax.device_put(kept, NamedSharding(mesh, PartitionSpec()))
    array = sharded_init(lambda array: array, kept, mesh=mesh, on_unnamed="replicate")
    jax.jit(lambda x: x + 1, donate_argnums=0)(array).block_until_ready()
    np.testing.assert_array_equal(kept, np.ones(8))


def test_all_arrays_of_a_model_without_variables_are_abstract():
    model = abstract_model(lambda: {"layer": [jnp.ones((8, 4)), 2], "name": "mlp"})
    assert jax.tree.map(lambda leaf: getattr(leaf, "shape", leaf), model) == {
        "layer": [(8, 4), ()],
        "name": "mlp",
    }
    assert isinstance(model["layer"][0], jax.ShapeDtypeStruct)


# What initialisers may do.


def test_arguments_of_every_kind_are_passed_on(mesh):
    def initializer(table, config, *, key, scale):
        assert config is options
        return {
            "table": pz.nx.wrap(table).tag("a", "b"),
            "scaled": pz.nx.wrap(table * scale).tag("a", "b"),
            "noise": pz.nx.wrap(jax.random.normal(key, table.shape)).tag("a", "b"),
        }

    options = object()
    table = np.arange(32, dtype=np.float32).reshape(8, 4)
    built = sharded_init(
        initializer,
        table,
        options,
        key=jax.random.key(0),
        scale=3,
        mesh=mesh,
        axis_name_to_mesh_name={"a": "data", "b": "model"},
    )
    np.testing.assert_array_equal(built["table"].data_array, table)
    np.testing.assert_array_equal(built["scaled"].data_array, table * 3)
    for array in jax.tree.leaves(built):
        assert array.sharding.spec == PartitionSpec("data", "model")


def test_committed_arguments_may_lie_on_one_device(mesh):
    table = jax.device_put(jnp.ones((8, 4)), jax.devices()[3])
    built = sharded_init(
        lambda x: pz.nx.wrap(x + 1).tag("a", "b"),
        table,
        mesh=mesh,
        axis_name_to_mesh_name={"a": "data"},
    )
    np.testing.assert_array_equal(built.data_array, np.full((8, 4), 2.0))


def test_effects_happen_once(mesh, capfd):
    def initializer(key):
        weights = jax.random.uniform(key, (512, 256))
        jax.debug.print("first {}", weights.shape[0])
        jax.debug.print("one {}", jnp.isfinite(weights[0, 0]))
        small = jax.random.uniform(jax.random.fold_in(key, 1), (8,))
        jax.debug.print("small {}", jnp.isfinite(small.sum()))
        return [pz.nx.wrap(weights).tag("a", "b"), pz.nx.wrap(small).tag("a")]

    expected = jax.jit(initializer)(jax.random.key(0))
    jax.effects_barrier()
    capfd.readouterr()
    built = sharded_init(
        initializer, jax.random.key(0), mesh=mesh, axis_name_to_mesh_name={"a": "data"}
    )
    jax.effects_barrier()
    printed = capfd.readouterr().out
    assert [printed.count(word) for word in ("first 512", "one True", "small True")] == [1, 1, 1]
    assert_within_one_ulp(built, expected)
    assert built[0].data_array.sharding.spec == PartitionSpec("data")


def test_results_of_effects_reach_the_outputs(mesh):
    calls = []

    def read():
        calls.append(1)
        return np.float32(5)

    def initializer():
        value = jax.experimental.io_callback(read, jax.ShapeDtypeStruct((), jnp.float32))
        return [pz.nx.wrap(jnp.ones(8) * value).tag("a"), pz.nx.wrap(jnp.zeros(8) + value).tag("a")]

    built = sharded_init(initializer, mesh=mesh, axis_name_to_mesh_name={"a": "data"})
    np.testing.assert_array_equal(built[0].data_array, np.full(8, 5.0))
    np.testing.assert_array_equal(built[1].data_array, np.full(8, 5.0))
    assert len(calls) == 1


@pytest.mark.parametrize("size", [8, 320])
def test_factorisation_shared_by_two_outputs_is_computed_once(mesh, size):
    def initializer(key):
        q, r = jnp.linalg.qr(jax.random.normal(key, (size, size)))
        return [pz.nx.wrap(q).tag("a", "b"), pz.nx.wrap(r).tag("a", "b")]

    split = split_of(initializer, jax.random.key(0))
    factorisations = [call for call in split.calls if "qr" in str(call.program.traced)]
    assert len(factorisations) == 1
    built = sharded_init(
        initializer, jax.random.key(0), mesh=mesh, axis_name_to_mesh_name={"a": "data"}
    )
    expected = jax.jit(initializer)(jax.random.key(0))
    for one, other in zip(jax.tree.leaves(built), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
        assert one.sharding.spec == PartitionSpec("data")


# How many programs are compiled.


def test_parameters_that_differ_only_in_their_key_share_a_program():
    counts = {
        blocks: call_counts(functools.partial(transformer, blocks=blocks), jax.random.key(0))
        for blocks in (1, 2, 3)
    }
    # Embedding, norms, query/key/value, output, gate/value, down, head.
    assert counts[1] == [1, 1, 1, 1, 2, 3, 3]
    assert counts[2] == [1, 1, 2, 2, 4, 5, 6]
    assert counts[3] == [1, 1, 3, 3, 6, 7, 9]


def test_one_program_is_compiled_per_group(mesh):
    compilations = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compilations.append(event)

    key = jax.random.key(0)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for blocks in (2, 4):
            compilations.clear()
            build = functools.partial(transformer, blocks=blocks)
            sharded_init(build, key, mesh=mesh, axis_name_to_mesh_name=RULES)
            # One more makes the literals, for instance epsilons.
            assert len(compilations) == 7 + 1
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_chains_of_split_keys_share_programs(make_key):
    def initializer(key):
        weights = []
        for _ in range(12):
            key, own = jax.random.split(key)
            weights.append(jax.random.normal(own, (16,)))
        return weights

    split = split_of(initializer, make_key(0))
    assert len(calls_by_program(split)) <= 6
    assert_within_one_ulp(list(run_split(split).values()), initializer(make_key(0)))


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
@pytest.mark.parametrize("count", [12, 70])  # Few keys, and more than are cheap to repeat.
def test_keys_taken_from_one_split_share_a_program(make_key, count):
    def initializer(key):
        return [jax.random.normal(own, (16,)) for own in jax.random.split(key, count)]

    split = split_of(initializer, make_key(0))
    assert max(map(len, calls_by_program(split))) == count
    assert len(calls_by_program(split)) <= 2
    assert_within_one_ulp(list(run_split(split).values()), initializer(make_key(0)))


def test_keys_unstacked_from_one_split_share_a_program():
    def initializer(key):
        keys = jnp.unstack(jax.random.split(key, 12))
        return [jax.random.normal(own, (16,)) for own in keys]

    split = split_of(initializer, jax.random.PRNGKey(0))
    assert max(map(len, calls_by_program(split))) == 12
    assert_within_one_ulp(list(run_split(split).values()), initializer(jax.random.PRNGKey(0)))


def test_float_literals_that_differ_are_kept_apart():
    def initializer(key):
        return [jax.random.normal(key, (8,)) * scale for scale in (1.0, 2.0, 2.0, -0.0, 0.0)]

    split = split_of(initializer, jax.random.key(0))
    counts = [len(calls) for calls in calls_by_program(split) if calls[0].results[0] in range(5)]
    assert sorted(counts) == [1, 1, 1, 2]


def test_large_work_shared_by_outputs_is_done_once_per_use():
    def initializer(key):
        result = []
        for index in range(3):
            weights = jax.random.normal(jax.random.fold_in(key, index), (3, 256, 256))
            result += list(weights)
        return result

    split = split_of(initializer, jax.random.key(0))
    (calls,) = calls_by_program(split)
    assert [len(call.results) for call in calls] == [3, 3, 3]
    assert_within_one_ulp(list(run_split(split).values()), jax.jit(initializer)(jax.random.key(0)))


def test_only_wanted_outputs_are_computed():
    traced = jax.make_jaxpr(lambda: (jnp.ones(3) * 2, jax.random.normal(jax.random.key(0), (3,))))()
    split = split_initializer(flat_program(traced), {0: None})
    assert list(run_split(split)) == [0]
    assert "random" not in "".join(str(call.program.traced) for call in split.calls)


# Meshes.


def test_mesh_with_explicit_axes_is_treated_as_its_auto_twin(mesh):
    explicit = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    rules = {"axis_name_to_mesh_name": MLP_RULES}
    expected = sharded_init(mlp, jax.random.key(0), mesh=mesh, **rules)
    outside = sharded_init(mlp, jax.random.key(0), mesh=explicit, **rules)
    with jax.set_mesh(explicit):
        inside = sharded_init(mlp, jax.random.key(0), mesh=explicit, **rules)
        abstract = abstract_model(mlp, jax.random.key(0))
    for model in (outside, inside):
        for one, other in zip(
            jax.tree.leaves(frozen(model)), jax.tree.leaves(frozen(expected)), strict=True
        ):
            assert one.sharding == other.sharding
            assert not has_explicit_axes(one.sharding.mesh)
            np.testing.assert_array_equal(one, other)
    assert make_plan(abstract, explicit, MLP_RULES).leaves


def test_rules_that_cannot_be_kept_are_refused_before_anything_is_computed(mesh):
    ran = []

    def initializer(key):
        jax.debug.callback(lambda: ran.append(1))
        return mlp(key, sizes=(6, 4))

    with pytest.raises(
        PlanError,
        match=r"mlp.*weights: logical axis 'features' \(6\) does not divide over mesh axis 'data'",
    ):
        sharded_init(initializer, jax.random.key(0), mesh=mesh, axis_name_to_mesh_name=MLP_RULES)
    jax.effects_barrier()
    assert ran == []


def test_unknown_mesh_axis_is_refused(mesh):
    with pytest.raises(MeshError, match="'tensor'"):
        sharded_init(
            mlp, jax.random.key(0), mesh=mesh, axis_name_to_mesh_name={"features": "tensor"}
        )


def test_mesh_without_devices_is_refused():
    abstract = AbstractMesh((4, 2), ("data", "model"))
    with pytest.raises(MeshError, match="it has no devices"):
        sharded_init(mlp, jax.random.key(0), mesh=abstract)


# The first API of Penzai.


def v1_model():
    from penzai.deprecated.v1 import pz as v1
    from penzai.deprecated.v1.example_models import simple_mlp as v1_simple_mlp

    return v1, v1_simple_mlp.MLP.from_config([8, 8, 4])


def test_first_api_parameters_are_those_of_initialize_parameters(mesh):
    v1, model_def = v1_model()
    key = jax.random.key(0)
    model = initialize_parameters_sharded(model_def, key, mesh, MLP_RULES)
    expected = jax.jit(v1.nn.initialize_parameters)(model_def, key)
    assert jax.tree.structure(model) == jax.tree.structure(expected)
    assert_within_one_ulp(model, expected)
    wanted = name_to_name_sharding(expected, mesh, MLP_RULES)
    assert [x.sharding for x in jax.tree.leaves(model)] == jax.tree.leaves(wanted)


def test_first_api_rules_that_cannot_be_kept_are_refused(mesh):
    _, model_def = v1_model()
    with pytest.raises(PlanError, match="'features_out'"):
        initialize_parameters_sharded(
            model_def, jax.random.key(0), mesh, {"features_out": ("data", "model")}
        )


# Abstract models.


def test_abstract_model_plans_as_the_model_does(mesh):
    plan = make_plan(abstract_model(mlp, jax.random.key(0)), mesh, MLP_RULES)
    expected = make_plan(mlp(jax.random.key(0)), mesh, MLP_RULES)
    assert [(x.path, x.spec, x.shape) for x in plan.leaves] == [
        (x.path, x.spec, x.shape) for x in expected.leaves
    ]


def test_abstract_model_runs_with_the_values_put_in(mesh):
    model = abstract_model(mlp, jax.random.key(0))
    values = {value.label: value for value in frozen(mlp(jax.random.key(0)))[1]}
    filled = pz.select(model).at_instances_of(pz.ParameterValue).apply(lambda p: values[p.label])
    x = pz.nx.ones({"batch": 8, "features": 8})
    np.testing.assert_array_equal(
        filled(x).unwrap("batch", "features"),
        mlp(jax.random.key(0))(x).unwrap("batch", "features"),
    )


def test_abstract_model_has_real_state_and_keeps_sharing():
    def initializer(key):
        shared = parameter("w", key, (8, 4), a=None, b=None)
        state = pz.StateVariable(value=pz.nx.ones({"a": 8}), label="s")
        return [shared, shared, state, {"mask": pz.nx.arange("a", 8), "state": state}]

    model = abstract_model(initializer, jax.random.key(0))
    assert model[0] is model[1]
    assert isinstance(model[0], pz.ParameterValue)
    assert isinstance(model[2], pz.StateVariable)
    assert model[2] is model[3]["state"]
    np.testing.assert_array_equal(model[2].value.data_array, np.ones(8))
    np.testing.assert_array_equal(model[3]["mask"].data_array, np.arange(8))


def test_abstract_model_of_a_layer_stack_takes_no_memory_for_parameters():
    model = abstract_model(layer_stack, jax.random.key(0))
    parameters = pz.select(model).at_instances_of(pz.ParameterValue).get_sequence()
    structs = jax.tree.leaves([p.value for p in parameters])
    assert structs
    assert all(isinstance(struct, jax.ShapeDtypeStruct) for struct in structs)


def test_an_abstract_model_without_a_key_is_refused():
    with pytest.raises(ShardingError, match=r"Linear.weights: its place is empty.*key"):
        abstract_model(
            simple_mlp.MLP.from_config, name="mlp", init_base_rng=None, feature_sizes=[4, 4]
        )


@pytest.mark.usefixtures("compiled_as_by_users")
class TestTransformer:
    """Large enough for the optimised program alone to round within the last place of its parts.

    The last of this file, since every test after it is compiled so.
    """

    def test_values_are_those_under_jit_and_the_same_on_every_mesh(self):
        assert_values_on_meshes(transformer, RULES, transformer_under_jit(), SHAPES[1:])

    def test_initializer_under_jit_is_split_as_well(self, mesh):
        inner = jax.jit(lambda key: frozen(transformer(key)))
        model, values = sharded_init(
            inner, jax.random.key(7), mesh=mesh, axis_name_to_mesh_name=RULES
        )
        assert_within_one_ulp((model, values), transformer_under_jit())
        assert call_counts(inner, jax.random.key(0)) == call_counts(transformer, jax.random.key(0))

    def test_abstract_model_has_structs_for_parameters_and_real_constants(self):
        model = abstract_model(transformer, jax.random.key(0))
        expected = pz.bind_variables(*transformer_under_jit())
        parameters = pz.select(model).at_instances_of(pz.ParameterValue).get_sequence()
        real = pz.select(expected).at_instances_of(pz.ParameterValue).get_sequence()
        assert [p.label for p in parameters] == [p.label for p in real]
        for one, other in zip(parameters, real, strict=True):
            assert isinstance(one.value.data_array, jax.ShapeDtypeStruct)
            assert one.value.named_axes == other.value.named_axes
            assert one.value.data_array.dtype == other.value.data_array.dtype
        constants = [
            leaf for leaf in jax.tree.leaves(model) if not isinstance(leaf, jax.ShapeDtypeStruct)
        ]
        assert len(constants) == 9
        assert all(isinstance(constant, jax.Array) for constant in constants)
