"""Models that are stored padded: every layer, edit and check sees the true arrays."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import treescope
from flax import linen
from penzai import pz
from penzai.models.transformer.model_parts import TransformerBlock
from penzai.models.transformer.variants import llamalike_common

import penzai_shard as pzs
from penzai_shard.errors import PlanError

RULES = {"vocabulary": "model", "head_groups": "model", "neurons": "model", "embedding": "data"}


def build(stacked=False):
    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=3,
        query_head_multiplier=2,
        embedding_dim=16,
        projection_dim=4,
        mlp_hidden_dim=10,
        num_decoder_blocks=2 if stacked else 1,
        vocab_size=13,
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
        use_layer_stack=stacked,
    )
    return llamalike_common.build_llamalike_transformer(config, jax.random.key(0), name="lm")


@pytest.fixture(scope="module")
def mesh():
    return pzs.make_mesh({"data": 2, "model": 4})


@pytest.fixture(scope="module")
def plain():
    return build()


@pytest.fixture(scope="module")
def padded(plain, mesh):
    model = pzs.place(plain, mesh, RULES, on_indivisible="pad")
    assert sum(isinstance(v.value, pzs.PaddedArray) for v in pz.unbind_params(model)[1]) == 9
    return model


@pytest.fixture(scope="module")
def tokens():
    return pz.nx.wrap(jnp.arange(4 * 6).reshape(4, 6) % 13, "batch", "seq")


@pytest.fixture(scope="module")
def expected(plain, tokens):
    return pzs.Jitted(plain)(tokens)


def assert_same(result, expected):
    np.testing.assert_allclose(
        result.order_like(expected).data_array, expected.data_array, rtol=2e-4, atol=1e-5
    )


def loss_of(model, tokens):
    return (model(tokens) ** 2).untag("batch", "seq", "vocabulary").mean().unwrap()


@pytest.mark.parametrize(
    "edit",
    [
        pzs.Jitted,
        lambda model: pzs.Jitted(pzs.Checkpointed(model, "nothing")),
        pzs.AxesInPlace,
    ],
    ids=["jitted", "checkpointed", "in place"],
)
def test_wrapped_models_compute_the_same(padded, tokens, expected, edit):
    edited = edit(padded)
    assert_same(edited(tokens), expected)
    assert pzs.strip(edited) == padded


def test_gradients_are_those_of_the_unpadded_model(plain, padded, tokens):
    def gradients(model):
        slots, variables = pz.unbind_params(model, freeze=True)
        loss = lambda values: loss_of(pz.bind_variables(slots, values), tokens)  # noqa: E731
        return jax.jit(jax.grad(loss))(variables)

    for own, other in zip(gradients(padded), gradients(plain), strict=True):
        np.testing.assert_allclose(
            own.value.data_array, other.value.data_array, rtol=1e-4, atol=1e-6
        )
        if isinstance(own.value, pzs.PaddedArray):
            stored = np.array(own.value.stored)
            stored[tuple(map(slice, own.value.named_axes.values()))] = 0
            assert not stored.any()


def test_gathered_parameters_are_used_in_uneven_parts(padded, mesh, tokens, expected):
    layer = pzs.GatherParameters(padded, mesh, RULES | {"embedding": None}, on_indivisible="pad")
    assert_same(pzs.Jitted(layer)(tokens), expected)


def test_computing_in_another_precision_casts_the_true_arrays(plain, padded, tokens):
    own, other = (
        pzs.Jitted(pzs.InPrecision(model, "bfloat16"))(tokens) for model in (padded, plain)
    )
    np.testing.assert_allclose(
        np.asarray(own.order_like(other).data_array, np.float32),
        np.asarray(other.data_array, np.float32),
        rtol=0.1,
        atol=0.1,
    )


def test_layer_stacks_are_rolled(mesh, tokens):
    plain = build(stacked=True)
    rules = {"blocks": "model", "neurons": "data"}
    model = pzs.place(plain, mesh, rules, on_indivisible="pad")
    rolled = pzs.Jitted(pzs.roll_layer_stacks().apply(model))
    assert_same(rolled(tokens), pzs.Jitted(plain)(tokens))


def test_a_region_takes_the_true_arrays_and_refuses_to_split_them(padded, mesh, tokens, expected):
    batch = {"batch": "data"}
    region = pz.select(padded).at_instances_of(TransformerBlock)
    whole = region.apply(lambda block: pzs.ShardMapped(block, mesh, {"embedding": "data"}, batch))
    assert_same(pzs.Jitted(whole)(tokens), expected)
    split = region.apply(lambda block: pzs.ShardMapped(block, mesh, {"neurons": "model"}, batch))
    with pytest.raises(PlanError) as caught:
        split(tokens)
    assert len(caught.value.problems) == 3
    assert (
        "lm/block_0/mlp/out_linear.weights: logical axis 'neurons' (10) does not divide over mesh "
        "axis 'model' (4), asked by rule 'neurons' -> 'model'. Pad it to 12, or map 'neurons' to "
        "None. Stored padded or not, a ShardMapped region has equal parts of the true length. To "
        "compute with uneven ones, leave the layer to the compiler: GatherParameters("
    ) in caught.value.problems[-1]


def affine():
    return pz.nn.Affine.from_config("mlp", jax.random.key(0), {"embedding": 5}, {"neurons": 7})


def test_gradients_of_gathered_parameters_are_padded_as_they_are(mesh):
    def gradients(layer):
        slots, variables = pz.unbind_params(layer, freeze=True)

        def loss(values):
            y = pz.bind_variables(slots, values)(pz.nx.ones({"embedding": 5}))
            return (y**2).untag("neurons").sum().unwrap()

        return jax.jit(jax.grad(loss))(variables)

    placed = pzs.place(affine(), mesh, RULES, on_indivisible="pad")
    gathered = pzs.GatherParameters(placed, mesh, {}, gradients_as_used=False)
    for own, other in zip(gradients(gathered), gradients(affine()), strict=True):
        assert_same(own.value, other.value)
        assert isinstance(own.value, pzs.PaddedArray)


def test_a_padded_model_is_certified_and_another_is_not(mesh):
    rules, x = {"neurons": "model", "embedding": "data"}, pz.nx.ones({"batch": 3, "embedding": 5})
    model = pzs.place(affine(), mesh, rules, on_indivisible="pad")
    assert pzs.check_equivalent(affine(), pzs.Jitted(model), x)
    name = "mlp/Linear.weights"
    values = dict(pzs.param_dict(model))
    changed = values[name].at[{"neurons": 6, "embedding": 3}].multiply(1.001)
    values[name] = changed.order_as("embedding", "neurons")
    report = pzs.check_equivalent(affine(), pzs.with_params(model, values), x, gradients=False)
    assert not report
    assert f"{name}" in str(report)


def test_an_abstract_padded_model_is_compared_by_its_true_lengths(mesh):
    abstract, x = pzs.abstract_model(affine), pz.nx.ones({"batch": 3, "embedding": 5})
    structs = pzs.restore_structs(abstract, mesh, {"neurons": "model"}, on_indivisible="pad")
    other = pzs.with_params(abstract, structs)
    assert pzs.check_equivalent(abstract, other, x, gradients=False)


@pz.pytree_dataclass
class Averaging(pz.nn.Layer):
    """Keeps a running mean of what it is given."""

    mean: pz.StateVariable

    def __call__(self, x, **_side_inputs):
        self.mean.value = self.mean.value * 0.9 + x * 0.1
        return x


@pytest.mark.parametrize(
    "wrapped",
    [
        pzs.Jitted,
        lambda layer: pzs.Checkpointed(layer, "nothing"),
        pzs.AxesInPlace,
        lambda layer: pzs.Jitted(pzs.InPrecision(layer, "float32")),
    ],
    ids=["jitted", "checkpointed", "in place", "in precision"],
)
def test_state_variables_that_a_layer_assigns_stay_padded(mesh, wrapped):
    mean = pz.StateVariable(value=pz.nx.ones({"embedding": 3, "neurons": 7}), label="mean")
    layer = pzs.place(Averaging(mean), mesh, {"neurons": "model"}, on_indivisible="pad")
    before = layer.mean.value
    x = pz.nx.wrap(jnp.arange(21.0).reshape(7, 3), "neurons", "embedding")
    for _ in range(2):
        wrapped(layer)(x)
    after = layer.mean.value
    assert jax.tree.structure(after) == jax.tree.structure(before)
    assert after.stored.sharding.is_equivalent_to(before.stored.sharding, 2)
    expected = np.zeros((3, 8), np.float32)
    expected[:, :7] = 0.81 + 0.19 * np.arange(21.0).reshape(7, 3).T
    np.testing.assert_allclose(after.stored, expected, rtol=1e-6)


def test_reports_of_a_padded_model_count_what_is_stored(padded, mesh, tokens):
    plan = pzs.make_plan(padded, mesh, RULES, on_indivisible="pad")
    stored = sum(leaf.bytes_per_device for leaf in plan.leaves if leaf.shape)
    memory = pzs.device_memory(padded, tokens)
    assert memory.parameters == stored
    assert "vocabulary=13(16)/model" in " ".join(str(memory).split())
    assert pzs.collectives(padded, tokens)
    assert "nothing found" in str(pzs.lint(padded, mesh, RULES, on_indivisible="pad"))
    table = pz.unbind_params(padded)[1][0].value
    drawing = str(pzs.show_sharding(table))
    assert "vocabulary      13  4 of" in drawing
    assert "it is stored padded to 16" in " ".join(drawing.split())
    assert "it is stored padded to 16" in " ".join(str(pzs.show_sharding(plan.leaves[0])).split())
    assert "padding of 9 arrays" in " ".join(str(plan).split())
    assert "stored padded: 'vocabulary' as 16 over 'model'" in treescope.render_to_text(padded)


def test_arrays_of_other_libraries_are_padded_once_they_have_names(mesh):
    linear = eqx.nn.Linear(3, 7, key=jax.random.key(0))
    named = pzs.name_axes(linear, {"weight": ("out", "in"), "bias": ("out",)})
    placed = pzs.place(named, mesh, {"out": "model"}, on_indivisible="pad")
    assert placed.weight.stored.shape == (8, 3)
    x = jnp.ones(3)
    np.testing.assert_allclose(pzs.without_names(placed)(x), linear(x), rtol=1e-6)
    run = jax.jit(lambda module, x: pzs.without_names(module)(x))
    np.testing.assert_allclose(run(placed, x), linear(x), rtol=1e-6)
    variables = linen.Dense(7).init(jax.random.key(0), jnp.ones((2, 3)))
    named = pzs.name_axes(variables, {"**/kernel": ("in", "out"), "**/bias": ("out",)})
    placed = pzs.place(named, mesh, {"out": "model"}, on_indivisible="pad")
    x = jnp.ones((2, 3))
    np.testing.assert_allclose(
        linen.Dense(7).apply(pzs.without_names(placed), x),
        linen.Dense(7).apply(variables, x),
        rtol=1e-6,
    )
    boxed = linen.Dense(
        7, kernel_init=linen.with_partitioning(linen.initializers.ones, ("in", "out"))
    ).init(jax.random.key(0), x)
    with pytest.raises(PlanError, match="params/kernel: only named arrays of Penzai can be stored"):
        pzs.place(boxed, mesh, {"out": "model"}, on_indivisible="pad", on_unnamed="replicate")
