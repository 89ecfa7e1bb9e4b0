"""Configurations: which attributes are accepted, which refused by name, and the published ones."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penzai_shard import param_dict
from penzai_shard.errors import (
    CheckpointDamagedError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
)
from penzai_shard.pretrained import model_configs
from penzai_shard.pretrained.families import model_of_config
from penzai_shard.pretrained.model_configs import published_names, read_config
from tests.pretrained.models import CONFIGS

OWN_MODEL, COPY, LEAVE_OUT, TWO = "into=", "Copy it", "Leave it out", "Leave the wrong one out"
ROPE, FULL = "rope_parameters", "rope_parameters/full_attention"
SLIDING, LINEAR = "rope_parameters/sliding_attention", {"rope_type": "linear"}
# The small model, what is changed in it, the attribute that is refused, and the fix.
REFUSED = [
    ("llama", {"attention_bias": True}, "attention_bias", OWN_MODEL),
    ("llama", {"mlp_bias": True}, "mlp_bias", OWN_MODEL),
    ("llama", {"hidden_act": "gelu"}, "hidden_act", OWN_MODEL),
    ("llama", {"attention_dropout": 0.1}, "attention_dropout", OWN_MODEL),
    ("llama", {"sliding_window": 5}, "sliding_window", OWN_MODEL),
    ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings", OWN_MODEL),
    ("llama", {"rope_interleaved": True}, "rope_interleaved", OWN_MODEL),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor", OWN_MODEL),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads", COPY),
    ("llama", {"num_key_value_heads": 0}, "num_key_value_heads", COPY),
    ("llama", {"hidden_size": None}, "hidden_size", COPY),
    ("llama", {"hidden_size": "16"}, "hidden_size", COPY),
    ("llama", {"vocab_size": True}, "vocab_size", COPY),
    ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers", COPY),
    ("llama", {"hidden_size": 34}, "head_dim", COPY),
    ("llama", {"hidden_size": 36}, "head_dim", COPY),
    ("llama", {"rms_norm_eps": -1.0}, "rms_norm_eps", COPY),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config", LEAVE_OUT),
    ("llama", {ROPE: {"rope_type": "yarn"}}, f"{ROPE}/rope_type", OWN_MODEL),
    ("llama", {ROPE: {"rope_type": "llama3", "factor": 8.0}}, "rope_type", ROPE),
    ("llama", {ROPE: {"factor": 8.0}}, "rope_type", ROPE),
    ("gpt_neox", {"rope_scaling": {"type": "linear"}}, "rope_scaling/type", OWN_MODEL),
    ("gpt_neox", {"rope_scaling": {"factor": 2.0}}, "rope_scaling/factor", LEAVE_OUT),
    ("llama", {ROPE: {"rope_theta": 1e4, "mscale": 2.0}}, f"{ROPE}/mscale", LEAVE_OUT),
    ("llama", {ROPE: [1]}, ROPE, LEAVE_OUT),
    ("llama", {"rope_theta": 5e5}, f"{ROPE}/rope_theta", TWO),
    ("llama", {ROPE: {"rope_theta": "10000"}}, f"{ROPE}/rope_theta", COPY),
    ("mistral", {"sliding_window": 0}, "sliding_window", COPY),
    ("mistral", {"num_key_value_heads": None}, "num_key_value_heads", COPY),
    ("gpt_neox", {"use_parallel_residual": False}, "use_parallel_residual", OWN_MODEL),
    ("gpt_neox", {"attention_bias": False}, "attention_bias", OWN_MODEL),
    ("gpt_neox", {"hidden_act": "tanh"}, "hidden_act", OWN_MODEL),
    ("gpt_neox", {"rotary_pct": 0.125}, "head_dim", COPY),
    ("gpt_neox", {"layer_norm_eps": "small"}, "layer_norm_eps", COPY),
    ("gemma", {"tie_word_embeddings": False}, "tie_word_embeddings", OWN_MODEL),
    ("gemma", {"hidden_act": "gelu_new"}, "hidden_act", OWN_MODEL),
    ("gemma", {"head_dim": 7}, "head_dim", COPY),
    ("gemma2", {"layer_types": ["full_attention"]}, "layer_types", COPY),
    ("gemma2", {"layer_types": ["chunked_attention"] * 2}, "layer_types", COPY),
    ("gemma2", {"layer_types": [["full_attention"]] * 2}, "layer_types", COPY),
    ("gemma2", {"layer_types": []}, "layer_types", COPY),
    ("gemma2", {"layer_types": "full_attention"}, "layer_types", COPY),
    ("gemma2", {"attn_logit_softcapping": -50.0}, "attn_logit_softcapping", COPY),
    ("gemma2", {"sliding_window_size": 5}, "sliding_window_size", TWO),
    ("gemma2", {"sliding_window": None}, "sliding_window", COPY),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention", OWN_MODEL),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar", COPY),
    ("gemma3", {ROPE: {"full_attention": {"rope_type": "yarn"}}}, f"{FULL}/rope_type", OWN_MODEL),
    ("gemma3", {ROPE: {"full_attention": {"factor": 8.0}}}, "rope_type", ROPE),
    ("gemma3", {ROPE: {"sliding_attention": LINEAR}}, f"{SLIDING}/rope_type", OWN_MODEL),
    ("gemma3", {ROPE: {"full_attention": LINEAR | {"factor": 0}}}, f"{FULL}/factor", COPY),
]
ACCEPTED = [
    ("llama", {"_name_or_path": "a/b", "transformers_version": "4.31.0", "use_cache": False}),
    ("llama", {"dtype": None, "torch_dtype": "float16"}),
    ("llama", {"max_position_embeddings": 131072, "pretraining_tp": 2}),
    ("llama", {"bos_token_id": 128000, "eos_token_id": [1, 2], "pad_token_id": 0}),
    ("llama", {"head_dim": None}),
    ("llama", {"head_dim": 16}),
    ("llama", {ROPE: None, "rope_scaling": None, "rope_theta": 5e5}),
    ("llama", {ROPE: None, "rope_scaling": {"type": "default"}}),
    ("llama", {ROPE: None}),
    ("llama", {ROPE: {"rope_type": "linear", "factor": 4.0}}),
    ("llama", {"rope_theta": 10000}),
    ("llama", {"partial_rotary_factor": 1.0}),
    ("llama", {"num_key_value_heads": None}),
    ("llama", {"architectures": None}),
    ("llama", {"model_type": None}),
    ("llama", {"attention_bias": None, "mlp_bias": None}),
    ("llama", {"max_sequence_length": 2048, "rope_interleaved": False, "is_llama_config": True}),
    ("llama", {"quantization_config": None}),
    ("mistral", {"sliding_window": None, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("gpt_neox", {"hidden_act": "gelu_new", "classifier_dropout": 0.5}),
    ("gpt_neox", {"rotary_pct": 0.5, "rotary_emb_base": 10000}),
    ("gpt_neox", {"rotary_pct": None, ROPE: {"partial_rotary_factor": 0.25}}),
    ("gpt_neox", {"hidden_act": "gelu_fast", "hidden_dropout_prob": 0, "attention_dropout": 0}),
    ("gemma", {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}),
    ("gemma2", {"sliding_window_size": 3}),
    ("gemma2", {"layer_types": None, "attn_logit_softcapping": None, "cache_implementation": "x"}),
    ("gemma3", {"layer_types": None, "sliding_window_pattern": 2}),
    ("gemma3_images", {"vision_config": None, "boi_token_index": 1, "tie_word_embeddings": True}),
    ("gemma3", {"num_attention_heads": None, "vocab_size": None}),
]


@pytest.mark.parametrize(("name", "changes", "path", "fix"), REFUSED)
def test_read_config_refuses_by_name_what_penzais_model_does_not_compute(name, changes, path, fix):
    with pytest.raises(CheckpointMismatchError) as caught:
        read_config(CONFIGS[name] | changes)
    (problem,) = caught.value.problems
    assert problem.path == path
    assert fix in problem.fix


@pytest.mark.parametrize(("name", "changes"), ACCEPTED)
def test_read_config_accepts_what_changes_no_number(name, changes):
    config = read_config(CONFIGS[name] | changes)
    assert config.given == CONFIGS[name] | changes
    assert len(config.layers) == 2


def test_read_config_names_all_that_is_wrong_at_once_also_within_a_part():
    text = CONFIGS["gemma3_images"]["text_config"]
    changed = {**text, "attention_bias": True, "head_dim": 0, "extra": 1}
    with pytest.raises(CheckpointMismatchError, match="text_config") as caught:
        read_config(CONFIGS["gemma3_images"] | {"text_config": changed})
    paths = [problem.path for problem in caught.value.problems]
    assert sorted(paths) == ["attention_bias", "extra", "head_dim"]


# What the classes of transformers have by default.
@pytest.mark.parametrize(
    ("name", "defaults"),
    [
        ("llama_tied", {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "sliding_window": None}),
        ("mistral", {"rms_norm_eps": 1e-6, "sliding_window": 4096, "tie_word_embeddings": False}),
        ("gemma", {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": True}),
        ("gemma2", {"query_pre_attn_scalar": 256, "sliding_window": 4096}),
        ("gemma2", {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
        ("gemma3", {"query_pre_attn_scalar": 256, "sliding_window": 4096, "head_dim": 256}),
        (
            "gemma3",
            {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "final_logit_softcapping": None},
        ),
        ("gpt_neox", {"partial_rotary_factor": 0.25, "rope_theta": 1e4, "layer_norm_eps": 1e-5}),
    ],
)
def test_absent_attributes_mean_what_transformers_has_by_default(name, defaults):
    left_out = {*defaults, "rope_parameters", "rotary_pct"} - {"tie_word_embeddings"}
    config = {key: value for key, value in CONFIGS[name].items() if key not in left_out}
    read = read_config(config)
    assert {key: read[key] for key in defaults} == defaults


def test_llama_3_2_divides_positions_of_slow_rotations():
    layer = read_config("llama-3.2-1b").layers[0]
    assert (layer.theta, layer.factor, layer.bands) == (5e5, 32.0, (1.0, 4.0, 8192))


def test_both_forms_of_rotary_positions_mean_the_same():
    newer = read_config(CONFIGS["gemma3"])
    older = {
        "rope_parameters": None,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    assert read_config(CONFIGS["gemma3"] | older).layers == newer.layers
    assert [(layer.window, layer.theta, layer.factor) for layer in newer.layers] == [
        (3, 1e4, 1.0),
        (None, 1e6, 8.0),
    ]


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"},
        {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
        {"architectures": ["LlamaForCausalLM"], "model_type": "mistral"},
        {"architectures": ["LlamaForCausalLM", "MistralForCausalLM"]},
        {"architectures": "LlamaForCausalLM and others"},
        {"architectures": [["LlamaForCausalLM"]]},
        {"model_type": ["llama"]},
        {},
    ],
)
def test_read_config_refuses_other_architectures_with_those_that_are_known(config):
    with pytest.raises(CheckpointMismatchError) as caught:
        read_config(config)
    (problem,) = caught.value.problems
    assert problem.path == "architectures"
    assert all(config["architectures"][0] in problem.what for config in CONFIGS.values())
    assert OWN_MODEL in problem.fix


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["default", "linear", 10**400, 4, 0, {}]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["rope_type", "rope_theta", "factor"]), inner)
    ),
    max_leaves=4,
)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_read_config_reads_or_refuses_anything(data):
    config = dict(CONFIGS[data.draw(st.sampled_from(sorted(CONFIGS)))])
    for name in data.draw(st.lists(st.sampled_from(sorted(config)), max_size=3)):
        config[name] = data.draw(ANYTHING)
    try:
        read = read_config(config)
    except (CheckpointMismatchError, CheckpointDamagedError):
        return
    assert len(read.layers) == read["num_hidden_layers"]


# Files and names


def test_read_config_reads_a_file_and_its_folder(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["llama"]))
    for place in (path, str(path), tmp_path):
        config = read_config(place)
        assert config.given == CONFIGS["llama"]
        assert config.source == str(place)


def test_read_config_refuses_a_part_that_is_no_table():
    for part in (None, 3):
        with pytest.raises(CheckpointDamagedError) as caught:
            read_config(CONFIGS["gemma3_images"] | {"text_config": part})
        (problem,) = caught.value.problems
        assert problem.path == "config/text_config"


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 10**5, "\udc80", "null"])
def test_read_config_refuses_files_that_hold_no_attributes(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointDamagedError) as caught:
        read_config(tmp_path)
    (problem,) = caught.value.problems
    assert problem.path == str(tmp_path)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("llama-3-7b", "'llama-3-70b'"),
        ("google/Gemma-2-9B", "'gemma-2-9b'"),
        ("missing/folder", "the path of a config.json"),
        ("\0", "the path of a config.json"),
        (3, "the path of a config.json"),
    ],
)
def test_read_config_answers_an_unknown_name_with_the_nearest_and_all(name, near):
    with pytest.raises(CheckpointNotFoundError) as caught:
        read_config(name)
    (problem,) = caught.value.problems
    assert f"Write {near}; " in problem.fix
    assert all(name in problem.fix for name in published_names())


# Embeddings once where they are tied, as papers and model cards count.
@pytest.mark.parametrize("name", published_names())
def test_published_configurations_have_as_many_parameters_as_was_published(name):
    data = json.loads((model_configs._PUBLISHED / f"{name}.json").read_text())
    assert "config.json of" in data["source"]
    held = param_dict(model_of_config(name))
    if read_config(name)["tie_word_embeddings"]:
        held.pop("transformer/lm_head.weights", None)
    count = sum(math.prod(value.named_shape.values()) for value in held.values())
    published = data["parameters"]
    digits = published.rstrip("B").replace(",", "")
    unit = 10 ** (9 - len(digits.partition(".")[2])) if published.endswith("B") else 1
    assert abs(count - float(digits) * (1e9 if unit > 1 else 1)) <= unit / 2


def test_published_configurations_are_eight_of_six_families():
    assert len(published_names()) == 8
    assert len({read_config(name).family for name in published_names()}) == 6
