"""The models by which inferred names are judged, by what they are."""

from collections.abc import Callable

from tests.choosing import named_models as own
from tests.choosing import named_models_of_flax as flax
from tests.choosing import named_models_of_libraries as others
from tests.choosing import named_models_of_papers as papers
from tests.choosing import named_models_without_attention as plain
from tests.choosing.llama_variants import VARIANTS
from tests.choosing.named_models import NamedModel

TRANSFORMERS: dict[str, Callable[[], NamedModel]] = {
    "Penzai Llama, grouped queries": lambda: others.penzai("llama"),
    "Penzai Llama, as many keys": lambda: others.penzai(
        "llama", num_kv_heads=4, query_head_multiplier=1
    ),
    "Penzai Gemma, one key, tied": lambda: others.penzai(
        "gemma", num_kv_heads=1, query_head_multiplier=4
    ),
    "Penzai Mistral": lambda: others.penzai("mistral"),
    "Penzai GPT-NeoX": lambda: others.penzai("gpt_neox", num_attention_heads=4),
    "Penzai, layer stack": lambda: others.penzai("llama", use_layer_stack=True),
    "Penzai, rolled layer stack": lambda: others.penzai("llama", True, use_layer_stack=True),
    "Llama as torch stores it": own.torch_llama,
    "Llama, its gradient program": own.torch_llama_gradients,
    "Llama, neighbours rotated": lambda: own.torch_llama(own.rotary_interleaved),
    "Llama, rotated as complex numbers": lambda: own.torch_llama(own.rotary_complex),
    **VARIANTS,
    "Llama with LoRA": own.lora,
    "GPT-2, fused and tied": own.gpt2,
    "scanned, rematerialised": own.scanned,
    "scanned, its gradient program": lambda: own.scanned(gradients=True),
    "mixture of experts": own.experts,
    "T5, relative positions": lambda: own.relative_bias(4),
    "Phi-3, fused unequally": papers.fused_unequally,
    "Switch, dispatched experts": papers.dispatched_experts,
    "Gemma of Flax": papers.gemma,
    "GPT-NeoX, heads first": papers.heads_first,
    "encoder and decoder": own.encoder_decoder,
    "Equinox transformer": others.equinox_transformer,
    "Flax NNX transformer": flax.nnx_transformer,
    "Flax linen transformer": flax.linen_transformer,
    "Flax linen, scanned": flax.linen_scanned,
    "Flax linen ViT": lambda: flax.vit(3),
    "Flax linen BERT": lambda: flax.bert(8),
    "Haliax transformer": others.haliax_transformer,
}

# Of these much is not decided by any program; what is named must be right all the same.
OTHERS: dict[str, Callable[[], NamedModel]] = {
    "Falcon, groups with their keys": papers.groups_with_their_keys,
    "DeepSeek, latent attention": papers.latent_attention,
    "square MLP": plain.square_mlp,
    "Equinox MLP": others.equinox_mlp,
    "two towers (CLIP)": plain.two_towers,
    "autoencoder": plain.autoencoder,
    "convolutions": plain.conv_net,
    "MLP-Mixer": plain.mixer,
    "embedding tables (DLRM)": plain.embedding_tables,
    "Equinox LSTM": others.equinox_lstm,
    "Flax linen LSTM": flax.linen_lstm,
}

MODELS = TRANSFORMERS | OTHERS
