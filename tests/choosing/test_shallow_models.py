"""A deep model cut to one and two blocks: what is cut, what is left, and what is not cut."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from penzai import pz

from penzai_shard import Layout, RolledLayerStack, abstract_model, make_plan
from penzai_shard.choosing.candidates import Candidate
from penzai_shard.choosing.choices.stages import stages_of
from penzai_shard.choosing.shallow_models import shallow
from penzai_shard.choosing.training_problem import TrainingProblem
from tests.choosing.small_problems import llama, next_token_loss, problem_of
from tests.model_families import GLOBAL, LOCAL
from tests.small_train_steps import squares


def labels(model):
    frozen = pz.select(model).at_instances_of(pz.ParameterValue).get_sequence()
    return [parameter.label for parameter in frozen]


def sizes(model):
    """The bytes of each parameter, of which a model's own are the sum."""
    mesh = jax.sharding.AbstractMesh((1,), ("data",))
    return sum(leaf.bytes_per_device for leaf in make_plan(model, mesh, {}).leaves)


def assert_extrapolates_sizes(problem, found):
    one, two = (sizes(cut.model) for cut in found.problems)
    assert one + (found.blocks - 1) * (two - one) == sizes(problem.model)


@pytest.mark.parametrize("mlp", ["swiglu", "geglu_approx"])
def test_blocks_of_a_transformer_are_cut_and_the_rest_keeps_its_labels(mlp):
    problem = problem_of(llama(5, mlp=mlp))
    found = shallow(problem)
    assert found.blocks == 5
    assert not found.is_loop
    assert found.doubt == ""
    one, two = (labels(cut.model) for cut in found.problems)
    every = labels(problem.model)
    assert one == [name for name in every if "block_" not in name or "block_0" in name]
    assert two == [
        name for name in every if "block_" not in name or "block_0" in name or "block_1" in name
    ]
    assert_extrapolates_sizes(problem, found)


@pytest.mark.parametrize("policy", [None, False, "carries"])
def test_stacks_are_cut_along_their_logical_axis(policy):
    model = llama(5, stack=True)
    if policy is not None:
        model = (
            pz.select(model)
            .at_instances_of(pz.nn.LayerStack)
            .apply(lambda stack: RolledLayerStack.from_layer_stack(stack, policy=policy))
        )
    problem = problem_of(model)
    found = shallow(problem)
    assert found.blocks == 5
    assert found.is_loop == (policy is not None)
    for kept, cut in enumerate(found.problems, 1):
        (stack,) = pz.select(cut.model).at_instances_of(pz.nn.LayerStack).get_sequence()
        assert stack.stack_axis_size == kept
        assert getattr(stack, "policy", None) == policy
        # No loop is left, in which not every block would be in sight.
        assert getattr(stack, "unroll", kept) == kept
        assert labels(cut.model) == labels(problem.model)
    assert_extrapolates_sizes(problem, found)


def linear(label, size=16, out=16):
    return pz.nn.Linear.from_config(label, jax.random.key(0), {"embedding": size}, {"o": out})


def back(label):
    return pz.nn.Linear.from_config(label, jax.random.key(0), {"o": 16}, {"embedding": 16})


def mlp_problem(build, loss_fn=squares):
    x = jax.eval_shape(lambda: pz.nx.ones({"batch": 8, "embedding": 16}))
    return TrainingProblem(abstract_model(build), loss_fn, optax.sgd(0.1), {"x": x})


def test_layers_that_repeat_together_are_one_block():
    def build():
        layers = [linear("first"), back("first_back")]
        for i in range(4):
            layers += [linear(f"b{i}/up"), pz.nn.Elementwise(jnp.tanh), back(f"b{i}/down")]
        return pz.nn.Sequential(layers)

    found = shallow(mlp_problem(build))
    assert found.blocks == 4
    kept = ["first.weights", "first_back.weights", "b0/up.weights", "b0/down.weights"]
    assert labels(found.problems[0].model) == kept


def test_local_and_global_attention_in_turn_is_cut_to_the_unfinished_turn():
    kinds = (LOCAL, LOCAL, GLOBAL)
    problem = problem_of(llama(11, attention_type=[kinds[i % 3] for i in range(11)]))
    found = shallow(problem)
    assert found.blocks == 4
    every = labels(problem.model)
    for cut, kept in zip(found.problems, ((9, 10), (0, 1, 2, 9, 10)), strict=True):
        blocks = tuple(f"block_{number}/" for number in kept)
        assert labels(cut.model) == [
            name for name in every if "block_" not in name or any(map(name.__contains__, blocks))
        ]
    assert_extrapolates_sizes(problem, found)


def test_an_unfinished_turn_without_some_of_the_parameters_is_not_all_that_is_kept():
    def build():
        layers = []
        for i in range(3):
            layers += [linear(f"b{i}/up"), pz.nn.Elementwise(jnp.tanh), back(f"b{i}/down")]
        return pz.nn.Sequential([*layers, linear("b3/up"), back("last")])

    found = shallow(mlp_problem(build))
    assert found.blocks == 3
    kept = ["b0/up.weights", "b0/down.weights", "b3/up.weights", "last.weights"]
    assert labels(found.problems[0].model) == kept


def test_an_unfinished_turn_does_not_stand_for_what_the_others_share():
    def build():
        shared = [linear("shared_0"), back("shared_0/back")]
        layers = [pz.nn.Elementwise(jnp.tanh), pz.nn.Softmax("embedding")]
        turns = [layer for _ in range(3) for layer in (*shared, *layers)]
        return pz.nn.Sequential([*turns[:12], linear("shared_1"), back("shared_1/back")])

    found = shallow(mlp_problem(build))
    assert found.blocks == 3
    assert "shared_0.weights" in labels(found.problems[0].model)


def test_only_the_equal_ones_among_blocks_are_cut():
    def build():
        widths = (16, 24, 16, 16, 16, 32)
        pairs = [
            pz.nn.Sequential(
                [
                    linear(f"b{i}/up", out=width),
                    pz.nn.Linear.from_config(
                        f"b{i}/down", jax.random.key(0), {"o": width}, {"embedding": 16}
                    ),
                ]
            )
            for i, width in enumerate(widths)
        ]
        return pz.nn.Sequential(pairs)

    problem = mlp_problem(build)
    found = shallow(problem)
    assert found.blocks == 3
    assert [name[:2] for name in labels(found.problems[0].model)[::2]] == ["b0", "b1", "b2", "b5"]
    assert_extrapolates_sizes(problem, found)


def test_blocks_that_are_all_different_are_not_cut():
    def build():
        return pz.nn.Sequential(
            [
                pz.nn.Sequential([linear(f"b{i}/up", out=n), pz.nn.Softmax("o")])
                for i, n in enumerate((8, 16, 24, 32))
            ]
        )

    problem = mlp_problem(build)
    found = shallow(problem)
    assert found.problems == (problem,)
    assert found.blocks == 1
    assert found.doubt == ""


def test_blocks_that_share_a_parameter_with_some_others_are_not_cut():
    def build():
        shared = [linear("a"), linear("b")]
        blocks = [pz.nn.Sequential([shared[i % 2], back(f"block_{i}")]) for i in range(4)]
        return pz.nn.Sequential(blocks)

    problem = mlp_problem(build)
    # Each would hold fewer parameters than half of the model says.
    assert len(set(labels(problem.model))) == 2 + 4
    assert shallow(problem).problems == (problem,)


def test_a_parameter_of_all_blocks_stays_one():
    def build():
        shared = linear("shared")
        return pz.nn.Sequential([pz.nn.Sequential([shared, back(f"block_{i}")]) for i in range(4)])

    found = shallow(mlp_problem(build))
    assert found.blocks == 4
    two = labels(found.problems[1].model)
    assert sorted(set(two)) == [
        "block_0.weights",
        "block_1.weights",
        "shared.weights",
    ]


def test_a_loss_whose_aux_depends_on_depth_is_cut():
    def with_norms(*, model, rng, state, tokens):
        loss, state, _ = next_token_loss(model=model, rng=rng, state=state, tokens=tokens)
        parameters = pz.select(model).at_instances_of(pz.ParameterValue).get_sequence()
        scales = [jnp.sum(one.value.unwrap(*one.value.named_axes)) for one in parameters]
        return loss, state, {"norms": jnp.stack(scales)}

    assert shallow(problem_of(llama(4), with_norms)).blocks == 4


def test_a_loss_that_asks_for_every_block_is_not_cut():
    def with_last_block(*, model, rng, state, tokens):
        assert len(model.body.sublayers) == 8, "five blocks and what is around them"
        return next_token_loss(model=model, rng=rng, state=state, tokens=tokens)

    problem = problem_of(llama(5), with_last_block)
    found = shallow(problem)
    assert found.problems == (problem,)
    assert found.doubt == (
        "the loss function does not run on fewer of the 5 blocks (AssertionError: five blocks and "
        "what is around them)"
    )


class Towers(eqx.Module):
    layers: list
    head: eqx.nn.Linear

    def __init__(self):
        key = jax.random.key(0)
        self.layers = [eqx.nn.MLP(8, 8, 16, 1, key=key) for _ in range(4)]
        self.head = eqx.nn.Linear(8, 4, key=key)


def equinox_problem(run):
    def loss(*, model, rng, state, x):
        del rng
        return jnp.mean(jax.vmap(lambda one: model.head(run(model, one)))(x) ** 2), state, {}

    model = eqx.filter_eval_shape(Towers)
    return TrainingProblem(
        model, loss, optax.sgd(0.1), {"x": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
    )


def one_after_the_other(model, x):
    for layer in model.layers:
        x = x + layer(x)
    return x


def at_most_three(model, x):
    for layer in model.layers[:3]:
        x = x + layer(x)
    return x


def by_number(model, x):
    return x + model.layers[3](x)


def test_blocks_in_a_list_of_another_library_are_cut_if_the_loss_computes_that_much_less():
    found = shallow(equinox_problem(one_after_the_other))
    assert found.blocks == 4
    assert [len(cut.model.layers) for cut in found.problems] == [1, 2]


@pytest.mark.parametrize(
    ("run", "doubt"),
    [
        (
            at_most_three,
            "with fewer of the 4 blocks the loss function does not compute as much less",
        ),
        (
            by_number,
            "the loss function does not run on fewer of the 4 blocks (IndexError: list index out "
            "of range)",
        ),
    ],
)
def test_a_list_that_a_loss_does_not_run_through_once_is_not_cut(run, doubt):
    problem = equinox_problem(run)
    found = shallow(problem)
    assert found.problems == (problem,)
    assert found.doubt == doubt
    notes = []
    by_names = stages_of(problem, notes=notes)[0]
    layout = Layout(parameters={}, compute={"batch": "data"}, blocks=())
    list(by_names.costs([Candidate((("data", 2),), layout)]))
    assert notes == [f"Priced whole, which takes longer: {doubt}."]


def test_what_is_beside_the_model_stays():
    problem = problem_of(llama(3))
    for cut in shallow(problem).problems:
        assert dataclasses.replace(cut, model=problem.model) == problem
