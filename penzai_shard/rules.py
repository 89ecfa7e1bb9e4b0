"""Says which logical axis is sharded over which mesh axes: the rules, and what decides by them.

Rules are data and know no array. ``decide`` makes of them the layout of one array, and nothing else
in this library chooses a layout.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Literal, TypeAlias, get_args

from jax.sharding import PartitionSpec

from penzai_shard.errors import MeshError, PlanError, Problem, Problems, RuleTypeError
from penzai_shard.meshes import AnyMesh, axis_sizes, mesh_text
from penzai_shard.paths import nearest
from penzai_shard.specs import canonical, part_count

OnIndivisible: TypeAlias = Literal["error", "replicate"]
Names: TypeAlias = Sequence[Hashable | None] | None
MeshAxes: TypeAlias = str | Sequence[str] | None

# The logical axes of Penzai's transformers of which each device can compute a part by itself. Where
# attention is grouped, arrays have both head_groups and query_heads, and the first is split.
TRANSFORMER_AXES = ("neurons", "heads", "head_groups", "query_heads", "vocabulary")


@dataclasses.dataclass(frozen=True)
class Rule:
    """One logical axis goes to some mesh axes.

    Attributes:
        logical_axis: The logical axis. None stands for the largest dimension of each array or,
            without mesh axes, for every logical axis that is called like a mesh axis.
        mesh_axes: The mesh axes, major first; empty to leave the dimension whole.
        optional: Give way to a rule that has taken its mesh axes, where others are a problem.
        min_size: Arrays with fewer elements stay whole (largest dimension only).
        unnamed: Arrays without names are split, too (largest dimension only).
        for_activations: No parameter is expected to have the logical axis.
    """

    logical_axis: Hashable | None
    mesh_axes: tuple[str, ...]
    optional: bool = False
    min_size: int = 0
    unnamed: bool = False
    for_activations: bool = False

    def __str__(self) -> str:
        if self == IDENTITY:
            return "each logical axis -> the mesh axis of its name"
        name = "largest dimension" if self.logical_axis is None else repr(self.logical_axis)
        return f"{name} -> {_axes_text(self.mesh_axes)}"


IDENTITY = Rule(None, ())


def _axes_text(axes: Sequence[str]) -> str:
    return repr(axes[0] if len(axes) == 1 else tuple(axes) or None)


# Deciding


@dataclasses.dataclass(frozen=True)
class Decision:
    """The layout of one array, and why.

    Attributes:
        mesh_axes: The mesh axes of each dimension, major first; none for a whole dimension.
        reasons: What the rules did, a phrase each, in the order of the dimensions.
        problems: Why the array has no valid layout under the rules: of kind ``"indivisible"`` or
            ``"taken"``, without a path.
    """

    mesh_axes: tuple[tuple[str, ...], ...]
    reasons: tuple[str, ...]
    problems: tuple[Problem, ...] = ()

    @functools.cached_property
    def spec(self) -> PartitionSpec:
        """The canonical spec."""
        return canonical(self.mesh_axes)

    @property
    def reason(self) -> str:
        """All reasons in one line."""
        return "; ".join(self.reasons) or "no rule names its logical axes"


def _rules_for_names(
    rules: Sequence[Rule],
    names: Iterable[Hashable | None],
    mesh: Mapping[str, int],
    problems: Problems,
) -> Iterator[Rule]:
    """The rules for logical axes in their order, the identity written out for these names."""
    ruled = {rule.logical_axis for rule in rules}
    for rule in rules:
        if rule.logical_axis is not None:
            yield rule
        for name in (name for name in names if rule == IDENTITY and name not in ruled):
            # Flax writes a dimension that several mesh axes split as a tuple of their names.
            axes = name if isinstance(name, tuple) else (name,)
            missing = [axis for axis in axes if axis not in mesh]
            if not missing:
                yield Rule(name, axes)
            elif len(missing) < len(axes):
                what = f"{name!r} names {missing[0]!r}, and the mesh has {mesh_text(mesh)}"
                fix = f"Write rules=AxisRules({{{name!r}: None}}) | None."
                problems.add("", what, fix, "unknown")


def _fix_length(name: Hashable, length: int, axes: Sequence[str], mesh: Mapping[str, int]) -> str:
    """Mesh sizes near the present one that do divide a length."""
    most = 2 * part_count(axes, mesh)
    near = [str(size) for size in range(2, most + 1) if length % size == 0]
    if not near:
        return f"Map {name!r} to None."
    choice = " or ".join(", ".join(near[-3:]).rsplit(", ", 1))
    return f"Map {name!r} to None, or use a mesh with {'*'.join(axes)}={choice}."


def _misfits(
    name: Hashable, rules: Sequence[Rule], owners: Mapping[str, Hashable], mesh: Mapping[str, int]
) -> Iterator[str]:
    """Why none of the rules for a name fitted: a sentence each, lengths first."""
    for rule in rules:
        if owners.keys().isdisjoint(rule.mesh_axes):
            over = f"{_axes_text(rule.mesh_axes)} ({part_count(rule.mesh_axes, mesh)})"
            yield f"does not divide over mesh axis {over}, asked by rule {rule}"
    for axis in itertools.chain.from_iterable(rule.mesh_axes for rule in rules):
        if axis in owners:
            yield f"mesh axis {axis!r} is wanted by both {owners[axis]!r} and {name!r}"


@functools.lru_cache(maxsize=65536)
def decide(
    rules: tuple[Rule, ...],
    names: tuple[Hashable | None, ...] | None,
    sizes: tuple[int, ...],
    mesh_items: tuple[tuple[str, int], ...],
    on_indivisible: OnIndivisible = "error",
) -> Decision:
    """Decides the layout of one array.

    Args:
        rules: The rules in their order, each of whose mesh axes the mesh has: ``AxisRules.on``.
        names: The logical axis of each dimension, None for a positional one; None altogether for
            an array without names.
        sizes: The length of each dimension.
        mesh_items: Name and size of each mesh axis.
        on_indivisible: Whether a length that does not divide is a problem, or stays whole.

    >>> decide((Rule("mlp", ("model",)),), ("embed", "mlp"), (8, 64), (("model", 2),)).spec
    P(None, 'model')
    """
    mesh = dict(mesh_items)
    if names is None:
        rules = tuple(rule for rule in rules if rule.unnamed)
        names = tuple(f"dimension {i}" for i in range(len(sizes)))
    problems = Problems("")
    named = list(_rules_for_names(rules, names, mesh, problems))
    axes: list[tuple[str, ...] | None] = [None] * len(names)
    reasons = [""] * len(names)
    owners: dict[str, Hashable] = {}

    def assign(i: int, mesh_axes: tuple[str, ...], reason: str) -> None:
        axes[i], reasons[i] = mesh_axes, reason
        owners.update(dict.fromkeys(mesh_axes, names[i]))

    def is_free(rule: Rule) -> bool:
        return owners.keys().isdisjoint(rule.mesh_axes)

    # Rules for names come first, in their order: the first that is free and divides wins.
    for rule, i in itertools.product(named, range(len(names))):
        is_asked = names[i] == rule.logical_axis and axes[i] is None
        if is_asked and is_free(rule) and sizes[i] % part_count(rule.mesh_axes, mesh) == 0:
            assign(i, rule.mesh_axes, str(rule))

    # A name of whose rules none fitted is a problem, or its dimension stays whole.
    for i, name in enumerate(names):
        asked = [rule for rule in named if rule.logical_axis == name]
        if axes[i] is not None or not asked:
            continue
        free = [rule for rule in asked if is_free(rule)]
        why = "; ".join(_misfits(name, asked, owners, mesh))
        gives_way = not free and all(rule.optional for rule in asked)
        if gives_way or (free and on_indivisible == "replicate"):
            assign(i, (), f"{name!r} ({sizes[i]}) replicated: {why}")
        elif free:
            fix = _fix_length(name, sizes[i], free[0].mesh_axes, mesh)
            problems.add("", f"{name!r} ({sizes[i]}) {why}", fix, "indivisible")
        else:
            fix = f"Map {name!r} to None or another mesh axis."
            problems.add("", why, fix, "taken")

    # A dimension that no rule for names has decided is free for the rules for the largest.
    for rule in rules:
        if rule.logical_axis is not None or rule == IDENTITY or not is_free(rule):
            continue
        over, parts = _axes_text(rule.mesh_axes), part_count(rule.mesh_axes, mesh)
        free_dims = [i for i, name in enumerate(names) if name is not None and axes[i] is None]
        fitting = [i for i in free_dims if sizes[i] % parts == 0]
        if math.prod(sizes) < rule.min_size:
            reasons.append(f"under {rule.min_size} elements, not split over {over}")
        elif fitting:
            i = max(fitting, key=sizes.__getitem__)
            assign(i, rule.mesh_axes, f"{names[i]!r} -> {over} (largest free)")
        else:
            reasons.append(f"no free dimension divides over {over} ({parts})")
    return Decision(tuple(own or () for own in axes), tuple(filter(None, reasons)), tuple(problems))


# Reading


def check_option(called: str, name: str, value: Any, allowed: Sequence[str]) -> None:
    """Refuses an option that is none of the allowed texts.

    Raises:
        RuleTypeError: It is none.
    """
    if value not in allowed:
        fix = f"Write one of {', '.join(map(repr, allowed))}."
        raise RuleTypeError(f"{called}:", [Problem("", f"{name} is {value!r}", fix)])


def _read_rule(given: Any, problems: Problems) -> Rule | None:
    if isinstance(given, Rule):
        return given
    is_pair = isinstance(given, tuple | list) and len(given) == 2
    logical, mesh = given if is_pair else (None, None)
    axes = tuple(mesh) if isinstance(mesh, tuple | list) else () if mesh is None else (mesh,)
    are_names = all(isinstance(axis, str) for axis in axes) and len(set(axes)) == len(axes)
    if isinstance(logical, Hashable) and logical is not None and are_names:
        return Rule(logical, axes)
    what = f"{given!r} is not a hashable name with a mesh axis, several different ones or None"
    problems.add("", what, "Write for instance ('embedding', 'data').")
    return None


def _read_rules(given: Any) -> tuple[Rule, ...]:
    if given is None:
        return (IDENTITY,)
    if isinstance(given, AxisRules):
        return given.rules
    pairs = given.items() if isinstance(given, Mapping) else given
    if not isinstance(pairs, Iterable) or isinstance(given, str | bytes | Set):
        what = f"rules are a mapping, (logical, mesh) pairs or None, not a {type(given).__name__}"
        raise RuleTypeError("unreadable rules:", [Problem("", what, "Write {'embed': 'data'}.")])
    problems = Problems("unreadable rules:")
    read = [_read_rule(pair, problems) for pair in pairs]
    problems.raise_if_any(RuleTypeError)
    return tuple(filter(None, read))


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class AxisRules:
    """Which logical axis goes to which mesh axis: an immutable, hashable value.

    ``left | right`` combines rules; where both name a logical axis, the left ones count. The idea
    is that of T5X and ``flax.linen.logical_to_mesh_axes``; there, a rule that cannot be followed is
    dropped, here it is an error.

    Args:
        rules: A mapping ``{logical: mesh | (mesh, mesh) | None}``; ``(logical, mesh)`` pairs, of
            which, for each array, the first that is free and divides wins; other rules; or None,
            which maps each logical axis to the mesh axis of its name.

    Raises:
        RuleTypeError: The rules are in no such form.

    >>> mesh = {"data": 4, "model": 2}
    >>> rules = AxisRules({"embedding": "data", "neurons": "model"})
    >>> rules.spec(("embedding", "neurons"), (8, 16), mesh)
    P('data', 'model')
    >>> AxisRules([("heads", "data"), ("heads", "model")]).spec(("heads",), (2,), mesh)
    P('model',)
    >>> (AxisRules({"neurons": None}) | rules).spec(("neurons",), (16,), mesh)
    P()
    """

    rules: tuple[Rule, ...]

    def __init__(self, rules: Any = None) -> None:
        object.__setattr__(self, "rules", _read_rules(rules))

    def __repr__(self) -> str:
        return f"AxisRules({'; '.join(map(str, self.rules))})"

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        from treescope import rendering_parts as parts

        return parts.build_one_line_tree_node(parts.text(repr(self)), path)

    def __or__(self, other: Any) -> "AxisRules":
        theirs = _read_rules(other)
        right = [rule for rule in theirs if rule.logical_axis not in self.logical_axes]
        return AxisRules(list(dict.fromkeys([*self.rules, *right])))

    def __ror__(self, other: Any) -> "AxisRules":
        return AxisRules(other) | self

    @property
    def logical_axes(self) -> tuple[Hashable, ...]:
        """The logical axes that a rule names, in the order of the rules."""
        names = (rule.logical_axis for rule in self.rules)
        return tuple(dict.fromkeys(name for name in names if name is not None))

    def on(self, mesh_sizes: Mapping[str, int], fix: str = "") -> tuple[Rule, ...]:
        """The rules for ``decide``.

        Args:
            mesh_sizes: The size of each mesh axis.
            fix: What to write, if not one of these, where no name is nearly a rule's.

        Raises:
            MeshError: Rules name mesh axes that the mesh does not have.
        """
        problems = Problems("the rules do not fit the mesh:")
        for rule in self.rules:
            for axis in (axis for axis in rule.mesh_axes if axis not in mesh_sizes):
                what = f"rule {rule} names {axis!r}, and the mesh has {mesh_text(mesh_sizes)}"
                near = nearest(axis, mesh_sizes)
                others = fix or f"Write one of {sorted(mesh_sizes)}, or None."
                problems.add("", what, f"Write {near!r}." if near else others, "unknown")
        problems.raise_if_any(MeshError)
        return self.rules

    def explain(
        self,
        names: Names,
        sizes: Sequence[int],
        mesh: AnyMesh | Mapping[str, int],
        *,
        on_indivisible: OnIndivisible = "error",
    ) -> Decision:
        """Which layout an array gets by which rules, or what stands in the way of one.

        Args:
            names: The logical axis of each dimension, None for a positional one; None altogether
                for an array without names.
            sizes: The length of each dimension.
            mesh: The mesh, or its sizes by name.
            on_indivisible: ``"replicate"`` leaves a dimension whole whose length does not divide.

        Raises:
            MeshError: Rules name mesh axes that the mesh does not have.
            RuleTypeError: Names and sizes differ in number, or a name occurs twice.

        >>> AxisRules({"mlp": "model"}).explain(("embed", "mlp"), (8, 64), {"model": 2}).reason
        "'mlp' -> 'model'"
        """
        given = [name for name in names or () if name is not None]
        if names is not None and (len(names) != len(sizes) or len(set(given)) < len(given)):
            what = f"{tuple(names)!r} are not {len(sizes)} different names for {tuple(sizes)!r}"
            raise RuleTypeError("wrong names:", [Problem("", what, "Name each dimension once.")])
        check_option("rules", "on_indivisible", on_indivisible, get_args(OnIndivisible))
        key = None if names is None else tuple(names)
        shape = axis_sizes(mesh)
        return decide(self.on(shape), key, tuple(sizes), tuple(shape.items()), on_indivisible)

    def spec(
        self,
        names: Names,
        sizes: Sequence[int],
        mesh: AnyMesh | Mapping[str, int],
        *,
        on_indivisible: OnIndivisible = "error",
    ) -> PartitionSpec:
        """The canonical spec of an array; see ``explain`` for arguments and errors.

        Raises:
            PlanError: A length does not divide, or two dimensions want one mesh axis.
        """
        decision = self.explain(names, sizes, mesh, on_indivisible=on_indivisible)
        if decision.problems:
            raise PlanError("no valid layout:", decision.problems)
        return decision.spec

    def to_data(self) -> list[dict[str, Any]]:
        """The rules as data for JSON; logical axes must be texts, numbers or tuples of these."""
        return [dataclasses.asdict(rule) for rule in self.rules]

    @classmethod
    def from_data(cls, data: Iterable[Mapping[str, Any]]) -> "AxisRules":
        """The rules of ``to_data``, also after JSON has made lists of tuples.

        >>> AxisRules.from_data(tensor_parallel().to_data()) == tensor_parallel()
        True
        """
        return cls(
            [Rule(**{name: _to_tuple(value) for name, value in row.items()}) for row in data]
        )


def _to_tuple(value: Any) -> Any:
    return tuple(map(_to_tuple, value)) if isinstance(value, list) else value


# Presets


def data_parallel(mesh_axis: MeshAxes = "data", batch_axis: Hashable = "batch") -> AxisRules:
    """Every device holds the whole model and sees its part of the batch.

    Args:
        mesh_axis: The mesh axis, or several.
        batch_axis: The logical axis of the batch.

    Raises:
        RuleTypeError: These are no names of axes.

    >>> data_parallel()
    AxisRules('batch' -> 'data')
    """
    (rule,) = _read_rules([(batch_axis, mesh_axis)])
    return AxisRules([dataclasses.replace(rule, for_activations=True)])


def fully_sharded(
    mesh_axis: MeshAxes = "data", min_size: int = 2**18, unnamed: Literal["largest"] | None = None
) -> AxisRules:
    """Of each large array, the largest dimension that is free and divides is split.

    ZeRO stage 3 (arXiv:1910.02054), FSDP (arXiv:2304.11277). A dimension that a rule for names
    has decided is not free, wherever that rule stands; a positional one of a named array never is.

    Args:
        mesh_axis: The mesh axis, or several.
        min_size: Arrays with fewer elements stay whole; gathering them is not worth it.
        unnamed: ``"largest"`` to split arrays without names, too.

    Raises:
        RuleTypeError: These are no mesh axes, no number of elements, or another ``unnamed``.

    >>> rules = fully_sharded(min_size=1) | tensor_parallel()
    >>> rules.spec(("embedding", "neurons"), (8, 64), {"data": 4, "model": 2})
    P('data', 'model')
    """
    (rule,) = _read_rules([("largest dimension", mesh_axis)])
    is_size = isinstance(min_size, int) and min_size >= 0
    if not rule.mesh_axes or not is_size or unnamed not in (None, "largest"):
        what = f"{mesh_axis!r}, {min_size!r}, {unnamed!r} are not its arguments"
        fix = "Write for instance fully_sharded('data', min_size=2**18, unnamed='largest')."
        raise RuleTypeError("fully_sharded:", [Problem("", what, fix)])
    return AxisRules([Rule(None, rule.mesh_axes, False, min_size, unnamed is not None)])


def tensor_parallel(
    mesh_axis: MeshAxes = "model", axes: Iterable[Hashable] = TRANSFORMER_AXES
) -> AxisRules:
    """Of each array, the first of some logical axes that divides is split.

    Megatron-LM (arXiv:1909.08053) by name: neurons, heads and vocabulary are split, the embedding
    is not.

    Args:
        mesh_axis: The mesh axis, or several.
        axes: The logical axes, the most wanted first; those of Penzai's transformers by default.

    Raises:
        RuleTypeError: These are no names of axes.

    >>> tensor_parallel().spec(("head_groups", "query_heads"), (4, 2), {"model": 2})
    P('model',)
    """
    axes = (axes,) if isinstance(axes, str) else axes
    rules = _read_rules([(name, mesh_axis) for name in axes])
    return AxisRules([dataclasses.replace(rule, optional=True) for rule in rules])
