"""Keeps the axes of arrays in the order in which matrix products take and give them.

Penzai takes the order of a result's axes from the first array of an operation. Where that is the
smaller one, as a mask before the logits or a table before the tokens, the larger one is moved.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from penzai import pz

from penzai_shard.layers.wrapper import WrapperLayer
from penzai_shard.meshes import auto_context


def _contract(layer: Any, arrays: tuple[Any, ...], **side_inputs: Any) -> Any:
    """One product of whole arrays, in the order in which ``dot_general`` gives its result."""
    jax.eval_shape(layer, arrays)  # Refuses what the layer refuses.
    given = [*layer.input_axes, layer.output_axes]
    *inputs, output = (a if isinstance(a, dict) else {name: name for name in a} for a in given)

    # A symbol of the product is an index of the layer, or a name that only the arrays have.
    pairs = zip(arrays, inputs, strict=True)
    terms = [[(n in index, index.get(n, n)) for n in a.named_axes] for a, index in pairs]
    names = {(True, index): name for name, index in output.items()}
    # First what all arrays have, then the rest of each. In any other order the result is moved.
    shared = [symbol for symbol in terms[0] if all(symbol in term for term in terms)]
    symbols = dict.fromkeys(symbol for term in (shared, *terms) for symbol in term)
    order = [symbol for symbol in symbols if not symbol[0] or symbol in names]
    operands = [x for a, term in zip(arrays, terms, strict=True) for x in (a.data_array, term)]
    return pz.nx.wrap(jnp.einsum(*operands, order)).tag(*(names.get(s, s[1]) for s in order))


def _rescale(layer: Any, argument: Any, **side_inputs: Any) -> Any:
    jax.eval_shape(layer, argument)
    return argument * layer.weights.value


def _look_up(layer: Any, tokens: Any, **side_inputs: Any) -> Any:
    table, vocabulary = layer.table.embeddings.value, layer.table.vocabulary_axis
    names = [name for name in table.named_axes if name != vocabulary]
    if tokens.positional_shape or not tokens.named_shape.keys().isdisjoint(names):
        return layer(tokens)
    return pz.nx.nmap(lambda t, rows: rows[t])(tokens, table.untag(vocabulary, *names)).tag(*names)


def _mask(layer: Any, logits: Any, **side_inputs: Any) -> Any:
    kept = dataclasses.replace(layer, masked_out_value=False)(pz.nx.wrap(True), **side_inputs)
    return pz.nx.nmap(lambda x, k: jnp.where(k, x, layer.masked_out_value))(logits, kept)


# By exact type, as a layer that derives from one of these may compute something else.
_WAYS: dict[Any, Any] = {
    pz.nn.NamedEinsum: _contract,
    pz.nn.EmbeddingLookup: _look_up,
    pz.nn.ApplyCausalAttentionMask: _mask,
    pz.nn.ApplyCausalSlidingWindowAttentionMask: _mask,
    pz.nn.ApplyExplicitAttentionMask: _mask,
}


def _find_way(layer: Any) -> Any:
    is_scale = type(layer) is pz.nn.Linear and not layer.in_axis_names + layer.out_axis_names
    return _rescale if is_scale else _WAYS.get(type(layer))


def moves_axes(layer: Any) -> bool:
    """Whether a layer is one of Penzai's that may move arrays: where ``keep_axis_order`` looks.

    >>> moves_axes(pz.nn.NamedEinsum((("a",), ("a",)), ())), moves_axes(pz.nn.Softmax("a"))
    (True, False)
    """
    return _find_way(layer) is not None


@pz.pytree_dataclass
class KeepAxisOrder(WrapperLayer):
    """Wraps a layer so that it moves no large array to bring its axes into another order.

    Values by name, gradients, state and parameter names stay; sums may be taken in another order.
    What changes is the order of axes in memory, for Penzai's own layers that contract by name,
    rescale, look up embeddings or mask attention. Other layers run as they are.

    Attributes:
        body: The layer.

    >>> scale = pz.nn.Linear.from_config("w", jax.random.key(0), {}, {}, parallel_axes={"a": 3})
    >>> list(KeepAxisOrder(scale)(pz.nx.ones({"b": 2, "a": 3})).named_shape)
    ['b', 'a']
    """

    body: Any

    def _run(self, argument: Any, side_inputs: dict[str, Any]) -> Any:
        way = _find_way(self.body) or type(self.body).__call__
        with auto_context():
            return way(self.body, argument, **side_inputs)
