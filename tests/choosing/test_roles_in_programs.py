"""What axes are called by what a program does with them, where something else looks the same."""

import jax
import jax.numpy as jnp
import pytest

import penzai_shard as pzs
from tests.choosing.named_models import BATCH, EMBEDDING, HEADS, PROJECTION, SEQ, TOKENS, struct

LENGTHS = {"e": EMBEDDING, "h": HEADS, "d": PROJECTION, "n": 32, "v": 32, "q": 3}
BLOCK = {"q": "ehd", "k": "ehd", "v": "ehd", "o": "hde", "up": "en", "down": "ne"}


def structs(**axes):
    """A struct of each weight, its lengths by letters or as they are."""
    return {
        name: struct(*(each if isinstance(each, int) else LENGTHS[each] for each in letters))
        for name, letters in axes.items()
    }


def heads_of(w, x, names="qkv"):
    return [jnp.einsum("bse,ehd->bshd", x, w[name]) for name in names]


def mixed(w, scores, v):
    return jnp.einsum("bhst,bthd,hde->bse", jax.nn.softmax(scores), v, w["o"])


def block(w, x, bias=0.0):
    q, k, v = heads_of(w, x)
    x = x + mixed(w, jnp.einsum("bshd,bthd->bhst", q, k) + bias, v)
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"]


def test_scores_that_are_added_over_one_axis_count_it_once():
    def function(w, tokens):
        x = w["embed"][tokens]
        q, k, v = heads_of(w, x)
        places = jnp.einsum("pe,ehd->phd", w["places"], w["k"])
        scores = jnp.einsum("bshd,bthd->bhst", q, k) + jnp.einsum("bshd,thd->bhst", q, places)
        return (x + mixed(w, scores, v)) @ w["embed"].T

    weights = structs(embed="ve", places=(SEQ, "e"), **{name: BLOCK[name] for name in "qkvo"})
    found = pzs.infer_names(function, weights, TOKENS)
    assert found["v"] == found["q"] == ("embedding", "heads", "projection")


def test_what_a_loop_only_adds_makes_no_layers():
    def function(w, tokens):
        def step(x, added):
            return block(w, x + added), None

        return jax.lax.scan(step, w["embed"][tokens], w["times"])[0] @ w["embed"].T

    found = pzs.infer_names(function, structs(embed="ve", times=(6, "e"), **BLOCK), TOKENS)
    assert found["times"] == (None, "embedding")
    assert (
        "a loop takes its elements one by one, and multiplies with none"
        in found.reasons("times")[0]
    )


def test_a_table_whose_rows_are_added_to_other_inputs_is_no_vocabulary():
    def function(w, times, states):
        x = states @ w["states"] + w["times"][times]
        return block(w, x) @ w["actions"]

    weights = structs(states=(5, "e"), times="ve", actions=("e", 5), **BLOCK)
    found = pzs.infer_names(
        function,
        weights,
        TOKENS,
        struct(BATCH, SEQ, 5),
        input_names=[("batch", "seq"), ("batch", "seq", "features")],
    )
    assert found["times"] == (None, "embedding")
    assert "added to what products make of others" in found.reasons("times")[0]


def test_an_input_keeps_its_name_where_a_norm_groups_its_channels():
    def function(w, x):
        groups = x.reshape(BATCH, SEQ, 4, 4)
        x = ((groups - groups.mean((1, 3), keepdims=True)) ** 2).reshape(x.shape) * w["scale"]
        return block(w, x @ w["into"])

    weights = structs(scale="e", into="ee", **BLOCK)
    axes = [("batch", "seq", "channels")]
    found = pzs.infer_names(function, weights, struct(BATCH, SEQ, EMBEDDING), input_names=axes)
    assert found["scale"] == ("channels",)
    assert found["into"] == ("channels", "embedding")


def test_scales_and_shifts_of_another_number_have_another_name():
    def function(w, x, c):
        for name in ("first", "second"):
            scale, shift, gate = jnp.split((c @ w[name])[:, None], 3, -1)
            x = x + gate * (jax.nn.gelu((x * scale + shift) @ w["up"]) @ w["down"])
        scale, shift = jnp.split((c @ w["last"])[:, None], 2, -1)
        return x * scale + shift

    weights = structs(first=(8, 48), second=(8, 48), last=(8, 32), up="en", down="ne")
    found = pzs.infer_names(
        function,
        weights,
        struct(BATCH, SEQ, EMBEDDING),
        struct(BATCH, 8),
        input_names=[("batch", "seq", None), ("batch", None)],
    )
    assert found["first"] == found["second"] == ("conditioning", "modulations*embedding")
    assert found["last"] == ("conditioning", None)


@pytest.mark.parametrize(("blocks", "name"), [(3, "embedding"), (1, None)])
def test_beside_a_stream_of_pooling_that_of_many_blocks_is_the_embedding(blocks, name):
    def function(w, x):
        for number in range(blocks):
            x = block(w[f"block{number}"], x)
        x = x.mean(1) @ w["pool"]
        for number in range(2):
            x = x + jax.nn.gelu(x @ w[f"up{number}"]) @ w[f"down{number}"]
        return x

    own = {f"block{number}": structs(**BLOCK) for number in range(blocks)}
    behind = structs(pool="ee", up0="en", down0="ne", up1="en", down1="ne")
    inputs = struct(BATCH, SEQ, EMBEDDING)
    found = pzs.infer_names(function, own | behind, inputs, input_names=[("batch", "seq", None)])
    assert found["block0/q"] == (name, "heads", "projection")
    assert found["pool"] == (name, None)


@pytest.mark.parametrize(("is_shared", "name"), [(True, "buckets"), (False, None)])
@pytest.mark.parametrize("has_rows_with_a_one", [True, False])
def test_buckets_are_rows_that_several_distances_share(is_shared, name, has_rows_with_a_one):
    def function(w, tokens):
        distance = jnp.arange(SEQ)[:, None] - jnp.arange(SEQ)
        rows = jnp.maximum(distance, -3) + 3 if is_shared else distance + SEQ - 1
        table = w["relative_bias"]
        bias = jax.nn.one_hot(rows, len(table)) @ table if has_rows_with_a_one else table[rows]
        return block(w, w["embed"][tokens], bias.transpose(2, 0, 1)) @ w["embed"].T

    weights = structs(embed="ve", relative_bias=(2 * SEQ - 1, "h"), **BLOCK)
    found = pzs.infer_names(function, weights, TOKENS)
    assert found["relative_bias"] == (name, "heads")
    assert found["embed"] == ("vocabulary", "embedding")


def test_a_table_beside_those_of_types_and_positions_is_the_vocabulary():
    def function(w, tokens, types, places):
        x = w["embed"][tokens] + w["token_type"][types] + w["position"][places]
        return block(w, x).mean(1)

    weights = structs(embed="ve", token_type=(2, "e"), position=("v", "e"), **BLOCK)
    axes = [("batch", "seq")] * 3
    found = pzs.infer_names(function, weights, TOKENS, TOKENS, TOKENS, input_names=axes)
    assert found["embed"] == ("vocabulary", "embedding")
    assert found["position"] == ("positions", "embedding")
    assert found["token_type"] == ("token_types", "embedding")


def test_what_is_unbound_into_queries_keys_and_values_is_qkv():
    def function(w, tokens):
        x = w["embed"][tokens]
        fused = jnp.einsum("bse,qhde->bsqhd", x, w["fused"])
        q, k, v = (jnp.take(fused, number, axis=2) for number in range(3))
        return (x + mixed(w, jnp.einsum("bshd,bthd->bhst", q, k), v)) @ w["embed"].T

    found = pzs.infer_names(function, structs(embed="ve", fused="qhde", o="hde"), TOKENS)
    assert found["fused"] == ("qkv", "heads", "projection", "embedding")


def test_what_models_are_mapped_over_is_neither_embedding_nor_heads():
    def function(w, tokens):
        made = jax.vmap(lambda w: block(w, w["embed"][tokens]) @ w["embed"].T)(w)
        return made.mean(0)

    members = {name: (HEADS, *axes) for name, axes in {"embed": "ve", **BLOCK}.items()}
    found = pzs.infer_names(function, structs(**members), TOKENS)
    assert found["embed"] == (None, "vocabulary", "embedding")
    assert found["q"] == (None, "embedding", "heads", "projection")
    assert found["up"] == (None, "embedding", "neurons")


def test_a_bias_of_scores_that_an_input_looks_up_is_no_residual_stream():
    def function(w, tokens, distances):
        bias = w["distances"][distances].transpose(0, 3, 1, 2)
        x = w["embed"][tokens]
        for _ in range(2):
            x = block(w, x, bias)
        return x @ w["embed"].T

    weights = structs(embed="ve", distances=(6, "h"), **BLOCK)
    pairs = jax.ShapeDtypeStruct((BATCH, SEQ, SEQ), jnp.int32)
    axes = [("batch", "seq"), ("batch", "seq", "other_seq")]
    found = pzs.infer_names(function, weights, TOKENS, pairs, input_names=axes)
    assert found["distances"] == (None, "heads")
    assert found["embed"] == ("vocabulary", "embedding")


def test_positions_that_cross_in_one_value_are_not_called_the_same():
    def function(w, films):
        x = films + w["places"] + w["frames"][:, None]
        for _ in range(2):
            x = block(w, x.reshape(-1, SEQ, EMBEDDING)).reshape(x.shape).swapaxes(1, 2)
        return x

    weights = structs(places=(SEQ, "e"), frames=(SEQ, "e"), **BLOCK)
    films = struct(BATCH, SEQ, SEQ, EMBEDDING)
    found = pzs.infer_names(function, weights, films, input_names=[("batch", None, None, None)])
    assert found["places"] == found["frames"] == (None, "embedding")
    assert "one of several positions that some values have at once" in found.reasons("places")[0]


def test_experts_may_stand_in_a_row_with_their_neurons():
    def function(w, tokens):
        x = w["embed"][tokens]
        best, chosen = jax.lax.top_k(jax.nn.softmax(x @ w["router"]), 2)
        shares = jax.nn.one_hot(chosen, 4) * best[..., None]
        up, down = (w[f"experts_{name}"].reshape(4, 32, EMBEDDING) for name in ("up", "down"))
        for number in range(4):
            made = jax.nn.gelu(x @ up[number].T) @ down[number]
            x = x + made * shares[..., number].sum(-1)[..., None]
        return x @ w["embed"].T

    weights = structs(embed="ve", router=("e", 4), experts_up=(128, "e"), experts_down=(128, "e"))
    found = pzs.infer_names(function, weights, TOKENS)
    assert found["router"] == ("embedding", "experts")
    assert found["experts_up"] == found["experts_down"] == ("experts*neurons", "embedding")


def test_tokens_that_a_loop_makes_are_looked_up_in_the_vocabulary():
    def function(w, tokens):
        def step(token, _):
            x = w["embed"][token]
            x = x + jax.nn.gelu(x @ w["up"]) @ w["down"]
            token = jnp.argmax(x @ w["head"], -1)
            return token, token

        return jax.lax.scan(step, tokens[:, 0], length=SEQ)[1]

    weights = structs(embed="ve", up="en", down="ne", head="ev")
    found = pzs.infer_names(function, weights, TOKENS)
    assert found["embed"] == ("vocabulary", "embedding")
    assert found["head"] == ("embedding", "vocabulary")


def test_what_is_compared_side_by_side_is_no_rank():
    def function(w, tokens):
        x = w["embed"][tokens]
        halves = (x @ w["query"]).reshape(BATCH, SEQ, 2, 8)
        scores, places = jax.lax.top_k(jnp.einsum("bsad,akd->bsak", halves, w["keys"]), 2)
        rows = w["values"][places[:, :, 0] * 6 + places[:, :, 1]]
        x = x + jnp.einsum("bsk,bske->bse", scores.sum(2), rows)
        return block(w, x) @ w["embed"].T

    weights = structs(embed="ve", query=("e", 16), keys=(2, 6, 8), values=(36, "e"), **BLOCK)
    found = pzs.infer_names(function, weights, TOKENS)
    assert found["keys"] == (None, None, None)
    assert found["values"] == (None, "embedding")


def test_groups_of_a_norm_leave_the_embedding_what_it_is():
    def function(w, tokens):
        x = w["embed"][tokens]
        for _ in range(2):
            groups = x.reshape(BATCH, SEQ, 4, 4)
            h = (groups / jnp.abs(groups).max(-1, keepdims=True)).reshape(x.shape) * w["scale"]
            x = x + jax.nn.gelu(h @ w["up"]) @ w["down"]
        return x @ w["embed"].T

    found = pzs.infer_names(function, structs(embed="ve", scale="e", up="en", down="ne"), TOKENS)
    assert found["scale"] == ("embedding",)
    assert found["up"] == ("embedding", "neurons")
    assert found["embed"] == ("vocabulary", "embedding")


def test_scales_of_groups_are_not_called_as_what_they_scale():
    def function(w, tokens):
        def dense(name, x):
            scales, weight = w[f"{name}_scales"], w[name]
            grouped = weight.reshape(len(scales), -1, weight.shape[1]) * scales[:, None]
            return x @ grouped.reshape(weight.shape)

        x = w["embed"][tokens]
        q, k, v = (dense(name, x).reshape(BATCH, SEQ, HEADS, PROJECTION) for name in "qkv")
        x = x + mixed(w, jnp.einsum("bshd,bthd->bhst", q, k), v)
        return (x + dense("down", jax.nn.gelu(dense("up", x)))) @ w["embed"].T

    weights = structs(embed="ve", o="hde", up="en", down="ne", up_scales=(2, "n"))
    weights |= structs(down_scales=(4, "e"))
    for name in "qkv":
        weights |= structs(**{name: "ee", f"{name}_scales": (2, "e")})
    found = pzs.infer_names(function, weights, TOKENS)
    assert found["q"] == ("embedding", "heads*projection")
    assert found["q_scales"] == (None, "heads*projection")
    assert (found["up"], found["up_scales"]) == (("embedding", "neurons"), (None, "neurons"))
    assert found["down_scales"] == (None, "embedding")
    assert found.reasons("down_scales")[0] == "it is groups of what is called 'neurons'"


def test_channels_of_a_depthwise_convolution_are_no_experts():
    def function(w, tokens):
        x = w["embed"][tokens]
        for _ in range(2):
            h = jax.lax.conv_general_dilated(
                x @ w["up"],
                w["taps"],
                (1,),
                "SAME",
                dimension_numbers=("NWC", "WIO", "NWC"),
                feature_group_count=32,
            )
            x = x + jax.nn.gelu(h) @ w["down"]
        return x @ w["embed"].T

    weights = structs(embed="ve", up="en", taps=(3, 1, "n"), down="ne")
    found = pzs.infer_names(function, weights, TOKENS)
    assert found["up"] == ("embedding", "neurons")
    assert found["taps"] == (None, None, "neurons")


@pytest.mark.parametrize("is_drawn", [True, False])
def test_a_code_that_gets_noise_is_no_neurons(is_drawn):
    def function(w, tokens, noise):
        if is_drawn:
            noise = jax.random.normal(jax.random.key(noise), (BATCH, EMBEDDING))
        x = block(w, w["embed"][tokens]).mean(1)
        code = x @ w["mean"] + jnp.exp(x @ w["spread"]) * noise
        return block(w, (code @ w["decode"])[:, None] + w["start"]) @ w["embed"].T

    weights = structs(embed="ve", mean="ee", spread="ee", decode="ee", start=(SEQ, "e"), **BLOCK)
    noise = jax.ShapeDtypeStruct((), "uint32") if is_drawn else struct(BATCH, EMBEDDING)
    axes = [("batch", "seq"), () if is_drawn else ("batch", None)]
    found = pzs.infer_names(function, weights, TOKENS, noise, input_names=axes)
    assert found["up"] == ("embedding", "neurons")
    assert found["mean"] == found["spread"] == ("embedding", None)
    assert found["decode"] == (None, "embedding")


def test_what_a_loop_adds_up_is_no_layers_though_layers_are_around_it():
    def function(w, tokens):
        def layer(x, own):
            q, k, v = heads_of(own, x)
            x = x + mixed(own, jnp.einsum("bshd,bthd->bhst", q, k), v)

            def chunk(total, part):
                return total + jax.nn.gelu(x @ part[0]) @ part[1], None

            return jax.lax.scan(chunk, x, (own["up"], own["down"]))[0], None

        stacked = {name: w[name] for name in BLOCK}
        return jax.lax.scan(layer, w["embed"][tokens], stacked)[0] @ w["embed"].T

    parts = {"up": (3, 6, "e", 8), "down": (3, 6, 8, "e")}
    stacked = {name: (3, *axes) for name, axes in BLOCK.items()} | parts
    found = pzs.infer_names(function, structs(embed="ve", **stacked), TOKENS)
    assert found["q"] == ("layers", "embedding", "heads", "projection")
    assert found["up"] == ("layers", None, "embedding", "neurons")
    assert found["down"] == ("layers", None, "neurons", "embedding")
    reason = "a loop takes its elements one by one, and multiplies with none of them what it made"
    assert reason in found.reasons("up")[1]


def test_experts_may_be_done_in_a_loop():
    def function(w, tokens):
        x = block(w, w["embed"][tokens])
        shares = jax.nn.softmax(x @ w["router"])
        chosen = jnp.argmax(shares, -1)

        def expert(number, total):
            made = jax.nn.gelu(x @ w["first"][number]) @ w["second"][number]
            share = jax.lax.dynamic_index_in_dim(shares, number, 2)
            return total + jnp.where((chosen == number)[..., None], made * share, 0)

        return jax.lax.fori_loop(0, 4, expert, x) @ w["embed"].T

    weights = structs(embed="ve", router=("e", 4), **BLOCK)
    weights |= structs(first=(4, "e", "n"), second=(4, "n", "e"))
    found = pzs.infer_names(function, weights, TOKENS)
    assert found["router"] == ("embedding", "experts")
    assert found["first"] == ("experts", "embedding", "neurons")
    assert found["second"] == ("experts", "neurons", "embedding")


@pytest.mark.parametrize("is_given", [True, False])
def test_rows_of_a_table_that_queries_are_multiplied_with_are_no_keys(is_given):
    def function(w, tokens, distances):
        x = w["embed"][tokens]
        if not is_given:
            distances = jnp.clip(jnp.arange(SEQ)[:, None] - jnp.arange(SEQ), -2, 2) + 2
        q, k, v = heads_of(w, x)
        scores = jnp.einsum("bshd,bthd->bhst", q, k)
        scores += jnp.einsum("bshd,std->bhst", q, w["distances"][distances])
        return (x + mixed(w, scores, v)) @ w["embed"].T

    weights = structs(embed="ve", distances=(5, "d"), **{name: BLOCK[name] for name in "qkvo"})
    given = jax.ShapeDtypeStruct((SEQ, SEQ), jnp.int32)
    axes = [("batch", "seq"), ("seq", "other_seq")]
    found = pzs.infer_names(function, weights, TOKENS, given, input_names=axes)
    assert found["q"] == found["v"] == ("embedding", "heads", "projection")
    assert found["distances"] == (None, "projection")


def test_scales_of_stacked_queries_and_keys_do_not_say_that_keys_lack_heads():
    def function(w, tokens):
        def layer(x, own):
            q, k, v = heads_of(own, x)
            q, k = (y / jnp.abs(y).max(-1, keepdims=True) * own["scale"] for y in (q, k))
            return x + mixed(own, jnp.einsum("bshd,bthd->bhst", q, k), v), None

        stacked = {name: w[name] for name in w if name != "embed"}
        return jax.lax.scan(layer, w["embed"][tokens], stacked)[0] @ w["embed"].T

    stacked = {name: (3, *BLOCK[name]) for name in "qkvo"} | {"scale": (3, "d")}
    found = pzs.infer_names(function, structs(embed="ve", **stacked), TOKENS)
    assert found["q"] == found["k"] == ("layers", "embedding", "heads", "projection")
    assert found["scale"] == ("layers", "projection")


def test_layers_of_which_a_loop_takes_two_in_each_round_are_layers():
    def function(w, tokens):
        stacked = {name: w[name] for name in BLOCK}
        x = w["embed"][tokens]
        x, _ = jax.lax.scan(lambda x, own: (block(own, x), None), x, stacked, unroll=2)
        return x @ w["embed"].T

    stacked = {name: (4, *axes) for name, axes in BLOCK.items()}
    found = pzs.infer_names(function, structs(embed="ve", **stacked), TOKENS)
    assert found["q"] == ("layers", "embedding", "heads", "projection")
    assert found["up"] == ("layers", "embedding", "neurons")


def test_what_stands_in_a_row_with_layers_is_none_if_one_does_not_use_the_other():
    def function(w, tokens):
        def layer(x, own):
            q, k = (jnp.einsum("bse,ehd->bshd", x, own["qk"][number]) for number in range(2))
            gate, up = (x @ own["gate_up"][number] for number in range(2))
            x = x + mixed(own, jnp.einsum("bshd,bthd->bhst", q, k), heads_of(own, x, "v")[0])
            return x + (jax.nn.silu(gate) * up) @ own["down"], None

        stacked = {name: w[name] for name in w if name != "embed"}
        stacked |= {name: w[name].reshape(3, 2, *w[name].shape[1:]) for name in ("qk", "gate_up")}
        return jax.lax.scan(layer, w["embed"][tokens], stacked)[0] @ w["embed"].T

    stacked = {name: (3, *BLOCK[name]) for name in ("v", "o", "down")}
    rows = {"qk": (6, "e", "h", "d"), "gate_up": (6, "e", "n")}
    found = pzs.infer_names(function, structs(embed="ve", **stacked, **rows), TOKENS)
    assert found["v"] == ("layers", "embedding", "heads", "projection")
    assert found["qk"] == ("layers*qk", "embedding", "heads", "projection")
    assert found["gate_up"] == ("layers*gate_up", "embedding", "neurons")
