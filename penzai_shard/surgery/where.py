"""Says where an edit applies: by type, predicate, path pattern or root, narrowed by what is around.

Patterns are read while a tree is walked, so that subtrees that cannot match are never entered.
"""

import dataclasses
import fnmatch
import functools
import inspect
import itertools
import re
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from jax.sharding import AbstractMesh, Mesh

from penzai_shard.errors import Problem, RuleTypeError
from penzai_shard.layers.wrapper import WrapperLayer
from penzai_shard.meshes import mesh_text
from penzai_shard.paths import pattern_parts
from penzai_shard.surgery.inserted import Inserted, Original, find_original, follow
from penzai_shard.surgery.references import Ref, resolve
from penzai_shard.surgery.rewriting import Finder, Keys, Refused, is_layer, keys_text

_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


@dataclasses.dataclass(frozen=True)
class _Root:
    """The whole model, as the place of an edit."""

    def __repr__(self) -> str:
        return "ROOT"


ROOT = _Root()

# A type, a tuple of types, a predicate, a pattern, a ``Ref`` of one of these, ROOT or a ``Where``.
Place: TypeAlias = Any


@dataclasses.dataclass(frozen=True)
class Where:
    """A place for an edit.

    A pattern has a part for each key from the root, as ``sublayers/0/delta``, ``**/attention/*`` or
    ``.sublayers[0].delta``: a part fits a key, or the name of a node's type in snake case, and
    ``**`` any number of keys. A layer and the wrapper layers around it are one place: it has the
    path and the type's name of that layer, and the outermost wrapper is what is found. So a path of
    the bare model fits the wrapped one. What is inside of a wrapper is found by its ``body`` too,
    as in a path that was copied from a view of the wrapped model. Positions in lists are counted
    with inserted layers in them.

    Attributes:
        what: A tuple of types, a predicate, a pattern, ``ROOT``, or a ``Ref`` of one of these.
        within: If given, only what is inside of such a place. A type or predicate counts for what
            is strictly inside, a pattern also for the nodes that it fits.
        outside: If given, only what is not inside of such a place.
    """

    what: Any
    within: "Where | None" = None
    outside: "Where | None" = None

    @classmethod
    def of(cls, place: Place, within: Place = None, outside: Place = None) -> "Where":
        """Reads a place in any form that edits take.

        Raises:
            RuleTypeError: It is in no such form, or is a ``Where`` that is narrowed once more.

        >>> from penzai import pz
        >>> Where.of(pz.nn.Linear, within="**/attention/**").what
        (<class 'penzai.nn.linear_and_affine.Linear'>,)
        """
        around = [None if given is None else cls.of(given) for given in (within, outside)]
        if isinstance(place, Where) and around == [None, None]:
            return place
        return cls(_read_what(place), *around)

    def texts(self) -> list[str]:
        """The place as text, and what it must be in and must not be in, as arguments of an edit."""
        whats = self.what if isinstance(self.what, tuple) else (self.what,)
        text = ", ".join(map(value_text, whats))
        around = {"within": self.within, "outside": self.outside}
        limits = [f"{name}={', '.join(own.texts())}" for name, own in around.items() if own]
        return [text if len(whats) == 1 else f"({text})", *limits]

    def find(self, layers_only: bool) -> Finder:
        """What finds the place in a tree.

        Args:
            layers_only: Whether predicates and patterns are for layers.
        """
        what = _read_what(resolve(self.what))

        if isinstance(what, tuple):
            finder = Finder(by_type=lambda kind: issubclass(kind, what))
        elif isinstance(what, str):
            finder = _find_pattern(what, layers_only)
        elif isinstance(what, _Root):
            finder = Finder(lambda node, keys, state: not keys, lambda *_: None)
        else:
            finder = Finder(_read_predicate(what), layers_only=layers_only)
        for around, is_wanted in ((self.within, True), (self.outside, False)):
            finder = _narrow(finder, around, is_wanted) if around else finder
        return finder


def _read_what(place: Any) -> Any:
    types = (place,) if isinstance(place, type) else place
    is_several = isinstance(types, tuple | list) and len(types) > 0
    if is_several and all(isinstance(kind, type | Ref) for kind in types):
        return tuple(types)
    is_pattern = isinstance(place, str) and pattern_parts(place)
    if is_pattern or isinstance(place, Ref | _Root) or (callable(place) and not is_layer(place)):
        return place
    fix = "Write a type of layers, a pattern of their paths, or ROOT for the whole model."
    raise RuleTypeError(
        "a place for an edit:", [Problem("", f"{value_text(place)} is no place", fix)]
    )


def _read_predicate(predicate: Callable[..., Any]) -> Callable[[Any, Keys, Any], bool]:
    call, _ = make_caller(predicate, {})

    def matches(node: Any, keys: Keys, state: Any) -> bool:
        found = call(node, keys)
        if not isinstance(found, bool):
            what = f"{value_text(predicate)} gave {value_text(found)}, not True or False"
            raise Refused(keys, what, "Return bool(...) of it, or a comparison.")
        return found

    return matches


# Patterns


def type_names(node: Any) -> tuple[str, ...]:
    """The name of a node's type, and of a wrapper's those of what it was put around.

    >>> type_names(Original([]))
    ('Original', 'list')
    """
    name = type(node).__name__
    if not isinstance(node, WrapperLayer):
        return (name,)
    original = find_original(node.body) if type(node) is Inserted else None
    return (name, *type_names(node.body), *(type_names(original.body) if original else ()))


def names_of(node: Any) -> tuple[str, ...]:
    """The names of a node in patterns, besides its key.

    >>> names_of(Original([]))
    ('original', 'list')
    """
    return tuple(map(snake_case, type_names(node)))


def wrappers_of(tree: Any, keys: Keys) -> list[Any]:
    """The wrapper layers at the place of the node with these keys: around it, and in it."""
    nodes = follow(tree, keys)
    while isinstance(nodes[-1], WrapperLayer):
        nodes.append(nodes[-1].body)
    return [*itertools.takewhile(lambda node: isinstance(node, WrapperLayer), nodes[-2::-1])]


@functools.cache
def snake_case(name: str) -> str:
    """The name of a type as a part of a path: ``TransformerBlock`` as ``transformer_block``."""
    return _WORD_START.sub("_", name).lower()


def _find_pattern(pattern: str, layers_only: bool) -> Finder:
    """Finds nodes by a pattern.

    A state has two sets of numbers of parts, as bits: those that the path to a node can be read
    by, and, between an ``Inserted`` and its ``Original``, those of the ``Inserted``.
    """
    # Copied paths have quotes around the keys of dictionaries.
    parts = tuple(part.strip("'\"") for part in pattern_parts(pattern))
    end = 1 << len(parts)

    def step(state: tuple[int, int], parent: Any, keys: Keys, child: Any) -> Any:
        read, around = state
        found = _advance(parts, read, str(keys[-1]), names_of(child))
        # What is in a wrapper has the wrapper's path, and the wrapper has matched already.
        if keys[-1] == "body" and isinstance(parent, WrapperLayer):
            found |= read & ~end
            around = read & ~end if type(parent) is Inserted else around
        if type(child) is Original:
            found, around = found | around, 0
        return (found, around) if found or around else None

    def matches(node: Any, keys: Keys, state: tuple[int, int]) -> bool:
        return bool(state[0] & end)

    return Finder(matches, step, lambda node: (_close(parts, 1), 0), layers_only=layers_only)


@functools.lru_cache(maxsize=65536)
def _advance(parts: tuple[str, ...], read: int, key: str, names: tuple[str, ...]) -> int:
    """The numbers of parts by which the path to a child can be read."""

    def advance(read: int, text: str) -> int:
        found = 0
        for number, part in enumerate(parts):
            if read >> number & 1 and (part == "**" or fnmatch.fnmatchcase(text, part)):
                found |= 1 << (number + (part != "**"))
        return _close(parts, found)

    # A key with dots is several parts of a path.
    found = functools.reduce(advance, pattern_parts(key), read)
    return functools.reduce(int.__or__, (advance(read, name) for name in names), found)


def _close(parts: tuple[str, ...], read: int) -> int:
    """With those parts of ``**`` passed that need not read anything."""
    for number, part in enumerate(parts):
        if part == "**" and read >> number & 1:
            read |= 1 << (number + 1)
    return read


# Narrowing

# The state of a place, once the walk is below a node that is there.
_INSIDE = object()


def _narrow(finder: Finder, around: Where, is_wanted: bool) -> Finder:
    """Finds what another finder finds inside of a place, or outside of it."""
    is_pattern = isinstance(around.what, str)
    place = around.find(layers_only=not is_pattern)

    def start(node: Any) -> Any:
        return finder.start(node), place.start(node)

    def step(states: Any, parent: Any, keys: Keys, child: Any) -> Any:
        own, state = states
        if state is not _INSIDE and place.has(parent, keys[:-1], state):
            state = _INSIDE
        if state is _INSIDE and not is_wanted:
            return None
        own = own if finder.step is None else finder.step(own, parent, keys, child)
        if place.step is not None and state is not None and state is not _INSIDE:
            state = place.step(state, parent, keys, child)
        return None if own is None else (own, state)

    def matches(node: Any, keys: Keys, states: Any) -> bool:
        own, state = states
        is_inside = state is _INSIDE or (is_pattern and place.has(node, keys, state))
        return is_inside is is_wanted and finder.has(node, keys, own)

    def ask(kind: type) -> bool | None:
        return False if finder.by_type(kind) is False else None

    return Finder(matches, step, start, ask, finder.layers_only)


# Functions of the user


def make_caller(
    function: Callable[..., Any], options: Mapping[str, Any]
) -> tuple[Callable[[Any, Keys], Any], bool]:
    """A function of a node and its keys that calls another, and whether that one takes the path.

    It gets the path if it has an argument of that name. What it raises becomes ``Refused``.

    Raises:
        RuleTypeError: It cannot be called with a node and the options.
    """
    # Penzai's metaclass hides the arguments of constructors.
    is_class = isinstance(function, type)
    called: Any = function.__init__ if is_class else function
    signature = inspect.signature(called)
    takes_path = "path" in signature.parameters and "path" not in options
    try:
        signature.bind(*[None] * (1 + is_class), **options, **{"path": ""} if takes_path else {})
    except TypeError as error:
        known = ", ".join([*signature.parameters][is_class:])
        what = f"{value_text(function)} does not take a layer with these options: {error}"
        fix = f"It takes {known}; an edit takes expect=, within=, outside= and nested= besides."
        raise RuleTypeError("an edit:", [Problem("", what, fix)]) from None

    def call(node: Any, keys: Keys) -> Any:
        named = {**options, "path": keys_text(keys)} if takes_path else options
        try:
            return function(node, **named)
        except Exception as error:
            text = f"{type(error).__name__}: {error}".rstrip(".")
            fix = "Correct it, or leave this place out with outside=."
            raise Refused(keys, f"{value_text(function)} raised {text}", fix) from error

    return call, takes_path


def value_text(value: Any) -> str:
    """A value in few words."""
    if hasattr(value, "__qualname__"):
        return str(value.__qualname__).rpartition("<locals>.")[2]
    if is_layer(value):
        return f"{type(value).__name__}(...)"
    return mesh_text(value) if isinstance(value, Mesh | AbstractMesh) else reprlib.repr(value)
