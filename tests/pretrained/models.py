"""Small configurations of every family as Hugging Face writes them, and tensors for them.

The shapes stand here once more, by hand, so that a mistake in a table of the library shows.
"""

import sys
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from penzai.models.transformer.variants import gemma, gpt_neox, llamalike_common

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 40,
    "max_position_embeddings": 64,
}
_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_SIZES}
_GEMMA = {**_SIZES, "head_dim": 16, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
_GEMMA_2 = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", **_GEMMA}
_GEMMA_3 = {
    "model_type": "gemma3_text",
    **_GEMMA,
    "sliding_window": 3,
    "query_pre_attn_scalar": 24,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
    },
}

CONFIGS = {
    "llama": {
        **_LLAMA,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "llama_one_key_head": {**_LLAMA, "num_key_value_heads": 1, "rope_theta": 5e5},
    "llama_tied": {**_LLAMA, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        **_SIZES,
        "num_key_value_heads": 2,
        "sliding_window": 3,
        "rope_theta": 10000.0,
    },
    "gemma": {"architectures": ["GemmaForCausalLM"], "model_type": "gemma", **_GEMMA},
    "gemma2": {**_GEMMA_2, "sliding_window": 3, "query_pre_attn_scalar": 24},
    "gemma2_alike": {
        **_GEMMA_2,
        "layer_types": ["full_attention"] * 2,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": 5.0,
    },
    "gemma3": {"architectures": ["Gemma3ForCausalLM"], **_GEMMA_3},
    "gemma3_images": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": _GEMMA_3,
        "vision_config": {"hidden_size": 8},
        "image_token_index": 39,
        "mm_tokens_per_image": 4,
    },
    "gpt_neox": {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        **_SIZES,
        "layer_norm_eps": 1e-3,
        "rotary_pct": 0.5,
        "hidden_act": "gelu",
    },
}


def shapes(name):
    """The shape of each tensor of a small model."""
    config = CONFIGS[name]
    if "text_config" in config:
        text = _decoder_shapes(config["text_config"])
        probe = {"vision_tower.head.probe": (1, 8)}
        return {f"language_model.{tensor}": shape for tensor, shape in text.items()} | probe
    return _neox_shapes(config) if name == "gpt_neox" else _decoder_shapes(config)


def _decoder_shapes(config):
    hidden, inner, heads = (
        config[size] for size in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    head = config.get("head_dim", hidden // heads)
    keys, kind = config["num_key_value_heads"] * head, config["model_type"]
    block = {
        "self_attn.q_proj": (heads * head, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, heads * head),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    if kind in ("gemma2", "gemma3_text"):
        block |= {"pre_feedforward_layernorm": (hidden,), "post_feedforward_layernorm": (hidden,)}
    if kind == "gemma3_text":
        block |= {"self_attn.q_norm": (head,), "self_attn.k_norm": (head,)}
    found = {
        f"model.layers.{number}.{name}.weight": shape
        for number in range(config["num_hidden_layers"])
        for name, shape in block.items()
    }
    table = (config["vocab_size"], hidden)
    found |= {"model.embed_tokens.weight": table, "model.norm.weight": (hidden,)}
    is_tied = config.get("tie_word_embeddings") or kind.startswith("gemma")
    return found if is_tied else found | {"lm_head.weight": table}


def _neox_shapes(config):
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    block = {
        "attention.query_key_value": (3 * hidden, hidden),
        "attention.dense": (hidden, hidden),
        "mlp.dense_h_to_4h": (inner, hidden),
        "mlp.dense_4h_to_h": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    found = {"gpt_neox.embed_in.weight": (config["vocab_size"], hidden)}
    found["embed_out.weight"] = found["gpt_neox.embed_in.weight"]
    layers = {
        f"gpt_neox.layers.{number}.{name}": shape
        for number in range(config["num_hidden_layers"])
        for name, shape in block.items()
    }
    for name, shape in {**layers, "gpt_neox.final_layer_norm": (hidden,)}.items():
        found |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return found


def draw_tensors(name, dtype="float32", seed=0):
    """Tensors whose every number matters: of size one where the model computes, norms too."""
    generator = np.random.default_rng(seed)

    def draw(shape):
        noise = generator.standard_normal(shape)
        return (0.3 * noise if len(shape) == 1 else noise / shape[1] ** 0.5).astype(dtype)

    return {tensor: draw(shape) for tensor, shape in shapes(name).items()}


def convert_by_penzai(name, tensors, use_layer_stack=False):
    """The model that Penzai's own converter makes; of Gemma 3, which it lacks, that of Gemma 2."""
    config = CONFIGS[name]
    config = config.get("text_config", config)
    if config["model_type"].startswith("gemma"):
        return _convert_gemma(config, tensors, use_layer_stack)
    defaults = {"rope_theta": 10000.0, "hidden_act": "silu", "rotary_emb_base": 10000.0}
    attributes = {"rms_norm_eps": 1e-6, **defaults, **config}

    class GPTNeoXForCausalLM:
        config = types.SimpleNamespace(**attributes, to_dict=lambda: attributes)
        dtype = f"torch.{next(iter(tensors.values())).dtype}"

        def state_dict(self):
            embeddings = tensors.get("model.embed_tokens.weight")
            every = {"lm_head.weight": embeddings, **tensors}
            return {key: tensor for key, tensor in every.items() if tensor is not None}

    model = GPTNeoXForCausalLM()
    library = types.SimpleNamespace(
        GPTNeoXForCausalLM=GPTNeoXForCausalLM, GPTNeoXConfig=lambda: model.config
    )
    convert = llamalike_common.llamalike_from_huggingface_model
    if name == "gpt_neox":
        convert = gpt_neox.gpt_neox_from_huggingface_model
    with (
        mock.patch.dict(sys.modules, transformers=library),
        mock.patch.object(jax.dlpack, "from_dlpack", jnp.asarray),
    ):
        return convert(model, use_layer_stack=use_layer_stack)


def _convert_gemma(config, tensors, use_layer_stack):
    """By way of the arrays that Google publishes for Flax, which Penzai's converter takes."""
    kind, hidden, size = config["model_type"], config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"], config["num_key_value_heads"]
    tensors = {key.removeprefix("language_model."): tensor for key, tensor in tensors.items()}
    preset = {
        "num_decoder_blocks": config["num_hidden_layers"],
        "vocab_size": config["vocab_size"],
        "num_kv_heads": keys,
        "query_head_multiplier": queries // keys,
        "embedding_dim": hidden,
        "projection_dim": size,
        "mlp_hidden_dim": config["intermediate_size"],
        "rms_norm_eps": config["rms_norm_eps"],
    }
    norms = {
        "pre_attention_norm": "input_layernorm",
        "pre_ffw_norm": "post_attention_layernorm",
    }
    if kind != "gemma":
        norms |= {
            "post_attention_norm": "post_attention_layernorm",
            "pre_ffw_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        }
        slides = llamalike_common.AttentionTypeSlidingWindowCausal(config.get("sliding_window", 1))
        both = (slides, llamalike_common.AttentionTypeGlobalCausal())
        alike = config.get("layer_types") == ["full_attention"] * 2
        is_gemma_2 = kind == "gemma2"
        preset |= {
            "use_post_attn_norm": True,
            "use_post_ffw_norm": True,
            "attention_type": both[1] if alike else both,
            "attn_logits_soft_cap": config.get(
                "attn_logit_softcapping", 50.0 if is_gemma_2 else None
            ),
            "final_logit_softcap": config.get(
                "final_logit_softcapping", 30.0 if is_gemma_2 else None
            ),
            "query_scaling_factor": config.get("query_pre_attn_scalar", 256) ** -0.5,
        }
    arrays = {
        "embedder": {"input_embedding": tensors["model.embed_tokens.weight"]},
        "final_norm": {"scale": tensors["model.norm.weight"]},
    }
    for number in range(config["num_hidden_layers"]):
        own = {
            key.removeprefix(f"model.layers.{number}.").removesuffix(".weight"): tensor
            for key, tensor in tensors.items()
        }
        heads = {
            each: own[f"self_attn.{each}_proj"].reshape(-1, size, hidden).transpose(0, 2, 1)
            for each in "qkv"
        }
        layer = {flax: {"scale": own[torch]} for flax, torch in norms.items()}
        layer["mlp/gating_einsum"] = {"w": jnp.stack([own["mlp.gate_proj"], own["mlp.up_proj"]])}
        layer["mlp/linear"] = {"w": own["mlp.down_proj"].T}
        layer["attn/attn_vec_einsum"] = {"w": own["self_attn.o_proj"].T.reshape(-1, size, hidden)}
        if queries == keys:
            layer["attn/qkv_einsum"] = {"w": jnp.stack([*heads.values()])}
        else:
            layer["attn/q_einsum"] = {"w": heads["q"]}
            layer["attn/kv_einsum"] = {"w": jnp.stack([heads["k"], heads["v"]])}
        arrays |= {f"layer_{number}/{key}": value for key, value in layer.items()}
    arrays = jax.tree.map(jnp.asarray, arrays)
    with (
        mock.patch.dict(gemma._GEMMA_PRESETS, here=preset),
        mock.patch.dict(gemma._NEEDS_GATING_TRANSPOSE, here=True),
    ):
        return gemma.gemma_from_pretrained_checkpoint(
            arrays, use_layer_stack=use_layer_stack, preset_name="here"
        )
