"""The arguments of every function that plans, read in one place.

Rules come under two names (``rules=`` and Penzai's ``axis_name_to_mesh_name=``), a plan that was
made before can stand in for them, and two options say what is relaxed. ``PlanRequest`` reads them,
refuses what cannot be meant, and plans.
"""

import dataclasses
from collections.abc import Collection
from typing import Any, ClassVar, Self

from jax.sharding import AbstractMesh, Mesh

from penzai_shard.axis_rules import AxisRules
from penzai_shard.errors import MeshError, RuleTypeError, warn_caller
from penzai_shard.meshes import AnyMesh, auto_twin, mesh_text
from penzai_shard.planning.plan import ShardingPlan
from penzai_shard.planning.plan_fitting import fitted_plan
from penzai_shard.planning.planner import Planner
from penzai_shard.planning.quick_shardings import quick_shardings
from penzai_shard.planning.rule_doubts import nameless_module_doubts, rule_doubts
from penzai_shard.planning.transient_arrays import is_train_state
from penzai_shard.rule_kinds import (
    LogicalAxis,
    OnIndivisible,
    OnUnnamed,
)
from penzai_shard.tree_arguments import refuse_builder

# Fields of a train state: data of a random generator, and what the optimizer keeps.
_KEYS = "root_rng"
_OPTIMIZER = "opt_state"


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """What a caller asked for: a plan that exists, or a mesh with rules and options.

    Attributes:
        called: The function that was called, for messages.
        planner: Mesh, rules and options.
        rules_given: Whether the caller gave any rules; if not, they are the identity.
        given: The plan to carry out, if the caller gave one.
        keep_others: Whether all leaves that are not arrays stay as they are, instead of functions
            and classes alone.
    """

    called: str
    planner: Planner
    rules_given: bool = True
    given: ShardingPlan | None = None
    keep_others: bool = False

    # Whether the function carries plans out, so that it takes them.
    places: ClassVar[bool] = False
    # Whether it needs a mesh that has devices.
    needs_devices: ClassVar[bool] = False

    @classmethod
    def read(
        cls,
        called: str,
        mesh: Any,
        rules: Any = None,
        axis_name_to_mesh_name: Any = None,
        on_indivisible: OnIndivisible = "error",
        on_unnamed: OnUnnamed = "error",
        plan: Any = None,
    ) -> Self:
        """Reads the arguments of a function that plans.

        Every such function has these arguments under these names, and passes them in this order.

        Args:
            called: The name of that function.
            mesh: The mesh; for a function that carries plans out also a plan.
            rules: Rules in any form that ``AxisRules`` reads, or None.
            axis_name_to_mesh_name: The same under Penzai's name; only one of them is given.
            on_indivisible: ``"error"``, ``"replicate"`` or ``"pad"``.
            on_unnamed: ``"error"``, ``"replicate"`` or ``"infer"``.
            plan: A plan to be carried out, instead of mesh, rules and options.

        Raises:
            RuleTypeError: Arguments contradict each other, or cannot be read.
            MeshError: A rule names a mesh axis that the mesh does not have, or a mesh has no
                devices.

        >>> from penzai_shard.meshes import make_mesh
        >>> mesh = make_mesh({"data": 8})
        >>> PlanRequest.read("place", mesh, None, {"batch": "data"}).planner.rules
        AxisRules({'batch': 'data'})
        """
        if rules is not None and axis_name_to_mesh_name is not None:
            raise RuleTypeError(
                f"{called}: rules and axis_name_to_mesh_name are two names of one argument, and "
                "both are given. Give one of them; two sets of rules are combined as "
                "AxisRules(first) | second."
            )
        rules = axis_name_to_mesh_name if rules is None else rules
        _refuse_mixed_up(called, mesh, rules, cls.places)
        if isinstance(mesh, ShardingPlan):
            if plan is not None:
                raise RuleTypeError(f"{called}: two plans are given. Give one.")
            mesh, plan = None, mesh
        if plan is not None:
            relaxed = on_indivisible != "error" or on_unnamed != "error"
            _check_plan(called, plan, mesh, rules is not None or relaxed, cls.places)
            if cls.needs_devices:
                _check_has_devices(called, plan.mesh)
            return cls(called, Planner(plan.mesh, plan.rules), given=plan)
        if mesh is None:
            or_plan = ", or a plan: plan=make_plan(tree, mesh, rules)" if cls.places else ""
            raise RuleTypeError(
                f"{called}: a mesh is needed, for instance mesh=make_mesh({{'data': 4, "
                f"'model': 2}}){or_plan}."
            )
        planner = Planner(mesh, rules, on_indivisible, on_unnamed)
        if cls.needs_devices:
            _check_has_devices(called, planner.mesh)
        return cls(called, planner, rules is not None)

    @property
    def mesh(self) -> AnyMesh:
        """The mesh, with Auto axes."""
        return self.planner.mesh

    @property
    def rules(self) -> AxisRules:
        """The rules."""
        rules: AxisRules = self.planner.rules
        return rules

    def plan(self, tree: Any) -> ShardingPlan:
        """The plan of a tree: the given one, if it fits exactly, or a new one.

        Raises:
            PlanError: Some arrays have no valid layout, or the given plan is of another tree.
            RuleTypeError: A function or a class is given instead of a tree.

        Warns:
            ShardingWarning: The rules look like a mistake; see ``doubts``.
        """
        refuse_builder(self.called, tree)
        if self.given is not None:
            return fitted_plan(self.given, tree, self.called, self.keep_others)
        by_field = self._by_field() if is_train_state(tree) else None
        plan = self.planner.plan(tree, self.keep_others, by_field)
        warn_caller((*self.doubts(plan.logical_axes), *nameless_module_doubts(plan)))
        return plan

    def plan_quietly(self, tree: Any) -> ShardingPlan:
        """The plan of a tree that is planned once more, without warnings."""
        if self.given is not None:
            return fitted_plan(self.given, tree, self.called, self.keep_others)
        return self.planner.plan(tree, self.keep_others)

    @property
    def can_pad(self) -> bool:
        """Whether some array may be stored padded."""
        if self.given is not None:
            return self.given.padding_bytes > 0
        return self.planner.on_indivisible == "pad"

    def sharding_tree(self, tree: Any) -> Any:
        """``plan(tree).sharding_tree()``, in less time.

        >>> import jax
        >>> from penzai import pz
        >>> mesh = jax.sharding.AbstractMesh((2,), ("data",))
        >>> request = PlanRequest.read("place", mesh, {"a": "data"})
        >>> request.sharding_tree([pz.nx.ones({"a": 2})])[0].data_array.spec
        P('data',)
        """
        if self.given is None and tree is not None:
            found = quick_shardings(self.planner, tree)
            if found is not None:
                shardings, logical_axes = found
                warn_caller(self.doubts(logical_axes))
                return shardings
        return self.plan(tree).sharding_tree()

    def plan_state(self, train_state: Any, optimizer_rules: Any = None) -> ShardingPlan:
        """The plan of a train state, or of another tree of its fields.

        Args:
            train_state: The state. Random keys in its field ``root_rng`` are replicated, whatever
                their form.
            optimizer_rules: Other rules for the field ``opt_state``.

        Returns:
            The given plan, if it fits exactly, or a new one; its paths begin with the field's name.
            It shows the gradients too, which are there while a step runs.

        Raises:
            PlanError: As for ``plan``; the arrays of all fields are reported at once.
            RuleTypeError: A plan is given and ``optimizer_rules`` too.

        Warns:
            ShardingWarning: The rules look like a mistake; see ``doubts``.

        >>> import jax
        >>> from penzai import pz
        >>> mesh = jax.sharding.AbstractMesh((2,), ("data",))
        >>> request = PlanRequest.read("place", mesh, {"a": "data"})
        >>> plan = request.plan_state({"params": pz.nx.ones({"a": 2}), "step": 0})
        >>> [(leaf.path, leaf.spec) for leaf in plan.leaves]
        [('params', P('data',)), ('step', P())]
        """
        if self.given is not None:
            if optimizer_rules is not None:
                raise RuleTypeError("optimizer_rules are part of a plan: give either.")
            return self.plan(train_state)
        plan = self.planner.plan(train_state, self.keep_others, self._by_field(optimizer_rules))
        warn_caller(self.doubts(plan.logical_axes))
        return plan

    def examined(
        self, tree: Any, optimizer_rules: Any = None
    ) -> tuple[ShardingPlan, tuple[tuple[str, str], ...]]:
        """The plan of a tree as far as there is one, and what stands in its way, without warnings.

        Args:
            tree: As for ``plan``; a train state as for ``plan_state``.
            optimizer_rules: As for ``plan_state``.

        Returns:
            The plan, in which dimensions that cannot be split stay whole; and every problem with
            the path of its array.

        >>> import jax
        >>> from penzai import pz
        >>> mesh = jax.sharding.AbstractMesh((2,), ("data",))
        >>> request = PlanRequest.read("lint", mesh, {"a": "data"})
        >>> ((path, problem),) = request.examined({"w": pz.nx.ones({"a": 3})})[1]
        >>> print(path, problem)
        w logical axis 'a' (3) does not divide over mesh axis 'data' (2), asked by rule 'a' -> ...
        """
        refuse_builder(self.called, tree)
        by_field = self._by_field(optimizer_rules) if is_train_state(tree) else None
        return self.planner.examined(tree, self.keep_others, by_field)

    def _by_field(self, optimizer_rules: Any = None) -> dict[str, Planner]:
        """Who plans the fields of a train state that are not planned like all else."""
        by_field = {_KEYS: dataclasses.replace(self.planner, rules={}, on_unnamed="replicate")}
        if optimizer_rules is not None:
            by_field[_OPTIMIZER] = dataclasses.replace(self.planner, rules=optimizer_rules)
        return by_field

    def doubts(self, present: Collection[LogicalAxis], constrains: bool = False) -> list[str]:
        """What about the rules is probably not meant, as messages of warnings.

        Args:
            present: The logical axes of the arrays.
            constrains: Whether the rules pin what flows through a layer.

        Returns:
            What ``rule_doubts`` finds.
        """
        return rule_doubts(self.called, self.planner, self.rules_given, present, constrains)


class DescribingRequest(PlanRequest):
    """What a caller of a function asked for that lays out structs, on devices or none."""

    places = True


class PlacingRequest(DescribingRequest):
    """What a caller of a function asked for that puts arrays on devices."""

    needs_devices = True


def _refuse_mixed_up(called: str, mesh: Any, rules: Any, places: bool) -> None:
    """Refuses a plan or a mesh where the rules belong."""
    if isinstance(rules, ShardingPlan):
        fix = "Give the plan alone, as plan" if places else "Give its rules: rules=plan.rules"
        raise RuleTypeError(
            f"{called}: a plan is given as the rules, and stands for mesh and rules both. {fix}"
            + (": place(tree, plan), or plan=plan." if places else ".")
        )
    meshes = Mesh | AbstractMesh
    if isinstance(rules, meshes):
        order = "the mesh is given as the rules" if isinstance(mesh, meshes) else "swapped"
        raise RuleTypeError(
            f"{called}: mesh and rules are mixed up: {order}. The mesh comes first, or name them: "
            "mesh=mesh, rules=rules."
        )


def _check_plan(called: str, plan: Any, mesh: Any, with_more: bool, places: bool) -> None:
    """Checks that a plan is given where one can be carried out, and nothing else beside it."""
    if not isinstance(plan, ShardingPlan):
        raise RuleTypeError(
            f"{called}: plan must be a ShardingPlan, not {type(plan).__name__}: {plan!r}. "
            "Make one: make_plan(tree, mesh, rules)."
        )
    if not places:
        raise RuleTypeError(
            f"{called} makes a plan and needs a mesh for it, not a plan. "
            "To carry the plan out, call place(tree, plan)."
        )
    if with_more:
        raise RuleTypeError(
            f"{called}: a plan is given, and rules or options too, which the plan has decided "
            "already. Give either; other rules make another plan: make_plan(tree, mesh, rules)."
        )
    if mesh is not None and (not hasattr(mesh, "axis_types") or auto_twin(mesh) != plan.mesh):
        raise MeshError(
            f"{called}: the plan was made for another mesh ({mesh_text(plan.mesh)}) than "
            "the one given. Leave the mesh out, or plan for this one: make_plan(tree, mesh, rules)."
        )


def _check_has_devices(called: str, mesh: Any) -> None:
    if not isinstance(mesh, Mesh):
        raise MeshError(
            f"{called} cannot put arrays on this {type(mesh).__name__}: it has no devices. "
            "Plan with make_plan on it, or use make_mesh({...}) to place."
        )
