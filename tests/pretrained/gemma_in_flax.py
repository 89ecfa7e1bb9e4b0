"""Gemma's weights in the form of Google's checkpoints for Flax, made with NumPy."""

import numpy as np


def checkpoint(tensors, config):
    """By layer and name, from the tensors of transformers."""
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    size, hidden = config["head_dim"], config["hidden_size"]
    found = {
        "transformer/embedder": {"input_embedding": tensors["model.embed_tokens.weight"]},
        "transformer/final_norm": {"scale": tensors["model.norm.weight"]},
    }
    for i in range(config["num_hidden_layers"]):
        own = {k.removeprefix(f"model.layers.{i}."): v for k, v in tensors.items()}
        layer = f"transformer/layer_{i}"
        query, key, value = (
            np.swapaxes(own[f"self_attn.{name}_proj.weight"].reshape(-1, size, hidden), 1, 2)
            for name in "qkv"
        )
        if heads == keys:
            found[f"{layer}/attn/qkv_einsum"] = {"w": np.stack([query, key, value])}
        else:
            found[f"{layer}/attn/q_einsum"] = {"w": query}
            found[f"{layer}/attn/kv_einsum"] = {"w": np.stack([key, value])}
        output = own["self_attn.o_proj.weight"].T.reshape(heads, size, hidden)
        found[f"{layer}/attn/attn_vec_einsum"] = {"w": output}
        gate, up = (own[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        found[f"{layer}/mlp/gating_einsum"] = {"w": np.stack([gate, up])}
        found[f"{layer}/mlp/linear"] = {"w": own["mlp.down_proj.weight"].T}
        two_more = "pre_feedforward_layernorm.weight" in own
        norms = {
            "pre_attention_norm": "input_layernorm",
            "pre_ffw_norm": "pre_feedforward_layernorm" if two_more else "post_attention_layernorm",
        }
        if two_more:
            norms["post_attention_norm"] = "post_attention_layernorm"
            norms["post_ffw_norm"] = "post_feedforward_layernorm"
        for flax, name in norms.items():
            found[f"{layer}/{flax}"] = {"scale": own[f"{name}.weight"]}
    return found


def preset(config):
    """What Penzai's table of Gemma's sizes would say of a configuration of transformers 5."""
    keys = config["num_key_value_heads"]
    found = {
        "num_decoder_blocks": config["num_hidden_layers"],
        "vocab_size": config["vocab_size"],
        "num_kv_heads": keys,
        "query_head_multiplier": config["num_attention_heads"] // keys,
        "embedding_dim": config["hidden_size"],
        "projection_dim": config["head_dim"],
        "mlp_hidden_dim": config["intermediate_size"],
        "rms_norm_eps": config["rms_norm_eps"],
    }
    if config["model_type"] != "gemma":
        found |= {
            "use_post_attn_norm": True,
            "use_post_ffw_norm": True,
            "attn_logits_soft_cap": config["attn_logit_softcapping"],
            "final_logit_softcap": config["final_logit_softcapping"],
            "query_scaling_factor": config["query_pre_attn_scalar"] ** -0.5,
        }
    return found
