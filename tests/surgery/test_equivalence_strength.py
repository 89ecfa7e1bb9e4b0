"""What ``check_equivalent`` lets through, judged by an oracle that shares no code with it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from penzai import pz

from penzai_shard import make_mesh
from penzai_shard.layers import Checkpointed, ConstrainShardingByName, InPrecision, Jitted, Scoped
from penzai_shard.library_apis.jax_api import UNOPTIMISED_COMPILATION
from penzai_shard.surgery import (
    ROOT,
    Recipe,
    check_equivalent,
    constrain_blocks,
    insert_after,
    insert_before,
    jit_root,
    manual_fsdp,
    mixed_precision,
    rematerialise_blocks,
    scope_layers,
    wrap,
)
from penzai_shard.surgery.equivalence import check, model_steps, paired_runs
from tests.model_families import drawn_transformer, with_drawn_values
from tests.surgery.small_models import Block, features, mlp, tokens

MESH = make_mesh({"data": 4, "model": 2})


@pz.pytree_dataclass
class Tally(pz.nn.Layer):
    """Adds up what flows through, in a large and a small state variable."""

    large: pz.StateVariable
    small: pz.StateVariable
    step: float = dataclasses.field(default=1.0, metadata={"pytree_node": False})
    part: float = dataclasses.field(default=1e-3, metadata={"pytree_node": False})

    def __call__(self, value, **side_inputs):
        total = value.untag(*value.named_axes).data_array.sum().astype(jnp.float32)
        self.large.value = self.large.value + 1e6 * self.step
        self.small.value = self.small.value + self.part * total
        return value


@pz.pytree_dataclass
class Split(pz.nn.Layer):
    """Gives its value, and a part of it a million times smaller."""

    small: pz.nn.Layer

    def __call__(self, value, **side_inputs):
        return {"large": 1e3 * value, "small": self.small(1e-3 * value)}


def toy(dtype="float32", seed=0):
    """Two linear layers, a nonlinearity, state, and outputs of two sizes."""
    draw = np.random.default_rng(seed)

    def linear(name, source, target):
        sizes = {"embedding": 4, "neurons": 6}
        values = draw.normal(size=(sizes[source], sizes[target])) * 0.5
        weights = pz.nx.wrap(jnp.asarray(values, dtype), source, target)
        return pz.nn.Linear(
            pz.Parameter(value=weights, label=f"{name}.weights"), (source,), (target,)
        )

    return pz.nn.Sequential(
        [
            linear("up", "embedding", "neurons"),
            pz.nn.Elementwise(jnp.tanh),
            linear("down", "neurons", "embedding"),
            Tally(
                pz.StateVariable(value=jnp.float32(0), label="large"),
                pz.StateVariable(value=jnp.float32(0), label="small"),
            ),
            Split(pz.nn.Identity()),
        ]
    )


def inputs(dtype="float32", seed=0):
    draw = np.random.default_rng(100 + seed)
    return pz.nx.wrap(jnp.asarray(draw.normal(size=(3, 4)), dtype), "batch", "embedding")


def then(where, function):
    """Applies a function of an array after a layer."""
    return Recipe(wrap(where, lambda layer: pz.nn.Sequential([layer, pz.nn.Elementwise(function)])))


def of_named(function, *axes):
    """A function of positional axes, as one of named arrays."""

    def run(value):
        order = tuple(value.named_axes)
        rest = tuple(name for name in order if name not in axes)
        return pz.nx.nmap(function)(value.untag(*axes)).tag(*axes).order_as(*rest, *axes)

    return run


@pz.pytree_dataclass
class Then(pz.nn.Layer):
    """Runs a layer and gives its output to a function."""

    body: pz.nn.Layer
    function: object = dataclasses.field(metadata={"pytree_node": False})

    def __call__(self, value, **side_inputs):
        return self.function(self.body(value, **side_inputs))


def after(where, function):
    return Recipe(wrap(where, Then, function=function))


@jax.custom_jvp
def gradient_off(value):
    return value


gradient_off.defjvp(lambda primals, tangents: (primals[0], tangents[0] * 1.001))

# One original for all edits of it, and one of each kind of inputs. Every edited model is made of an
# original of its own.
original = functools.cache(toy)
inputs = functools.cache(inputs)

_original_steps = {}


@pytest.fixture(autouse=True)
def each_original_runs_once(monkeypatch):
    """What an original computes depends on it alone: its programs are compiled and run once.

    The search for the first layer that differs is left out, as no case here is about it.
    """
    model_step = check.ModelStep

    def one_step(call, gradients, original=None):
        if original is not None:
            return model_step(call, gradients, original)
        key = (gradients, *map(id, (call.model, *call.inputs[0])))
        if key not in _original_steps:
            _original_steps[key] = model_step(call, gradients)
        return _original_steps[key]

    monkeypatch.setattr(check, "ModelStep", one_step)
    monkeypatch.setattr(paired_runs.PairedRuns, "first_divergence", lambda self: None)


up, down, tanh, tally, small = (
    "sublayers/0", "sublayers/2", "sublayers/1", "sublayers/3", "sublayers/4/small",
)  # fmt: skip


def replaced_tally(model, **changes):
    layers = list(model.sublayers)
    layers[3] = dataclasses.replace(layers[3], **changes)
    return dataclasses.replace(model, sublayers=layers)


BROKEN = {
    "output rescaled by 1e-4": then(down, lambda x: x * 1.0001),
    "small output doubled": then(small, lambda x: x * 2),
    "small output dropped": then(small, lambda x: x * 0),
    "small output's gradient dropped": then(small, jax.lax.stop_gradient),
    "hidden layer rescaled": then(up, lambda x: x * 0.9999),
    "rescaled without a constant": then(up, lambda x: x + x * jnp.tanh(jnp.float32(1e-4))),
    "rescaled under a lower precision": then(down, lambda x: x * 1.02) + mixed_precision(),
    "shifted": then(tanh, lambda x: x + 1e-4),
    "sign": then(small, lambda x: -x),
    "other nonlinearity": then(up, jnp.sin),
    "applied twice": then(tanh, jnp.tanh),
    "rounded to a grid": then(up, lambda x: jnp.round(x * 4096) / 4096),
    "clipped": then(up, lambda x: jnp.clip(x, -0.5, 0.5)),
    "all gradients off by 1e-3": then(down, gradient_off),
    "batch reversed": after(down, of_named(lambda x: x[::-1], "batch")),
    "neurons rolled": after(up, of_named(lambda x: jnp.roll(x, 1), "neurons")),
    "mean over the batch": after(down, of_named(lambda x: x - 1e-3 * x.mean(), "batch")),
    "one element zero": after(down, of_named(lambda x: x.at[0].set(0), "embedding")),
    "one element nan": after(down, of_named(lambda x: x.at[0].set(jnp.nan), "embedding")),
    "one element infinite": after(down, of_named(lambda x: x.at[1].set(jnp.inf), "embedding")),
    "another dtype": after(small, lambda x: x.astype("bfloat16")),
    "another name": after(small, lambda x: x.untag("batch").tag("other")),
    "an output more": after(ROOT, lambda x: {**x, "more": x["small"]}),
    "an output fewer": after(ROOT, lambda x: {"small": x["small"]}),
    "small state off by 100x beside a large one": lambda model: replaced_tally(model, part=1e-1),
    "large state": lambda model: replaced_tally(model, step=1.001),
    "state before": lambda model: replaced_tally(
        model, small=pz.StateVariable(value=jnp.float32(1e-3), label="small")
    ),
}

HARMLESS = {
    "jitted": jit_root(),
    "rematerialised": rematerialise_blocks(pz.nn.Linear),
    "scoped": scope_layers(),
    "scoped twice": scope_layers() + Recipe(wrap(ROOT, Scoped, name="model")),
    "identity after": Recipe(insert_after(pz.nn.Linear, pz.nn.Identity())),
    "identity before": Recipe(insert_before(pz.nn.Linear, pz.nn.Identity())),
    "constrained": Recipe(insert_after(pz.nn.Linear, ConstrainShardingByName(MESH, {}))),
    "rematerialised and jitted": Recipe(wrap(ROOT, Checkpointed)) + Recipe(wrap(ROOT, Jitted)),
    "in its own precision": Recipe(wrap(pz.nn.Linear, InPrecision, compute_dtype="float32")),
    "in a lower precision": mixed_precision(),
    "one layer in a lower precision": Recipe(wrap(up, InPrecision, compute_dtype="bfloat16")),
    "in a higher precision, as far as there is one": Recipe(
        wrap(up, InPrecision, compute_dtype="float32", output_dtype="float32")
    ),
    "axes in another order": after(down, lambda x: x.order_as("embedding", "batch")),
    "doubled and halved": then(up, lambda x: x * 2 * 0.5),
    "times three over three": then(up, lambda x: x * 3 / 3),
    "times a third and three": then(up, lambda x: x * (1 / 3) * 3),
    "reversed and back": after(down, of_named(lambda x: x[::-1][::-1], "batch")),
    "a large number added and taken off": then(up, lambda x: (x + 2.0) - 2.0),
    "selected": then(up, lambda x: jnp.where(x > 0, x, x)),
    "sorted and put back": after(
        down, of_named(lambda x: jnp.sort(x)[jnp.argsort(jnp.argsort(x))], "batch")
    ),
    "in a loop": after(down, of_named(lambda x: jax.lax.map(lambda y: y * 1.0, x), "batch")),
    "in two halves": after(
        up, of_named(lambda x: jnp.concatenate([x[:3] + 0, x[3:] - 0]), "neurons")
    ),
    "exponential and logarithm": then(up, lambda x: jnp.log(jnp.exp(x))),
}


def applied(edit, model):
    return edit(model) if not isinstance(edit, Recipe) else edit.apply(model)


def oracle(model, x):
    """Outputs, state and gradients, computed by Penzai and JAX alone, as numpy in float64."""
    tree, variables = pz.unbind_variables(model, freeze=True)
    parameters = [v for v in variables if isinstance(v, pz.ParameterValue)]
    state = [v for v in variables if not isinstance(v, pz.ParameterValue)]

    def run(parameters):
        fresh = [v.unfreeze_as_copy() for v in (*parameters, *state)]
        output = pz.bind_variables(tree, fresh)(x)
        arrays = {
            (name, *sorted(value.named_axes)): value.unwrap(*sorted(value.named_axes))
            for name, value in output.items()
        }
        after = {v.label: v.value for v in fresh[len(parameters) :]}
        weights = {key: np.cos(np.arange(array.size)) for key, array in arrays.items()}
        scores = {key[0]: (arrays[key].ravel() * weights[key]).sum() for key in arrays}
        return scores, (arrays, after)

    # Compiling costs much more than running does.
    run_once = jax.jit(jax.jacrev(run, has_aux=True), compiler_options=UNOPTIMISED_COMPILATION)
    grads, (arrays, after) = run_once(parameters)
    gradients = {
        (output, parameter.label): value.value.data_array
        for output, values in grads.items()
        for parameter, value in zip(parameters, values, strict=True)
    }
    before = {v.label: v.value for v in state}
    return {
        (kind, key): (str(array.dtype), np.asarray(array, np.float64))
        for kind, group in enumerate((arrays, before, after, gradients))
        for key, array in group.items()
    }


@functools.cache
def of_the_original():
    return oracle(original(), inputs())


def oracle_difference(edited):
    """The largest difference of an element relative to the median size of its array."""
    one, other = of_the_original(), oracle(edited, inputs())
    if one.keys() != other.keys():
        return np.inf
    largest = 0.0
    for key, (dtype, array) in one.items():
        edited_dtype, found = other[key]
        if dtype != edited_dtype or not np.all(np.isfinite(found)):
            return np.inf
        scale = np.median(np.abs(array)) or 1.0
        largest = max(largest, float(np.abs(array - found).max() / scale))
    return largest


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_model_is_refused(name):
    edited = applied(BROKEN[name], toy())
    assert oracle_difference(edited) > 5e-5
    assert not check_equivalent(original(), edited, inputs(), gradients="gradient" in name)


@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_edit_is_certified(name):
    edited = applied(HARMLESS[name], toy())
    assert oracle_difference(edited) < (0.5 if "lower" in name else 3e-5)
    report = check_equivalent(original(), edited, inputs(), gradients="in" in name)
    assert report, report


@pz.pytree_dataclass
class TwoScales(pz.nn.Layer):
    """A large and a small part, each with a parameter; the small one may get no gradient."""

    large: pz.Parameter
    small: pz.Parameter
    drops: bool = dataclasses.field(default=False, metadata={"pytree_node": False})

    def __call__(self, value, **side_inputs):
        small = self.small.value
        if self.drops:
            small = jax.lax.stop_gradient(small)
        return value * (1e3 * self.large.value + 1e-3 * small)


class TestSmallBesideLarge:
    def two(self, drops=False):
        def parameter(label, value):
            return pz.Parameter(value=jnp.asarray(value), label=label)

        return TwoScales(parameter("large", 1.0), parameter("small", 1.0), drops)

    def test_a_dropped_gradient_of_a_thousandth_beside_one_of_a_thousand(self):
        report = check_equivalent(self.two(), self.two(drops=True), inputs())
        assert [part.ok for part in report.comparisons] == [True, True, True, False]
        assert report.comparisons[3].worst == "small"

    @pytest.mark.parametrize("index", [3, slice(0, 2)], ids=["an element", "a row"])
    def test_inside_one_array(self, index):
        sizes = np.full((4, 20), 1e6, np.float32)
        sizes[index] = 1.0
        off = np.ones_like(sizes)
        off[index] = 2.0
        x = pz.nx.wrap(jnp.asarray(np.random.default_rng(0).normal(size=(4, 20)), jnp.float32))

        def model(factors):
            return pz.nn.Sequential([pz.nn.Elementwise(lambda x: jnp.tanh(x) * sizes * factors)])

        assert check_equivalent(model(1.0), model(np.ones_like(sizes)), x, gradients=False)
        assert not check_equivalent(model(1.0), model(off), x, gradients=False)

    def test_what_only_the_lower_precision_loses_is_refused(self):
        """In float64 both are the same: float32 loses what is small beside 1e6."""
        edited = then(up, lambda x: (x + 1e5 * jnp.cos(x)) - 1e5 * jnp.cos(x)).apply(toy())
        report = check_equivalent(original(), edited, inputs(), gradients=False)
        assert not report
        assert all(array.function.ok for array in report.comparisons[1].arrays)


class TestLowerPrecision:
    def test_a_rescale_by_4_5_percent_is_refused(self):
        off = then(up, lambda x: x * 1.045)
        halves = toy("bfloat16"), inputs("bfloat16")
        assert not check_equivalent(halves[0], off.apply(halves[0]), halves[1], gradients=False)
        edited = (off + mixed_precision()).apply(toy())
        assert not check_equivalent(original(), edited, inputs(), gradients=False)

    def test_parameters_in_bfloat16_may_round_as_they_do(self):
        model, x = toy("bfloat16"), inputs("bfloat16")
        edited = Recipe(wrap(pz.nn.Linear, InPrecision, compute_dtype="float32")).apply(model)
        report = check_equivalent(model, edited, x, gradients=False)
        assert report, report

    def test_constants_are_read_as_the_originals(self):
        model = then(up, lambda x: x * 0.1 + 0.7).apply(toy())
        report = check_equivalent(model, mixed_precision().apply(model), inputs(), gradients=False)
        assert report, report
        assert report.comparisons[1].arrays[0].function.off_by < 1e-12


class TestCancellation:
    def test_a_gradient_that_is_zero_but_for_rounding_is_measured_against_what_cancels(self):
        """A bias before a softmax that all get alike has no influence."""

        def model():
            bias = pz.Parameter(value=pz.nx.wrap(jnp.float32(0.3)), label="bias")
            return pz.nn.Sequential(
                [toy().sublayers[0], Bias(bias), pz.nn.Softmax("neurons"), pz.nn.Identity()]
            )

        report = check_equivalent(model(), jit_root().apply(model()), inputs())
        assert report, report
        (bias,) = [a for a in report.comparisons[3].arrays if a.name.startswith("bias")]
        assert bias.cancels
        assert "zero but for rounding, because larger values cancel (1 arrays" in str(
            report.plain_text(200)
        )


@pz.pytree_dataclass
class Bias(pz.nn.Layer):
    """Adds one number to all."""

    bias: pz.Parameter

    def __call__(self, value, **side_inputs):
        return value + self.bias.value


@settings(max_examples=4)
@given(
    st.sampled_from(["float32", "bfloat16"]),
    st.integers(0, 2**16),
    st.floats(0, 1),
    st.booleans(),
    st.sampled_from([up, tanh, down, small]),
)
def test_a_rescale_is_never_certified(dtype, seed, size, grows, where):
    least, most = {"float32": (1e-4, 1e-1), "bfloat16": (2e-2, 2e-1)}[dtype]
    factor = 1 + (1 if grows else -1) * least * (most / least) ** size
    model, x = toy(dtype, seed), inputs(dtype, seed)
    edited = then(where, lambda value: value * jnp.asarray(factor, dtype)).apply(model)
    assert not check_equivalent(model, edited, x, gradients=False)
    leaves, tree = jax.tree.flatten(model, is_leaf=lambda leaf: isinstance(leaf, pz.Parameter))
    chosen = [n for n, leaf in enumerate(leaves) if isinstance(leaf, pz.Parameter)][seed % 2]
    leaf = leaves[chosen]
    scaled = jax.tree.map(lambda array: (array * factor).astype(dtype), leaf.value)
    leaves[chosen] = pz.Parameter(value=scaled, label=leaf.label)
    report = check_equivalent(model, tree.unflatten(leaves), x, gradients=False)
    assert report.comparisons[0].problems == (f"{leaf.label}: parameter has other values",)


def test_all_standard_recipes_at_once_are_certified():
    """Families, dtypes and recipes one by one take a quarter of an hour."""
    model = with_drawn_values(mlp(1))
    recipe = (
        scope_layers()
        + manual_fsdp(Block, MESH, {"embedding": "data", "batch": "data", "neurons": "model"})
        + constrain_blocks(Block, MESH, {"batch": "data"})
        + rematerialise_blocks(Block, "dots")
        + mixed_precision()
        + jit_root()
    )
    report = check_equivalent(model, recipe.apply(model), features())
    assert report, report


def test_a_transformer_in_bfloat16_is_certified_in_mixed_precision():
    model = drawn_transformer(
        "gpt_neox",
        num_decoder_blocks=1,
        parameter_dtype=jnp.bfloat16,
        activation_dtype=jnp.bfloat16,
    )
    edited = (mixed_precision() + jit_root()).apply(model)
    report = check_equivalent(model, edited, tokens(), gradients=False)
    assert report, report


class TestWithoutFloat64:
    """Where a model does not run in float64, runs on disturbed values give the yardstick."""

    @pytest.fixture(autouse=True)
    def no_float64(self, monkeypatch):
        def fails(*args, **kwargs):
            raise RuntimeError("no float64 here")

        monkeypatch.setattr(model_steps, "WiderStep", fails)

    def test_a_harmless_edit_is_certified(self):
        report = check_equivalent(original(), scope_layers().apply(toy()), inputs())
        assert report, report
        assert "do not run in float64" in report.notes[0]

    def test_a_rescale_beyond_rounding_is_refused(self):
        edited = then(up, lambda x: x * 1.0001).apply(toy())
        assert not check_equivalent(original(), edited, inputs(), gradients=False)


def test_models_in_float64_have_a_yardstick_too():
    with jax.enable_x64(True):
        model, x = toy("float64"), inputs("float64")
        assert check_equivalent(model, jit_root().apply(model), x, gradients=False)
        off = then(up, lambda x: x * (1 + 1e-12)).apply(model)
        assert not check_equivalent(model, off, x, gradients=False)


def test_an_operation_of_its_own_precision_is_named():
    @jax.jit
    def on_the_host(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(
            lambda x: np.tanh(np.asarray(x)), shape, x, vmap_method="broadcast_all"
        )

    model = pz.nn.Sequential([toy().sublayers[0], pz.nn.Elementwise(on_the_host)])
    report = check_equivalent(model, jit_root().apply(model), inputs(), gradients=False)
    assert report, report
    assert report.notes[0].endswith("is not found: pure_callback")
    off = then("sublayers/1", lambda x: x * 1.0001).apply(model)
    assert not check_equivalent(model, off, inputs(), gradients=False)
