import jax
import jax.numpy as jnp
import pytest
from penzai import pz
from penzai.deprecated.v1 import pz as pz1

from penzai_shard.checkpointing import param_dict, with_params
from penzai_shard.errors import CheckpointMismatchError, RuleTypeError

NAMES = [
    "mlp/up/Linear.weights",
    "mlp/up/AddBias.bias",
    "mlp/down/Linear.weights",
    "mlp/down/AddBias.bias",
]


def counted(params):
    """Other values of the same kind."""
    return {name: value * 0 + i for i, (name, value) in enumerate(params.items())}


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].named_shape == b[name].named_shape
        assert bool((a[name] == b[name]).untag(*a[name].named_shape).all().unwrap()), name


def test_a_shared_parameter_is_there_once(mlp):
    assert list(param_dict(mlp)) == NAMES


def test_wrappers_and_inserted_layers_never_change_the_names(mlp):
    wrapped = pz.nn.Sequential([pz.nn.Identity(), mlp, pz.nn.Identity()])
    edited = pz.select(mlp).at_instances_of(pz.nn.Linear).insert_after(pz.nn.Identity())
    assert list(param_dict(wrapped)) == list(param_dict(edited)) == NAMES


def test_frozen_and_abstract_models_read_alike(mlp):
    frozen = pz.freeze_variables(mlp)
    abstract = jax.eval_shape(lambda: frozen)
    assert list(param_dict(frozen)) == list(param_dict(abstract)) == NAMES
    assert param_dict(abstract)[NAMES[0]].data_array.shape == (8, 16)
    assert list(param_dict(jax.jit(lambda m: m)(frozen))) == NAMES


def test_two_parameters_of_one_name_are_refused_with_both_places():
    model = pz.nn.Sequential(
        [
            pz.nn.AddBias(pz.Parameter(label="bias", value=pz.nx.ones({"a": 2})), ()),
            pz.nn.AddBias(pz.Parameter(label="bias", value=pz.nx.ones({"a": 2})), ()),
        ]
    )
    with pytest.raises(
        CheckpointMismatchError,
        match=r"bias: two different parameters have this name, at sublayers/0/bias and at "
        r"sublayers/1/bias\. Name one of them otherwise",
    ):
        param_dict(model)
    frozen = pz.freeze_variables(model)
    other = pz.select(frozen).at(lambda m: m.sublayers[1].bias.value).apply(lambda v: v * 2)
    assert list(param_dict(frozen)) == ["bias"]
    with pytest.raises(CheckpointMismatchError, match="two different parameters have this name"):
        param_dict(other)


def test_nested_mappings_are_flattened_and_nothing_else():
    value = (jnp.ones(2), pz.nx.ones({"a": 2}))
    found = param_dict({"layer": {"w": value, "b": 1.0}, "x/y": 2.0})
    assert list(found) == ["layer/w", "layer/b", "x/y"]
    assert found["layer/w"] is value
    with pytest.raises(CheckpointMismatchError, match="a/b: two entries have this name"):
        param_dict({"a": {"b": 1.0}, "a/b": 2.0})


def test_a_single_array_is_no_model():
    with pytest.raises(RuleTypeError, match=r"Pass \{'name': array\}"):
        param_dict(pz.nx.ones({"a": 2}))


def test_new_values_leave_the_original_alone_and_stay_shared(mlp):
    before = param_dict(mlp)
    values = counted(before)
    other = with_params(mlp, values)
    assert_same(param_dict(other), values)
    assert_same(param_dict(mlp), before)
    ups = [layer for layer in other.sublayers if isinstance(layer, pz.nn.Affine)]
    first, third = (pz.unbind_params(ups[i])[1] for i in (0, 2))
    assert all(a is b for a, b in zip(first, third, strict=True))
    other(pz.nx.ones({"batch": 2, "embedding": 8}))
    calls = [pz.unbind_state_vars(m)[1][0] for m in (mlp, other)]
    assert [int(c.value) for c in calls] == [0, 1]


def test_metadata_is_kept_and_not_shared():
    variable = pz.Parameter(label="b", value=pz.nx.ones({"a": 2}), metadata={"trainable": False})
    other = with_params(pz.nn.AddBias(variable, ()), {"b": pz.nx.zeros({"a": 2})})
    assert other.bias.metadata == {"trainable": False}
    assert other.bias.metadata is not variable.metadata


def test_state_variables_without_a_label_keep_apart_from_their_copies():
    state = pz.StateVariable(jnp.zeros(2))
    model = pz.nn.Sequential([state, pz.Parameter(label="w", value=pz.nx.ones({"a": 2})), state])
    copy = with_params(model, param_dict(model))
    assert copy.sublayers[0] is copy.sublayers[2]
    # Unbinding refuses two variables of one label.
    assert len(pz.unbind_state_vars([model, copy])[1]) == 2


def test_an_abstract_model_gets_mutable_parameters(mlp):
    abstract = jax.eval_shape(lambda: pz.freeze_params(pz.unbind_state_vars(mlp)[0]))
    other = with_params(abstract, param_dict(mlp))
    found = pz.unbind_params(other)[1]
    assert [v.label for v in found] == NAMES
    assert all(isinstance(v, pz.Parameter) for v in found)
    # Structs cannot be held by mutable parameters.
    structs = with_params(mlp, param_dict(abstract))
    assert isinstance(structs.sublayers[1].sublayers[0].weights, pz.ParameterValue)


def test_values_may_have_another_dtype_and_be_views(mlp):
    values = {n: v.astype(jnp.bfloat16) for n, v in param_dict(mlp).items()}
    values[NAMES[0]] = values[NAMES[0]].as_namedarrayview()
    other = param_dict(with_params(mlp, values))
    assert {v.dtype for v in other.values()} == {jnp.dtype(jnp.bfloat16)}
    assert isinstance(other[NAMES[0]], pz.nx.NamedArray)


def test_every_unfit_value_is_told_at_once(mlp):
    values = param_dict(mlp)
    values["mlp/up/Linear.weights"] = values["mlp/up/Linear.weights"].order_as(
        "neurons", "embedding"
    )
    values["mlp/up/AddBias.bias"] = pz.nx.ones({"neurons": 3})
    values["mlp/down/AddBias.bias"] = pz.nx.ones({"features": 8})
    values["mlp/down/Linear.weight"] = values.pop("mlp/down/Linear.weights")
    with pytest.raises(CheckpointMismatchError) as caught:
        with_params(mlp, values)
    headline, *lines = str(caught.value).splitlines()
    assert headline == "cannot put these values into the model:"
    assert set(lines) == {
        "  mlp/up/Linear.weights: the values given have (neurons=16, embedding=8), and the model "
        "wants (embedding=8, neurons=16): the same logical axes in another order. Give "
        "'mlp/up/Linear.weights' as value.order_as('embedding', 'neurons').",
        "  mlp/up/AddBias.bias: the values given have (neurons=3), and the model wants "
        "(neurons=16): the sizes differ. Build the model with the same sizes.",
        "  mlp/down/Linear.weights: the model wants (neurons=16, embedding=8) float32, and the "
        "values given have no such array. Did you mean 'mlp/down/Linear.weight'? To keep the "
        "model's own, give param_dict(model)['mlp/down/Linear.weights'].",
        "  mlp/down/AddBias.bias: the values given have (features=8), and the model wants "
        "(embedding=8): the logical axes have other names. If they mean the same, rename them: "
        "value.untag('features').tag('embedding').",
        "  mlp/down/Linear.weight: the values given have (neurons=16, embedding=8) float32, and "
        "the model has no such array. Did you mean 'mlp/down/Linear.weights'? Leave "
        "'mlp/down/Linear.weight' out of the values.",
    }


def test_models_of_the_first_api():
    definition = pz1.nn.add_parameter_prefix(
        "net", pz1.nn.Affine.from_config({"embedding": 4}, {"neurons": 8})
    )
    structs = param_dict(definition)
    assert all(isinstance(v.data_array, jax.ShapeDtypeStruct) for v in structs.values())
    model = pz1.nn.initialize_parameters(definition, jax.random.key(0))
    values = param_dict(model)
    assert list(values) == list(structs)
    new = counted(values)
    assert_same(param_dict(with_params(model, new)), new)
    filled = with_params(definition, new)
    assert_same(param_dict(filled), new)
    x = pz.nx.ones({"embedding": 4})
    assert dict(filled(x).named_shape) == {"neurons": 8}
