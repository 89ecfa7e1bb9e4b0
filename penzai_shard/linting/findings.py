"""What a linter says: one thing that is wrong or wasted, and the line that mends it."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias, get_args

from penzai_shard.path_folding import folded_path, folding_key

FindingKind: TypeAlias = Literal[
    "unreadable",
    "unknown",
    "doubled",
    "indivisible",
    "misfit",
    "unnamed",
    "other mesh",
    "uncallable",
    "conflict",
    "contradiction",
    "whole batch",
    "idle constraint",
    "under-sharded",
    "unused",
    "idle mesh axis",
]
"""What can be found, by what it keeps from working: the first are errors once a plan is made."""

KINDS: tuple[FindingKind, ...] = get_args(FindingKind)

MARK = "Fix: "
"""What stands before the fix in the text of a finding."""


@dataclasses.dataclass(frozen=True)
class Change:
    """A line of code that may mend a finding, and what it gives new values to.

    Attributes:
        code: An assignment, such as ``rules = {'embedding': 'data'}``.
        fields: The new values of the fields of a ``LintSubject``, which are what was linted.
        is_meant: Whether it says what was probably meant, such as a name that was misspelt; other
            changes are not preferred to it for wasting less.
    """

    code: str
    fields: Mapping[str, Any]
    is_meant: bool = False


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is probably a mistake or a waste.

    Its ``str`` says all of it, in the form of this library's errors: where, what, and the fix.

    Attributes:
        kind: What is wrong:

            - ``"unreadable"``: rules that are not rules;
            - ``"unknown"``: a rule names a mesh axis that the mesh does not have;
            - ``"doubled"``: two dimensions of one array ask for the same mesh axis;
            - ``"indivisible"``: a length does not divide over the mesh axes of its rule;
            - ``"misfit"``: a layout, or an array's own rules, do not fit otherwise;
            - ``"unnamed"``: an array has no logical axes, so that no rule speaks of it;
            - ``"conflict"``: an activation and a parameter that meet are split over one mesh axis
              in different ways;
            - ``"other mesh"``: a layer lays something out over another mesh;
            - ``"uncallable"``: the model cannot be called with the batch;
            - ``"contradiction"``: a constraint layer undoes what the one before it asks for;
            - ``"whole batch"``: every device computes the whole batch;
            - ``"idle constraint"``: a constraint layer pins nothing of what flows through it;
            - ``"under-sharded"``: a large array is whole over a mesh axis that is free for it;
            - ``"unused"``: a rule whose logical axis nothing has;
            - ``"idle mesh axis"``: a mesh axis that nothing is split over.
        path: Where: an array's path, with ``*`` for the numbers of equal blocks; a layer's; or
            ``rules``, ``layout.parameters``, ``mesh``.
        problem: What is wrong, with sizes and rules, in sentences.
        fix: An assignment to paste after the one of ``rules``, ``layout``, ``mesh`` or ``model``,
            whichever it begins with; empty if no line of code mends it.
        wasted_bytes: What each device holds for nothing, in bytes.
        figures: Figures by name, exact.
        paths: The paths of all arrays, or layers, that it is about.
        about: Which rule, logical axis or mesh axis it is about; a finding is the same as another
            if ``kind``, ``path`` and this are.
        changes: What may mend it, the best first, made when it is asked for; the linter tries them
            out to choose ``fix``, and keeps none.

    >>> print(Finding("idle mesh axis", "mesh", "nothing is split over 'model' (2).", "rules = {}"))
    mesh: nothing is split over 'model' (2). Fix: rules = {}
    """

    kind: FindingKind
    path: str
    problem: str
    fix: str = ""
    wasted_bytes: int = 0
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    paths: tuple[str, ...] = ()
    about: str = ""
    changes: Iterable[Change] = dataclasses.field(default=(), repr=False, compare=False)

    @property
    def count(self) -> int:
        """How many arrays or layers it is about; 1 for a rule or a mesh axis."""
        return max(len(self.paths), 1)

    @property
    def key(self) -> tuple[str, str, str]:
        """What makes it the same finding as another one, of other equal blocks too."""
        return self.kind, folding_key(self.path), self.about

    @property
    def others(self) -> int:
        """How many arrays or layers it is about that ``path`` does not stand for."""
        alike = sum(folding_key(path) == folding_key(self.path) for path in self.paths)
        return self.count - max(alike, 1)

    @property
    def where(self) -> str:
        """The path, with how many it stands for."""
        alike = self.count - self.others
        folded = f"{self.path} ({alike} times)" if "*" in self.path else self.path
        return f"{folded} and {self.others} more" if self.others else folded

    def __str__(self) -> str:
        return f"{self.where or 'the array'}: {self.sentences()}"

    def sentences(self) -> str:
        """What is wrong, and the fix."""
        return f"{self.problem} {MARK}{self.fix}" if self.fix else self.problem


def common_path(paths: tuple[str, ...]) -> str:
    """Where arrays with the same finding are: the path of the first, its equal blocks folded.

    >>> common_path(("block_0/up", "block_1/up"))
    'block_*/up'
    """
    first = folding_key(paths[0])
    return folded_path([path for path in paths if folding_key(path) == first])
