"""Rules: which logical axis of an array goes to which mesh axis.

Rules are data. They say nothing about any one array until they are asked for its spec.
"""

import itertools
import reprlib
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from typing import Any

from jax.sharding import PartitionSpec

from penzai_shard.axis_decisions import SpecExplanation, decide
from penzai_shard.errors import MeshError, PlanError, RuleTypeError, raise_all
from penzai_shard.meshes import AnyMesh, mesh_shape_of, mesh_text
from penzai_shard.rule_kinds import (
    IdentityRule,
    LargestDimensionRule,
    LogicalAxis,
    MeshAxes,
    NameRule,
    OnIndivisible,
    Rule,
    array_text,
    check_option,
    mesh_axes_text,
    nearest_name,
)
from penzai_shard.rule_table import RuleTable, rule_table
from penzai_shard.text_tables import NotebookView


class AxisRules(NotebookView):
    """Which logical axis goes to which mesh axis; immutable and hashable.

    Rules are built from a mapping; from ordered pairs, in which the same logical axis may come
    several times and, per array, the first pair whose mesh axes are still free and whose length
    divides wins; or from nothing, which maps each logical axis to the mesh axis of the same name,
    and one that is a tuple of such names to all of them.
    ``left | right`` combines two sets of rules: where both name a logical axis, the left one
    counts. A rule ``name -> None`` says that the dimension stays unsharded.

    The idea of ordered logical-to-mesh rules is that of T5X and Flax (flax.linen.partitioning);
    in this library a rule that cannot be followed is an error instead of being dropped.

    Args:
        rules: A mapping ``{logical: mesh | (mesh, mesh) | None}``, a sequence of
            ``(logical, mesh)`` pairs, other rules, or None for the identity.

    Raises:
        RuleTypeError: The rules are in no such form; all offenders are named.

    >>> mesh_shape = {"data": 4, "model": 2}
    >>> rules = AxisRules({"embedding": "data", "neurons": "model"})
    >>> rules.spec(("embedding", "neurons"), (8, 16), mesh_shape)
    P('data', 'model')
    >>> AxisRules([("heads", "data"), ("heads", "model")]).spec(("heads",), (2,), mesh_shape)
    P('model',)
    >>> (AxisRules({"neurons": None}) | rules).spec(("neurons",), (16,), mesh_shape)
    P()
    """

    __slots__ = ("_hash", "_key", "rules")

    rules: tuple[Rule, ...]
    _key: Hashable
    _hash: int

    def __init__(
        self,
        rules: "AxisRules | Mapping[Any, MeshAxes] | Sequence[tuple[Any, MeshAxes]] | None" = None,
    ) -> None:
        self._set(_read_rules(rules))

    @classmethod
    def of(cls, rules: Any) -> "AxisRules":
        """Reads rules in any accepted form; rules that are ``AxisRules`` come back as they are.

        >>> AxisRules.of({"batch": "data"})
        AxisRules({'batch': 'data'})
        """
        return rules if isinstance(rules, AxisRules) else cls(rules)

    @classmethod
    def from_rules(cls, rules: Iterable[Rule]) -> "AxisRules":
        """Makes rules from rule objects; what the presets are made with.

        >>> AxisRules.from_rules([NameRule("batch", ("data",))])
        AxisRules({'batch': 'data'})
        """
        made = cls.__new__(cls)
        made._set(tuple(rules))
        return made

    def _set(self, rules: tuple[Rule, ...]) -> None:
        object.__setattr__(self, "rules", rules)
        # Where no rule gives way to another the order says nothing, and does not count for
        # equality.
        name_rules = self.name_rules
        ordered = (
            len(self.logical_axes) < len(name_rules)
            or any(rule.yields for rule in name_rules)
            or sum(isinstance(rule, LargestDimensionRule) for rule in rules) > 1
        )
        key: Hashable = rules if ordered else frozenset(rules)
        object.__setattr__(self, "_key", key)
        object.__setattr__(self, "_hash", hash(key))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"AxisRules are immutable; combine them with | instead of setting {name!r}."
        )

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"AxisRules are immutable; {name!r} cannot be deleted.")

    def __reduce__(self) -> tuple[Any, ...]:
        return AxisRules.from_rules, (self.rules,)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AxisRules):
            return NotImplemented
        return self._key == other._key

    def __or__(self, other: Any) -> "AxisRules":
        """Combines with other rules; this one's names count where both have them."""
        names = self.logical_axes
        added = [
            rule
            for rule in AxisRules.of(other).rules
            if rule not in self.rules
            and not (isinstance(rule, NameRule) and rule.logical_axis in names)
        ]
        return AxisRules.from_rules((*self.rules, *added))

    def __ror__(self, other: Any) -> "AxisRules":
        return AxisRules.of(other) | self

    def __add__(self, other: Any) -> "AxisRules":
        raise RuleTypeError(
            "rules are combined with |, not with +: data_parallel() | tensor_parallel(). Where "
            "both name a logical axis, the left ones count."
        )

    __radd__ = __add__

    def __repr__(self) -> str:
        """An expression that evaluates back with the public names alone."""
        return (
            " | ".join(
                _run_expression(kind, list(run))
                for kind, run in itertools.groupby(self.rules, _kind_of_run)
            )
            or "AxisRules({})"
        )

    def notebook_table(self) -> RuleTable:
        """The rules as a table."""
        return rule_table(self.rules, repr(self))

    @property
    def name_rules(self) -> tuple[NameRule, ...]:
        """The rules for one logical axis each, without those for whatever an array has.

        >>> from penzai_shard import fully_sharded
        >>> rules = AxisRules({"batch": "data"}) | fully_sharded()
        >>> [rule.logical_axis for rule in rules.name_rules]
        ['batch']
        """
        return tuple(rule for rule in self.rules if isinstance(rule, NameRule))

    @property
    def logical_axes(self) -> tuple[LogicalAxis, ...]:
        """The logical axes that a rule names, in the order of the rules.

        >>> AxisRules({"batch": "data", "neurons": None}).logical_axes
        ('batch', 'neurons')
        """
        names = (rule.logical_axis for rule in self.name_rules)
        return tuple(dict.fromkeys(names))

    @property
    def splits_unnamed(self) -> bool:
        """Whether a rule is for arrays without names too, so that these are decided by it.

        >>> from penzai_shard.rule_presets import fully_sharded
        >>> fully_sharded().splits_unnamed, fully_sharded(unnamed="largest").splits_unnamed
        (False, True)
        """
        return any(
            isinstance(rule, LargestDimensionRule) and rule.splits_unnamed for rule in self.rules
        )

    def mesh_problems(self, mesh: AnyMesh | Mapping[str, int]) -> list[str]:
        """One line for every rule that names a mesh axis which the mesh does not have.

        >>> AxisRules({"neurons": "modle"}).mesh_problems({"data": 4, "model": 2})
        ["rule 'neurons' -> 'modle': the mesh (data=4, model=2) has no mesh axis 'modle'. Did ...]
        """
        shape = mesh_shape_of(mesh)
        return [
            f"rule {rule}: the mesh ({mesh_text(shape)}) has no mesh axis {name!r}. "
            f"{_mesh_axis_fix(rule, name, shape)}"
            for rule in self.rules
            for name in rule.mesh_axes
            if name not in shape
        ]

    def check_mesh(self, mesh: AnyMesh | Mapping[str, int]) -> None:
        """Checks that every mesh axis named by a rule exists.

        Args:
            mesh: The mesh, or its axis sizes by name.

        Raises:
            MeshError: Some rule names a mesh axis that the mesh does not have; all are reported
                at once.

        >>> AxisRules({"neurons": "model"}).check_mesh({"model": 2})
        """
        raise_all(MeshError, "the rules do not fit the mesh:", self.mesh_problems(mesh))

    def spec(
        self,
        names: Sequence[LogicalAxis | None] | None,
        sizes: Sequence[int],
        mesh: AnyMesh | Mapping[str, int],
        *,
        on_indivisible: OnIndivisible = "error",
    ) -> PartitionSpec:
        """The spec of an array with these logical axes.

        Args:
            names: The logical axis of each dimension, in the order of the data; None for a
                positional dimension, which stays unsharded. None altogether for an array without
                names, which is split only by ``fully_sharded(unnamed="largest")``.
            sizes: The length of each dimension.
            mesh: The mesh, or its axis sizes by name.
            on_indivisible: ``"replicate"`` leaves a dimension unsharded whose length does not
                divide; ``"pad"`` gives the spec of the array as it is stored, padded; by default
                that is an error.

        Returns:
            A ``PartitionSpec`` without trailing ``None``.

        Raises:
            MeshError: A rule names a mesh axis that the mesh does not have.
            PlanError: A length does not divide, or one mesh axis is asked for twice.
            RuleTypeError: Names and sizes differ in number, or a name occurs twice.

        >>> AxisRules({"b": "data"}).spec(("a", "b", "c"), (3, 4, 5), {"data": 2})
        P(None, 'data')
        """
        explanation = self.explain(names, sizes, mesh, on_indivisible=on_indivisible)
        text = str(list(sizes)) if names is None else array_text(names, sizes)
        raise_all(PlanError, f"no valid layout for {text}:", explanation.problems)
        return explanation.spec

    def explain(
        self,
        names: Sequence[LogicalAxis | None] | None,
        sizes: Sequence[int],
        mesh: AnyMesh | Mapping[str, int],
        *,
        on_indivisible: OnIndivisible = "error",
    ) -> SpecExplanation:
        """Says which rule gave what for an array, and what stands in the way of a layout.

        Takes the arguments of ``spec``. Problems with the array are returned, not raised.

        Raises:
            MeshError: A rule names a mesh axis that the mesh does not have.
            RuleTypeError: Names and sizes differ in number, or a name occurs twice.

        >>> print(AxisRules({"b": "data"}).explain(("a", "b"), (3, 4), {"data": 2}))
        P(None, 'data')
        logical axis  size  mesh axes  reason
        ------------  ----  ---------  -------------
        'a'              3             no rule
        'b'              4  data       'b' -> 'data'
        """
        names, sizes = None if names is None else tuple(names), tuple(sizes)
        if names is not None and len(names) != len(sizes):
            raise RuleTypeError(
                f"{len(names)} logical axis names {names} for {len(sizes)} sizes {sizes}. "
                "Give one name per dimension, None for a positional one."
            )
        given = [name for name in names or () if name is not None]
        if len(set(given)) < len(given):
            repeated = next(name for name in given if given.count(name) > 1)
            raise RuleTypeError(
                f"the names {names} have logical axis {repeated!r} twice. "
                "Give every dimension a name of its own."
            )
        check_option("on_indivisible", on_indivisible)
        shape = mesh_shape_of(mesh)
        self.check_mesh(shape)
        return decide(self.rules, names, sizes, tuple(shape.items()), on_indivisible)


def _read_rules(rules: Any) -> tuple[Rule, ...]:
    if rules is None:
        return (IdentityRule(),)
    if isinstance(rules, AxisRules):
        return rules.rules
    if isinstance(rules, Mapping):
        rules = rules.items()
    elif not isinstance(rules, Iterable) or isinstance(rules, str | bytes | Set):
        if callable(rules):
            name = getattr(rules, "__name__", type(rules).__name__)
            raise RuleTypeError(
                f"the rules are the function {name}, which was not called. Write {name}()."
            )
        is_layout = isinstance(getattr(rules, "compute", None), AxisRules)
        raise RuleTypeError(
            f"rules must be AxisRules, a mapping, a sequence of (logical, mesh) pairs or None, "
            f"not {type(rules).__name__}: {reprlib.repr(rules)}. "
            + (
                "A layout holds several, of which the model says the names: give the plan "
                "layout.plan(model, mesh) in place of mesh and rules; for a batch call "
                "layout.shard_batch(batch, mesh)."
                if is_layout
                else "For instance {'embedding': 'data'}."
            )
        )
    read = [_read_pair(item) for item in rules]
    problems = [problem for problem in read if isinstance(problem, str)]
    raise_all(RuleTypeError, "these rules cannot be read:", problems)
    return tuple(rule for rule in read if not isinstance(rule, str))


def _read_pair(item: Any) -> NameRule | str:
    """The rule of a pair, or why it cannot be read."""
    if not isinstance(item, tuple | list) or len(item) != 2:
        return f"{item!r} is not a (logical, mesh) pair. Write for instance ('embedding', 'data')."
    logical, given = item
    mesh_axes = (given,) if isinstance(given, str) else () if given is None else given
    mesh_axes = tuple(mesh_axes) if isinstance(mesh_axes, list) else mesh_axes
    if logical is None or not isinstance(logical, Hashable):
        return (
            f"rule {logical!r} -> {mesh_axes!r}: the logical axis must be a hashable name. "
            "Positional dimensions have none and stay unsharded."
        )
    if not isinstance(mesh_axes, tuple) or not all(isinstance(name, str) for name in mesh_axes):
        return (
            f"rule {logical!r} -> {given!r}: a mesh axis is a name, a tuple of names or None, not "
            f"{type(given).__name__}. Write for instance {logical!r}: 'data'."
        )
    if len(set(mesh_axes)) < len(mesh_axes):
        return (
            f"rule {logical!r} -> {mesh_axes!r} names a mesh axis twice. "
            f"Write {logical!r}: {mesh_axes_text(tuple(dict.fromkeys(mesh_axes)))}."
        )
    return NameRule(logical, mesh_axes)


def _mesh_axis_fix(rule: Rule, name: str, mesh_shape: Mapping[str, int]) -> str:
    """What to write in place of a mesh axis that the mesh does not have."""
    if isinstance(rule, NameRule) and rule.logical_axis in mesh_shape:
        return f"It looks reversed: logical axis first, {{{name!r}: {rule.logical_axis!r}}}."
    near = nearest_name(name, mesh_shape)
    return f"Did you mean {near!r}?" if near else f"Use one of {sorted(mesh_shape)}, or None."


def _kind_of_run(rule: Rule) -> Any:
    """Rules next to each other of the same kind are written as one expression."""
    if isinstance(rule, NameRule):
        return ("preset", rule.mesh_axes) if rule.yields else (rule if _is_own(rule) else "names")
    return rule


def _is_own(rule: NameRule) -> bool:
    """Whether a preset says that a rule is for activations, and its logical axis does not."""
    return rule.for_activations and not NameRule(rule.logical_axis, ()).is_for_activations


def _run_expression(kind: Any, run: list[Any]) -> str:
    if isinstance(kind, IdentityRule):
        return "AxisRules()"
    if isinstance(kind, LargestDimensionRule):
        also = ", unnamed='largest'" if kind.splits_unnamed else ""
        return f"fully_sharded({mesh_axes_text(kind.mesh_axes)}, min_size={kind.min_size}{also})"
    if isinstance(kind, NameRule):
        over = mesh_axes_text(kind.mesh_axes)
        return f"data_parallel({over}, batch_axis={kind.logical_axis!r})"
    names = [rule.logical_axis for rule in run]
    if isinstance(kind, tuple):
        return f"tensor_parallel({mesh_axes_text(kind[1])}, axes={tuple(names)!r})"
    if len(set(names)) < len(names):
        pairs = (f"({r.logical_axis!r}, {mesh_axes_text(r.mesh_axes)})" for r in run)
        return f"AxisRules([{', '.join(pairs)}])"
    pairs = (f"{r.logical_axis!r}: {mesh_axes_text(r.mesh_axes)}" for r in run)
    return "AxisRules({" + ", ".join(pairs) + "})"
