"""Variables of Flax NNX: parameters, statistics, random keys, and what optimizers keep.

Source: Flax, "Scale up on multiple devices" (NNX), ``flax.nnx.spmd`` and ``flax.core.spmd``.
"""

import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from penzai_shard.array_kinds import is_traced
from penzai_shard.axis_rules import AxisRules
from penzai_shard.errors import RuleTypeError
from penzai_shard.meshes import AnyMesh
from penzai_shard.readers.array_reader import ArrayReader, ReadArray, Role
from penzai_shard.readers.flax_rules import flax_rules_in_force
from penzai_shard.rule_kinds import LogicalAxis

# Under which keys releases keep the names of the dimensions: the newest, and older ones.
_NAMES = ("out_sharding", "sharding", "sharding_names")
# What else they say of sharding, and is no name: rules, where and when a variable was laid out by
# NNX itself, and what nnx.Optimizer gives its own variables as their names.
_OTHERS = frozenset({"sharding_rules", "mesh", "eager_sharding", "optimizer_sharding"})
_OF_SHARDING = re.compile("shard|mesh|partition|spec")


class _NnxReader(ArrayReader):
    """Reads every kind of ``nnx.Variable``."""

    library = "flax.nnx"
    shares = True
    takes_names = True
    naming = (
        "Name it where its layer is made, with kernel_metadata={'out_sharding': (...)} or the like "
        "of it, or with name_axes(model, {...})"
    )

    def reads(self, node_type: type) -> bool:
        variables = _nnx().variablelib
        return issubclass(node_type, (variables.Variable, variables.HijaxVariable))

    def shares_type(self, node_type: type) -> bool:
        return issubclass(node_type, _nnx().Pytree)

    def read(self, node: Any) -> ReadArray:
        if not issubclass(type(node), _nnx().Variable):
            return ReadArray(
                None,
                (),
                "it is a variable in the form that nnx.var_defaults(hijax=True) makes, which is "
                "not read. Make the model without that",
            )
        metadata = node.get_metadata()
        data = node.get_raw_value()
        if metadata.get("ref"):
            problem = "it holds a reference, as nnx.var_defaults(ref=True) makes them, which is "
            return ReadArray(None, (), problem + "not read. Make the model without that")
        names, problem = _names_in(metadata)
        if names is None and isinstance(node, _nnx().RngState):
            # Keys of random streams have nothing to name, as the one of a train state has not.
            return ReadArray(data, (), note="random state")
        # As in NNX, rules in force and those of the variable itself must agree.
        rules = metadata.get("sharding_rules")
        return ReadArray(data, names, problem, rules=rules, rules_for_some=True)

    def with_data(self, node: Any, data: Any) -> Any:
        if not issubclass(type(node), _nnx().Variable):
            return node
        return node.from_metadata(data, node.get_metadata())

    def role(self, node: Any) -> Role | None:
        return "parameter" if isinstance(node, _nnx().Param) else "state"

    def named(self, node: Any, names: Sequence[LogicalAxis | None]) -> Any:
        return node.from_metadata(
            node.get_raw_value(), node.get_metadata() | {_NAMES[0]: tuple(names)}
        )

    def refusal(self, tree: Any, as_model: bool = False) -> str:
        if isinstance(tree, _nnx().GraphDef):
            return (
                "not an nnx.GraphDef, which has no arrays. Give the module, nnx.merge(graphdef, "
                "state), or the state"
            )
        if as_model and isinstance(tree, tuple) and any(map(self.refusal, tree)):
            return (
                "not the tuple that nnx.split gives, in which its arrays have other paths and are "
                "in no module. Give the module, nnx.merge(*split)"
            )
        if as_model and isinstance(tree, _nnx().FlatState):
            return (
                "not an nnx.FlatState, in which JAX numbers the arrays, so that other names would "
                "be other numbers. Give the state, nnx.from_flat_state(...)"
            )
        return ""

    def constrains(self, model: Any) -> bool:
        return self.occurs_in(model)

    @contextlib.contextmanager
    def computing(self, model: Any, mesh: AnyMesh, rules: AxisRules) -> Iterator[Any]:
        """Rules and mesh for ``nn.with_logical_constraint``, and for JAX' own constraints.

        NNX has none of its own; modules written for it use those.
        """
        with flax_rules_in_force(rules, mesh):
            yield model

    def not_a_tree(self, node: Any) -> str:
        name = type(node).__name__
        return (
            f"the {name} was defined so that JAX takes it for a leaf. Define it as a pytree, class "
            f"{name}(nnx.Module) without pytree=False, or give its state, nnx.state(...)"
        )

    @contextlib.contextmanager
    def initializing(self) -> Iterator[None]:
        # Every array is laid out by its plan; NNX would need a mesh in the context, and take
        # logical axes for those of the mesh.
        try:
            with _nnx().use_eager_sharding(False):
                yield
        except sys.modules["flax.errors"].TraceContextError as error:
            raise RuleTypeError(
                "the function that builds the model changes variables of Flax NNX that were there "
                "before, such as random streams. Make them inside of it, or pass them as "
                "arguments, which are copied: sharded_init(Model, nnx.Rngs(0), mesh=mesh, "
                "rules=rules)."
            ) from error

    def lost_arrays(self, built: Any) -> list[str]:
        """NNX takes an array that is being traced for static data where it is an attribute."""
        found: dict[int, Any] = {}
        _collect_modules(built, found)
        return [
            f"{type(module).__name__}.{name}: this array is made while the model is traced, and "
            f"NNX takes it for static data. Write self.{name} = nnx.data(...), or "
            "nnx.Variable(...), or make it with NumPy."
            for module in found.values()
            for name, value in vars(module).items()
            if is_traced(value)
            and not any(leaf is value for leaf in jax.tree_util.tree_leaves(module))
        ]


def _collect_modules(tree: Any, found: dict[int, Any]) -> None:
    """Collects the modules of a tree, and those in them, each once."""

    def is_module(node: Any) -> bool:
        return isinstance(node, _nnx().Pytree)

    for node in jax.tree_util.tree_leaves(tree, is_leaf=is_module):
        # One that JAX takes for a leaf is refused by whoever reads the tree.
        if is_module(node) and id(node) not in found and not jax.tree_util.all_leaves([node]):
            found[id(node)] = node
            _collect_modules(list(vars(node).values()), found)


def _nnx() -> Any:
    return sys.modules["flax.nnx"]


def _names_in(metadata: dict[str, Any]) -> tuple[tuple[Any, ...] | None, str]:
    """The names of the dimensions, or None, and why they cannot be used."""
    known = {*_NAMES, *_OTHERS}
    unknown = [
        key for key in metadata if key not in known and _OF_SHARDING.search(str(key).lower())
    ]
    if unknown:
        keys = " and ".join(map(repr, unknown))
        return (), f"its metadata {keys} seem to be of sharding, and are not known"
    given = [metadata[key] for key in _NAMES if metadata.get(key) is not None]
    if not given:
        return None, ""
    names = given[0].spec if isinstance(given[0], NamedSharding) else given[0]
    if not isinstance(names, tuple | list | PartitionSpec):
        return (), f"its {type(names).__name__} as out_sharding is not read. Give a tuple of names"
    names = tuple(tuple(name) if isinstance(name, list) else name for name in names)
    if any(name is PartitionSpec.UNCONSTRAINED for name in names):
        return (), f"its names {names} leave a dimension to XLA. Give it a name, or None"
    return names, ""


READER = _NnxReader()
