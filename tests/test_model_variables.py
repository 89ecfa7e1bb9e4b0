"""A model's variables: read, thawed, distinguished and looked up, of either of Penzai's APIs."""

import jax
import jax.numpy as jnp
import pytest
from penzai import pz
from penzai.core.variables import AutoStateVarLabel
from penzai.deprecated.v1 import pz as v1

from penzai_shard import model_variables
from penzai_shard.errors import ShardingError
from penzai_shard.model_variables import first_api

VALUE = pz.nx.ones({"a": 2})


def uninitialized():
    return v1.nn.UninitializedParameter(
        initializer=lambda key: VALUE, value_structure=v1.chk.as_array_structure(VALUE), name="w"
    )


def parameters():
    mutable = pz.Parameter(value=VALUE, label="w")
    return {
        "mutable": mutable,
        "frozen": mutable.freeze(),
        "first": v1.nn.Parameter(VALUE, "w"),
        "first frozen": v1.nn.FrozenParameter(VALUE, "w"),
        "first uninitialized": uninitialized(),
    }


@pytest.mark.parametrize("which", parameters())
def test_every_kind_of_parameter_is_read_alike(which):
    parameter = parameters()[which]
    assert model_variables.is_variable(parameter)
    assert model_variables.is_parameter(parameter)
    assert model_variables.variable_name(parameter) == "w"
    assert model_variables.value_of(parameter).named_shape == {"a": 2}
    other = model_variables.with_value(parameter, 2 * VALUE)
    assert model_variables.variable_name(other) == "w"
    assert other.value.data_array.tolist() == [2, 2]
    assert ("frozen" in which) == ("Frozen" in type(other).__name__ or which == "frozen")


@pytest.mark.parametrize("other", [VALUE, jnp.ones(2), "w", pz.nn.Identity(), None])
def test_nothing_else_is_a_variable(other):
    assert not model_variables.is_variable(other)
    assert not model_variables.is_parameter(other)


def test_a_state_variable_is_no_parameter():
    for variable in (pz.StateVariable(1), pz.StateVariable(1).freeze()):
        assert model_variables.is_variable(variable)
        assert not model_variables.is_parameter(variable)


@pytest.mark.parametrize("kind", [pz.Parameter, pz.StateVariable])
def test_a_thawed_variable_shares_nothing_mutable(kind):
    original = kind(value=VALUE, label="w", metadata={"note": 1})
    thawed = model_variables.with_own_label(model_variables.thawed(original.freeze()))
    assert type(thawed) is kind
    assert (thawed.label, thawed.metadata) == ("w", {"note": 1})
    thawed.metadata["note"] = 2
    thawed.value = 2 * VALUE
    assert original.metadata == {"note": 1}
    assert original.value.data_array.tolist() == [1, 1]


def test_an_automatic_label_is_kept_or_made_anew():
    original = pz.StateVariable(value=0)
    assert model_variables.thawed(original.freeze()).label == original.label
    thawed = model_variables.with_own_label(model_variables.thawed(original.freeze()))
    assert thawed.label == AutoStateVarLabel(id(thawed)) != original.label


def test_copies_of_one_frozen_variable():
    def frozen(value):
        return pz.ParameterValue(label="w", value=value, metadata={})

    assert model_variables.is_copy(frozen(jnp.ones(2)), frozen(jnp.ones(2)))
    assert not model_variables.is_copy(frozen(jnp.ones(2)), frozen(jnp.zeros(2)))
    assert not model_variables.is_copy(frozen(jnp.ones(2)), frozen(jnp.ones(2, jnp.int32)))
    assert not model_variables.is_copy(
        pz.Parameter(value=jnp.ones(2), label="w"), pz.Parameter(value=jnp.ones(2), label="w")
    )


def test_split_and_bind_give_the_model_back():
    shared = pz.Parameter(value=VALUE, label="w")
    model = {"a": shared, "b": [shared, pz.StateVariable(jnp.zeros(()), label="n")], "f": max}
    unbound, params, states, table = model_variables.split_model(model)
    assert (list(params), list(states)) == (["w"], ["n"])
    assert jax.tree.structure(unbound).num_leaves == 0
    bound = table.bind(unbound, params, states)
    assert bound["a"] is bound["b"][0]
    assert bound["f"] is max
    assert jax.tree.structure(pz.freeze_variables(bound)) == jax.tree.structure(
        pz.freeze_variables(model)
    )


def test_a_loss_gets_parameters_frozen_and_state_mutable():
    model = [pz.Parameter(value=VALUE, label="w"), pz.StateVariable(jnp.zeros(()), label="n")]
    unbound, params, states, table = model_variables.split_model(model)
    bound = table.bind_for_loss(unbound, params, states)
    assert isinstance(bound.model[0], pz.ParameterValue)
    assert isinstance(bound.model[1], pz.StateVariable)
    bound.model[1].value += 1
    assert bound.state_values(states) == {"n": 1}
    assert bound.replaced_parameters(params) == {}


def test_all_that_cannot_be_split_is_reported_at_once():
    model = [
        pz.ParameterSlot(label="empty"),
        uninitialized(),
        pz.Parameter(value=VALUE, label="w"),
        pz.Parameter(value=VALUE * 2, label="w"),
        pz.Parameter(value=pz.nx.wrap(jnp.arange(2), "a"), label="table"),
    ]
    with pytest.raises(ShardingError) as caught:
        model_variables.split_model(model)
    assert len(caught.value.problems) == 4


def test_kinds_of_the_first_api():
    assert first_api.parameter_kind(v1.nn.Parameter) == "parameter"
    assert first_api.parameter_kind(v1.nn.FrozenParameter) == "frozen"
    assert first_api.parameter_kind(type(uninitialized())) == "uninitialized"
    assert first_api.parameter_kind(pz.Parameter) is None
    assert v1.nn.Softmax in first_api.sensitive_layer_types()


def test_initialising_definitions_of_the_first_api():
    definition = v1.nn.Affine.from_config({"features": 4}, {"features_out": 2})
    selection = first_api.uninitialized_parameters(definition)
    made = first_api.initialize_parameters(selection.get_sequence(), jax.random.key(0))
    model = selection.set_sequence(made)
    expected = v1.nn.initialize_parameters(definition, jax.random.key(0))
    assert jax.tree.all(jax.tree.map(jnp.array_equal, model, expected))
