"""The sizes of published models, as the configurations that Hugging Face has of them.

Of each family there is a table: what its publication says of each model, and the source. How many
parameters a model has is not computed from the sizes, but published too: by the paper, or by the
model card, which counts what is stored. Of models that look at images too, it is the text part.

Llama 3.1 and later stretch their positions for long texts, which Penzai's model does not do: it has
as many parameters and moves as much, so their configurations here say nothing of it.
"""

from collections.abc import Iterator
from typing import Any

_LLAMA_2 = "Touvron et al. 2023, arXiv:2307.09288; model cards meta-llama/Llama-2-*-hf"
_LLAMA_3 = "Grattafiori et al. 2024, arXiv:2407.21783, table 3; model cards meta-llama/*"
_LLAMA_3_2 = "model cards meta-llama/Llama-3.2-1B and Llama-3.2-3B"
_LLAMA_3_3 = "model card meta-llama/Llama-3.3-70B-Instruct"
_MISTRAL = "Jiang et al. 2023, arXiv:2310.06825, table 1; model card mistralai/Mistral-7B-v0.1"
_GEMMA = "Gemma Team 2024, arXiv:2403.08295, tables 1 and 2; model cards google/gemma-*"
_GEMMA_2 = "Gemma Team 2024, arXiv:2408.00118, tables 1 and 2; model cards google/gemma-2-*"
_GEMMA_3 = "Gemma Team 2025, arXiv:2503.19786, table 1; model cards google/gemma-3-*-pt"
_NEOX = "Black et al. 2022, arXiv:2204.06745, section 2; model card EleutherAI/gpt-neox-20b"
_PYTHIA = "Biderman et al. 2023, arXiv:2304.01373, table 1; model cards EleutherAI/pythia-*"
_PYTHIA_14M = "model card EleutherAI/pythia-14m"

# Name: parameters, source; hidden size, size of the feed-forward layer, heads, heads of keys and
# values, layers, vocabulary; the base of positions, whether the table of tokens is used twice.
_LLAMA: dict[str, tuple[Any, ...]] = {
    "llama-2-7b": ("6.74B", _LLAMA_2, 4096, 11008, 32, 32, 32, 32000, 1e4, False),
    "llama-2-13b": ("13.0B", _LLAMA_2, 5120, 13824, 40, 40, 40, 32000, 1e4, False),
    "llama-2-70b": ("69.0B", _LLAMA_2, 8192, 28672, 64, 8, 80, 32000, 1e4, False),
    "llama-3-8b": ("8.03B", _LLAMA_3, 4096, 14336, 32, 8, 32, 128256, 5e5, False),
    "llama-3-70b": ("70.6B", _LLAMA_3, 8192, 28672, 64, 8, 80, 128256, 5e5, False),
    "llama-3.1-8b": ("8.03B", _LLAMA_3, 4096, 14336, 32, 8, 32, 128256, 5e5, False),
    "llama-3.1-70b": ("70.6B", _LLAMA_3, 8192, 28672, 64, 8, 80, 128256, 5e5, False),
    "llama-3.1-405b": ("406B", _LLAMA_3, 16384, 53248, 128, 8, 126, 128256, 5e5, False),
    "llama-3.2-1b": ("1.24B", _LLAMA_3_2, 2048, 8192, 32, 8, 16, 128256, 5e5, True),
    "llama-3.2-3b": ("3.21B", _LLAMA_3_2, 3072, 8192, 24, 8, 28, 128256, 5e5, True),
    "llama-3.3-70b": ("70.6B", _LLAMA_3_3, 8192, 28672, 64, 8, 80, 128256, 5e5, False),
    "mistral-7b": ("7.24B", _MISTRAL, 4096, 14336, 32, 8, 32, 32000, 1e4, False),
}

# The same up to the vocabulary, with the size of a head after the heads; the length of a sliding
# window, None for none, and what queries are scaled by, the inverse square root of it.
_GEMMAS: dict[str, tuple[Any, ...]] = {
    "gemma-2b": ("2.51B", _GEMMA, 2048, 16384, 8, 1, 256, 18, 256000, None, 256),
    "gemma-7b": ("8.54B", _GEMMA, 3072, 24576, 16, 16, 256, 28, 256000, None, 256),
    "gemma-2-2b": ("2.61B", _GEMMA_2, 2304, 9216, 8, 4, 256, 26, 256000, 4096, 256),
    "gemma-2-9b": ("9.24B", _GEMMA_2, 3584, 14336, 16, 8, 256, 42, 256000, 4096, 256),
    "gemma-2-27b": ("27.2B", _GEMMA_2, 4608, 36864, 32, 16, 128, 46, 256000, 4096, 144),
    "gemma-3-1b": ("1.00B", _GEMMA_3, 1152, 6912, 4, 1, 256, 26, 262144, 512, 256),
    "gemma-3-4b": ("3.88B", _GEMMA_3, 2560, 10240, 8, 4, 256, 34, 262208, 1024, 256),
    "gemma-3-12b": ("11.8B", _GEMMA_3, 3840, 15360, 16, 8, 256, 48, 262208, 1024, 256),
    "gemma-3-27b": ("27.0B", _GEMMA_3, 5376, 21504, 32, 16, 128, 62, 262208, 1024, 168),
}

# Name: parameters, source; hidden size, heads, layers, vocabulary. The feed-forward layer is four
# times as wide.
_GPT_NEOX: dict[str, tuple[Any, ...]] = {
    "gpt-neox-20b": ("20,554,567,680", _NEOX, 6144, 64, 44, 50432),
    "pythia-14m": ("14.1M", _PYTHIA_14M, 128, 4, 6, 50304),
    "pythia-70m": ("70.4M", _PYTHIA, 512, 8, 6, 50304),
    "pythia-160m": ("162M", _PYTHIA, 768, 12, 12, 50304),
    "pythia-410m": ("405M", _PYTHIA, 1024, 16, 24, 50304),
    "pythia-1b": ("1.01B", _PYTHIA, 2048, 8, 16, 50304),
    "pythia-1.4b": ("1.41B", _PYTHIA, 2048, 16, 24, 50304),
    "pythia-2.8b": ("2.78B", _PYTHIA, 2560, 32, 32, 50304),
    "pythia-6.9b": ("6.86B", _PYTHIA, 4096, 32, 32, 50432),
    "pythia-12b": ("11.8B", _PYTHIA, 5120, 40, 36, 50688),
}

Sizes = tuple[str, str, dict[str, Any]]
"""How many parameters a model has, the source, and its configuration."""


def _all_sizes() -> Iterator[tuple[str, Sizes]]:
    for name, row in _LLAMA.items():
        count, source, hidden, inner, heads, keys, layers, vocabulary, theta, tied = row
        config = {
            "model_type": "mistral" if name.startswith("mistral") else "llama",
            **_sizes(hidden, inner, heads, layers, vocabulary),
            "num_key_value_heads": keys,
            "rms_norm_eps": 1e-5,
            "rope_theta": theta,
            "tie_word_embeddings": tied,
        }
        if name.startswith("mistral"):
            config["sliding_window"] = 4096
        yield name, (count, source, config)
    for name, row in _GEMMAS.items():
        count, source, hidden, inner, heads, keys, size, layers, vocabulary, window, scalar = row
        config = {
            "model_type": {_GEMMA: "gemma", _GEMMA_2: "gemma2", _GEMMA_3: "gemma3_text"}[source],
            **_sizes(hidden, inner, heads, layers, vocabulary),
            "num_key_value_heads": keys,
            "head_dim": size,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
        }
        if window is not None:
            config |= {"sliding_window": window, "query_pre_attn_scalar": scalar}
        yield name, (count, source, config)
    for name, (count, source, hidden, heads, layers, vocabulary) in _GPT_NEOX.items():
        config = {
            "model_type": "gpt_neox",
            **_sizes(hidden, 4 * hidden, heads, layers, vocabulary),
            "hidden_act": "gelu_fast" if source == _NEOX else "gelu",
            "rotary_pct": 0.25,
        }
        yield name, (count, source, config)


def _sizes(hidden: int, inner: int, heads: int, layers: int, vocabulary: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
    }


PUBLISHED_SIZES: dict[str, Sizes] = dict(_all_sizes())
"""The models, by name."""
