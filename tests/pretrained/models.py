"""Small models of every family: what transformers wrote, and what Penzai's own converters make."""

import json
import pathlib
import sys
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from penzai.models.transformer.variants import gemma, gpt_neox, llamalike_common

from tests.checkpoints.safetensors_files import read_file, write_parts, write_tensors

REFERENCE = pathlib.Path(__file__).parent / "reference"
_READ = {path.parent.name: json.loads(path.read_text()) for path in REFERENCE.glob("*/config.json")}
_GEMMA_3 = _READ.pop("gemma3_longer_texts")
_ALIKE = {"layer_types": ["full_attention"] * 2, "attn_logit_softcapping": None}
CONFIGS = {
    **_READ,
    "llama": {key: value for key, value in _READ["llama"].items() if key != "head_dim"},
    "llama_one_key_head": _READ["llama"]
    | {"num_key_value_heads": 1, "rope_parameters": None, "rope_theta": 5e5},
    "gemma2_alike": _READ["gemma2"] | _ALIKE | {"final_logit_softcapping": 5.0},
    "gemma3": _GEMMA_3,
    "gemma3_images": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": _GEMMA_3,
        "vision_config": {"hidden_size": 8},
        "image_token_index": 39,
        "mm_tokens_per_image": 4,
    },
}
_FOLDERS = {"llama_one_key_head": "llama", "gemma2_alike": "gemma2"}
_FOLDERS |= dict.fromkeys(("gemma3", "gemma3_images"), "gemma3_longer_texts")


def shapes(name):
    """The shape of each tensor of a small model."""
    found = {}
    for file in (REFERENCE / _FOLDERS.get(name, name)).glob("*.safetensors"):
        header, _ = read_file(file)
        header.pop("__metadata__")
        found |= {key: entry["shape"] for key, entry in header.items()}
    if name == "llama_one_key_head":
        found |= {key: [4, 16] for key in found if "k_proj" in key or "v_proj" in key}
    if name == "gemma3_images":
        found = {f"language_model.{key}": shape for key, shape in found.items()}
        found["vision_tower.head.probe"] = [1, 8]
    return found


def draw_tensors(name, dtype="float32", seed=0):
    """Tensors whose every number matters: of size one where the model computes, norms too."""
    generator = np.random.default_rng(seed)

    def draw(shape):
        noise = generator.standard_normal(shape)
        return (0.3 * noise if len(shape) == 1 else noise / shape[1] ** 0.5).astype(dtype)

    return {tensor: draw(shape) for tensor, shape in shapes(name).items()}


def write_model(folder, name="llama", tensors=None, several=False):
    """A folder as Hugging Face has it."""
    folder.mkdir(exist_ok=True)
    tensors = draw_tensors(name) if tensors is None else tensors
    if several:
        write_parts(folder, tensors)
    else:
        write_tensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    return folder


def convert_by_penzai(name, tensors, use_layer_stack=False):
    """The model that Penzai's own converter makes; of Gemma 3, which it lacks, that of Gemma 2."""
    config = CONFIGS[name].get("text_config", CONFIGS[name])
    if config["model_type"].startswith("gemma"):
        return _convert_gemma(config, tensors, use_layer_stack)
    defaults = {"rope_theta": 10000.0, "rotary_pct": 0.5, "rotary_emb_base": 10000.0}
    attributes = {**defaults, **config}

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
    hidden, size, keys = (config[x] for x in ("hidden_size", "head_dim", "num_key_value_heads"))
    preset = {
        "num_decoder_blocks": config["num_hidden_layers"],
        "vocab_size": config["vocab_size"],
        "num_kv_heads": keys,
        "query_head_multiplier": config["num_attention_heads"] // keys,
        "embedding_dim": hidden,
        "projection_dim": size,
        "mlp_hidden_dim": config["intermediate_size"],
        "rms_norm_eps": config["rms_norm_eps"],
    }
    norms = {"pre_attention_norm": "input_layernorm", "pre_ffw_norm": "post_attention_layernorm"}
    if config["model_type"] != "gemma":
        for place in ("pre", "post"):
            norms[f"{place}_ffw_norm"] = f"{place}_feedforward_layernorm"
        norms["post_attention_norm"] = "post_attention_layernorm"
        slides = llamalike_common.AttentionTypeSlidingWindowCausal(config["sliding_window"])
        full = llamalike_common.AttentionTypeGlobalCausal()
        kinds = tuple(slides if "slid" in kind else full for kind in config["layer_types"])
        preset |= {
            "use_post_attn_norm": True,
            "use_post_ffw_norm": True,
            "attention_type": kinds if slides in kinds else full,
            "attn_logits_soft_cap": config["attn_logit_softcapping"],
            "final_logit_softcap": config["final_logit_softcapping"],
            "query_scaling_factor": config["query_pre_attn_scalar"] ** -0.5,
        }
    tensors = {key.removeprefix("language_model."): tensor for key, tensor in tensors.items()}
    arrays = {
        "embedder": {"input_embedding": tensors["model.embed_tokens.weight"]},
        "final_norm": {"scale": tensors["model.norm.weight"]},
    }
    for number in range(config["num_hidden_layers"]):
        start = f"model.layers.{number}."
        own = {key.removeprefix(start).removesuffix(".weight"): x for key, x in tensors.items()}
        q, k, v = (
            own[f"self_attn.{each}_proj"].reshape(-1, size, hidden).transpose(0, 2, 1)
            for each in "qkv"
        )
        layer = {flax: {"scale": own[torch]} for flax, torch in norms.items()} | {
            "mlp/gating_einsum": {"w": jnp.stack([own["mlp.gate_proj"], own["mlp.up_proj"]])},
            "mlp/linear": {"w": own["mlp.down_proj"].T},
            "attn/attn_vec_einsum": {"w": own["self_attn.o_proj"].T.reshape(-1, size, hidden)},
            "attn/q_einsum": {"w": q},
            "attn/kv_einsum": {"w": jnp.stack([k, v])},
        }
        arrays |= {f"layer_{number}/{key}": value for key, value in layer.items()}
    with (
        mock.patch.dict(gemma._GEMMA_PRESETS, here=preset),
        mock.patch.dict(gemma._NEEDS_GATING_TRANSPOSE, here=True),
    ):
        return gemma.gemma_from_pretrained_checkpoint(
            jax.tree.map(jnp.asarray, arrays), use_layer_stack=use_layer_stack, preset_name="here"
        )
