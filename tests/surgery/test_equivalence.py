"""Comparing an edited model with its original."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from penzai import pz
from penzai.toolshed import lora, save_intermediates

from penzai_shard import abstract_model, make_mesh
from penzai_shard.errors import ShardingError
from penzai_shard.layers import Checkpointed, ConstrainShardingByName, InPrecision, Jitted, Scoped
from penzai_shard.placement import name_to_name_device_put
from penzai_shard.surgery import (
    ROOT,
    NotEquivalentError,
    Recipe,
    check_equivalent,
    constrain_blocks,
    insert_after,
    jit_root,
    manual_fsdp,
    mixed_precision,
    rematerialise_blocks,
    replace,
    roll_layer_stacks,
    scope_layers,
    wrap,
)
from penzai_shard.surgery.equivalence.array_comparisons import difference
from tests.surgery.small_models import (
    Block,
    features,
    linear,
    llama,
    mlp,
    scaled,
    shown_by_rich,
    stacked_mlp,
    tokens,
)

MESH = make_mesh({"data": 4, "model": 2})
RULES = {"batch": "data", "embedding": "model"}


def of(report, what):
    (found,) = [part for part in report.comparisons if part.what == what]
    return found


def test_standard_recipes_together_leave_a_model_equivalent():
    model = stacked_mlp()
    recipe = (
        scope_layers()
        + roll_layer_stacks()
        + constrain_blocks(Block, MESH, {"batch": "data"})
        + rematerialise_blocks(Block, "dots")
        + jit_root()
    )
    report = check_equivalent(model, recipe.apply(model), features())
    assert report, report
    assert report.divergence is None
    assert {part.what for part in report.comparisons} == {
        "outputs", "gradients", "state variables", "parameters",
    }  # fmt: skip
    assert of(report, "gradients").count == of(report, "parameters").count == 2
    report.raise_if_different()


def test_manual_sharding_is_equivalent():
    model = mlp(1)
    edited = manual_fsdp(Block, MESH, RULES | {"neurons": "data"}).apply(model)
    report = check_equivalent(model, edited, features())
    assert report, report


@settings(max_examples=3)
@given(
    st.lists(
        st.sampled_from(
            [
                wrap(pz.nn.Linear, Checkpointed),
                wrap(pz.nn.Residual, Scoped),
                wrap(ROOT, Jitted),
                insert_after(pz.nn.Linear, ConstrainShardingByName(MESH, {"batch": "data"})),
                wrap(Block, Jitted),
            ]
        ),
        min_size=1,
        max_size=4,
    )
)
def test_random_recipes_leave_a_model_equivalent(edits):
    model = mlp(1)
    assert check_equivalent(model, Recipe(*edits).apply(model), features())


def test_a_wrong_wrapper_is_caught_and_located():
    model = mlp(2)
    wrong = wrap(pz.nn.Linear, scaled, within="sublayers/1", expect=2)
    edited = (rematerialise_blocks(Block) + jit_root()).apply(Recipe(wrong).apply(model))
    report = check_equivalent(model, edited, features())
    assert not report
    assert not of(report, "outputs").ok
    assert not of(report, "gradients").ok
    assert of(report, "parameters").ok
    assert report.divergence.path == "sublayers/1/sublayers/0/delta/sublayers/0"
    assert report.divergence.layer == "Linear"
    assert not report.divergence.input_differs
    assert report.divergence.relative == pytest.approx(0.01, rel=0.1)


def test_a_wrong_layer_between_two_is_located():
    model = mlp(2)
    edited = Recipe(insert_after("sublayers/0", pz.nn.ConstantRescale(by=1.5))).apply(model)
    report = check_equivalent(model, edited, features(), gradients=False)
    assert report.divergence.path == "sublayers/1/sublayers/0/delta/sublayers/0"
    assert report.divergence.input_differs
    assert report.divergence.after == "sublayers/0"
    assert "look for the cause after sublayers/0 before it" in str(report)


def test_a_wrong_edit_by_hand_is_located():
    model = mlp(2)
    edited = (
        pz.select(model)
        .at(lambda root: root.sublayers[1].sublayers[0].delta.sublayers[1])
        .set(pz.nn.Elementwise(jnp.sin))
    )
    report = check_equivalent(model, edited, features(), gradients=False)
    assert report.divergence.path == "sublayers/1/sublayers/0/delta/sublayers/1"


def test_a_layer_with_other_layers_in_its_place_is_located_as_a_whole():
    model = mlp(1)

    def other(block):
        return pz.nn.Sequential([pz.nn.Identity(), *block.sublayers, pz.nn.Identity()])

    edited = Recipe(replace(Block, lambda block: other(Block(block.sublayers * 2)))).apply(model)
    report = check_equivalent(model, edited, features(), gradients=False)
    assert report.divergence.path == "sublayers/0"


def test_a_wrong_layer_in_a_stack_is_located():
    model = stacked_mlp()
    edited = Recipe(wrap(pz.nn.Elementwise, scaled)).apply(model)
    report = check_equivalent(model, edited, features(), gradients=False)
    assert report.divergence.path == ("sublayers/0/stacked_sublayers/sublayers/0/delta/sublayers/1")
    assert not report.divergence.input_differs


def test_a_wrong_edit_of_a_transformer_is_located():
    model = llama(1, values=True)
    edited = Recipe(wrap("**/input_to_key", scaled, expect=1)).apply(model)
    report = check_equivalent(model, edited, tokens(), gradients=False)
    assert report.divergence.path.endswith("delta/sublayers/1/input_to_key")
    assert report.divergence.relative == pytest.approx(0.01, rel=0.1)


def test_a_difference_in_gradients_alone_is_caught():
    def stopped(layer):
        return pz.nn.Sequential([layer, pz.nn.Elementwise(jax.lax.stop_gradient)])

    model = mlp(1)
    edited = Recipe(wrap(pz.nn.Elementwise, stopped)).apply(model)
    report = check_equivalent(model, edited, features())
    assert of(report, "outputs").ok
    assert not of(report, "gradients").ok
    assert "block_0/up.weights" in of(report, "gradients").worst
    assert check_equivalent(model, edited, features(), gradients=False)


def test_a_lower_precision_is_allowed_what_the_original_would_lose_in_it():
    model = mlp(1)
    report = check_equivalent(model, mixed_precision().apply(model), features())
    assert report, report
    outputs = of(report, "outputs").arrays[0]
    assert outputs.relative > 1e-4
    assert 1e-3 < outputs.rounding < 2e-2
    assert outputs.own.allowed < 0.1
    assert outputs.function.off_by < 1e-12
    assert report.text_verdict() == "equivalent within what bfloat16 rounds away"
    assert "what the original would be if it rounded all to bfloat16" in report.plain_text(200)


def test_renamed_and_missing_parameters_are_reported():
    model = mlp(1)

    def other(layer):
        return dataclasses.replace(
            layer, weights=pz.Parameter(value=layer.weights.value, label="other.weights")
        )

    renamed = Recipe(replace("**/delta/sublayers/0", other, expect=1))
    report = check_equivalent(model, renamed.apply(model), features(), gradients=False)
    assert of(report, "parameters").problems == (
        "block_0/up.weights: parameter is missing from the edited model; other.weights has its "
        "values there",
        "other.weights: parameter of the edited model alone",
    )


def test_parameters_of_another_shape_are_reported_and_nothing_is_run():
    model = mlp(1, size=4)
    report = check_equivalent(model, mlp(1, size=8), features())
    assert not report
    assert of(report, "parameters").problems[0] == (
        "block_0/up.weights: float32[embedding=4, neurons=8] became "
        "float32[embedding=8, neurons=16]"
    )
    assert "The models were not run" in str(report)


class TestValues:
    """Parameters are compared by name and value."""

    def doubled(self, model):
        tree, parameters = pz.unbind_params(model, freeze=True)
        twice = [jax.tree.map(lambda x: 2 * x, parameter) for parameter in parameters]
        return pz.bind_variables(tree, twice, unfreeze_as_copy=True)

    def test_a_model_with_every_weight_doubled_is_refused_by_names_grouped(self):
        model = mlp(3)
        report = check_equivalent(model, self.doubled(model), features(), gradients=False)
        assert not report
        assert [part.what for part in report.comparisons if not part.ok] == ["parameters"]
        assert of(report, "parameters").problems[0] == (
            "block_0/up.weights: parameter has other values"
        )
        assert of(report, "parameters").relative == pytest.approx(1)
        text = report.plain_text(200)
        for name in ("up", "down"):
            assert (
                f"block_*/{name}.weights (3 times, * = 0-2): parameter has other values\n" in text
            )

    def test_a_recipe_that_doubles_weights_is_refused(self):
        def doubled(layer):
            return dataclasses.replace(
                layer,
                weights=pz.Parameter(value=layer.weights.value * 2, label=layer.weights.label),
            )

        model = mlp(1)
        edited = Recipe(replace(pz.nn.Linear, doubled, expect=2)).apply(model)
        message = r"(?s)block_0/up.weights: parameter has other values.*block_0/down.weights: "
        with pytest.raises(NotEquivalentError, match=message):
            check_equivalent(model, edited, features()).raise_if_different()

    def test_values_that_differ_by_rounding_alone_are_named_as_such(self):
        model = mlp(2)
        leaves, tree = jax.tree.flatten(pz.freeze_params(model))
        nudged = [jnp.asarray(np.nextafter(np.asarray(leaf), np.float32(9))) for leaf in leaves]
        report = check_equivalent(
            model, tree.unflatten([*nudged[:2], *leaves[2:]]), features(), gradients=False
        )
        assert of(report, "parameters").problems == tuple(
            f"block_0/{name}.weights: parameter has other values, by rounding alone (up to 1 ulp)"
            for name in ("up", "down")
        )
        assert of(report, "outputs").ok
        assert (
            "Values that differ by rounding alone may come from the same initialisers, run "
            "compiled (as sharded_init does) and not. same_values=False compares only what the "
            "models compute."
        ) in report.notes
        assert check_equivalent(
            model, tree.unflatten(nudged), features(), gradients=False, same_values=False
        )

    def test_the_report_says_that_both_ran_on_the_originals_values(self):
        note = (
            "Both models ran on the original's parameters and state, whatever values the edited "
            "model has."
        )
        model = mlp(1)
        report = check_equivalent(model, self.doubled(model), features(), gradients=False)
        assert of(report, "outputs").ok
        assert report.notes == (note,)
        assert note not in check_equivalent(model, model, features(), gradients=False).notes

    def test_models_of_two_seeds_are_refused(self):
        report = check_equivalent(linear("w", 0), linear("w", 1), features(), gradients=False)
        assert of(report, "parameters").problems == ("w.weights: parameter has other values",)

    def test_the_verdict_says_that_values_were_not_compared(self):
        model, other = mlp(1), self.doubled(mlp(1))
        before = [parameter.value for parameter in pz.unbind_params(other)[1]]
        report = check_equivalent(model, jit_root().apply(other), features(), same_values=False)
        assert report, report
        assert report.max_ulps == 0
        assert str(report).splitlines()[0] == (
            "equivalent; not compared: values of parameters and of state variables before the call"
        )
        after = [parameter.value for parameter in pz.unbind_params(other)[1]]
        assert all(one is two for one, two in zip(before, after, strict=True))

    @pytest.mark.parametrize(("values", "name"), [((5.0, 2.0), "w"), ((1.0, 5.0), "w (2)")])
    def test_frozen_parameters_of_one_name_are_compared_one_by_one(self, values, name):
        def layer(value):
            weights = pz.nx.wrap(jnp.full((2, 2), value), "a", "b")
            frozen = pz.ParameterValue(value=weights, label="w", metadata={})
            return pz.nn.Linear(frozen, ("a",), ("b",))

        def model(one, other):
            return pz.nn.Sequential([layer(one), pz.nn.RenameAxes("b", "a"), layer(other)])

        x = pz.nx.ones({"a": 2})
        report = check_equivalent(model(1.0, 2.0), model(*values), x, gradients=False)
        assert of(report, "parameters").problems == (f"{name}: parameter has other values",)
        assert check_equivalent(model(1.0, 1.0), model(1.0, 1.0), x, gradients=False)

    def test_both_run_on_the_values_of_the_original(self):
        model, other = mlp(1), self.doubled(mlp(1))
        report = check_equivalent(model, other, features(), same_values=False, gradients=False)
        assert report.max_ulps == 0

    def test_sharded_values_are_the_same_values(self):
        model = mlp(1)
        placed = name_to_name_device_put(model, MESH, {"embedding": "data", "neurons": "model"})
        assert check_equivalent(model, placed, features(), gradients=False)

    def test_a_dtype_changed_on_purpose_is_refused_by_name(self):
        model = linear("w")
        cast = dataclasses.replace(
            model,
            weights=pz.Parameter(value=model.weights.value.astype("bfloat16"), label="w.weights"),
        )
        report = check_equivalent(model, cast, features())
        assert of(report, "parameters").problems == (
            "w.weights: float32[embedding=4, neurons=8] became bfloat16[embedding=4, neurons=8]",
        )

    def test_abstract_models_run_on_drawn_values_and_the_verdict_says_so(self):
        model = abstract_model(mlp, 1)
        report = check_equivalent(model, jit_root().apply(model), features(), gradients=False)
        assert report, report
        assert str(report).splitlines()[0] == (
            "equivalent; not compared: values of parameters, which an abstract model lacks"
        )
        wrong = Recipe(wrap(pz.nn.Elementwise, scaled)).apply(model)
        assert not check_equivalent(model, wrong, features(), gradients=False)

    def test_added_parameters_are_refused_or_reported(self):
        def adapted(layer, path):
            return lora.LowRankAdapter.from_linear(
                layer, f"LoRA:{path}", init_base_rng=jax.random.key(1), rank=2
            )

        model = mlp(1)
        edited = Recipe(replace(pz.nn.Linear, adapted, expect=2)).apply(model)
        report = check_equivalent(model, edited, features())
        assert [part.ok for part in report.comparisons] == [False, True, True, True]
        assert all(
            problem.endswith(": parameter of the edited model alone")
            for problem in of(report, "parameters").problems
        )
        allowed = check_equivalent(model, edited, features(), added_parameters=True)
        assert allowed, allowed
        assert allowed.text_verdict().startswith(
            "equivalent; not compared: parameters of the edited model alone: LoRA:"
        )


def test_an_edited_model_that_is_sharded_is_compared_with_one_that_is_not():
    model, other = mlp(1), mlp(1)
    edited = constrain_blocks(Block, MESH, {"batch": "data"}).apply(other)
    placed = name_to_name_device_put(edited, MESH, {"embedding": "data", "neurons": "model"})
    report = check_equivalent(model, placed, features())
    assert report, report


@pz.pytree_dataclass
class Counter(pz.nn.Layer):
    """Adds how often it was called, and counts by some step."""

    count: pz.StateVariable
    step: float

    def __call__(self, value, **side_inputs):
        self.count.value = self.count.value + self.step
        return value


class TestState:
    def model(self, step=1.0):
        count = pz.StateVariable(jnp.float32(0), label="count")
        return pz.nn.Sequential([linear("w"), Counter(count, step)])

    def test_state_variables_are_compared_and_stay_as_they_are(self):
        model = self.model()
        edited = (jit_root() + rematerialise_blocks(pz.nn.Linear)).apply(model)
        report = check_equivalent(model, edited, features())
        assert report, report
        assert of(report, "state variables").count == 1
        assert float(model.sublayers[1].count.value) == 0

    def test_another_state_is_caught(self):
        report = check_equivalent(self.model(), self.model(step=2.0), features())
        assert of(report, "outputs").ok
        assert not of(report, "state variables").ok
        assert of(report, "state variables").worst == "count"

    def test_another_state_before_the_call_is_caught(self):
        model, other = self.model(), self.model()
        other.sublayers[1].count.value = jnp.float32(7)
        report = check_equivalent(model, other, features())
        assert of(report, "state variables").problems == (
            "count: state variable has another value before the call",
        )
        assert check_equivalent(model, other, features(), same_values=False)

    def test_state_that_only_the_edited_model_has_is_reported_and_allowed(self):
        model = self.model()
        edited = Recipe(
            insert_after(
                pz.nn.Linear,
                save_intermediates.SaveIntermediate(pz.StateVariable(None, label="saved")),
            )
        ).apply(model)
        report = check_equivalent(model, edited, features())
        assert report, report
        assert "state variables of the edited model alone: saved" in str(report)

    def test_variables_in_the_inputs_stay_as_they_are(self):
        rng = pz.RandomStream(jax.random.key(0), pz.StateVariable(0, label="offset"))
        model = pz.nn.Sequential(
            [linear("w"), pz.nn.StochasticDropout(0.5, random_stream_input_name="rng")]
        )
        report = check_equivalent(model, jit_root().apply(model), features(), rng=rng)
        assert report, report
        assert rng.offset.value == 0


class TestTheReport:
    def test_what_differs_alike_in_equal_blocks_is_one_line(self):
        blocks = 4
        model = mlp(blocks)
        edited = pz.select(model).at_instances_of(pz.nn.Residual).apply(lambda layer: layer.delta)
        report = check_equivalent(model, edited, features())
        gradients = of(report, "gradients")
        assert len(gradients.problems) == 2 * blocks
        for name in ("up", "down"):
            arrays = [array for array in gradients.arrays if f"/{name}.weights" in array.name]
            worst = max(arrays, key=lambda array: array.excess).function.off_by
            (line,) = {
                line.partition(": ")[2] for line in gradients.problems if f"/{name}.weights" in line
            }
            assert line.startswith(f"gradient is off by up to {worst:.1g} in float64, where ")
            folded = f"({blocks} times, * = 0-{blocks - 1}): {line}"
            assert folded in report.plain_text(300)

    def test_it_is_a_short_table(self):
        model = mlp(1)
        edited = Recipe(wrap(pz.nn.Elementwise, scaled)).apply(model)
        text = check_equivalent(model, edited, features(), gradients=False).plain_text(200)
        lines = text.splitlines()
        assert lines[0] == "NOT equivalent"
        assert re.split("  +", lines[1]) == [
            "compared", "arrays", "worst at", "rounding", "off by", "allowed", "in float64",
            "allowed there",
        ]  # fmt: skip
        assert "DIFFERENT" in lines[4]
        assert lines[6].startswith(
            "first to differ: Elementwise at sublayers/0/sublayers/0/delta/sublayers/1"
        )
        assert lines[7].startswith("(batch, embedding): output is off by 0.0")
        assert len(lines) < 12

    def test_it_lists_every_array_with_its_yardstick(self):
        model = mlp(2)
        table = check_equivalent(model, jit_root().apply(model), features()).arrays()
        rows = {row[1]: row for row in table.text_rows()}
        assert rows["block_*/up.weights(embedding, neurons)"][2] == "2"
        assert all(1e-9 < float(row[3]) < 1e-5 for row in rows.values())

    def test_a_notebook_shows_the_verdict_first_in_little_space(self):
        model = stacked_mlp(12)
        report = check_equivalent(model, jit_root().apply(model), features())
        shown = report._repr_html_()
        assert len(shown) < 20_000
        assert re.sub("<style>.*?</style>|<[^>]*>", "", shown).startswith("equivalent")
        held = jax.tree.leaves(dataclasses.asdict(report))
        assert not any(isinstance(leaf, jax.Array | np.ndarray) for leaf in held)

    def test_rich_shows_the_same(self):
        report = check_equivalent(mlp(1), mlp(1), features())
        assert "equivalent" in shown_by_rich(report)

    def test_a_difference_can_be_raised(self):
        model = mlp(1)
        edited = Recipe(wrap(pz.nn.Elementwise, scaled)).apply(model)
        report = check_equivalent(model, edited, features(), gradients=False)
        message = (
            r"does not compute what the original computes:\n  The first layer to differ is "
            r"Elementwise at .*\n  \(batch, embedding\): output is off by 0.00\d in float64, where "
            r".* is allowed"
        )
        with pytest.raises(NotEquivalentError, match=message):
            report.raise_if_different()
        assert issubclass(NotEquivalentError, ShardingError)

    def test_other_outputs_are_reported(self):
        model = mlp(1)
        edited = Recipe(insert_after(ROOT, pz.nn.Elementwise(lambda x: x > 0))).apply(model)
        report = check_equivalent(model, edited, features(), gradients=False)
        assert "(batch, embedding): output dtype float32 became bool" in str(report)

    def test_outputs_that_are_no_real_numbers_have_no_gradients(self):
        model = pz.nn.Sequential([pz.nn.Elementwise(lambda x: x > 0)])
        report = check_equivalent(model, jit_root().apply(model), features())
        assert report
        assert "gradients were not compared" in str(report)


class TestDifferences:
    def test_equal_arrays(self):
        found = difference("w", np.float32([1, np.nan, np.inf]), np.float32([1, np.nan, np.inf]))
        assert (found.ulps, found.relative, found.problem) == (0, 0, "")

    @pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
    def test_neighbours_are_one_unit_apart(self, dtype):
        one = np.asarray([3.0], jnp.dtype(dtype))
        eps = float(jnp.finfo(dtype).eps)
        other = (one.astype(np.float64) + 2 * eps).astype(jnp.dtype(dtype))
        assert difference("w", one, other).ulps == 1

    def test_the_size_of_the_array_counts_and_not_that_of_the_element(self):
        found = difference("w", np.float32([1.0, 1e-9]), np.float32([1.0, 2e-9]))
        assert found.relative == pytest.approx(1e-9)

    def test_numbers_that_became_nan(self):
        found = difference("w", np.float32([1.0, 2.0]), np.float32([1.0, np.nan]))
        assert found.relative == np.inf
        assert found.problem == "1 of 2 elements are not finite alike"

    def test_integers_are_equal_or_not(self):
        assert difference("w", np.arange(3), np.arange(3)[::-1]).problem == "2 of 3 elements differ"

    def test_shapes(self):
        assert "shape [2] became [3]" in difference("w", np.ones(2), np.ones(3)).problem


@pz.pytree_dataclass
class OfOnePath(pz.nn.Layer):
    """Gives two outputs that have the same path as text."""

    factor: float = dataclasses.field(metadata={"pytree_node": False})

    def __call__(self, value, **side_inputs):
        return {"a": {"b": value * self.factor}, "a/b": value}


def test_outputs_of_one_path_are_compared_one_by_one():
    report = check_equivalent(OfOnePath(1.0), OfOnePath(2.0), features(), gradients=False)
    assert [part.ok for part in report.comparisons] == [True, False, True]
    assert of(report, "outputs").count == 2
    assert check_equivalent(OfOnePath(2.0), OfOnePath(2.0), features(), gradients=False)


def test_a_layer_may_be_compared_alone():
    layer = linear("w")
    assert check_equivalent(layer, InPrecision(layer, "float32"), features())


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_models_that_give_no_finite_number_alike_are_equivalent(value):
    linear = pz.nn.Linear.from_config("w", jax.random.key(0), {"a": 4}, {"b": 4})
    model = pz.nn.Sequential([linear, pz.nn.Elementwise(lambda x: jnp.full_like(x, value))])
    assert check_equivalent(model, jit_root().apply(model), pz.nx.ones({"a": 4}))
