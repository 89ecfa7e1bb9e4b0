"""What a configuration asks for beyond Penzai's models is refused by name, and nothing else."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from penzai import pz

from penzai_shard.errors import CheckpointMismatchError
from penzai_shard.pretrained.conversion import FAMILIES, configuration_of, converted_model
from penzai_shard.pretrained.stored_tensors import StoredTensor
from tests.pretrained.test_converted_models import GEMMA_3, config_of, reader_of

REFUSED = [
    (
        "llama",
        {"attention_bias": True},
        "attention_bias: is True, and Penzai's Llama is the one with False",
    ),
    ("llama", {"mlp_bias": True}, "mlp_bias: is True"),
    (
        "llama",
        {"hidden_act": "gelu"},
        "hidden_act: is 'gelu', and Penzai's Llama is the one with 'silu'",
    ),
    ("llama", {"head_dim": 16}, "head_dim: is 16, and Penzai's Llama has heads of hidden_size"),
    ("llama", {"attention_dropout": 0.1}, "attention_dropout: is 0.1"),
    (
        "llama",
        {"sliding_window": 5},
        "sliding_window: is 5, and Penzai's Llama is the one with None",
    ),
    (
        "llama",
        {"num_key_value_heads": 3},
        "num_key_value_heads: 3 does not divide num_attention_heads, 4",
    ),
    ("llama", {"num_key_value_heads": 0}, "num_key_value_heads: 0 does not divide"),
    ("llama", {"hidden_size": None}, "hidden_size: is missing"),
    ("llama", {"hidden_size": "16"}, "hidden_size: is '16', and has to be a whole number"),
    ("llama", {"vocab_size": True}, "vocab_size: is True, and has to be a whole number"),
    ("llama", {"hidden_size": 18}, "num_attention_heads: 4 does not divide hidden_size, 18"),
    ("llama", {"rms_norm_eps": -1.0}, "rms_norm_eps: is -1.0, and has to be a number above 0"),
    ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings: is 1"),
    (
        "llama",
        {"quantization_config": {"bits": 4}},
        "quantization_config: is {'bits': 4}, of which it is not known",
    ),
    (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}},
        "has 'llama3' positions",
    ),
    (
        "llama",
        {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
        "rope_scaling: has 'linear' positions",
    ),
    (
        "llama",
        {"rope_parameters": {"rope_theta": 1e4, "mscale": 2.0}},
        "rope_parameters: says mscale = 2.0",
    ),
    ("llama", {"rope_parameters": [1]}, "rope_parameters: is [1], and has to be a table"),
    (
        "llama",
        {"rope_theta": 5e5},
        "rope_theta: is said several times, rope_theta is 500000.0, rope_par",
    ),
    (
        "llama",
        {"partial_rotary_factor": 0.5},
        "partial_rotary_factor: is 0.5, and Penzai's Llama rotates all",
    ),
    (
        "llama",
        {"rope_parameters": {"rope_theta": "10000"}},
        "rope_parameters['rope_theta']: is '10000', and has to be a number",
    ),
    ("mistral", {"sliding_window": 0}, "sliding_window: is 0, and has to be a whole number"),
    ("mistral", {"head_dim": 8}, "head_dim: is 8, and Penzai's Mistral"),
    ("gpt_neox", {"use_parallel_residual": False}, "use_parallel_residual: is False"),
    ("gpt_neox", {"attention_bias": False}, "attention_bias: is False"),
    (
        "gpt_neox",
        {"hidden_act": "tanh"},
        "hidden_act: is 'tanh', and Penzai's GPT-NeoX is the one with 'gelu' or",
    ),
    (
        "gpt_neox",
        {"rope_parameters": {"partial_rotary_factor": 0.25}},
        "rotary_pct: 0.25 rotates 1 of the 4 dimensions",
    ),
    ("gpt_neox", {"layer_norm_eps": "small"}, "layer_norm_eps: is 'small'"),
    ("gemma", {"tie_word_embeddings": False}, "tie_word_embeddings: is False"),
    ("gemma", {"hidden_act": "gelu_new"}, "hidden_act: is 'gelu_new'"),
    ("gemma", {"num_attention_heads": 1, "num_key_value_heads": 1}, "num_attention_heads: is 1"),
    ("gemma", {"head_dim": 7}, "head_dim: is 7, and has to be even"),
    (
        "gemma2",
        {"layer_types": ["full_attention"]},
        "layer_types: is ['full_attention'], and has to be a list",
    ),
    (
        "gemma2",
        {"layer_types": ["chunked_attention"] * 2},
        "layer_types: is ['chunked_attention', ",
    ),
    ("gemma2", {"attn_logit_softcapping": -50.0}, "attn_logit_softcapping: is -50.0"),
    ("gemma2", {"sliding_window_size": 5}, "sliding_window_size: is 5, and sliding_window 3"),
    ("llama", {"rope_interleaved": True}, "rope_interleaved: is True"),
    ("gemma2", {"sliding_window": None}, "sliding_window: is None"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention: is True"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: is 0"),
    (
        GEMMA_3,
        {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
        "rope_parameters['full_attention']: has 'yarn' positions",
    ),
    (
        GEMMA_3,
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        "['sliding_attention']: has 'linear' positions",
    ),
    (
        GEMMA_3,
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 0}}},
        "rope_parameters['full_attention']['factor']: is 0",
    ),
]

ACCEPTED = [
    ("llama", {"_name_or_path": "a/b", "transformers_version": "4.31.0", "use_cache": False}),
    ("llama", {"dtype": None, "torch_dtype": "float16"}),
    ("llama", {"max_position_embeddings": 131072, "pretraining_tp": 2}),
    ("llama", {"bos_token_id": 128000, "eos_token_id": [1, 2], "pad_token_id": 0}),
    ("llama", {"head_dim": None}),
    ("llama", {"rope_parameters": None, "rope_scaling": None, "rope_theta": 5e5}),
    ("llama", {"rope_parameters": None, "rope_scaling": {"type": "default"}}),
    ("llama", {"rope_parameters": None}),
    ("llama", {"rope_theta": 10000}),
    ("llama", {"partial_rotary_factor": 1.0}),
    ("llama", {"num_key_value_heads": None}),
    ("llama", {"architectures": None}),
    ("llama", {"model_type": None}),
    ("llama", {"attention_bias": None, "mlp_bias": None}),
    ("mistral", {"sliding_window": None}),
    ("gpt_neox", {"hidden_act": "gelu_new", "classifier_dropout": 0.5}),
    ("gpt_neox", {"rope_parameters": None, "rotary_pct": 0.5, "rotary_emb_base": 10000}),
    ("gpt_neox", {"hidden_act": "gelu_fast", "hidden_dropout_prob": 0, "attention_dropout": 0}),
    ("llama", {"max_sequence_length": 2048, "rope_interleaved": False, "is_llama_config": True}),
    ("gemma2", {"sliding_window_size": 3}),
    ("gemma", {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}),
    ("gemma2", {"layer_types": None, "attn_logit_softcapping": None, "cache_implementation": "x"}),
    (GEMMA_3, {"layer_types": None, "sliding_window_pattern": 2}),
]


def changed(name, changes):
    config = config_of(name) | changes
    # Some are absent in files of any version, and None is what a missing one reads as.
    return {key: value for key, value in config.items() if value is not None or key in changes}


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_what_penzais_model_does_not_do_is_refused_by_name_and_value(name, changes, message):
    with pytest.raises(CheckpointMismatchError, match=re.escape(message)) as caught:
        configuration_of(changed(name, changes))
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(("name", "changes"), ACCEPTED)
def test_what_changes_no_value_is_accepted(name, changes):
    assert configuration_of(changed(name, changes)).given


def test_everything_that_is_wrong_is_said_at_once():
    with pytest.raises(CheckpointMismatchError) as caught:
        configuration_of(changed("llama", {"mlp_bias": True, "attention_bias": True, "extra": 1}))
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "attention_bias",
        "mlp_bias",
        "extra",
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
        {},
        [],
    ],
)
def test_other_architectures_are_refused_with_those_that_are_known(config):
    with pytest.raises(CheckpointMismatchError) as caught:
        configuration_of(config)
    if config != []:
        assert all(family.architecture in str(caught.value) for family in FAMILIES)
        assert "into=" in str(caught.value)


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["default", "linear", 10**400, 4, 0]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["rope_type", "rope_theta", "factor"]), inner)
    ),
    max_leaves=4,
)


@settings(max_examples=60)
@given(st.data())
def test_a_configuration_of_anything_is_read_or_refused(data):
    config = config_of(
        data.draw(st.sampled_from(["llama", "mistral", "gpt_neox", "gemma2", GEMMA_3]))
    )
    for name in data.draw(st.lists(st.sampled_from(sorted(config)), max_size=3)):
        config[name] = data.draw(anything)
    try:
        configuration = configuration_of(config)
    except CheckpointMismatchError:
        return
    assert configuration["hidden_size"] > 0


def test_one_approximation_has_several_names():
    models = [
        converted_model(changed("gpt_neox", {"hidden_act": name}), reader_of("gpt_neox").tensors)[0]
        for name in ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu")
    ]
    kinds = [pz.select(m).at_instances_of(pz.nn.Elementwise).get_sequence()[0] for m in models]
    assert [kind.fn.keywords["approximate"] for kind in kinds] == [True, True, True, False]


# Tensors


def tensors_of(name):
    return dict(reader_of(name).tensors)


def without(tensors, *names):
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def test_tensors_that_do_not_fit_are_all_named_at_once_with_parameter_shapes_and_file():
    tensors = without(tensors_of("llama"), "model.norm.weight")
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors[name] = StoredTensor(name, (16, 8), "bfloat16", "part-2.safetensors")
    name = "model.layers.0.self_attn.q_proj.bias"
    tensors[name] = StoredTensor(name, (16,), "bfloat16", "part-1.safetensors")
    with pytest.raises(CheckpointMismatchError) as caught:
        converted_model(config_of("llama"), tensors)
    assert caught.value.problems == (
        "transformer/final_norm/scale.weights: its tensor 'model.norm.weight' is missing.",
        "transformer/block_1/attention/query.weights: its tensor "
        "'model.layers.1.self_attn.q_proj.weight' has the shape (16, 8) in part-2.safetensors, "
        "and config.json makes it (16, 16).",
        "model.layers.0.self_attn.q_proj.bias: in part-1.safetensors, and no parameter of the "
        "Llama in config.json is made of it. Pass on_extra='ignore' to leave it there.",
    )


def test_a_tensor_of_nearly_the_right_name_is_pointed_out():
    tensors = tensors_of("llama")
    tensors["model.layer.0.mlp.up_proj.weight"] = tensors.pop("model.layers.0.mlp.up_proj.weight")
    with pytest.raises(CheckpointMismatchError, match=r"There is 'model\.layer\.0\.mlp\.up_proj"):
        converted_model(config_of("llama"), tensors)


def test_superfluous_tensors_may_be_left():
    extra = StoredTensor("value_head.weight", (1, 16), "bfloat16", "file")
    tensors = {**tensors_of("llama"), "value_head.weight": extra}
    with pytest.raises(CheckpointMismatchError, match=r"value_head\.weight: in file"):
        converted_model(config_of("llama"), tensors)
    _, views = converted_model(config_of("llama"), tensors, on_extra="ignore")
    assert views.keys() == converted_model(config_of("llama"), tensors_of("llama"))[1].keys()


@pytest.mark.parametrize(
    ("name", "buffer"),
    [
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("gpt_neox", "gpt_neox.layers.1.attention.masked_bias"),
        ("gpt_neox", "gpt_neox.layers.1.attention.bias"),
    ],
)
def test_buffers_that_older_versions_stored_are_left(name, buffer):
    tensors = tensors_of(name) | {buffer: StoredTensor(buffer, (2,), "float32", "file")}
    assert converted_model(config_of(name), tensors)


def test_an_embedding_that_is_not_tied_needs_its_own_logits():
    tensors = without(tensors_of("llama"), "lm_head.weight")
    with pytest.raises(CheckpointMismatchError, match=r"'lm_head\.weight' is missing"):
        converted_model(config_of("llama"), tensors)
    _, views = converted_model(changed("llama", {"tie_word_embeddings": True}), tensors)
    assert views["transformer/lm_head.weights"].tensors == ("model.embed_tokens.weight",)
    tensors = tensors_of("llama")
    _, views = converted_model(changed("llama", {"tie_word_embeddings": True}), tensors)
    assert views["transformer/lm_head.weights"].tensors == ("lm_head.weight",)


def with_dtypes(name, *dtypes):
    tensors = tensors_of(name).values()
    return {
        tensor.name: StoredTensor(tensor.name, tensor.shape, dtypes[i % len(dtypes)], "file")
        for i, tensor in enumerate(tensors)
    }


@pytest.mark.parametrize(
    ("dtypes", "options", "message"),
    [
        (["float16"], {}, "the parameters would be of float16, and Penzai's converters make"),
        (["bfloat16"], {"dtype": "float16"}, "the parameters would be of float16"),
        (["bfloat16", "float32"], {}, "are of several dtypes, float32 ("),
        (["int8"], {"dtype": "float32"}, "is of int8, which is no dtype of weights"),
        (["float8_e4m3fn"], {}, "is of float8_e4m3fn, which is no dtype of weights"),
    ],
)
def test_dtypes_that_penzais_models_do_not_have_are_refused(dtypes, options, message):
    with pytest.raises(CheckpointMismatchError, match=re.escape(message)):
        converted_model(config_of("llama"), with_dtypes("llama", *dtypes), **options)


@pytest.mark.parametrize("dtypes", [["float16"], ["float16", "float32"], ["float64"]])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_of_other_dtypes_are_converted_where_it_is_asked_for(dtypes, dtype):
    model, views = converted_model(config_of("llama"), with_dtypes("llama", *dtypes), dtype=dtype)
    assert {view.dtype for view in views.values()} == {dtype}
    assert str(model.metadata.activation_dtype) == dtype or dtype in repr(
        model.metadata.activation_dtype
    )


def test_more_layers_than_tensors_are_refused_before_any_is_looked_for():
    config = changed("llama", {"num_hidden_layers": 10**9})
    with pytest.raises(CheckpointMismatchError, match="num_hidden_layers = 1000000000, and there"):
        converted_model(config, tensors_of("llama"))
