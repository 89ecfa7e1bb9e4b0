"""Configurations: which attributes are accepted, which refused by name, and the published ones."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penzai_shard as pzs
from penzai_shard.pretrained import model_configs
from penzai_shard.pretrained.families import FAMILIES
from penzai_shard.pretrained.model_configs import Layer, read_config
from penzai_shard.pretrained.models import model_of_config
from tests.pretrained.models import CONFIGS
from tests.refusals import problem_paths, problems_of

PUBLISHED = sorted(path.stem for path in model_configs._PUBLISHED.glob("*.json"))
OWN_MODEL, COPY, LEAVE_OUT, TWO = "into=", "Copy it", "Leave it out", "Leave the wrong one out"
ROPE, FULL = "rope_parameters", "rope_parameters/full_attention"
SLIDING, LINEAR = "rope_parameters/sliding_attention", {"rope_type": "linear"}
# The small model, the fix, and attributes that are refused, each by itself.
REFUSED = [
    ("llama", OWN_MODEL, {"attention_bias": True, "mlp_bias": True, "rope_interleaved": True}),
    ("llama", OWN_MODEL, {"hidden_act": "gelu", "attention_dropout": 0.1, "sliding_window": 5}),
    ("llama", COPY, {"hidden_size": None, "vocab_size": True, "num_hidden_layers": 10**9}),
    ("llama", COPY, {"num_key_value_heads": 3, "rms_norm_eps": -1.0}),
    ("llama", COPY, {"num_key_value_heads": 0}),
    ("llama", LEAVE_OUT, {"quantization_config": {"bits": 4}, ROPE: [1]}),
    ("mistral", COPY, {"sliding_window": 0, "num_key_value_heads": None}),
    ("gpt_neox", OWN_MODEL, {"use_parallel_residual": False, "attention_bias": False}),
    ("gpt_neox", OWN_MODEL, {"hidden_act": "tanh"}),
    ("gpt_neox", COPY, {"layer_norm_eps": "small"}),
    ("gemma", OWN_MODEL, {"tie_word_embeddings": False, "hidden_act": "gelu_new"}),
    ("gemma", COPY, {"head_dim": 7}),
    ("gemma2", COPY, {"layer_types": ["full_attention"], "attn_logit_softcapping": -50.0}),
    ("gemma2", COPY, {"layer_types": ["chunked_attention"] * 2, "sliding_window": None}),
    ("gemma2", COPY, {"layer_types": []}),
    ("gemma2", TWO, {"sliding_window_size": 5}),
    ("gemma2", OWN_MODEL, {"use_bidirectional_attention": True}),
]
# What is changed together, and the attribute that is refused.
REFUSED_TOGETHER = [
    ("llama", {ROPE: {"partial_rotary_factor": 0.5}}, f"{ROPE}/partial_rotary_factor", OWN_MODEL),
    ("llama", {"hidden_size": 34}, "head_dim", COPY),
    ("llama", {"hidden_size": 36}, "head_dim", COPY),
    ("llama", {ROPE: {"rope_type": "yarn"}}, f"{ROPE}/rope_type", OWN_MODEL),
    ("llama", {ROPE: {"rope_type": "llama3", "factor": 8.0}}, "rope_type", ROPE),
    ("llama", {ROPE: {"factor": 8.0}}, "rope_type", ROPE),
    ("llama", {ROPE: {"rope_theta": 1e4, "mscale": 2.0}}, f"{ROPE}/mscale", LEAVE_OUT),
    ("llama", {"rope_theta": 5e5}, f"{ROPE}/rope_theta", TWO),
    ("llama", {ROPE: {"rope_theta": "10000"}}, f"{ROPE}/rope_theta", COPY),
    ("gpt_neox", {"rope_scaling": {"type": "linear"}}, "rope_scaling/type", OWN_MODEL),
    ("gpt_neox", {"rope_scaling": {"factor": 2.0}}, "rope_scaling/factor", LEAVE_OUT),
    ("gpt_neox", {ROPE: {"partial_rotary_factor": 0.125}}, "head_dim", COPY),
    ("gemma3", {ROPE: {"full_attention": {"rope_type": "yarn"}}}, f"{FULL}/rope_type", OWN_MODEL),
    ("gemma3", {ROPE: {"full_attention": {"factor": 8.0}}}, "rope_type", ROPE),
    ("gemma3", {ROPE: {"sliding_attention": LINEAR}}, f"{SLIDING}/rope_type", OWN_MODEL),
    ("gemma3", {ROPE: {"full_attention": LINEAR | {"factor": 0}}}, f"{FULL}/factor", COPY),
]
REFUSED_TOGETHER += [
    (model, {name: x}, name, fix) for model, fix, every in REFUSED for name, x in every.items()
]
ACCEPTED = [
    ("llama", {"_name_or_path": "a/b", "transformers_version": "4.31.0", "use_cache": False}),
    ("llama", {"model_type": None, "dtype": None, "torch_dtype": "float16"}),
    ("llama", {"max_position_embeddings": 131072, "pretraining_tp": 2}),
    ("llama", {"bos_token_id": 128000, "eos_token_id": [1, 2], "pad_token_id": 0}),
    ("llama", {"head_dim": None, "num_key_value_heads": None, "architectures": None}),
    ("llama", {ROPE: None, "rope_scaling": {"type": "default"}}),
    ("llama", {ROPE: None}),
    ("llama", {ROPE: {"rope_type": "linear", "factor": 4.0}}),
    ("llama", {"rope_theta": 10000, "partial_rotary_factor": 1.0}),
    ("llama", {"max_sequence_length": 2048, "rope_interleaved": False, "is_llama_config": True}),
    ("mistral", {ROPE: None, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("mistral", {"sliding_window": None}),
    ("gpt_neox", {"hidden_act": "gelu_new", "classifier_dropout": 0.5}),
    ("gpt_neox", {"rotary_pct": 0.5, "rotary_emb_base": 10000}),
    ("gpt_neox", {"rotary_pct": None, ROPE: {"partial_rotary_factor": 0.5}}),
    ("gpt_neox", {"hidden_act": "gelu_fast", "hidden_dropout_prob": 0, "attention_dropout": 0}),
    ("gemma", {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}),
    ("gemma2", {"sliding_window_size": 3}),
    ("gemma2", {"layer_types": None, "attn_logit_softcapping": None, "cache_implementation": "x"}),
    ("gemma3", {"layer_types": None, "_sliding_window_pattern": 2}),
    ("gemma3_images", {"vision_config": None, "boi_token_index": 1, "tie_word_embeddings": True}),
    ("gemma3", {"num_attention_heads": None, "vocab_size": None}),
]


@pytest.mark.parametrize(("name", "changes", "path", "fix"), REFUSED_TOGETHER)
def test_read_config_refuses_by_name_what_penzais_model_does_not_compute(name, changes, path, fix):
    (problem,) = problems_of(pzs.CheckpointMismatchError, read_config, CONFIGS[name] | changes)
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
    with pytest.raises(pzs.CheckpointMismatchError, match="text_config") as caught:
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
        ("gemma3", {"rope_theta": 1e6, "rope_local_base_freq": 1e4}),
        ("gemma3", {"final_logit_softcapping": None}),
        ("gpt_neox", {"partial_rotary_factor": 0.25, "rope_theta": 1e4, "layer_norm_eps": 1e-5}),
    ],
)
def test_absent_attributes_mean_what_transformers_has_by_default(name, defaults):
    left_out = {*defaults, ROPE} - {"tie_word_embeddings"}
    config = {key: value for key, value in CONFIGS[name].items() if key not in left_out}
    read = read_config(config | {"hidden_size": 64})
    assert {key: read[key] for key in defaults} == defaults


OLDER = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": LINEAR | {"factor": 8.0}}


# Window, base of wavelengths, and factor of each layer, where it has bands these too.
@pytest.mark.parametrize(
    ("config", "changes", "layers"),
    [
        ("gemma3", {}, [(3, 1e4, 1.0), (None, 1e6, 8.0)]),
        ("gemma3", {ROPE: None} | OLDER, [(3, 1e4, 1.0), (None, 1e6, 8.0)]),
        ("llama-3.2-1b", {}, [(None, 5e5, 32.0, (1.0, 4.0, 8192))] * 16),
    ],
)
def test_layers_have_what_either_form_of_rotary_positions_says(config, changes, layers):
    read = read_config(CONFIGS[config] | changes if config in CONFIGS else config)
    assert read.layers == tuple(Layer(*each) for each in layers)


@pytest.mark.parametrize(
    ("listed", "pattern", "windows"),
    [
        (None, None, [3, 3, 3, 3, 3, None, 3]),
        (None, 2, [3, None, 3, None, 3, None, 3]),
        (["full_attention"] * 6 + ["sliding_attention"], 2, [None] * 6 + [3]),
    ],
)
def test_layers_that_are_not_listed_follow_a_pattern(listed, pattern, windows):
    changes = {"num_hidden_layers": 7, "layer_types": listed, "_sliding_window_pattern": pattern}
    config = read_config(CONFIGS["gemma3"] | changes)
    assert [layer.window for layer in config.layers] == windows


@pytest.mark.parametrize(
    ("architectures", "model_type"),
    [
        (["LlamaForSequenceClassification"], "llama"),
        (["BertForMaskedLM"], "bert"),
        (["LlamaForCausalLM"], "mistral"),
        (["LlamaForCausalLM", "MistralForCausalLM"], None),
        (None, ["llama"]),
        (None, None),
    ],
)
def test_read_config_refuses_other_architectures_with_all_known(architectures, model_type):
    config = {"architectures": architectures, "model_type": model_type}
    (problem,) = problems_of(pzs.CheckpointMismatchError, read_config, config)
    assert problem.path == "architectures"
    assert all(config["architectures"][0] in problem.what for config in CONFIGS.values())
    assert OWN_MODEL in problem.fix


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
ODD_ONES = st.sampled_from(["default", "linear", 10**400, 4, 0, {}])
KEYS = st.sampled_from(["rope_type", "rope_theta", "factor"])
ANYTHING = st.recursive(
    SCALARS | ODD_ONES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner),
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
    except (pzs.CheckpointMismatchError, pzs.CheckpointDamagedError):
        return
    assert len(read.layers) == read["num_hidden_layers"]


# Files and names


def test_read_config_reads_a_file_and_its_folder(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["llama"]))
    for place in (path, str(path), tmp_path):
        config = read_config(place)
        assert (config.given, config.source) == (CONFIGS["llama"], str(place))


def test_read_config_refuses_what_is_no_table_of_attributes(tmp_path):
    path, images = tmp_path / "config.json", CONFIGS["gemma3_images"]
    wrong = [(images | {"text_config": part}, "config/text_config") for part in (None, 3)]
    wrong += [(text, str(path)) for text in ("", "[1]", "{", "[" * 10**5, "\udc80", "null")]
    for config, place in wrong:
        if isinstance(config, str):
            path.write_bytes(config.encode(errors="surrogateescape"))
            config = path
        assert problem_paths(pzs.CheckpointDamagedError, read_config, config) == [place]


@pytest.mark.parametrize("name", ["llama-3-7b", "missing/folder", "\0", np.zeros(10_000)])
def test_read_config_answers_an_unknown_name_with_all(name):
    with pytest.raises(pzs.CheckpointNotFoundError) as caught:
        read_config(name)
    (problem,) = caught.value.problems
    assert problem.fix.startswith("Write the path of a config.json")
    assert all(name in problem.fix for name in PUBLISHED)
    assert len(str(caught.value)) < 400


# Embeddings once where they are tied, as papers and model cards count.
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_have_as_many_parameters_as_was_published(name):
    data = json.loads((model_configs._PUBLISHED / f"{name}.json").read_text())
    assert "config.json of" in data["source"]
    held = pzs.param_dict(model_of_config(name))
    if read_config(name)["tie_word_embeddings"]:
        held.pop("transformer/lm_head.weights", None)
    count = sum(math.prod(value.named_shape.values()) for value in held.values())
    published = data["parameters"]
    digits = published.rstrip("B").replace(",", "")
    unit = 10 ** (9 - len(digits.partition(".")[2])) if published.endswith("B") else 1
    assert abs(count - float(digits) * (1e9 if unit > 1 else 1)) <= unit / 2


def test_small_models_are_of_all_families_and_published_ones_of_six():
    assert len({read_config(name).family for name in PUBLISHED}) == 6
    assert {read_config(config).family for config in CONFIGS.values()} == FAMILIES.keys()
