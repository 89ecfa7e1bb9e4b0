"""Edits as values: ``wrap``, ``insert_before``, ``insert_after`` and ``replace``.

An edit says where, what and how often. It is made without a model, and can be compared, shown,
written as JSON, and carried out on any number of models.
"""

import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from penzai_shard.arrays.static_values import same_static
from penzai_shard.errors import Problem, RuleTypeError
from penzai_shard.layers.remat import POLICIES, Checkpointed, check_policy
from penzai_shard.layers.rolled_layer_stack import ROLL_POLICIES, RolledLayerStack
from penzai_shard.layers.wrapper import WrapperLayer
from penzai_shard.paths import nearest, pattern_parts
from penzai_shard.surgery.inserted import CONSTRAINTS, Inserted, InsertedSequence, Original, locate
from penzai_shard.surgery.references import Ref, resolve
from penzai_shard.surgery.rewriting import Keys, Match, Refused, Rewriter, is_layer, replace_object
from penzai_shard.surgery.where import Place, Where, make_caller, names_of, value_text, wrappers_of

Verb: TypeAlias = Literal["wrap", "insert_before", "insert_after", "replace"]
# The kind of problems of edits that fit nowhere, or not the expected number of places.
UNFIT = "unfit"


@dataclasses.dataclass(frozen=True, repr=False)
class Edit:
    """One edit, as ``wrap``, ``insert_before``, ``insert_after`` and ``replace`` make it.

    Attributes:
        verb: Which of the four.
        where: Where.
        what: The wrapper, the layer, the function, or a ``Ref`` of it.
        options: Further arguments of the wrapper or function, by name.
        expect: How many places there must be; None for one or more.
        nested: Whether places inside of places count too.

    Raises:
        RuleTypeError: The parts do not go together.
    """

    verb: Verb
    where: Where
    what: Any
    options: tuple[tuple[str, Any], ...] = ()
    expect: int | None = None
    nested: bool = False

    def __post_init__(self) -> None:
        is_count = self.expect is None or (type(self.expect) is int and self.expect >= 0)
        if not is_count or type(self.nested) is not bool:
            what = f"expect is {self.expect!r}, nested is {self.nested!r}"
            fix = "Write expect=2 or None, and nested=True or False."
            raise RuleTypeError(f"{self.verb}:", [Problem("", what, fix)])
        _check_use(self.verb, self.what, dict(self.options))

    def __repr__(self) -> str:
        place, *around = self.where.texts()
        made, options = value_text(self.what), self.options
        # A function that puts several wrappers around a layer names them by itself.
        if hasattr(self.what, "describe_edit"):
            made, options = self.what.describe_edit(**dict(options)), ()
        parts = [place, made, *around]
        parts += [f"{name}={value_text(value)}" for name, value in options]
        parts += ["nested=True"] if self.nested else []
        parts += [] if self.expect is None else [f"expect={self.expect}"]
        return f"{self.verb}({', '.join(parts)})"

    def run(self, model: Any) -> "Outcome":
        """Carries the edit out; the model stays as it is."""
        # A Ref is looked up now: where the edit was made its package may have been missing.
        what, options = resolve(self.what), resolve(dict(self.options))
        _check_use(self.verb, what, options)
        layer = _mark_inserted(what, ()) if is_layer(what) else None
        make, takes_path = make_caller(what if layer is None else lambda node: layer, options)

        rewriter = Rewriter(
            self.where.find(self.verb != "replace"),
            functools.partial(_CHANGES[self.verb], make),
            InsertedSequence,
            "inner first" if self.nested else "outermost",
            # A node in two places has two paths, for which a function may make two layers.
            by_node=not takes_path,
        )
        edited = rewriter.run(model)
        count, refused = len(rewriter.matches), rewriter.refused
        problems = [dataclasses.replace(x.problem, path=locate(model, x.keys)) for x in refused]
        problems += self._refuse_repeated(model, rewriter.matches)
        if not problems and count != self.expect and (self.expect is not None or not count):
            problems.append(self._explain_count(model, rewriter.matches))
        # One traceback can be shown, and the first mistake is mostly that of the others.
        cause = next((each.__cause__ for each in refused if each.__cause__), None)
        return Outcome(model, edited, tuple(rewriter.matches), tuple(problems), cause)

    def _refuse_repeated(self, model: Any, matches: Sequence[Match]) -> Iterator[Problem]:
        """Refuses wrappers of this library around layers that had the same one before."""
        for match in matches if self.verb == "wrap" else ():
            made, old = match.after[0], wrappers_of(model, match.keys)
            alike = [x for x in old if type(x) is type(made) is not Inserted and x is not made]
            if any(same_static(dataclasses.replace(made, body=x.body), x) for x in alike):
                path, name = locate(model, match.keys), type(made).__name__
                fix = f"Take it off first: strip(model, {name}), or strip(model) for all edits."
                yield Problem(path, f"it is in this {name} already", fix, UNFIT)

    def _explain_count(self, model: Any, matches: Sequence[Match]) -> Problem:
        """Why the number of places is wrong."""
        if matches:
            what = f"{self} fits {len(matches)}, first {locate(model, matches[0].keys)!r}"
            fix = f"Write expect={len(matches)}, or narrow it; recipe.report(model) shows all."
            return Problem("", what, fix, UNFIT)
        fact, fix = _find_nearest(model, self.where)
        return Problem("", f"{self} fits nothing; {fact}", fix, UNFIT)


class Outcome(NamedTuple):
    """What an edit did to a model.

    Attributes:
        before: The model.
        model: The edited model.
        matches: The places that were changed.
        problems: Why the edit does not fit.
        cause: The first exception that a function of the user raised.
    """

    before: Any
    model: Any
    matches: tuple[Match, ...]
    problems: tuple[Problem, ...]
    cause: BaseException | None


# The four edits


def wrap(
    where: Place,
    wrapper: Any,
    *,
    expect: int | None = None,
    within: Place = None,
    outside: Place = None,
    nested: bool = False,
    **options: Any,
) -> Edit:
    """Puts a layer around the layers at a place.

    Args:
        where: A type of layers or a tuple of types; a predicate of the layer, or of the layer and
            its path; a pattern of paths, see ``Where``; ``ROOT``; a ``Ref`` of one of these. Where
            one place is inside of another, the outer one counts.
        wrapper: A class, or a function of the layer. If it has an argument ``path``, it gets the
            path of the layer.
        expect: How many places there must be. By default there must be one at least.
        within: Only what is inside of such a place: strictly inside of a node of a type or for
            which a predicate is true, at or below a path that fits a pattern.
        outside: Only what is not inside of such a place.
        nested: Also change places inside of places, the inner ones first.
        **options: Further arguments of the wrapper.

    Returns:
        The edit, for ``Recipe``. A ``WrapperLayer`` goes around the layer as it is, once: where the
        same one is already, it is refused. Any other goes into an ``Inserted``, and the layer in it
        into an ``Original``, by which ``strip`` knows them.

    Raises:
        RuleTypeError: The place or the wrapper cannot be read as one.

    >>> from penzai import pz
    >>> from penzai_shard import Checkpointed
    >>> wrap(pz.nn.Linear, Checkpointed, policy="dots", expect=2)
    wrap(Linear, Checkpointed, policy='dots', expect=2)
    """
    place = Where.of(where, within, outside)
    return Edit("wrap", place, wrapper, tuple(options.items()), expect, nested)


def insert_before(
    where: Place,
    layer: Any,
    *,
    expect: int | None = None,
    within: Place = None,
    outside: Place = None,
    nested: bool = False,
) -> Edit:
    """Puts a layer before the layers at a place.

    Where these are in a list ``sublayers``, it goes into the list. Elsewhere an
    ``InsertedSequence`` takes the place of the two. Constraint layers go in as they are, and any
    other in an ``Inserted``, by which ``strip`` knows it.

    Args:
        where: As in ``wrap``.
        layer: The layer, or a function that makes it of the layer at the place (and its path).
        expect: As in ``wrap``.
        within: As in ``wrap``.
        outside: As in ``wrap``.
        nested: As in ``wrap``.

    Returns:
        The edit, for ``Recipe``.

    Raises:
        RuleTypeError: The place or the layer cannot be read as one.

    >>> from penzai import pz
    >>> insert_before(pz.nn.Linear, pz.nn.Identity())
    insert_before(Linear, Identity(...))
    """
    place = Where.of(where, within, outside)
    return Edit("insert_before", place, layer, (), expect, nested)


def insert_after(
    where: Place,
    layer: Any,
    *,
    expect: int | None = None,
    within: Place = None,
    outside: Place = None,
    nested: bool = False,
) -> Edit:
    """Puts a layer after the layers at a place; see ``insert_before``.

    >>> from penzai import pz
    >>> insert_after("**/attention", pz.nn.Identity(), within=pz.nn.Residual)
    insert_after('**/attention', Identity(...), within=Residual)
    """
    place = Where.of(where, within, outside)
    return Edit("insert_after", place, layer, (), expect, nested)


def replace(
    where: Place,
    function: Any,
    *,
    expect: int | None = None,
    within: Place = None,
    outside: Place = None,
    nested: bool = False,
    **options: Any,
) -> Edit:
    """Puts something else in the place of the nodes at a place.

    Unlike the other edits it also finds nodes that cannot be called, such as parameters. ``strip``
    does not take it back, except for ``RolledLayerStack``.

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

    >>> from penzai import pz
    >>> replace(pz.nn.StochasticDropout, lambda dropout: pz.nn.Identity())
    replace(StochasticDropout, <lambda>)
    """
    place = Where.of(where, within, outside)
    return Edit("replace", place, function, tuple(options.items()), expect, nested)


def _check_use(verb: Verb, what: Any, options: Mapping[str, Any]) -> None:
    """Refuses what cannot be the wrapper, layer or function of an edit."""
    inserts, is_class = verb.startswith("insert"), isinstance(what, type)
    if isinstance(what, Ref):
        return
    if inserts and is_layer(what):
        what = lambda layer: layer  # noqa: E731  # It takes no options.
    marks = (*CONSTRAINTS, Inserted, InsertedSequence, Original)
    is_mark = verb == "wrap" and is_class and issubclass(what, marks)
    if is_mark or not callable(what) or is_layer(what) or (inserts and is_class):
        name = value_text(what)
        fix = "Give a class of wrappers, a function of the layer, or Ref('module:name')."
        if inserts:
            fix = f"Give a layer, such as {name}(...), or a function that makes one."
        raise RuleTypeError(f"{verb}:", [Problem("", f"{name} cannot be used here", fix)])
    make_caller(what, options)
    # Told where it is written, and not only where the edit is carried out.
    policy, rolls = options.get("policy"), what == RolledLayerStack.from_layer_stack
    if policy and (rolls or what is Checkpointed):
        check_policy(verb, policy, ROLL_POLICIES if rolls else tuple(POLICIES))


# What the edits make of one node

_Make: TypeAlias = Callable[[Any, Keys], Any]


def _wrap(make: _Make, node: Any, keys: Keys) -> tuple[Any, ...]:
    _check_place(node, keys)
    made = inside = make(node, keys)
    while isinstance(inside, WrapperLayer) and inside is not node:
        inside = inside.body
    if inside is node:
        return (made,)
    _check_layer(made, keys)
    marked = replace_object(made, node, Original(node))
    if marked is made or getattr(made, "sublayers", None) is node:
        what = f"the {type(made).__name__} that was made does not hold the layer at this place"
        raise Refused(keys, what, "Put the layer into it, as [layer] into a list, or replace it.")
    return (Inserted(marked, holds_original=True),)


def _before(make: _Make, node: Any, keys: Keys) -> tuple[Any, ...]:
    return _after(make, node, keys)[::-1]


def _after(make: _Make, node: Any, keys: Keys) -> tuple[Any, ...]:
    _check_place(node, keys)
    return node, _mark_inserted(make(node, keys), keys)


def _mark_inserted(layer: Any, keys: Keys) -> Any:
    if isinstance(layer, (Inserted, *CONSTRAINTS)):
        return layer
    _check_layer(layer, keys)
    return Inserted(layer)


def _replace(make: _Make, node: Any, keys: Keys) -> tuple[Any, ...]:
    made = make(node, keys)
    if is_layer(node) and not callable(made):
        _check_layer(made, keys)
    return (made,)


_CHANGES = {"wrap": _wrap, "insert_before": _before, "insert_after": _after, "replace": _replace}


def _check_place(node: Any, keys: Keys) -> None:
    if not callable(node):
        raise Refused(keys, f"{type(node).__name__} is no layer", "Name a layer, or write replace.")


def _check_layer(layer: Any, keys: Keys) -> None:
    if not is_layer(layer):
        what = f"the function gave {value_text(layer)}, which is no layer"
        raise Refused(keys, what, "Return a layer: a pytree that can be called.")


# What an edit that fits nothing may stand for


def find_matches(model: Any, place: Place, order: Any = "outermost") -> list[Match]:
    """The layers of a model at a place; for the order see ``Rewriter``."""
    finder = Where.of(place).find(layers_only=True)
    rewriter = Rewriter(finder, lambda node, keys: (node,), order=order)
    rewriter.run(model)
    return rewriter.matches


def _find_nearest(model: Any, where: Where) -> tuple[str, str]:
    """What a model has instead of a place that it does not have: a fact and a fix."""
    # What narrows a place that is there is more likely wrong than the place.
    if where != Where(where.what) and (count := len(find_matches(model, where.what))):
        return f"without within= and outside= it fits {count}", "Correct what narrows it."
    layers = find_matches(model, is_layer, "inner first")
    if not layers:
        return "the model has no layers", "Edit a pytree of layers, as those of Penzai or Equinox."
    what = Where.of(resolve(where.what)).what

    if isinstance(what, tuple):
        # With modules, as a type of a wanted name may be another one of that name.
        known = {
            k.__name__: f"{k.__module__}.{k.__name__}" for k in {type(x.before) for x in layers}
        }
        near = [known[name] for kind in what if (name := nearest(kind.__name__, known))]
        # Where no name is near, the nearest ones show what model it is.
        names = [kind.__name__ for kind in what]
        shown = near or difflib.get_close_matches(names[0], known, n=3, cutoff=0.0)
        return f"the model has no {' or '.join(names)}", f"Name {' or '.join(shown)}."
    if not isinstance(what, str):
        return f"the predicate is false for every layer ({len(layers)})", "Correct it."
    places = {x for own in layers for x in (own.path, *(f"**/{n}" for n in names_of(own.before)))}
    holding = (place for place in sorted(places) if what.split("/")[-1] in place)
    place = nearest("/".join(pattern_parts(what)), sorted(places)) or next(holding, None)
    fact = "positions in the tree are written as treescope shows them"
    return fact, f"Write for instance {place or layers[0].path!r}."
