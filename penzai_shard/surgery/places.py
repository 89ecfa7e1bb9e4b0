"""Where an edit applies: by type, predicate, path pattern or root, narrowed by what is around."""

import abc
import dataclasses
import inspect
import reprlib
from collections.abc import Callable
from typing import Any, TypeAlias

from penzai_shard.errors import RuleTypeError
from penzai_shard.surgery.path_patterns import PathPattern
from penzai_shard.surgery.references import is_reference, resolve
from penzai_shard.surgery.tree_nodes import (
    Keys,
    keys_text,
)

PlaceLike: TypeAlias = Any
"""A type, a tuple of types, a predicate, a path pattern, a reference, ``ROOT`` or a ``Where``."""


class _Root:
    """The type of ``ROOT``."""

    def __repr__(self) -> str:
        return "ROOT"

    def __reduce__(self) -> str:
        return "ROOT"


ROOT = _Root()
"""The whole model, as a place for an edit."""


@dataclasses.dataclass(frozen=True)
class Where:
    """Where an edit applies.

    Attributes:
        what: Types, a predicate, the text of a path pattern, or ``ROOT``.
        within: If given, only what lies inside such a place.
        outside: If given, only what does not lie inside such a place.
    """

    what: tuple[type, ...] | str | Callable[..., Any] | _Root
    within: "Where | None" = None
    outside: "Where | None" = None

    @classmethod
    def of(cls, place: PlaceLike, within: PlaceLike = None, outside: PlaceLike = None) -> "Where":
        """Reads a place in any form that edits take.

        Args:
            place: A layer type or a tuple of types; a predicate of the node, or of the node and
                its path; a path pattern; ``module:name`` of a type or predicate; ``ROOT``.
            within: A place that it must lie in.
            outside: A place that it must not lie in.

        Returns:
            The place.

        Raises:
            RuleTypeError: It is in no such form.

        >>> Where.of("pz.nn:Linear", within="**/attention/**").what
        (<class 'penzai.nn.linear_and_affine.Linear'>,)
        """
        narrowed_within = None if within is None else cls.of(within)
        narrowed_outside = None if outside is None else cls.of(outside)
        if isinstance(place, Where):
            if narrowed_within is None and narrowed_outside is None:
                return place
            if place.within is not None or place.outside is not None:
                raise RuleTypeError(
                    f"{place} is narrowed already. Give within= and outside= in one place."
                )
            place = place.what
        return cls(_read_what(place), narrowed_within, narrowed_outside)

    def tracker(self, layers_only: bool) -> "Tracker":
        """What follows this place while a tree is walked.

        Args:
            layers_only: Whether predicates and patterns are for nodes that can be called alone.

        Returns:
            A fresh tracker.
        """
        made: Tracker
        if isinstance(self.what, tuple):
            made = TypesTracker(self.what)
        elif isinstance(self.what, str):
            made = PatternTracker(self.what, layers_only)
        elif isinstance(self.what, _Root):
            made = RootTracker()
        else:
            made = PredicateTracker(self.what, layers_only)
        if self.within is not None or self.outside is not None:
            made = NarrowedTracker(made, self.within, self.outside)
        return made


def _read_what(place: Any) -> Any:
    if isinstance(place, str) and is_reference(place):
        place = resolve(place)
    if isinstance(place, str):
        if not place.strip("/"):
            raise RuleTypeError(
                f"{place!r} is an empty path pattern. Write ROOT for the whole model, or a "
                "pattern such as '**/attention/**'."
            )
        return place
    if isinstance(place, type):
        return (place,)
    if isinstance(place, tuple | list):
        types = tuple(
            resolve(part) if isinstance(part, str) and is_reference(part) else part
            for part in place
        )
        if types and all(isinstance(part, type) for part in types):
            return types
    elif isinstance(place, _Root) or callable(place):
        return place
    raise RuleTypeError(
        f"{reprlib.repr(place)} is no place for an edit. Give a layer type or a tuple of them, a "
        "predicate, a path pattern such as '**/attention/**', or ROOT."
    )


def wants_path(function: Callable[..., Any], given: frozenset[str] = frozenset()) -> str | None:
    """How a function takes a path beside a node: ``"position"``, ``"keyword"``, or not at all.

    Args:
        function: A function of a node, or of a node and its path; or a class.
        given: Names of arguments that it gets anyway.

    Returns:
        The way, None if it does not take a path.

    Raises:
        RuleTypeError: It needs more arguments than that, or does not know one that is given.

    >>> wants_path(lambda node: node), wants_path(lambda node, path: node)
    (None, 'position')
    """
    try:
        parameters = _parameters_of(function)
    except (TypeError, ValueError):
        return None
    positional = [
        parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    unknown = given - {parameter.name for parameter in parameters}
    name = getattr(function, "__qualname__", repr(function))
    if unknown and not takes_any:
        raise RuleTypeError(f"{name} takes no argument {sorted(unknown)[0]!r}. Leave it out.")
    required = [
        parameter
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and parameter.name not in given
    ]
    if len(required) > 2 or any(p.kind is p.KEYWORD_ONLY for p in required):
        missing = [parameter.name for parameter in required[1:]]
        raise RuleTypeError(
            f"{name} needs {', '.join(missing)} beside the layer. "
            f"Give them as keyword arguments of the edit: {missing[0]}=..."
        )
    if len(required) == 2:
        return "position"
    is_named = any(p.name == "path" and p.name not in given for p in positional[1:])
    return "keyword" if is_named else None


def _parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    # The metaclass of Penzai's classes hides the arguments of their constructors.
    if isinstance(function, type) and "__init__" in dir(function):
        initializer: Any = function.__init__  # type: ignore[misc]
        return list(inspect.signature(initializer).parameters.values())[1:]
    return list(inspect.signature(function).parameters.values())


class Tracker(abc.ABC):
    """Follows one place down a tree.

    A tracker with ``has_state`` is given a state for each node, made from its parent's; None as
    a state says that neither the node nor anything below it can match.
    """

    has_state = False

    @abc.abstractmethod
    def decide(self, node_type: type, is_layer: bool) -> bool | None:
        """Whether nodes of a type match, where the type alone tells; None where it does not."""

    def root(self, node: Any) -> Any:
        """The state of the root."""
        return True

    def child(self, state: Any, parent: Any, keys: Keys, child: Any) -> Any:
        """The state of a child.

        Args:
            state: The state of its parent.
            parent: The parent.
            keys: The child's path.
            child: The child.
        """
        return state

    def matches(self, node: Any, keys: Keys, state: Any) -> bool:
        """Whether a node is at this place; asked only where the type does not tell."""
        return False


class TypesTracker(Tracker):
    """Finds instances of types."""

    def __init__(self, types: tuple[type, ...]) -> None:
        self._types = types

    def decide(self, node_type: type, is_layer: bool) -> bool | None:
        """See ``Tracker``."""
        return issubclass(node_type, self._types)

    def matches(self, node: Any, keys: Keys, state: Any) -> bool:
        """See ``Tracker``."""
        return isinstance(node, self._types)


class RootTracker(Tracker):
    """Finds the root alone."""

    has_state = True

    def decide(self, node_type: type, is_layer: bool) -> bool | None:
        """See ``Tracker``."""
        return None

    def child(self, state: Any, parent: Any, keys: Keys, child: Any) -> Any:
        """See ``Tracker``."""
        return None

    def matches(self, node: Any, keys: Keys, state: Any) -> bool:
        """See ``Tracker``."""
        return not keys


class PredicateTracker(Tracker):
    """Finds the nodes for which a function is true."""

    def __init__(self, predicate: Callable[..., Any], layers_only: bool) -> None:
        self._predicate = predicate
        self._layers_only = layers_only
        self._wants_path = wants_path(predicate)

    def decide(self, node_type: type, is_layer: bool) -> bool | None:
        """See ``Tracker``."""
        return False if self._layers_only and not is_layer else None

    def matches(self, node: Any, keys: Keys, state: Any) -> bool:
        """See ``Tracker``."""
        if self._wants_path == "position":
            return bool(self._predicate(node, keys_text(keys)))
        if self._wants_path == "keyword":
            return bool(self._predicate(node, path=keys_text(keys)))
        return bool(self._predicate(node))


class PatternTracker(Tracker):
    """Finds the nodes whose readable path matches a pattern."""

    has_state = True

    def __init__(self, pattern: str, layers_only: bool) -> None:
        self._pattern = PathPattern(pattern)
        self._layers_only = layers_only

    def decide(self, node_type: type, is_layer: bool) -> bool | None:
        """See ``Tracker``."""
        return False if self._layers_only and not is_layer else None

    def root(self, node: Any) -> Any:
        """See ``Tracker``."""
        return self._pattern.start()

    def child(self, state: Any, parent: Any, keys: Keys, child: Any) -> Any:
        """See ``Tracker``."""
        return self._pattern.step(state, keys[-1], child)

    def matches(self, node: Any, keys: Keys, state: Any) -> bool:
        """See ``Tracker``."""
        return self._pattern.ends_at(state)


@dataclasses.dataclass(frozen=True, slots=True)
class _Around:
    """Whether a node lies inside a place, and how the walk to that place stands."""

    is_inside: bool
    state: Any


class _Surroundings:
    """Follows a place that narrows another.

    A type or a predicate stands for what lies strictly inside such a node. A path pattern stands
    for the paths that match it, and for what lies below them.
    """

    def __init__(self, where: Where) -> None:
        self._tracker = where.tracker(layers_only=False)
        self._counts_itself = isinstance(where.what, str)

    def root(self, node: Any) -> _Around:
        state = self._tracker.root(node)
        return _Around(self._counts_itself and self._tracker.matches(node, (), state), state)

    def child(self, around: _Around, parent: Any, keys: Keys, child: Any) -> _Around:
        if around.is_inside:
            return around
        is_inside = not self._counts_itself and (
            around.state is not None and self._tracker.matches(parent, keys[:-1], around.state)
        )
        if is_inside:
            return _Around(True, None)
        state = around.state
        if state is not None:
            state = self._tracker.child(state, parent, keys, child)
        is_inside = (
            self._counts_itself and state is not None and self._tracker.matches(child, keys, state)
        )
        return _Around(is_inside, state)


class NarrowedTracker(Tracker):
    """Finds what another tracker finds, inside or outside of other places."""

    has_state = True

    def __init__(self, base: Tracker, within: Where | None, outside: Where | None) -> None:
        self._base = base
        self._within = None if within is None else _Surroundings(within)
        self._outside = None if outside is None else _Surroundings(outside)

    def decide(self, node_type: type, is_layer: bool) -> bool | None:
        """See ``Tracker``."""
        return False if self._base.decide(node_type, is_layer) is False else None

    def root(self, node: Any) -> Any:
        """See ``Tracker``."""
        return (
            self._base.root(node),
            None if self._within is None else self._within.root(node),
            None if self._outside is None else self._outside.root(node),
        )

    def child(self, state: Any, parent: Any, keys: Keys, child: Any) -> Any:
        """See ``Tracker``."""
        base, within, outside = state
        base = self._base.child(base, parent, keys, child)
        if base is None:
            return None
        if self._outside is not None:
            outside = self._outside.child(outside, parent, keys, child)
            if outside.is_inside:
                return None
        if self._within is not None:
            within = self._within.child(within, parent, keys, child)
        return base, within, outside

    def matches(self, node: Any, keys: Keys, state: Any) -> bool:
        """See ``Tracker``."""
        base, within, outside = state
        return (
            (within is None or within.is_inside)
            and (outside is None or not outside.is_inside)
            and self._base.matches(node, keys, base)
        )
