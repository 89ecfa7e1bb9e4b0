"""Parameters restored by name, whatever changed: renamed, only some, adapters beside them."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from penzai import pz
from penzai.toolshed import lora

from penzai_shard.checkpointing import (
    param_dict,
    restore_params,
    restore_train_state,
    save_params,
    save_train_state,
)
from penzai_shard.checkpointing.arrays_by_name import ArraysByName
from penzai_shard.errors import CheckpointMismatchError, RuleTypeError, ShardingWarning
from penzai_shard.layers import Checkpointed, ConstrainShardingByName, InPrecision, Jitted
from penzai_shard.placement import abstract_model, place, sharded_init, tracing
from penzai_shard.planning import make_plan
from penzai_shard.surgery import strip
from penzai_shard.training import TrainState
from tests.checkpointing.conftest import build_mlp

P = PartitionSpec
RULES = {"embedding": "data", "neurons": "model"}
ADAPTERS = "LoRA:*/**"
UP = "mlp/up/**"


def numpy_of(values):
    return {
        name: (tuple(value.named_shape), value.dtype, np.asarray(value.data_array))
        for name, value in values.items()
    }


def assert_values(values, expected):
    """Bit for bit, with the same logical axes and dtype."""
    found, wanted = numpy_of(values), numpy_of(expected)
    assert found.keys() == wanted.keys()
    for name, (axes, dtype, numbers) in found.items():
        assert (axes, dtype) == wanted[name][:2], name
        np.testing.assert_array_equal(numbers, wanted[name][2], err_msg=name)


def assert_planned(model, mesh, rules):
    specs = {leaf.path: leaf.spec for leaf in make_plan(model, mesh, rules).leaves}
    for name, value in param_dict(model).items():
        assert value.data_array.sharding == NamedSharding(mesh, specs[name]), name


def with_adapters(model, seed=7):
    """Every linear layer with an adapter of Penzai's, whose second factor is not zero any more."""
    adapted = lora.loraify_linears_in_selection(pz.select(model), 2, jax.random.key(seed))
    values = {
        name: value + 0.5 if name.endswith("LoRA_B.weights") else value
        for name, value in param_dict(adapted).items()
    }
    for variable in pz.unbind_params(adapted)[1]:
        if variable.label in values:
            variable.value = values[variable.label]
    return adapted


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    model = build_mlp(seed=0)
    return model, save_params(tmp_path_factory.mktemp("saved") / "params", model)


def test_renamed_parameters_are_found(tmp_path, saved, build, wide):
    model, _ = saved
    old = {
        re.sub("mlp/(up|down)/", r"model.layers.\1.", name): value
        for name, value in param_dict(model).items()
    }
    path = save_params(tmp_path / "params", old)
    restored = restore_params(path, build(3), wide, RULES, names={"model.layers.*.**": "mlp/*/**"})
    assert_values(param_dict(restored), param_dict(model))
    assert_planned(restored, wide, RULES)


def test_names_that_do_not_fit_are_refused_before_anything_is_read(saved, build, wide):
    names = {"mlp/over/*.*": "x/*.*", "mlp/up/**": "mlp/down/**"}
    with pytest.raises(CheckpointMismatchError) as caught:
        restore_params(saved[1], build(), wide, RULES, names=names)
    assert len(caught.value.problems) == 3
    assert "the pattern matches no array of the checkpoint. The nearest of 4" in str(caught.value)
    assert "mlp/down/Linear.weights: 2 stored arrays go here" in str(caught.value)


def test_an_array_takes_the_name_of_one_that_is_left(tmp_path, wide):
    values = {name: pz.nx.ones({"a": 2}) * i for i, name in enumerate("abc")}
    path = save_params(tmp_path / "params", values)
    names = {"b": "a", "a": None, "c": "b"}
    restored = restore_params(path, {n: values[n] for n in "ab"}, wide, {}, names=names)
    assert {name: float(value.data_array[0]) for name, value in restored.items()} == {
        "a": 1.0,
        "b": 2.0,
    }


def test_a_renamed_array_that_differs_is_called_by_both_names(tmp_path, build, wide):
    path = save_params(tmp_path / "params", param_dict(build(neurons=8)))
    exchanged = {"mlp/up/**": "mlp/down/**", "mlp/down/**": "mlp/up/**"}
    said = r"mlp/up/AddBias\.bias: .*It is 'mlp/down/AddBias\.bias' there\."
    with pytest.raises(CheckpointMismatchError, match=said):
        restore_params(path, build(), wide, RULES, names=exchanged)


def test_a_missing_parameter_is_offered_under_the_name_that_it_may_have(tmp_path, build, wide):
    values = param_dict(build())
    values["mlp/up/Linear.weight"] = values.pop("mlp/up/Linear.weights")
    path = save_params(tmp_path / "params", values)
    with pytest.raises(CheckpointMismatchError) as caught:
        restore_params(path, build(3), wide, RULES)
    restored = restore_params(path, build(3), wide, RULES, names=names_in(caught.value))
    assert_values(param_dict(restored), param_dict(build()))


@pytest.mark.parametrize(
    "chosen", [{"only": UP}, {"except_": ["mlp/down/*.bias", "mlp/down/Lin*.*"]}]
)
def test_what_is_not_restored_is_kept(saved, build, wide, chosen):
    model, path = saved
    other = build(5)
    restored = restore_params(path, other, wide, RULES, others="keep", **chosen)
    both = {"mlp/up": param_dict(model), "mlp/down": param_dict(other)}
    expected = {name: both[name.rpartition("/")[0]][name] for name in param_dict(model)}
    assert_values(param_dict(restored), expected)
    assert_planned(restored, wide, RULES)


def test_what_is_not_restored_is_drawn_as_sharded_init_does(saved, build, wide):
    model, path = saved
    builder = functools.partial(build, seed=11)
    abstract = abstract_model(builder)
    restored = restore_params(path, abstract, wide, RULES, only=UP, others=builder)
    drawn = param_dict(sharded_init(builder, mesh=wide, rules=RULES))
    expected = {n: param_dict(model)[n] if "up" in n else drawn[n] for n in drawn}
    assert_values(param_dict(restored), expected)
    assert_planned(restored, wide, RULES)


def test_only_what_is_needed_is_drawn(saved, build, wide, monkeypatch):
    def builder():
        return build(seed=11)

    real, positions = tracing.split_initializer, []

    def counted(program, shardings):
        positions.append(len(shardings))
        return real(program, shardings)

    monkeypatch.setattr(tracing, "split_initializer", counted)
    restore_params(saved[1], build(), wide, RULES, only=[UP, "mlp/down/Lin*.*"], others=builder)
    assert positions == [1]


def test_others_that_have_no_value_are_refused(saved, build, wide):
    path = saved[1]
    said = (
        "mlp/down/AddBias.bias: has a shape and no value. Give the function that builds the model"
    )
    with pytest.raises(CheckpointMismatchError, match=re.escape(said)) as caught:
        restore_params(path, abstract_model(build), wide, RULES, only=UP, others="keep")
    assert len(caught.value.problems) == 2
    donated = build(3)
    jax.tree.map(lambda value: value.delete(), param_dict(donated))
    with pytest.raises(CheckpointMismatchError, match="no value any more, since it was donated"):
        restore_params(path, donated, wide, RULES, only=UP, others="keep")
    # Those that are restored need none.
    everything = restore_params(path, donated, wide, RULES, others="keep")
    assert_values(param_dict(everything), param_dict(saved[0]))


def test_a_part_without_word_of_the_others_is_refused(saved, build, wide):
    with pytest.raises(CheckpointMismatchError) as caught:
        restore_params(saved[1], build(), wide, RULES, only=UP)
    assert [problem.partition(":")[0] for problem in caught.value.problems[:2]] == [
        "mlp/down/AddBias.bias",
        "mlp/down/Linear.weights",
    ]
    assert "others='keep'" in caught.value.problems[2]
    # All of them are no part.
    assert restore_params(saved[1], build(), wide, RULES, only="**")


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ("kept", "not 'kept'"),
        (None, "not a NoneType"),
        (pz.nx.ones({"a": 2}), "not a NamedArray"),
        (lambda seed: seed, "missing a required argument: 'seed'. Write others=functools.partial"),
    ],
)
def test_other_values_of_others_are_refused(saved, build, wide, others, said):
    with pytest.raises(RuleTypeError, match=re.escape(said)):
        restore_params(saved[1], build(), wide, RULES, only=UP, others=others)
    with pytest.raises(RuleTypeError, match="not a Sequential"):
        restore_params(saved[1], build(), wide, RULES, only=UP, others=build())


def test_a_builder_of_another_model_is_refused(saved, build, wide):
    with pytest.raises(
        CheckpointMismatchError, match="the model that others= builds has"
    ) as caught:
        restore_params(saved[1], build(), wide, RULES, only=UP, others=lambda: build(neurons=8))
    assert "Linear.weights" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"only": "mlp/upp/**"}, "only='mlp/upp/**': the pattern matches no array of the model. "),
        ({"only": "mlp/up"}, "Did you mean 'mlp/up/**', which matches 2 of 4?"),
        ({"only": UP, "except_": ["q", UP]}, "except_='q': the pattern matches no array"),
        ({"except_": "**"}, "nothing of the model is left"),
    ],
)
def test_patterns_without_a_meaning_are_refused(tmp_path, saved, build, wide, options, said):
    with pytest.raises(CheckpointMismatchError, match=re.escape(said)):
        restore_params(saved[1], build(), wide, RULES, others="keep", **options)
    with pytest.raises(CheckpointMismatchError, match=re.escape(said)):
        save_params(tmp_path / "params", saved[0], **options)
    assert not (tmp_path / "params").exists()


def test_a_base_is_restored_into_a_model_with_adapters(saved, build, tall):
    model, path = saved
    adapted = with_adapters(build(3))
    restored = restore_params(path, adapted, tall, RULES, others="keep")
    expected = {**param_dict(adapted), **param_dict(model)}
    assert_values(param_dict(restored), expected)
    assert_planned(restored, tall, RULES)
    assert sum(name.startswith("LoRA") for name in expected) == 8
    with pytest.raises(
        CheckpointMismatchError, match="leave the model's own value there, pass oth"
    ):
        restore_params(path, adapted, tall, RULES)


def test_adapters_alone_are_saved_and_restored(tmp_path, saved, build, wide, tall):
    model, base = saved
    tuned = place(with_adapters(build(3)), wide, RULES)
    path = save_params(tmp_path / "adapters", tuned, only=ADAPTERS)
    fresh = restore_params(base, with_adapters(build(4), seed=8), tall, RULES, others="keep")
    both = restore_params(path, fresh, tall, RULES, only=ADAPTERS, others="keep")
    adapters = {n: v for n, v in param_dict(tuned).items() if n.startswith("LoRA")}
    assert_values(param_dict(both), {**param_dict(fresh), **adapters})
    assert_values({n: param_dict(both)[n] for n in param_dict(model)}, param_dict(model))
    assert_planned(both, tall, RULES)
    without_only = restore_params(path, fresh, tall, RULES, others="keep")
    assert_values(param_dict(without_only), param_dict(both))


def test_a_base_is_restored_from_a_checkpoint_with_adapters(tmp_path, build, wide):
    tuned = with_adapters(build(3))
    path = save_params(tmp_path / "all", tuned)
    restored = restore_params(path, build(4), wide, RULES, on_extra="ignore")
    assert_values(param_dict(restored), param_dict(build(3)))
    base = save_params(tmp_path / "base", tuned, except_=ADAPTERS)
    assert_values(param_dict(restore_params(base, build(4), wide, RULES)), param_dict(build(3)))


def test_training_adapters_over_a_frozen_base_goes_on(tmp_path, build, wide, tall):
    def state_of(seed):
        model = pz.select(build(seed)).at_instances_of(pz.Parameter).apply(lambda p: p.freeze())
        model = lora.loraify_linears_in_selection(pz.select(model), 2, jax.random.key(seed))
        return TrainState.initial_state(model, optax.adam(1e-2), jax.random.key(seed))

    state = place(state_of(3), wide, RULES)
    path = save_train_state(tmp_path / "state", state)
    restored = restore_train_state(path, state_of(4), tall, RULES)
    found, expected = arrays_of(restored), arrays_of(state)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    assert any("mu/LoRA" in name for name in found)


@pytest.mark.parametrize("around", ["a base", "wrapped"])
def test_inserted_and_wrapped_layers_never_change_names(tmp_path, saved, build, wide, around):
    def wrapped(model):
        linear = pz.select(model).at_instances_of(pz.nn.Linear)
        model = linear.apply(lambda layer: Checkpointed(InPrecision(layer, "bfloat16")))
        biases = pz.select(model).at_instances_of(pz.nn.AddBias)
        return Jitted(biases.insert_after(ConstrainShardingByName(wide, {"neurons": "model"})))

    model, path = saved
    if around == "wrapped":
        path = save_params(tmp_path / "params", wrapped(model))
    wanted = build(5) if around == "wrapped" else wrapped(build(5))
    restored = restore_params(path, wanted, wide, RULES)
    assert_values(param_dict(restored), param_dict(model))
    assert strip(restored).sublayers[0].sublayers[0].weights.label == "mlp/up/Linear.weights"


def test_arrays_left_on_both_sides_are_said(tmp_path, build, wide):
    values = param_dict(build())
    values["mlp/other/Lin"] = values.pop("mlp/up/Linear.weights")
    path = save_params(tmp_path / "params", values)
    with pytest.raises(CheckpointMismatchError, match="mlp/other/Lin: the checkpoint has"):
        restore_params(path, build(3), wide, RULES, others="keep")
    said = r"lacks 1 of the model's arrays \('mlp/up/Linear\.weights'\), .*1 of its own \('mlp/o"
    with pytest.warns(ShardingWarning, match=said):
        restored = restore_params(path, build(3), wide, RULES, others="keep", on_extra="ignore")
    own = "mlp/up/Linear.weights"
    expected = {**param_dict(build()), own: param_dict(build(3))[own]}
    assert_values(param_dict(restored), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restore_params(path, build(3), wide, RULES, except_=own, others="keep", on_extra="ignore")


def test_a_checkpoint_of_nothing_in_common_is_refused(tmp_path, build, wide):
    path = save_params(tmp_path / "params", {"q": pz.nx.ones({"a": 2})})
    with pytest.raises(CheckpointMismatchError, match="Nothing in the checkpoint has a name of"):
        restore_params(path, build(), wide, RULES, others="keep", on_extra="ignore")


def test_what_is_asked_for_and_is_not_there_is_refused(tmp_path, saved, build, wide):
    path = save_params(tmp_path / "params", saved[0], only="mlp/up/*.bias")
    with pytest.raises(CheckpointMismatchError, match=r"mlp/up/Linear\.weights: the model wants"):
        restore_params(path, build(), wide, RULES, only=UP, others="keep")


def test_an_excluded_parameter_may_differ_in_everything(tmp_path, saved, build, wide):
    values = param_dict(build(0))
    values["mlp/down/Linear.weights"] = pz.nx.ones({"anything": 3})
    values["mlp/down/Linear.more"] = pz.nx.ones({"anything": 3})
    path = save_params(tmp_path / "params", values)
    options = {"except_": "mlp/down/Linear.*", "others": "keep"}
    restored = restore_params(path, build(5), wide, RULES, **options)
    own = "mlp/down/Linear.weights"
    assert_values(param_dict(restored), {**param_dict(build(0)), own: param_dict(build(5))[own]})


def test_names_parts_orders_and_dtypes_go_together(tmp_path, build, wide):
    values = {
        name.replace("mlp/", "old."): value.order_as(*reversed(value.named_shape)).astype(
            "bfloat16"
        )
        for name, value in param_dict(build()).items()
    }
    path = save_params(tmp_path / "params", values)
    restored = restore_params(
        path,
        build(5),
        wide,
        RULES,
        names={"old.*.**": "mlp/*/**"},
        only=UP,
        others="keep",
        on_axis_mismatch="transpose",
        on_dtype_mismatch="cast",
    )
    expected = {
        name: value.astype("bfloat16").astype("float32")
        if "up" in name
        else param_dict(build(5))[name]
        for name, value in param_dict(build()).items()
    }
    assert_values(param_dict(restored), expected)


def test_parts_of_train_states_and_of_dictionaries(tmp_path, saved, build, wide):
    model, _ = saved
    state = TrainState.initial_state(model, optax.adam(1e-2), jax.random.key(0))
    path = save_train_state(tmp_path / "state", state)
    restored = restore_params(path, build(5), wide, RULES, only=UP, others="keep")
    expected = {name: (model if "up" in name else build(5)) for name in param_dict(model)}
    assert_values(param_dict(restored), {name: param_dict(m)[name] for name, m in expected.items()})
    values = {"a": {"w": pz.nx.ones({"x": 8})}, "b": jnp.zeros(3)}
    path = save_params(tmp_path / "params", {"a/w": pz.nx.ones({"x": 8}) * 2})
    found = restore_params(path, values, wide, {"x": "data"}, others="keep", on_unnamed="replicate")
    np.testing.assert_array_equal(found["a"]["w"].unwrap("x"), np.full(8, 2.0))
    assert found["a"]["w"].data_array.sharding.spec == P("data")
    assert found["b"].sharding == NamedSharding(wide, P())


@pytest.mark.parametrize(
    "optimizer", [optax.adam(1e-2), optax.adafactor(1e-2, min_dim_size_to_factor=4)]
)
def test_what_the_optimizer_keeps_follows_renamed_parameters(
    tmp_path, build, wide, tall, optimizer
):
    def state_of(model, seed):
        state = TrainState.initial_state(model, optimizer, jax.random.key(seed))
        return jax.tree.map(
            lambda x: x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x + 1, state
        )

    state = place(state_of(build(1), 1), wide, RULES)
    path = save_train_state(tmp_path / "state", state)
    fresh = TrainState.initial_state(renamed(build(2)), optimizer, jax.random.key(2))
    names = {"mlp/up/**": "net/1/**", "mlp/down/**": "net/2/**"}
    restored = restore_train_state(path, fresh, tall, RULES, names=names)
    assert jax.tree.structure(restored.opt_state) == jax.tree.structure(fresh.opt_state)
    called = {"up": "1", "down": "2"}
    found, expected = arrays_of(restored), arrays_of(state)
    assert found.keys() == {
        re.sub("mlp/(up|down)/", lambda m: f"net/{called[m[1]]}/", name) for name in expected
    }
    for name, array in expected.items():
        new = re.sub("mlp/(up|down)/", lambda m: f"net/{called[m[1]]}/", name)
        np.testing.assert_array_equal(found[new], array, err_msg=name)
    with pytest.raises(CheckpointMismatchError, match="cannot match the names of the checkpoint"):
        restore_train_state(path, fresh, tall, RULES, names={"params/mlp/up/**": "net/1/**"})


def test_a_state_with_renamed_parameters_says_what_to_pass(tmp_path, build, wide):
    optimizer = optax.adam(1e-2)
    state = TrainState.initial_state(build(1), optimizer, jax.random.key(1))
    path = save_train_state(tmp_path / "state", state)
    fresh = TrainState.initial_state(renamed(build(2)), optimizer, jax.random.key(2))
    with pytest.raises(CheckpointMismatchError) as caught:
        restore_train_state(path, fresh, wide, RULES)
    restored = restore_train_state(path, fresh, wide, RULES, names=names_in(caught.value))
    expected = arrays_of(state)
    for name, array in arrays_of(restored).items():
        old = name.replace("net/1/", "mlp/up/").replace("net/2/", "mlp/down/")
        np.testing.assert_array_equal(array, expected[old], err_msg=name)


def names_in(error):
    """What a message says to pass as names."""
    return eval(re.search(r"pass names=(\{[^}]*\})", str(error))[1])


def renamed(model):
    for variable in pz.unbind_params(model)[1]:
        variable.label = variable.label.replace("mlp/up/", "net/1/").replace("mlp/down/", "net/2/")
    return model


def arrays_of(state):
    return {
        name: np.asarray(
            jax.random.key_data(leaf.array)
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else leaf.array
        )
        for name, leaf in ArraysByName(state).leaves.items()
    }
