"""A list of edits as one value: declared once, applied to any model, counted, shown, taken back."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, overload

from jax.sharding import AbstractMesh, Mesh

from penzai_shard.errors import RuleTypeError, SelectionError, raise_all
from penzai_shard.report_trees import count_text
from penzai_shard.surgery.edit_report import EditReport, EditRow, RecipeTable
from penzai_shard.surgery.edits import Edit, Outcome
from penzai_shard.surgery.recipe_json import edits_from_json, edits_to_json
from penzai_shard.surgery.refusals import EditRefused
from penzai_shard.text_tables import NotebookView


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Recipe(NotebookView):
    """Edits that are applied to a model in order, each seeing the result of those before.

    A recipe holds no model and changes none: ``apply`` gives a new one, which shares with the
    old one every part that no edit touched, and every ``Parameter``. Layers and parameters that
    were shared between places stay shared where the places were edited alike.

    Args:
        *edits: Edits made with ``wrap``, ``insert_before``, ``insert_after`` and ``replace``, or
            recipes, whose edits are taken over.

    Raises:
        RuleTypeError: Something else was given.

    >>> from penzai import pz
    >>> from penzai_shard.layers import Jitted
    >>> from penzai_shard.surgery import ROOT, insert_after, strip, wrap
    >>> recipe = Recipe(insert_after(pz.nn.Linear, pz.nn.Identity(), expect=1), wrap(ROOT, Jitted))
    >>> recipe
    Recipe(
        insert_after('pz.nn:Linear', pz.nn.Identity(), expect=1),
        wrap(ROOT, Jitted),
    )
    >>> linear = pz.nn.Linear.from_config("linear", None, {"a": 2}, {"b": 3})
    >>> model = pz.nn.Sequential([linear])
    >>> edited = recipe.apply(model)
    >>> [type(layer).__name__ for layer in edited.body.sublayers]
    ['Linear', 'Inserted']
    >>> strip(edited) == model
    True
    """

    edits: tuple[Edit, ...]

    def __init__(self, *edits: "Edit | Recipe") -> None:
        taken: list[Edit] = []
        problems: list[str] = []
        for position, edit in enumerate(edits):
            if isinstance(edit, Recipe):
                taken += edit.edits
            elif isinstance(edit, Edit):
                taken.append(edit)
            else:
                is_list = isinstance(edit, list | tuple) and edit
                problems.append(
                    f"argument {position + 1} is a {type(edit).__name__} of edits. Unpack it: "
                    "Recipe(*edits)."
                    if is_list and all(isinstance(each, Edit | Recipe) for each in edit)
                    else f"argument {position + 1} is {edit!r}. Make edits with wrap, "
                    "insert_before, insert_after or replace."
                )
        raise_all(RuleTypeError, "a recipe is made of edits:", problems)
        object.__setattr__(self, "edits", tuple(taken))

    def __add__(self, other: "Recipe | Edit") -> "Recipe":
        """The edits of this recipe, and then those of the other, or the edit."""
        return Recipe(self, other) if isinstance(other, Recipe | Edit) else NotImplemented

    def __len__(self) -> int:
        return len(self.edits)

    def __iter__(self) -> Iterator[Edit]:
        return iter(self.edits)

    @overload
    def __getitem__(self, index: int) -> Edit: ...
    @overload
    def __getitem__(self, index: slice) -> "Recipe": ...
    def __getitem__(self, index: int | slice) -> "Edit | Recipe":
        """One edit, or a recipe of some of them."""
        found = self.edits[index]
        return found if isinstance(found, Edit) else Recipe(*found)

    def __repr__(self) -> str:
        if len(self.edits) < 2:
            return f"Recipe({', '.join(map(repr, self.edits))})"
        return "Recipe(\n" + "".join(f"    {edit!r},\n" for edit in self.edits) + ")"

    def notebook_table(self) -> RecipeTable:
        """The edits as a table."""
        rows = tuple(edit.cells for edit in self.edits)
        return RecipeTable(rows, f"Recipe of {count_text(len(rows), 'edit')}")

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        """The text of ``repr`` inside of other values, with an edit a line."""
        from treescope import rendering_parts

        return rendering_parts.build_foldable_tree_node_from_children(
            prefix=rendering_parts.text("Recipe("),
            children=[rendering_parts.text(" ".join(repr(e).split())) for e in self.edits],
            suffix=rendering_parts.text(")"),
            path=path,
            comma_separated=True,
        )

    def apply(self, model: Any) -> Any:
        """Applies the edits.

        Args:
            model: A Penzai model, or any tree of layers: pytree dataclasses, dictionaries, lists.
                It stays as it is.

        Returns:
            The edited model.

        Raises:
            SelectionError: Some edit matched nothing, or not the number of places that it
                expects; all such edits are reported, with the nearest types or paths of the model.
            RuleTypeError: A function of an edit raised, returned something that is not a layer, or
                dropped the layer that it was to wrap; or JAX cannot take such a model.
        """
        problems: list[str] = []
        edited = model
        for outcome in self._outcomes(model, problems):
            edited = outcome.model
        raise_all(SelectionError, f"this recipe does not fit the {type(model).__name__}:", problems)
        return edited

    def _outcomes(self, model: Any, problems: list[str], record: bool = False) -> Iterator[Outcome]:
        """What each edit does to what those before left; what does not fit is added to problems."""
        edited = model
        for number, edit in enumerate(self.edits, 1):
            try:
                outcome = edit.run(edited, record)
            except EditRefused as error:
                raise RuleTypeError(
                    f"this recipe cannot be applied to the {type(model).__name__}:",
                    [*problems, *(f"edit {number}, {edit!r}, {line}" for line in error.lines)],
                ) from error.__cause__
            edited = outcome.model
            if outcome.problem:
                problems.append(f"edit {number}, {outcome.problem}")
            yield outcome

    def report(self, model: Any) -> EditReport:
        """Says what the edits would do to a model.

        Args:
            model: The model; it stays as it is.

        Returns:
            A table with the places of each edit, what stood at each before and what stands at
            each after. Edits that do not fit are reported in it, and are not an error.

        Raises:
            RuleTypeError: As in ``apply``.
        """
        rows = [
            EditRow(
                edit=repr(edit),
                title=edit.title,
                count=outcome.count,
                paths=tuple(match.path_text for match in outcome.matches),
                before=tuple(match.before for match in outcome.matches),
                after=tuple(match.after for match in outcome.matches),
                problem=outcome.problem,
            )
            for edit, outcome in zip(self.edits, self._outcomes(model, [], True), strict=True)
        ]
        return EditReport(tuple(rows), type(model).__name__)

    def to_json(self) -> str:
        """The recipe as JSON text, for ``from_json``.

        Returns:
            The text. Meshes are written as axis sizes; types and functions by name.

        Raises:
            RuleTypeError: An edit holds what cannot be written: a lambda, a function defined in
                another, arrays. All such are reported.

        >>> from penzai_shard.layers import Jitted
        >>> from penzai_shard.surgery import ROOT, wrap
        >>> recipe = Recipe(wrap(ROOT, Jitted))
        >>> Recipe.from_json(recipe.to_json()) == recipe
        True
        """
        return edits_to_json(self.edits)

    @classmethod
    def from_json(
        cls,
        text: str,
        *,
        mesh: Mesh | AbstractMesh | None = None,
        allow: Iterable[str] = (),
    ) -> "Recipe":
        """Reads what ``to_json`` wrote.

        Nothing is run but the import of the modules that the text names, and those are of
        penzai_shard, penzai and jax. Functions that it may name are those that are defined there:
        in ``penzai_shard.layers``, ``penzai_shard.surgery`` and penzai what is called with a layer,
        and in jax the values of options and fields, such as policies. All else is refused until it
        is allowed, and private names always are. Applying a recipe calls what it names.

        Args:
            text: The text.
            mesh: The mesh to use wherever the recipe has one; by default each is made anew from
                its axis sizes. Its mesh axes must have the same names.
            allow: Names of further packages or modules whose types and functions may be used;
                they are imported.

        Returns:
            The recipe.

        Raises:
            RuleTypeError: The text is not a recipe, or names what cannot be imported or is not
                allowed; all such are reported, with the ``allow=`` to add.
            MeshError: A mesh cannot be made on this machine, or the one given lacks a mesh axis.

        >>> Recipe.from_json('{"format": "penzai_shard recipe", "version": 1, "edits": ['
        ...     '{"edit": "wrap", "where": {"root": true}, "what": {"$ref": "os:system"}}]}')
        Traceback (most recent call last):
        penzai_shard.errors.RuleTypeError: this recipe cannot be read. If you trust all that it
        names: Recipe.from_json(text, allow=('os',)):
          edit 1: 'os:system' needs the module 'os', which is not one of those that a recipe may
          use unasked. If you trust it, give allow=('os',).
        """
        return cls(*edits_from_json(text, mesh, allow))
