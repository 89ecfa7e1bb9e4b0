"""The layout of an optimizer's state, read off the parameters that it belongs to."""

import collections
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from penzai import pz

from penzai_shard.meshes import AnyMesh
from penzai_shard.named_arrays import stored_with, with_data
from penzai_shard.padded_arrays import Padding, without_padding
from penzai_shard.partition_specs import mesh_axes_by_dimension
from penzai_shard.planning.plan import LeafPlan
from penzai_shard.planning.planner import Planner
from penzai_shard.reduced_statistics import align_names
from penzai_shard.rule_kinds import OnUnnamed
from penzai_shard.tree_paths import join_paths, path_text


def shardings_like_params(
    opt_state: Any, params: Mapping[str, Any], mesh: AnyMesh, on_unnamed: OnUnnamed = "error"
) -> Any:
    """A sharding for every array of an optimizer state, read off the parameters' own layouts.

    Each dimension of each parameter gets a logical axis of its own, with the rule that it is split
    as it is; the plan then carries this over to whatever statistics the optimizer keeps.

    Args:
        opt_state: State whose shardings are wanted, usually abstract, with true lengths.
        params: The placed parameters that it was made for, by name; they may be stored padded.
        mesh: Their mesh, with Auto axes.
        on_unnamed: What becomes of arrays that are not made of a parameter's dimensions.

    Returns:
        A tree of ``NamedSharding`` objects with the structure of ``opt_state``: moments as their
        parameters, statistics of some dimensions as these dimensions, scalars on every device.

    Raises:
        PlanError: Some arrays are not made of a parameter's dimensions.

    >>> import optax
    >>> from penzai_shard.meshes import make_mesh
    >>> mesh = make_mesh({"data": 8})
    >>> layout = NamedSharding(mesh, PartitionSpec(None, "data"))
    >>> params = {"w": jax.device_put(jax.numpy.ones((2, 8)), layout)}
    >>> state = jax.eval_shape(optax.sgd(0.1, momentum=0.9).init, params)
    >>> shardings_like_params(state, params, mesh)[0].trace["w"].spec
    P(None, 'data')
    """
    rules: dict[tuple[int, Any], Any] = {}
    templates = {name: _named_by_layout(value, rules) for name, value in params.items()}

    def is_per_parameter(node: Any) -> bool:
        return isinstance(node, dict) and bool(node) and all(name in templates for name in node)

    def named(key_path: Any, node: Any) -> Any:
        if not is_per_parameter(node):
            return node
        place = path_text(key_path)
        return {
            name: _renamed(statistic, *templates[name], join_paths(place, name))
            for name, statistic in node.items()
        }

    ruled = jax.tree_util.tree_map_with_path(named, opt_state, is_leaf=is_per_parameter)
    planner = Planner(mesh, list(rules.items()), "pad", on_unnamed)
    plan = planner.plan({"opt_state": ruled})
    remaining = iter(plan.leaves)
    return jax.tree.map(
        lambda node: _stored(node, remaining), opt_state, is_leaf=pz.nx.is_namedarray
    )


def _stored(node: Any, remaining: Iterator[LeafPlan]) -> Any:
    """A named array, or another leaf, with the shardings of its arrays; padded if that is."""
    plans: list[LeafPlan] = []

    def sharding(_: Any) -> Any:
        plans.append(next(remaining))
        return plans[-1].sharding

    laid_out = jax.tree.map(sharding, node)
    padding = plans[0].padding if len(plans) == 1 else None
    if padding is None:
        return laid_out
    # In the plan all dimensions have names, in the array the last ones.
    named = len(node.named_axes)
    padding = Padding(padding.lengths[-named:], padding.mesh_axes[-named:])
    return stored_with(node, plans[0].sharding, padding)


def _named_by_layout(
    value: Any, rules: dict[tuple[int, Any], Any]
) -> tuple[Any, list[pz.nx.NamedArray]]:
    """A parameter's structure, and empty arrays whose axes are named after their own layout."""
    stored = jax.tree.leaves(value)
    leaves, treedef = jax.tree.flatten(jax.eval_shape(without_padding, value))
    templates = []
    for leaf, placed in zip(leaves, stored, strict=True):
        sharding = placed.sharding
        spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
        mesh_axes = mesh_axes_by_dimension(spec, leaf.ndim)
        names = tuple(enumerate(mesh_axes))
        rules.update(zip(names, mesh_axes, strict=True))
        sizes = collections.OrderedDict(zip(names, leaf.shape, strict=True))
        templates.append(pz.nx.NamedArray(sizes, None))
    return treedef, templates


def _renamed(statistic: Any, treedef: Any, templates: list[pz.nx.NamedArray], place: str) -> Any:
    """One parameter's statistic with the layout's names, as far as it mirrors the parameter."""
    try:
        parts = treedef.flatten_up_to(statistic)
    except ValueError:
        # The optimizer has none for this parameter, for instance because it is masked out.
        return statistic
    fitting = [_fits(*both, place) for both in zip(parts, templates, strict=True)]
    if not all(fitting):
        # Not made of the parameter's dimensions, as a matrix of second moments.
        return statistic
    return [with_data(template, part) for part, template in zip(parts, templates, strict=True)]


def _fits(part: Any, template: pz.nx.NamedArray, place: str) -> bool:
    """Whether a statistic is made of a parameter's dimensions; a history has more in front."""
    whole = tuple(template.named_axes.values())
    shape = tuple(getattr(part, "shape", ()))
    if whole and shape[len(shape) - len(whole) :] == whole:
        return True
    return not any(
        align_names(template.named_axes, tuple(leaf.shape), place, key_path).problem
        for key_path, leaf in jax.tree_util.tree_leaves_with_path(part)
    )
