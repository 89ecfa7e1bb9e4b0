"""What the presets that split layers move, against what the literature says they do.

One block of a Llama-like model. A is the size of its activations on one device before anything is
split, [batch / data, seq, embedding].

- Tensor parallel (Shoeybi et al. 2019, arXiv:1909.08053, section 3): attention and feed-forward
  each reduce A once in the forward pass and once in the backward pass, four reductions a block.
- Sequence parallel (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2): a gathering and a
  scattering reduction in place of each.
- Vocabulary parallel (Shoeybi et al. 2019): A is reduced after the lookup, and backwards before the
  layer that gives logits; the loss reduces its maximum, its sum and the target's logit, each
  [batch / data, seq].
- Hybrid (Zhao et al. 2023, arXiv:2304.11277, section 3.2.2): parameters are gathered within
  ``data``, gradients scattered within it and then reduced over ``replica``.

XLA's CPU backend writes a reduce-scatter as an all-reduce that is sliced afterwards, which is
counted as what it means. It combines, but does not add, the gradients of one input that come from
several layers (query, key and value; gate and value): such a reduction has two or three arrays of
size A. XLA for TPUs adds them first and has one, as Megatron has.
"""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from penzai import pz

from benchmarks.compiled_collectives import read_collectives
from penzai_shard import Layout, Recipe, make_mesh, place, strip
from tests.judged_collectives import assert_report_is_as_judged
from tests.model_families import drawn_transformer

TWO = make_mesh({"data": 2, "model": 4})
EXPLICIT = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
HYBRID = make_mesh({"replica": 2, "data": 4})
SPLIT = {"vocabulary": "model"}

LAYOUTS = {
    "tensor": (Layout.tensor_parallel(), EXPLICIT),
    "tensor, vocabulary": (Layout.tensor_parallel(**SPLIT), TWO),
    "sequence": (Layout.sequence_parallel(), TWO),
    "sequence, vocabulary": (Layout.sequence_parallel(**SPLIT), EXPLICIT),
    "2-D, vocabulary": (Layout.two_dimensional(min_size=64, **SPLIT), TWO),
    "hybrid": (Layout.hybrid(min_size=64), HYBRID),
}
WITH_VOCABULARY = [name for name in LAYOUTS if "vocabulary" in name]

BATCH, SEQ, EMBEDDING, VOCABULARY = 8, 32, 48, 80
A = BATCH // 2 * SEQ * EMBEDDING * 4
# The batch has one token more than the model is fed, so that its length divides over nothing.
TOKENS = pz.nx.wrap(jnp.arange(BATCH * (SEQ + 1)).reshape(BATCH, -1) % VOCABULARY, "batch", "seq")

Compiled = collections.namedtuple("Compiled", "recipe text collectives loss logits gradients")


def bare_model():
    return drawn_transformer(
        "llama",
        num_decoder_blocks=1,
        num_kv_heads=8,
        query_head_multiplier=1,
        embedding_dim=EMBEDDING,
        projection_dim=6,
        mlp_hidden_dim=128,
        vocab_size=VOCABULARY,
    )


def loss_and_logits(model, tokens):
    """README's loss."""
    logits = model(tokens[{"seq": pz.slice[:-1]}])
    log_probs = pz.nx.nmap(jax.nn.log_softmax)(logits.untag("vocabulary")).tag("vocabulary")
    right = log_probs[{"vocabulary": tokens[{"seq": pz.slice[1:]}]}]
    return -right.untag("batch", "seq").mean().unwrap(), logits


def compiled(model, tokens, shardings=None):
    unbound, parameters = pz.unbind_params(model)
    values = [parameter.freeze() for parameter in parameters]

    def loss(values, tokens):
        return loss_and_logits(pz.bind_variables(unbound, values), tokens)

    stored = None if shardings is None else jax.tree.map(lambda a: a.sharding, values)
    step = jax.jit(jax.value_and_grad(loss, has_aux=True), out_shardings=(None, stored))
    program = step.lower(values, tokens).compile()
    (value, logits), gradients = program(values, tokens)
    named = {gradient.label: gradient.value for gradient in gradients}
    return program, float(value), logits, named


@functools.cache
def one_device():
    return compiled(bare_model(), TOKENS)[1:]


@functools.cache
def run(name):
    layout, mesh = LAYOUTS[name]
    recipe = layout.recipe(bare_model(), mesh)
    stored = layout.for_model(bare_model(), mesh).parameters
    model = place(recipe.apply(bare_model()), mesh, stored)
    program, *results = compiled(model, layout.shard_batch(TOKENS, mesh), stored)
    return Compiled(recipe, program.as_text(), read_collectives(program, mesh), *results)


def moved(name, axis, size, backward=None):
    """How often arrays of a size are moved over a mesh axis, by what the collective means."""
    return collections.Counter(
        one.meaning
        for one in run(name).collectives
        if one.mesh_axes == (axis,)
        and {bytes_of(array) for array in one.arrays} - {4} == {size}
        and backward in (None, "transpose(" in one.scope)
    )


def bytes_of(array):
    dims = re.search(r"\[([\d,]*)\]", array)[1]
    return 4 * int(np.prod([int(n) for n in dims.split(",") if n]))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_report_of_collectives_is_as_judged(name):
    assert_report_is_as_judged(run(name).text, LAYOUTS[name][1])


@pytest.mark.parametrize("name", LAYOUTS)
def test_outputs_losses_and_gradients_are_those_of_one_device(name):
    loss, logits, gradients = one_device()
    found = run(name)
    np.testing.assert_allclose(found.loss, loss, rtol=1e-5)
    order = ("batch", "seq", "vocabulary")
    np.testing.assert_allclose(
        found.logits.order_as(*order).data_array,
        logits.order_as(*order).data_array,
        rtol=2e-4,
        atol=2e-4,
    )
    assert found.gradients.keys() == gradients.keys()
    for label, gradient in gradients.items():
        ours = found.gradients[label].order_like(gradient).data_array
        np.testing.assert_allclose(ours, gradient.data_array, rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_recipe_comes_off_and_survives_json(name):
    recipe = run(name).recipe
    assert strip(recipe.apply(bare_model())) == bare_model()
    assert Recipe.from_json(recipe.to_json(), mesh=LAYOUTS[name][1]) == recipe


@pytest.mark.parametrize("name", LAYOUTS)
def test_nothing_is_exchanged_but_by_gathering_and_reducing(name):
    others = [
        (one.kind, one.arrays)
        for one in run(name).collectives
        if one.meaning not in ("all-gather", "all-reduce", "reduce-scatter")
    ]
    # Where each device has its part of the sequence of logits, the target tokens, which are a
    # shifted part of the batch, come from the neighbour: 16 bytes.
    assert others == ([("collective-permute", ("s32[4,2]",))] if name == "sequence" else [])


def test_tensor_parallel_reduces_once_per_half_block_and_direction():
    assert moved("tensor", "model", A, backward=False) == {"all-reduce": 2}
    assert moved("tensor", "model", A, backward=True) == {"all-reduce": 2}
    over_model = [one for one in run("tensor").collectives if "model" in one.mesh_axes]
    assert len(over_model) == 4


def test_sequence_parallel_gathers_and_scatters_instead():
    expected = {"all-gather": 2, "reduce-scatter": 2}
    name = "sequence, vocabulary"
    outside = {"all-gather": 1, "reduce-scatter": 1}
    for backward in (False, True):
        found = moved(name, "model", A, backward)
        assert found == {kind: expected[kind] + outside[kind] for kind in expected}
    assert "all-reduce" not in moved(name, "model", A)
    assert moved("sequence", "model", A, backward=False) == expected


def test_between_layers_sequence_parallel_computes_on_parts_of_the_sequence_alone():
    def computed(name):
        """How often something of the size of the residual stream is computed, whole or a part."""
        entry = run(name).text.partition("\nENTRY")[2]
        results = re.findall(r"= f32\[([\d,]+)\]\S* (?:fusion|dot|add|multiply)\(", entry)
        sizes = [tuple(sorted(map(int, dims.split(",")))) for dims in results]
        batch = BATCH // 2
        whole, part = (tuple(sorted((batch, s, EMBEDDING))) for s in (SEQ, SEQ // 4))
        return sizes.count(whole), sizes.count(part)

    whole, parts = computed("sequence, vocabulary")
    # Norms and additions are on parts. Matrix products give whole sums that are still to be added,
    # which XLA may write as fusions, one for each layer.
    assert whole <= 2
    assert parts > 10
    assert computed("tensor, vocabulary")[0] > 10


@pytest.mark.parametrize("name", ["tensor, vocabulary", "2-D, vocabulary"])
def test_a_split_vocabulary_reduces_after_the_lookup_and_before_the_logits(name):
    assert moved(name, "model", A, backward=False) == {"all-reduce": 2 + 1}
    assert moved(name, "model", A, backward=True) == {"all-reduce": 2 + 1}


@pytest.mark.parametrize("name", WITH_VOCABULARY)
def test_the_loss_reduces_numbers_of_a_token_alone(name):
    of_tokens = A // EMBEDDING
    found = sum(
        [bytes_of(array) for array in one.arrays].count(of_tokens)
        for one in run(name).collectives
        if one.mesh_axes == ("model",)
    )
    # The maximum, the sum and the target's logit; log_softmax reduces its gradient once more.
    assert found == 4


@pytest.mark.parametrize("name", LAYOUTS)
def test_whole_logits_and_the_whole_table_are_nowhere_if_the_vocabulary_is_split(name):
    text = run(name).text
    shapes = {tuple(dims.split(",")) for dims in re.findall(r"\w\[(\d[\d,]*)\]\{", text)}
    whole = [dims for dims in shapes if str(VOCABULARY) in dims]
    assert bool(whole) == (name not in WITH_VOCABULARY)


def test_two_dimensional_gathers_what_tensor_parallelism_left_of_each_parameter():
    name = "2-D, vocabulary"
    gathered = sorted(
        one.payload_bytes
        for one in run(name).collectives
        if one.kind == "all-gather" and one.mesh_axes == ("data",)
    )
    in_block = [EMBEDDING * 48 // 4 * 4] * 4 + [EMBEDDING * 128 // 4 * 4] * 3
    ends = [EMBEDDING * VOCABULARY // 4 * 4] * 2
    assert gathered == sorted(in_block + ends)
    scattered = [one.scattered_bytes for one in run(name).collectives if one.mesh_axes == ("data",)]
    assert sum(scattered) == sum(in_block + ends)


def test_hybrid_gathers_and_scatters_within_data_and_reduces_parts_over_replicas():
    in_block, ends = [EMBEDDING * 48 * 4] * 4 + [EMBEDDING * 128 * 4] * 3, [EMBEDDING * 80 * 4] * 2
    matrices = sum(in_block + ends)
    by_axes = collections.defaultdict(int)
    for one in run("hybrid").collectives:
        by_axes[one.meaning, one.mesh_axes] += one.payload_bytes
    everywhere = by_axes.pop(("all-reduce", ("replica", "data")))
    # The table's gradient adds rows up by token, which is not done in parts over two mesh axes.
    table, norms, loss = EMBEDDING * VOCABULARY * 4, 3 * EMBEDDING * 4, 4
    assert by_axes == {
        ("all-gather", ("data",)): matrices,
        ("reduce-scatter", ("data",)): matrices - table,
        ("all-reduce", ("replica",)): (matrices - table) // 4,
    }
    assert everywhere == table + norms + loss


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_stay_where_parameters_are_stored(name):
    layout, mesh = LAYOUTS[name]
    plan = layout.plan(bare_model(), mesh)
    stored = dict(zip([leaf.path for leaf in plan.leaves], plan.leaves, strict=True))
    for label, gradient in run(name).gradients.items():
        assert gradient.data_array.sharding.spec == stored[label].spec
