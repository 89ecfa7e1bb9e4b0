"""Small models of transformers, whose every weight matters, and their logits.

transformers and torch are imported when a model is made. Both versions 4 and 5 of transformers can
make them.
"""

import numpy as np

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}

# The class of the model, that of its configuration, and what differs from the sizes above.
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {"num_key_value_heads": 2, "rms_norm_eps": 1e-5}),
    "llama_one_key_head": ("LlamaForCausalLM", "LlamaConfig", {"num_key_value_heads": 1}),
    "llama_tied": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {"num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "mistral": (
        "MistralForCausalLM",
        "MistralConfig",
        {"num_key_value_heads": 2, "sliding_window": 3},
    ),
    "mistral_all_positions": (
        "MistralForCausalLM",
        "MistralConfig",
        {"num_key_value_heads": 4, "sliding_window": None},
    ),
    "gpt_neox": (
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {"layer_norm_eps": 1e-3, "rotary_pct": 0.5},
    ),
    "gpt_neox_tied": (
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {"tie_word_embeddings": True, "hidden_act": "relu", "rotary_pct": 1.0},
    ),
}

_GEMMA = {"head_dim": 16, "num_key_value_heads": 2}
_FOUR_LAYERS = {"num_hidden_layers": 4, "sliding_window": 3}

MODELS |= {
    "gemma": ("GemmaForCausalLM", "GemmaConfig", _GEMMA | {"rms_norm_eps": 1e-5}),
    "gemma_one_key_head": (
        "GemmaForCausalLM",
        "GemmaConfig",
        {"head_dim": 16, "num_key_value_heads": 1},
    ),
    "gemma_all_key_heads": (
        "GemmaForCausalLM",
        "GemmaConfig",
        {"head_dim": 16, "num_key_value_heads": 4},
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        _GEMMA | {"sliding_window": 3, "query_pre_attn_scalar": 24},
    ),
    "gemma2_all_positions": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        _GEMMA
        | {
            "layer_types": ["full_attention"] * 2,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        _GEMMA | _FOUR_LAYERS | {"sliding_window_pattern": 2, "query_pre_attn_scalar": 24},
    ),
    "gemma3_longer_texts": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        _GEMMA
        | {
            "sliding_window": 3,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
}

TOKENS = np.random.default_rng(0).integers(0, 40, (2, 9))


def model_of_torch(name, dtype="float32", **changes):
    """A model with weights at random: of size one where it computes, norms and biases too."""
    import torch
    import transformers

    architecture, configuration, own = MODELS[name]
    config = getattr(transformers, configuration)(**(_SIZES | own | changes))
    model = getattr(transformers, architecture)(config)
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter += 0.3 * noise
            else:
                parameter.copy_(noise / parameter.shape[1] ** 0.5)
    return model.to(getattr(torch, dtype)).eval()


def logits_of_torch(model):
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(TOKENS)).logits.float().numpy()
