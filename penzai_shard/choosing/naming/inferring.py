"""Logical axis names for the weights of any function, from its traced program."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penzai_shard.choosing.naming.attention_roles import name_attention
from penzai_shard.choosing.naming.attentions import attentions_of
from penzai_shard.choosing.naming.class_names import ClassNames
from penzai_shard.choosing.naming.concatenated_roles import name_concatenated
from penzai_shard.choosing.naming.expert_roles import name_experts
from penzai_shard.choosing.naming.inferred_names import InferredNames
from penzai_shard.choosing.naming.latent_roles import name_latents
from penzai_shard.choosing.naming.lookup_roles import name_outputs, name_positions, name_vocabulary
from penzai_shard.choosing.naming.overriding import Overrides
from penzai_shard.choosing.naming.path_words import name_by_path_words
from penzai_shard.choosing.naming.program_facts import ProgramFacts
from penzai_shard.choosing.naming.separate_streams import (
    leave_other_streams_open,
    tell_streams_apart,
)
from penzai_shard.choosing.naming.stacking_roles import name_gates, name_layers, name_modulations
from penzai_shard.choosing.naming.stream_roles import (
    name_embedding,
    name_joint,
    name_neurons,
    name_ranks,
    name_ranks_of_tables,
    tell_groups,
)
from penzai_shard.choosing.naming.traced_call import OF_TOKENS, AxisNames, traced_call
from penzai_shard.choosing.naming.weight_names import names_of_weights


def infer_names(
    function: Callable[..., Any],
    params: Any,
    *inputs: Any,
    input_names: Sequence[AxisNames | None] = OF_TOKENS,
    overrides: Mapping[str, AxisNames] | None = None,
) -> InferredNames:
    """Finds logical axis names for the weights of a function that have none.

    ``function(params, *inputs)`` is traced, without values and without devices. Dimensions that
    its operations tie together are one logical axis; equal lengths alone never are. A logical axis
    gets its name by what the program does with it: what is read from the residual stream and added
    to it is the ``embedding``; what attention contracts is a ``projection`` and what it does side
    by side are ``heads`` (``head_groups`` and ``query_heads`` where keys and values have fewer);
    where one weight makes queries, keys and values, that along which these stand is ``qkv``; by way
    of what they are made is a ``q_lora_rank`` or ``kv_lora_rank``; what stands between two products
    is ``neurons``, or ``conv_channels`` beside them, each of which a convolution takes by itself;
    what inputs are looked up in is the ``vocabulary``, what counted places are looked up in are
    ``positions``; what loops take one by one are ``layers``. What the program leaves open may be
    named by a word in the path, such as ``lm_head``. What is still open has no name, and the report
    says why: a wrong name is worse than none.

    Args:
        function: Any function that JAX can trace, which returns arrays; best the logits of a model.
        params: Its weights: any pytree of arrays or ``jax.ShapeDtypeStruct`` objects.
        *inputs: Its other arguments, in the same form.
        input_names: For each input the logical axes of its dimensions, None for one without. They
            are given to all arrays of an input that have so many dimensions. Those of named arrays
            are known. By default inputs are tokens, batch x sequence; others, such as arrays of
            floating point, need theirs.
        overrides: Names by path pattern, as ``name_axes`` takes them, for what is to be called
            otherwise. A logical axis that gets its name so has it in all weights.

    Returns:
        The names by path, each with its reason.

    Raises:
        RuleTypeError: The names of an input, or those of an override, do not fit.
        SelectionError: An override matches no array, or two match one.
        PropagationError: This jaxlib does not say which dimensions belong together.

    The rules that say which dimensions an operation ties are those of Shardy, XLA's partitioner
    (https://openxla.org/shardy).

    >>> import jax
    >>> import jax.numpy as jnp
    >>> def logits(weights, tokens):
    ...     x = weights["embed"][tokens]
    ...     for layer in weights["layers"]:
    ...         x = x + jax.nn.relu(x @ layer["up"]) @ layer["down"]
    ...     return x @ weights["embed"].T
    >>> layer = {"up": jnp.ones((6, 8)), "down": jnp.ones((8, 6))}
    >>> weights = {"embed": jnp.ones((10, 6)), "layers": [layer, layer]}
    >>> inferred = infer_names(logits, weights, jnp.ones((2, 4), int))
    >>> inferred["embed"], inferred["layers/1/up"]
    (('vocabulary', 'embedding'), ('embedding', 'neurons'))
    """
    call = traced_call(function, params, inputs, input_names)
    chosen = Overrides(call.weights, overrides or {})
    names = ClassNames()
    chosen.name_classes(names)
    facts = ProgramFacts(call)
    name_classes(facts, names)
    named = chosen.applied(names_of_weights(facts, names))
    return InferredNames(
        {weight.path: each for weight, each in zip(call.weights, named, strict=True)},
        {weight.path: weight.shape for weight in call.weights},
    )


def name_classes(facts: ProgramFacts, names: ClassNames) -> None:
    """Names the classes of a traced call by what the program does with them."""
    for weight in facts.call.weights:
        for parts, name in zip(weight.parts, weight.names, strict=False):
            if name is not None and len(parts) == 1:
                names.call(parts[0], str(name), f"{weight.path} has that name already")
    name_embedding(facts, names)
    name_vocabulary(facts, names)
    name_layers(facts, names)
    attentions = tuple(attentions_of(facts, names))
    name_latents(facts, names, attentions)
    name_attention(facts, names, attentions)
    name_experts(facts, names)
    name_neurons(facts, names)
    name_ranks(facts, names)
    name_ranks_of_tables(facts, names)
    name_positions(facts, names)
    name_concatenated(facts, names, attentions)
    name_gates(facts, names)
    name_modulations(facts, names)
    name_joint(facts, names)
    name_by_path_words(facts, names)
    name_outputs(facts, names)
    tell_groups(facts, names)
    leave_other_streams_open(facts, names)
    tell_streams_apart(facts, names, attentions)
    for part, name in facts.of_inputs.items():
        if part not in names.roles:
            names.call(part, str(name), "an input has that name, and the program ties both")
