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
PERMUTATION = np.array([3, 1, 0, 2, 7, 6, 4, 5])
K = random.normal(random.key(2), (W, W))
LONG = random.normal(random.key(4), (4 * L, W))
EXPERTS = random.normal(random.key(3), (4, W, W))


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
    "shift by concatenation": lambda x: jnp.concatenate([x[1:], x[:1]]),
    "plus positions": lambda x: x + jnp.arange(len(x))[:, None],
    "divided by the length": lambda x: x / len(x),
    "minus the first": lambda x: x - x[0],
    "associative scan": lambda x: lax.associative_scan(jnp.add, x),
    "window": lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 1), (1, 1), "SAME"),
    "padding": lambda x: jnp.pad(x, ((1, 0), (0, 0)))[:-1],
    "fft": lambda x: jnp.fft.fft(x, axis=0).real,
    "permutation": lambda x: x[PERMUTATION[: len(x)] % len(x)],
    "reshape": lambda x: x.reshape(2, -1, W).swapaxes(0, 1).reshape(x.shape),
    "flip in a loop": lambda x: lax.fori_loop(0, 3, lambda i, x: x[::-1], x),
    "decided by one element": lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
    "cumsum": lambda x: jnp.cumsum(x, 0),
    "sort": lambda x: jnp.sort(x, 0),
    "argsort": lambda x: x + jnp.argsort(x, 0),
    "softmax": lambda x: nn.softmax(x, 0),
    "standardised": lambda x: (x - x.mean(0)) / x.std(0),
    "scan": lambda x: lax.scan(lambda c, x: (c + x, c), x[0] * 0, x)[1],
    "contraction": lambda x: jnp.einsum("ij,kj,kl->il", x, x, x),
    "outer product": lambda x: (x @ x.T)[:, :W],
    "argmax": lambda x: x + jnp.argmax(x, 0),
    "linspace": lambda x: x * jnp.linspace(0, 1, len(x))[:, None],
    "numpy positions": lambda x: x + np.arange(len(x), dtype=np.float32)[:, None],
    "sliced table": lambda x: x + TABLE[: len(x), None],
    "indexed table": lambda x: x + TABLE[jnp.arange(len(x))][:, None],
    "ones counted": lambda x: x / jnp.ones_like(x[:, 0]).sum(),
    "length squared": lambda x: x * float(len(x) ** 2),
    "more where short": lambda x: jnp.sin(x) if len(x) < L else x,
    "other values where short": lambda x: x * (jnp.sin(x) if len(x) < L else x),
    "other power where short": lambda x: x ** (2 if len(x) < L else 3),
    "other axis where short": lambda x: (
        jnp.cumsum(x, 1, dtype=x.dtype) if len(x) < L else lax.cumsum(x, 1, reverse=True)
    ),
    "other column where short": lambda x: x + x[:, min(len(x), W - 1)][:, None],
    "other branch where short": lambda x: lax.cond(len(x) < L, jnp.sin, jnp.cos, x),
    "diagonal": lambda x: x + jnp.diagonal(x @ x.T)[:, None] * 1.0,
    "top": lambda x: x + lax.top_k(x[:, 0], 2)[0][0],
    "random": lambda x: x + random.normal(random.key(0), x.shape),
    "random keys": lambda x: (
        x + jax.vmap(lambda key: random.normal(key))(random.split(random.key(0), len(x)))[:, None]
    ),
    "segments": lambda x: jax.ops.segment_sum(x, jnp.arange(L)[: len(x)] // 2, len(x)),
    "scattered": lambda x: jnp.zeros_like(x).at[jnp.argsort(x[:, 0])].set(x),
    "scattered in place": lambda x: x.at[0].set(0.0),
    "last made zero": lambda x: x.at[-1].multiply(0.0),
    "dynamic slice": lambda x: x - lax.dynamic_slice(x, (1, 0), (1, W)),
    "bytes": lambda x: (
        jnp.flip(lax.bitcast_convert_type(x, jnp.uint8), 0).astype(jnp.float32).sum(-1)
    ),
    "convolution": lambda x: lax.conv_general_dilated(
        x[None], jnp.ones((3, W, W)), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )[0],
    "diff": lambda x: jnp.diff(x, axis=0, prepend=0.0),
    "repeated": lambda x: jnp.repeat(x, 2, 0)[: len(x)],
    "tiled": lambda x: jnp.tile(x, (2, 1))[1::2],
    "strided window": lambda x: x.reshape(-1, 2, W)[:, ::-1].reshape(x.shape),
    "flattened and turned": lambda x: x.reshape(-1)[::-1].reshape(x.shape),
    "transposed by order": lambda x: x.reshape(W, -1).T,
    "merged as the minor one": lambda x: x.T.reshape(-1, 2)[:, ::-1].reshape(W, -1).T,
    "flattened running sum": lambda x: jnp.cumsum(x.reshape(-1)).reshape(x.shape),
    "vmapped reverse": lambda x: jax.vmap(lambda c: c[::-1], 1, 1)(x),
    "vmapped index": lambda x: jax.vmap(lambda c, i: c - c[i], (1, 0), 1)(x, jnp.arange(W) % 2),
    "rematerialised roll": lambda x: jax.checkpoint(lambda x: jnp.roll(x, 1, 0))(x),
    "loop until all": lambda x: lax.while_loop(lambda x: jnp.any(x < 3), lambda x: x + 1.0, x),
    "loop as long": lambda x: lax.fori_loop(0, len(x), lambda i, x: x * 1.1, x),
    "loop over elements": lambda x: lax.fori_loop(0, len(x), lambda i, y: y.at[i].add(y[i - 1]), x),
    "branch that mixes": lambda x: lax.cond(True, lambda x: x[::-1], lambda x: x, x),
    "carry that mixes late": lambda x: lax.fori_loop(
        0, 3, lambda i, c: (c[1], c[2], c[2][::-1]), (x, x, x)
    )[0],
    "backward mixes": with_backward(lambda ct: ct[::-1]),
    "forward derivative mixes": with_derivative(lambda t: jnp.roll(t, 1, 0)),
    "host callback": callback,
    "own gradient of a mix": lambda x: jax.grad(lambda x: jnp.sum(jnp.cumsum(x, 0) ** 2))(x),
    "swapped halves": lambda x: jnp.concatenate(jnp.split(x, 2)[::-1]),
    "other precision where short": lambda x: x.astype(
        jnp.bfloat16 if len(x) < L else jnp.float32
    ).astype(jnp.float32),
    "other order where short": lambda x: x - jnp.sin(x) if len(x) < L else jnp.sin(x) - x,
    "reversed sum where short": lambda x: lax.cumsum(x, 1, reverse=len(x) < L),
    "other table where short": lambda x: x + np.float32({8: 1.0, 2: 2.0, 1: 3.0, 16: 4.0}[len(x)]),
    "largest by length": lambda x: x + lax.top_k(x, min(len(x), 3))[0].sum(1, keepdims=True),
    "rolled by length": lambda x: jnp.roll(x, len(x), 1),
    "reduced by a function": lambda x: x + lax.reduce(x, 0.0, lambda a, b: a * 2 + b, (0,)),
    "histogram": lambda x: x + jnp.histogram(x, W)[0],
    "singular vectors": lambda x: jnp.linalg.svd(x, full_matrices=False)[0],
    "grouped channels": lambda x: lax.conv_general_dilated(
        x[None, :, None], jnp.ones((len(x), 1, 1, 3)), (1, 1), "SAME", feature_group_count=len(x)
    )[0, :, 0],
    "mutable": mutated,
    "gradient of a normaliser": lambda x: jax.grad(lambda x: nn.logsumexp(x))(x),
    "shuffled": lambda x: random.permutation(random.key(0), x, axis=0),
    # Whatever a part is asked that the whole is not.
    "where of length 1": lambda x: x * (2.0 if len(x) == 1 else 1.0),
    "written into a table": lambda x: lax.dynamic_update_slice(LONG, x, (0, 0))[:L],
    "slice of a table": lambda x: x + lax.slice(LONG, (0, 0), x.shape),
    "row by row": lambda x: x + x.at[x.argmax(-1)].get(wrap_negative_indices=False),
    "best row": lambda x: x + lax.top_k(x.T, 1)[0].T,
    "counted in a table": lambda x: x + jnp.zeros(W).at[x.argmax(-1)].add(1.0),
    "mapped with an index": lambda x: lax.map(lambda a: a[0] * a[1], (jnp.arange(1.0 * len(x)), x)),
    "derivative sums": with_derivative(lambda t: t + 0 * t.sum(0)),
    "derivative of constants differs": lambda x: with_symbolic_zeros(x, 2.0),
    "second derivative mixes": with_derivative(with_derivative(lambda t: jnp.roll(t, 1, 0))),
    # The first key of the batch makes the numbers of all: https://docs.jax.dev/en/latest/jax.random.html
    "numbers of rows by rbg": lambda x: x + numbers_of_rows(x, "rbg"),
    "numbers of rows by unsafe rbg": lambda x: x + numbers_of_rows(x, "unsafe_rbg"),
    "keys computed with the program": lambda x: x + jax.vmap(random.normal)(keys(len(x)))[:, None],
}


INDEPENDENT = {
    "elementwise": lambda x: jnp.tanh(x) * 2 + x**3,
    "softmax": lambda x: nn.softmax(x, -1),
    "norm": lambda x: (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-3),
    "sort": lambda x: jnp.sort(x, -1),
    "argsort": lambda x: x + jnp.argsort(x, -1),
    "taken along": lambda x: jnp.take_along_axis(x, jnp.argsort(x, -1), -1),
    "running sum": lambda x: jnp.cumsum(x, -1),
    "reverse": lambda x: x[:, ::-1],
    "roll": lambda x: jnp.roll(x, 1, -1),
    "positions": lambda x: x + jnp.arange(W),
    "outer product": lambda x: (x[:, :, None] * x[:, None]).sum(-1),
    "batched product": lambda x: jnp.einsum("bij,bj->bi", x[:, :, None] * x[:, None], x),
    "transposed": lambda x: (K @ x.T).T,
    "vmapped": lambda x: jax.vmap(lambda r: jnp.cumsum(r[::-1]) / len(r))(x),
    "mapped": lambda x: lax.map(lambda r: r[::-1] * r.sum(), x),
    "loop": lambda x: lax.fori_loop(0, 3, lambda i, x: jnp.sin(x) + i, x),
    "loop from zero": lambda x: lax.fori_loop(
        0, 3, lambda i, y: y + x, jnp.zeros(x.shape, x.dtype)
    ),
    "scan over the other": lambda x: (
        lax.scan(lambda c, r: (c + r, c * r), jnp.zeros(x.shape[0]), x.T)[1].T
    ),
    "branch": lambda x: lax.switch(1, [jnp.sin, jnp.cos], x),
    "jit": lambda x: jax.jit(jnp.sin)(x),
    "remat": lambda x: jax.checkpoint(lambda x: jnp.sin(x) @ K)(x),
    "logsumexp": lambda x: x - nn.logsumexp(x, -1, keepdims=True),
    "heads": lambda x: nn.softmax(x.reshape(-1, 2, 3), -1).reshape(x.shape),
    "merged and divided": lambda x: jnp.sin(x.reshape(-1)).reshape(x.shape),
    "padded": lambda x: jnp.pad(x, ((0, 0), (1, 1)))[:, 1:-1],
    "concatenated": lambda x: jnp.concatenate([x[:, 3:], x[:, :3]], -1),
    "divided": lambda x: sum(jnp.split(x, 2, -1)).repeat(2, -1),
    "tiled": lambda x: jnp.tile(x[:, :3], (1, 2)),
    "unstacked": lambda x: jnp.stack(jnp.unstack(x, axis=1)[::-1], 1),
    "set": lambda x: x.at[:, 1].set(0.0).at[:, 2:4].add(1.0),
    "embedded": lambda x: jnp.asarray(K)[jnp.argmax(x, -1)],
    "quantile": lambda x: x - jnp.quantile(x, 0.25, axis=-1, keepdims=True),
    "fft": lambda x: jnp.abs(jnp.fft.fft(x)),
    "window": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 1), "SAME"),
    "convolution": lambda x: lax.conv_general_dilated(
        x[..., None], jnp.ones((3, 1, 1)), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )[..., 0],
    "associative scan": lambda x: lax.associative_scan(jnp.add, x, axis=1),
    "cholesky": lambda x: jnp.linalg.cholesky(x[:, :, None] * x[:, None] + jnp.eye(W))[:, 0],
    "same numbers for all": lambda x: x + random.normal(random.key(0), (W,)),
    "gradient of the sum": lambda x: jax.grad(lambda x: jnp.sum(jnp.sin(x) ** 2))(x),
    "unused reduction": lambda x: (x.sum(), x * 2)[1],
    "low precision": lambda x: (x.astype(jnp.bfloat16) @ K.astype(jnp.bfloat16)).astype(x.dtype),
    "indexed in a loop": lambda x: lax.fori_loop(
        0, W, lambda i, y: y.at[:, i].set(2 * y[:, W - 1 - i]), x
    ),
    "table lookup in a loop": lambda x: lax.fori_loop(
        0, 2, lambda i, y: y + K[i] + lax.dynamic_slice(x, (0, i), (len(x), 1)), x
    ),
    "incomplete beta": lambda x: jax.scipy.special.betainc(1.0, 2.0, nn.sigmoid(x)),
    "batched solve": lambda x: jnp.linalg.solve(
        x[:, :, None] * x[:, None] + jnp.eye(W), x[..., None]
    )[..., 0],
    "interpolated": lambda x: jnp.interp(x, jnp.arange(4.0), jnp.arange(4.0) ** 2),
    "rows written": lambda x: jax.vmap(lambda r, i: r.at[i].set(0.0))(x, jnp.argmax(x, 1)),
    "segments": lambda x: jax.vmap(
        lambda r: jax.ops.segment_sum(r, jnp.arange(W) // 2, num_segments=W)
    )(x),
    "clipped": lambda x: jnp.clip(x, -0.5, 0.5) + jnp.sign(x) * jnp.isfinite(x),
    "experts": lambda x: jnp.einsum("be,bi,eio->bo", top_experts(x), x, EXPERTS),
    "experts by index": lambda x: jnp.einsum("bi,bkio->bo", x, EXPERTS[lax.top_k(x[:, :4], 2)[1]]),
    "cache": lambda x: lax.dynamic_update_slice(
        jnp.zeros((len(x), 3, W)), x[:, None], (0, 1, 0)
    ).sum(1),
    "cache by scatter": lambda x: jnp.zeros((len(x), 3, W)).at[:, jnp.int32(1)].set(x).sum(1),
    "cache by row": lambda x: jax.vmap(lambda r, i: jnp.zeros((W, W)).at[i].add(r))(
        x, x.argmax(1)
    ).sum(1),
    "cache read by row": lambda x: (
        jax.vmap(lambda r, i: lax.dynamic_slice(r, (i,), (1,)))(x, x.argmax(1)) + x
    ),
    "sorted by key": lambda x: lax.sort((x, -x), dimension=1, num_keys=1)[1],
    "groups": lambda x: jnp.cumsum(x.reshape(-1, 1, 3, 2), 2).reshape(len(x), W),
    "interleaved": lambda x: jnp.stack([x[:, :3], x[:, 3:]], -1).reshape(len(x), -1),
    "quantised": lambda x: jnp.round(x * 8).astype(jnp.int8).astype(jnp.float32) + x,
    "while of each row": lambda x: (
        jax.vmap(lambda r: lax.while_loop(lambda c: c.sum() < 3, lambda c: c + 1, r))(
            lax.stop_gradient(x)
        )
        + x
    ),
    "own derivative": with_derivative(lambda t: jnp.cumsum(t, -1)),
    "derivative by itself": lambda x: nn.softplus(x) + nn.mish(x) + jnp.sinc(x),
    "numbers of rows": lambda x: x + numbers_of_rows(x, "threefry2x32"),
}
# Independent, and refused by name.
NOT_FOLLOWED = {
    *("taken along", "fft", "window", "cholesky", "batched solve", "while of each row"),
}


def top_experts(x):
    """The weights of each row's two best experts, 0 for the others."""
    values, indices = lax.top_k(nn.softmax(x[:, :4]), 2)
    return jnp.einsum("bk,bke->be", values, nn.one_hot(indices, 4))


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
    # The strictest: nothing is left to mix with.
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
    report = pzs.independent_axes(layer, x, without_names=jnp.ones(3))
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
