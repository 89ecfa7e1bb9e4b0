"""Auxiliary outputs: what they may be, put together over microbatches, and laid out."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from penzai import pz

from penzai_shard.errors import RuleTypeError, ShardingError
from penzai_shard.training import TrainState, build_train_step_fn

VALUES = jnp.arange(16.0)


def state():
    return TrainState.initial_state({"w": jnp.zeros(())}, optax.sgd(0.1), jax.random.key(0))


def run(make_aux, accumulate_steps=4, **options):
    """The auxiliary outputs of one step; ``make_aux`` sees one microbatch's values."""

    def loss_fn(model, rng, state, x):
        return model["w"] * 1.0, state, make_aux(x.unwrap("batch"))

    step = build_train_step_fn(loss_fn, accumulate_steps=accumulate_steps, **options)
    return step(state(), x=pz.nx.wrap(VALUES, "batch"))[1]


def counts(x):
    """How many values are multiples of three, and how many there are: 6 of 16."""
    return {"loss": jnp.mean(x), "accuracy": (jnp.sum(x % 3 == 0), x.size)}


@pytest.mark.parametrize("steps", [1, 2, 4, 16])
@pytest.mark.parametrize("jit", [True, False])
def test_a_count_is_that_of_the_whole_batch(steps, jit):
    aux = run(counts, steps, jit=jit, aux_reduction={"accuracy": "sum"})
    assert [int(x) for x in aux["accuracy"]] == [6, 16]
    assert aux["accuracy"][0].dtype == jnp.int32
    np.testing.assert_allclose(aux["loss"], VALUES.mean(), rtol=1e-6)


@pytest.mark.parametrize(
    ("word", "expected"),
    [("mean", 7.5), ("sum", 30.0), ("max", 9.0), ("min", 6.0), ("last", 9.0)],
)
def test_one_word_serves_all_outputs(word, expected):
    # Part i of four has the values i, i + 4, i + 8 and i + 12, whose mean is 6 + i.
    for aux in (
        run(jnp.mean, aux_reduction=word),
        run(lambda x: {"a": {"b": jnp.mean(x)}}, aux_reduction={"a": {"b": word}})["a"]["b"],
        run(lambda x: {"a": {"b": jnp.mean(x)}}, aux_reduction={"a/b": word})["a"]["b"],
        run(lambda x: {"a": {"b": jnp.mean(x)}}, aux_reduction={"a": word})["a"]["b"],
    ):
        np.testing.assert_allclose(aux, expected)


def test_the_longest_path_counts_and_named_arrays_keep_their_names():
    aux = run(
        lambda x: {"a": {"b": x[0], "c": x[0]}, "n": pz.nx.wrap(x, "example")},
        aux_reduction={"a": "sum", "a/c": "last", "n": "max"},
    )
    assert (float(aux["a"]["b"]), float(aux["a"]["c"])) == (6.0, 3.0)
    assert dict(aux["n"].named_shape) == {"example": 4}
    np.testing.assert_array_equal(aux["n"].unwrap("example"), [3.0, 7.0, 11.0, 15.0])


def test_what_is_not_floating_and_not_declared_is_refused_by_name():
    def make_aux(x):
        return counts(x) | {"key": jax.random.key(0), "any": jnp.any(x > 3)}

    with pytest.raises(ShardingError, match="outputs of 4 microbatches cannot be put") as caught:
        run(make_aux)
    fix = "Say how its 4 values become one: aux_reduction="
    more = ", or another of 'mean', 'sum', 'max', 'min', 'last'."
    assert caught.value.problems == (
        "accuracy/0: of int32, which is not averaged by itself. "
        f"{fix}{{'accuracy/0': 'sum'}}{more}",
        "accuracy/1: of int32, which is not averaged by itself. "
        f"{fix}{{'accuracy/1': 'sum'}}{more}",
        f"any: of bool, which is not averaged by itself. {fix}{{'any': 'sum'}}{more}",
        f"key: of key<fry>, which is not averaged by itself. {fix}{{'key': 'last'}}{more}",
    )
    assert int(run(make_aux, accumulate_steps=1)["accuracy"][0]) == 6


@pytest.mark.parametrize("steps", [1, 4])
def test_a_declaration_of_no_output_is_refused(steps):
    with pytest.raises(ShardingError) as caught:
        run(counts, steps, aux_reduction={"acuracy": "sum", "losss": "mean"})
    assert any(
        p.startswith("aux_reduction names 'losss', which is not an output. Did you mean 'loss'?")
        for p in caught.value.problems
    )


def test_a_key_cannot_be_summed():
    with pytest.raises(ShardingError, match=r"k: 'sum' is not defined for key<fry>\. Say 'last'"):
        run(lambda x: {"k": jax.random.key(1)}, aux_reduction="sum")


@pytest.mark.parametrize("word", ["average", 3, ["sum"], {"a": {"b": "Sum"}}, {"a": None}])
def test_unknown_words_are_refused(word):
    with pytest.raises(RuleTypeError, match="it must be one of 'mean', 'sum', 'max', 'min', 'last"):
        build_train_step_fn(counts, aux_reduction=word)


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("steps", [1, 4])
def test_outputs_that_are_not_arrays_are_refused_by_path(jit, steps):
    variable = pz.StateVariable(value=1.0, label="v")
    with pytest.raises(ShardingError, match="something that is not an array") as caught:
        run(lambda x: {"ok": x, "name": "abc", "fn": [print], "v": variable}, steps, jit=jit)
    text = "\n".join(caught.value.problems)
    assert "aux/name: is the str 'abc', not an array." in text
    assert "aux/fn/0: is" in text
    assert "of a variable return its .value" in text


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("explicit", [True, False])
def test_outputs_lie_as_declared(jit, explicit, mesh, explicit_mesh):
    chosen = explicit_mesh if explicit else mesh
    split = NamedSharding(chosen, PartitionSpec("data"))
    aux = run(
        lambda x: {"x": x * 2, "n": pz.nx.wrap(x, "example"), "free": x, "none": None},
        1,
        jit=jit,
        aux_output_shardings={"x": split, "n": split, "free": None, "none": None},
    )
    twin = NamedSharding(mesh, PartitionSpec("data"))
    assert aux["x"].sharding == twin
    assert aux["n"].data_array.sharding == twin
    assert {s.data.shape for s in aux["x"].addressable_shards} == {(4,)}
    np.testing.assert_array_equal(aux["x"], VALUES * 2)


def test_one_sharding_serves_all_outputs(mesh):
    replicated = NamedSharding(mesh, PartitionSpec())
    aux = run(counts, aux_reduction={"accuracy": "sum"}, aux_output_shardings=replicated)
    assert {leaf.sharding for leaf in jax.tree.leaves(aux)} == {replicated}


def test_layouts_that_do_not_fit_the_outputs_are_refused(mesh):
    split = NamedSharding(mesh, PartitionSpec("data"))
    with pytest.raises(ShardingError, match="aux_output_shardings do not fit") as caught:
        run(lambda x: {"a": x[:3], "b": x, "c": x[0]}, 1, aux_output_shardings=split)
    assert [p.split(":")[0] for p in caught.value.problems] == ["a", "c"]
    with pytest.raises(ShardingError, match="not shaped like the auxiliary outputs, which are 'a'"):
        run(lambda x: {"a": x}, 1, aux_output_shardings={"b": split})


@pytest.mark.parametrize("bad", ["data", PartitionSpec("data"), {"x": 3}])
def test_what_is_not_a_sharding_is_refused(bad):
    with pytest.raises(RuleTypeError, match="aux_output_shardings must hold shardings"):
        build_train_step_fn(counts, aux_output_shardings=bad)
