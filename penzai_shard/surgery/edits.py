"""The four edits: wrap, insert before, insert after, replace.

An edit is a value. It says where, what, and how often, and knows nothing of any model.
"""

import dataclasses
import functools
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from penzai_shard.errors import RuleTypeError
from penzai_shard.surgery.changes import CHANGES, EditKind, inserted
from penzai_shard.surgery.edit_values import expression, last_name
from penzai_shard.surgery.inserted_layers import inserted_sequence, library_role
from penzai_shard.surgery.places import PlaceLike, Where, _Root, called_with_path, wants_path
from penzai_shard.surgery.references import Ref, display_name, named
from penzai_shard.surgery.rewriting import Match, Rewriter
from penzai_shard.surgery.suggestions import nearest_places
from penzai_shard.surgery.tree_nodes import Keys, is_layer

_MOST_NAMED = 5


def _ref(reference: str) -> str:
    return f"Ref({reference!r})"


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

    def __add__(self, other: Any) -> Any:
        """The recipe of this edit and then another, or then those of a recipe."""
        from penzai_shard.surgery.recipe import Recipe  # A recipe is made of edits.

        return Recipe(self, other) if isinstance(other, Edit | Recipe) else NotImplemented

    def __getattr__(self, name: str) -> Any:
        of_recipes = name in ("apply", "report", "to_json")
        fix = f" Put it in a recipe: Recipe({self!r}).{name}(...)." if of_recipes else ""
        raise AttributeError(f"an edit alone has no {name}.{fix}")

    def __repr__(self) -> str:
        place, what, options = self._arguments()
        return f"{self.kind}({', '.join([place[0], what, *place[1:], *options])})"

    @property
    def cells(self) -> tuple[str, str, str]:
        """The edit as a row of a table: its kind, where, and what with its options.

        >>> wrap("pz.nn:Linear", "penzai_shard.layers:Checkpointed", policy="dots").cells
        ('wrap', "'pz.nn:Linear'", "Checkpointed, policy='dots'")
        """
        place, what, options = self._arguments()
        return self.kind, ", ".join(place), " ".join(", ".join([what, *options]).split())

    def _arguments(self) -> tuple[list[str], str, list[str]]:
        """The place and what narrows it, what is done there, and the options."""
        place = [_where_expression(self.where)]
        for name in ("outside", "within"):
            if (around := getattr(self.where, name)) is not None:
                place.append(f"{name}={_where_expression(around)}")
        options = [f"{name}={expression(value, _ref)}" for name, value in self.options]
        if self.nested:
            options.append("nested=True")
        if self.expect is not None:
            options.append(f"expect={self.expect}")
        return place, expression(self.what), options

    @property
    def title(self) -> str:
        """The edit in few words: its kind, where, and what, without their arguments.

        >>> wrap("pz.nn:Linear", "penzai_shard.layers:Checkpointed", policy="dots").title
        "wrap(Linear, Checkpointed, policy='dots')"
        """
        is_named = callable(self.what) and hasattr(self.what, "__qualname__")
        shown = [
            _where_expression(self.where, short=True),
            expression(self.what, last_name) if is_named else f"{type(self.what).__name__}(...)",
            *(f"{name}={expression(value, last_name)}" for name, value in self.options),
        ]
        return f"{self.kind}({', '.join(shown)})"

    def run(self, model: Any, record: bool = False) -> Outcome:
        """Carries the edit out.

        Args:
            model: Any model; it stays as it is.
            record: Whether to report the places, and not only their number.

        Returns:
            The edited model, the places, and the problem if the number of places is wrong.

        Raises:
            EditRefused: At some places the edit cannot be made.
        """
        rewriter = Rewriter(
            self.where.finder(self._layers_only),
            functools.partial(CHANGES[self.kind], self._maker()),
            inserted_sequence,
            same_everywhere=is_layer(self.what)
            or wants_path(self.what, frozenset(dict(self.options))) is None,
            enters=lambda node: self.nested,
            record=record,
        )
        edited = rewriter.run(model)
        count, matches = rewriter.count, tuple(rewriter.matches)
        if count == self.expect or (self.expect is None and count):
            return Outcome(edited, count, matches)
        if count and not record:
            return self.run(model, record=True)
        return Outcome(model, count, matches, self._problem(model, matches))

    def _maker(self) -> Callable[[Any, Keys], Any]:
        """What makes the layer or value for a node at these keys."""
        if is_layer(self.what):
            layer = inserted(self.what, ())
            return lambda node, keys: layer
        call = called_with_path(self.what, dict(self.options), "the function")
        if self.kind in ("wrap", "replace"):
            return call
        return lambda node, keys: inserted(call(node, keys), keys)

    @property
    def _layers_only(self) -> bool:
        return self.kind != "replace"

    def _problem(self, model: Any, matches: tuple[Match, ...]) -> str:
        count = len(matches)
        if count == 0:
            near = nearest_places(model, self.where, self._layers_only)
            if self.expect is None:
                return (
                    f"{self!r}: nothing matches. {near} Give expect=0 if that is meant, or leave "
                    "the edit out."
                )
            return (
                f"{self!r}: nothing matches, and {self.expect} are expected. {near} Correct the "
                "place, or give expect=0."
            )
        paths = [match.path_text or "the root" for match in matches[:_MOST_NAMED]]
        more = f" and {count - len(paths)} more" if count > len(paths) else ""
        places = "1 place matches" if count == 1 else f"{count} places match"
        return (
            f"{self!r}: {places}, and {self.expect} are expected: {', '.join(paths)}{more}. "
            f"Give expect={count}, or narrow the edit with within= or outside=."
        )


def wrap(
    where: PlaceLike,
    wrapper: Callable[..., Any] | str | Ref,
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
            its path; a path pattern; ``"module:name"`` or a ``Ref`` of a type or predicate, which
            is imported; ``ROOT``. Where
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
        **options: Further arguments of the wrapper. Text is text; ``Ref("module:name")`` stands
            for what it names.

    Returns:
        The edit, for ``Recipe``. A wrapper of this library goes around the layer as it is. One of
        somebody else's goes into an ``Inserted``, and the layer in it into an ``Original``, by
        which ``strip`` knows them; both run what they hold and show its attributes.

    Raises:
        RuleTypeError: The place or the wrapper cannot be read as one.

    >>> from penzai_shard.layers import Checkpointed
    >>> wrap("pz.nn:Linear", Checkpointed, policy="dots", expect=2)
    wrap('pz.nn:Linear', Checkpointed, policy='dots', expect=2)
    """
    place = Where.of(where, within, outside)
    return make_edit("wrap", place, named(wrapper), options, expect, nested)


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
    ``pz.nn.Sequential`` that ``strip`` knows, takes the place of the layer. A layer that is not one
    of this library's constraint layers goes in inside of an ``Inserted``, by which ``strip`` knows
    it.

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
    place = Where.of(where, within, outside)
    return make_edit("insert_before", place, named(layer), {}, expect, nested)


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
    place = Where.of(where, within, outside)
    return make_edit("insert_after", place, named(layer), {}, expect, nested)


def replace(
    where: PlaceLike,
    function: Callable[..., Any] | str | Ref,
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
    place = Where.of(where, within, outside)
    return make_edit("replace", place, named(function), options, expect, nested)


def make_edit(
    kind: EditKind,
    where: Where,
    what: Any,
    options: Mapping[str, Any],
    expect: int | None,
    nested: bool,
) -> Edit:
    """Makes an edit of parts that were read, and checks that they go together.

    Args:
        kind: Which edit.
        where: The place.
        what: The wrapper, layer or function itself.
        options: Further keyword arguments; ``Ref`` in them stands for what it names.
        expect: How many places there must be.
        nested: Whether places inside of places count too.

    Returns:
        The edit.

    Raises:
        RuleTypeError: They do not.
    """
    is_insert = kind.startswith("insert")
    if is_insert and isinstance(what, type):
        name = display_name(what)
        raise RuleTypeError(
            f"{kind}: {name} is a class. Give an instance, such as {name}(...), or a function of "
            "the layer at the place."
        )
    if not (is_insert and is_layer(what)):
        what, options = _read_function(kind, what, options)
    if expect is not None and (type(expect) is not int or expect < 0):
        raise RuleTypeError(
            f"expect is the number of places, or None for one or more, not {expect!r}."
        )
    if type(nested) is not bool:
        raise RuleTypeError(f"nested is True or False, not {nested!r}.")
    return Edit(kind, where, what, tuple(options.items()), expect, nested)


def _read_function(
    kind: EditKind, function: Any, options: Mapping[str, Any]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A function or class that can be called with a layer and these options."""
    if isinstance(function, str):
        raise RuleTypeError(
            f"{kind}: {function!r} is not a reference to a function. "
            "Write module:name, for instance 'pz.nn:Linear'."
        )
    if isinstance(function, functools.partial) and not function.args:
        options = {**function.keywords, **options}
        function = function.func
    if not callable(function) or is_layer(function):
        wanted = (
            "a layer or a function that makes one"
            if kind.startswith("insert")
            else "a class or a function of the layer"
        )
        raise RuleTypeError(
            f"{kind} needs {wanted}, not {reprlib.repr(function)} "
            f"of type {type(function).__name__}."
        )
    role = library_role(function) if isinstance(function, type) else None
    if kind == "wrap" and role not in (None, "wrapper"):
        raise RuleTypeError(f"wrap: {function.__name__} {_NOT_WRAPPERS[role]}")
    try:
        options = {name: _read_option(value) for name, value in options.items()}
    except RecursionError:
        raise RuleTypeError(f"{kind}: an option contains itself. Take it out of itself.") from None
    try:
        wants_path(function, frozenset(options))
    except RuleTypeError as error:
        raise RuleTypeError(f"{kind}: {error}") from None
    return function, options


_NOT_WRAPPERS = {
    "passer": "is not a wrapper: it holds no layer. Put an instance of it before or after the "
    "layers, with insert_before or insert_after.",
    "rolled": "is not a wrapper: it takes the place of a layer stack. "
    "Write replace(pz.nn.LayerStack, RolledLayerStack.from_layer_stack).",
    "inserted": "says that what it holds is to be taken off again. The edits put it where it is "
    "needed; give them your own layers.",
    "original": "says what an inserted layer was put around. The edits put it where it is needed.",
    "sequence": "holds a list of layers. Use insert_before or insert_after.",
}


def _read_option(value: Any) -> Any:
    """An option, each ``Ref`` in it replaced by what it names; a text stays a text."""
    if isinstance(value, Ref):
        return value.resolve()
    if type(value) in (tuple, list):
        return type(value)(map(_read_option, value))
    if type(value) is dict:
        return {key: _read_option(part) for key, part in value.items()}
    return value


def _where_expression(where: Where, short: bool = False) -> str:
    """The place itself; what narrows it is written beside it."""
    form = last_name if short else repr
    match where.what:
        case tuple() as kinds:
            names = [expression(kind, form) for kind in kinds]
            return names[0] if len(names) == 1 else f"({', '.join(names)})"
        case _Root() as root:
            return repr(root)
    return expression(where.what, form)
