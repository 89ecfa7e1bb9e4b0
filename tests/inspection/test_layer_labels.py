"""Layers are called by the names of the parameters in them, as plans call those."""

import jax
from penzai import pz

from penzai_shard import Checkpointed, Recipe, abstract_model, wrap
from penzai_shard.inspection.steps.layer_labels import layer_labels
from penzai_shard.inspection.steps.layer_scopes import LayerScopes
from penzai_shard.surgery.tree_nodes import is_layer, keys_text, nodes_of
from tests.model_families import transformer


def model():
    return abstract_model(transformer, "llama", jax.random.key(0), num_decoder_blocks=2)


def labels_of(model, layer_type):
    labels = layer_labels(model)
    return [
        labels[keys_text(keys)] for keys, node in nodes_of(model) if isinstance(node, layer_type)
    ]


def test_a_layer_is_called_by_the_parameters_in_it_and_others_by_what_is_around_them():
    labels = layer_labels(model())
    layers = {keys_text(keys): node for keys, node in nodes_of(model()) if is_layer(node)}
    assert labels.keys() == layers.keys()
    assert labels[""] == "transformer"
    in_blocks = [f"block_{i}/{name}" for i in range(2) for name in LINEAR_IN_BLOCK]
    assert labels_of(model(), pz.nn.Linear) == [
        f"transformer/{name}" for name in [*in_blocks, "final_norm/scale", "lm_head"]
    ]
    assert labels_of(model(), pz.nn.Softmax) == [
        f"transformer/block_{i}/attention/sequential/softmax" for i in range(2)
    ]


LINEAR_IN_BLOCK = (
    "pre_attention_norm/scale",
    "attention/query",
    "attention/key",
    "attention/value",
    "attention/output",
    "pre_ffw_norm/scale",
    "mlp/gating_linear",
    "mlp/value_linear",
    "mlp/out_linear",
)


def linear(name):
    return pz.nn.Linear.from_config(name, jax.random.key(0), {"a": 2}, {"a_": 2})


def test_layers_that_share_parameters_elsewhere_have_names_of_their_own():
    tied = linear("embedder")
    found = layer_labels(pz.nn.Sequential([tied, linear("up"), tied]))
    assert found == {
        "": "sequential",
        "sublayers/0": "embedder",
        "sublayers/1": "up",
        "sublayers/2": "sequential/linear",
    }


def test_without_named_parameters_there_are_no_labels():
    assert layer_labels(pz.nn.Sequential([pz.nn.Identity()])) == {}


def test_marks_know_the_labels_of_their_layers_however_the_model_is_edited():
    edited = Recipe(wrap(pz.nn.Linear, Checkpointed)).apply(model())
    bare, scopes = LayerScopes(), LayerScopes()
    bare.marked(model())
    scopes.marked(edited)
    assert scopes.labels == bare.labels
    assert set(scopes.labels) == set(scopes.paths)
    both = LayerScopes()
    both.marked(model(), "teacher")
    assert both.labels["teacher/body/sublayers/0"] == "teacher/transformer/embedder"
