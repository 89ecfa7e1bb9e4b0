"""Modules of Equinox as they were written: named, planned, placed, trained and saved."""

import re
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from penzai import pz

from penzai_shard import (
    ConstrainShardingByName,
    Jitted,
    Layout,
    ShardingError,
    ShardingWarning,
    StatefulTrainer,
    TrainState,
    abstract_model,
    build_eval_step_fn,
    fully_sharded,
    make_mesh,
    make_plan,
    name_axes,
    param_dict,
    place,
    restore_params,
    restore_train_state,
    save_params,
    save_train_state,
    sharded_init,
    with_params,
    without_names,
)
from penzai_shard.errors import CheckpointMismatchError, PlanError, RuleTypeError, SelectionError

MESH = make_mesh({"data": 4, "model": 2})
RULES = {"in": "data", "out": "model"}
NAMES = {"mlp/layers/*/weight": ("out", "in"), "mlp/layers/*/bias": ("out",)}
OPTIMIZER = optax.adam(1e-2)
KEYS = jax.random.split(jax.random.key(3), 16)
INPUTS = jax.random.normal(jax.random.key(1), (16, 8))
TARGETS = jnp.sin(INPUTS)


class Model(eqx.Module):
    """An MLP with what modules of Equinox have in their fields: a function, numbers, a text."""

    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout
    gain: float
    mode: str

    def __init__(self, key):
        self.mlp = eqx.nn.MLP(8, 8, 16, 1, key=key)
        self.dropout = eqx.nn.Dropout(0.25)
        self.gain = 1.5
        self.mode = "scaled"

    def __call__(self, x, key):
        y = self.mlp(x)
        return self.dropout(self.gain * y if self.mode == "scaled" else y, key=key)


def build(key):
    return name_axes(Model(key), NAMES)


def error_of(model, x, y):
    return jnp.mean((jax.vmap(model)(x, KEYS) - y) ** 2)


def loss_fn(model, rng, state, x, y):
    assert type(model) is Model
    loss = error_of(model, x, y)
    return loss, state, {"loss": loss}


@pytest.fixture(scope="module")
def own_steps():
    """Three steps of training code as Equinox's documentation has it, and the model after them."""

    @eqx.filter_jit
    def step(model, opt_state, x, y):
        loss, grads = eqx.filter_value_and_grad(error_of)(model, x, y)
        weights = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, weights)
        return eqx.apply_updates(model, updates), opt_state, loss

    model = Model(jax.random.key(0))
    opt_state = OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))
    losses = []
    for _ in range(3):
        model, opt_state, loss = step(model, opt_state, INPUTS, TARGETS)
        losses.append(float(loss))
    return losses, model


def trained(layout, mesh, builder=build):
    batch = layout.shard_batch({"x": INPUTS, "y": TARGETS}, mesh, first_axis="batch")
    state, step = layout.build(
        builder,
        jax.random.key(0),
        mesh=mesh,
        loss_fn=loss_fn,
        optimizer=OPTIMIZER,
        rng=jax.random.key(2),
    )
    losses = []
    for _ in range(3):
        state, aux = step(state, **batch)
        losses.append(float(aux["loss"]))
    return losses, state


@pytest.fixture(scope="module")
def on_two_axes():
    layout = Layout(parameters=RULES, compute={"batch": "data"}, blocks=())
    return trained(layout, MESH)


def assert_same_weights(model, other, **tolerance):
    leaves, others = (jax.tree.leaves(eqx.filter(m, eqx.is_array)) for m in (model, other))
    for ours, theirs in zip(leaves, others, strict=True):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), **tolerance)


def test_training_by_name_gives_the_losses_and_weights_of_own_training_code(on_two_axes, own_steps):
    losses, state = on_two_axes
    np.testing.assert_allclose(losses, own_steps[0], rtol=1e-5)
    assert_same_weights(without_names(state.model), own_steps[1], rtol=1e-4, atol=1e-6)
    weight = state.params["mlp/layers/0/weight"]
    assert weight.data_array.sharding.spec == P("model", "data")
    moment = state.opt_state[0].mu["mlp/layers/0/weight"]
    assert moment.data_array.sharding == weight.data_array.sharding


@pytest.fixture(scope="module")
def without_any_names():
    """A module as it is, fully sharded on an explicit mesh."""
    layout = Layout.fully_sharded(min_size=16, unnamed="largest")
    with pytest.warns(ShardingWarning, match="the Model has no layers that a layout could edit"):
        return trained(layout, jax.make_mesh((8,), ("data",)), Model)


def test_training_a_module_without_names_fully_sharded_gives_the_same(without_any_names, own_steps):
    losses, state = without_any_names
    np.testing.assert_allclose(losses, own_steps[0], rtol=1e-5)
    assert_same_weights(state.model, own_steps[1], rtol=1e-4, atol=1e-6)
    first, second = state.model.mlp.layers
    assert (first.weight.sharding.spec, first.bias.sharding.spec) == (P("data"), P("data"))
    assert (second.weight.sharding.spec, second.bias.sharding.spec) == (P(None, "data"), P())
    moment = state.opt_state[0].mu["mlp/layers/1/weight"]
    assert moment.sharding == second.weight.sharding


def test_a_module_without_names_is_saved_and_restored_onto_another_mesh(
    without_any_names, tmp_path
):
    state = without_any_names[1]
    rules = fully_sharded("model", min_size=16, unnamed="largest")
    path = save_params(tmp_path / "parameters", state.model)
    abstract = eqx.filter_eval_shape(Model, jax.random.key(0))
    restored = restore_params(path, abstract, MESH, rules)
    assert_same_weights(restored, state.model, rtol=0)
    assert restored.mlp.layers[0].weight.sharding.spec == P("model")
    path = save_train_state(tmp_path / "state", state)
    again = restore_train_state(path, state, MESH, rules)
    assert_same_weights(again.opt_state, state.opt_state, rtol=0)
    assert again.opt_state[0].nu["mlp/layers/1/weight"].sharding.spec == P(None, "model")
    assert again.model.gain == 1.5


def test_a_trained_module_is_the_users_own_with_names_and_without_them_it_runs(on_two_axes):
    model = on_two_axes[1].model
    assert type(model) is Model
    assert dict(model.mlp.layers[0].weight.named_shape) == {"out": 16, "in": 8}
    assert (model.gain, model.mode, model.dropout.p) == (1.5, "scaled", 0.25)
    assert jax.vmap(without_names(model))(INPUTS, KEYS).shape == (16, 8)


def test_numbers_in_fields_are_not_trained(on_two_axes):
    assert list(on_two_axes[1].params) == [
        "mlp/layers/0/weight",
        "mlp/layers/0/bias",
        "mlp/layers/1/weight",
        "mlp/layers/1/bias",
    ]


def test_sharded_initialisation_gives_the_values_of_the_modules_own():
    model = sharded_init(build, jax.random.key(0), mesh=MESH, rules=RULES)
    own = Model(jax.random.key(0))
    assert_same_weights(without_names(model), own, rtol=1e-6, atol=1e-7)
    assert model.mlp.layers[0].weight.data_array.sharding.spec == P("model", "data")
    assert (model.gain, model.mode, model.dropout) == (own.gain, own.mode, own.dropout)
    assert type(model.gain) is float
    assert model.mlp.final_activation(2) == 2


def test_plans_of_abstract_modules_leave_all_that_is_not_an_array():
    plan = make_plan(abstract_model(build, jax.random.key(0)), MESH, RULES)
    also = make_plan(eqx.filter_eval_shape(build, jax.random.key(0)), MESH, RULES)
    assert plan.leaves == also.leaves
    assert {leaf.path: leaf.spec for leaf in plan.leaves} == {
        "mlp/layers/0/weight": P("model", "data"),
        "mlp/layers/0/bias": P("model"),
        "mlp/layers/1/weight": P("model", "data"),
        "mlp/layers/1/bias": P("model"),
    }
    assert {"gain", "mode", "dropout/p", "dropout/inference"} < set(plan.others)


def test_placing_leaves_all_that_is_not_an_array():
    placed = place(build(jax.random.key(0)), MESH, RULES)
    assert placed.mlp.layers[1].bias.data_array.sharding.spec == P("model")
    assert placed.dropout.inference is False
    assert (placed.gain, placed.mode) == (1.5, "scaled")


def test_partitioned_modules_are_named_planned_and_placed():
    arrays, others = eqx.partition(Model(jax.random.key(0)), eqx.is_array)
    named = name_axes(arrays, NAMES)
    assert len(make_plan(named, MESH, RULES).leaves) == 4
    placed = place(named, MESH, RULES)
    assert placed.gain is None
    assert type(eqx.combine(without_names(placed), others)) is Model


def test_names_are_taken_off_again():
    model = Model(jax.random.key(0))
    same = without_names(name_axes(model, NAMES))
    assert same.mlp.layers[0].weight is model.mlp.layers[0].weight
    structs = without_names(abstract_model(build, jax.random.key(0)))
    assert structs.mlp.layers[0].weight.shape == (16, 8)
    shardings = make_plan(build(jax.random.key(0)), MESH, RULES).sharding_tree()
    assert without_names(shardings).mlp.layers[0].weight.spec == P("model", "data")


def test_dimensions_without_a_name_in_between_come_back_in_their_order():
    tree = {"w": jnp.ones((2, 3, 4)), "b": jnp.ones(3)}
    named = name_axes(tree, {"w": ("a", None, "b"), "b": None})
    assert isinstance(named["b"], pz.nx.NamedArray)
    assert not named["b"].named_axes
    assert without_names(named)["w"] is tree["w"]
    assert make_plan(named, MESH, {"b": "model"}).leaves[1].spec == P(None, None, "model")


def test_scalars_need_no_names_and_arrays_do():
    assert name_axes({"scale": 2.0, "w": jnp.ones(2)}, {"w": ("a",)})["scale"] == 2.0
    with pytest.raises(SelectionError, match=r"dropout: no pattern matches this array"):
        name_axes({"dropout": jnp.ones(2)}, {})
    with pytest.raises(SelectionError, match="pattern 'gain' matches no array"):
        name_axes(Model(jax.random.key(0)), {**NAMES, "gain": None})


def test_checkpoints_are_restored_onto_another_mesh_and_under_other_names_refused(
    on_two_axes, tmp_path
):
    model = on_two_axes[1].model
    path = save_params(tmp_path / "parameters", model)
    other = make_mesh({"data": 8})
    restored = restore_params(path, abstract_model(build, jax.random.key(0)), other, {"in": "data"})
    assert restored.mlp.layers[0].weight.data_array.sharding.spec == P(None, "data")
    assert_same_weights(restored, model, rtol=0)
    assert (restored.gain, restored.dropout) == (model.gain, model.dropout)
    renamed = name_axes(without_names(model), {**NAMES, "mlp/layers/*/weight": ("out", "features")})
    with pytest.raises(CheckpointMismatchError, match=r"rename_axes=\{'in': 'features'\}"):
        restore_params(path, renamed, other, {})


def test_parameters_go_in_and_out_of_a_module_by_path():
    model = build(jax.random.key(0))
    parameters = param_dict(model)
    assert len(parameters) == 4
    assert dict(parameters["mlp/layers/1/weight"].named_shape) == {"out": 8, "in": 16}
    other = with_params(build(jax.random.key(1)), parameters)
    assert_same_weights(other, model, rtol=0)
    assert (type(other), other.mode) == (Model, "scaled")


class Normalised(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, key):
        self.linear = eqx.nn.Linear(8, 8, key=key)
        self.norm = eqx.nn.BatchNorm(8, "batch", mode="batch")

    def __call__(self, x, state):
        return self.norm(self.linear(x), state)


def normalised(model, state, x):
    batched = jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
    return batched(x, state)


def test_the_state_of_a_batch_norm_is_that_of_the_loss_function():
    make = eqx.nn.make_with_state(Normalised)
    names = {"linear/weight": ("out", "in"), "*/bias": ("out",), "norm/weight": ("out",)}

    def loss(model, rng, state, x):
        y, state = normalised(model, state, x)
        return jnp.mean(y * x), state, {}

    own, own_state = make(jax.random.key(0))
    _, expected = normalised(own, own_state, INPUTS)
    state, step = Layout(parameters=RULES, compute={"batch": "data"}, blocks=()).build(
        lambda key: name_axes(make(key)[0], names),
        jax.random.key(0),
        mesh=MESH,
        loss_fn=loss,
        optimizer=OPTIMIZER,
        rng=jax.random.key(2),
        loss_fn_state=make(jax.random.key(0))[1],
        on_unnamed="replicate",
    )
    state, _ = step(state, x=INPUTS)
    assert_same_weights(state.loss_fn_state, expected, rtol=1e-5, atol=1e-6)


def test_a_batch_norm_whose_state_was_not_taken_out_is_refused():
    with pytest.raises(
        ShardingError,
        match=r"norm/batch_counter: this eqx.nn.StateIndex holds the initial value of a state.*"
        r"\n.*norm/batch_state_index.*eqx.nn.make_with_state.*loss_fn_state",
    ):
        TrainState.initial_state(Normalised(jax.random.key(0)), OPTIMIZER, jax.random.key(0))


class Tied(eqx.Module):
    shared: eqx.nn.Shared

    def __init__(self, key):
        layers = (eqx.nn.Embedding(16, 8, key=key), eqx.nn.Linear(8, 16, False, key=key))
        self.shared = eqx.nn.Shared(
            layers, lambda pair: pair[1].weight, lambda pair: pair[0].weight
        )


def test_a_shared_array_is_one_parameter():
    names = {"shared/pytree/0/weight": ("vocabulary", "embedding")}
    model = name_axes(Tied(jax.random.key(0)), names)
    state = TrainState.initial_state(model, OPTIMIZER, jax.random.key(0))
    assert list(state.params) == ["shared/pytree/0/weight"]
    embedding, linear = without_names(state.model).shared()
    assert embedding.weight is linear.weight


class Scanned(eqx.Module):
    layers: Any
    attention: eqx.nn.MultiheadAttention

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(8, 8, key=key))(keys)
        self.attention = eqx.nn.MultiheadAttention(2, 8, key=key)


def test_stacked_layers_have_a_layers_axis_and_any_dtype():
    names = {
        "layers/weight": ("layers", "out", "in"),
        "layers/bias": ("layers", "out"),
        "attention/*/weight": ("out", "in"),
    }

    def build_scanned(key):
        def cast(leaf):
            return leaf.astype(jnp.bfloat16) if eqx.is_inexact_array(leaf) else leaf

        return name_axes(jax.tree.map(cast, Scanned(key)), names)

    plan = make_plan(abstract_model(build_scanned, jax.random.key(0)), MESH, RULES)
    found = {leaf.path: leaf for leaf in plan.leaves}
    assert found["layers/weight"].spec == P(None, "model", "data")
    assert found["layers/weight"].dtype == jnp.bfloat16
    assert found["attention/query_proj/weight"].spec == P("model", "data")
    assert "attention/dropout/p" in plan.others


def test_texts_outside_of_modules_are_a_mistake_as_before():
    with pytest.raises(PlanError, match="note: a str is not an array"):
        make_plan({"module": build(jax.random.key(0)), "note": "text"}, MESH, RULES)


def test_blocks_of_a_module_cannot_be_edited_by_name():
    layout = Layout.fully_sharded(min_size=0, blocks=eqx.nn.Linear)
    with pytest.raises(RuleTypeError, match=r"computes with plain arrays.*blocks=\(\)"):
        layout.recipe(build(jax.random.key(0)), MESH)


class Named(eqx.Module):
    weight: Any

    def __call__(self, x):
        return pz.nx.nmap(jnp.dot)(self.weight.untag("in"), x.untag("in"))


def test_a_module_written_for_named_arrays_gets_these_if_asked_for():
    model = Named(pz.nx.ones({"out": 4, "in": 8}))
    options = {"optimizer_def": OPTIMIZER, "root_rng": jax.random.key(0)}
    named = TrainState.initial_state(model, **options, plain_arrays=False)
    plain = TrainState.initial_state(model, **options)

    def weight_in_loss(state):
        def loss(model, rng, state):
            kinds.append(type(model.weight))
            return jnp.zeros(()), state, {}

        kinds = []
        build_eval_step_fn(loss, jit=False)(state)
        return kinds[0]

    assert issubclass(weight_in_loss(named), pz.nx.NamedArray)
    assert issubclass(weight_in_loss(plain), jax.Array)
    assert named.variables != plain.variables


def test_a_trainer_places_plain_inputs_by_their_first_dimension(own_steps):
    options = {"mesh": MESH, "rules": RULES | {"batch": "data"}}
    trainer = StatefulTrainer.build(
        jax.random.key(2),
        build(jax.random.key(0)),
        OPTIMIZER,
        loss_fn,
        first_axis="batch",
        **options,
    )
    aux = trainer.step(x=INPUTS, y=TARGETS)
    np.testing.assert_allclose(aux["loss"], own_steps[0][0], rtol=1e-5)
    weight = trainer.model.mlp.layers[0].weight
    assert weight.data_array.sharding.spec == P("model", "data")
    refusing = StatefulTrainer(trainer.state, loss_fn, **options)
    with pytest.raises(PlanError, match='what the first dimension of plain ones is, first_axis="b'):
        refusing.step(x=INPUTS, y=TARGETS)
    with pytest.raises(RuleTypeError, match="rules need a mesh"):
        StatefulTrainer(trainer.state, loss_fn, first_axis="batch")


def test_a_wrapped_module_is_saved_without_what_is_around_it(tmp_path):
    with pytest.raises(RuleTypeError, match=r"this Jitted has no parameters. Give the Model in it"):
        save_params(tmp_path / "parameters", Jitted(Model(jax.random.key(0))))


def test_modules_without_names_are_copied_with_a_word_of_both_ways_out():
    with pytest.warns(
        ShardingWarning, match=r"name_axes\(module.*or split what is large, .*unnamed=\"largest\""
    ):
        make_plan(Model(jax.random.key(0)), MESH, RULES)


def test_modules_in_a_dictionary_are_named_by_their_paths_too(tmp_path):
    def build_both(key):
        return {"net": build(key), "scale": pz.nx.ones({"out": 8})}

    both = build_both(jax.random.key(0))
    assert len(param_dict(both)) == 5
    assert param_dict(both)["net/mlp/layers/0/weight"] is both["net"].mlp.layers[0].weight
    path = save_params(tmp_path / "parameters", both)
    abstract = abstract_model(build_both, jax.random.key(1))
    restored = restore_params(path, abstract, MESH, RULES)
    assert_same_weights(restored, both, rtol=0)
    assert restored["net"].gain == 1.5
    state = TrainState.initial_state(both, OPTIMIZER, jax.random.key(0))
    assert sorted(state.params) == sorted(param_dict(both))


def test_a_constraint_by_name_pins_the_arrays_of_a_named_module_and_nothing_else():
    constrain = ConstrainShardingByName(MESH, {"out": "model"})
    pinned = constrain(build(jax.random.key(0)))
    assert pinned.mlp.layers[0].weight.data_array.sharding.spec == P("model")
    assert (pinned.gain, pinned.mode, pinned.dropout.inference) == (1.5, "scaled", False)


def test_a_loss_for_plain_arrays_that_gets_named_ones_is_told_how_to_get_plain_ones():
    weights = name_axes({"w": jnp.ones((8, 4)), "b": jnp.ones(4)}, {"w": ("in", "out"), "b": None})

    def loss(model, rng, state, x):
        return jnp.mean((x @ model["w"] + model["b"]) ** 2), state, {}

    def evaluate(**options):
        state = TrainState.initial_state(weights, OPTIMIZER, jax.random.key(0), **options)
        return build_eval_step_fn(loss)(state, x=INPUTS)[0]

    with pytest.raises(TypeError) as raised:
        evaluate()
    said = "\n".join(raised.value.__notes__)
    assert "such as 'w' {'in': 8, 'out': 4}. If it computes with plain arrays" in said
    assert "plain_arrays=True, in Layout.build, TrainState.initial_state" in said
    assert evaluate(plain_arrays=True).shape == ()


def test_the_text_of_the_documentation_runs(capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")  # Put back afterwards.
    page = (Path(__file__).parents[2] / "docs" / "models_from_elsewhere.md").read_text("utf-8")
    section = page.split("## Equinox, dictionaries")[1].partition("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names = {"__name__": "page"}
    exec(compile("\n".join(blocks), "models_from_elsewhere.md", "exec"), names)
    shown = capsys.readouterr().out
    assert "mlp=64/model, embed=16" in shown
    assert "16, 64/data" in shown
    losses = [float(line.split()[1]) for line in shown.splitlines() if line.startswith("loss")]
    assert losses[2] < losses[1] < losses[0]
    assert type(names["module"]) is eqx.nn.MLP
    assert isinstance(names["module"].layers[0].weight, jax.Array)
    assert all(isinstance(array, jax.Array) for array in names["trained"].values())
    assert names["state"].model["0.weight"].sharding.spec == P("data")
