"""Layers that pin how what flows through them lies over a mesh; values stay as they are.

The compiler chooses the layout of all else, and often badly: in fully sharded training it has to be
told that activations are split over the batch. Inside ``jax.shard_map`` a device holds its part
already, so the mesh axes that it has taken over are left out.

Source: Lepikhin et al. 2020, "GShard"; ``jax.lax.with_sharding_constraint``.
"""

import dataclasses
import reprlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, Sharding
from penzai import pz

from penzai_shard import specs
from penzai_shard.arrays.inputs import run_inputs
from penzai_shard.arrays.kinds import is_traced
from penzai_shard.arrays.structure import flatten
from penzai_shard.errors import MeshError, PlanError, Problem, Problems, RuleTypeError
from penzai_shard.layers.manual import manual_axes
from penzai_shard.layers.wrapper import WrapperLayer
from penzai_shard.meshes import AnyMesh, auto_context, mesh_text, on_auto_twin
from penzai_shard.paths import path_text
from penzai_shard.placement.place import planned_shardings
from penzai_shard.planning import arguments
from penzai_shard.planning.planner import plan_tree
from penzai_shard.rules import AxisRules, OnIndivisible


@pz.pytree_dataclass
class ConstrainSharding(pz.nn.Layer):  # type: ignore[misc]
    """Pins the sharding of a tree of arrays.

    Arrays of an Explicit mesh come out on its Auto twin.

    Attributes:
        sharding: One sharding for all arrays, or a tree of shardings which that of the arrays
            begins with; None leaves what is in its place.

    Raises:
        RuleTypeError: It holds something else.

    >>> import penzai_shard as pzs
    >>> sharding = NamedSharding(pzs.make_mesh({"data": 8}), PartitionSpec("data"))
    >>> jax.jit(ConstrainSharding(sharding))(jax.numpy.ones(16)).sharding.shard_shape((16,))
    (2,)
    """

    sharding: Any = dataclasses.field(metadata={"pytree_node": False})

    def __post_init__(self) -> None:
        problems = Problems("ConstrainSharding:")
        fix = "By names write ConstrainShardingByName(mesh, rules)."
        for leaf in jax.tree_util.tree_leaves(self.sharding):
            if not isinstance(leaf, Sharding | PartitionSpec):
                problems.add("sharding", f"{leaf!r} is no sharding", fix)
        problems.raise_if_any(RuleTypeError)

    def __call__(self, tree: Any, /, **side_inputs: Any) -> Any:
        """Constrains the tree.

        Args:
            tree: A tree of arrays, named or not.
            **side_inputs: Not used.

        Raises:
            PlanError: An array cannot lie so.
            RuleTypeError: The tree does not begin as that of the shardings.
            MeshError: An array is on other devices than the constraint.
            ShardingError: An array that has a sharding is deleted, or a shape.
        """
        # As JAX takes the tree apart, since a tree of shardings is written for JAX.
        keyed, tree_definition = jax.tree_util.tree_flatten_with_path(tree)
        definition: Any = tree_definition
        paths, values = [path_text(path) for path, _ in keyed], [value for _, value in keyed]
        given = on_auto_twin(self.sharding)
        try:
            whole = jax.tree.broadcast(given, tree, is_leaf=lambda x: x is None)
        except ValueError as error:
            what = f"the tree has {reprlib.repr(paths)}, and the shardings are another tree"
            problem = Problem("", what, "Give one sharding, or a tree like that of the arrays.")
            raise RuleTypeError("ConstrainSharding:", [problem]) from error
        pinned = _pin("ConstrainSharding", paths, values, definition.flatten_up_to(whole))
        return definition.unflatten(pinned)


@pz.pytree_dataclass(init=False, use_mutable_proxy_in_init=False)
class ConstrainShardingByName(pz.nn.Layer):  # type: ignore[misc]
    """Pins the sharding of a tree of arrays by the names of their logical axes.

    Arrays of an Explicit mesh come out on its Auto twin.

    Attributes:
        mesh: The mesh.
        axis_name_to_mesh_name: The rules, which the constructor takes in any form that
            ``make_plan`` takes, as ``rules`` too.
        on_indivisible: As for ``make_plan``.
        on_unnamed: As for ``make_plan``.

    Raises:
        RuleTypeError, MeshError: As ``make_plan``.

    >>> import penzai_shard as pzs
    >>> layer = ConstrainShardingByName(pzs.make_mesh({"data": 4, "model": 2}), {"batch": "data"})
    >>> layer(pz.nx.ones({"batch": 8, "features": 3})).data_array.sharding.spec
    P('data',)
    """

    mesh: AnyMesh = dataclasses.field(metadata={"pytree_node": False})
    axis_name_to_mesh_name: AxisRules = dataclasses.field(metadata={"pytree_node": False})
    on_indivisible: OnIndivisible = dataclasses.field(metadata={"pytree_node": False})
    on_unnamed: arguments.OnUnnamed = dataclasses.field(metadata={"pytree_node": False})

    def __init__(
        self,
        mesh: AnyMesh,
        axis_name_to_mesh_name: Any = None,
        *,
        rules: Any = None,
        on_indivisible: OnIndivisible = "error",
        on_unnamed: arguments.OnUnnamed = "error",
    ) -> None:
        options: dict[str, Any] = {"on_indivisible": on_indivisible, "on_unnamed": on_unnamed}
        request = arguments.read(
            "ConstrainShardingByName", mesh, rules, axis_name_to_mesh_name, **options
        )
        self.__dict__.update(mesh=mesh, axis_name_to_mesh_name=request.rules, **options)

    def __call__(self, tree: Any, /, **side_inputs: Any) -> Any:
        """Constrains the tree.

        Args:
            tree: A tree of arrays.
            **side_inputs: Not used.

        Raises:
            PlanError: Some arrays have no valid layout.
            MeshError: An array is on other devices than the mesh.

        Warns:
            ShardingWarning: As ``make_plan``.
        """
        return pin_by_name(tree, arguments.read("ConstrainShardingByName", **vars(self)))


@pz.pytree_dataclass
class ConstrainActivations(WrapperLayer):
    """Wraps a layer so that what flows into it and out of it is pinned, gradients too.

    Output, gradients, parameter names and state stay those of the layer. With two layouts on a side
    the compiler moves activations from one to the other there, and nowhere inside of the layer: it
    gathers before a layer that needs whole sequences, and sums and scatters after it.

    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models"
    (arXiv:2205.05198).

    Attributes:
        body: The layer.
        mesh: The mesh.
        inputs: Layouts to which the argument is brought, one after the other: rules in any form
            that ``make_plan`` takes. Side inputs stay where they are.
        outputs: Layouts to which the output is brought, one after the other.

    Raises:
        RuleTypeError, MeshError: As ``make_plan``.

    >>> import penzai_shard as pzs
    >>> mesh = pzs.make_mesh({"data": 4, "model": 2})
    >>> between, inside = {"batch": "data", "seq": "model"}, {"batch": "data"}
    >>> layer = ConstrainActivations(pz.nn.Identity(), mesh, (between, inside), (inside, between))
    >>> layer(pz.nx.ones({"batch": 8, "seq": 4})).data_array.sharding.spec
    P('data', 'model')
    """

    body: Any
    mesh: AnyMesh = dataclasses.field(metadata={"pytree_node": False})
    inputs: tuple[Any, ...] = dataclasses.field(default=(), metadata={"pytree_node": False})
    outputs: tuple[Any, ...] = dataclasses.field(default=(), metadata={"pytree_node": False})

    def __post_init__(self) -> None:
        self._request({})  # Refuses what is no mesh.
        for name in ("inputs", "outputs"):
            given = getattr(self, name)
            if not isinstance(given, tuple):
                what = f"{name} is {given!r}, and a tuple of rules is needed"
                problem = Problem("", what, f"Write {name}=(rules,).")
                raise RuleTypeError("ConstrainActivations:", [problem])
            self.__dict__[name] = tuple(self._request(rules).rules for rules in given)

    def _request(self, rules: Any) -> arguments.Request:
        return arguments.read("ConstrainActivations", self.mesh, rules)

    def _run(self, argument: Any, side_inputs: dict[str, Any]) -> Any:
        for rules in self.inputs:
            argument = pin_by_name(argument, self._request(rules))
        with auto_context():
            output = self.body(argument, **side_inputs)
        for rules in self.outputs:
            output = pin_by_name(output, self._request(rules))
        return output


# Pinning


def pin_by_name(tree: Any, request: arguments.Request) -> Any:
    """A tree, each array where the rules say.

    Raises:
        PlanError: Some arrays have no valid layout.
        MeshError: An array is on other devices than the mesh.
    """
    mesh = request.mesh
    manual = manual_axes()
    if not manual.isdisjoint(mesh.axis_names):
        # Arrays inside have the lengths of one part, which need not divide once more.
        sizes = tuple(1 if axis in manual else size for axis, size in mesh.shape.items())
        mesh = AbstractMesh(sizes, mesh.axis_names, axis_types=mesh.axis_types)
        request = dataclasses.replace(request, mesh=mesh)
    plan = plan_tree(tree, request)
    leaves, structure = flatten(tree)
    shardings = planned_shardings(plan, structure)
    values = [leaf.value for leaf in leaves]
    return structure.fill_alike(_pin(request.called, structure.paths, values, shardings))


def _pin(
    called: str, paths: Sequence[str], values: Sequence[Any], shardings: Sequence[Any]
) -> list[Any]:
    """Arrays, each where its sharding says; None leaves one where it is."""
    problems = Problems(f"{called} is for other devices than what flows through it:")
    ambient = jax.sharding.get_abstract_mesh()
    for path, value, sharding in zip(paths, values, shardings, strict=True):
        if is_traced(value) or ambient.manual_axes or not isinstance(sharding, NamedSharding):
            continue
        own = getattr(value, "sharding", None)
        if isinstance(sharding.mesh, AbstractMesh):
            fix = f"Write make_mesh({dict(sharding.mesh.shape)})."
            problems.add(path, "the mesh of the constraint has no devices", fix)
        elif isinstance(own, NamedSharding) and own.device_set != sharding.device_set:
            what = f"it lies over ({mesh_text(own.mesh)}), not over ({mesh_text(sharding.mesh)})"
            problems.add(path, what, "Place it on that mesh: place(tree, mesh, rules).")
    problems.raise_if_any(MeshError)
    pinned = []
    with auto_context():
        for path, value, sharding in zip(paths, values, shardings, strict=True):
            try:
                pinned.append(value if sharding is None else _pin_array(value, sharding, ambient))
            except (RuntimeError, TypeError, ValueError) as error:
                # The array may be the reason, as one that is deleted.
                run_inputs(dict(zip(paths, values, strict=True)), called)
                # A spec without a mesh is a RuntimeError; so is a lack of memory.
                is_spec = isinstance(sharding, PartitionSpec) and isinstance(error, RuntimeError)
                if not (is_spec or isinstance(error, ValueError)):
                    raise
                what = f"what has shape {np.shape(value)} cannot lie as {sharding}"
                fix = "Write NamedSharding(mesh, spec): each mesh axis at a dimension it divides."
                raise PlanError(f"{called}:", [Problem(path, what, fix)]) from error
    return pinned


def _pin_array(value: Any, sharding: Any, ambient: AbstractMesh) -> Any:
    if ambient.manual_axes:
        # If nothing is left to the compiler, nothing is left to pin. Of Explicit axes the type of
        # the array tells the layout, and one on the Auto twin could not leave the region.
        is_auto = bool(ambient.auto_axes) and not ambient.explicit_axes
        if not (is_auto and isinstance(sharding, NamedSharding)):
            return value
        axes = specs.mesh_axes(sharding.spec, value.ndim)
        free = (tuple(axis for axis in over if axis not in ambient.manual_axes) for over in axes)
        return jax.lax.with_sharding_constraint(
            value, NamedSharding(ambient, specs.canonical(free))
        )
    if is_traced(value) or isinstance(sharding, PartitionSpec):
        return jax.lax.with_sharding_constraint(on_auto_twin(value), sharding)
    # A constraint would refuse an array that is on one of the devices only.
    return jax.device_put(value, sharding)
