"""The presets on all families of models, on models with names of their own, and what is refused."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec
from penzai import pz
from penzai.models.transformer.model_parts import TransformerFeedForward

from penzai_shard import (
    Layout,
    abstract_model,
    check_equivalent,
    cross_entropy,
    make_mesh,
    place,
    roll_layer_stacks,
    strip,
)
from penzai_shard.errors import MeshError, PlanError, RuleTypeError, ShardingWarning
from tests.model_families import TRANSFORMERS, drawn, drawn_transformer, transformer

MESH = make_mesh({"data": 4, "model": 2})
TOKENS = pz.nx.wrap(jnp.arange(8 * 5).reshape(8, 5) % 16, "batch", "seq")

PRESETS = {
    "data": Layout.data_parallel(),
    "fully sharded": Layout.fully_sharded(min_size=32),
    "tensor": Layout.tensor_parallel(),
    "tensor, vocabulary": Layout.tensor_parallel(vocabulary="model"),
    "sequence": Layout.sequence_parallel(),
    "sequence, vocabulary": Layout.sequence_parallel(vocabulary="model"),
    "two": Layout.two_dimensional(min_size=32, vocabulary="model"),
}
# Groups of queries that divide, groups that do not, and one group, whose keys have no such axis.
ATTENTIONS = {
    "heads": ({"num_kv_heads": 4, "query_head_multiplier": 1}, {"heads"}),
    "groups": ({"num_kv_heads": 4, "query_head_multiplier": 3}, {"head_groups"}),
    "queries": ({"num_kv_heads": 3, "query_head_multiplier": 4}, {"query_heads"}),
    "one group": ({"num_kv_heads": 1, "query_head_multiplier": 4}, {"query_heads"}),
}


def one_block(**options):
    return drawn_transformer("llama", num_decoder_blocks=1, **options)


def sharded(layout, model, mesh=MESH):
    edited = layout.recipe(model, mesh).apply(model)
    return place(edited, mesh, layout.for_model(model, mesh).parameters)


def output_and_gradients(model, argument, gradients):
    """The output, and the gradients of a number made of it, by parameter."""
    unbound, parameters = pz.unbind_params(model)

    def number(values, argument):
        output = pz.bind_variables(unbound, values)(argument)
        output = output.unwrap(*sorted(output.named_shape))
        return jnp.sin(output).mean(), output

    values = [parameter.freeze() for parameter in parameters]
    if not gradients:
        return jax.jit(number)(values, argument)[1], {}
    (_, output), found = jax.jit(jax.value_and_grad(number, has_aux=True))(values, argument)
    return output, {gradient.label: gradient.value for gradient in found}


def assert_computes_the_same(layout, model, argument, mesh=MESH, gradients=False):
    output, gradients_of_one = output_and_gradients(model, argument, gradients)
    ours, found = output_and_gradients(
        sharded(layout, model, mesh), layout.shard_batch(argument, mesh), gradients
    )
    np.testing.assert_allclose(ours, output, rtol=1e-4, atol=1e-4)
    assert found.keys() == gradients_of_one.keys()
    for label, gradient in gradients_of_one.items():
        ours = found[label].order_like(gradient).data_array
        np.testing.assert_allclose(ours, gradient.data_array, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_every_preset_fits_every_family(family):
    model = drawn_transformer(family)
    for name in ("fully sharded", "sequence", "sequence, vocabulary", "two"):
        layout = PRESETS[name]
        edited = layout.recipe(model, MESH).apply(model)
        assert strip(edited) == model
        shape = jax.eval_shape(lambda: edited(TOKENS[{"seq": pz.slice[1:]}])).named_shape  # noqa: B023
        assert shape == {"batch": 8, "seq": 4, "vocabulary": 16}


@pytest.mark.parametrize(
    ("family", "preset", "options", "gradients"),
    [
        (
            "gemma_2",
            "sequence, vocabulary",
            {},
            False,
        ),  # Tied tables, norms after layers, capped logits.
        ("gemma_3", "two", {}, False),  # One key for all queries.
        (
            "gpt_neox",
            "sequence",
            {"num_decoder_blocks": 1},
            False,
        ),  # Attention beside feed-forward.
        (
            "llama",
            "tensor, vocabulary",
            {"num_decoder_blocks": 1, "tie_embedder_and_logits": True, **ATTENTIONS["queries"][0]},
            True,
        ),  # Copied keys, tied tables.
    ],
)
def test_families_compute_what_they_do_on_one_device(family, preset, options, gradients):
    model = drawn_transformer(family, **options)
    fed = TOKENS[{"seq": pz.slice[1:]}]
    assert_computes_the_same(PRESETS[preset], model, fed, gradients=gradients)


def loss_fn(model, rng, state, tokens):
    logits = model(tokens[{"seq": pz.slice[:-1]}])
    loss = cross_entropy(logits, tokens[{"seq": pz.slice[1:]}])
    return loss, state, {"loss": loss}


def test_steps_with_sequence_and_vocabulary_split_train_as_one_device_does():
    explicit = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    layouts = {
        "whole": (Layout.data_parallel(), make_mesh({"data": 1}, jax.devices()[:1])),
        "split": (PRESETS["sequence, vocabulary"], explicit),
    }
    # One token more than the model is fed, so that the batch's length does not divide.
    tokens = pz.nx.wrap(jnp.arange(8 * 33).reshape(8, 33) % 16, "batch", "seq")
    losses = {name: [] for name in layouts}
    for name, (layout, mesh) in layouts.items():
        state, step = layout.build(
            lambda key: drawn(lambda key: transformer("llama", key, num_decoder_blocks=1)),
            jax.random.key(0),
            mesh=mesh,
            loss_fn=loss_fn,
            optimizer=optax.sgd(0.5),
            rng=jax.random.key(1),
        )
        for _ in range(3):
            state, aux = step(state, tokens=layout.shard_batch(tokens, mesh))
            losses[name].append(float(aux["loss"]))
    assert losses["whole"][2] < losses["whole"][0] - 0.01
    np.testing.assert_allclose(losses["split"], losses["whole"], rtol=1e-5)


def test_an_edited_model_is_certified_as_equivalent():
    model = one_block()
    edited = PRESETS["sequence, vocabulary"].recipe(model, MESH).apply(model)
    fed = TOKENS[{"seq": pz.slice[1:]}]
    assert check_equivalent(model, edited, fed, gradients=False)


def test_layer_stacks_are_edited_inside():
    model = drawn(lambda key: transformer("llama", key, use_layer_stack=True))
    recipe = PRESETS["two"].recipe(model, MESH) + roll_layer_stacks()
    edited = place(recipe.apply(model), MESH, PRESETS["two"].for_model(model, MESH).parameters)
    assert strip(PRESETS["two"].recipe(model, MESH).apply(model)) == model
    fed = TOKENS[{"seq": pz.slice[1:]}]
    ours = jax.jit(lambda tokens: edited(tokens))(fed).order_as("batch", "seq", "vocabulary")
    expected = jax.jit(lambda tokens: model(tokens))(fed).order_as("batch", "seq", "vocabulary")
    np.testing.assert_allclose(ours.data_array, expected.data_array, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_one_kind_of_heads_is_split_in_all_arrays_and_the_plan_says_what_is_copied(kind):
    options, split = ATTENTIONS[kind]
    model = one_block(**options)
    plan = PRESETS["tensor"].plan(model, MESH)
    for leaf in plan.leaves:
        names = [name for name in leaf.names or () if name and "head" in str(name)]
        over = {n for n, axis in zip(leaf.names or (), leaf.spec, strict=False) if axis}
        assert over & {"heads", "head_groups", "query_heads"} == split & set(names)
        if names and not split & set(names):
            assert "'head_groups' -> None" in leaf.reason


def moe(name, key=None):
    """A mixture of all experts, weighed by a router: Penzai's layers alone."""
    inner = {"experts": 4, "neurons": 16}
    key = jax.random.key(0) if key is None else key
    linear = pz.nn.Linear.from_config
    return TransformerFeedForward(
        [
            pz.nn.BranchAndMultiplyTogether(
                [
                    pz.nn.Sequential(
                        [
                            linear(f"{name}/router", key, {"embedding": 8}, {"experts": 4}),
                            pz.nn.Softmax("experts"),
                        ]
                    ),
                    pz.nn.Sequential(
                        [
                            linear(f"{name}/up", key, {"embedding": 8}, inner),
                            pz.nn.Elementwise(jax.nn.silu),
                        ]
                    ),
                ]
            ),
            linear(f"{name}/down", key, inner, {"embedding": 8}),
        ]
    )


@pytest.mark.parametrize(
    ("shape", "experts", "spec"),
    [
        ({"data": 2, "expert": 2, "model": 2}, "expert", PartitionSpec(None, "expert", "model")),
        ({"data": 4, "model": 2}, "model", PartitionSpec(None, "model")),
    ],
)
def test_experts_are_split_over_their_mesh_axis_before_their_neurons(shape, experts, spec):
    mesh, layout = make_mesh(shape), Layout.tensor_parallel(experts=experts)
    model = pz.select(one_block()).at_instances_of(TransformerFeedForward).set(moe("moe"))
    specs = {leaf.path: leaf.spec for leaf in layout.plan(model, mesh).leaves}
    assert specs["moe/up.weights"] == spec
    assert specs["moe/down.weights"] == PartitionSpec(*spec[1:])
    assert specs["moe/router.weights"] == PartitionSpec(None, experts)
    if experts == "expert":
        assert_computes_the_same(layout, model, TOKENS[{"seq": pz.slice[1:]}], mesh)


@pz.pytree_dataclass
class Perceptron(pz.nn.Layer):
    """A feed-forward layer of somebody else's, with names of its own."""

    up: pz.nn.Linear
    down: pz.nn.Linear

    def __call__(self, value, /, **side_inputs):
        hidden = pz.nx.nmap(jnp.tanh)(self.up(value))
        return self.down(hidden)


def perceptrons():
    key, linear = jax.random.key(0), pz.nn.Linear.from_config
    blocks = [
        pz.nn.Residual(
            Perceptron(
                linear(f"{i}/up", key, {"embed": 8}, {"mlp": 12}),
                linear(f"{i}/down", key, {"mlp": 12}, {"embed": 8}),
            )
        )
        for i in range(2)
    ]
    return pz.nn.Sequential([*blocks, linear("head", key, {"embed": 8}, {"words": 6})])


OWN_NAMES = {
    "batch": "examples",
    "seq": "time",
    "neurons": "mlp",
    "heads": None,
    "vocabulary": "words",
}
FEATURES = pz.nx.wrap(jax.random.normal(jax.random.key(2), (8, 4, 8)), "examples", "time", "embed")


def test_a_model_with_names_and_layers_of_its_own():
    layout = Layout.sequence_parallel(names=OWN_NAMES, blocks=Perceptron, vocabulary="model")
    model = perceptrons()
    assert_computes_the_same(layout, model, FEATURES, gradients=True)
    assert layout.shard_batch(FEATURES, MESH).data_array.sharding.spec == PartitionSpec("data")
    edited = layout.recipe(model, MESH).apply(model)
    text = str(jax.make_jaxpr(lambda x: edited(x).data_array)(FEATURES))
    assert text.count("sharding_constraint") == 2 * 4 + 3
    assert strip(edited) == model
    by_path = Layout.tensor_parallel(names=OWN_NAMES, blocks="**/residual/delta")
    rows = by_path.recipe(model, MESH).report(model).rows
    assert rows[1].paths == ("sublayers/0/delta", "sublayers/1/delta")


def test_without_penzais_blocks_its_attention_and_feed_forward_are_the_blocks():
    model = pz.nn.Sequential(one_block().body.sublayers[1].sublayers)
    recipe = PRESETS["fully sharded"].recipe(model, MESH)
    constrained, gathered = recipe.report(model).rows[:2]
    assert constrained.paths == gathered.paths
    assert gathered.paths == ("sublayers/0/delta/sublayers/1", "sublayers/1/delta/sublayers/1")


def test_layers_that_share_their_type_with_others_are_found_by_path():
    key, linear = jax.random.key(0), pz.nn.Linear.from_config
    layers = [linear("in", key, {"a": 4}, {"embed": 8}), *perceptrons().sublayers]
    layout = Layout.tensor_parallel(names=OWN_NAMES, blocks=Perceptron, vocabulary="model")
    edited = layout.recipe(pz.nn.Sequential(layers), MESH).apply(pz.nn.Sequential(layers))
    kinds = [type(layer).__name__ for layer in edited.sublayers]
    assert kinds == ["Linear", "Residual", "Residual", "ConstrainActivations"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"names": {"neuron": "mlp"}}, RuleTypeError, r"no such role. Did you mean 'neurons'\?"),
        ({"name": {"neurons": "mlp"}}, RuleTypeError, r"no such option. Did you mean 'names'\?"),
        (
            {"names": {**OWN_NAMES, "neurons": "mpl"}},
            RuleTypeError,
            r"'neurons': 'mpl'}: the model has no such logical axis. It has 'embed', 'mlp', 'w",
        ),
        (
            {},
            RuleTypeError,
            r"'neurons': the model has no logical axis of this role; it has 'embed', 'mlp', "
            r"'words'. "
            r'Say which it is: names={\'neurons\': "..."}, or names={\'neurons\': None}',
        ),
        (
            {"names": {"neurons": "mlp", "heads": None}, "experts": "model"},
            RuleTypeError,
            r"'experts': the model has no logical axis of this role",
        ),
        ({"vocabulary": "data"}, RuleTypeError, r"vocabulary='data': the batch is split over this"),
        ({"vocabulary": "modle"}, MeshError, r"has no mesh axis 'modle'. Did you mean 'model'\?"),
        (
            {"names": OWN_NAMES},
            RuleTypeError,
            r"has no Attention or KVCaching.*blocks=\(MyAttention, MyFeedForward\)",
        ),
        (
            {"names": OWN_NAMES, "blocks": lambda layer, path: path.endswith("0/delta")},
            RuleTypeError,
            r"1/up.weights: logical axis 'mlp' is split, and the parameter is in no layer that the "
            r"layout knows \(sublayers/1/delta/up/weights\)",
        ),
    ],
)
def test_what_does_not_fit_the_model_is_refused_with_what_to_write(options, error, message):
    with pytest.raises(error, match=message):
        Layout.tensor_parallel(**options).recipe(perceptrons(), MESH)


def test_lengths_that_do_not_divide_are_refused_all_at_once():
    with pytest.raises(PlanError) as raised:
        Layout.tensor_parallel("model", "data", vocabulary="data").recipe(
            one_block(num_kv_heads=3, query_head_multiplier=3, mlp_hidden_dim=18), MESH
        )
    assert len(raised.value.problems) == 2
    assert raised.match(
        r"block_0/mlp/gating_linear.weights: logical axis 'neurons' \(18\) does not divide over "
        r"mesh axis 'data' \(4\). Pad it to 20, use a mesh with data=3, or leave it whole: "
        r"names={'neurons': None}."
    )
    assert raised.match(r"'head_groups' \(3\) and logical axis 'query_heads' \(3\) do not divide")
    both = Layout.tensor_parallel(model=("data", "model"), data=())
    with pytest.raises(PlanError, match=r"mesh axes \('data', 'model'\) \(8\). Pad it to 8, or"):
        both.recipe(one_block(num_kv_heads=3, query_head_multiplier=4), MESH)


def test_a_role_left_whole_is_not_split():
    model = one_block()
    layout = Layout.tensor_parallel(names={"heads": None})
    specs = {leaf.path: leaf.spec for leaf in layout.plan(model, MESH).leaves}
    assert specs["t/block_0/attention/query.weights"] == PartitionSpec()
    assert specs["t/block_0/mlp/out_linear.weights"] == PartitionSpec("model")


def test_a_role_that_some_models_lack_is_warned_of_and_can_be_said():
    with pytest.warns(
        ShardingWarning, match=r"'heads': the model has no logical axis of this role"
    ):
        Layout.tensor_parallel(names={"neurons": "mlp"}).for_model(perceptrons(), MESH)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Layout.tensor_parallel(names=OWN_NAMES).for_model(perceptrons(), MESH)


def test_rules_of_ones_own_for_an_axis_that_the_model_names_so_are_kept_as_they_are():
    """A role is a name too: fallbacks, options of plans and activations count as elsewhere."""
    weights = {"w": pz.nx.ones({"embed": 8, "heads": 3})}
    fallback = Layout(parameters=[("heads", "model"), ("heads", None)], compute={"batch": "data"})
    plan = fallback.plan(weights, MESH)
    assert plan.sharding_tree()["w"].data_array.spec == PartitionSpec()
    smaller = [("heads", ("data", "model")), ("heads", "model")]
    plan = Layout(parameters=smaller, compute={}).plan({"w": pz.nx.ones({"heads": 2})}, MESH)
    assert plan.sharding_tree()["w"].data_array.spec == PartitionSpec("model")
    layout = Layout(parameters={"heads": "model"}, compute={"heads": "model", "neurons": "model"})
    plan = layout.plan(weights, MESH, on_indivisible="replicate")
    assert plan.sharding_tree()["w"].data_array.spec == PartitionSpec()
    with pytest.raises(PlanError, match=r"w: logical axis 'heads' \(3\) does not divide"):
        layout.plan(weights, MESH)
    assert layout.for_model(weights, MESH).compute == layout.compute  # Of activations alone too.


def test_a_layout_of_an_abstract_model_is_that_of_the_model():
    abstract = abstract_model(lambda: transformer("llama", jax.random.key(0), name="t"))
    layout = PRESETS["two"]
    assert layout.for_model(abstract, MESH) == layout.for_model(drawn_transformer("llama"), MESH)
    assert layout.recipe(abstract, MESH) == layout.recipe(drawn_transformer("llama"), MESH)
    again = layout.for_model(abstract, MESH)
    assert again.for_model(abstract, MESH) == again


def test_a_sequence_that_does_not_divide_is_an_error_of_what_flows():
    model = one_block()
    edited = PRESETS["sequence"].recipe(model, MESH).apply(model)
    with pytest.raises(PlanError, match=r"logical axis 'seq' \(5\) does not divide over mesh axis"):
        jax.eval_shape(lambda: edited(TOKENS))
