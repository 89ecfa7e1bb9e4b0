"""Small programs in which lengths, shapes or places look as if dimensions were one that are not.

All lengths are equal wherever they can be, and paths say nothing.
"""

import dataclasses

import jax
import jax.numpy as jnp

from tests.choosing.named_models import NamedModel, struct

N = 4
BATCH = (("batch", "features"),)
TOKENS = (("batch", "seq"),)


def _trick(function, names, inputs=None, input_names=BATCH, lengths=None):
    """A model of weights whose dimensions are ``N`` long, unless said otherwise."""
    lengths = lengths or {}
    weights = {
        path: struct(*(lengths.get(name, N) for name in axes)) for path, axes in names.items()
    }
    inputs = inputs or tuple(
        struct(*(lengths.get(name, N) for name in axes)) for axes in input_names
    )
    return NamedModel(function, weights, inputs, input_names, names, {}, False)


def _tokens(*shape):
    return struct(*(shape or (N, N)), dtype=jnp.int32)


def unrelated_squares():
    return _trick(
        lambda w, x: (x @ w["a"], x @ w["b"]),
        {"a": ("features", "a_out"), "b": ("features", "b_out")},
    )


def chain_of_squares():
    names = {"a": ("features", "h1"), "b": ("h1", "h2"), "c": ("h2", "out")}
    return _trick(lambda w, x: jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"]) @ w["c"], names)


def vocabulary_as_long_as_embedding():
    names = {"a": ("vocabulary", "embedding"), "b": ("embedding", "vocabulary")}
    return _trick(lambda w, t: w["a"][t] @ w["b"], names, (_tokens(),), TOKENS)


def tied_and_transposed():
    """An autoencoder of one weight: what goes in and what is hidden are equally long."""
    return _trick(lambda w, x: jnp.tanh(x @ w["a"]) @ w["a"].T, {"a": ("features", "hidden")})


def used_both_ways():
    """Both dimensions are that of the inputs, and an array has a name only once."""
    return _trick(lambda w, x: x @ w["a"] + x @ w["a"].T, {"a": ("features", "features")})


def batch_mixed_with_heads():
    """A reshape without a transpose: rows of it are of several positions and some features."""

    def function(w, x):
        mixed = (x @ w["a"]).reshape(N * 2, N, N // 2)
        return jnp.einsum("hsd,htd->hst", mixed, mixed)

    names = {"a": ("features", "out")}
    return _trick(function, names, input_names=(("batch", "seq", "features"),))


def flattened_in_two_orders():
    def function(w, x):
        rows = x.reshape(N, N * N)
        columns = x.transpose(0, 2, 1).reshape(N, N * N)
        return rows @ w["a"], columns @ w["b"]

    names = {"a": ("seq*features", "a_out"), "b": ("features*seq", "b_out")}
    axes = (("batch", "seq", "features"),)
    return _trick(function, names, None, axes, {"seq*features": N * N, "features*seq": N * N})


def joined_outputs():
    def function(w, x):
        return jnp.concatenate([x @ w["a"], x @ w["b"]], -1) @ w["c"]

    names = {"a": ("features", "first"), "b": ("features", "second"), "c": ("both", "out")}
    return _trick(function, names, lengths={"both": 2 * N})


def tables_of_users_and_items():
    names = {"a": ("users", "embedding"), "b": ("items", "embedding")}

    def function(w, users, items):
        return (w["a"][users] * w["b"][items]).sum(-1)

    return _trick(function, names, (_tokens(N), _tokens(N)), (("batch",), ("batch",)))


def bias_along_positions():
    """Equally many positions as features: the bias is of positions."""
    names = {"a": ("seq",), "b": ("features",)}
    axes = (("batch", "seq", "features"),)
    return _trick(lambda w, x: x + w["a"][:, None] + w["b"], names, None, axes)


def bilinear():
    names = {"a": ("left", "right")}
    axes = (("batch", "left"), ("batch", "right"))
    return _trick(lambda w, x, y: jnp.einsum("bi,ij,bj->b", x, w["a"], y), names, None, axes)


def many_times():
    """A loop that multiplies by one weight: what comes out goes in."""

    def function(w, x):
        return jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ w["a"]), x)

    return _trick(function, {"a": ("features", "features")})


def unused():
    return _trick(lambda w, x: x @ w["a"], {"a": ("features", "out"), "b": ("b0", "b1")})


def only_penalised():
    names = {"a": ("features", "out"), "b": ("b0", "b1")}
    return _trick(lambda w, x: (x @ w["a"], jnp.sum(w["b"] ** 2)), names)


def ensemble():
    names = {"a": ("members", "features", "hidden"), "b": ("members", "hidden", "out")}

    def member(a, b, x):
        return jnp.tanh(x @ a) @ b

    def function(w, x):
        return jax.vmap(member, (0, 0, None))(w["a"], w["b"], x).mean(0)

    return _trick(function, names)


def codebook():
    """The nearest code is looked up in the table that it was compared with."""

    def function(w, x):
        distances = ((x[:, None] - w["a"]) ** 2).sum(-1)
        return w["a"][jnp.argmin(distances, -1)] @ w["b"]

    return _trick(function, {"a": ("codes", "features"), "b": ("features", "out")})


def shuffled():
    """Rows in another order are of the same axis, or nothing is said of it."""

    def function(w, x):
        return x @ w["a"][jnp.array([2, 0, 3, 1])], x @ w["b"]

    return _trick(function, {"a": ("permuted", "a_out"), "b": ("features", "b_out")})


def attention_between_features():
    """Scores are of features by features, as in XCiT, with as many positions as features."""

    def function(w, x):
        q, k, v = (jnp.einsum("bsf,fo->bso", x, w[name]) for name in "abc")
        scores = jax.nn.softmax(jnp.einsum("bsi,bsj->bij", q, k), -1)
        return jnp.einsum("bij,bsj->bsi", scores, v)

    names = {"a": ("features", "queries"), "b": ("features", "keys"), "c": ("features", "keys")}
    return _trick(function, names, None, (("batch", "seq", "features"),))


def inverse():
    """The rows of an inverse are the columns of what is inverted."""
    names = {"a": ("out", "features"), "b": ("features", "last")}
    return _trick(lambda w, x: (x @ jnp.linalg.inv(w["a"]), x @ w["b"]), names)


def fourier():
    """Frequencies are as many as features and are not them."""

    def function(w, x):
        return jnp.fft.fft(x).real * w["a"], x * w["b"]

    return _trick(function, {"a": ("frequencies",), "b": ("features",)})


def sorted_features():
    """What stands first after sorting is not the first feature."""
    names = {"a": ("ranks",), "b": ("features",)}
    return _trick(lambda w, x: (jnp.sort(x, -1) * w["a"], x * w["b"]), names)


def grouped_convolution():
    """Each output channel sees one input channel; there are as many groups as channels."""

    def function(w, x):
        return jax.lax.conv_general_dilated(
            x,
            w["a"],
            (1,),
            "SAME",
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=N,
        )

    names = {"a": (None, None, "channels")}
    axes = (("batch", "seq", "channels"),)
    model = _trick(function, names, None, axes)
    return dataclasses.replace(model, weights={"a": struct(N, 1, N)})


def kronecker():
    """A product of two small weights in place of a large one."""

    def function(w, x):
        return x @ jnp.kron(w["a"], w["b"])

    names = {"a": ("major_in", "major_out"), "b": ("minor_in", "minor_out")}
    axes = (("batch", "features"),)
    return _trick(function, names, (struct(N, N * N),), axes)


def two_widths_of_equal_length():
    """An encoder and a decoder, joined by a projection; both are as wide."""

    def function(w, s, t):
        encoded = jnp.tanh(w["a"][s] @ w["b"])
        x = w["d"][t] + (encoded @ w["c"])
        return x @ w["e"]

    names = {
        "a": ("source_vocabulary", "source_width"),
        "b": ("source_width", "encoded"),
        "c": ("encoded", "width"),
        "d": ("vocabulary", "width"),
        "e": ("width", "vocabulary"),
    }
    return _trick(function, names, (_tokens(), _tokens()), (("batch", "seq"), ("batch", "seq")))


def rolled_features():
    """A feature beside its neighbour is another one; the sum is of positions in a row."""
    names = {"a": ("features",), "b": ("features",)}
    return _trick(lambda w, x: x * w["a"] + jnp.roll(x, 1, -1) * w["b"], names)


def branches():
    """Of two experts one runs: what goes in and comes out is one axis, what is hidden is not."""

    def expert(up, down):
        return lambda x: jnp.tanh(x @ up) @ down

    def function(w, x):
        first, second = expert(w["a"], w["b"]), expert(w["c"], w["d"])
        return jax.lax.cond(x.sum() > 0, first, second, x)

    names = {
        "a": ("features", "h1"),
        "b": ("h1", "out"),
        "c": ("features", "h2"),
        "d": ("h2", "out"),
    }
    return _trick(function, names)


TRICKS = (
    unrelated_squares,
    chain_of_squares,
    vocabulary_as_long_as_embedding,
    tied_and_transposed,
    used_both_ways,
    batch_mixed_with_heads,
    flattened_in_two_orders,
    joined_outputs,
    tables_of_users_and_items,
    bias_along_positions,
    bilinear,
    many_times,
    unused,
    only_penalised,
    ensemble,
    codebook,
    shuffled,
    attention_between_features,
    inverse,
    fourier,
    sorted_features,
    grouped_convolution,
    kronecker,
    two_widths_of_equal_length,
    rolled_features,
    branches,
)
