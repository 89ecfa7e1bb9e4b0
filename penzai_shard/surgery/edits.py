"""The four edits: wrap, insert before, insert after, replace.

An edit is a value. It says where, what, and how often, and knows nothing of any model.
"""

import dataclasses
import difflib
import functools
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax

from penzai_shard.errors import RuleTypeError
from penzai_shard.surgery.expressions import expression
from penzai_shard.surgery.inserted_layers import library_role
from penzai_shard.surgery.places import PlaceLike, Where, _Root, wants_path
from penzai_shard.surgery.references import display_name, is_reference, resolve
from penzai_shard.surgery.rewriting import SEQUENCE_FIELD, Match, Rewriter
from penzai_shard.surgery.tree_nodes import (
    LEAF,
    STRUCT,
    Keys,
    children_of,
    keys_text,
    kind_of,
    names_of,
    with_fields,
    with_mark,
)

EditKind = Literal["wrap", "insert_before", "insert_after", "replace"]

_MOST_NAMED = 5


# A type or function by reference, as expressions write it: 'pz.nn:Linear'.
_REFERENCE_LITERAL = re.compile(r"'[\w.]+:(?:\w+\.)*(\w+)'")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What an edit did to a model.

    Attributes:
        model: The edited model.
        count: How many places it changed.
        matches: The places, in order, if they were asked for.
        problem: Why the edit does not fit the model; empty when it does.
    """

    model: Any
    count: int
    matches: tuple[Match, ...]
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class Edit:
    """One edit, as ``wrap``, ``insert_before``, ``insert_after`` and ``replace`` make it.

    Attributes:
        kind: Which of the four.
        where: Where.
        what: The wrapper, the layer, or the function.
        options: Further keyword arguments of the wrapper or function, by name.
        expect: How many places there must be; None for one or more.
        nested: Whether places inside of places count too.
    """

    kind: EditKind
    where: Where
    what: Any
    options: tuple[tuple[str, Any], ...] = ()
    expect: int | None = None
    nested: bool = False

    def __repr__(self) -> str:
        arguments = [_where_expression(self.where), expression(self.what)]
        if self.where.within is not None:
            arguments.append(f"within={_where_expression(self.where.within)}")
        if self.where.outside is not None:
            arguments.append(f"outside={_where_expression(self.where.outside)}")
        arguments += [f"{name}={expression(value)}" for name, value in self.options]
        if self.nested:
            arguments.append("nested=True")
        if self.expect is not None:
            arguments.append(f"expect={self.expect}")
        return f"{self.kind}({', '.join(arguments)})"

    @property
    def title(self) -> str:
        """The edit in few words: its kind, where, and what, without their arguments.

        >>> wrap("pz.nn:Linear", "penzai_shard.layers:Checkpointed", policy="dots").title
        "wrap(Linear, Checkpointed, policy='dots')"
        """
        what = self.what if callable(self.what) and hasattr(self.what, "__qualname__") else None
        shown = [
            _where_expression(self.where),
            f"{type(self.what).__name__}(...)" if what is None else expression(what),
            *(f"{name}={expression(value)}" for name, value in self.options),
        ]
        return _REFERENCE_LITERAL.sub(r"\1", f"{self.kind}({', '.join(shown)})")

    def run(self, model: Any, record: bool = False) -> Outcome:
        """Carries the edit out.

        Args:
            model: Any model; it stays as it is.
            record: Whether to tell the places, and not only their number.

        Returns:
            The edited model, the places, and the problem if the number of places is wrong.
        """
        tracker = self.where.tracker(layers_only=self.kind != "replace")
        change, same_everywhere = self._change()
        rewriter = Rewriter(tracker, change, same_everywhere, self.nested, record)
        edited = rewriter.run(model)
        if self._fits(rewriter.count):
            return Outcome(edited, rewriter.count, tuple(rewriter.matches))
        if rewriter.count and not record:
            return self.run(model, record=True)
        matches = tuple(rewriter.matches)
        return Outcome(model, len(matches), matches, self._problem(model, matches))

    def _fits(self, count: int) -> bool:
        return count > 0 if self.expect is None else count == self.expect

    def _change(self) -> tuple[Callable[[Any, Keys], tuple[Any, ...]], bool]:
        if self.kind in ("insert_before", "insert_after"):
            make, same_everywhere = self._inserted()
            if self.kind == "insert_before":
                return lambda node, path: (make(node, path), node), same_everywhere
            return lambda node, path: (node, make(node, path)), same_everywhere
        call, same_everywhere = _caller(self.what, dict(self.options))
        if self.kind == "replace":
            return lambda node, path: (call(node, path),), same_everywhere
        return lambda node, path: (_marked_wrapper(call(node, path), node),), same_everywhere

    def _inserted(self) -> tuple[Callable[[Any, Keys], Any], bool]:
        if _is_layer(self.what):
            layer = _marked(self.what)
            return lambda node, path: layer, True
        call, same_everywhere = _caller(self.what, dict(self.options))
        return lambda node, path: _marked(call(node, path)), same_everywhere

    def _problem(self, model: Any, matches: tuple[Match, ...]) -> str:
        count = len(matches)
        if count == 0:
            asked = "" if self.expect is None else f", and {self.expect} are expected"
            fix = (
                "Give expect=0 if that is meant, or leave the edit out."
                if self.expect is None
                else "Correct the place, or give expect=0."
            )
            return f"{self!r}: nothing matches{asked}. {nearest_places(model, self)} {fix}"
        paths = [match.path_text or "the root" for match in matches[:_MOST_NAMED]]
        more = f" and {count - len(paths)} more" if count > len(paths) else ""
        places = "1 place matches" if count == 1 else f"{count} places match"
        return (
            f"{self!r}: {places}, and {self.expect} are expected: {', '.join(paths)}{more}. "
            f"Give expect={count}, or narrow the edit with within= or outside=."
        )


def wrap(
    where: PlaceLike,
    wrapper: Callable[..., Any] | str,
    *,
    expect: int | None = None,
    within: PlaceLike = None,
    outside: PlaceLike = None,
    nested: bool = False,
    **options: Any,
) -> Edit:
    """Puts a layer around the layers at a place.

    Args:
        where: A layer type or a tuple of types; a predicate of the layer, or of the layer and
            its path; a path pattern; ``"module:name"`` of a type or predicate; ``ROOT``. Where
            one match lies in another, the outer one counts. Patterns match the path of a node
            from the model's root, such as ``body/sublayers/0``; each part of a pattern matches a
            key or the snake-case name of a type (or a ``NamedGroup``'s name), so that
            ``**/attention/**`` finds ``pz.nn.Attention``.
        wrapper: A class, or a function of the layer. If it needs a second argument, or has one
            called ``path``, it gets the layer's path too.
        expect: How many places there must be. By default there must be one at least.
        within: Only what lies inside such a place: strictly inside a node of a type or for which
            a predicate is true, and at or below a path that matches a pattern.
        outside: Only what does not lie inside such a place.
        nested: Also change matches inside of matches, the inner ones first.
        **options: Further arguments of the wrapper. ``"module:name"`` of something that can be
            imported stands for it.

    Returns:
        The edit, for ``Recipe``.

    Raises:
        RuleTypeError: The place or the wrapper cannot be read as one.

    >>> from penzai_shard.layers import Checkpointed
    >>> wrap("pz.nn:Linear", Checkpointed, policy="dots", expect=2)
    wrap('pz.nn:Linear', Checkpointed, policy='dots', expect=2)
    """
    wrapper, options = _function(wrapper, options, "wrap")
    return Edit(
        "wrap",
        Where.of(where, within, outside),
        wrapper,
        tuple(options.items()),
        _read_expect(expect),
        nested,
    )


def insert_before(
    where: PlaceLike,
    layer: Any,
    *,
    expect: int | None = None,
    within: PlaceLike = None,
    outside: PlaceLike = None,
    nested: bool = False,
) -> Edit:
    """Puts a layer before the layers at a place.

    In a list of ``sublayers`` it goes into the list. Elsewhere an ``InsertedSequence``, a
    ``pz.nn.Sequential`` that ``strip`` knows, takes the place of the layer. A layer of Penzai's
    or of your own goes in as a copy that equals it and is an instance of its class, of a subclass
    by which ``strip`` knows it.

    Args:
        where: As in ``wrap``.
        layer: The layer, or a function of the layer at the place (and its path) that makes it.
        expect: As in ``wrap``.
        within: As in ``wrap``.
        outside: As in ``wrap``.
        nested: As in ``wrap``.

    Returns:
        The edit, for ``Recipe``.

    Raises:
        RuleTypeError: The place or the layer cannot be read as one.

    >>> from penzai import pz
    >>> insert_before("pz.nn:Linear", pz.nn.Identity())
    insert_before('pz.nn:Linear', pz.nn.Identity())
    """
    return _insert("insert_before", where, layer, expect, within, outside, nested)


def insert_after(
    where: PlaceLike,
    layer: Any,
    *,
    expect: int | None = None,
    within: PlaceLike = None,
    outside: PlaceLike = None,
    nested: bool = False,
) -> Edit:
    """Puts a layer after the layers at a place; see ``insert_before``.

    Args:
        where: As in ``wrap``.
        layer: The layer, or a function of the layer at the place (and its path) that makes it.
        expect: As in ``wrap``.
        within: As in ``wrap``.
        outside: As in ``wrap``.
        nested: As in ``wrap``.

    Returns:
        The edit, for ``Recipe``.

    Raises:
        RuleTypeError: The place or the layer cannot be read as one.

    >>> from penzai import pz
    >>> insert_after("**/attention", pz.nn.Identity(), within="pz.nn:Residual")
    insert_after('**/attention', pz.nn.Identity(), within='pz.nn:Residual')
    """
    return _insert("insert_after", where, layer, expect, within, outside, nested)


def replace(
    where: PlaceLike,
    function: Callable[..., Any] | str,
    *,
    expect: int | None = None,
    within: PlaceLike = None,
    outside: PlaceLike = None,
    nested: bool = False,
    **options: Any,
) -> Edit:
    """Puts something else in the place of the nodes at a place.

    Unlike the other edits it also finds nodes that cannot be called, such as parameters, and it
    is not taken back by ``strip``, except for ``RolledLayerStack``.

    Args:
        where: As in ``wrap``.
        function: A function of the node (and its path) that gives what takes its place.
        expect: As in ``wrap``.
        within: As in ``wrap``.
        outside: As in ``wrap``.
        nested: As in ``wrap``.
        **options: Further arguments of the function.

    Returns:
        The edit, for ``Recipe``.

    Raises:
        RuleTypeError: The place or the function cannot be read as one.

    >>> from penzai_shard.layers import RolledLayerStack
    >>> replace("pz.nn:LayerStack", RolledLayerStack.from_layer_stack, unroll=2)
    replace('pz.nn:LayerStack', RolledLayerStack.from_layer_stack, unroll=2)
    """
    function, options = _function(function, options, "replace")
    return Edit(
        "replace",
        Where.of(where, within, outside),
        function,
        tuple(options.items()),
        _read_expect(expect),
        nested,
    )


def _insert(
    kind: Literal["insert_before", "insert_after"],
    where: PlaceLike,
    layer: Any,
    expect: int | None,
    within: PlaceLike,
    outside: PlaceLike,
    nested: bool,
) -> Edit:
    if isinstance(layer, str) and is_reference(layer):
        layer = resolve(layer)
    if isinstance(layer, type):
        raise RuleTypeError(
            f"{kind}: {display_name(layer)} is a class. Give an instance, such as "
            f"{display_name(layer)}(...), or a function of the layer at the place."
        )
    options: dict[str, Any] = {}
    if not _is_layer(layer):
        layer, options = _function(layer, {}, kind)
    place = Where.of(where, within, outside)
    return Edit(kind, place, layer, tuple(options.items()), _read_expect(expect), nested)


def _read_expect(expect: Any) -> int | None:
    if expect is None or (isinstance(expect, int) and not isinstance(expect, bool) and expect >= 0):
        return expect
    raise RuleTypeError(f"expect is the number of places, or None for one or more, not {expect!r}.")


def _is_layer(value: Any) -> bool:
    """Whether a value is a layer, and not a function that makes one."""
    if isinstance(value, type):
        return False
    return jax.tree_util.default_registry.flatten_one_level(value) is not None and callable(value)


def _function(
    function: Any, options: Mapping[str, Any], kind: EditKind
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Reads a function or class, and checks that it can be called with a layer and options."""
    if isinstance(function, str):
        if not is_reference(function):
            raise RuleTypeError(
                f"{kind}: {function!r} is no reference to a function. "
                "Write module:name, for instance 'pz.nn:Linear'."
            )
        function = resolve(function)
    if isinstance(function, functools.partial) and not function.args:
        options = {**function.keywords, **options}
        function = function.func
    if not callable(function) or _is_layer(function):
        wanted = (
            "a layer or a function that makes one"
            if kind.startswith("insert")
            else ("a class or a function of the layer")
        )
        raise RuleTypeError(
            f"{kind} needs {wanted}, not {reprlib.repr(function)} "
            f"of type {type(function).__name__}."
        )
    options = {name: _read_option(value) for name, value in options.items()}
    try:
        wants_path(function, frozenset(options))
    except RuleTypeError as error:
        raise RuleTypeError(f"{kind}: {error}") from None
    return function, options


def _read_option(value: Any) -> Any:
    """An option, references in it resolved; a text that names nothing stays a text."""
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(map(_read_option, value))
    if isinstance(value, str) and is_reference(value):
        try:
            return resolve(value)
        except RuleTypeError:
            return value
    return value


def _caller(
    function: Callable[..., Any], options: dict[str, Any]
) -> tuple[Callable[[Any, Keys], Any], bool]:
    """A function of a node and its linked path, and whether it leaves the path alone."""
    match wants_path(function, frozenset(options)):
        case "position":
            return (
                lambda node, path: function(node, keys_text(path), **options),
                False,
            )
        case "keyword":
            return (
                lambda node, path: function(node, path=keys_text(path), **options),
                False,
            )
    return lambda node, path: function(node, **options), True


def _refuse_nothing(layer: Any) -> None:
    if layer is None:
        raise RuleTypeError(
            "an edit's function gave None where a layer belongs. Return the layer from it."
        )


def _marked(layer: Any) -> Any:
    """A layer to insert; marked, as a copy, if it is not one of this library's."""
    _refuse_nothing(layer)
    return layer if library_role(type(layer)) is not None else with_mark(layer, None)


def _marked_wrapper(wrapper: Any, node: Any) -> Any:
    """A layer put around a node; marked if it is not this library's but holds it in a field."""
    _refuse_nothing(wrapper)
    if wrapper is node or library_role(type(wrapper)) is not None:
        return wrapper
    if kind_of(wrapper).shape != STRUCT and not hasattr(wrapper, "__dict__"):
        return wrapper
    for key, child in children_of(wrapper):
        if child is node and isinstance(key, str) and getattr(wrapper, key, None) is node:
            return with_mark(wrapper, key)
        if (
            key == SEQUENCE_FIELD
            and _is_list_in_struct(wrapper, child)
            and any(part is node for part in child)
        ):
            beside = [part if part is node else _marked(part) for part in child]
            return with_mark(with_fields(wrapper, {SEQUENCE_FIELD: beside}), SEQUENCE_FIELD)
    return wrapper


def _is_list_in_struct(parent: Any, child: Any) -> bool:
    return kind_of(parent).shape == STRUCT and type(child) is list


def _where_expression(where: Where) -> str:
    """The place itself; what narrows it is written beside it."""
    match where.what:
        case tuple() as kinds:
            names = [expression(kind) for kind in kinds]
            return names[0] if len(names) == 1 else f"({', '.join(names)})"
        case _Root() as root:
            return repr(root)
    return expression(where.what)


def _all_nodes(model: Any) -> list[tuple[Keys, Any]]:
    """Every node that is no leaf, with its path, in the order of the model."""
    found: list[tuple[Keys, Any]] = []
    waiting: list[tuple[Keys, Any]] = [((), model)]
    while waiting:
        path, node = waiting.pop()
        if kind_of(node).shape == LEAF:
            continue
        found.append((path, node))
        waiting.extend(reversed([((*path, key), child) for key, child in children_of(node)]))
    return found


def nearest_places(model: Any, edit: Edit) -> str:
    """What the model has that is most like a place which it does not have, as a sentence.

    Args:
        model: The model.
        edit: An edit that matched nothing.

    Returns:
        For types the nearest types, for patterns the nearest parts and paths.
    """
    where = edit.where
    if where.within is not None or where.outside is not None:
        alone = dataclasses.replace(
            edit, where=Where(where.what), expect=None, what=lambda node: node, options=(),
            kind="replace" if edit.kind == "replace" else "wrap",
        )  # fmt: skip
        count = alone.run(model).count
        if count:
            return f"Without within= and outside= there would be {count}."
    nodes = _all_nodes(model)
    if isinstance(where.what, tuple):
        return _nearest_types(where.what, [node for _, node in nodes])
    if isinstance(where.what, str):
        return _nearest_paths(where.what, nodes)
    return f"The predicate is false for all {len(nodes)} nodes that were asked."


def _nearest_types(wanted: tuple[type, ...], nodes: list[Any]) -> str:
    counts = Counter(type(node) for node in nodes if kind_of(node).is_layer)
    same_name = [
        f"{found.__module__}.{found.__qualname__} ({count})"
        for found, count in counts.items()
        if any(found.__name__ == kind.__name__ for kind in wanted)
    ]
    if same_name:
        return f"The model has another type of that name: {', '.join(same_name)}."
    by_name = {kind.__name__: count for kind, count in counts.items()}
    if not by_name:
        return "The model has no layers."
    near = [
        name
        for kind in wanted
        for name in difflib.get_close_matches(kind.__name__, by_name, _MOST_NAMED, 0.5)
    ]
    common = [name for name, _ in Counter(by_name).most_common(_MOST_NAMED)]
    shown = list(dict.fromkeys(near or common))
    described = ", ".join(f"{name} ({by_name[name]})" for name in shown)
    return f"{'Nearest in the model' if near else 'The model has'}: {described}."


def _nearest_paths(pattern: str, nodes: list[tuple[Keys, Any]]) -> str:
    layers = [(keys_text(path), node) for path, node in nodes if kind_of(node).is_layer]
    known = {part for path, _ in layers for part in path.split("/") if part}
    known |= {name for _, node in layers for name in names_of(node)}
    near = []
    meant: list[str] = []
    for part in pattern.split("/"):
        if part and not any(letter in part for letter in "*?") and part not in known:
            close = difflib.get_close_matches(part, known, 1, 0.5)
            meant += close
            near.append(
                f"nothing is called {part!r}" + (f", nearest is {close[0]!r}" if close else "")
            )
    plain = pattern.replace("*", "").replace("//", "/")

    def rank(place: tuple[str, Any]) -> tuple[bool, float]:
        path, node = place
        names = {*path.split("/")[-1:], *names_of(node)}
        text = "/".join([path, *names_of(node)])
        return not names & set(meant), -difflib.SequenceMatcher(None, plain, text).ratio()

    ranked = [
        f"{path} ({type(node).__name__})"
        for path, node in sorted((place for place in layers if place[0]), key=rank)
    ]
    sentence = f"In the model {'; '.join(near)}. " if near else ""
    return sentence + f"Nearest paths: {', '.join(ranked[:3]) or 'none'}."
