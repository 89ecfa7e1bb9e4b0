"""Logical axes get names by what a program does with them; what it does not decide has none."""

import ast
import functools
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import linen
from penzai import pz
from penzai.models import simple_mlp

import penzai_shard as pzs

BATCH, SEQ, EMBEDDING, HEADS, PROJECTION, NEURONS, VOCABULARY = 2, 5, 12, 3, 4, 12, 20
TOKENS = jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32)


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def block():
    return {
        "norm": struct(EMBEDDING),
        "attention": {
            "query": struct(EMBEDDING, HEADS * PROJECTION),
            "key": struct(EMBEDDING, HEADS * PROJECTION),
            "value": struct(EMBEDDING, HEADS * PROJECTION),
            "output": struct(HEADS * PROJECTION, EMBEDDING),
        },
        "mlp": {
            "up": struct(EMBEDDING, NEURONS),
            "bias": struct(NEURONS),
            "down": struct(NEURONS, EMBEDDING),
        },
    }


WEIGHTS = {
    "embed": struct(VOCABULARY, EMBEDDING),
    "blocks": [block(), block()],
    "lm_head": struct(EMBEDDING, VOCABULARY),
    "unused": struct(EMBEDDING),
    "temperature": struct(1),
}


def apply_block(block, x):
    h = x * block["norm"]
    q, k, v = (
        (h @ block["attention"][name]).reshape(*x.shape[:2], HEADS, PROJECTION)
        for name in ("query", "key", "value")
    )
    shares = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), -1)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", shares, v).reshape(*x.shape[:2], -1)
    x = x + mixed @ block["attention"]["output"]
    mlp = block["mlp"]
    return x + jax.nn.gelu(x @ mlp["up"] + mlp["bias"]) @ mlp["down"]


def logits(weights, tokens):
    x = weights["embed"][tokens]
    for each in weights["blocks"]:
        x = apply_block(each, x)
    return x @ weights["lm_head"] * weights["temperature"]


@pytest.fixture(scope="module")
def inferred():
    return pzs.infer_names(logits, WEIGHTS, TOKENS)


def test_every_axis_of_a_transformer_is_named(inferred):
    assert inferred["embed"] == ("vocabulary", "embedding")
    assert inferred["lm_head"] == ("embedding", "vocabulary")
    for number in range(2):
        for name in ("query", "key", "value"):
            assert inferred[f"blocks/{number}/attention/{name}"] == (
                "embedding",
                "heads*projection",
            )
        assert inferred[f"blocks/{number}/attention/output"] == ("heads*projection", "embedding")
        assert inferred[f"blocks/{number}/norm"] == ("embedding",)
        assert inferred[f"blocks/{number}/mlp/up"] == ("embedding", "neurons")
        assert inferred[f"blocks/{number}/mlp/bias"] == ("neurons",)
    fused = inferred["blocks/0/attention/query"][1]
    assert fused.sizes == (HEADS, PROJECTION)


def test_what_is_not_used_and_what_has_length_one_is_not_named(inferred):
    assert inferred["unused"] == inferred["temperature"] == (None,)
    assert inferred.reasons("unused") == ("the program does not use this array",)
    assert inferred.reasons("temperature") == ("it has length 1",)
    (undecided,) = inferred.undecided
    assert (undecided.path, undecided.dimension, undecided.size) == ("unused", 0, EMBEDDING)


def test_every_name_has_a_reason(inferred):
    assert all(all(inferred.reasons(path)) for path in inferred)
    assert "contracted over it in attention" in inferred.reasons("blocks/1/attention/key")[1]
    assert "looked up along it by an input" in inferred.reasons("embed")[0]


def test_the_report_folds_equal_blocks(inferred):
    text = str(inferred)
    assert "20 arrays, 19 of them with all names; 1 dimension not decided" in text
    assert text.count("blocks/*/mlp/up") == 1
    assert "heads*projection" in text
    assert str(inferred.table(collapse=False)).count("mlp/up") == 2
    data = json.loads(inferred.to_json())
    assert data["blocks/1/mlp/down"]["names"] == ["neurons", "embedding"]
    assert data["unused"]["names"] == [None]
    assert "blocks/{0-1}" in str(inferred.tree())


def test_inferred_names_can_be_given_to_the_weights(inferred):
    named = pzs.name_axes(WEIGHTS, inferred)
    assert dict(named["embed"].named_shape) == {"vocabulary": VOCABULARY, "embedding": EMBEDDING}


def test_a_name_that_a_person_gives_goes_wherever_the_axis_is():
    names = pzs.infer_names(
        logits,
        WEIGHTS,
        TOKENS,
        overrides={"blocks.*.mlp.up": ("model_width", "hidden"), "unused": ("extra",)},
    )
    assert names["embed"] == ("vocabulary", "model_width")
    assert names["blocks/1/mlp/down"] == ("hidden", "model_width")
    assert names["unused"] == ("extra",)
    assert "override 'blocks.*.mlp.up'" in names.reasons("embed")[1]


def test_a_path_that_is_not_there_is_answered_with_one_that_is(inferred):
    with pytest.raises(KeyError, match=r"no array has path 'embde'. There is for instance 'embed'"):
        inferred["embde"]
    with pytest.raises(KeyError, match=r"for instance 'blocks/0/"):
        inferred["blocks/0"]
    assert "blocks/0" not in inferred
    assert inferred.get("blocks/0") is None


def test_an_override_may_name_the_parts_of_a_product():
    names = pzs.infer_names(
        logits, WEIGHTS, TOKENS, overrides={"**/query": ("embedding", "people*depth")}
    )
    assert names["blocks/0/attention/key"] == ("embedding", "people*depth")
    assert names["blocks/0/attention/key"][1].sizes == (HEADS, PROJECTION)
    assert names["blocks/0/attention/query"] == names["blocks/0/attention/key"]
    assert names["blocks/0/attention/output"] == ("people*projection", "embedding")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"lm_haed": ("a", "b")},
            "pattern 'lm_haed' matches no array. The nearest path is 'lm_head'",
        ),
        (
            {"embed": ("a",)},
            r"embed: pattern 'embed' gives 1 logical axes \('a',\) to an array of rank 2",
        ),
        ({"embed": "ab"}, r"pattern 'embed': names must be a tuple, not 'ab'"),
        ({3: ("a", "b")}, r"pattern 3: patterns are text, such as 'layers.\*.weight'"),
        ({"embed": ("", "b")}, r"pattern 'embed': an empty text names no axis, in \('', 'b'\)"),
        ({"**/query": ("a", "a*b")}, r"\('a', 'a\*b'\) uses a logical axis twice"),
        (
            {"embed": ("v", "a"), "lm_head": ("b", None)},
            r"lm_head: override 'lm_head' calls 'b' what override 'embed' calls 'a'",
        ),
    ],
)
def test_overrides_that_do_not_fit_are_refused(overrides, message):
    with pytest.raises(pzs.ShardingError, match=message):
        pzs.infer_names(logits, WEIGHTS, TOKENS, overrides=overrides)


def test_names_of_inputs_that_do_not_fit_are_refused():
    with pytest.raises(
        pzs.ShardingError, match=r"input 0: has rank 2, shape \(2, 5\), and input_names gives it 1"
    ):
        pzs.infer_names(logits, WEIGHTS, TOKENS, input_names=[("batch",)])
    with pytest.raises(
        pzs.ShardingError, match=r"there are 1. Write input_names=\[\('batch', 'seq'\)\]"
    ):
        pzs.infer_names(logits, WEIGHTS, TOKENS, input_names=[("batch", "seq")] * 2)
    with pytest.raises(pzs.ShardingError, match=r"there are none. Give them .*params, tokens\)"):
        pzs.infer_names(logits, WEIGHTS)
    with pytest.raises(
        pzs.ShardingError,
        match=r"input 0: has no arrays, .*jax.ShapeDtypeStruct\(\(2, 5\), 'int32'\); .*\[None\]",
    ):
        pzs.infer_names(logits, WEIGHTS, (2, 5))
    with pytest.raises(
        pzs.ShardingError, match=r"has a tuple of names for each input, not \('batch', 'seq'\)"
    ):
        pzs.infer_names(logits, WEIGHTS, TOKENS, input_names=("batch", "seq"))
    for unordered in ([{"batch", "seq"}], None):
        with pytest.raises(pzs.ShardingError, match="has a tuple of names for each input, not "):
            pzs.infer_names(logits, WEIGHTS, TOKENS, input_names=unordered)
    with pytest.raises(pzs.ShardingError) as raised:
        pzs.infer_names(
            lambda weights, *inputs: [logits(weights, each) for each in inputs],
            WEIGHTS,
            *[TOKENS] * 3,
            input_names=[("seq", "seq"), ("", None), ("batch", 3)],
        )
    assert str(raised.value).splitlines()[1:] == [
        "  input 0: in input_names, ('seq', 'seq') uses a logical axis twice. "
        "Write None for one without a name.",
        "  input 1: in input_names, an empty text names no axis, in ('', None). "
        "Write None for one without a name.",
        "  input 2: in input_names, integers cannot name an axis, in ('batch', 3).",
    ]


def test_an_override_of_an_array_that_has_names_is_refused():
    weights = {"up": pz.nx.wrap(jnp.ones((6, 8)), "features", "hidden")}

    def apply(weights, x):
        return x @ weights["up"].unwrap("features", "hidden")

    inputs = {"input_names": [("batch", "features")]}
    with pytest.raises(
        pzs.ShardingError,
        match=r"up: override 'u\*' gives it \('a', None\), and it has names already, "
        r"\('features', 'hidden'\), .* Take these off before, by without_names\.",
    ):
        pzs.infer_names(apply, weights, struct(3, 6), **inputs, overrides={"u*": ("a", None)})
    same = {"up": ("features", "hidden")}
    assert (
        pzs.infer_names(apply, weights, struct(3, 6), **inputs, overrides=same)["up"] == same["up"]
    )


def perceptron(weights, x):
    for weight, bias in weights:
        x = jax.nn.relu(x @ weight + bias)
    return x


def test_inputs_of_floating_point_are_not_taken_for_tokens():
    weights = [(struct(EMBEDDING, EMBEDDING), struct(EMBEDDING))]
    with pytest.raises(pzs.ShardingError, match=r"Say .*: (input_names=\[.*\])\.$") as caught:
        pzs.infer_names(perceptron, weights, struct(BATCH, EMBEDDING))
    said = str(caught.value).partition("input_names=")[2].removesuffix(".")
    found = pzs.infer_names(
        perceptron, weights, struct(BATCH, EMBEDDING), input_names=ast.literal_eval(said)
    )
    assert found["0/0"] == (None, None)


def test_what_is_not_decided_is_listed_with_overrides_that_decide_it():
    weights = [(struct(EMBEDDING, EMBEDDING), struct(EMBEDDING)) for _ in range(3)]
    infer = functools.partial(
        pzs.infer_names,
        perceptron,
        weights,
        struct(BATCH, EMBEDDING),
        input_names=[("batch", None)],
    )
    found = infer()
    assert "?1, ?2" in str(found.table(collapse=False))
    (said,) = found.table().summary
    overrides = ast.literal_eval(said.partition("overrides=")[2].removesuffix(")."))
    decided = infer(overrides=overrides)
    assert decided.undecided == decided.table().summary == ()
    assert decided["0/1"] == decided["1/0"][:1] == ("axis_2",)
    assert len({name for path in decided for name in decided[path]}) == 4


def test_a_function_that_cannot_be_traced_says_which_call():
    with pytest.raises(TypeError) as raised:
        pzs.infer_names(
            lambda weights, x: weights["embed"] @ weights["lm_head"] @ x, WEIGHTS, TOKENS
        )
    assert raised.value.__notes__[-1:] == [
        "This was raised while infer_names traced <lambda>(weights=params, x=int32[2,5])."
    ]
    with pytest.raises((IndexError, TypeError)) as raised:
        pzs.infer_names(logits, WEIGHTS, pz.nx.wrap(jnp.zeros((2, 5), int), "batch", "seq"))
    assert raised.value.__notes__[-1].endswith(
        "give it these, and their names apart: input_names=[('batch', 'seq')]."
    )


@pytest.mark.parametrize(
    ("function", "params", "message"),
    [
        (lambda weights, tokens: None, WEIGHTS, "<lambda> returns no arrays, so that nothing"),
        (logits, None, "not None. Give a model, or one without memory: abstract_model"),
        (
            WEIGHTS,
            logits,
            r"takes a function of weights and inputs, not a dict. Write infer_names\(",
        ),
        (jax.tree_util.Partial(logits, {"w": jnp.ones(2)}), {}, "this Partial holds its own"),
        (logits, block, "takes a model or another tree of arrays, not the function block"),
        (
            linen.Dense(2),
            WEIGHTS,
            r"not a Dense, whose method apply is one. Write infer_names\(module.apply, variables, ",
        ),
        (
            linen.Dense,
            WEIGHTS,
            r"not the class Dense, .* Write infer_names\(Dense\(...\).apply, variables, ",
        ),
        (
            eqx.nn.Linear(2, 2, key=jax.random.key(0)),
            WEIGHTS,
            r"this Linear holds its own. Write .*, lambda model, batch: jax.vmap\(model\)\(batch\)",
        ),
        (
            eqx.nn.Linear,
            WEIGHTS,
            r"not the class Linear. Write infer_names\(lambda model, \*inputs: model\(\*inputs\)",
        ),
        (
            simple_mlp.MLP.from_config(
                name="mlp", feature_sizes=(2, 2), init_base_rng=jax.random.key(0)
            ),
            WEIGHTS,
            r"this MLP holds its own. Write infer_names\(lambda model, \*inputs: model\(\*inputs\)",
        ),
        (
            lambda model, rng, state, tokens: tokens,
            WEIGHTS,
            r"takes \(model, rng, state, tokens\). Write infer_names\(lambda model, tokens: "
            r"function\(model, rng=..., state=..., tokens=tokens\), params, tokens\), and what",
        ),
        (
            lambda model, *, tokens: tokens,
            WEIGHTS,
            r"Write infer_names\(lambda model, tokens: function\(model, tokens=tokens\), params, t",
        ),
        (lambda model: model, WEIGHTS, r"infer_names\(function, params, input_names=\[\]\)"),
    ],
)
def test_what_is_no_function_of_weights_is_refused(function, params, message):
    with pytest.raises(pzs.ShardingError, match=message):
        pzs.infer_names(function, params, TOKENS)


def test_a_decorated_function_is_called_whatever_it_says_it_takes():
    @functools.wraps(lambda model, rng, tokens: tokens)
    def decorated(weights, tokens):
        return logits(weights, tokens)

    assert pzs.infer_names(decorated, WEIGHTS, TOKENS) == pzs.infer_names(logits, WEIGHTS, TOKENS)


def test_names_that_arrays_have_already_are_kept_and_used():
    weights = {"up": pz.nx.wrap(jnp.ones((6, 8)), "features", "hidden"), "down": jnp.ones((8, 6))}

    def apply(weights, x):
        up = weights["up"].unwrap("features", "hidden")
        return jax.nn.relu(x @ up) @ weights["down"]

    names = pzs.infer_names(apply, weights, struct(3, 6), input_names=[("batch", "features")])
    assert names["up"] == ("features", "hidden")
    assert names["down"] == ("hidden", None)


def test_names_where_their_arrays_belong_are_refused_with_the_call_that_gives_both(inferred):
    with pytest.raises(pzs.ShardingError, match=r"This InferredNames says .*name_axes\(params, na"):
        pzs.make_plan(inferred, pzs.make_mesh(data=8), pzs.fully_sharded())


def test_a_random_key_among_the_weights_has_no_dimensions_to_name():
    def apply(weights, x):
        noise = jax.random.normal(weights["keys"][1], x.shape)
        hidden = jax.nn.relu((x + noise + jax.random.bits(weights["key"])) @ weights["up"])
        return x + hidden @ weights["down"]

    weights = {"up": jnp.ones((6, 8)), "down": jnp.ones((8, 6)), "key": jax.random.key(0)}
    weights["keys"] = jax.random.split(jax.random.key(0), 3)
    names = pzs.infer_names(apply, weights, struct(3, 6), input_names=[("batch", None)])
    assert names["up"] == ("embedding", "neurons")
    assert names["key"] == ()
    assert names["keys"] == (None,)


def test_blocks_that_are_not_used_are_named_as_those_that_are():
    def first_block(weights, tokens):
        return apply_block(weights["blocks"][0], weights["embed"][tokens]) @ weights["lm_head"]

    names = pzs.infer_names(first_block, WEIGHTS, TOKENS)
    assert names["blocks/1/mlp/up"] == ("embedding", "neurons")
    assert names["blocks/1/attention/query"] == ("embedding", "heads*projection")
    assert names.reasons("blocks/1/mlp/up")[1] == (
        "blocks/0/mlp/up has it there, and their paths are alike"
    )
    assert names["unused"] == (None,)


def test_two_residual_streams_of_equal_width_are_not_one():
    def towers(weights, tokens, patches):
        text, image = weights["text"]["embed"][tokens], patches
        for block in weights["text"]["blocks"]:
            text = apply_block(block, text)
        for block in weights["image"]["blocks"]:
            image = apply_block(block, image)
        return text.mean(1), image.mean(1)

    weights = {
        "text": {"embed": WEIGHTS["embed"], "blocks": [block(), block()]},
        "image": {"blocks": [block()]},
    }
    names = pzs.infer_names(
        towers,
        weights,
        TOKENS,
        struct(BATCH, SEQ, EMBEDDING),
        input_names=[("batch", "seq"), ("batch", "patches", None)],
    )
    assert names["text/embed"] == ("vocabulary", "text_embedding")
    assert names["text/blocks/1/mlp/up"] == ("text_embedding", "text_neurons")
    assert names["image/blocks/0/attention/output"] == (
        "image_heads*image_projection",
        "image_embedding",
    )


EXPERTS = 6
MIXTURE = {
    "embed": struct(VOCABULARY, EMBEDDING),
    "router": struct(EMBEDDING, EXPERTS),
    "up": struct(EXPERTS, EMBEDDING, NEURONS),
    "down": struct(EXPERTS, NEURONS, EMBEDDING),
}


def sorted_by_expert(weights, x):
    expert = jnp.argmax(x @ weights["router"], -1)
    order = jnp.argsort(expert)
    counts = jnp.bincount(expert, length=EXPERTS)
    hidden = jax.nn.silu(jax.lax.ragged_dot(x[order], weights["up"], counts))
    return x + jax.lax.ragged_dot(hidden, weights["down"], counts)[jnp.argsort(order)]


def with_gathered_weights(weights, x):
    gates, chosen = jax.lax.top_k(x @ weights["router"], 2)

    def one(x, chosen, gates):
        hidden = jax.nn.silu(jnp.einsum("e,ken->kn", x, weights["up"][chosen]))
        return gates @ jnp.einsum("kn,kne->ke", hidden, weights["down"][chosen])

    return x + jax.vmap(one)(x, chosen, gates)


@pytest.mark.parametrize("mixed", [sorted_by_expert, with_gathered_weights])
def test_experts_are_what_a_router_chooses_among(mixed):
    def mixture(weights, tokens):
        x = weights["embed"][tokens]
        return mixed(weights, x.reshape(-1, EMBEDDING)).reshape(x.shape) @ weights["embed"].T

    names = pzs.infer_names(mixture, MIXTURE, TOKENS)
    assert names["router"] == ("embedding", "experts")
    assert names["up"] == ("experts", "embedding", "neurons")
    assert names["down"] == ("experts", "neurons", "embedding")


def test_two_of_something_beside_neurons_are_gates_only_where_they_are_taken_apart():
    def gated(weights, tokens):
        x = weights["embed"][tokens]
        gate, up = (x @ weights["gates"][number] for number in range(2))
        hidden = jax.nn.silu(gate + jnp.tanh(x @ weights["low"]) @ weights["high"]) * up
        return (x + hidden @ weights["down"]) @ weights["embed"].T

    weights = {
        "embed": struct(VOCABULARY, EMBEDDING),
        "gates": struct(2, EMBEDDING, NEURONS),
        "down": struct(NEURONS, EMBEDDING),
        "low": struct(EMBEDDING, 2),
        "high": struct(2, NEURONS),
    }
    names = pzs.infer_names(gated, weights, TOKENS)
    assert names["gates"] == ("gate_up", "embedding", "neurons")
    assert names["low"] == ("embedding", None)
    assert names["high"] == (None, "neurons")


def test_layers_are_one_after_the_other():
    def stacked(weights, tokens):
        x = weights["embed"][tokens]
        for number in range(2):
            x = x + jax.nn.relu(x @ weights["up"][number]) @ weights["down"][number]
        return x @ weights["embed"].T

    weights = {
        "embed": struct(VOCABULARY, EMBEDDING),
        "up": struct(2, EMBEDDING, NEURONS),
        "down": struct(2, NEURONS, EMBEDDING),
    }
    names = pzs.infer_names(stacked, weights, TOKENS)
    assert names["up"] == ("layers", "embedding", "neurons")
    assert names["down"] == ("layers", "neurons", "embedding")


def test_square_layers_are_not_taken_for_one_another():
    def apply(weights, x):
        for weight in weights:
            x = jax.nn.relu(x @ weight)
        return x

    names = pzs.infer_names(
        apply, [struct(8, 8)] * 3, struct(4, 8), input_names=[("batch", "features")]
    )
    assert [names[str(i)] for i in range(3)] == [("features", None), (None, None), (None, None)]
