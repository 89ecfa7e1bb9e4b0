"""Decides for every array of a tree where it lies, without touching a device."""

from collections.abc import Collection, Hashable, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from penzai_shard import specs
from penzai_shard.arrays.kinds import device_dtype, is_key_type, itemsize
from penzai_shard.arrays.statistics import name_statistics
from penzai_shard.arrays.structure import Leaf, flatten
from penzai_shard.errors import PlanError, Problem, Problems, warn_caller
from penzai_shard.meshes import AnyMesh, mesh_text
from penzai_shard.paths import nearest
from penzai_shard.planning import arguments
from penzai_shard.planning.plan import LeafPlan, ShardingPlan, shared_sharding
from penzai_shard.rules import IDENTITY, AxisRules, Decision, OnIndivisible, Rule, decide

_WHOLE = PartitionSpec()


def make_plan(
    tree: Any,
    mesh: AnyMesh,
    rules: Any = None,
    *,
    axis_name_to_mesh_name: Any = None,
    on_indivisible: OnIndivisible = "error",
    on_unnamed: arguments.OnUnnamed = "error",
) -> ShardingPlan:
    """Decides where every array of a tree lies on a mesh.

    Args:
        tree: A model of any library, a train state, or any tree of arrays or of
            ``jax.ShapeDtypeStruct``.
        mesh: A mesh, concrete or abstract.
        rules: Which logical axis goes to which mesh axis: a mapping, pairs of which the first that
            fits wins, ``AxisRules``, or None for the mesh axis of the same name.
        axis_name_to_mesh_name: The same under Penzai's name.
        on_indivisible: ``"replicate"`` leaves a dimension whole whose length does not divide.
        on_unnamed: ``"replicate"`` lays arrays without names on every device, ``"infer"`` leaves
            them to JAX.

    Raises:
        PlanError: Some arrays have no valid layout; all of them are in it.
        MeshError: A rule names a mesh axis that the mesh does not have.
        RuleTypeError: An argument cannot be read.

    Returns:
        The plan, which prints as a table, and shows itself in a notebook. Its ``leaves`` are the
        decisions; ``sharding_tree()`` and ``restore_structs()`` are trees for JAX and Orbax;
        ``place(tree, plan)`` carries it out, and ``on(mesh)`` is the same plan on another mesh.

    Warns:
        ShardingWarning: A rule is one letter off a logical axis of the tree, or no rule names one.

    >>> import jax
    >>> import penzai_shard as pzs
    >>> weights = {"up": jax.ShapeDtypeStruct((64, 256), "float32")}
    >>> named = pzs.name_axes(weights, {"up": ("embed", "mlp")})
    >>> mesh = pzs.make_mesh({"data": 4, "model": 2})
    >>> print(pzs.make_plan(named, mesh, {"embed": "data", "mlp": "model"}))
    1 array, 64.0 KiB; on mesh (data=4, model=2) each device holds 8.0 KiB, of which replicated 0 B
    array  logical axes/mesh axes        dtype    per device  reason
    up     embed=64/data, mlp=256/model  float32     8.0 KiB  'embed' -> 'data'; 'mlp' -> 'model'
    """
    options = axis_name_to_mesh_name, on_indivisible, on_unnamed
    request = arguments.read("make_plan", mesh, rules, *options)
    return plan_tree(tree, request)


def plan_tree(tree: Any, request: arguments.Request) -> ShardingPlan:
    """The plan that a caller asked for: a new one, or the one that was given, if it fits.

    Raises:
        PlanError: Some arrays have no valid layout, or the given plan is one of another tree.
    """
    arguments.check_tree(request.called, tree)
    if request.plan is not None:
        leaves, _ = flatten(tree)
        request.plan.check_same_tree(name_statistics(leaves))
        return request.plan
    plan, problems, doubts = examine(tree, request)
    problems.raise_if_any(PlanError)
    warn_caller(f"{request.called}: {doubt}" for doubt in doubts)
    return plan


def examine(tree: Any, request: arguments.Request) -> tuple[ShardingPlan, Problems, list[str]]:
    """Decides for every array, and raises nothing.

    Args:
        tree: As for ``make_plan``.
        request: Mesh, rules and options.

    Returns:
        The plan, in which arrays without a valid layout are whole; what stands in its way; and
        which rules look like a mistake.
    """
    leaves, structure = flatten(tree)
    problems = Problems(f"no valid layout on mesh ({mesh_text(request.mesh)}):")
    problems.extend(structure.problems)
    planner = _Planner(request)
    unreadable = {problem.path for problem in structure.problems}
    plans = []
    for leaf in name_statistics(leaves):
        spec, reason, found = planner.decide(leaf)
        # The walk has told what is wrong with the names that the library gives.
        if leaf.path not in unreadable:
            for problem in found:
                problems.add(leaf.path, problem.what, problem.fix, problem.kind)
        plans.append(planner.plan(leaf, spec, reason))
    remarks: tuple[str, ...] = ()
    if request.is_explicit:
        remarks = (
            "layouts are on the mesh with Auto axes; lay inputs over it too: "
            "name_to_name_device_put(batch, mesh, rules)",
        )
    plan = ShardingPlan(request.mesh, request.rules, tuple(plans), structure, remarks)
    return plan, problems, find_doubts(request.rules, plan.logical_axes, request.mesh.axis_names)


class _Planner:
    """Rules on one mesh, for one array after the other."""

    def __init__(self, request: arguments.Request) -> None:
        self.request = request
        self.mesh = request.mesh
        self.sizes = request.mesh.shape
        self.rules = request.rules.on(self.sizes)
        self.items = tuple(self.sizes.items())
        self.splits_unnamed = any(rule.unnamed for rule in self.rules)

    def decide(self, leaf: Leaf) -> tuple[PartitionSpec | None, str, Sequence[Problem]]:
        """Spec, reason and problems of one array."""
        if leaf.dtype is None:
            what = f"a {type(leaf.value).__name__} stands where an array should be"
            return _WHOLE, "", [Problem("", what, "Give arrays or their shapes.", "unreadable")]
        is_free = self.splits_unnamed and leaf.shape and not is_key_type(leaf.dtype)
        if leaf.names is None and not is_free:
            return self._decide_unnamed(leaf)
        statistic = leaf.statistic
        if statistic is not None and statistic.kept is not None:
            # It lies as the dimensions of its parameter that it has.
            decision = self._decide(statistic.names, statistic.sizes)
            axes = [() if dim is None else decision.mesh_axes[dim] for dim in statistic.kept]
            return specs.canonical(axes), f"as its parameter: {decision.reason}", decision.problems
        decision = self._decide(leaf.names, leaf.shape)
        reason = decision.reason
        if leaf.names is None:
            reason = f"no names: {reason}"
        elif all(name is None for name in leaf.names):
            reason = "its dimensions have no names: replicated"
        return decision.spec, reason, decision.problems

    def plan(self, leaf: Leaf, spec: PartitionSpec | None, reason: str) -> LeafPlan:
        """The row of the plan for one array."""
        # Bytes are those on a device, where NumPy's float64 becomes float32.
        sharding = shared_sharding(self.mesh, spec)
        size, dtype = 0, device_dtype(leaf.dtype)
        if dtype is not None:
            size = specs.bytes_per_device(spec or _WHOLE, leaf.shape, itemsize(dtype), self.sizes)
        return LeafPlan(leaf.path, leaf.names, leaf.shape, dtype, spec, sharding, reason, size)

    def _decide(self, names: Any, shape: Any) -> Decision:
        return decide(self.rules, names, shape, self.items, self.request.on_indivisible)

    def _decide_unnamed(self, leaf: Leaf) -> tuple[PartitionSpec | None, str, Sequence[Problem]]:
        """An array that no rule can split."""
        mode, statistic = self.request.on_unnamed, leaf.statistic
        if mode == "infer":
            return None, "no names: left to JAX", ()
        if not leaf.shape:
            return _WHOLE, "scalar: replicated", ()
        if mode == "replicate":
            return _WHOLE, "no names: replicated", ()
        fix = 'Write on_unnamed="replicate"'
        if statistic is not None and statistic.names is not None:
            what = (
                f"its shape {leaf.shape} is not made of the dimensions {statistic.names} "
                f"{statistic.sizes or ''} of its parameter"
            )
            return _WHOLE, "", [Problem("", what, f"{fix}.", "misfit")]
        what = f"this array of shape {leaf.shape} has no logical axis names"
        # Names to paste, which the user then replaces.
        names = tuple(f"axis_{dim}" for dim in range(len(leaf.shape)))
        naming = self.request.naming or f"Name it: name_axes(tree, {{{leaf.path!r}: {names}}})"
        fix = f"{naming}, or w{fix[1:]}."
        if any(rule.logical_axis is None and rule.mesh_axes for rule in self.rules):
            fix = "Write fully_sharded(unnamed='largest')."
        return _WHOLE, "", [Problem("", what, fix, "unnamed")]


# Rules that look like a mistake


def _longer_or_shorter(name: Hashable, others: Collection[Hashable]) -> set[Hashable]:
    """Other names with more words or fewer: "features_out" is another axis than "features"."""
    words = {other: {*str(other).split("_")} for other in (name, *others)}
    return {x for x in others if words[x] < words[name] or words[name] < words[x]}


def find_near_name(rule: Rule, rules: AxisRules, present: Collection[Hashable]) -> str | None:
    """The logical axis whose name is nearly that of a rule, which has none itself; None if none is.

    Args:
        rule: One of the rules.
        rules: All rules. What another one names is not looked at.
        present: The logical axes that there are.
    """
    if rule.logical_axis in present:
        return None
    others = set(present) - set(rules.logical_axes)
    return nearest(rule.logical_axis, others - _longer_or_shorter(rule.logical_axis, others))


def find_doubts(
    rules: AxisRules, present: Collection[Hashable], mesh_axes: Collection[str]
) -> list[str]:
    """Rules for a name that is nearly a logical axis of the tree, and rules of which none is one.

    Args:
        rules: The rules.
        present: The logical axes of the arrays.
        mesh_axes: The mesh axes; without them it does not matter whether a rule names any.

    Returns:
        A sentence for each of them, for warnings.

    >>> find_doubts(AxisRules({"embeding": "data"}), ["embedding"], ["data"])
    ["rule 'embeding' -> 'data' matches no logical axis. Did you mean 'embedding'?"]
    """
    asked = [rule for rule in rules.rules if not rule.for_activations]
    near = [(rule, find_near_name(rule, rules, present)) for rule in asked]
    found = [f"rule {rule} matches no logical axis. Did you mean {x!r}?" for rule, x in near if x]
    # Rules for activations count where they name an axis, and are not missed where they do not; one
    # for the largest dimension needs no names.
    needs_names = not any(rule.logical_axis is None and rule.mesh_axes for rule in asked)
    is_split = any(rule == IDENTITY or rule.mesh_axes for rule in asked)
    known = {*rules.logical_axes, *(mesh_axes if IDENTITY in asked else ())}
    parts = {part for name in present for part in (name if isinstance(name, tuple) else (name,))}
    is_named = not known.isdisjoint(parts.union(present))
    if present and mesh_axes and is_split and needs_names and not (found or is_named):
        names = ", ".join(map(repr, present))
        found.append(
            f"no rule names a logical axis of this tree ({names}), so that every device gets a "
            f"copy. Write rules={{{next(iter(present))!r}: {next(iter(mesh_axes))!r}}}, or "
            "rules={} for copies."
        )
    return found


def warn_of_near_names(called: str, rules: AxisRules, present: Collection[Hashable]) -> None:
    """Warns of rules for names that are nearly logical axes that there are."""
    # The names of a preset are alternatives.
    needed = AxisRules([rule for rule in rules.rules if not rule.optional])
    warn_caller(f"{called}: {doubt}" for doubt in find_doubts(needed, present, ()))
