"""The four edits, wrap, insert before, insert after and replace, and what they may be given."""

import functools
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from penzai_shard.errors import RuleTypeError
from penzai_shard.surgery.changes import EditKind
from penzai_shard.surgery.edits import Edit
from penzai_shard.surgery.inserted_layers import library_role
from penzai_shard.surgery.places import PlaceLike, Where, wants_path
from penzai_shard.surgery.references import Ref, display_name, named
from penzai_shard.surgery.tree_nodes import is_layer


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
            one match is in another, the outer one counts. Patterns match the path of a node
            from the model's root, such as ``body/sublayers/0``; each part of a pattern matches a
            key or the snake-case name of a type (or a ``NamedGroup``'s name), so that
            ``**/attention/**`` finds ``pz.nn.Attention``.
        wrapper: A class, or a function of the layer. If it needs a second argument, or has one
            called ``path``, it gets the layer's path too.
        expect: How many places there must be. By default there must be one at least.
        within: Only what is inside such a place: strictly inside a node of a type or for which
            a predicate is true, and at or below a path that matches a pattern.
        outside: Only what is not inside such a place.
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
