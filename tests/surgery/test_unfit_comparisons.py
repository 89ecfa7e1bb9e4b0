"""Models and inputs that cannot be compared are refused by name, before anything runs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from penzai import pz

from penzai_shard import TrainState, build_train_step_fn, make_mesh, place
from penzai_shard.errors import RuleTypeError
from penzai_shard.surgery import check_equivalent, jit_root, wrap
from tests.surgery.small_models import features, llama, mlp, tokens

GONE = (
    "check_equivalent was called with arrays that are no longer there. Whatever donates an array, "
    "as a train step that donates its state does, returns the one to go on with: take the model "
    "from the newest state, or call before that with a copy."
)
NOT_COMPARABLE = (
    "these cannot be compared: check_equivalent(original, edited, *inputs, **side_inputs) runs two "
    "models on the inputs."
)


def after_a_donated_step(model):
    def loss_fn(model, rng, state, x):
        return jnp.mean(model(x).untag(*features().named_shape).unwrap() ** 2), state, {}

    state = TrainState.initial_state(model, optax.sgd(0.1), jax.random.key(0))
    new, _ = build_train_step_fn(loss_fn, donate_params_and_state=True)(state, x=features())
    return new.model


@pytest.mark.parametrize("is_placed", [True, False])
def test_a_donated_model_is_refused_by_name_in_either_place(is_placed):
    model = mlp(2)
    if is_placed:
        mesh = make_mesh({"data": 4, "model": 2})
        model = place(model, mesh, {"embedding": "data"}, on_unnamed="replicate")
    new = after_a_donated_step(model)
    for role, models in {"original": (model, new), "edited": (new, model)}.items():
        with pytest.raises(RuleTypeError) as caught:
            check_equivalent(*models, features())
        assert str(caught.value).splitlines()[0] == GONE
        assert caught.value.problems[0] == f"{role} block_0/up.weights: was donated or deleted."
        assert len(caught.value.problems) == 4
    assert check_equivalent(new, jit_root().apply(new), features())


def test_an_input_that_was_donated_is_refused():
    gone = features()
    gone.data_array.delete()
    with pytest.raises(RuleTypeError) as caught:
        check_equivalent(mlp(1), mlp(1), gone)
    assert str(caught.value) == f"{GONE}\n  input 1: was donated or deleted."


@pytest.mark.parametrize(
    ("edited", "inputs", "problem"),
    [
        (jit_root(), (features(),), "edited: is a Recipe, not a model. Give what it makes: "
         "recipe.apply(model)."),
        (wrap(pz.nn.Linear, pz.nn.Residual), (features(),), "edited: is an Edit, not a model. Give "
         "what it makes: Recipe(edit).apply(model)."),
        ({"a": 1}, (features(),), "edited: is of type dict, which cannot be called. Give a model."),
        (mlp(1), (jax.eval_shape(features),), "input 1: has a shape and no values. Give an array "
         "of numbers."),
        (mlp(1), (features(), features()), "original: Sequential takes other inputs: too many "
         "positional arguments."),
        (mlp(1), (), "edited: Sequential takes other inputs: missing a required argument: "
         "'value'. Give the inputs after the models: check_equivalent(original, edited, inputs)."),
    ],
)  # fmt: skip
def test_what_is_not_two_models_and_their_inputs_is_refused(edited, inputs, problem):
    with pytest.raises(RuleTypeError, match=re.escape(NOT_COMPARABLE)) as caught:
        check_equivalent(mlp(1), edited, *inputs)
    assert problem in caught.value.problems


def test_a_train_state_in_place_of_a_model_is_refused():
    state = TrainState.initial_state(mlp(1), optax.sgd(0.1), jax.random.key(0))
    with pytest.raises(RuleTypeError, match=r"edited: is of type TrainState.* model: x\.model\."):
        check_equivalent(mlp(1), state, features())


def test_inputs_without_names_are_told_where_the_model_asks_for_names():
    model = llama()
    numbers = np.asarray(tokens().unwrap("batch", "seq"))
    with pytest.raises(RuleTypeError) as caught:
        check_equivalent(model, jit_root().apply(model), numbers)
    assert str(caught.value) == (
        "the models take arrays with logical axes, and these inputs have none:\n  input 1: "
        f"int32[{', '.join(map(str, numbers.shape))}]. Name its logical axes, for instance "
        "pz.nx.wrap(x, 'batch', 'seq')."
    )
