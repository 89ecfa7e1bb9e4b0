"""What each array of a step's arguments or results is for the step: a parameter, an input."""

from typing import Any, Literal

import jax
from penzai.core.variables import AutoStateVarLabel

from penzai_shard.equinox_modules import is_equinox_module_type
from penzai_shard.library_apis.jax_api import keyed_children_of_node
from penzai_shard.model_variables import is_parameter, is_variable, variable_name
from penzai_shard.model_variables.variable_collections import roles_of_collections
from penzai_shard.readers import is_foreign
from penzai_shard.surgery.tree_nodes import is_layer
from penzai_shard.training.train_state import TrainState
from penzai_shard.tree_paths import array_path_text, join_paths, key_text

StepPart = Literal[
    "parameters", "optimizer state", "state variables", "constants", "inputs", "outputs"
]

PARTS_OF_STATE: dict[str, StepPart] = {
    "params": "parameters",
    "opt_state": "optimizer state",
    "state_vars": "state variables",
    "unbound_model": "constants",
}

# What Flax linen's collections of variables hold.
_OF_COLLECTIONS: dict[str, StepPart] = {"parameter": "parameters", "state": "state variables"}


def part_of_field(path: str) -> StepPart:
    """What an array of a train state is, by its path in the state.

    >>> part_of_field("opt_state/0/mu/w"), part_of_field("step")
    ('optimizer state', 'state variables')
    """
    return PARTS_OF_STATE.get(path.partition("/")[0], "state variables")


def paths_and_parts(tree: Any, path: str, part: StepPart) -> list[tuple[str, StepPart]]:
    """The path of each leaf of a tree and what it is, in the order of flattening.

    In a model parameters and state variables go by their labels, as plans name them.

    Args:
        tree: An argument or a result, with anything for leaves.
        path: Where it is.
        part: What an array is that is nothing else.

    >>> import optax
    >>> opt_state = optax.sgd(0.1, momentum=0.9).init({"w": jax.numpy.ones(2)})
    >>> paths_and_parts((opt_state, {"x": 1}), "args", "inputs")
    [('args/0/0/trace/w', 'optimizer state'), ('args/1/x', 'inputs')]
    """
    return _of_node(tree, path, part, None)


def _of_node(node: Any, path: str, part: StepPart, model: str | None) -> list[tuple[str, StepPart]]:
    if isinstance(node, TrainState):
        leaves, _ = jax.tree_util.tree_flatten_with_path(node)
        texts = [array_path_text(key_path) for key_path, _ in leaves]
        return [(join_paths(path, text), part_of_field(text)) for text in texts]
    if is_variable(node):
        # Labels that Penzai made up say nothing.
        is_labelled = not isinstance(getattr(node, "label", ""), AutoStateVarLabel)
        by_label = is_labelled and model is not None and not is_foreign(node)
        place = join_paths(model or "", variable_name(node)) if by_label else path
        kind: StepPart = "parameters" if is_parameter(node) else "state variables"
        if part == "optimizer state":
            kind, place = part, path
        return [(place, kind)] * len(jax.tree.leaves(node))
    if part in ("inputs", "outputs") and is_optimizer_state(node):
        part = "optimizer state"
    elif model is None and is_layer(node) and part != "optimizer state":
        part, model = "constants", path
    found = keyed_children_of_node(node)
    if found is None:
        return [(path, part)]
    if is_equinox_module_type(type(node)) and part != "optimizer state":
        # Its floating arrays are what is trained.
        part = "parameters"
    roles = roles_of_collections(node) if part in ("inputs", "outputs") else {}
    places: list[tuple[str, StepPart]] = []
    for key, child in found[0]:
        text = key_text(key)
        below = path if text == "data_array" else join_paths(path, text)
        places += _of_node(child, below, _OF_COLLECTIONS.get(roles.get(text, ""), part), model)
    return places


def is_optimizer_state(node: Any) -> bool:
    """Whether a node is a state of an optimizer of optax."""
    return isinstance(node, tuple) and type(node).__module__.partition(".")[0] == "optax"
