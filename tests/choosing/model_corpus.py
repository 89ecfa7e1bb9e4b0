"""The models by which inferred names are judged, by what they are."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from tests.choosing import named_models as own
from tests.choosing import named_models_of_experts as experts
from tests.choosing import named_models_of_flax as flax
from tests.choosing import named_models_of_latents as latents
from tests.choosing import named_models_of_libraries as others
from tests.choosing import named_models_of_papers as papers
from tests.choosing import named_models_of_streams as streams
from tests.choosing import named_models_without_attention as plain
from tests.choosing.llama_variants import VARIANTS
from tests.choosing.named_models import NamedModel
from tests.choosing.named_models_of_additions import ADDITIONS, ADDITIONS_LEFT_OPEN
from tests.choosing.named_models_of_agreements import AGREEMENTS
from tests.choosing.named_models_of_arrangements import ARRANGEMENTS, ARRANGEMENTS_LEFT_OPEN
from tests.choosing.named_models_of_checkpoints import CHECKPOINTS
from tests.choosing.named_models_of_decoders import DECODERS, difference_of_softmaxes
from tests.choosing.named_models_of_families import FAMILIES, FAMILIES_LEFT_OPEN
from tests.choosing.named_models_of_films import FILMS, FILMS_LEFT_OPEN
from tests.choosing.named_models_of_frameworks import FRAMEWORKS, FRAMEWORKS_LEFT_OPEN
from tests.choosing.named_models_of_ideas import IDEAS, IDEAS_LEFT_OPEN
from tests.choosing.named_models_of_loops import LOOPS, LOOPS_LEFT_OPEN
from tests.choosing.named_models_of_modules import MODULES
from tests.choosing.named_models_of_pictures import PICTURES, PICTURES_LEFT_OPEN
from tests.choosing.named_models_of_senses import SENSES, SENSES_LEFT_OPEN
from tests.choosing.named_models_of_sequences import SEQUENCES
from tests.choosing.named_models_of_streams import STREAMS
from tests.choosing.named_models_of_structures import STRUCTURES
from tests.choosing.named_models_of_texts import TEXTS
from tests.choosing.named_models_of_trainers import TRAINERS
from tests.choosing.named_models_of_writings import WRITINGS, WRITINGS_LEFT_OPEN


def gradients(build: Callable[[], NamedModel]) -> NamedModel:
    """The gradient program of a model, of a loss that any results have."""
    model = build()

    def loss(weights, *inputs):
        results = jax.tree.leaves(model.function(weights, *inputs))
        return sum((jnp.abs(result) ** 2).mean() for result in results)

    return dataclasses.replace(model, function=jax.grad(loss))


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
    "GPT-2, its gradient program": lambda: gradients(own.gpt2),
    "scanned, rematerialised": own.scanned,
    "scanned, its gradient program": lambda: own.scanned(gradients=True),
    "mixture of experts": own.experts,
    "T5, relative positions": lambda: own.relative_bias(4),
    "Phi-3, fused unequally": papers.fused_unequally,
    "Switch, dispatched experts": papers.dispatched_experts,
    "Gemma of Flax": papers.gemma,
    "GPT-NeoX, heads first": papers.heads_first,
    "DeepSeek, latent attention": papers.latent_attention,
    "DeepSeek, scores added": lambda: latents.weights_of_the_paper(True, 4),
    "DeepSeek, scores added, its gradient program": lambda: gradients(
        lambda: latents.weights_of_the_paper(True, 4)
    ),
    "DeepSeek, parts joined": lambda: latents.weights_of_the_paper(False, 2),
    "DeepSeek, latents in one weight": latents.latents_in_one_weight,
    "DeepSeek, scanned": latents.scanned,
    "DeepSeek, shared experts": experts.shared_experts,
    "Mixtral, experts apart": experts.experts_apart,
    "Llama 4, scaled inputs": experts.scaled_inputs,
    "Megablox, sorted tokens": experts.sorted_tokens,
    **DECODERS,
    **STREAMS,
    "ALBERT, its gradient program": lambda: gradients(streams.factorised),
    "DiT, its gradient program": lambda: gradients(streams.diffusion),
    "Falcon, groups with their keys": papers.groups_with_their_keys,
    "encoder and decoder": own.encoder_decoder,
    "Equinox transformer": others.equinox_transformer,
    "Equinox ViT, scanned": others.equinox_vit,
    "Flax NNX transformer": flax.nnx_transformer,
    "Flax linen transformer": flax.linen_transformer,
    "Flax linen, scanned": flax.linen_scanned,
    "Flax linen ViT": lambda: flax.vit(3),
    "Flax linen BERT": lambda: flax.bert(8),
    "Haliax transformer": others.haliax_transformer,
    **ADDITIONS,
    **ARRANGEMENTS,
    **CHECKPOINTS,
    **FAMILIES,
    **FILMS,
    **FRAMEWORKS,
    **IDEAS,
    **LOOPS,
    **MODULES,
    **PICTURES,
    **SENSES,
    **TEXTS,
    **TRAINERS,
    **WRITINGS,
}

# Of these much is not decided by any program; what is named must be right all the same.
OTHERS: dict[str, Callable[[], NamedModel]] = {
    "DeepSeek, absorbed for decoding": latents.absorbed,
    "bottleneck behind an encoder": latents.bottleneck,
    "Perceiver": streams.perceiver,
    "Swin": streams.windows_in_stages,
    "differential transformer": difference_of_softmaxes,
    "RecurrentGemma": plain.gated_recurrence,
    "RWKV": plain.linear_recurrence,
    "Mamba": plain.state_space,
    "Mamba, its gradient program": lambda: gradients(plain.state_space),
    "bottleneck, its gradient program": lambda: gradients(latents.bottleneck),
    "square MLP": plain.square_mlp,
    "Equinox MLP": others.equinox_mlp,
    "two towers (CLIP)": plain.two_towers,
    "autoencoder": plain.autoencoder,
    "convolutions": plain.conv_net,
    "MLP-Mixer": plain.mixer,
    "embedding tables (DLRM)": plain.embedding_tables,
    "Equinox LSTM": others.equinox_lstm,
    "Flax linen LSTM": flax.linen_lstm,
    **ADDITIONS_LEFT_OPEN,
    **AGREEMENTS,
    **ARRANGEMENTS_LEFT_OPEN,
    **FAMILIES_LEFT_OPEN,
    **FILMS_LEFT_OPEN,
    **FRAMEWORKS_LEFT_OPEN,
    **IDEAS_LEFT_OPEN,
    **LOOPS_LEFT_OPEN,
    **PICTURES_LEFT_OPEN,
    **SENSES_LEFT_OPEN,
    **SEQUENCES,
    **STRUCTURES,
    **WRITINGS_LEFT_OPEN,
}

MODELS = TRANSFORMERS | OTHERS
