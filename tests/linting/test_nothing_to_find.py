"""Set-ups with nothing wrong: the presets over every family, and what users mean as it is."""

import collections
import functools

import jax
import pytest
from penzai import pz
from penzai.models.transformer.model_parts import TransformerBlock

import penzai_shard as pzs
from tests import model_families
from tests.linting.seeded_mistakes import (
    D4M2,
    D8,
    LARGE,
    ODD,
    SMALL,
    mesh,
    plain,
    small_transformer,
    state_of,
    weights,
)

# Sizes of which every device holds more than 1 MiB of the largest parameters.
WIDE = {
    "embedding_dim": 1024,
    "projection_dim": 64,
    "mlp_hidden_dim": 4096,
    "vocab_size": 8192,
}
HEADS = {"num_kv_heads": 8, "query_head_multiplier": 4}
PRESETS = {
    "data_parallel": (mesh(data=4), pzs.data_parallel()),
    "fully_sharded": (mesh(data=4), pzs.fully_sharded()),
    "data_parallel | fully_sharded": (mesh(data=4), pzs.data_parallel() | pzs.fully_sharded()),
    "tensor_parallel": (mesh(model=2), pzs.tensor_parallel()),
    "data_parallel | tensor_parallel": (D4M2, pzs.data_parallel() | pzs.tensor_parallel()),
    "all three": (D4M2, pzs.data_parallel() | pzs.tensor_parallel() | pzs.fully_sharded()),
    "two data axes": (
        mesh(replica=2, data=4),
        pzs.data_parallel(("replica", "data")) | pzs.fully_sharded(),
    ),
    "Layout.data_parallel": (mesh(data=4), pzs.Layout.data_parallel()),
    "Layout.zero1": (mesh(data=4), pzs.Layout.zero1()),
    "Layout.fully_sharded": (mesh(data=4), pzs.Layout.fully_sharded()),
    "Layout.fully_sharded again": (
        mesh(data=4),
        pzs.Layout.fully_sharded(reshard_after_forward=True),
    ),
    "Layout.tensor_parallel": (D4M2, pzs.Layout.tensor_parallel()),
    "Layout.tensor_parallel of the vocabulary": (
        D4M2,
        pzs.Layout.tensor_parallel(vocabulary="model"),
    ),
    "Layout.sequence_parallel": (D4M2, pzs.Layout.sequence_parallel()),
    "Layout.two_dimensional": (D4M2, pzs.Layout.two_dimensional()),
    "Layout.hybrid": (mesh(replica=2, data=4), pzs.Layout.hybrid()),
}


@functools.cache
def wide_transformer(family):
    heads = {"num_attention_heads": 32} if family == "gpt_neox" else HEADS
    return small_transformer(family, **WIDE, **heads)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_presets_have_no_findings_over_any_family(preset):
    on, rules = PRESETS[preset]
    for family in model_families.TRANSFORMERS:
        assert not pzs.lint(wide_transformer(family), on, rules).findings, family
    # Here nothing is as large as the presets split by default.
    assert not pzs.lint(small_transformer(), on, rules).findings


@pytest.mark.parametrize("preset", ["fully_sharded", "Layout.two_dimensional"])
def test_the_presets_have_no_findings_where_a_batch_is_given(preset):
    tokens = jax.ShapeDtypeStruct((8, 8), "int32")
    batch = pz.nx.NamedArray(collections.OrderedDict(batch=8, seq=8), tokens)
    on, rules = PRESETS[preset]
    assert not pzs.lint(small_transformer(), on, rules, batch=batch).findings


def test_the_wide_families_have_waste_to_be_found():
    """Without this the test above would show nothing."""
    for family in model_families.TRANSFORMERS:
        report = pzs.lint(wide_transformer(family), D4M2, {"batch": "data", "neurons": "model"})
        assert {finding.kind for finding in report.findings} == {"under-sharded"}


@pytest.mark.parametrize("preset", ["data_parallel", "zero1", "fully_sharded", "two_dimensional"])
def test_the_presets_have_no_findings_over_train_states(preset):
    on = D4M2 if preset == "two_dimensional" else mesh(data=4)
    layout = getattr(pzs.Layout, preset)(names={"heads": None} if on is D4M2 else {})
    assert pzs.lint(state_of(LARGE), on, layout).ok


@pytest.mark.parametrize(
    "preset", ["fully_sharded", "tensor_parallel", "sequence_parallel", "two_dimensional"]
)
def test_a_model_with_the_edits_of_a_preset_has_no_findings(preset):
    layout = getattr(pzs.Layout, preset)()
    on = mesh(data=2) if preset == "fully_sharded" else mesh(data=2, model=2)
    model = small_transformer()
    assert pzs.lint(layout.recipe(model, on).apply(model), on, layout).ok


def constrained():
    layer = pzs.ConstrainShardingByName(D4M2, {"batch": "data", "rows": "model"})
    return pz.nn.Sequential([pz.nn.Identity(), layer])


def in_blocks():
    layer = pzs.ConstrainShardingByName(mesh(data=2), {"batch": "data"})
    recipe = pzs.Recipe(pzs.insert_after(TransformerBlock, layer))
    return recipe.apply(small_transformer())


HARMLESS = {
    "every dimension said to be whole": (
        LARGE,
        D4M2,
        {"batch": "data", "vocabulary": "model", "embedding": None, "neurons": None},
    ),
    "data parallel by hand": (LARGE, D8, {"batch": "data"}),
    "megatron by hand": (
        LARGE,
        D4M2,
        {"batch": "data", "neurons": "model", "vocabulary": "model"},
    ),
    "FSDP by hand": (LARGE, D8, {"batch": "data", "embedding": "data"}),
    "FSDP over two mesh axes": (LARGE, D4M2, {"embedding": ("data", "model")}),
    "one dimension each": (
        LARGE,
        D4M2,
        {"embedding": "data", "neurons": "model", "vocabulary": "model"},
    ),
    "ordered pairs, the last for what is left": (
        ODD,
        D4M2,
        [("neurons", "data"), ("neurons", "model"), ("neurons", None), ("embedding", "data")],
    ),
    "a mesh axis of size 1": (SMALL, mesh(data=8, model=1), {"embedding": "data"}),
    "a mesh of one device": (LARGE, mesh(data=1), {"embedding": "data"}),
    "sequence split over a mesh axis of its own": (
        SMALL,
        mesh(data=2, context=4),
        {"batch": "data", "seq": "context"},
    ),
    "axes that only activations have": (
        SMALL,
        D8,
        {"embedding": "data", "kv_seq": None, "positions": None, "batch": "data"},
    ),
    "names as those of the mesh": (weights(w={"data": 8, "out": 4}), D8, None),
    "small arrays": (SMALL, D8, pzs.fully_sharded()),
    "no names, split by size": (
        plain(w=(512, 1024), b=(8,)),
        D8,
        pzs.fully_sharded(unnamed="largest"),
    ),
    "scalars": ({"scale": jax.ShapeDtypeStruct((), "float32")}, D8, {"batch": "data"}),
    "an axis that only a constraint layer splits": (constrained, D4M2, {}),
    "a batch that a constraint layer alone splits": (
        lambda: {**LARGE, "pin": pzs.ConstrainShardingByName(D4M2, {"batch": "data"})},
        D4M2,
        {"neurons": "model", "vocabulary": "model"},
    ),
    "constraints in blocks": (in_blocks, mesh(data=2), pzs.Layout.data_parallel()),
    "a train state by one table": (
        lambda: state_of(SMALL),
        D4M2,
        {"embedding": "data", "neurons": "model"},
    ),
    "a state of which the optimizer's part alone is split": (
        lambda: state_of(LARGE),
        D8,
        pzs.Layout(
            parameters={},
            compute={"batch": "data"},
            optimizer=pzs.fully_sharded(min_size=1),
        ),
    ),
    "an expert axis": (
        weights(up={"experts": 8, "embedding": 16}),
        mesh(data=2, expert=4),
        pzs.data_parallel() | pzs.tensor_parallel("expert", axes=("experts",)),
    ),
    "a batch with a name of its own": (
        SMALL,
        D8,
        pzs.data_parallel(batch_axis="examples"),
    ),
    "an Explicit mesh": (
        LARGE,
        jax.sharding.AbstractMesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,)),
        {"embedding": "data"},
    ),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_set_up_has_no_findings(name):
    model, on, rules = HARMLESS[name]
    report = pzs.lint(model() if callable(model) else model, on, rules)
    assert not report.findings
    assert report
    assert str(report).startswith("nothing found: ")


def test_a_rule_for_the_batch_alone_is_used_if_the_batch_is_given():
    batch = weights(x={"rows": 8, "embedding": 8})
    rules = {"rows": "data", "neurons": "model"}
    (finding,) = pzs.lint(SMALL, D4M2, rules).findings[:1]
    assert (finding.kind, finding.about) == ("unused", "'rows'")
    assert pzs.lint(SMALL, D4M2, rules, batch=batch).ok


def test_a_rule_for_arrays_without_names_is_mended_by_naming_them():
    weights = {"w": jax.ShapeDtypeStruct((8, 8), "float32")}
    unnamed, unused = pzs.lint(weights, D8, {"embedding": "data"}).findings
    assert (unnamed.kind, unused.kind) == ("unnamed", "unused")
    assert "Give names to the arrays, name_axes(tree, {...}), or leave it out" in unused.problem


def test_rules_that_are_empty_say_that_copies_are_wanted():
    (finding,) = pzs.lint(LARGE, D8, {}).findings
    assert finding.kind == "idle mesh axis"
    assert pzs.lint(LARGE, D8, pzs.Layout(parameters={}, compute={"batch": "data"})).ok


def test_nothing_is_wasteful_that_is_smaller_than_was_said():
    rules = {"batch": "data", "neurons": "model"}
    wasted = 4096 * 512 * 4
    assert not pzs.lint(LARGE, D4M2, rules, min_bytes=wasted).ok
    assert pzs.lint(LARGE, D4M2, rules, min_bytes=wasted + 1).ok


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"min_bytes": "1MiB"}, "min_bytes is a number of bytes, for instance min_bytes=2\\*\\*20"),
        ({"on_unnamed": "ignore"}, "on_unnamed must be 'error', 'replicate' or 'infer'"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options, said):
    with pytest.raises(pzs.errors.RuleTypeError, match=said):
        pzs.lint(SMALL, D8, {"embedding": "data"}, **options)


def test_a_mesh_and_a_model_have_to_be_given():
    with pytest.raises(pzs.errors.RuleTypeError, match="a mesh is needed, not dict"):
        pzs.lint(SMALL, {"data": 8}, {"embedding": "data"})
    with pytest.raises(pzs.errors.RuleTypeError, match="lint takes a model or another tree"):
        pzs.lint(small_transformer, D8, {"embedding": "data"})
