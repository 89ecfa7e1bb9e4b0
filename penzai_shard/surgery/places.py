"""Where an edit applies: by type, predicate, path pattern or root, narrowed by what is around."""

from __future__ import annotations

import dataclasses
import inspect
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from penzai_shard.errors import RuleTypeError
from penzai_shard.rule_kinds import nearest_name
from penzai_shard.surgery.path_patterns import first_position, next_position
from penzai_shard.surgery.references import display_name, named
from penzai_shard.surgery.refusals import raised
from penzai_shard.surgery.tree_nodes import Keys, is_layer, keys_text, names_of
from penzai_shard.tree_paths import split_path

PlaceLike: TypeAlias = Any
"""A type, a tuple of types, a predicate, a path pattern, a reference, ``ROOT`` or a ``Where``."""


class _Root:
    """The whole model, as a place for an edit."""

    def __repr__(self) -> str:
        return "ROOT"

    def __reduce__(self) -> str:
        return "ROOT"


ROOT = _Root()


@dataclasses.dataclass(frozen=True)
class Where:
    """Where an edit applies.

    Attributes:
        what: Types, a predicate, the text of a path pattern, or ``ROOT``.
        within: If given, only what is inside such a place.
        outside: If given, only what is not inside such a place.
    """

    what: tuple[type, ...] | str | Callable[..., Any] | _Root
    within: Where | None = None
    outside: Where | None = None

    @classmethod
    def of(cls, place: PlaceLike, within: PlaceLike = None, outside: PlaceLike = None) -> Where:
        """Reads a place in any form that edits take.

        Args:
            place: A layer type or a tuple of types; a predicate of the node, or of the node and
                its path; a path pattern; ``module:name`` of a type or predicate; ``ROOT``.
            within: A place that it must be in.
            outside: A place that it must not be in.

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

    def finder(self, layers_only: bool) -> Finder:
        """What finds this place while a tree is walked.

        Args:
            layers_only: Whether predicates and patterns are for nodes that can be called alone.

        Returns:
            A finder.
        """
        if isinstance(self.what, tuple):
            made = find_types(self.what)
        elif isinstance(self.what, str):
            made = find_pattern(self.what, layers_only)
        elif isinstance(self.what, _Root):
            made = find_root()
        else:
            made = find_predicate(self.what, layers_only)
        for around, is_wanted in ((self.within, True), (self.outside, False)):
            if around is not None:
                made = _narrowed(made, around, is_wanted)
        return made


def _read_what(place: Any) -> Any:
    place = named(place)
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
        types = tuple(map(named, place))
        if types and all(isinstance(part, type) for part in types):
            return types
    elif is_layer(place):
        name = type(place).__name__
        raise RuleTypeError(f"a place is a type of layer, and {name}(...) is a layer. Give {name}.")
    elif isinstance(place, _Root) or callable(place):
        return place
    raise RuleTypeError(
        f"{reprlib.repr(place)} is not a place for an edit. Give a layer type or a tuple of "
        "them, a predicate, a path pattern such as '**/attention/**', or ROOT."
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
    name = display_name(function)
    kinds = {parameter.kind for parameter in parameters}
    either = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [parameter.name for parameter in parameters if parameter.kind in either]
    unknown = sorted(given - {parameter.name for parameter in parameters})
    if not positional and inspect.Parameter.VAR_POSITIONAL not in kinds:
        raise RuleTypeError(f"{name} takes no layer. Give a function or class that does.")
    if positional and positional[0] in given:
        raise RuleTypeError(f"{name}'s {positional[0]!r} is the layer itself. Leave it out.")
    if unknown and inspect.Parameter.VAR_KEYWORD not in kinds:
        others = {parameter.name for parameter in parameters} - {*given, *positional[:1]}
        near = nearest_name(unknown[0], others)
        fix = f"Did you mean {near!r}?" if near else "Leave it out."
        raise RuleTypeError(f"{name} takes no argument {unknown[0]!r}. {fix}")
    required = [
        parameter
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind in (*either, parameter.KEYWORD_ONLY)
        and parameter.name not in given
    ]
    if len(required) > 2 or any(p.kind is p.KEYWORD_ONLY for p in required):
        missing = [p.name for p in required if p.name not in positional[:1]]
        raise RuleTypeError(
            f"{name} needs {', '.join(missing)} beside the layer. "
            f"Give them as keyword arguments of the edit: {missing[0]}=..."
        )
    if len(required) == 2:
        return "position"
    return "keyword" if "path" in positional[1:] and "path" not in given else None


def called_with_path(
    function: Callable[..., Any],
    options: Mapping[str, Any],
    what: str,
    read: Callable[[Any], Any] = lambda answer: answer,
) -> Callable[[Any, Keys], Any]:
    """A function of a node and its keys, which calls another in the way that that one wants.

    Args:
        function: A function of a node, or of a node and its path; or a class.
        options: Further keyword arguments.
        what: What to call the function in an error.
        read: What makes the result of the function's answer.

    Returns:
        The function. What the other one raises comes out as ``EditRefused``, with the path.
    """
    way = wants_path(function, frozenset(options))

    def call(node: Any, keys: Keys) -> Any:
        try:
            if way is None:
                return read(function(node, **options))
            if way == "position":
                return read(function(node, keys_text(keys), **options))
            return read(function(node, path=keys_text(keys), **options))
        except Exception as error:  # The function is the user's, and may raise anything.
            raise raised(f"{what} {display_name(function)}", keys, error) from error

    return call


def _parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    # The metaclass of Penzai's classes hides the arguments of their constructors.
    if isinstance(function, type) and "__init__" in dir(function):
        initializer: Any = function.__init__  # type: ignore[misc]
        return list(inspect.signature(initializer).parameters.values())[1:]
    return list(inspect.signature(function).parameters.values())


@dataclasses.dataclass(frozen=True, slots=True)
class Finder:
    """One place, as a walk down a tree asks for it.

    Attributes:
        by_type: Whether nodes of a type match, where the type alone tells; None where it does
            not. It is also given whether the type is a layer's.
        matches: Whether a node with these keys, in this state, is at the place; asked where the
            type does not tell.
        step: The state of a child, of its parent's state, the parent, the child's keys and the
            child. None as a state says that neither the node nor anything below it can match;
            None instead of a function, that there are no states.
        start: The state of the root.
    """

    by_type: Callable[[type, bool], bool | None]
    matches: Callable[[Any, Keys, Any], bool]
    step: Callable[[Any, Any, Keys, Any], Any] | None = None
    start: Callable[[Any], Any] = lambda node: True


def find_types(types: tuple[type, ...]) -> Finder:
    """Finds instances of types."""
    return Finder(
        lambda node_type, is_layer: issubclass(node_type, types),
        lambda node, keys, state: isinstance(node, types),
    )


def find_root() -> Finder:
    """Finds the root alone."""
    return Finder(
        lambda node_type, is_layer: None,
        lambda node, keys, state: not keys,
        lambda state, parent, keys, child: None,
    )


def find_object(wanted: Any) -> Finder:
    """Finds one object, wherever it is."""
    return Finder(
        lambda node_type, is_layer: None if node_type is type(wanted) else False,
        lambda node, keys, state: node is wanted,
    )


def find_predicate(predicate: Callable[..., Any], layers_only: bool) -> Finder:
    """Finds the nodes for which a function is true."""
    call = called_with_path(predicate, {}, "the predicate", bool)
    return Finder(_type_of_layer(layers_only), lambda node, keys, state: call(node, keys))


def find_pattern(text: str, layers_only: bool) -> Finder:
    """Finds the nodes whose readable path matches a pattern."""
    parts = split_path(text)
    end, root = 1 << len(parts), first_position(parts)
    return Finder(
        _type_of_layer(layers_only),
        lambda node, keys, state: bool(state & end),
        lambda state, parent, keys, child: next_position(
            parts, state, str(keys[-1]), names_of(child)
        ),
        lambda node: root,
    )


def _type_of_layer(layers_only: bool) -> Callable[[type, bool], bool | None]:
    return lambda node_type, is_layer: False if layers_only and not is_layer else None


_INSIDE = object()
"""The state of a place around, once a walk is in it."""


def _narrowed(base: Finder, around: Where, is_wanted: bool) -> Finder:
    """Finds what another finder finds, but only inside of another place, or only outside of it.

    A type or a predicate stands for what is strictly inside such a node. A path pattern stands for
    the paths that match it, and for what is below them.
    """
    finder = around.finder(layers_only=False)
    counts_itself = isinstance(around.what, str)

    def entered(state: Any, node: Any, keys: Keys) -> Any:
        is_entered = state is _INSIDE or (state is not None and finder.matches(node, keys, state))
        return _INSIDE if is_entered else state

    def start(node: Any) -> Any:
        state = finder.start(node)
        return base.start(node), entered(state, node, ()) if counts_itself else state

    def step(states: Any, parent: Any, keys: Keys, child: Any) -> Any:
        own, state = states
        if base.step is not None:
            own = base.step(own, parent, keys, child)
        if own is None:
            return None
        if not counts_itself:
            state = entered(state, parent, keys[:-1])
        if finder.step is not None and state is not None and state is not _INSIDE:
            state = finder.step(state, parent, keys, child)
        if counts_itself:
            state = entered(state, child, keys)
        return None if state is _INSIDE and not is_wanted else (own, state)

    def matches(node: Any, keys: Keys, states: Any) -> bool:
        own, state = states
        return (state is _INSIDE) is is_wanted and base.matches(node, keys, own)

    return Finder(
        lambda node_type, is_layer: False if base.by_type(node_type, is_layer) is False else None,
        matches,
        step,
        start,
    )
