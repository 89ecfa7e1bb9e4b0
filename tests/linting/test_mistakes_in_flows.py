"""Seeded mistakes in what flows through a model: each is found, and its fix works when pasted."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from penzai import pz

import penzai_shard as pzs
from tests.model_families import TRANSFORMERS, transformer

MESH = pzs.make_mesh({"data": 4, "model": 2}, abstract=True)
DATA = pzs.make_mesh({"data": 8}, abstract=True)
BATCH = {"batch": "data"}
RULES = {"batch": "data", "neurons": "model"}


def struct(dtype="int32", **sizes):
    return jax.eval_shape(lambda: pz.nx.zeros(sizes, dtype))


TOKENS = struct(batch=16, seq=8)


def language_model(key):
    def linear(name, inputs, outputs):
        return pz.nn.Linear.from_config(name, key, inputs, outputs)

    def block(i):
        up = linear(f"block_{i}/up", {"embedding": 16}, {"neurons": 32})
        down = linear(f"block_{i}/down", {"neurons": 32}, {"embedding": 16})
        return pz.nn.Residual(pz.nn.Sequential([up, pz.nn.Elementwise(jax.nn.gelu), down]))

    table = pz.nn.EmbeddingTable.from_config(
        "table", key, vocab_size=64, embedding_axes={"embedding": 16}
    )
    head = linear("head", {"embedding": 16}, {"vocabulary": 64})
    return pz.nn.Sequential([pz.nn.EmbeddingLookup(table), block(0), block(1), head])


MODEL = pzs.abstract_model(language_model, jax.random.key(0))


def by_name(rules, mesh=MESH, **options):
    return pzs.ConstrainShardingByName(mesh, rules, **options)


def after_blocks(*layers, model=MODEL):
    for layer in layers:
        model = pzs.Recipe(pzs.insert_after(pz.nn.Residual, layer)).apply(model)
    return model


def around_blocks(mesh=MESH, **tables):
    edit = pzs.wrap(pz.nn.Residual, pzs.ConstrainActivations, mesh=mesh, **tables)
    return pzs.Recipe(edit).apply(MODEL)


def kinds_of(report):
    return [finding.kind for finding in report.findings]


def pasted(finding, model, mesh, rules, batch):
    """What was linted, after the fix in the text of a finding was run."""
    names = vars(pzs) | {"pz": pz, "dataclasses": dataclasses, "jax": jax, "jnp": jnp}
    names |= {"model": model, "mesh": mesh, "rules": rules, "layout": rules, "batch": batch}
    exec(str(finding).rpartition(" Fix: ")[2], names)
    rules = names["layout" if isinstance(rules, pzs.Layout) else "rules"]
    return names["model"], names["mesh"], rules, names["batch"]


SPLIT = NamedSharding(DATA, PartitionSpec("data"))
THIN = pzs.make_mesh({"data": 8, "pipe": 1}, abstract=True)

MISTAKES = {
    "a misspelt logical axis": (
        after_blocks(by_name({"bach": "data"})), MESH, RULES, TOKENS,
        "idle constraint", "Did you mean 'batch'? [batch=16, seq=8, embedding=16] flows through",
    ),
    "a logical axis that nothing has": (
        after_blocks(by_name({"examples": "data"})), MESH, RULES, TOKENS,
        "idle constraint", "name none of the logical axes of what flows through it",
    ),
    "a misspelt logical axis beside a right one": (
        after_blocks(by_name({"batch": "data", "embeding": "model"})), MESH, RULES, TOKENS,
        "idle constraint", "'embeding' -> 'model' matches no logical axis of what flows through",
    ),
    "a length that does not divide": (
        after_blocks(by_name({"batch": "data", "seq": "model"})), MESH, RULES,
        struct(batch=16, seq=7), "indivisible", "logical axis 'seq' (7) does not divide",
    ),
    "one mesh axis for two logical axes": (
        after_blocks(by_name({"batch": "data", "seq": "data"})), MESH, RULES, TOKENS,
        "doubled", "mesh axis 'data' (4) is asked for twice",
    ),
    "a mesh axis of size 1": (
        after_blocks(by_name({"batch": "pipe"}, THIN)), THIN, BATCH, TOKENS,
        "idle constraint", "'pipe' alone, which has size 1 on the mesh (data=8, pipe=1)",
    ),
    "a mesh with other axes": (
        after_blocks(by_name({"batch": "x"}, AbstractMesh((8,), ("x",)))), MESH, RULES, TOKENS,
        "other mesh", "is for the mesh (x=8), and the model is laid out over the mesh (data=4",
    ),
    "a mesh of another shape": (
        after_blocks(by_name(BATCH, DATA)), MESH, RULES, TOKENS,
        "other mesh", "is for the mesh (data=8)",
    ),
    "a sharding on another mesh": (
        after_blocks(pzs.ConstrainSharding(SPLIT)), MESH, RULES, TOKENS,
        "other mesh", "this ConstrainSharding is for the mesh (data=8)",
    ),
    "the same constraint twice": (
        after_blocks(by_name(BATCH), by_name(BATCH)), MESH, RULES, TOKENS,
        "idle constraint", "which pins the same: it does nothing",
    ),
    "a constraint that undoes the one before": (
        after_blocks(by_name({"seq": "data"}), by_name(BATCH)), MESH, RULES, TOKENS,
        "contradiction", "and undoes what this constraint",
    ),
    "a misspelt logical axis around blocks": (
        around_blocks(inputs=({"bach": "data"},), outputs=(BATCH,)), MESH, RULES, TOKENS,
        "idle constraint", "Did you mean 'batch'?",
    ),
    "a constraint where each device runs by itself": (
        pzs.Recipe(pzs.wrap(pz.nn.Residual, pzs.ShardMapped, mesh=DATA, parameter_rules={},
                            activation_rules=BATCH)).apply(
            pzs.Recipe(pzs.insert_before("**/elementwise", by_name(BATCH, DATA))).apply(MODEL)),
        DATA, BATCH, TOKENS, "idle constraint", "runs per device along mesh axis 'data'",
    ),
    "a batch without a rule": (
        MODEL, MESH, {"neurons": "model"}, TOKENS,
        "whole batch", "each device computes the whole batch",
    ),
    "a batch that is placed whole": (
        MODEL, MESH, {"neurons": "model"}, pzs.shard_batch(TOKENS, MESH, {}),
        "whole batch", "is placed whole",
    ),
    "a batch that does not divide": (
        MODEL, MESH, RULES, struct(batch=6, seq=8),
        "indivisible", "logical axis 'batch' (6) does not divide over mesh axis 'data' (4)",
    ),
    "an embedding split over the mesh axis of the batch": (
        MODEL, DATA, {"batch": "data", "embedding": "data"}, TOKENS,
        "conflict", "the compiler may compute the whole batch everywhere",
    ),
    "neurons split over the mesh axis of the batch": (
        MODEL, MESH, {"batch": "data", "neurons": "data"}, TOKENS,
        "conflict", "and 'batch' of what flows into its layer",
    ),
    "a sequence split over the mesh axis of the neurons": (
        after_blocks(by_name({"batch": "data", "seq": "model"})), MESH, RULES, TOKENS,
        "conflict", "and 'seq' of what flows into its layer",
    ),
    "a batch split over the mesh axis of the neurons": (
        MODEL, MESH, {"batch": ("data", "model"), "neurons": "model"}, TOKENS,
        "conflict", "mesh axis 'model' (2) splits logical axis 'neurons' (32)",
    ),
    "an input with another logical axis": (
        pz.nn.Sequential([MODEL.sublayers[1]]), MESH, RULES,
        struct("float32", batch=8, embeddings=16), "uncallable", "gets [batch=8, embeddings=16]",
    ),
    "an input without names": (
        pz.nn.Sequential([MODEL.sublayers[1]]), MESH, RULES,
        jax.ShapeDtypeStruct((8, 16), "float32"), "uncallable", "has logical axes",
    ),
    "a misspelt logical axis of what runs per device": (
        pzs.Recipe(pzs.wrap(pz.nn.Residual, pzs.ShardMapped, mesh=DATA, parameter_rules={},
                            activation_rules={"bach": "data"})).apply(MODEL),
        DATA, BATCH, TOKENS, "idle constraint", "of what flows into this ShardMapped",
    ),
    "a misspelt logical axis of what is gathered": (
        pzs.Recipe(pzs.wrap(pz.nn.Residual, pzs.GatherParameters, mesh=MESH,
                            rules={"neuron": "model"})).apply(MODEL),
        MESH, RULES, TOKENS, "idle constraint", "of the parameters in this GatherParameters",
    ),
    "a list of inputs": (MODEL, DATA, BATCH, [TOKENS], "uncallable", "wrapping array"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found_and_its_fix_mends_it(mistake):
    *linted, kind, text = MISTAKES[mistake]
    model, mesh, rules, batch = linted
    report = pzs.lint(model, mesh, rules, batch=batch)
    assert kind in kinds_of(report), report
    finding = report.findings[kinds_of(report).index(kind)]
    assert text in str(finding)
    assert str(finding).startswith(finding.path)
    model, mesh, rules, batch = pasted(finding, *linted)
    after = pzs.lint(model, mesh, rules, batch=batch)
    before = {each.key for each in report.findings}
    assert {each.key for each in after.findings} <= before - {finding.key}, after


def with_pinned_batch(mesh, model=MODEL):
    places = (pz.nn.EmbeddingLookup, pz.nn.Residual)
    return pzs.constrain_blocks(places, mesh, BATCH).apply(model)


LARGE = struct(batch=2**14, seq=8)
BY_EMBEDDING = {"batch": "data", "embedding": "data"}
FSDP = pzs.data_parallel() | pzs.fully_sharded(min_size=1)
EVERYWHERE = NamedSharding(MESH, PartitionSpec("data", PartitionSpec.UNCONSTRAINED))

HARMLESS = {
    "data parallel": (MODEL, DATA, BATCH, TOKENS),
    "fully sharded by a preset": (MODEL, DATA, FSDP, TOKENS),
    "fully sharded by name, the batch pinned": (with_pinned_batch(DATA), DATA, BY_EMBEDDING, LARGE),
    "fully sharded by name, gathered": (
        pzs.Recipe(
            pzs.wrap(pz.nn.Residual, pzs.GatherParameters, mesh=DATA, rules={}),
            pzs.wrap((pz.nn.EmbeddingLookup, pz.nn.Linear), pzs.GatherParameters, mesh=DATA,
                     rules={}, outside=pz.nn.Residual),
        ).apply(MODEL), DATA, BY_EMBEDDING, TOKENS,
    ),
    "fully sharded by name, per device": (
        pzs.manual_fsdp((pz.nn.EmbeddingLookup, pz.nn.Residual), DATA, BY_EMBEDDING).apply(
            with_pinned_batch(DATA)), DATA, BY_EMBEDDING, TOKENS,
    ),
    "tensor parallel": (MODEL, MESH, RULES, TOKENS),
    "tensor parallel, pinned around blocks": (
        around_blocks(inputs=(RULES,), outputs=(RULES,)), MESH, RULES, TOKENS,
    ),
    "sequences split between blocks, and gathered before them": (
        around_blocks(inputs=({"batch": "data", "seq": "model"}, BATCH),
                      outputs=(BATCH, {"batch": "data", "seq": "model"})), MESH, RULES, TOKENS,
    ),
    "a constraint that adds to the one before": (
        after_blocks(by_name({"batch": "data", "seq": "model"}), by_name(BATCH)),
        MESH, BATCH, TOKENS,
    ),
    "a constraint that leaves dimensions to the compiler": (
        after_blocks(pzs.ConstrainSharding(EVERYWHERE)), MESH, RULES, TOKENS,
    ),
    "copies that were asked for": (
        after_blocks(by_name({"batch": None}, DATA)), DATA, BATCH, TOKENS,
    ),
    "what does not divide left whole on purpose": (
        after_blocks(by_name({"batch": "data", "seq": "model"}, on_indivisible="replicate")),
        MESH, RULES, struct(batch=16, seq=7),
    ),
    "one device": (
        after_blocks(by_name(BATCH, THIN)), THIN, BATCH, TOKENS,
    ),
    "a batch that is placed": (
        MODEL, DATA, {"neurons": None}, pzs.shard_batch(TOKENS, DATA, BATCH),
    ),
    "a compiled model": (pzs.Jitted(with_pinned_batch(MESH)), MESH, RULES, TOKENS),
    "side inputs": (MODEL, MESH, RULES, {"tokens": TOKENS, "targets": TOKENS}),
}  # fmt: skip


@pytest.mark.parametrize("model", HARMLESS)
def test_what_is_meant_is_not_found(model):
    model, mesh, rules, batch = HARMLESS[model]
    report = pzs.lint(model, mesh, rules, batch=batch)
    assert report.ok, report
    assert not report.notes


PRESETS = {
    "data_parallel": (DATA, {}),
    "zero1": (DATA, {"min_size": 1}),
    "fully_sharded": (DATA, {"min_size": 1}),
    "tensor_parallel": (MESH, {}),
    "sequence_parallel": (MESH, {"vocabulary": "model"}),
    "two_dimensional": (MESH, {"min_size": 1, "rematerialise": "dots"}),
    "hybrid": (pzs.make_mesh({"replica": 2, "data": 4}, abstract=True), {"min_size": 1}),
}


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_nothing_is_found_in_models_of_penzai_under_presets(family):
    model = pzs.abstract_model(lambda key: transformer(family, key), jax.random.key(0))
    # Each preset with some families, and before and after the model is edited.
    turn = TRANSFORMERS.index(family)
    for name in list(PRESETS)[turn % 2 :: 2]:
        mesh, options = PRESETS[name]
        layout = getattr(pzs.Layout, name)(**options)
        edited = layout.recipe(model, mesh).apply(model) if turn % 4 < 2 else model
        report = pzs.lint(edited, mesh, layout, batch=struct(batch=16, seq=8))
        assert report.ok, (name, report)
        assert not report.notes


@pytest.mark.parametrize("batch", [5.0, "tokens", object(), [1, 2]])
def test_a_batch_without_arrays_is_a_finding(batch):
    (finding,) = pzs.lint(MODEL, MESH, RULES, batch=batch).findings
    assert finding.kind == "uncallable"
    assert "No array of the batch has logical axes" in str(finding)


def test_without_a_batch_the_report_says_what_was_not_looked_at():
    (note,) = pzs.lint(MODEL, DATA, BATCH).notes
    assert "what flows through the model was not looked at: no batch was given" in note
    (note,) = pzs.lint({"w": struct(neurons=8)}, DATA, {"neurons": "data"}, batch=TOKENS).notes
    assert "dict is not a layer that can be called with the batch" in note


def test_a_batch_that_the_rules_keep_whole_is_not_found():
    rules = {"batch": None, "neurons": "model"}
    assert "whole batch" not in kinds_of(pzs.lint(MODEL, MESH, rules, batch=TOKENS))


def test_a_rule_for_what_only_flows_is_used():
    model = pz.nn.Sequential([pz.nn.RenameAxes(old="seq", new="positions_kept"), pz.nn.Identity()])
    rules = {"batch": "data", "positions_kept": "model"}
    assert "unused" in kinds_of(pzs.lint(model, MESH, rules))
    assert pzs.lint(model, MESH, rules, batch=TOKENS).ok


def test_what_is_pinned_where_each_device_runs_by_itself_pins_nothing():
    model, mesh, *_ = MISTAKES["a constraint where each device runs by itself"]
    report = pzs.lint(model, mesh, BY_EMBEDDING, batch=TOKENS)
    assert sorted(kinds_of(report)) == ["conflict", "idle constraint"]


def test_tracing_leaves_the_variables_of_side_inputs_alone():
    model = pz.nn.Sequential([pz.nn.StochasticDropout(0.5)])
    stream = pz.RandomStream.from_base_key(jax.random.key(0))
    batch = pz.nx.ones({"batch": 16}), {"random_stream": stream}
    report = pzs.lint(model, DATA, BATCH, batch=batch)
    assert report.ok, report
    assert int(stream.offset.value) == 0


def test_a_layer_that_sums_over_devices_by_itself_can_be_called():
    class Total(pz.nn.Layer):
        def __call__(self, value, /, **side_inputs):
            return pz.nx.nmap(lambda array: jax.lax.psum(array, "data"))(value)

    layer = pz.pytree_dataclass(Total)()
    model = pz.nn.Sequential([pzs.ShardMapped(layer, of_devices(DATA), {}, {}, per_device=True)])
    report = pzs.lint(model, DATA, BATCH, batch=struct("float32", batch=16))
    assert report.ok, report


def test_a_train_state_is_looked_at_as_its_model_is():
    optimizer = optax.sgd(0.1)
    state = pzs.TrainState.initial_state(MODEL, optimizer, jax.random.key(0))
    report = pzs.lint(state, DATA, BY_EMBEDDING, batch=TOKENS)
    (finding,) = report.findings
    assert finding.kind == "conflict"
    assert finding.paths[0] == "params/table.embeddings"
    assert finding.fix == "rules = {'batch': 'data', 'embedding': None}"


def moved(model, rules, mesh, batch):
    """What a device sends in one call of a model, as compiled, in bytes."""
    structs = pzs.make_plan(model, mesh, rules).restore_structs()
    batch = pzs.shard_batch(batch, mesh, {"batch": rules["batch"]})
    call = jax.jit(lambda model, batch: model(batch))
    return pzs.collectives(call, structs, batch).wire_bytes


def of_devices(mesh):
    return pzs.make_mesh(dict(mesh.shape))


@pytest.mark.parametrize(
    ("rules", "between"),
    [
        ({"batch": "data", "neurons": "data"}, None),
        (RULES, {"batch": "data", "seq": "model"}),
        ({"batch": ("data", "model"), "neurons": "model"}, None),
    ],
)
def test_the_compiler_moves_as_many_bytes_of_parameters_as_a_conflict_says(rules, between):
    mesh = of_devices(MESH)
    places = (pz.nn.EmbeddingLookup, pz.nn.Residual)
    model = MODEL
    if between is not None:
        model = pzs.constrain_blocks(places, mesh, between).apply(MODEL)
    (finding,) = pzs.lint(model, mesh, rules, batch=TOKENS).findings
    assert moved(model, rules, mesh, TOKENS) == finding.figures["moved_parameter_bytes"] > 0


def test_pinning_the_batch_keeps_whole_activations_from_being_summed():
    mesh = of_devices(DATA)
    (finding,) = pzs.lint(MODEL, mesh, BY_EMBEDDING, batch=struct(batch=64, seq=8)).findings
    assert "insert" in finding.fix or "constrain_blocks" in finding.fix
    model, *_ = pasted(finding, MODEL, mesh, BY_EMBEDDING, None)
    batch = struct(batch=64, seq=8)
    before, after = (moved(each, BY_EMBEDDING, mesh, batch) for each in (MODEL, model))
    assert before > 10 * after
    # All that is left is the gathering of parameters.
    assert after <= 1.2 * finding.figures["moved_parameter_bytes"]


def test_a_preset_is_found_only_where_a_lookup_would_sum_large_activations():
    mesh = of_devices(DATA)
    wide = pz.nn.EmbeddingTable.from_config("wide", jax.random.key(0), 8, {"embedding": 64})
    model = pzs.abstract_model(lambda: pz.nn.Sequential([pz.nn.EmbeddingLookup(wide)]))
    assert kinds_of(pzs.lint(model, mesh, FSDP, batch=LARGE)) == ["conflict"]
    assert pzs.lint(model, mesh, FSDP, batch=TOKENS).ok
    assert pzs.lint(MODEL, mesh, FSDP, batch=LARGE).ok
    rules = {"batch": "data", "vocabulary": "data", "neurons": "data"}
    pinned = with_pinned_batch(mesh)
    assert moved(MODEL, rules, mesh, TOKENS) == moved(pinned, rules, mesh, TOKENS)


def test_a_contradiction_moves_as_many_bytes_as_it_says():
    mesh = of_devices(DATA)
    layers = [by_name(BATCH, mesh), by_name({"seq": "data"}, mesh)]
    model = pz.nn.Sequential(layers)
    batch = struct("float32", batch=16, seq=8)
    (finding,) = pzs.lint(model, mesh, BATCH, batch=batch).findings
    assert moved(model, BATCH, mesh, batch) == finding.figures["moved_bytes"] > 0


@pytest.mark.parametrize("on_indivisible", ["pad", "replicate"])
def test_of_a_batch_only_what_counts_examples_must_divide_where_parameters_need_not(on_indivisible):
    def linted(examples):
        batch = struct("float32", batch=examples, embedding=5)
        return pzs.lint(model, MESH, rules, batch=batch, on_indivisible=on_indivisible)

    affine = functools.partial(pz.nn.Affine.from_config, input_axes={"embedding": 5})
    model = pzs.abstract_model(affine, "mlp", jax.random.key(0), output_axes={"neurons": 6})
    rules = {"batch": "data", "embedding": "model"}
    assert "indivisible" not in kinds_of(linted(8))
    (finding,) = (each for each in linted(6).findings if each.kind == "indivisible")
    assert str(finding).startswith(
        "batch: [batch=6, embedding=5]: logical axis 'batch' (6) does not divide over mesh axis "
        "'data' (4), asked by rule 'batch' -> 'data'. Pad it to 8, or map 'batch' to None. Fix: "
    )
