"""Seeded mistakes in what flows through a model: each is found, and its fix works when pasted."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from penzai import pz

import penzai_shard as pzs

MESH = AbstractMesh((4, 2), ("data", "model"))
DATA = AbstractMesh((8,), ("data",))
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
THIN = AbstractMesh((8, 1), ("data", "pipe"))

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
