"""The sane layouts of a step, enumerated."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from penzai import pz
from penzai.models.transformer.variants import llamalike_common

from penzai_shard import Hardware, Layout, abstract_model, cross_entropy, make_mesh
from penzai_shard.choosing.candidates import candidates, mesh_shapes
from penzai_shard.choosing.training_problem import TrainingProblem
from penzai_shard.errors import MeshError, RuleTypeError
from penzai_shard.named_arrays import named_array


def llama(batch=16, seq=32, **changes):
    sizes = {
        "num_kv_heads": 4, "query_head_multiplier": 2, "embedding_dim": 256, "projection_dim": 16,
        "mlp_hidden_dim": 512, "num_decoder_blocks": 1, "vocab_size": 1024, "mlp_variant": "swiglu",
        "tie_embedder_and_logits": False,
    }  # fmt: skip
    config = llamalike_common.LlamalikeTransformerConfig(**sizes | changes)
    model = abstract_model(
        llamalike_common.build_llamalike_transformer, config, init_base_rng=jax.random.key(0)
    )

    def loss_fn(model, rng, state, tokens):
        return cross_entropy(model(tokens), tokens), state, {}

    tokens = named_array(jax.ShapeDtypeStruct((batch, seq), jnp.int32), ("batch", "seq"))
    return TrainingProblem(model, loss_fn, optax.adamw(1e-3), {"tokens": tokens})


def weights(batch=8, **arrays):
    """A dictionary of named arrays, which has no layers."""
    model = {
        name: pz.nx.NamedArray.wrap(jnp.zeros(tuple(axes.values()))).tag(*axes)
        for name, axes in arrays.items()
    }
    x = named_array(jax.ShapeDtypeStruct((batch, 4), jnp.float32), ("batch", None))
    return TrainingProblem(model, lambda model, rng, state, x: None, optax.sgd(0.1), {"x": x})


@pytest.fixture(scope="module")
def problem():
    return llama()


@pytest.fixture(scope="module")
def on_hosts(problem):
    hardware = Hardware.read("h100:2x4")
    return candidates(problem, mesh_shapes(hardware), hardware=hardware)


def layouts_on(found, **mesh):
    return [one.layout for one in found if one.mesh_shape == mesh and one.microbatches == 1]


def test_drawn_candidates_build_a_step(problem, on_hosts):
    for one in on_hosts[:: len(on_hosts) // 9]:
        mesh = make_mesh(one.mesh_shape, abstract=True)
        _, state, inputs = problem.built(one.layout, mesh, one.microbatches)
        for leaf in jax.tree.leaves((state, inputs)):
            assert len(leaf.sharding.shard_shape(leaf.shape)) == leaf.ndim


@pytest.mark.parametrize("vocabulary", [None, "model"])
def test_the_presets_are_among_them(on_hosts, vocabulary):
    one_axis = layouts_on(on_hosts, data=8)
    assert Layout.data_parallel(names={}) in one_axis
    assert Layout.zero1() in one_axis
    assert Layout.fully_sharded() in one_axis
    assert Layout.fully_sharded(reshard_after_forward=True) in one_axis
    assert Layout.fully_sharded(rematerialise="dots") in one_axis
    assert Layout.hybrid() in layouts_on(on_hosts, replica=2, data=4)
    two_axes = layouts_on(on_hosts, data=4, model=2)
    assert Layout.tensor_parallel(vocabulary=vocabulary) in two_axes
    assert Layout.sequence_parallel(vocabulary=vocabulary) in two_axes
    assert Layout.two_dimensional(vocabulary=vocabulary) in two_axes


def test_experts_are_split_as_presets_split_them():
    problem = weights(
        up={"experts": 4, "embedding": 64, "neurons": 512},
        router={"embedding": 64, "experts": 4},
        shared={"embedding": 64, "neurons": 512},
        query={"embedding": 64, "heads": 8},
    )
    found = layouts_on(candidates(problem, [{"data": 4, "model": 2}]), data=4, model=2)
    asked = Layout.two_dimensional(experts="model", blocks=())
    assert any((one.parameters, one.compute) == (asked.parameters, asked.compute) for one in found)


def test_of_a_small_model_they_are_these():
    """Counted by hand: neurons over `model`; stored whole, by embedding, or by the largest."""
    problem = weights(
        up={"embedding": 128, "neurons": 512}, down={"neurons": 512, "embedding": 128}
    )
    found = candidates(problem, [{"data": 4, "model": 2}], microbatches=(1,))
    specs = [
        [one.layout.parameters.spec(*up, one.mesh_shape), one.layout.optimizer is not None]
        for one in found
        for up in [(("embedding", "neurons"), (128, 512))]
    ]
    whole, split = jax.P(None, "model"), jax.P("data", "model")
    # By the embedding and by the largest free dimension are the same here.
    assert specs == [[whole, False], [whole, True], [split, False]]
    assert all(one.layout.blocks == () for one in found)


def test_each_is_there_once_and_always_in_the_same_order(problem, on_hosts):
    assert len(set(map(repr, on_hosts))) == len(on_hosts)
    hardware = Hardware.read("h100:2x4")
    again = candidates(llama(), mesh_shapes(hardware), hardware=hardware)
    assert list(again) == list(on_hosts)


def test_of_mesh_axes_of_equal_meaning_one_is_taken(problem):
    swapped = candidates(problem, [{"x": 2, "y": 2}])
    assert {
        one.layout.batch_rules.rules[0].mesh_axes for one in swapped if one.layout.batch_rules.rules
    } == {
        ("x", "y"),
        ("x",),
    }
    differing = candidates(problem, [{"x": 4, "y": 2}])
    assert {
        one.layout.batch_rules.rules[0].mesh_axes
        for one in differing
        if one.layout.batch_rules.rules
    } == {
        ("x", "y"),
        ("x",),
        ("y",),
    }
    between_hosts = candidates(problem, [{"x": 2, "y": 2}], hardware=Hardware.read("h100:2x2"))
    assert len(between_hosts) > len(swapped)
    of_one = candidates(problem, [{"data": 4, "model": 1}])
    assert [one.layout for one in of_one] == [
        one.layout for one in candidates(problem, [{"data": 4}])
    ]


def test_every_rule_is_for_an_axis_that_the_problem_has(on_hosts):
    for one in on_hosts:
        layout = one.layout
        for rules in (layout.parameters, layout.compute, layout.optimizer, layout.between_blocks):
            for rule in () if rules is None else rules.name_rules:
                assert rule.logical_axis in (
                    "batch", "seq", "embedding", "neurons", "heads", "vocabulary"
                )  # fmt: skip
                assert set(rule.mesh_axes) <= one.mesh_shape.keys()


def test_what_is_priced_lies_on_the_mesh_that_make_mesh_gives(on_hosts):
    for candidate in on_hosts:
        # With Auto axes, whatever kind JAX itself gives to an abstract mesh.
        assert candidate.mesh == make_mesh(candidate.mesh_shape, abstract=True)


def test_every_mesh_axis_has_a_use_and_every_device_a_part_of_the_batch(on_hosts):
    for one in on_hosts:
        rules = (*one.layout.parameters.name_rules, *one.layout.compute.name_rules)
        assert {axis for rule in rules for axis in rule.mesh_axes} == set(one.mesh_shape)
        over = [axis for rule in one.layout.batch_rules.name_rules for axis in rule.mesh_axes]
        assert 16 % (math.prod(one.mesh_shape[axis] for axis in over) * one.microbatches) == 0


def test_lengths_that_do_not_divide_leave_tables_out_and_it_is_said():
    found = candidates(llama(num_kv_heads=3, query_head_multiplier=1), [{"data": 2, "model": 4}])
    assert found
    assert all("heads" not in one.layout.parameters.logical_axes for one in found)
    (line,) = found.left_out
    assert "'heads' (3)" in line
    assert "does not divide over mesh axis 'model' (4)" in line
    assert line.endswith("tables)")
    none = candidates(llama(batch=3), [{"data": 2}])
    assert (tuple(none), none.left_out) == (
        (),
        ("the batch (3) does not divide over 2 devices; one of 2 or 4 does (1 table)",),
    )
    parts = candidates(llama(batch=8), [{"data": 2}], microbatches=[3])
    assert parts.left_out == (
        "the batch (8) does not divide over 2 devices in 3 microbatches; one of 6 or 12 does "
        "(1 table)",
    )


def test_a_mesh_axis_that_is_kept_twice_for_one_logical_axis_is_refused():
    with pytest.raises(RuleTypeError, match=r"is there twice\. Write keep={'batch': 'data'}\."):
        candidates(llama(), [{"data": 2}], keep={"batch": ("data", "data")})


def test_where_groups_of_heads_do_not_divide_the_queries_are_split():
    found = candidates(llama(num_kv_heads=1, query_head_multiplier=4), [{"data": 2, "model": 4}])
    split = [one for one in found if "heads" in one.layout.parameters.logical_axes]
    mesh = make_mesh({"data": 2, "model": 4}, abstract=True)
    rules = split[0].layout.for_model(llama(num_kv_heads=1, query_head_multiplier=4).model, mesh)
    assert rules.parameters.spec(("query_heads",), (4,), mesh) == jax.P("model")


MESHES = [{"data": 8}, {"data": 4, "model": 2}]


@pytest.fixture(scope="module")
def free(problem):
    return candidates(problem, MESHES)


def stored(one, name, size):
    return one.layout.parameters.spec((name,), (size,), one.mesh_shape)


@pytest.mark.parametrize(
    ("keep", "holds"),
    [
        ({"batch": "data"}, lambda one: True),
        ({"neurons": "model"}, lambda one: stored(one, "neurons", 8) == jax.P("model")),
        ({"neurons": None}, lambda one: "neurons" not in one.layout.parameters.logical_axes),
        ({"head_groups": "model"}, lambda one: "heads" in one.layout.parameters.logical_axes),
        ({"seq": "model"}, lambda one: "seq" in one.layout.between_blocks.logical_axes),
        ({"seq": None}, lambda one: one.layout.between_blocks is None),
        ({"embedding": "data"}, lambda one: stored(one, "embedding", 8) == jax.P("data")),
        ({"embedding": None}, lambda one: stored(one, "embedding", 2**16) == jax.P()),
    ],
)  # fmt: skip
def test_what_is_decided_is_kept_and_the_rest_stays_free(problem, free, keep, holds):
    found = candidates(problem, MESHES, keep=keep)
    assert all(holds(one) for one in found)
    if "embedding" not in keep:
        texts = list(map(repr, found))
        assert [text for text in map(repr, free) if text in texts] == texts
    assert len({one.layout.rematerialise for one in found}) == 3


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"blocks": "**/blok"},
            r"blocks='\*\*/blok': the TransformerLM has no such layers: .*'blok'",
        ),
        (
            {"blocks": (), "rematerialise": ["dots"]},
            r"rematerialise=\['dots'\]: it is done to blocks, and the TransformerLM has none",
        ),
    ],
)
def test_blocks_that_there_are_not_are_refused(problem, asked, message):
    with pytest.raises(RuleTypeError, match=message):
        candidates(problem, MESHES, **asked)
    assert candidates(problem, MESHES, blocks="**/transformer_block")


def test_the_batch_may_be_kept_over_the_mesh_axis_of_the_model_too(problem):
    found = candidates(problem, MESHES, keep={"batch": ("data", "model")})
    assert {one.layout.batch_rules.spec(("batch",), (8,), one.mesh_shape) for one in found} == {
        jax.P(("data", "model"))
    }


def test_on_a_mesh_of_other_names_the_batch_goes_where_it_is_kept(problem):
    found = candidates(problem, [{"x": 4, "y": 2}], keep={"batch": "y"})
    assert found
    assert {one.layout.batch_rules.spec(("batch",), (8,), one.mesh_shape) for one in found} == {
        jax.P("y")
    }
    whole = candidates(problem, [{"x": 4, "y": 2}], keep={"batch": None})
    assert {one.layout.batch_rules.rules for one in whole} == {()}


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ({"data": "batch"}, r"keep\['data'\]: .* come first\. Write keep={'batch': 'data'}\.$"),
        ({"neuron": "model"}, r"keep\['neuron'\]: the model has no such .* Did you mean 'neurons'"),
        (
            {"batch": "models"},
            r"keep\['batch'\]: no mesh has .* 'models'\. Did you mean 'model'",
        ),
        (
            {"experts": "model"},
            r"keep\['experts'\]: the model has no such logical axis\. There are",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused_with_what_was_meant(problem, keep, message):
    with pytest.raises(RuleTypeError, match=message):
        candidates(problem, MESHES, keep=keep)


def test_what_is_kept_over_one_mesh_axis_twice_leaves_a_reason_that_says_both(problem):
    found = candidates(problem, MESHES, keep={"neurons": "model", "embedding": "model"})
    assert not found
    assert any(
        reason.startswith("mesh axis 'model' is asked for twice, by logical axis 'neurons' and by")
        or reason.startswith("mesh axis 'model' is asked for twice, by logical axis 'embedding'")
        for reason in found.left_out
    )


def test_a_problem_without_a_batch_is_refused(problem):
    nameless = {"tokens": named_array(jax.ShapeDtypeStruct((8,), jnp.int32), ("rows",))}
    with pytest.raises(
        RuleTypeError, match="no input of the loss function has logical axis 'batch'"
    ):
        candidates(dataclasses.replace(problem, inputs=nameless), MESHES)


@pytest.mark.parametrize(
    "arrays",
    [
        {"up": {"embed": 64, "mlp": 512}, "out": {"embed": 64, "vocab": 1024}},
        {"up": {"in": 64, "wide": 512}, "down": {"wide": 512, "in": 64}},
    ],
)
def test_models_with_other_names_and_without_layers_are_split_too(arrays):
    problem = weights(**arrays)
    found = candidates(problem, [{"data": 4, "model": 2}])
    mesh = make_mesh({"data": 4, "model": 2}, abstract=True)
    wide = tuple(arrays["up"]), tuple(arrays["up"].values())
    specs = {
        one.layout.for_model(problem.model, mesh).parameters.spec(*wide, mesh) for one in found
    }
    assert {jax.P(None, "model"), jax.P("data", "model")} <= specs
    for one in found:
        assert (one.layout.blocks, one.layout.between_blocks, one.layout.rematerialise) == (
            (), None, None
        )  # fmt: skip
        assert not one.layout.reshard_after_forward


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        (6, [{"data": 6}, {"data": 3, "model": 2}, {"data": 2, "model": 3}, {"model": 6}]),
        (1, [{"data": 1}]),
        ("v5e:16x16*2", [{"data": 512}, {"replica": 2, "data": 256}, {"data": 256, "model": 2}]),
    ],
)
def test_meshes_are_all_factorisations_with_replicas_between_slices(name, shapes):
    hardware = Hardware.read(name) if isinstance(name, str) else name
    assert list(mesh_shapes(hardware)[: len(shapes)]) == shapes


def test_meshes_that_jax_cannot_lay_are_left_out_and_none_at_all_is_refused():
    shapes = mesh_shapes(Hardware.read("v6e:16x16"))
    assert shapes == ({"data": 256}, {"data": 16, "model": 16}, {"model": 256})
    with pytest.raises(MeshError, match="what a device can send there is not published"):
        mesh_shapes(Hardware.read("l4:2x1"))


def test_a_deep_model_on_many_devices_has_thousands():
    problem = llama(
        batch=32, num_kv_heads=8, query_head_multiplier=4, embedding_dim=4096, projection_dim=128,
        mlp_hidden_dim=14336, vocab_size=128256,
    )  # fmt: skip
    found = candidates(problem, mesh_shapes(Hardware.read("v5e:32")))
    assert 1000 < len(found) < 5000
    recommended = [
        one
        for one in found
        if one.mesh_shape == {"data": 8, "model": 4}
        and one.layout.between_blocks is not None
        and {"embedding", "neurons", "heads", "vocabulary"}
        == set(one.layout.parameters.logical_axes)
    ]
    assert recommended
    assert not list(itertools.filterfalse(lambda one: one.layout.blocks is None, found))
