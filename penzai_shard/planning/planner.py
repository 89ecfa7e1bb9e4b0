"""Deciding for every array of a tree, by rules on one mesh.

Large trees have few distinct layouts. Each is worked out once, and arrays with equal names and
sizes get the very same ``NamedSharding`` object, which keeps trees small and comparisons fast.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from penzai_shard.axis_decisions import SpecExplanation, decide
from penzai_shard.axis_rules import AxisRules
from penzai_shard.errors import PlanError, ShardingError, raise_all
from penzai_shard.library_apis.jax_api import is_weakly_typed
from penzai_shard.meshes import AnyMesh, auto_twin, is_same_mesh, mesh_text, refuse_other_than_mesh
from penzai_shard.model_variables import held_by_templates
from penzai_shard.named_leaves import NamedLeaf, Stored, map_arrays
from penzai_shard.partition_specs import canonical_spec
from penzai_shard.planning.plan import LeafPlan, ShardingPlan, itemsize, shared_named_sharding
from penzai_shard.planning.transient_arrays import gradient_plans
from penzai_shard.readers import ReadArray
from penzai_shard.reduced_statistics import (
    DimensionsOf,
    dimensions_of_statistics,
    parameters_of,
)
from penzai_shard.rule_kinds import (
    LargestDimensionRule,
    LogicalAxis,
    OnIndivisible,
    OnUnnamed,
    check_option,
)
from penzai_shard.tree_paths import path_text

# Why every device gets a whole copy of an array without being asked to.
NAMELESS_MODULE = "no names, as in any Equinox module: replicated"


@dataclasses.dataclass(frozen=True)
class Planner:
    """Rules on one mesh, with what is relaxed: all that decides the layout of a tree.

    Attributes:
        mesh: The mesh, concrete or abstract; its Auto twin once it is read.
        rules: Rules in any form that ``AxisRules`` reads, and ``AxisRules`` once they are read.
        on_indivisible: As for ``make_plan``.
        on_unnamed: As for ``make_plan``.
        min_size: Arrays with fewer elements than this stay whole.

    Raises:
        MeshError: A rule names a mesh axis that the mesh does not have.
        RuleTypeError: Mesh, rules or options cannot be read.

    >>> Planner(jax.sharding.AbstractMesh((2,), ("data",)), {"a": "data"}).rules
    AxisRules({'a': 'data'})
    """

    mesh: AnyMesh
    rules: Any = None
    on_indivisible: OnIndivisible = "error"
    on_unnamed: OnUnnamed = "error"
    min_size: int = 0

    def __post_init__(self) -> None:
        refuse_other_than_mesh(self.mesh)
        check_option("on_indivisible", self.on_indivisible)
        check_option("on_unnamed", self.on_unnamed)
        object.__setattr__(self, "mesh", auto_twin(self.mesh))
        object.__setattr__(self, "rules", AxisRules.of(self.rules))
        self.rules.check_mesh(self.mesh)

    def plan(
        self,
        tree: Any,
        keep_others: bool = False,
        by_field: "Mapping[str, Planner] | None" = None,
        parameters: Any = None,
    ) -> ShardingPlan:
        """The plan of a tree, without warnings.

        Args:
            tree: What ``make_plan`` takes.
            keep_others: Whether all leaves that are not arrays stay as they are, instead of
                functions and classes alone.
            by_field: For a tree of named fields such as a train state: who plans a field instead.
                Paths then begin with the field's name.
            parameters: Those that optimizer states in the tree belong to, if they are not in it
                as those of a train state.

        Raises:
            PlanError: Some arrays have no valid layout; all of them are reported at once.

        >>> mesh = jax.sharding.AbstractMesh((2,), ("data",))
        >>> Planner(mesh, {}).plan({}).leaves
        ()
        """
        plan, found = self.examined(tree, keep_others, by_field, parameters)
        problems = [f"{path or 'the array'}: {problem}" for path, problem in found]
        raise_all(PlanError, "no valid layout for some arrays:", problems)
        return plan

    def examined(
        self,
        tree: Any,
        keep_others: bool = False,
        by_field: "Mapping[str, Planner] | None" = None,
        parameters: Any = None,
    ) -> tuple[ShardingPlan, tuple[tuple[str, str], ...]]:
        """The plan of a tree, and what stands in its way; takes the arguments of ``plan``.

        Returns:
            The plan, in which dimensions that cannot be split stay whole; and every problem with
            the path of its array.

        >>> mesh = jax.sharding.AbstractMesh((2,), ("data",))
        >>> plan, problems = Planner(mesh, {"a": "data"}).examined([{"w": 1}])
        >>> plan.leaves[0].path, problems
        ('0/w', ())
        """
        leaves: list[LeafPlan] = []
        problems: list[tuple[str, str]] = []
        others: list[str] = []
        statistics: dict[str, DimensionsOf] = {}
        if any(p.rules.splits_unnamed for p in (self, *(by_field or {}).values())):
            parameters = parameters_of(tree) if parameters is None else parameters
            statistics = dimensions_of_statistics(tree, parameters)

        taken_apart = held_by_templates(getattr(tree, "variables", None))

        def number(planner: Planner, leaf: NamedLeaf) -> int | Stored:
            if leaf.path in taken_apart:
                leaf = dataclasses.replace(leaf, held=taken_apart[leaf.path])
            leaf_plan, found = planner.plan_leaf(leaf, statistics.get(leaf.path))
            problems.extend((leaf.path, problem) for problem in found)
            leaves.append(leaf_plan)
            return stored_number(len(leaves) - 1, leaf, leaf_plan)

        def numbered(key_path: Any, field: Any) -> Any:
            name = path_text(key_path)
            planner = self if by_field is None else by_field.get(name, self)
            number_leaf = functools.partial(number, planner)
            return number_arrays(field, number_leaf, others, keep_others, name)

        # Without fields the whole tree is one that has no name.
        numbers = jax.tree_util.tree_map_with_path(
            numbered, tree, is_leaf=lambda node: by_field is None or node is not tree
        )
        plan = ShardingPlan(
            self.mesh,
            self.rules,
            tuple(leaves),
            numbers,
            tuple(others),
            gradient_plans(numbers, leaves),
        )
        return plan, tuple(problems)

    def plan_leaf(
        self, leaf: NamedLeaf, made_of: DimensionsOf | None = None
    ) -> tuple[LeafPlan, tuple[str, ...]]:
        """The decision for one array, and what stands in its way.

        Args:
            leaf: The array.
            made_of: For a statistic without names, the dimensions of its parameter that it has.
        """
        problems: tuple[str, ...] = ()
        spec: PartitionSpec | None = PartitionSpec()
        stored_shape, reason = leaf.shape, ""
        # A statistic that is not made of its parameter's dimensions has no names of its own.
        unfit = leaf.whole is not None and leaf.problem
        if leaf.problem and not unfit:
            problems = (f"{leaf.problem}.",)
        elif leaf.names is not None and not unfit:
            spec, reason, problems, stored_shape = self._by_names(leaf)
            if stored_shape != leaf.shape:
                problems = (*problems, *_why_not_padded(leaf))
            if leaf.held is not None and not problems:
                problems = self._other_than_its_own(leaf.held, leaf, spec)
        elif self._splits_unnamed(leaf):
            spec, reason = self._by_sizes(leaf, made_of)
        elif self.on_unnamed == "infer":
            spec, reason = None, "no names: left to JAX"
        elif leaf.dtype is None:
            problems = (
                f"a {type(leaf.array).__name__} is not an array. "
                "Keep it out of the tree, for instance as a static field.",
            )
        elif not leaf.shape:
            reason = "scalar: replicated"
        elif self.on_unnamed == "replicate":
            reason = f"{'names do not fit' if unfit else 'no names'}: replicated"
        elif unfit:
            problems = (
                f'{leaf.problem}, or pass on_unnamed="replicate" for a copy on every device.',
            )
        elif leaf.in_nameless_module:
            reason = NAMELESS_MODULE
        else:
            by_path = " or name_axes(tree, {...})" if leaf.path else ""
            naming = leaf.naming or f"Name it with pz.nx.wrap(array).tag(...){by_path}"
            splits = any(isinstance(rule, LargestDimensionRule) for rule in self.rules.rules)
            split = 'split it too, fully_sharded(unnamed="largest"), ' if splits else ""
            problems = (
                f"this array of shape {leaf.shape} has no logical axis names. {naming}, {split}"
                'or pass on_unnamed="replicate".',
            )
        if spec and math.prod(leaf.shape) < self.min_size:
            spec, reason = PartitionSpec(), f"under {self.min_size} elements: replicated"
            stored_shape = leaf.shape
        if problems and stored_shape != leaf.shape:
            spec, stored_shape = PartitionSpec(), leaf.shape
        sharding = None if spec is None else shared_named_sharding(self.mesh, spec)
        shard_shape = leaf.shape if sharding is None else sharding.shard_shape(stored_shape)
        held = math.prod(shard_shape) * itemsize(leaf.dtype)
        plan = LeafPlan(
            leaf.path,
            leaf.names,
            leaf.shape,
            leaf.dtype,
            spec,
            sharding,
            reason,
            shard_shape,
            held,
            # So are arrays that JAX makes of Python numbers.
            is_weakly_typed(leaf.array) or type(leaf.array) in (int, float, complex),
            stored_shape,
        )
        return plan, problems

    def decide(
        self, names: tuple[LogicalAxis | None, ...] | None, sizes: tuple[int, ...]
    ) -> SpecExplanation:
        """What the rules give for an array of these names and sizes; names are None if none."""
        return decide(self.rules.rules, names, sizes, self._mesh_items, self.on_indivisible)

    def _other_than_its_own(
        self, held: ReadArray, leaf: NamedLeaf, spec: PartitionSpec
    ) -> tuple[str, ...]:
        """Why an array cannot be laid out so: its library lays it out otherwise when it is used."""
        if held.mesh is not None and not is_same_mesh(held.mesh, self.mesh):
            return (
                f"it has a mesh of its own ({mesh_text(held.mesh)}), on which it is laid out when "
                f"it is used, and this is another one ({mesh_text(self.mesh)}). Leave mesh= out "
                "where it is annotated, or give that mesh here.",
            )
        if not held.rules or leaf.names is None:
            return ()
        try:
            rules = AxisRules.of(held.rules)
            rules = rules | self.rules if held.rules_for_some else rules
            own = dataclasses.replace(self, rules=rules).decide(leaf.names, leaf.shape)
            if own.spec == spec and not own.problems:
                return ()
            gives = f"give {own.spec}" if not own.problems else f"fail ({' '.join(own.problems)})"
        except ShardingError as error:
            gives = f"cannot be read ({'; '.join(error.problems) or error})"
        return (
            f"it has rules of its own, by which it is laid out when it is used: they {gives}, and "
            f"these rules give {spec}. Leave them out where it is annotated, or give the same "
            f"rules here: rules={held.rules!r}.",
        )

    @functools.cached_property
    def _mesh_items(self) -> tuple[tuple[str, int], ...]:
        return tuple(self.mesh.shape.items())

    def _splits_unnamed(self, leaf: NamedLeaf) -> bool:
        """Whether the rules decide on an array though it has no names that fit it."""
        return self.rules.splits_unnamed and bool(leaf.shape) and leaf.dtype is not None

    def _by_sizes(self, leaf: NamedLeaf, made_of: DimensionsOf | None) -> tuple[PartitionSpec, str]:
        """Spec and reason of an array without names; statistics follow their parameter."""
        which = "names do not fit" if leaf.names is not None else "no names"
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return PartitionSpec(), "random keys: replicated"
        if made_of is None:
            explained = self.decide(None, leaf.shape)
            return explained.spec, f"{which}: {explained.reason}"
        spec, explained = self._as_parameter(made_of)
        return spec, f"{which}: statistic, laid out as its parameter: {explained.reason}"

    def _by_names(
        self, leaf: NamedLeaf
    ) -> tuple[PartitionSpec, str, tuple[str, ...], tuple[int, ...]]:
        """Spec, reason, problems, stored shape; statistics follow the parameter that is theirs."""
        assert leaf.names is not None
        if leaf.whole is None:
            explained = self.decide(leaf.names, leaf.shape)
            reason = f"{leaf.note}: replicated" if leaf.note else explained.reason
            return explained.spec, reason, explained.problems, explained.stored_sizes
        spec, explained = self._as_parameter(leaf.whole)
        reason = f"{leaf.note}, laid out as its parameter: {explained.reason}"
        return spec, reason, explained.problems, leaf.shape

    def _as_parameter(self, made_of: DimensionsOf) -> tuple[PartitionSpec, SpecExplanation]:
        """The spec of a statistic, and the decision for the parameter that it belongs to.

        A statistic of some dimensions alone, as adafactor and sm3 keep, is not padded: those that
        their parameter pads are whole in it. It has the parameter's elements divided by the length
        of the dimensions that it lacks, so that little would be saved; and what holds it has the
        names and lengths of the whole parameter, which do not say where its own dimensions end.
        """
        explained = self.decide(made_of.names, made_of.sizes)
        kept = made_of.of_kept(
            [
                dimension.mesh_axes if dimension.stored_size == dimension.size else ()
                for dimension in explained.dimensions
            ]
        )
        return canonical_spec(kept), explained


def _why_not_padded(leaf: NamedLeaf) -> tuple[str, ...]:
    """Why an array cannot be stored padded, if so; its rules ask for it."""
    relaxed = 'or leave it whole: on_indivisible="replicate"'
    if leaf.held is not None and not leaf.can_be_padded:
        return (
            "only named arrays of Penzai can be stored padded, and another library holds this "
            "one. Pad its train state, whose arrays are Penzai's: place(TrainState.initial_state("
            f'model, optimizer, key), mesh, rules, on_indivisible="pad"), {relaxed}.',
        )
    if not leaf.can_be_padded:
        return (
            "an array is stored padded only if its positional dimensions come first. Name all of "
            f"its dimensions, {relaxed}.",
        )
    if leaf.dtype is not None and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return (f"random keys are not stored padded. Map their logical axis to None, {relaxed}.",)
    return ()


def stored_number(number: int, leaf: NamedLeaf, planned: LeafPlan) -> int | Stored:
    """The number of an array's plan, as it stands in the planned tree.

    >>> leaf = NamedLeaf("w", ("a",), (2,), None, None)
    >>> stored_number(7, leaf, Planner(jax.sharding.AbstractMesh((2,), ("a",))).plan_leaf(leaf)[0])
    7
    """
    if leaf.padding is None and planned.padding is None:
        return number
    return Stored(number, planned.padding)


def number_arrays(
    tree: Any,
    number: Callable[[NamedLeaf], int | Stored],
    others: list[str],
    keep_others: bool,
    path: str = "",
) -> Any:
    """The tree with a number in place of every array, and -1 for leaves that are not meant as one.

    Models of other libraries have functions and classes among their leaves. Text, or an array of
    it, is more likely a mistake, unless it is in a module of Equinox, or whoever made the tree
    keeps all ``others``.

    Args:
        tree: The tree.
        number: Gives an array its number.
        others: Gets the paths of the other leaves.
        keep_others: As for ``Planner.plan``.
        path: Prepended to all paths.

    >>> others = []
    >>> number_arrays({"w": 1.0, "activation": len}, lambda leaf: 7, others, False), others
    ({'activation': -1, 'w': 7}, ['activation'])
    """

    def visit(leaf: NamedLeaf) -> int | Stored:
        is_other = leaf.names is None and leaf.dtype is None and not leaf.problem
        if is_other and (keep_others or leaf.in_nameless_module or callable(leaf.array)):
            others.append(leaf.path)
            return -1
        return number(leaf)

    return map_arrays(tree, visit, path)
