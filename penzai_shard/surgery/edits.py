"""An edit as a value: it says where, what, and how often, and can be shown and carried out."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from penzai_shard.surgery.changes import CHANGES, EditKind, inserted
from penzai_shard.surgery.edit_values import expression, last_name
from penzai_shard.surgery.inserted_layers import inserted_sequence
from penzai_shard.surgery.places import Where, _Root, called_with_path, wants_path
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

        >>> from penzai_shard.surgery import wrap
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

        >>> from penzai_shard.surgery import wrap
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
