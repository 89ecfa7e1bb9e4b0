"""Recipes: edits as one value, applied to any model, shown, checked and taken back."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from penzai_shard.errors import Problem, Problems, RuleTypeError, SelectionError
from penzai_shard.reports.report import Column, Report
from penzai_shard.surgery.edits import UNFIT, Edit, Outcome
from penzai_shard.surgery.inserted import locate
from penzai_shard.surgery.recipe_json import read_edits, write_edits
from penzai_shard.surgery.where import type_names

_COLUMNS = (Column("path", "path"), Column("edit"), Column("before"), Column("after"))


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Recipe:
    """Edits that are applied to a model in their order, each to the result of those before.

    A recipe holds no model and changes none: ``apply`` gives a new one, which shares all parts that
    no edit touched, and all parameters. What was shared in the model stays shared where it was
    edited in the same way.

    Args:
        *edits: Edits, or recipes, whose edits are taken over.

    Raises:
        RuleTypeError: Something else was given.

    >>> from penzai import pz
    >>> import penzai_shard as pzs
    >>> recipe = Recipe(
    ...     pzs.insert_after(pz.nn.Identity, pz.nn.ConstantRescale(by=2.0), expect=1),
    ...     pzs.wrap(pzs.ROOT, pzs.Jitted),
    ... )
    >>> recipe
    Recipe(
        insert_after(Identity, ConstantRescale(...), expect=1),
        wrap(ROOT, Jitted),
    )
    >>> model = pz.nn.Sequential([pz.nn.Identity()])
    >>> edited = recipe.apply(model)
    >>> float(edited(3.0)), pzs.strip(edited) == model
    (6.0, True)
    """

    edits: tuple[Edit, ...]

    def __init__(self, *edits: "Edit | Recipe") -> None:
        problems = Problems("a recipe is made of edits:")
        taken: list[Edit] = []
        for number, given in enumerate(edits, 1):
            if isinstance(given, Edit | Recipe):
                taken += given.edits if isinstance(given, Recipe) else [given]
            else:
                kind, fix = type(given).__name__, "Write Recipe(*edits)."
                if kind == "function":  # Such as jit_root, without its parentheses.
                    fix = f"Write {given.__name__}()."
                problems.add("", f"argument {number} is of type {kind}", fix)
        problems.raise_if_any(RuleTypeError)
        object.__setattr__(self, "edits", tuple(taken))

    def apply(self, model: Any) -> Any:
        """Applies the edits.

        Args:
            model: A model, or any tree of layers; it stays as it is.

        Returns:
            The edited model.

        Raises:
            SelectionError: Some edits fit nowhere, or not the number of places that they expect.
            RuleTypeError: A function of an edit raised, or gave what cannot stand at its place.
                Both errors have the problems of all edits.
        """
        outcomes = self._run(model)
        problems = Problems(f"this recipe does not fit the {type(model).__name__}:")
        for outcome in outcomes:
            problems.extend(outcome.problems)
        is_unfit = all(problem.kind == UNFIT for problem in problems)
        # A function of the user that raised is shown with its traceback.
        try:
            problems.raise_if_any(SelectionError if is_unfit else RuleTypeError)
        except RuleTypeError as error:
            raise error from next((o.cause for o in outcomes if o.cause), None)
        return outcomes[-1].model if outcomes else model

    def _run(self, model: Any) -> list[Outcome]:
        if isinstance(model, type):
            what, fix = f"{model.__name__} is a class", f"Give a model: {model.__name__}(...)."
            raise RuleTypeError("a recipe is for models:", [Problem("", what, fix)])
        # An edit that does not fit leaves the model to the next, so that all problems are found.
        outcomes: list[Outcome] = []
        for edit in self.edits:
            outcomes.append(edit.run(outcomes[-1].model if outcomes else model))
        return outcomes

    def report(self, model: Any) -> Report:
        """Says what the edits do to a model, which stays as it is.

        Returns:
            A report with a row for each edit and place: the path in the bare model, the edit, and
            what stands there before and after. Its truth value is whether all edits fit; those that
            do not are notes.
        """
        outcomes = self._run(model)
        rows = []
        for edit, outcome in zip(self.edits, outcomes, strict=True):
            for match in outcome.matches:
                path = locate(outcome.before, match.keys) or "(root)"
                after = ", ".join(map(_text, match.after))
                rows.append((path, repr(edit), _text(match.before), after))
        notes = [str(problem) for outcome in outcomes for problem in outcome.problems]
        verdict = f"edits of {type(model).__name__}: {len(self)}, places: {len(rows)}"
        return Report("recipe", verdict, _COLUMNS, rows, notes, not notes, key=("path", "edit"))

    def check(self, model: Any, *args: Any, **side_inputs: Any) -> Report:
        """Checks that the edited model computes what the model does.

        Args:
            model: The model.
            *args: As for ``check_equivalent``.
            **side_inputs: As for ``check_equivalent``, with its options.

        Returns:
            The report of ``check_equivalent``. If the two differ, its verdict shows the first edit
            that is to blame, whose number, from 1, is ``facts["edit"]``.

        Raises:
            SelectionError, RuleTypeError: As ``apply`` and ``check_equivalent``.
        """
        # Imported here: few who apply recipes check them.
        from penzai_shard.surgery.equivalence.check import check_equivalent

        outcomes = self._run(model)
        whole = check_equivalent(model, self.apply(model), *args, **side_inputs)
        if whole.ok:
            return whole
        for number, outcome in enumerate(outcomes, 1):
            # If all before are right, it is the last, and nothing is compared once more.
            is_last = number == len(outcomes)
            if is_last or not check_equivalent(model, outcome.model, *args, **side_inputs).ok:
                break
        verdict = f"edit {number} is to blame, {self.edits[number - 1]!r}: {whole.verdict}"
        return dataclasses.replace(whole, verdict=verdict, facts={**whole.facts, "edit": number})

    def to_json(self) -> str:
        """The recipe as JSON text.

        Raises:
            RuleTypeError: An edit holds what has no form in JSON, such as a lambda or arrays.
        """
        return write_edits(self.edits)

    @classmethod
    def from_json(
        cls, text: str, *, mesh: Mesh | AbstractMesh | None = None, allow: Iterable[str] = ()
    ) -> "Recipe":
        """Reads what ``to_json`` wrote, and runs nothing but imports of allowed modules.

        Args:
            text: The text.
            mesh: The mesh for all edits that have one; by default each is made anew.
            allow: Packages or modules whose types and functions may be named, besides those of
                penzai_shard, penzai and jax.

        Raises:
            RuleTypeError: The text is no recipe, names what is not allowed, or has a mesh that
                cannot be made here.
        """
        return cls(*read_edits(text, mesh, allow))

    def __add__(self, other: "Recipe | Edit") -> "Recipe":
        return Recipe(self, other)

    def __len__(self) -> int:
        return len(self.edits)

    def __iter__(self) -> Iterator[Edit]:
        return iter(self.edits)

    def __getitem__(self, index: int | slice) -> Any:
        found = self.edits[index]
        return found if isinstance(found, Edit) else Recipe(*found)

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        rows, plural = [(repr(edit),) for edit in self], "s" * (len(self) != 1)
        shown = Report("Recipe", f"{len(self)} edit{plural}", (Column("edit"),), rows)
        return shown.__treescope_repr__(path, subtree_renderer)

    def __repr__(self) -> str:
        lines = "".join(f"    {edit!r},\n" for edit in self)
        return f"Recipe(\n{lines})" if lines else "Recipe()"


def _text(layer: Any) -> str:
    """A layer by its type, with those in it that it was put around."""
    names = [name for name in type_names(layer) if name not in ("Inserted", "Original")]
    return "(".join(names) + ")" * (len(names) - 1)
