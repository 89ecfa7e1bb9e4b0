"""Of which functions devices may hold parts: what we say, against what NumPy finds on real parts.

Each function takes an array whose first dimension is split. Those of ``MIXING`` mix along it, those
of ``INDEPENDENT`` do not.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, nn, random
from penzai import pz
from penzai.models.transformer.sampling_mode import KVCachingTransformerLM

import penzai_shard as pzs
from tests.models import counted_mlp, llama

L, W = 8, 6
X = random.normal(random.key(0), (L, W))
TABLE = random.normal(random.key(1), (L,))
K = random.normal(random.key(2), (W, W))
LONG = random.normal(random.key(4), (4 * L, W))


def with_backward(backward):
    """A sine whose backward pass is a function of the cotangent."""
    function = jax.custom_vjp(jnp.sin)
    function.defvjp(lambda x: (jnp.sin(x), None), lambda _, ct: (backward(ct),))
    return function


def with_derivative(derivative):
    """A sine whose derivative is a function of the direction."""
    function = jax.custom_jvp(jnp.sin)
    function.defjvp(lambda x, t: (jnp.sin(x[0]), derivative(t[0])))
    return function


@jax.custom_jvp
def with_symbolic_zeros(x, y):
    return x * y


def product_rule(values, tangents):
    """Right where both are differentiated, and not where one is a constant."""
    is_constant = [isinstance(t, jax.custom_derivatives.SymbolicZero) for t in tangents]
    (x, y), (dx, dy) = values, tangents
    return x * y, dx[::-1] * y if any(is_constant) else dx * y + x * dy


with_symbolic_zeros.defjvp(product_rule, symbolic_zeros=True)


def numbers_of_rows(x, implementation):
    """A number for each row, by a key that is made of the row."""
    key, rows = random.key(0, impl=implementation), lax.bitcast_convert_type(x[:, 0], jnp.uint32)
    return jax.vmap(lambda row: random.normal(random.fold_in(key, row), (W,)))(rows)


def keys(number):
    with jax.ensure_compile_time_eval():
        return random.split(random.key(0), number)


def mutated(x):
    held = jax.new_ref(x)
    held[...] = x[::-1]
    return held[...]


def callback(x):
    return jax.pure_callback(lambda x: np.asarray(x)[::-1].copy(), jax.typeof(x), x)


MIXING = {
    "reverse": lambda x: x[::-1],
    "unstacked": lambda x: jnp.stack(jnp.unstack(x)[::-1]),
    "divided": lambda x: jnp.concatenate(jnp.split(x, [1])[::-1]),
    "dropped where it is 1": lambda x: x + jnp.squeeze(x[:, :1]).reshape(-1, 1),
    "roll": lambda x: jnp.roll(x, 1, 0),
    "plus positions": lambda x: x + jnp.arange(len(x))[:, None],
    "divided by the length": lambda x: x / len(x),
    "minus the first": lambda x: x - x[0],
    "padding": lambda x: jnp.pad(x, ((1, 0), (0, 0)))[:-1],
    "fft": lambda x: jnp.fft.fft(x, axis=0).real,
    "reshape": lambda x: x.reshape(2, -1, W).swapaxes(0, 1).reshape(x.shape),
    "flip in a loop": lambda x: lax.fori_loop(0, 3, lambda i, x: x[::-1], x),
    "decided by one element": lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
    "cumsum": lambda x: jnp.cumsum(x, 0),
    "sort": lambda x: jnp.sort(x, 0),
    "argsort": lambda x: x + jnp.argsort(x, 0),
    "softmax": lambda x: nn.softmax(x, 0),
    "contraction": lambda x: jnp.einsum("ij,kj,kl->il", x, x, x),
    "argmax": lambda x: x + jnp.argmax(x, 0),
    "sliced table": lambda x: x + TABLE[: len(x), None],
    "ones counted": lambda x: x / jnp.ones_like(x[:, 0]).sum(),
    "other values where short": lambda x: x * (jnp.sin(x) if len(x) < L else x),
    "other power where short": lambda x: x ** (2 if len(x) < L else 3),
    "other column where short": lambda x: x + x[:, min(len(x), W - 1)][:, None],
    "other branch where short": lambda x: lax.cond(len(x) < L, jnp.sin, jnp.cos, x),
    "random": lambda x: x + random.normal(random.key(0), x.shape),
    "last made zero": lambda x: x.at[-1].multiply(0.0),
    "convolution": lambda x: lax.conv_general_dilated(
        x[None], jnp.ones((3, W, W)), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )[0],
    "tiled": lambda x: jnp.tile(x, (2, 1))[1::2],
    "merged as the minor one": lambda x: x.T.reshape(-1, 2)[:, ::-1].reshape(W, -1).T,
    "flattened running sum": lambda x: jnp.cumsum(x.reshape(-1)).reshape(x.shape),
    "vmapped reverse": lambda x: jax.vmap(lambda c: c[::-1], 1, 1)(x),
    "jitted reverse": lambda x: jax.jit(lambda x: x[::-1])(x),
    "loop until all": lambda x: lax.while_loop(lambda x: jnp.any(x < 3), lambda x: x + 1.0, x),
    "loop as long": lambda x: lax.fori_loop(0, len(x), lambda i, x: x * 1.1, x),
    "branch that mixes": lambda x: lax.cond(True, lambda x: x[::-1], lambda x: x, x),
    "carry that mixes late": lambda x: lax.fori_loop(
        0, 3, lambda i, c: (c[1], c[2], c[2][::-1]), (x, x, x)
    )[0],
    "backward mixes": with_backward(lambda ct: ct[::-1]),
    "forward derivative mixes": with_derivative(lambda t: jnp.roll(t, 1, 0)),
    "host callback": callback,
    "rotary": lambda x: x * jnp.cos(lax.iota(jnp.float32, len(x)))[:, None],
    "rolled by an element": lambda x: jnp.roll(x, jnp.int32(9 * x[0, 0]), 1),
    "reduced by a function": lambda x: x + lax.reduce(x, 0.0, lambda a, b: a * 2 + b, (0,)),
    "attention": lambda x: nn.dot_product_attention(*[x[None, :, None]] * 3)[0, :, 0],
    "mutable": mutated,
    "shuffled": lambda x: random.permutation(random.key(0), x, axis=0),
    # Whatever a part is asked that the whole is not.
    "slice of a table": lambda x: x + lax.slice(LONG, (0, 0), x.shape),
    "dynamic slice of a table": lambda x: x + lax.dynamic_slice(LONG, (0, 0), x.shape),
    "row by row": lambda x: x + x.at[x.argmax(-1)].get(wrap_negative_indices=False),
    "best row": lambda x: x + lax.top_k(x.T, 1)[0].T,
    "counted in a table": lambda x: x + jnp.zeros(W).at[x.argmax(-1)].add(1.0),
    "mapped with an index": lambda x: lax.map(lambda a: a[0] * a[1], (jnp.arange(1.0 * len(x)), x)),
    "derivative sums": with_derivative(lambda t: t + 0 * t.sum(0)),
    "derivative of constants differs": lambda x: with_symbolic_zeros(x, 2.0),
    "second derivative mixes": with_derivative(with_derivative(lambda t: jnp.roll(t, 1, 0))),
    # The first key of the batch makes the numbers of all: https://docs.jax.dev/en/latest/jax.random.html
    "numbers of rows by rbg": lambda x: x + numbers_of_rows(x, "rbg"),
    "keys computed with the program": lambda x: x + jax.vmap(random.normal)(keys(len(x)))[:, None],
}


INDEPENDENT = {
    "elementwise": lambda x: jnp.tanh(x) * 2 + x**3,
    "argsort": lambda x: x + jnp.argsort(x, -1),
    "taken along": lambda x: jnp.take_along_axis(x, jnp.argsort(x, -1), -1),
    "roll": lambda x: jnp.roll(x, 1, -1),
    "einsum": lambda x: jnp.einsum("bi,bj,jk->bk", x, x, K),
    "vmapped": lambda x: jax.vmap(lambda r: jnp.cumsum(r[::-1]) / len(r))(x),
    "mapped": lambda x: lax.map(lambda r: r[::-1] * r.sum(), x),
    "loop": lambda x: lax.fori_loop(0, 3, lambda i, x: jnp.sin(x) + i, x),
    "while": lambda x: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, lax.stop_gradient(x))
    )[1],
    "branch": lambda x: lax.switch(1, [jnp.sin, jnp.cos], x),
    "remat": lambda x: jax.checkpoint(lambda x: jnp.sin(x) @ K)(x),
    "heads": lambda x: nn.softmax(x.reshape(-1, 2, 3), -1).reshape(x.shape),
    "unstacked": lambda x: jnp.stack(jnp.unstack(x, axis=1)[::-1], 1),
    "embedded": lambda x: jnp.asarray(K)[jnp.argmax(x, -1)],
    "largest": lambda x: x - lax.top_k(x, 2)[0].sum(-1, keepdims=True),
    "fft": lambda x: jnp.abs(jnp.fft.fft(x)),
    "window": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 1), "SAME"),
    "convolution": lambda x: lax.conv_general_dilated(
        x[..., None], jnp.ones((3, 1, 1)), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )[..., 0],
    "associative scan": lambda x: lax.associative_scan(jnp.add, x, axis=1),
    "unused reduction": lambda x: (x.sum(), x * 2)[1],
    "indexed in a loop": lambda x: lax.fori_loop(
        0, W, lambda i, y: y.at[:, i].set(2 * y[:, W - 1 - i]), x
    ),
    "interpolated": lambda x: jnp.interp(x, jnp.arange(4.0), jnp.arange(4.0) ** 2),
    "segments": lambda x: jax.vmap(
        lambda r: jax.ops.segment_sum(r, jnp.arange(W) // 2, num_segments=W)
    )(x),
    "cache": lambda x: lax.dynamic_update_slice(
        jnp.zeros((len(x), 3, W)), x[:, None], (0, 1, 0)
    ).sum(1),
    "sorted by key": lambda x: lax.sort((x, -x), dimension=1, num_keys=1)[1],
    "while of each row": lambda x: jax.vmap(
        lambda r: lax.while_loop(lambda c: c.sum() < 3, lambda c: c + 1, r)
    )(lax.stop_gradient(x)),
    "own derivative": with_derivative(lambda t: jnp.cumsum(t, -1)),
    "derivative by itself": lambda x: nn.softplus(x) + nn.mish(x) + jnp.sinc(x),
    "numbers of rows": lambda x: x + numbers_of_rows(x, "threefry2x32"),
}
# Independent, and refused by name.
NOT_FOLLOWED = {"taken along", "fft", "window"}


def judge(function, x=X):
    """The row of ``independent_axes`` of a function of an array, by column."""
    named = pz.nx.NamedArray({"seq": len(x)}, x.T)
    (row,) = pzs.independent_axes(lambda x: function(x.data_array.T), named).to_data()["rows"]
    return row


@pytest.fixture(scope="module")
def judged():
    return [
        {name: judge(function) for name, function in table.items()}
        for table in (MIXING, INDEPENDENT)
    ]


def test_independent_axes_refuses_what_mixes_with_its_line(judged):
    for name, row in judged[0].items():
        assert not row["independent"], name
        assert row["reason"], name
        assert "(test_independence.py:" in row["where"], name


def test_independent_axes_passes_what_does_not_mix(judged):
    refused = {name for name in INDEPENDENT if not judged[1][name]["independent"]}
    assert refused == NOT_FOLLOWED


def test_independent_axes_is_right_on_real_parts(judged):
    tables = zip((MIXING, INDEPENDENT), judged, strict=True)
    passed = {k: f for table, rows in tables for k, f in table.items() if rows[k]["independent"]}
    weights = np.sin(np.arange(L * W, dtype=np.float32)).reshape(L, W)

    @jax.jit
    def run_all(x, weights):
        runs = {name: jax.vjp(function, x) for name, function in passed.items()}
        # Outputs may be narrower than the input.
        return {name: (y, pull(weights[:, : y.shape[1]])) for name, (y, pull) in runs.items()}

    whole = run_all(X, weights)
    parts = [run_all(X[i : i + 1], weights[i : i + 1]) for i in range(L)]
    together = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
    for name in passed:
        for one, other in zip(*map(jax.tree.leaves, (whole[name], together[name])), strict=True):
            np.testing.assert_allclose(one, other, 1e-4, 1e-4, err_msg=name)


# Models


def rows_of(report):
    return {row[0]: row[1] for row in report.rows}


@pytest.mark.parametrize("length", [1, 3])
def test_independent_axes_of_an_abstract_transformer_at_any_length(length):
    tokens = pz.nx.ones({"batch": length, "seq": length}, dtype=jnp.int32)
    model = pzs.abstract_model(lambda: llama(blocks=1))
    report = pzs.independent_axes(model, tokens, token_positions=pz.nx.arange("seq", length))
    assert rows_of(report) == {"batch": True, "seq": False}
    assert "Attention" in report.rows[1][3]


def test_independent_axes_names_the_parameter_that_has_the_axis():
    layer = pz.nn.Linear.from_config("up", jax.random.key(0), {"embedding": 8}, {"neurons": 4})
    report = pzs.independent_axes(layer, pz.nx.ones({"batch": 2, "embedding": 8}))
    assert rows_of(report) == {"batch": True, "embedding": False}
    assert "'up.weights'" in report.rows[1][4]


def test_independent_axes_of_a_key_value_cache():
    model = KVCachingTransformerLM.from_uncached(llama(blocks=1), 16, {"batch": 2})
    tokens = pz.nx.ones({"batch": 2, "seq": 1}, dtype=jnp.int32)
    inputs = {"token_positions": tokens, "cache_end_index": jnp.int32(3)}
    inputs["kv_token_positions"] = pz.nx.ones({"batch": 2, "seq": 16}, dtype=jnp.int32)
    report = pzs.independent_axes(model.body, tokens, **inputs)
    assert rows_of(report)["batch"]


@pz.pytree_dataclass
class Centre(pz.nn.Layer):
    """Takes the mean along an axis away."""

    axis: str

    def __call__(self, x, /, **side_inputs):
        return x - pz.nx.nmap(jnp.mean)(x.untag(self.axis))


def test_independent_axes_names_layer_and_line():
    line = Centre.__call__.__code__.co_firstlineno + 1
    layer = pz.nn.Sequential([pzs.Checkpointed(Centre("seq")), pz.nn.Softmax("features")])
    x = pz.nx.ones({"batch": 2, "seq": 3, "features": 4})
    report = pzs.independent_axes(layer, x)
    rows = {row["axis"]: row for row in report.to_data()["rows"]}
    assert rows["seq"]["operation"] == "reduce_sum"
    assert rows["seq"]["where"].endswith(f"(test_independence.py:{line})")
    assert "Sequential > Centre" in rows["seq"]["where"]
    assert "Softmax" in rows["features"]["where"]
    assert rows["batch"]["independent"]


def test_independent_axes_of_random_numbers():
    stream = pz.RandomStream.from_base_key(random.key(0))
    for shared in ((), ("seq",)):
        dropout = pz.nn.StochasticDropout(0.5, share_across_axes=shared)
        report = pzs.independent_axes(dropout, pz.nx.ones({"seq": 4}), random_stream=stream)
        assert rows_of(report) == {"seq": not shared}


def test_independent_axes_of_state_and_parameters():
    report = pzs.independent_axes(counted_mlp(), pz.nx.ones({"batch": 2, "features": 8}))
    assert rows_of(report) == {"batch": True, "features": False}
