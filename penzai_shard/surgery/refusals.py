"""What stops an edit in the middle of a model, and where."""

from collections.abc import Sequence

from penzai_shard.errors import RuleTypeError
from penzai_shard.surgery.tree_nodes import Keys, keys_text

# Beyond this depth it is the walk that has no room left on Python's stack, and not what it calls.
_DEEP = 150


class EditRefused(RuleTypeError):
    """An edit cannot be carried out at some place of a model.

    Args:
        keys: The keys of the place.
        reason: Why not, and what to do.
        others: What stopped the same edit at other places.

    Attributes:
        lines: The places, and why not at each.
    """

    def __init__(self, keys: Keys, reason: str, others: Sequence["EditRefused"] = ()) -> None:
        self._keys, self._reason = tuple(keys), reason
        self.lines = [f"at {keys_text(keys) or 'the root'}: {reason}"]
        self.lines += [line for other in others for line in other.lines]
        super().__init__(self.lines[0], self.lines[1:])

    def with_others(self, others: Sequence["EditRefused"]) -> "EditRefused":
        """The same, with what happened at other places; its cause is the same too."""
        made = EditRefused(self._keys, self._reason, others)
        made.__cause__ = self.__cause__
        return made

    def below(self, keys: Keys) -> "EditRefused":
        """The same in a tree that holds the one it is about, at these keys."""
        return EditRefused((*keys, *self._keys), self._reason)


def raised(what: str, keys: Keys, error: Exception) -> Exception:
    """The error to raise for one that a function of the user's raised.

    Args:
        what: The function.
        keys: The keys of the node that it was given.
        error: What it raised.

    Returns:
        An ``EditRefused``. The error itself if it is not the function's own.

    >>> str(raised("the predicate is_block", ["layers", 0], KeyError("size")))
    "at layers/0: the predicate is_block raised KeyError: 'size'"
    """
    if isinstance(error, EditRefused) or (isinstance(error, RecursionError) and len(keys) > _DEEP):
        return error
    return EditRefused(keys, f"{what} raised {type(error).__name__}: {error}")
