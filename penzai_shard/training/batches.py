"""Placing batches on a mesh by name."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from penzai_shard.array_kinds import is_abstract, is_array_like
from penzai_shard.axis_decisions import PADDING_FIX
from penzai_shard.axis_rules import AxisRules
from penzai_shard.errors import PlanError, RuleTypeError, raise_all
from penzai_shard.meshes import AnyMesh
from penzai_shard.named_arrays import named_array, unnamed_data
from penzai_shard.named_leaves import is_named_unit, leaves_of
from penzai_shard.placement import described, put
from penzai_shard.planning import DescribingRequest, PlacingRequest, Planner, ShardingPlan
from penzai_shard.readers import without_bare_arrays
from penzai_shard.rule_kinds import LogicalAxis, OnIndivisible, OnUnnamed
from penzai_shard.training.local_batches import shard_parts


def shard_batch(
    batch: Any,
    mesh: AnyMesh | None = None,
    rules: Any = None,
    *,
    axis_name_to_mesh_name: Any = None,
    on_indivisible: OnIndivisible = "error",
    on_unnamed: OnUnnamed = "error",
    plan: ShardingPlan | None = None,
    local: bool = False,
    first_axis: LogicalAxis | None = None,
) -> Any:
    """Places a batch on a mesh, each named array as the rules say.

    Models of other libraries take plain arrays: ``first_axis="batch"`` says what their first
    dimension is, and they are placed by it and stay plain.

    In a job of several processes, each gives either the same whole batch, or its own part of it
    (``local=True``), with ``jax.make_array_from_process_local_data``. Nothing goes through
    the devices, so that a thread may make the next batch while a step runs; all processes make the
    same calls in the same order, in threads of the same names.

    Args:
        batch: A tree of named arrays; their data may be NumPy or JAX arrays. Scalars are
            replicated. If any of them is a ``jax.ShapeDtypeStruct``, nothing is placed: all
            become structs with their layouts, to price a step with.
        mesh: The mesh; for structs it may be abstract. Explicit axes are treated as Auto ones.
        rules: Rules in any form that ``AxisRules`` reads; None maps each logical axis to the
            mesh axis of the same name.
        axis_name_to_mesh_name: The same under Penzai's name; give one of the two.
        on_indivisible: As for ``make_plan``, but for ``"pad"``: padding would count as examples.
        on_unnamed: As for ``make_plan``.
        plan: A plan to carry out instead of mesh, rules and options; of the whole batch.
        local: Whether each process gives its own part of the batch: the rows of its own devices,
            as many as every other process. Along dimensions that are split over processes, the
            length of the whole is the sum. Processes whose devices have the same part give the
            same data. With one process it changes nothing.
        first_axis: The logical axis of the first dimension of arrays that carry no names. Their
            other dimensions are positional. None refuses such arrays.

    Returns:
        The batch, its arrays on the mesh. Arrays that are laid out so already are not copied.
        Of structs a batch of structs.

    Raises:
        RuleTypeError: Arguments that do not go together, or cannot be read.
        ShardingError: An array has no names, or has no valid layout; all are reported at once.
            Of several processes: what they give differs where it must be the same, in form or
            data; all of them raise it.

    Warns:
        ShardingWarning: As ``make_plan`` does.

    >>> import numpy as np
    >>> from penzai import pz
    >>> from penzai_shard.meshes import make_mesh
    >>> batch = {"x": pz.nx.wrap(np.ones((16, 4)), "batch", "features")}
    >>> shard_batch(batch, make_mesh({"data": 8}), {"batch": "data"})["x"].data_array.sharding.spec
    P('data',)
    >>> mesh, rules = make_mesh({"data": 8}), {"batch": "data"}
    >>> shard_batch({"x": np.ones((16, 4))}, mesh, rules, first_axis="batch")["x"].sharding.spec
    P('data',)
    """
    if on_indivisible == "pad":
        raise RuleTypeError(
            'shard_batch: on_indivisible="pad" is for parameters. A batch is not padded, since '
            "padding would count as examples. Leave the option out, and make the batch divide: "
            "leave examples out, or add some that the loss does not count, as "
            "cross_entropy(logits, targets, mask=...) does."
        )
    if first_axis is not None and plan is not None:
        raise RuleTypeError(
            "shard_batch: a plan says where everything goes, so give either plan, or mesh, "
            "rules and first_axis."
        )
    is_described = any(map(is_abstract, jax.tree.leaves(batch)))
    if is_described and local:
        raise RuleTypeError(
            "shard_batch: structs describe the whole batch, of all processes. Leave out local=True."
        )
    request = (DescribingRequest if is_described else PlacingRequest).read(
        "shard_batch", mesh, rules, axis_name_to_mesh_name, on_indivisible, on_unnamed, plan
    )
    with _offering_no_padding():
        if first_axis is None:
            with suggesting_first_axis(batch, on_unnamed):
                return _placed(batch, request, local)
        batch = without_bare_arrays(batch, "shard_batch")
        return named_as_given(batch, _placed(with_first_axis(batch, first_axis), request, local))


@contextlib.contextmanager
def _offering_no_padding() -> Iterator[None]:
    """Leaves padding out of the fixes for what does not divide: batches are not padded."""
    try:
        yield
    except PlanError as error:
        if not any(PADDING_FIX in problem for problem in error.problems):
            raise
        headline = str(error).partition("\n")[0]
        problems = [problem.replace(PADDING_FIX, "") for problem in error.problems]
        raise PlanError(headline, problems) from error.__cause__


@contextlib.contextmanager
def suggesting_first_axis(batch: Any, on_unnamed: OnUnnamed) -> Iterator[None]:
    """Names the option for plain arrays where a batch that has some cannot be placed.

    >>> with suggesting_first_axis({}, "error"):
    ...     pass
    """
    try:
        yield
    except PlanError as error:
        plain = filter(_is_plain, _leaves(without_bare_arrays(batch, "shard_batch")))
        if on_unnamed != "error" or not any(True for _ in plain):
            raise
        raise PlanError(
            "no valid layout for some arrays of this batch; say what the first dimension of plain "
            'ones is, first_axis="batch", or:',
            error.problems,
        ) from error


def batch_planner(planner: Planner, batch: Any, batch_axis: LogicalAxis) -> Planner:
    """Who plans the batches for a state: as that is planned, but nothing is padded.

    Args:
        planner: The planner of the state.
        batch: A batch.
        batch_axis: The logical axis of its examples.

    Returns:
        The planner. Where the state's is to pad, lengths that do not divide stay whole.

    Raises:
        PlanError: That of the examples does not divide.

    >>> planner = Planner(jax.sharding.AbstractMesh((2,), ("data",)), {"batch": "data"}, "pad")
    >>> batch_planner(planner, {}, "batch").on_indivisible
    'replicate'
    """
    if planner.on_indivisible != "pad":
        return planner
    rules = [rule for rule in planner.rules.name_rules if rule.logical_axis == batch_axis]
    refuse_uneven(batch, planner.mesh, AxisRules.from_rules(rules))
    return dataclasses.replace(planner, on_indivisible="replicate")


def refuse_uneven(inputs: Any, mesh: AnyMesh, batch_rules: AxisRules) -> None:
    """Refuses inputs whose examples do not divide, where nothing else would.

    Args:
        inputs: Inputs of a step, of a state that is stored padded.
        mesh: The mesh.
        batch_rules: The rules for the logical axes of the batch.

    Raises:
        PlanError: Some do not divide; all are reported.

    >>> refuse_uneven({}, jax.sharding.AbstractMesh((2,), ("data",)), AxisRules({"batch": "data"}))
    """
    planner = Planner(mesh, batch_rules, on_unnamed="replicate")
    unfit = [
        (leaf.path, problem)
        for leaf in leaves_of(inputs)
        if leaf.names is not None
        for problem in planner.decide(leaf.names, leaf.shape).problems
    ]
    raise_all(
        PlanError,
        "parameters are stored padded, and batches are not, since padding would count as examples:",
        [
            f"input {path}: {problem.partition(' Pad it to')[0]} Leave examples out, or add some "
            "that the loss does not count, as cross_entropy(logits, targets, mask=...) does."
            for path, problem in unfit
        ],
    )


def _placed(batch: Any, request: DescribingRequest, local: bool) -> Any:
    if not isinstance(request, PlacingRequest):
        return described(batch, request.sharding_tree(batch), "shard_batch")
    mesh = request.mesh
    if local and isinstance(mesh, Mesh) and mesh.is_multi_process:
        return shard_parts(batch, request)
    return put(batch, request.sharding_tree(batch), "shard_batch")


def _is_plain(leaf: Any) -> bool:
    return not is_named_unit(leaf) and is_array_like(leaf) and np.ndim(leaf) > 0


def _leaves(batch: Any) -> list[Any]:
    return jax.tree_util.tree_leaves(batch, is_leaf=is_named_unit)


def with_first_axis(batch: Any, name: LogicalAxis) -> Any:
    """A batch whose plain arrays have a name for their first dimension.

    >>> with_first_axis({"x": np.ones((4, 2)), "n": 3}, "batch")["x"].named_shape
    {'batch': 4}
    """

    def named(leaf: Any) -> Any:
        if not _is_plain(leaf):
            return leaf
        return named_array(leaf, (name, *(None,) * (np.ndim(leaf) - 1)))

    return jax.tree_util.tree_map(named, batch, is_leaf=is_named_unit)


def named_as_given(batch: Any, placed: Any) -> Any:
    """A placed batch without the names that ``with_first_axis`` gave to what was plain before.

    Args:
        batch: The batch before it was given names.
        placed: The batch with them.
    """

    def restored(given: Any, leaf: Any) -> Any:
        return leaf if is_named_unit(given) else unnamed_data(leaf)

    return jax.tree_util.tree_map(restored, batch, placed, is_leaf=is_named_unit)
