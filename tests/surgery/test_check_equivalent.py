"""What ``check_equivalent`` lets through, judged by an oracle that shares no code with it."""

import dataclasses
import functools

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
from tests.models import LinenBlock, equinox, mlp_v1
from tests.refusals import problem_paths

# Two devices are enough to split over, and programs for more take longer to compile.
MESH, EXPLICIT = (
    pzs.make_mesh({"data": 2}, jax.devices()[:2], explicit=explicit) for explicit in (False, True)
)
X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)


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


def run_identities(x):
    """Does to six numbers what changes none of them."""
    x = jnp.where(x > 0, x * 2 * 0.5, x * 3 / 3 * (1 / 3) * 3)
    x = jnp.sort(x)[jnp.argsort(jnp.argsort(x))][::-1][::-1]
    x = jax.lax.map(lambda y: jax.lax.cond(y > 0, lambda y: y + 0, lambda y: y - 0, y), x)
    x = jnp.concatenate([x[:3], x[3:]]) @ jnp.eye(6, dtype=x.dtype) + 2.0 - 2.0
    jax.debug.callback(lambda y: None, x)
    noise = 0 * jax.random.uniform(jax.random.key(0))
    return jnp.zeros(6).at[jnp.arange(6)].add(jnp.log(jnp.exp(x))) + noise


@jax.custom_jvp
def gradient_off(value):
    return value


gradient_off.defjvp(lambda primals, tangents: (primals[0], tangents[0] * 1.001))


UP, TANH, DOWN, SMALL = "sublayers/0", "sublayers/1", "sublayers/2", "sublayers/4/small"

BROKEN = {
    "small output's gradient dropped": then(SMALL, jax.lax.stop_gradient),
    "rescaled without a constant": then(UP, lambda x: x + x * jnp.tanh(jnp.float32(1e-4))),
    "rescaled under a lower precision": then(DOWN, lambda x: x * 1.02) + pzs.mixed_precision(),
    "shifted": then(TANH, lambda x: x + 1e-4),
    "rounded to a grid": then(UP, lambda x: jnp.round(x * 4096) / 4096),
    "all gradients off by 1e-3": then(DOWN, gradient_off),
    "batch reversed": along(DOWN, "batch", lambda x: x[::-1]),
    "mean over the batch": along(DOWN, "batch", lambda x: x - 1e-3 * x.mean()),
    "one element zero": along(DOWN, "embedding", lambda x: x.at[0].set(0)),
    "one element nan": along(DOWN, "embedding", lambda x: x.at[0].set(jnp.nan)),
    "another dtype": then(SMALL, lambda x: x.astype("bfloat16")),
    "another name": after(SMALL, lambda x: x.untag("batch").tag("other")),
    "an output more": after(pzs.ROOT, lambda x: {**x, "more": x["small"]}),
    "an output fewer": after(pzs.ROOT, lambda x: {"small": x["small"]}),
    "small state off": with_tally(part=1e-1),
    "large state": with_tally(step=1.001),
    "state before": lambda model: toy(count=1e-3),
    "one element applied": along(DOWN, "batch", lambda x: x.at[0].apply(lambda y: y * 1.0001)),
    "a scaled sum in bfloat16": then(UP, lambda x: x + x.astype("bfloat16") / 1024),
    "a branch for large values": then(UP, lambda x: jnp.where(x > 0.5, x * 1.001, x)),
    "a loop of one turn less": then(
        UP, lambda x: x + jax.lax.fori_loop(0, 9, lambda _, y: y + 1e-3, 0.0) - 0.01
    ),
    "sorted": along(DOWN, "embedding", jnp.sort),
    "noise of a fixed key": then(DOWN, lambda x: x + 1e-4 * jax.random.normal(jax.random.key(0))),
    "state not updated": replace("sublayers/3", pz.nn.Identity()),
}

HARMLESS = {
    "wrapped": pzs.scope_layers()
    + pzs.rematerialise_blocks(pz.nn.Linear)
    + pzs.constrain_blocks(pz.nn.Linear, MESH, {"batch": "data"})
    + wrap(pzs.ROOT, pzs.Scoped, name="model")
    + wrap("sublayers/3", pzs.Jitted)
    + after(DOWN, lambda x: x.order_as("embedding", "batch"))
    + pzs.jit_root(),
    "identities": pzs.Recipe(pzs.insert_after(pz.nn.Linear, pz.nn.Identity()))
    + pzs.Recipe(pzs.insert_before(pz.nn.Linear, pz.nn.Identity())),
    "one layer in a lower precision": wrap(UP, pzs.InPrecision, compute_dtype="bfloat16"),
    "functions that undo themselves": along(UP, "neurons", run_identities),
    "another formula": replace(TANH, pz.nn.Elementwise(lambda x: 2 * jax.nn.sigmoid(2 * x) - 1)),
}
WITH_GRADIENTS = {"wrapped", "one layer in a lower precision", "another formula"}


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


def differences(report):
    """The paths that differ, by group."""
    found = {}
    for path, group, *_, ok, _ in report.rows:
        if not ok:
            found.setdefault(group, []).append(path)
    return found


def check(edit, **options):
    return pzs.check_equivalent(original(), apply(edit), inputs(), **options)


def rename(layer):
    weights = pz.Parameter(value=layer.weights.value, label="other")
    return dataclasses.replace(layer, weights=weights)


def add_bias(layer):
    bias = pz.Parameter(value=pz.nx.zeros({"neurons": 6}), label="bias")
    return pz.nn.Sequential([layer, pz.nn.AddBias(bias, ("neurons",))])


WEIGHTS = {"parameters": ["up.weights", "down.weights"]}
DIFFERENCES = {
    "state": (with_tally(step=2.0), {"state": ["large"]}),
    "gradients": (
        after(UP, jax.lax.stop_gradient),
        {"gradients": ["argument/0", "up.weights"]},
    ),
    "another label": (
        pzs.Recipe(pzs.replace(UP, rename)),
        {"parameters": ["other", "up.weights"]},
    ),
    "an added parameter": (wrap(UP, add_bias), {"parameters": ["bias"]}),
    "other values": (lambda _: toy(seed=1), WEIGHTS),
    "other dtypes": (lambda _: toy("bfloat16"), WEIGHTS),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_check_equivalent_says_what_differs(name):
    edit, expected = DIFFERENCES[name]
    assert differences(check(edit, gradients=name == "gradients")) == expected
    assert float(original().sublayers[3].large.value) == 0


def test_check_equivalent_options():
    for name, option in (
        ("gradients", {}),
        ("an added parameter", {"added_parameters": True}),
        ("other values", {"same_values": False}),
    ):
        assert check(DIFFERENCES[name][0], **{"gradients": False, **option})
    assert check(then(DOWN, lambda x: x * 1.001), gradients=False, rtol=1e-2)
    assert "one object" in check(lambda _: original(), gradients=False).notes[0]


def test_check_equivalent_refused_arguments():
    for error, path, *arguments in (
        (pzs.RuleTypeError, "edited", pzs.jit_root(), inputs()),
        (pzs.ShardingError, "argument/0", original(), jax.ShapeDtypeStruct((2,), "float32")),
    ):
        assert problem_paths(error, pzs.check_equivalent, original(), *arguments) == [path]


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
    assert "outputs" in differences(check(edit, gradients=False))


def test_check_equivalent_models_in_float64():
    with jax.enable_x64(True):
        model, x = toy("float64"), inputs("float64")
        assert pzs.check_equivalent(model, pzs.jit_root().apply(model), x, gradients=False)
        off = then(UP, lambda x: x * (1 + 1e-12)).apply(model)
        assert not pzs.check_equivalent(model, off, x, gradients=False)


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


def scale_sizes(index, factors):
    """Numbers of which some are a million times smaller, which are multiplied by factors."""
    sizes, off = np.full((4, 8), 1e6, np.float32), np.ones((4, 8), np.float32)
    sizes[index], off[index] = 1.0, factors
    return lambda x: jnp.tanh(x) * sizes * off


# A function, another that computes the same, and one that does not.
FLOAT8 = jnp.float8_e4m3fn
FUNCTIONS = {
    "nan": (lambda x: x + jnp.nan, lambda x: jnp.nan - x, lambda x: x),
    "infinite": (lambda x: x + jnp.inf, lambda x: jnp.inf - x, lambda x: x - jnp.inf),
    "sums": (
        lambda x: x.sum(1),
        lambda x: jnp.cumsum(x[:, ::-1], 1)[:, -1],
        lambda x: x[:, 1:].sum(1),
    ),
    "integers": (lambda x: x.argmax(1), lambda x: (-x).argmin(1), lambda x: x.argmax(1) + 1),
    "float8": (
        lambda x: x.astype(FLOAT8),
        lambda x: (x + 0).astype(FLOAT8),
        lambda x: (1.5 * x).astype(FLOAT8),
    ),
    "complex": (jnp.fft.fft, lambda x: jnp.fft.fft(x + 0), lambda x: jnp.fft.fft(x).conj()),
    "a text": (lambda x: (x, "a"), lambda x: (x + 0, "a"), lambda x: (x, "b")),
    "nothing": (lambda x: (x, None), lambda x: (x + 0, None), lambda x: (x, ())),
    "a container": (lambda x: (x, x), lambda x: (x, x + 0), lambda x: [x, x]),
    "a small element": [scale_sizes((1, 2), factors) for factors in (1.0, np.ones(()), 2.0)],
    "a small row": [scale_sizes(0, factors) for factors in (1.0, np.ones(8), 2.0)],
}


@pytest.mark.filterwarnings("ignore:Casting complex")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_check_equivalent_functions(name):
    one, another, wrong = FUNCTIONS[name]
    assert pzs.check_equivalent(one, another, X, gradients=False)
    assert not pzs.check_equivalent(one, wrong, X, gradients=False)


def test_check_equivalent_original_that_was_changed():
    factors = [2.0]

    def scale(x):
        return x * factors[0]

    assert pzs.check_equivalent(scale, lambda x: x + x, X, gradients=False)
    factors[0] = 3.0
    assert not pzs.check_equivalent(scale, lambda x: x + x, X, gradients=False)


@pz.pytree_dataclass
class Scale(pz.nn.Layer):
    """Multiplies by a parameter, to which it then may assign half of it."""

    factor: pz.Parameter
    halves: bool = dataclasses.field(metadata={"pytree_node": False})

    def __call__(self, value, **side_inputs):
        output = value * self.factor.value
        if self.halves:
            self.factor.value = self.factor.value / 2
        return output


def test_check_equivalent_assigned_parameter():
    factor = pz.Parameter(value=jnp.float32(2), label="factor")
    report = pzs.check_equivalent(Scale(factor, False), Scale(factor, True), X)
    assert differences(report) == {"state": ["factor"]}
    assert pzs.check_equivalent(Scale(factor, True), Scale(factor, True), X)


# Models of other kinds


def rescale(model):
    return lambda *args, **side_inputs: model(*args, **side_inputs) * 1.0001


def linen():
    variables = nn.meta.unbox(LinenBlock().init(jax.random.key(0), X))
    return functools.partial(LinenBlock().apply, variables)


CALLS = {
    "v1": (mlp_v1, pzs.Jitted, pz_v1.nx.wrap(X).tag("batch", "features")),
    "equinox": (lambda: equinox().mlp, pzs.Jitted, X[0]),
    "linen": (linen, functools.partial, X),
}


@pytest.mark.parametrize("name", CALLS)
def test_check_equivalent_model_kind(name):
    build, edit, x = CALLS[name]
    model = build()
    report = pzs.check_equivalent(model, edit(model), x, gradients=False)
    assert report, report
    assert not pzs.check_equivalent(model, rescale(model), x, gradients=False)


@pytest.mark.parametrize("mesh", [MESH, EXPLICIT], ids=["auto", "explicit"])
def test_check_equivalent_placed_model(mesh):
    placed = pzs.name_to_name_device_put(toy(), mesh, {"embedding": "data"})
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
