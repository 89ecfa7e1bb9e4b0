"""What ``check_equivalent`` lets through, judged by an oracle that shares no code with it."""

import dataclasses
import functools
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import Primitive
from jax.interpreters import mlir
from penzai import pz
from penzai.deprecated.v1 import pz as pz_v1

import penzai_shard as pzs
from penzai_shard.layers import KeepAxisOrder
from tests.models import LinenBlock, equinox, mlp_v1

MESH = pzs.make_mesh({"data": 4, "model": 2})
EXPLICIT = pzs.make_mesh({"data": 4, "model": 2}, explicit=True)
RULES = {"batch": "data", "embedding": "model"}


# A model with state, and outputs of two sizes


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


def toy(dtype="float32", seed=0, count=0.0):
    draw = np.random.default_rng(seed)

    def linear(name, source, target):
        sizes = {"embedding": 4, "neurons": 6}
        values = draw.normal(size=(sizes[source], sizes[target])) * 0.5
        weights = pz.nx.wrap(jnp.asarray(values, dtype), source, target)
        return pz.nn.Linear(
            pz.Parameter(value=weights, label=f"{name}.weights"), (source,), (target,)
        )

    def state(label, value=0.0):
        return pz.StateVariable(value=jnp.float32(value), label=label)

    return pz.nn.Sequential(
        [
            linear("up", "embedding", "neurons"),
            pz.nn.Elementwise(jnp.tanh),
            linear("down", "neurons", "embedding"),
            Tally(state("large"), state("small", count)),
            Split(pz.nn.Identity()),
        ]
    )


@functools.cache
def inputs(dtype="float32", seed=0):
    draw = np.random.default_rng(100 + seed)
    return pz.nx.wrap(jnp.asarray(draw.normal(size=(4, 4)), dtype), "batch", "embedding")


@functools.cache
def original():
    return toy()


@pz.pytree_dataclass
class Then(pz.nn.Layer):
    """Runs a layer and gives its output to a function."""

    body: pz.nn.Layer
    function: object = dataclasses.field(metadata={"pytree_node": False})

    def __call__(self, value, **side_inputs):
        return self.function(self.body(value, **side_inputs))


def after(where, function):
    return pzs.Recipe(pzs.wrap(where, Then, function=function))


def then(where, function):
    """Applies a function of an array after a layer."""
    return after(where, lambda x: pz.nx.nmap(function)(x))


@pz.pytree_dataclass
class Backwards(pz.nn.Layer):
    """A linear layer that adds up its products one by one, the last first."""

    weights: pz.Parameter

    def __call__(self, value, **side_inputs):
        products = value * self.weights.value
        return sum(products[{"neurons": index}] for index in reversed(range(6)))


def along(where, axis, function):
    """Applies a function of one positional axis after a layer."""

    def run(x):
        rest = tuple(name for name in x.named_axes if name != axis)
        return pz.nx.nmap(function)(x.untag(axis)).tag(axis).order_as(*rest, axis)

    return after(where, run)


def wrap(where, *args, **options):
    return pzs.Recipe(pzs.wrap(where, *args, **options))


def replace(where, layer):
    return pzs.Recipe(pzs.replace(where, lambda _: layer))


def with_tally(**changes):
    change = pzs.replace(Tally, lambda layer: dataclasses.replace(layer, **changes))
    return pzs.Recipe(change)


def add_part(turn, total):
    return total + 1e-3


def sort_and_put_back(x):
    return jnp.sort(x)[jnp.argsort(jnp.argsort(x))]


@jax.custom_jvp
def gradient_off(value):
    return value


gradient_off.defjvp(lambda primals, tangents: (primals[0], tangents[0] * 1.001))

UP, TANH, DOWN, SMALL = "sublayers/0", "sublayers/1", "sublayers/2", "sublayers/4/small"

BROKEN = {
    "output rescaled by 1e-4": then(DOWN, lambda x: x * 1.0001),
    "small output doubled": then(SMALL, lambda x: x * 2),
    "small output dropped": then(SMALL, lambda x: x * 0),
    "small output's gradient dropped": then(SMALL, jax.lax.stop_gradient),
    "hidden layer rescaled": then(UP, lambda x: x * 0.9999),
    "rescaled without a constant": then(UP, lambda x: x + x * jnp.tanh(jnp.float32(1e-4))),
    "rescaled under a lower precision": then(DOWN, lambda x: x * 1.02) + pzs.mixed_precision(),
    "shifted": then(TANH, lambda x: x + 1e-4),
    "sign": then(SMALL, lambda x: -x),
    "other nonlinearity": then(UP, jnp.sin),
    "applied twice": then(TANH, jnp.tanh),
    "rounded to a grid": then(UP, lambda x: jnp.round(x * 4096) / 4096),
    "clipped": then(UP, lambda x: jnp.clip(x, -0.5, 0.5)),
    "all gradients off by 1e-3": then(DOWN, gradient_off),
    "batch reversed": along(DOWN, "batch", lambda x: x[::-1]),
    "neurons rolled": along(UP, "neurons", lambda x: jnp.roll(x, 1)),
    "mean over the batch": along(DOWN, "batch", lambda x: x - 1e-3 * x.mean()),
    "one element zero": along(DOWN, "embedding", lambda x: x.at[0].set(0)),
    "one element nan": along(DOWN, "embedding", lambda x: x.at[0].set(jnp.nan)),
    "one element infinite": along(DOWN, "embedding", lambda x: x.at[1].set(jnp.inf)),
    "another dtype": then(SMALL, lambda x: x.astype("bfloat16")),
    "another name": after(SMALL, lambda x: x.untag("batch").tag("other")),
    "an output more": after(pzs.ROOT, lambda x: {**x, "more": x["small"]}),
    "an output fewer": after(pzs.ROOT, lambda x: {"small": x["small"]}),
    "small state off": with_tally(part=1e-1),
    "large state": with_tally(step=1.001),
    "state before": lambda model: toy(count=1e-3),
    "a layer left out": replace(TANH, pz.nn.Identity()),
    "nearly the same nonlinearity": then(UP, lambda x: jnp.arcsinh(x * 1.001)),
    "one element applied": along(DOWN, "batch", lambda x: x.at[0].apply(lambda y: y * 1.0001)),
    "a scaled sum in bfloat16": then(UP, lambda x: x + x.astype("bfloat16") / 1024),
    "a branch for large values": then(UP, lambda x: jnp.where(x > 0.5, x * 1.001, x)),
    "a loop of one turn less": then(
        UP, lambda x: x + jax.lax.fori_loop(0, 9, add_part, 0.0) - 0.01
    ),
    "sorted": along(DOWN, "embedding", jnp.sort),
    "noise of a fixed key": then(DOWN, lambda x: x + 1e-4 * jax.random.normal(jax.random.key(0))),
    "gradient of one layer dropped": after(UP, jax.lax.stop_gradient),
    "state not updated": replace("sublayers/3", pz.nn.Identity()),
}

HARMLESS = {
    "jitted": pzs.jit_root(),
    "rematerialised": pzs.rematerialise_blocks(pz.nn.Linear),
    "scoped": pzs.scope_layers(),
    "scoped twice": pzs.scope_layers() + wrap(pzs.ROOT, pzs.Scoped, name="model"),
    "identity after": pzs.Recipe(pzs.insert_after(pz.nn.Linear, pz.nn.Identity())),
    "identity before": pzs.Recipe(pzs.insert_before(pz.nn.Linear, pz.nn.Identity())),
    "constrained": pzs.constrain_blocks(pz.nn.Linear, MESH, {"batch": "data"}),
    "rematerialised and jitted": wrap(pzs.ROOT, pzs.Checkpointed) + pzs.jit_root(),
    "in its own precision": wrap(pz.nn.Linear, pzs.InPrecision, compute_dtype="float32"),
    "in a lower precision": pzs.mixed_precision(),
    "one layer in a lower precision": wrap(UP, pzs.InPrecision, compute_dtype="bfloat16"),
    "axes in another order": after(DOWN, lambda x: x.order_as("embedding", "batch")),
    "doubled and halved": then(UP, lambda x: x * 2 * 0.5),
    "times three over three": then(UP, lambda x: x * 3 / 3),
    "times a third and three": then(UP, lambda x: x * (1 / 3) * 3),
    "reversed and back": along(DOWN, "batch", lambda x: x[::-1][::-1]),
    "a large number added and taken off": then(UP, lambda x: (x + 2.0) - 2.0),
    "selected": then(UP, lambda x: jnp.where(x > 0, x, x)),
    "sorted and put back": along(DOWN, "batch", sort_and_put_back),
    "in a loop": along(DOWN, "batch", lambda x: jax.lax.map(lambda y: y * 1.0, x)),
    "in two halves": along(UP, "neurons", lambda x: jnp.concatenate([x[:3] + 0, x[3:] - 0])),
    "exponential and logarithm": then(UP, lambda x: jnp.log(jnp.exp(x))),
    "manual regions": pzs.manual_fsdp(pz.nn.Linear, MESH, {"batch": "data"}),
    "kept axis order": wrap(pz.nn.Linear, KeepAxisOrder),
    "another formula": replace(TANH, pz.nn.Elementwise(lambda x: 2 * jax.nn.sigmoid(2 * x) - 1)),
    "sums in another order": pzs.Recipe(pzs.replace(DOWN, lambda layer: Backwards(layer.weights))),
    "a callback": then(UP, lambda x: [x, jax.debug.callback(lambda y: None, x)][0]),
    "unused random numbers": then(UP, lambda x: x + 0 * jax.random.uniform(jax.random.key(0))),
    "a branch": then(UP, lambda x: jax.lax.cond(x > 0, lambda y: y + 0, lambda y: y - 0, x)),
    "one-hot sums": along(UP, "neurons", lambda x: x @ jnp.eye(6, dtype=x.dtype)),
    "scattered": along(UP, "neurons", lambda x: jnp.zeros(6).at[jnp.arange(6)].add(x)),
    "a wrapper of state": wrap("sublayers/3", pzs.Jitted),
}
WITH_GRADIENTS = {"jitted", "rematerialised", "in a lower precision", "another formula"}


def oracle(model, x, gradients):
    """Outputs, state and gradients by Penzai and JAX only, as NumPy arrays in float64."""
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

    arrays, after = run(parameters)[1]
    grads = jax.jit(jax.jacrev(run, has_aux=True))(parameters)[0] if gradients else {}
    slopes = {
        (output, parameter.label): value.value.data_array
        for output, values in grads.items()
        for parameter, value in zip(parameters, values, strict=True)
    }
    before = {v.label: v.value for v in state}
    return {
        (kind, key): (str(array.dtype), np.asarray(array, np.float64))
        for kind, group in enumerate((arrays, before, after, slopes))
        for key, array in group.items()
    }


@functools.cache
def oracle_of_original(gradients):
    return oracle(toy(), inputs(), gradients)


def oracle_difference(edited, gradients):
    """The largest difference of an element relative to the median size of its array."""
    one, other = oracle_of_original(gradients), oracle(edited, inputs(), gradients)
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


def apply(edit):
    return edit.apply(toy()) if isinstance(edit, pzs.Recipe) else edit(toy())


@pytest.mark.parametrize("name", BROKEN)
def test_check_equivalent_wrong_edit(name):
    edited, gradients = apply(BROKEN[name]), "gradient" in name
    assert oracle_difference(edited, gradients) > 2e-5
    assert not pzs.check_equivalent(original(), edited, inputs(), gradients=gradients)


@pytest.mark.parametrize("name", HARMLESS)
def test_check_equivalent_harmless_edit(name):
    edited, gradients = apply(HARMLESS[name]), name in WITH_GRADIENTS
    assert oracle_difference(edited, gradients) < (0.5 if "lower" in name else 3e-5)
    report = pzs.check_equivalent(original(), edited, inputs(), gradients=gradients)
    assert report, report


# What the report says


def difference(report, group):
    """The paths that differ in a group."""
    return [row[0] for row in report.rows if row[1] == group and not row[6]]


def check(edit, **options):
    return pzs.check_equivalent(original(), apply(edit), inputs(), **options)


def test_check_equivalent_wrong_state():
    report = check(with_tally(step=2.0), gradients=False)
    assert difference(report, "state") == ["large"]
    assert not difference(report, "outputs")
    assert float(original().sublayers[3].large.value) == 0


def test_check_equivalent_wrong_gradients():
    edit = after(UP, jax.lax.stop_gradient)
    report = check(edit)
    assert difference(report, "gradients") == ["argument/0", "up.weights"]
    assert not difference(report, "outputs")
    assert check(edit, gradients=False)


def test_check_equivalent_another_label():
    def rename(layer):
        weights = pz.Parameter(value=layer.weights.value, label="other")
        return dataclasses.replace(layer, weights=weights)

    report = check(pzs.Recipe(pzs.replace(UP, rename)), gradients=False)
    assert difference(report, "parameters") == ["other", "up.weights"]
    assert not difference(report, "outputs")


def test_check_equivalent_other_values():
    edited = toy(seed=1)
    report = pzs.check_equivalent(original(), edited, inputs(), gradients=False)
    assert difference(report, "parameters") == ["up.weights", "down.weights"]
    assert not difference(report, "outputs")
    assert pzs.check_equivalent(original(), edited, inputs(), gradients=False, same_values=False)


def test_check_equivalent_another_shape():
    report = pzs.check_equivalent(original(), toy("bfloat16"), inputs())
    assert difference(report, "parameters") == ["up.weights", "down.weights"]
    assert {row[1] for row in report.rows} == {"parameters"}


def test_check_equivalent_added_parameters():
    def add(layer):
        bias = pz.Parameter(value=pz.nx.zeros({"neurons": 6}), label="bias")
        return pz.nn.Sequential([layer, pz.nn.AddBias(bias, ("neurons",))])

    edit = pzs.Recipe(pzs.wrap(UP, add))
    assert difference(check(edit), "parameters") == ["bias"]
    report = check(edit, added_parameters=True)
    assert report
    assert any("bias" in note for note in report.notes)


def test_check_equivalent_abstract_model():
    model = pzs.abstract_model(toy)
    assert pzs.check_equivalent(model, pzs.jit_root().apply(model), inputs(), gradients=False)
    wrong = then(UP, lambda x: x * 1.0001).apply(model)
    assert not pzs.check_equivalent(model, wrong, inputs(), gradients=False)


def test_check_equivalent_refused_arguments():
    with pytest.raises(pzs.RuleTypeError) as refusal:
        pzs.check_equivalent(original(), pzs.jit_root(), inputs())
    assert [problem.path for problem in refusal.value.problems] == ["edited"]
    with pytest.raises(pzs.ShardingError) as refusal:
        pzs.check_equivalent(original(), original(), jax.ShapeDtypeStruct((2,), "float32"))
    assert [problem.path for problem in refusal.value.problems] == ["argument/0"]


def test_check_equivalent_report():
    blocks = [{"w": jnp.ones((2, 2))} for _ in range(4)]

    def run(blocks, x):
        return functools.reduce(lambda y, block: jnp.tanh(y @ block["w"]), blocks, x)

    report = pzs.check_equivalent(
        functools.partial(run, blocks), functools.partial(run, blocks), jnp.ones(2)
    )
    assert len(report.rows) == 6
    assert len(report.fold().rows) < 6
    assert json.loads(report.to_json())["ok"] is True


# Precision


@settings(max_examples=4)
@given(
    st.sampled_from(["float32", "bfloat16"]),
    st.integers(0, 2**16),
    st.floats(0, 1),
    st.booleans(),
    st.sampled_from([UP, TANH, DOWN, SMALL]),
)
def test_check_equivalent_finds_any_rescale(dtype, seed, size, grows, where):
    least, most = {"float32": (1e-4, 1e-1), "bfloat16": (2e-2, 2e-1)}[dtype]
    factor = 1 + (1 if grows else -1) * least * (most / least) ** size
    model, x = toy(dtype, seed), inputs(dtype, seed)
    edited = then(where, lambda value: value * jnp.asarray(factor, dtype)).apply(model)
    assert not pzs.check_equivalent(model, edited, x, gradients=False)


def test_check_equivalent_lower_precision():
    model = then(UP, lambda x: x * 0.1 + 0.7).apply(toy())
    report = pzs.check_equivalent(
        model, pzs.mixed_precision().apply(model), inputs(), gradients=False
    )
    assert report, report
    assert max(row[4] for row in report.rows) < 1e-10
    assert any("bfloat16" in note for note in report.notes)
    # In float64 both are the same: float32 loses what is small beside 1e5.
    edit = then(UP, lambda x: (x + 1e5 * jnp.cos(x)) - 1e5 * jnp.cos(x))
    assert difference(check(edit, gradients=False), "outputs")


def test_check_equivalent_models_in_float64():
    with jax.enable_x64(True):
        model, x = toy("float64"), inputs("float64")
        assert pzs.check_equivalent(model, pzs.jit_root().apply(model), x, gradients=False)
        off = then(UP, lambda x: x * (1 + 1e-12)).apply(model)
        assert not pzs.check_equivalent(model, off, x, gradients=False)


@pytest.mark.parametrize("index", [3, slice(0, 2)], ids=["an element", "a row"])
def test_check_equivalent_small_elements(index):
    sizes, off = np.full((4, 20), 1e6, np.float32), np.ones((4, 20), np.float32)
    sizes[index], off[index] = 1.0, 2.0
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 20)), jnp.float32)
    model = lambda factors: lambda x: jnp.tanh(x) * sizes * factors  # noqa: E731
    assert pzs.check_equivalent(model(1.0), model(np.ones_like(sizes)), x, gradients=False)
    assert not pzs.check_equivalent(model(1.0), model(off), x, gradients=False)


@jax.jit
def tanh_on_host(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(lambda x: np.tanh(np.asarray(x)), shape, x)


NARROW = Primitive("only_in_32_bits")
mlir.register_lowering(NARROW, mlir.lower_fun(jnp.sin, multiple_results=False))


def sine_in_32_bits(x):
    return NARROW.bind(x)


@NARROW.def_abstract_eval
def _(x):
    if x.dtype == np.float64:
        raise TypeError("only 32 bits")
    return x


@pytest.mark.parametrize(
    ("operation", "note"), [(tanh_on_host, "pure_callback"), (sine_in_32_bits, "only 32 bits")]
)
def test_check_equivalent_without_float64(operation, note):
    def run(factor):
        return lambda x: jnp.sum(operation(x) * factor, axis=0)

    x = jnp.linspace(-1, 1, 12).reshape(3, 4)
    report = pzs.check_equivalent(run(1.0), jax.jit(run(1.0)), x, gradients=False)
    assert report, report
    assert any(note in text for text in report.notes)
    assert not pzs.check_equivalent(run(1.0), run(1.0001), x, gradients=False)


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_check_equivalent_elements_that_are_not_finite(value):
    x, y = jnp.ones(3), jnp.full(3, value)
    assert pzs.check_equivalent(lambda x: x + y, lambda x: y - x, x, gradients=False)
    assert not pzs.check_equivalent(lambda x: x + y, lambda x: x, x, gradients=False)


# Models of other kinds

X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)


def rescale(model):
    return lambda *args, **side_inputs: model(*args, **side_inputs) * 1.0001


def linen():
    variables = nn.meta.unbox(LinenBlock().init(jax.random.key(0), X))
    return functools.partial(LinenBlock().apply, variables)


CALLS = {
    "v1": (mlp_v1, pzs.Jitted, pz_v1.nx.wrap(X).tag("batch", "features")),
    "equinox": (lambda: equinox().mlp, pzs.Jitted, X[0]),
    "linen, partial": (linen, functools.partial, X),
    "linen, function": (lambda: lambda x: linen()(x), jax.jit, X),
}


@pytest.mark.parametrize("name", CALLS)
def test_check_equivalent_model_kind(name):
    build, edit, x = CALLS[name]
    model = build()
    report = pzs.check_equivalent(model, edit(model), x, gradients=False)
    assert report, report
    assert difference(pzs.check_equivalent(model, rescale(model), x, gradients=False), "outputs")


@pytest.mark.parametrize("mesh", [MESH, EXPLICIT], ids=["auto", "explicit"])
def test_check_equivalent_placed_model(mesh):
    placed = pzs.name_to_name_device_put(toy(), mesh, {"embedding": "data", "neurons": "model"})
    with jax.set_mesh(mesh):
        assert pzs.check_equivalent(original(), placed, inputs(), gradients=False)
        wrong = then(UP, lambda x: x * 1.0001).apply(placed)
        assert not pzs.check_equivalent(placed, wrong, inputs(), gradients=False)


def test_check_equivalent_random_side_inputs():
    rng = pz.RandomStream(jax.random.key(0), pz.StateVariable(value=0, label="offset"))
    half, less = (
        pz.nn.StochasticDropout(rate, random_stream_input_name="rng") for rate in (0.5, 0.4)
    )
    options = {"rng": rng, "gradients": False}
    report = pzs.check_equivalent(half, pzs.Jitted(half), inputs(), **options)
    assert report, report
    assert ("offset", "state") in [row[:2] for row in report.rows]
    assert rng.offset.value == 0
    assert not pzs.check_equivalent(half, less, inputs(), **options)


def test_check_equivalent_random_key():
    def add_noise(x, key):
        return x + jax.random.normal(key, x.shape)

    assert pzs.check_equivalent(add_noise, jax.jit(add_noise), X, key=jax.random.key(1))
