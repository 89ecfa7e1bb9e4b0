import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import treescope
from jax.sharding import NamedSharding, PartitionSpec
from penzai import pz

from penzai_shard.errors import ShardingError
from penzai_shard.meshes import auto_twin
from penzai_shard.training import TrainState, build_train_step_fn


def initial(model, optimizer=None, **kwargs):
    return TrainState.initial_state(
        model, optimizer or optax.adam(1e-2), jax.random.key(3), **kwargs
    )


def test_state_is_a_pytree_with_the_fields_as_keys(make_model):
    flat, treedef = jax.tree_util.tree_flatten_with_path(initial(make_model()))
    assert {str(path[0]) for path, _ in flat} == {".step", ".params", ".opt_state", ".root_rng"}
    again = jax.tree.unflatten(treedef, [leaf for _, leaf in flat])
    assert jax.tree.structure(again) == treedef
    assert isinstance(again, TrainState)


def test_params_are_the_model_s_by_name(make_model):
    model = make_model()
    state = initial(model)
    _, parameters = pz.unbind_params(model)
    assert set(state.params) == {p.label for p in parameters}
    assert all(state.params[p.label].data_array is p.value.data_array for p in parameters)
    assert int(state.step) == 0
    assert state.step.dtype == jnp.int32


def test_model_is_fresh_and_computes_the_same(make_model, batch):
    model = make_model()
    model.sublayers[0].sublayers[0].weights.metadata["note"] = "kept"
    state = initial(model)
    bound = state.model
    assert isinstance(bound.sublayers[0].sublayers[0].weights, pz.Parameter)
    assert bound.sublayers[0].sublayers[0].weights is not model.sublayers[0].sublayers[0].weights
    assert bound.sublayers[0].sublayers[0].weights.metadata == {"note": "kept"}
    assert jax.tree.structure(pz.freeze_variables(bound)) == jax.tree.structure(
        pz.freeze_variables(model)
    )
    np.testing.assert_array_equal(bound(batch["x"]).data_array, model(batch["x"]).data_array)
    bound.sublayers[0].sublayers[0].weights.value = pz.nx.wrap(jnp.zeros(3), "other")
    assert "other" not in state.params["mlp/Affine_0/Linear.weights"].named_shape


def test_shared_parameter_stays_shared():
    shared = pz.Parameter(value=pz.nx.ones({"a": 2}), label="shared")
    state = initial([shared, {"again": shared}])
    assert list(state.params) == ["shared"]
    bound = state.model
    assert bound[0] is bound[1]["again"]


def test_two_parameters_of_one_name_are_refused():
    def parameter():
        return pz.Parameter(value=pz.nx.ones({"a": 2}), label="w")

    with pytest.raises(ShardingError, match="another variable of the model is named 'w' too"):
        initial([parameter(), parameter()])


def test_unbound_model_is_refused(make_model):
    unbound, _ = pz.unbind_params(make_model())
    with pytest.raises(ShardingError, match="ParameterSlot has no value") as caught:
        initial(unbound)
    assert len(caught.value.problems) == 4


def test_frozen_parameters_have_no_optimizer_state(make_model):
    model = make_model()
    model.sublayers[0].sublayers[0].weights.metadata["trainable"] = False
    state = initial(model)
    assert "mlp/Affine_0/Linear.weights" in state.params
    assert "mlp/Affine_0/Linear.weights" not in state.opt_state[0].mu
    assert len(state.opt_state[0].mu) == 3


def test_predicate_overrides_metadata(make_model):
    state = initial(make_model(), trainable=lambda p: p.label.endswith("weights"))
    assert sorted(state.opt_state[0].mu) == sorted(n for n in state.params if "weights" in n)
    assert len(state.opt_state[0].mu) == 2


def test_trainable_integer_parameter_is_refused():
    model = [pz.Parameter(value=pz.nx.wrap(jnp.arange(3), "a"), label="table")]
    with pytest.raises(ShardingError, match="table: a trainable parameter must be floating"):
        initial(model)
    assert not initial(model, trainable=lambda p: False).opt_state[0].mu


def test_state_variables_are_keyed_by_label_or_path():
    model = {
        "auto": pz.StateVariable(value=jnp.zeros(2)),
        "named": pz.StateVariable(value=jnp.ones(()), label="count", metadata={"a": 1}),
    }
    state = initial(model)
    assert sorted(state.state_vars) == ["auto", "count"]
    bound = state.model
    assert bound["auto"].label == model["auto"].label
    assert bound["named"].metadata == {"a": 1}
    twin = {
        "auto": pz.StateVariable(value=jnp.zeros(2)),
        "named": pz.StateVariable(value=jnp.ones(()), label="count", metadata={"a": 1}),
    }
    opt = state.optimizer_def
    assert jax.tree.structure(initial(twin, opt)) == jax.tree.structure(state)


def test_tree_of_weights_is_keyed_by_path():
    weights = {"layers": [{"w": jnp.ones((2, 3))}], "steps_seen": jnp.zeros((), jnp.int32)}
    state = initial(weights)
    assert list(state.params) == ["layers/0/w", "steps_seen"]
    assert list(state.opt_state[0].mu) == ["layers/0/w"]
    assert jax.tree.structure(state.model) == jax.tree.structure(weights)


def test_v1_model_splits_and_binds():
    from penzai.deprecated.v1 import pz as pz_v1

    definition = pz_v1.nn.Affine.from_config({"features": 4}, {"features_out": 2})
    model = pz_v1.nn.initialize_parameters(definition, jax.random.key(0))
    state = initial(model)
    assert sorted(state.params) == sorted(
        p.name for p in pz_v1.select(model).at_instances_of(pz_v1.nn.Parameter).get_sequence()
    )
    assert jax.tree.structure(state.model) == jax.tree.structure(model)
    with pytest.raises(ShardingError, match="initialise its parameters first"):
        initial(definition)


def test_eval_shape_gives_the_same_structure(make_model):
    optimizer = optax.adam(1e-2)

    def build():
        return initial(make_model(), optimizer)

    abstract = jax.eval_shape(build)
    assert jax.tree.structure(abstract) == jax.tree.structure(build())
    assert isinstance(
        abstract.params["mlp/Affine_0/Linear.weights"].data_array, jax.ShapeDtypeStruct
    )


def test_abstract_model_gives_an_abstract_state(make_model):
    frozen = pz.freeze_variables(jax.eval_shape(lambda: pz.freeze_variables(make_model())))
    state = initial(frozen)
    assert {type(leaf) for leaf in jax.tree.leaves(state)} == {jax.ShapeDtypeStruct}


def test_replace_works_like_on_any_dataclass(make_model):
    state = dataclasses.replace(initial(make_model()), step=jnp.asarray(7))
    assert int(state.step) == 7


def test_unknown_attribute_is_an_attribute_error(make_model):
    with pytest.raises(AttributeError, match="nonsense"):
        initial(make_model()).nonsense


def test_state_of_a_sharded_model_has_nothing_on_one_device(make_model, mesh):
    model = make_model()
    for parameter in pz.unbind_params(model)[1]:
        names = tuple(parameter.value.named_axes)
        spec = PartitionSpec(*("model" if name == "features_out" else None for name in names))
        parameter.value = jax.device_put(parameter.value, NamedSharding(mesh, spec))
    state = initial(model, loss_fn_state={"seen": 0})
    for leaf in jax.tree.leaves(state):
        assert leaf.sharding.device_set == set(mesh.devices.flat)
        assert leaf.committed
    for name, value in state.params.items():
        for moment in (state.opt_state[0].mu[name], state.opt_state[0].nu[name]):
            assert moment.data_array.sharding == value.data_array.sharding
    assert state.opt_state[0].count.sharding == NamedSharding(mesh, PartitionSpec())
    assert state.root_rng.sharding == NamedSharding(mesh, PartitionSpec())


def test_explicit_arrays_come_onto_the_auto_twin(explicit_mesh):
    layout = NamedSharding(explicit_mesh, PartitionSpec("data", None))
    state = initial({"w": jax.device_put(jnp.ones((8, 4)), layout)})
    twin = auto_twin(explicit_mesh)
    assert state.params["w"].sharding == NamedSharding(twin, PartitionSpec("data"))
    assert state.opt_state[0].mu["w"].sharding == NamedSharding(twin, PartitionSpec("data"))


def test_positional_layouts_are_carried_over_to_factored_statistics(mesh):
    layout = NamedSharding(mesh, PartitionSpec("data", "model"))
    params = {"w": jax.device_put(jnp.ones((16, 32)), layout)}
    state = initial(params, optax.adafactor(1e-2, min_dim_size_to_factor=8))
    factored = state.opt_state[0]
    assert factored.v_row["w"].sharding.spec == PartitionSpec("data")
    assert factored.v_col["w"].sharding.spec == PartitionSpec("model")


def test_arrays_committed_elsewhere_are_refused(mesh):
    params = {
        "a": jax.device_put(jnp.ones(8), NamedSharding(mesh, PartitionSpec("data"))),
        "b": jax.device_put(jnp.ones(8), jax.devices()[3]),
    }
    with pytest.raises(ShardingError, match="params/b: is on device 3"):
        initial(params)


def test_state_is_shown_by_treescope_before_and_after_a_step(make_model, loss_fn, batch):
    state, _ = build_train_step_fn(loss_fn)(initial(make_model()), **batch)
    for shown in (state, initial(make_model())):
        assert "opt_state=" in treescope.render_to_text(shown)
    assert "params" not in state.__dict__
    assert (
        repr(state) == "TrainState(step=1, VariableTable(4 trainable, 0 frozen, 0 state variables))"
    )


def test_selectors_reach_into_a_state(make_model):
    state = initial(make_model())
    zeroed = (
        pz.select(state)
        .at(lambda s: s.params)
        .apply(lambda params: jax.tree.map(jnp.zeros_like, params))
    )
    assert isinstance(zeroed, TrainState)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(zeroed.params))


@pytest.mark.parametrize("donate", [True, False])
def test_a_deep_copy_is_a_state_of_its_own(linear, batch, donate):
    step = build_train_step_fn(linear.loss_fn, donate_params_and_state=donate)
    state = initial({"w": jax.tree.map(jnp.copy, linear.weights["w"])})
    for number in range(3):
        copied = copy.deepcopy(state)
        assert jax.tree.structure(copied) == jax.tree.structure(state)
        state, aux = step(state, **batch)
        again, expected = step(copied, **batch)
        assert float(aux["loss"]) == float(expected["loss"])
        assert int(again.step) == number + 1
    (program,) = step._programs.values()
    assert program.run._cache_size() == 1
