"""What comes out of models of Penzai, to compare."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from penzai import pz

from penzai_shard.library_apis.jax_api import UNOPTIMISED_COMPILATION, is_weakly_typed
from tests.pretrained.tensors_in_memory import whole_index

# In units of a rounding of the greatest logit. Seen are 10; torch is up to 9 from its own float64.
ROUNDINGS = 24


def filled(model, views, reader):
    """A converted model with all values read at once, as one device would have it."""
    parameters = {}

    def value(node):
        if not isinstance(node, pz.ParameterValue):
            return node
        if node.label not in parameters:
            parameters[node.label] = _filled(node, views[node.label], reader)
        return parameters[node.label]

    return jax.tree_util.tree_map(
        value, model, is_leaf=lambda node: isinstance(node, pz.ParameterValue)
    )


def _filled(parameter, view, reader):
    array = jnp.asarray(view.read(reader, whole_index(view.shape)))
    structs, tree = jax.tree_util.tree_flatten(parameter.value)
    assert [(s.shape, s.dtype) for s in structs] == [(array.shape, array.dtype)]
    return pz.Parameter(value=jax.tree_util.tree_unflatten(tree, [array]), label=parameter.label)


def logits(model, tokens):
    """The logits of a batch of tokens, by position."""
    named = pz.nx.wrap(jnp.asarray(tokens)).tag("batch", "seq")
    positions = pz.nx.arange("seq", tokens.shape[1])
    model = pz.unbind_params(model, freeze=True)

    @functools.partial(jax.jit, compiler_options=UNOPTIMISED_COMPILATION)
    def run(unbound, parameters):
        return pz.bind_variables(unbound, parameters)(named, token_positions=positions)

    return np.asarray(run(*model).unwrap("batch", "seq", "vocabulary").astype(jnp.float32))


def assert_same_logits(ours, theirs):
    """Up to rounding, as torch and XLA sum in another order."""
    unit = np.finfo(np.float32).eps * np.abs(theirs).max()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=ROUNDINGS * unit)


def parameters(model):
    """The values of a model's parameters, by label."""
    _, found = pz.unbind_params(model)
    return {p.label: np.asarray(p.value.data_array) for p in found}


def assert_same_models(model, expected):
    """Every parameter and every constant to the bit, in the same layers, under the same names."""
    ours, theirs = (pz.unbind_params(m, freeze=True) for m in (model, expected))
    assert [p.label for p in ours[1]] == [p.label for p in theirs[1]]
    # As text, for activations that are partial functions are not equal to others like them.
    assert str(jax.tree_util.tree_structure(ours)) == str(jax.tree_util.tree_structure(theirs))
    for (path, one), (_, other) in zip(
        *map(jax.tree_util.tree_leaves_with_path, (ours, theirs)), strict=True
    ):
        where = jax.tree_util.keystr(path)
        # A number of Python, and an array that gives way as it does, compute the same.
        kinds = [(t.dtype, t.shape, is_weakly_typed(t)) for t in map(jax.typeof, (one, other))]
        assert kinds[0] == kinds[1], (where, kinds)
        values = [np.asarray(x, kinds[0][0]).tobytes() for x in (one, other)]
        assert values[0] == values[1], where
