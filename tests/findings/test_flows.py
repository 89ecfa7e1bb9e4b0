"""Mistakes in what flows through a model, each found, and what is meant as it is, not."""

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from penzai import pz

import penzai_shard as pzs
from penzai_shard.findings.lint import lint
from tests.findings.set_ups import check_fixes, keys, mesh, paste, state_of, struct

MESH, DATA, THIN = mesh(data=4, model=2), mesh(data=8), mesh(data=8, pipe=1)
BATCH, RULES = {"batch": "data"}, {"batch": "data", "neurons": "model"}
BY_EMBEDDING = BATCH | {"embedding": "data"}
BY_SEQ, SEQ = BATCH | {"seq": "model"}, {"seq": "data"}
TOKENS, LARGE = struct("int32", batch=16, seq=8), struct("int32", batch=2**14, seq=8)
BLOCK, LOOKUP, LINEAR = pz.nn.Residual, pz.nn.EmbeddingLookup, pz.nn.Linear


def language_model(key):
    def linear(name, inputs, outputs):
        return LINEAR.from_config(name, key, inputs, outputs)

    def block(i):
        up = linear(f"block_{i}/up", {"embedding": 16}, {"neurons": 32})
        down = linear(f"block_{i}/down", {"neurons": 32}, {"embedding": 16})
        return BLOCK(pz.nn.Sequential([up, pz.nn.Elementwise(jax.nn.gelu), down]))

    axes = {"embedding_axes": {"embedding": 16}}
    table = pz.nn.EmbeddingTable.from_config("table", key, vocab_size=64, **axes)
    head = linear("head", {"embedding": 16}, {"vocabulary": 64})
    return pz.nn.Sequential([LOOKUP(table), block(0), block(1), head])


MODEL = pzs.abstract_model(language_model, jax.random.key(0))
FEATURES = pz.nn.Sequential([MODEL.sublayers[1]])


def by_name(rules, on=MESH, **options):
    return pzs.ConstrainShardingByName(on, rules, **options)


def after_blocks(*layers, model=MODEL):
    for layer in layers:
        model = pzs.Recipe(pzs.insert_after(BLOCK, layer)).apply(model)
    return model


def around(kind, place=BLOCK, on=MESH, model=MODEL, **options):
    return pzs.Recipe(pzs.wrap(place, kind, mesh=on, **options)).apply(model)


def activations(inputs, outputs):
    return around(pzs.ConstrainActivations, inputs=inputs, outputs=outputs)


def per_device(rules, model=MODEL):
    options = {"parameter_rules": {}, "activation_rules": rules}
    return around(pzs.ShardMapped, on=DATA, model=model, **options)


def gathered(place, model=MODEL, **options):
    return around(pzs.GatherParameters, place, DATA, model, rules={}, **options)


def pinned(on, model=MODEL):
    return pzs.constrain_blocks((LOOKUP, BLOCK), on, BATCH).apply(model)


IN_REGION = per_device(
    BATCH, pzs.Recipe(pzs.insert_before("**/elementwise", by_name(BATCH, DATA))).apply(MODEL)
)
SHARDING = pzs.ConstrainSharding(NamedSharding(DATA, PartitionSpec("data")))
OPEN = NamedSharding(DATA, PartitionSpec("data", PartitionSpec.UNCONSTRAINED))
MISSPELT = activations(({"bach": "data"},), (BATCH,))
BOTH = BATCH | {"neurons": "data"}
TWO = {"batch": ("data", "model"), "neurons": "model"}
PLAIN = jax.ShapeDtypeStruct((8, 16), "float32")

IDLE, IN = "idle constraint", "sublayers/"
BEHIND = {"seq": "data", "batch": "data"}
ODD_FEATURES = struct(batch=6, embedding=16)
LENGTHS = BATCH | {"lengths": "model"}
ODD_SEQ = struct("int32", batch=16, seq=7)
# Kind, path, model, mesh, rules, batch.
MISTAKES = {
    "one of two misspelt": (IDLE, IN, after_blocks(by_name(BATCH | {"embeding": "model"})), MESH,
        BATCH, TOKENS),
    "indivisible": ("indivisible", IN, after_blocks(by_name(BY_SEQ)), MESH, RULES, ODD_SEQ),
    "taken": ("taken", IN, after_blocks(by_name(BATCH | SEQ)), MESH, RULES, TOKENS),
    "of nothing, one of two": (IDLE, IN, after_blocks(by_name(LENGTHS)), MESH, RULES, TOKENS),
    "other shape": ("other mesh", IN, after_blocks(by_name(BATCH, DATA)), MESH, RULES, TOKENS),
    "other sharding": ("other mesh", IN, after_blocks(SHARDING), MESH, RULES, TOKENS),
    "misspelt around": (IDLE, IN, MISSPELT, MESH, RULES, TOKENS),
    "no rule": ("whole batch", "batch", MODEL, MESH, {"neurons": "model"}, TOKENS),
    "placed whole": ("whole batch", "batch", MODEL, MESH, {"neurons": "model"},
        pzs.shard_batch(TOKENS, MESH, {})),
    "gathered, not computed": ("whole batch", "batch", MODEL, DATA, pzs.fully_sharded(min_size=1),
        TOKENS),
    "gathered over data": ("whole batch", "batch", MODEL, MESH,
        pzs.fully_sharded("data", min_size=1), TOKENS),
    "indivisible behind": ("indivisible", "batch", FEATURES, DATA, BY_EMBEDDING, ODD_FEATURES),
    "taken batch": ("taken", "batch", MODEL, DATA, BEHIND, TOKENS),
    "embedding, batch": ("conflict", "table", MODEL, DATA, BY_EMBEDDING, TOKENS),
    "neurons, batch": ("conflict", "up", MODEL, MESH, BOTH, TOKENS),
    "neurons, sequence": ("conflict", "down", after_blocks(by_name(BY_SEQ)), MESH, RULES, TOKENS),
    "neurons, two axes": ("conflict", "up", MODEL, MESH, TWO, TOKENS),
    "other input": ("uncallable", "sublayers/0", FEATURES, MESH, RULES,
        struct(batch=8, embeddings=16)),
    "no names": ("uncallable", "sublayers/0", FEATURES, MESH, RULES, PLAIN),
    "misspelt region": (IDLE, IN, per_device({"bach": "data"}), DATA, BATCH, TOKENS),
    "a list": ("uncallable", "sublayers/0", MODEL, DATA, BATCH, [TOKENS]),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_and_its_fix_works(name):
    kind, path, model, on, rules, batch = MISTAKES[name]
    subject = {"model_or_state": model, "mesh": on, "rules": rules, "batch": batch}
    report = check_fixes(subject)
    (finding,) = [one for one in report.findings if one.kind == kind]
    assert path in finding.path


def test_the_axis_that_was_probably_meant_is_the_fix():
    model = after_blocks(by_name({"bach": "data"}))
    (finding,) = lint(model, MESH, RULES, batch=TOKENS).findings
    assert finding.fix == "Write 'batch' in place of 'bach'."


HARMLESS = {
    "FSDP, pinned": (pinned(DATA), DATA, BY_EMBEDDING, LARGE),
    "FSDP, gathered": (gathered((LOOKUP, LINEAR), gathered(BLOCK)), DATA, BY_EMBEDDING, TOKENS),
    "tensor parallel": (MODEL, MESH, RULES, TOKENS),
    "pinned around": (activations((RULES,), (RULES,)), MESH, RULES, TOKENS),
    "sequence parallel": (activations((BY_SEQ, BATCH), (BATCH, BY_SEQ)), MESH, RULES, TOKENS),
    "gathers": (after_blocks(by_name(BY_SEQ), by_name(BATCH)), MESH, BATCH, TOKENS),
    "in a region": (IN_REGION, DATA, BATCH, TOKENS),
    "copies on purpose": (after_blocks(by_name({"batch": None}, DATA)), DATA, BATCH, TOKENS),
    "whole on purpose": (after_blocks(by_name(BY_SEQ, on_indivisible="replicate")), MESH, RULES,
        ODD_SEQ),
    "one device": (after_blocks(by_name(BATCH, THIN)), THIN, BATCH, TOKENS),
    "placed": (MODEL, DATA, {"neurons": None}, pzs.shard_batch(TOKENS, DATA, BATCH)),
    "compiled": (pzs.Jitted(pinned(MESH)), MESH, RULES, TOKENS),
    "side inputs": (MODEL, MESH, RULES, {"tokens": TOKENS, "targets": TOKENS}),
}  # fmt: skip


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_meant_is_not_found(name):
    model, on, rules, batch = HARMLESS[name]
    report = lint(model, on, rules, batch=batch)
    assert report.ok, report
    assert not report.notes


def test_a_set_up_that_fails_as_soon_as_it_is_traced_is_not_called_fine():
    model = per_device(BY_EMBEDDING, pinned(DATA))
    with pytest.raises(pzs.PlanError):
        jax.eval_shape(model, TOKENS)
    (finding,) = lint(model, DATA, BY_EMBEDDING, batch=TOKENS).findings
    assert (finding.kind, finding.path) == ("taken", "sublayers/2")


@pytest.mark.parametrize("batch", [5.0, "tokens", object(), [1, 2]])
def test_a_batch_without_arrays_is_a_finding(batch):
    (finding,) = lint(MODEL, MESH, RULES, batch=batch).findings
    assert finding.kind == "uncallable"


@pz.pytree_dataclass
class AsksForTypes(pz.nn.Layer):
    body: pz.nn.Layer

    def __call__(self, value, /, **side_inputs):
        assert type(self.body) is pz.nn.Identity
        return self.body(value)


def test_a_layer_that_cannot_be_followed_is_no_mistake():
    report = lint(AsksForTypes(pz.nn.Identity()), DATA, BATCH, batch=struct(batch=16))
    assert report.ok
    assert any("not followed" in note for note in report.notes)


def test_notes_say_what_was_not_looked_at():
    (note,) = lint(MODEL, DATA, BATCH).notes
    assert "no batch was given" in note
    (note,) = lint({"w": struct(neurons=8)}, DATA, {"neurons": "data"}, batch=TOKENS).notes
    assert "no layer" in note
    by_position = after_blocks(pzs.ConstrainSharding(OPEN))
    (note,) = lint(by_position, DATA, BY_EMBEDDING, batch=TOKENS).notes
    assert "by position" in note


def test_rules_for_what_only_flows_are_used():
    model = pz.nn.Sequential([pz.nn.RenameAxes(old="seq", new="kept"), pz.nn.Identity()])
    rules = {"batch": "data", "kept": "model"}
    assert ("unused", "rules") in keys(lint(model, MESH, rules))
    assert lint(model, MESH, rules, batch=TOKENS)


def test_tracing_leaves_variables_alone():
    model = pz.nn.Sequential([pz.nn.StochasticDropout(0.5)])
    stream = pz.RandomStream.from_base_key(jax.random.key(0))
    batch = {"x": pz.nx.ones({"batch": 16}), "random_stream": stream}
    assert lint(model, DATA, BATCH, batch=batch)
    assert int(stream.offset.value) == 0


def test_a_train_state_is_looked_at_as_its_model():
    (finding,) = lint(state_of(MODEL), DATA, BY_EMBEDDING, batch=TOKENS).findings
    assert (finding.kind, finding.paths[0]) == ("conflict", "params/table.embeddings")


def moved_bytes(model, on):
    structs = pzs.make_plan(model, on, BY_EMBEDDING).restore_structs()
    batch = pzs.shard_batch(struct("int32", batch=64, seq=8), on, BATCH)
    return pzs.collectives(jax.jit(lambda model, x: model(x)), structs, batch).wire_bytes


def test_the_fix_of_a_conflict_keeps_whole_activations_from_being_summed():
    on = pzs.make_mesh({"data": 8})
    subject = {"model_or_state": MODEL, "mesh": on, "rules": BY_EMBEDDING}
    (finding,) = lint(**subject, batch=TOKENS).findings
    after = paste(finding, subject)["model_or_state"]
    assert moved_bytes(MODEL, on) > 10 * moved_bytes(after, on) > 0
