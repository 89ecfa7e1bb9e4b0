"""Boxes of Flax linen: ``nn.Partitioned``, ``nn.LogicallyPartitioned`` and their like.

Source: Flax, "Scale up Flax Modules on multiple devices", and ``flax.core.meta``.
"""

import contextlib
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from penzai_shard.axis_rules import AxisRules
from penzai_shard.meshes import AnyMesh
from penzai_shard.readers.array_reader import ArrayReader, ReadArray
from penzai_shard.readers.flax_rules import flax_rules_in_force
from penzai_shard.rule_kinds import LogicalAxis

# Collections that a train step would have to treat in a way of their own.
_NOT_TRAINED = {
    "_overwrite_with_gradient": "Flax takes the gradient of these for their new value, as for "
    "scales of fp8, and no step here does. Use operations without such scales, or Flax's own "
    "train state."
}

_EXAMPLE = 'nn.with_logical_partitioning(initializer, ("embed", "hidden"))'


class _LinenReader(ArrayReader):
    """Reads every kind of ``flax.core.meta.AxisMetadata``; refuses those that it does not know.

    The names of a box are those that Flax's own ``nn.get_partition_spec`` reads. What a box says
    beside them, a mesh and rules of its own, is where Flax lays the array out when it is used.
    """

    library = "flax.core.meta"

    def reads(self, node_type: type) -> bool:
        boxes = sys.modules["flax.core.meta"].AxisMetadata
        return issubclass(node_type, boxes) or _is_beside_its_array(node_type)

    def read(self, node: Any) -> ReadArray:
        if _is_beside_its_array(type(node)):
            return ReadArray(
                None,
                (),
                f"the axis names {node.names}, which nn.partitioning.param_with_axes keeps beside "
                f"its array, are not read. Annotate the initialiser, {_EXAMPLE}; or take the "
                "collection params_axes out, and name the arrays by their paths: "
                'name_axes({"params": variables["params"]}, {...})',
            )
        data, kind = _content(node), type(node).__name__
        if _is_box(data):
            return ReadArray(
                data,
                (),
                f"a {type(data).__name__} is in a {kind}, and both say the names of one array. "
                f"Annotate its initialiser once: {_EXAMPLE}",
            )
        given = _given_names(node)
        names, problem = _read_names(given)
        if problem:
            text = f"the names {given!r} of its {kind}" if given is not None else f"its {kind}"
            return ReadArray(data, (), f"{text} {problem}")
        mesh, rules = getattr(node, "mesh", None), getattr(node, "rules", None)
        return ReadArray(data, names, mesh=mesh, rules=rules)

    def with_data(self, node: Any, data: Any) -> Any:
        return node if _is_beside_its_array(type(node)) else node.replace_boxed(data)

    def initializer_of(self, node: Any) -> str:
        linen = sys.modules.get("flax.linen")
        if linen is None:
            return ""
        if isinstance(node, type):
            return f"{node.__name__}(...).init" if issubclass(node, linen.Module) else ""
        return "module.init" if isinstance(node, linen.Module) else ""

    def naming_in(self, tree: Any) -> str:
        state = sys.modules.get("flax.training.train_state")
        if not self.collections(tree) and (state is None or not isinstance(tree, state.TrainState)):
            return ""
        return (
            f"Annotate its initialiser, {_EXAMPLE}, and keep what module.init returns in its "
            "boxes, which nn.unbox takes off; or name it by its path: name_axes(tree, {...})"
        )

    def collections(self, model: Any) -> Mapping[str, str] | None:
        """Parameters are in ``params``; what else modules keep, as ``batch_stats``, is state."""
        if "flax.linen" not in sys.modules or not _are_collections(model):
            return None
        return {
            name: "parameter" if name == "params" else _NOT_TRAINED.get(name, "state")
            for name in model
        }

    def constrains(self, model: Any) -> bool:
        if "flax.linen" not in sys.modules:
            return False
        return self.occurs_in(model) or _are_collections(model)

    @contextlib.contextmanager
    def computing(self, model: Any, mesh: AnyMesh, rules: AxisRules) -> Iterator[Any]:
        """Flax's own context of rules, and the mesh that its constraints are for.

        Constraints of activations follow them. Parameters stay as they are stored, and the
        compiler gathers them where they are used: a constraint of each of them where it leaves its
        box, which Flax then makes too, would gather all layers of a scanned model at once.
        """
        with (
            flax_rules_in_force(rules, mesh),
            sys.modules["flax.linen"].intercept_methods(_call_with_loose_initializers),
            _without_constraints(model) as loose,
        ):
            yield loose


def _is_beside_its_array(node_type: type) -> bool:
    """Whether a type holds names of ``param_with_axes``, which came before boxes."""
    partitioning = sys.modules.get("flax.linen.partitioning")
    return partitioning is not None and issubclass(node_type, partitioning.AxisMetadata)


def _is_box(node: Any) -> bool:
    return isinstance(node, sys.modules["flax.core.meta"].AxisMetadata)


def _content(box: Any) -> Any:
    """What is in a box, without what ``unbox`` does to it."""
    if hasattr(box, "value"):
        return box.value
    leaves = jax.tree_util.tree_leaves(box)
    return leaves[0] if len(leaves) == 1 else None


def _given_names(box: Any) -> Any:
    """The names of a box as they are in it; None if it has none that are known."""
    meta = sys.modules["flax.core.meta"]
    own = getattr(type(box), "get_partition_spec", None)
    if own is None:
        return None
    if own is meta.Partitioned.get_partition_spec:
        return box.names
    # Whoever derives from a box, or writes one, may keep names in any way, but says them so.
    return box.get_partition_spec()


def _read_names(given: Any) -> tuple[tuple[LogicalAxis | None, ...], str]:
    """The names, one for each dimension as far as they go, and why they cannot be used."""
    if given is None:
        return (), (
            "has no names that are known: it has no get_partition_spec(), by which Flax asks for "
            f"them too. Give the class that method, or annotate the initialiser: {_EXAMPLE}"
        )
    if isinstance(given, str):
        return (), f"are one text. Write a tuple with a name for each dimension: ({given!r},)"
    if not isinstance(given, tuple | list | PartitionSpec):
        return (), f"are not a tuple. Write a name, or None, for each dimension: {_EXAMPLE}"
    names: list[LogicalAxis | None] = []
    for entry in given:
        name = tuple(entry) if isinstance(entry, list) else entry
        if name is PartitionSpec.UNCONSTRAINED:
            return (), (
                "leave a dimension to the compiler (UNCONSTRAINED), and a stored array has a "
                "layout in all of them. Write a name in its place, or None for a dimension that "
                "stays whole"
            )
        if isinstance(name, tuple) and len(name) < 2:
            # As a PartitionSpec reads it.
            name = name[0] if name else None
        if not isinstance(name, Hashable):
            return (), f"have {name!r} among them, which is not a name. Write a text, or None"
        names.append(name)
    return tuple(names), ""


def _are_collections(model: Any) -> bool:
    """Whether a tree is what ``module.init`` returns: dictionaries of variables by collection."""
    return (
        isinstance(model, Mapping)
        and "params" in model
        and all(isinstance(collection, Mapping) for collection in model.values())
    )


@contextlib.contextmanager
def _without_constraints(model: Any) -> Iterator[Any]:
    """The model with boxes that constrain nothing.

    Dictionaries in it are the same ones, and have their own boxes back afterwards: what the loss
    assigns to them, however deep, must be seen by whoever gave them.
    """
    replaced: list[tuple[dict[Any, Any], Any, Any, Any]] = []

    def loosen(node: Any) -> Any:
        if type(node) is not dict:
            return jax.tree_util.tree_map(_without_constraint, node, is_leaf=_is_box)
        for key, given in node.items():
            node[key] = loosen(given)
            replaced.append((node, key, given, node[key]))
        return node

    try:
        yield loosen(model)
    finally:
        # Backwards, as one dictionary may be in several places.
        for mapping, key, given, loose in reversed(replaced):
            if key in mapping and mapping[key] is loose:
                mapping[key] = given


def _without_constraint(node: Any) -> Any:
    """A box that constrains nothing when what is in it is used; of a user's own kind as it is."""
    if type(node) is sys.modules["flax.core.meta"].Partitioned or type(node) is _logical_box():
        return _logical_box()(node.value, node.names, rules=())
    return node


def _call_with_loose_initializers(
    call: Callable[..., Any], args: Any, kwargs: Any, context: Any
) -> Any:
    """Calls a method of a module, as ``nn.intercept_methods`` asks for it.

    ``nn.DenseGeneral`` takes a flat kernel out of its box in every call, to compare the shape that
    its initialiser gives with the one that is there. Names for all dimensions of the kernel are
    too many for the flat one, so that the box must not constrain it. Source: google/flax, issue
    3676.
    """
    module = context.module
    if not isinstance(module, sys.modules["flax.linen"].DenseGeneral):
        return call(*args, **kwargs)
    given = {name: getattr(module, name) for name in ("kernel_init", "bias_init")}
    try:
        for name, init in given.items():
            object.__setattr__(module, name, _loose(init))
        return call(*args, **kwargs)
    finally:
        for name, init in given.items():
            object.__setattr__(module, name, init)


def _loose(init: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: _without_constraint(init(*args))


def _logical_box() -> Any:
    return sys.modules["flax.linen"].LogicallyPartitioned


READER = _LinenReader()
