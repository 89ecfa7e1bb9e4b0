"""What parts of models are called: poolers, convolutions, loops over blocks, integers."""

import jax
import jax.numpy as jnp
import pytest

import penzai_shard as pzs
from tests.choosing.named_models import (
    BATCH,
    EMBEDDING,
    HEADS,
    PROJECTION,
    SEQ,
    TOKENS,
    causal,
    struct,
)
from tests.choosing.transformer_parts import attend, merge_heads, split_heads

E, N, V = EMBEDDING, 24, 32
INNER = "heads*projection"
BLOCK = {"q": (E, E), "k": (E, E), "v": (E, E), "o": (E, E), "up": (E, N), "down": (N, E)}
BATCH_SEQ = (("batch", "seq"),)


def named(function, shapes, *inputs, axes=BATCH_SEQ):
    weights = {path: struct(*shape) for path, shape in shapes.items()}
    return pzs.infer_names(function, weights, *inputs, input_names=list(axes))


def mlp(w, x):
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"]


def block(w, x, context=None):
    context = x if context is None else context
    q, k, v = (split_heads(y @ w[n]) for n, y in (("q", x), ("k", context), ("v", context)))
    return mlp(w, x + attend(q, k, v) @ w["o"])


def at(path, shapes=BLOCK):
    return {f"{path}.{name}": shape for name, shape in shapes.items()}


def of(w, path):
    return {name: w[f"{path}.{name}"] for name in BLOCK}


def test_queries_keys_and_values_that_follow_each_other_with_all_heads_are_qkv():
    def function(w, tokens):
        x = w["embed"][tokens]
        fused = (x @ w["qkv"].reshape(3 * E, E).T).reshape(BATCH, SEQ, 3 * HEADS, PROJECTION)
        q, k, v = (y.swapaxes(1, 2) for y in jnp.split(fused, 3, axis=2))
        made = merge_heads(causal(q @ k.swapaxes(-1, -2)) @ v)
        return mlp(w, x + made @ w["o"]) @ w["embed"].T

    shapes = {"embed": (V, E), "qkv": (3, E, E), **{n: BLOCK[n] for n in ("o", "up", "down")}}
    found = named(function, shapes, TOKENS)
    assert found["qkv"] == ("qkv", INNER, "embedding")
    assert found["o"] == (INNER, "embedding")


@pytest.mark.parametrize(
    ("index", "name"),
    [
        (lambda tokens: tokens, "vocabulary"),
        (lambda tokens: tokens * 7 % V, None),
        (lambda tokens: tokens + jnp.roll(tokens, 1, 1), None),
    ],
)
def test_a_table_in_which_tokens_are_looked_up_too_has_the_vocabulary(index, name):
    def function(w, tokens):
        x = block(w, w["embed"][tokens])
        return block(w, x + w["more"][index(tokens)]) @ w["embed"].T

    found = named(function, {"embed": (V, E), "more": (V, E), **BLOCK}, TOKENS)
    assert found["embed"][0] == "vocabulary"
    assert found["more"] == (name, "embedding")


def test_what_loops_over_blocks_of_positions_add_is_added_to_the_embedding():
    def function(w, tokens):
        x = w["embed"][tokens]
        for _ in range(2):
            blocks = x.reshape(BATCH, 4, SEQ // 4, E).swapaxes(0, 1)
            made = jax.lax.map(lambda y: jnp.tanh(y @ w["mix"]), blocks)
            x = x + made.swapaxes(0, 1).reshape(BATCH, SEQ, N) @ w["out"]
        return x @ w["embed"].T

    found = named(function, {"embed": (V, E), "mix": (E, N), "out": (N, E)}, TOKENS)
    assert found["embed"] == ("vocabulary", "embedding")
    assert found["mix"][0] == found["out"][1] == "embedding"


def test_channels_that_a_convolution_takes_one_by_one_are_no_neurons():
    def function(w, tokens):
        x = block(w, w["embed"][tokens])
        gate, y = jnp.split(x @ w["pointwise"], 2, -1)
        y = jax.lax.conv_general_dilated(
            y * jax.nn.sigmoid(gate),
            w["depthwise"],
            (1,),
            "SAME",
            dimension_numbers=("NHC", "HIO", "NHC"),
            feature_group_count=E,
        )
        return (x + jax.nn.silu(y) @ w["out"]) @ w["embed"].T

    shapes = {"embed": (V, E), "pointwise": (E, 2 * E), "depthwise": (3, 1, E), "out": (E, E)}
    found = named(function, shapes | BLOCK, TOKENS)
    assert found["pointwise"] == ("embedding", "gate_up*conv_channels")
    assert found["depthwise"] == (None, None, "conv_channels")
    assert found["up"] == ("embedding", "neurons")


@pytest.mark.parametrize(
    ("length", "is_gated", "name"),
    [(PROJECTION, False, None), (PROJECTION, True, "neurons"), (E, False, "neurons")],
)
def test_a_bottleneck_that_is_shorter_than_the_embedding_is_no_neurons(length, is_gated, name):
    def function(w, tokens):
        x = block(w, w["embed"][tokens])
        hidden = jax.nn.gelu(x @ w["narrow"]) * (x @ w["gate"] if is_gated else 1.0)
        return (x + hidden @ w["wide"]) @ w["embed"].T

    shapes = {"embed": (V, E), "narrow": (E, length), "wide": (length, E), **BLOCK}
    found = named(function, shapes | {"gate": (E, length)}, TOKENS)
    assert found["narrow"] == ("embedding", name)
    assert found["up"] == ("embedding", "neurons")
    if name is None:
        assert "of the embedding, which is longer, as other neurons" in found.reasons("narrow")[1]


def test_neurons_are_so_where_each_token_is_scaled_to_integers():
    def dense(x, kernel):
        scale = jnp.abs(x).max(-1, keepdims=True) / 127
        product = jnp.einsum("...i,ij->...j", jnp.round(x / scale).astype(jnp.int8), kernel)
        return product.astype(jnp.float32) * scale

    def function(w, tokens):
        x = w["embed"][tokens]
        for _ in range(2):
            x = x + dense(jax.nn.relu(dense(x, w["up"])), w["down"])
        return x @ w["embed"].T

    weights = {"embed": struct(V, E), "up": struct(E, N, dtype=jnp.int8)}
    weights["down"] = struct(N, E, dtype=jnp.int8)
    found = pzs.infer_names(function, weights, TOKENS)
    assert found["up"] == ("embedding", "neurons")


def test_rows_and_columns_that_weights_have_together_are_positions():
    def function(w, pictures):
        numbers = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(
            pictures, w["patches"], (4, 4), "VALID", dimension_numbers=numbers
        )
        x = x.reshape(BATCH, 16, E) + w["places"]
        return block(w, block(w, x)).mean(1) @ w["head"]

    shapes = {"patches": (4, 4, 3, E), "places": (1, 16, E), "head": (E, 10), **BLOCK}
    axes = [("batch", "height", "width", "colours")]
    found = named(function, shapes, struct(BATCH, 16, 16, 3), axes=axes)
    assert found["places"] == (None, "positions", "embedding")


def test_scalars_that_weigh_what_is_added_are_no_layers():
    def function(w, tokens):
        x = first = w["embed"][tokens]
        for i in range(2):
            x = w["mix"][i][0] * x + w["mix"][i][1] * first
            x = x + w["scale"][i][0] * (block(w, x) - w["scale"][i][1] * x)
        return x @ w["embed"].T

    shapes = {"embed": (V, E), **BLOCK}
    weights = {path: struct(*shape) for path, shape in shapes.items()}
    weights |= {"mix": [struct(2), struct(2)], "scale": [struct(2), struct(2)]}
    found = pzs.infer_names(function, weights, TOKENS)
    assert found["mix/0"] == found["scale/1"] == (None,)


def test_heads_of_a_stream_without_name_are_not_those_of_the_embedding():
    def function(w, tokens):
        whole = w["bytes"][tokens].reshape(BATCH, SEQ // 2, E)
        for i in range(2):
            whole = block(of(w, f"global.{i}"), whole)
        x = w["embed"][tokens] + whole.reshape(BATCH, SEQ, E // 2) @ w["into"]
        for i in range(2):
            x = block(of(w, f"local.{i}"), x)
        return x @ w["head"]

    shapes = {"bytes": (V, E // 2), "embed": (V, E), "into": (E // 2, E), "head": (E, V)}
    for i in range(2):
        shapes |= at(f"global.{i}") | at(f"local.{i}")
    found = named(function, shapes, TOKENS)
    assert found["local.0.q"] == ("embedding", INNER)
    assert found["global.0.q"] == (None, None)
    assert "of a residual stream that is not decided" in found.reasons("global.0.q")[1]


def test_heads_of_a_pooling_that_is_asked_by_what_is_learned_are_of_no_stream():
    def function(w, tokens, patches):
        text, picture = w["text.embed"][tokens], patches @ w["image.patches"]
        for i in range(2):
            text = block(of(w, f"text.{i}"), text)
            picture = block(of(w, f"image.{i}"), picture)
        q, k, v = (
            split_heads(y @ w[f"image.pool.{name}"])
            for name, y in (("q", w["image.asked"]), ("k", picture), ("v", picture))
        )
        return text.mean(1), attend(q, k, v) @ w["image.pool.o"]

    shapes = {"text.embed": (V, E), "image.patches": (E, E), "image.asked": (1, 4, E)}
    shapes |= at("image.pool", dict.fromkeys("qkvo", (E, E)))
    for i in range(2):
        shapes |= at(f"text.{i}") | at(f"image.{i}")
    inputs = TOKENS, struct(BATCH, SEQ, E)
    axes = [("batch", "seq"), ("batch", "patches", None)]
    found = named(function, shapes, *inputs, axes=axes)
    assert found["image.0.q"] == ("image_embedding", "image_heads*image_projection")
    assert found["image.pool.k"] == ("image_embedding", INNER)


def test_what_is_made_of_the_embedding_without_positions_for_results_is_pooled():
    def function(w, tokens, types):
        x = block(w, block(w, w["embed"][tokens] + w["token_type"][types]))
        return jnp.tanh(x[:, 0] @ w["pooler"]) @ w["classifier"]

    shapes = {"embed": (V, E), "token_type": (2, E), "pooler": (E, E), "classifier": (E, 2)}
    found = named(function, shapes | BLOCK, TOKENS, TOKENS, axes=BATCH_SEQ * 2)
    assert found["pooler"] == ("embedding", "pooled")
    assert found["classifier"] == ("pooled", "outputs")
    assert found["token_type"] == ("token_types", "embedding")


def test_two_layers_before_results_are_not_both_pooled():
    def function(w, tokens):
        x = block(w, block(w, w["embed"][tokens]))[:, 0]
        return jnp.tanh(x @ w["a"]) @ w["classes"], jnp.tanh(x @ w["b"]) @ w["value"]

    shapes = {"embed": (V, E), "a": (E, E), "b": (E, E), "classes": (E, 3), "value": (E, 5)}
    found = named(function, shapes | BLOCK, TOKENS)
    assert found["a"] == found["b"] == ("embedding", None)
