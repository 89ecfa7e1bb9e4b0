"""What has no name, for something else would look the same: layers beside queries, say."""

import jax
import jax.numpy as jnp
import pytest

import penzai_shard as pzs
from tests.choosing.named_models import BATCH, EMBEDDING, SEQ, TOKENS, struct

E, N, V = EMBEDDING, 24, 32
MLP = {"embed": (V, E), "up": (E, N), "down": (N, E)}
MLP_NAMES = {
    "embed": ("vocabulary", "embedding"),
    "up": ("embedding", "neurons"),
    "down": ("neurons", "embedding"),
}
INDEX = struct(BATCH, dtype=jnp.int32)


def named(function, shapes, *inputs, axes=(("batch", "seq"),)):
    weights = {path: struct(*shape) for path, shape in shapes.items()}
    return pzs.infer_names(function, weights, *inputs, input_names=list(axes))


def mlp(w, x, up=None, down=None):
    up, down = (w["up"] if up is None else up), (w["down"] if down is None else down)
    return x + jax.nn.gelu(x @ up) @ down


@pytest.mark.parametrize("is_read_by_queries", [False, True])
def test_queries_that_a_decoder_takes_one_by_one_are_no_layers(is_read_by_queries):
    def function(w, tokens):
        x = mlp(w, w["embed"][tokens])

        def step(state, query):
            asked = jnp.einsum("e,bse->bs", query, x)[:, :1] if is_read_by_queries else 1.0
            state = jnp.tanh(state @ w["state"] + query @ w["query"] * asked)
            return state, state @ w["embed"].T

        return jax.lax.scan(step, x.mean(1), w["queries"])[1]

    found = named(function, MLP | {"queries": (6, E), "state": (E, E), "query": (E, E)}, TOKENS)
    assert found["queries"][0] is None
    assert found["up"] == MLP_NAMES["up"]


def test_codes_of_which_a_loop_makes_the_weights_of_each_block_are_those_of_layers():
    def function(w, tokens):
        def step(x, code):
            up = jnp.einsum("c,cen->en", code, w["made_up"])
            return mlp(w, x, up, (code @ w["made_down"]).reshape(N, E)), None

        return jax.lax.scan(step, w["embed"][tokens], w["codes"])[0] @ w["embed"].T

    shapes = {"embed": (V, E), "codes": (6, 4), "made_up": (4, E, N), "made_down": (4, N * E)}
    found = named(function, shapes, TOKENS)
    assert found["codes"] == ("layers", None)
    assert found["made_up"] == (None, "embedding", "neurons")


def test_a_factor_of_the_stream_in_a_tensor_train_is_not_the_embedding():
    def function(w, tokens):
        x = w["embed"][tokens]
        for i in range(2):
            y = x.reshape(BATCH, SEQ, 4, 4)
            y = jnp.einsum("bsij,iar->bsjar", y, w[f"{i}.first"])
            y = jnp.einsum("bsjar,rjc->bsac", y, w[f"{i}.second"])
            x = x + jax.nn.gelu(y).reshape(BATCH, SEQ, E)
        return x @ w["embed"].T

    cores = {f"{i}.first": (4, 4, 3) for i in range(2)}
    cores |= {f"{i}.second": (3, 4, 4) for i in range(2)}
    found = named(function, {"embed": (V, E)} | cores, TOKENS)
    assert all(found[path] == (None, None, None) for path in cores)


def test_what_kronecker_products_are_summed_over_is_no_rank():
    def function(w, tokens):
        summed = jnp.einsum("tij,tkl->ikjl", w["left"], w["right"]).reshape(N, E)
        x = w["embed"][tokens]
        return mlp(w, mlp(w, x), w["up"], w["down"] + summed) @ w["embed"].T

    found = named(function, MLP | {"left": (3, 4, 4), "right": (3, 6, 4)}, TOKENS)
    assert (found["left"][0], found["right"][0]) == (None, None)


def test_capsules_that_share_out_what_they_give_do_not_attend():
    def function(w, x):
        low = (x @ w["low"]).reshape(BATCH, 8, 4)
        votes = jnp.einsum("bie,ijed->bijd", low, w["routes"])
        agreed = jnp.zeros((BATCH, 8, 4))
        for _ in range(2):
            shares = jax.nn.softmax(agreed, 2)
            high = jnp.tanh(jnp.einsum("bij,bijd->bjd", shares, votes))
            agreed = agreed + jnp.einsum("bijd,bjd->bij", votes, high)
        return (high * agreed.sum(1)[..., None]).reshape(BATCH, 16) @ w["out"]

    shapes = {"low": (E, 32), "routes": (8, 4, 4, 4), "out": (16, E)}
    found = named(function, shapes, struct(BATCH, E), axes=[("batch", None)])
    assert found["routes"] == (None,) * 4


def test_rows_of_tables_that_are_compared_have_no_projection():
    def function(w, story, question):
        asked = w["asked"][question].sum(1)
        for _ in range(2):
            keys, values = w["keys"][story] + w["times"], w["values"][story]
            shares = jax.nn.softmax(jnp.einsum("bme,be->bm", keys, asked))
            asked = asked @ w["hop"] + jnp.einsum("bm,bme->be", shares, values)
        return asked @ w["answer"]

    shapes = dict.fromkeys(("asked", "keys", "values"), (V, E))
    shapes |= {"times": (SEQ, E), "hop": (E, E), "answer": (E, V)}
    found = named(function, shapes, TOKENS, TOKENS, axes=[("batch", "memories")] * 2)
    assert all(found[path][-1] is None for path in shapes if path != "answer")


def test_adapters_that_a_number_chooses_do_not_attend():
    def function(w, tokens, chosen):
        def adapted(name, x):
            down, up = w[f"{name}.a"][chosen], w[f"{name}.b"][chosen]
            return x @ w[name] + jnp.einsum("bsi,bir,bro->bso", x, down, up)

        x = w["embed"][tokens]
        for _ in range(2):
            x = x + adapted("down", jax.nn.silu(adapted("up", x)))
        return x @ w["embed"].T

    adapters = {"up.a": (4, E, 2), "up.b": (4, 2, N), "down.a": (4, N, 2), "down.b": (4, 2, E)}
    found = named(function, MLP | adapters, TOKENS, INDEX, axes=[("batch", "seq"), ("batch",)])
    assert found["up.a"] == (None, "embedding", None)
    assert found["down.b"] == (None, None, "embedding")
    assert found["embed"] == MLP_NAMES["embed"]


def test_members_as_many_as_the_bins_of_which_the_best_are_taken_are_no_experts():
    def function(w, tokens):
        x = mlp(w, mlp(w, w["embed"][tokens]))
        values = jnp.einsum("bf,mfn->bmn", jnp.sin(x.mean(1).sum(-1, keepdims=True)), w["first"])
        values = jnp.einsum("bmn,mno->bmo", jnp.tanh(values), w["second"])
        return x @ w["embed"].T, values, jax.lax.top_k(x @ w["bins"], 2)[0]

    found = named(function, MLP | {"first": (4, 1, 5), "second": (4, 5, 6), "bins": (E, 4)}, TOKENS)
    assert (found["first"][0], found["second"][0], found["bins"][1]) == (None, None, None)


@pytest.mark.parametrize("is_state", [True, False])
def test_a_state_that_a_product_makes_of_itself_is_no_neurons(is_state):
    def function(w, tokens):
        x = w["embed"][tokens]
        for _ in range(2):

            def step(state, each):
                state = (state @ w["state"] if is_state else 0.0) + each @ w["into"]
                return state, jnp.tanh(state) @ w["out"]

            made = jax.lax.scan(step, jnp.zeros((BATCH, N)), x.swapaxes(0, 1))[1]
            x = mlp(w, x + made.swapaxes(0, 1))
        return x @ w["embed"].T

    found = named(function, MLP | {"state": (N, N), "into": (E, N), "out": (N, E)}, TOKENS)
    assert found["into"] == ("embedding", None if is_state else "neurons")
    assert found["up"] == MLP_NAMES["up"]


def test_labels_are_no_vocabulary_where_results_happen_to_be_as_long():
    def function(w, x, labels, time):
        hint = jax.nn.silu(time[:, None] @ w["time"] + w["labels"][labels])
        x = x @ w["stem"]
        for _ in range(2):
            x = mlp(w, x + (hint @ w["hint"])[:, None])
        return x @ w["out"]

    shapes = {"time": (1, 8), "labels": (V, 8), "hint": (8, E), "stem": (6, E), "out": (E, V)}
    shapes |= {"up": (E, N), "down": (N, E)}
    inputs = (struct(BATCH, SEQ, 6), INDEX, struct(BATCH))
    axes = [("batch", "seq", None), ("batch",), ("batch",)]
    found = named(function, shapes, *inputs, axes=axes)
    assert found["labels"][0] is None
    assert found["out"] == ("embedding", None)


def test_actions_joined_to_what_is_made_of_observations_are_no_vocabulary():
    def function(w, seen, before):
        x = jnp.concatenate([jax.nn.relu(seen @ w["seen"]), w["actions"][before]], -1)
        return jax.nn.relu(x @ w["hidden"]) @ w["values"]

    shapes = {"seen": (6, 8), "actions": (5, 8), "hidden": (16, N), "values": (N, 3)}
    axes = [("batch", None), ("batch",)]
    found = named(function, shapes, struct(BATCH, 6), INDEX, axes=axes)
    assert found["actions"] == (None, None)
    assert "joined or added to what products make of others" in found.reasons("actions")[0]


def test_heads_of_tasks_that_a_number_picks_are_no_vocabulary():
    def function(w, tokens, task):
        x = mlp(w, mlp(w, w["embed"][tokens])).mean(1)
        return jnp.einsum("be,beo->bo", x, w["tasks"][task])

    found = named(
        function, MLP | {"tasks": (4, E, 4)}, TOKENS, INDEX, axes=[("batch", "seq"), ("batch",)]
    )
    assert found["tasks"][:2] == (None, "embedding")
    assert found["embed"] == MLP_NAMES["embed"]
