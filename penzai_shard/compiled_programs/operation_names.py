"""The names that JAX and XLA give to the operations of a program: scopes, transformations, merges.

A name is a path: ``jit(step)/transpose(jvp(block))/dot_general`` is an operation of the scope
``block``, made when the operation of the forward pass was transposed. Where XLA merges several
operations into one it joins what differs: ``jit(step)/(a/add:b/mul)``; the compiler for TPUs also
joins whole names: ``jit(step)/a/add;jit(step)/b/mul``.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator

_CALL = re.compile(r"(\w+)\((.*)\)", re.DOTALL)
# What stands in these brackets is the name of a function, not a scope.
_OF_FUNCTIONS = frozenset({"jit", "pjit", "pmap", "xla_call"})
COMPUTED_AGAIN = "rematted_computation"
"""The scope of what the backward pass computes again."""


@dataclasses.dataclass(frozen=True)
class OperationName:
    """The name of one operation, taken apart.

    Attributes:
        scopes: The scopes, functions and primitive of it, the outermost first.
        is_differentiated: Whether it is inside of a function that is differentiated.
        is_transposed: Whether it is of the outermost such function's backward pass.

    >>> name = OperationName.of("jit(step)/transpose(jvp(loss))/block/dot_general")
    >>> name.scopes
    ('jit(step)', 'loss', 'block', 'dot_general')
    >>> name.is_transposed
    True
    """

    scopes: tuple[str, ...]
    is_differentiated: bool
    is_transposed: bool

    @classmethod
    @functools.lru_cache(maxsize=1 << 16)
    def of(cls, name: str) -> "OperationName":
        """Takes a name apart, which is not one of several merged operations."""
        scopes: list[str] = []
        outermost: frozenset[str] | None = None
        for component in _split(name, "/"):
            transformations, inner = _unwrapped(component)
            if outermost is None and transformations & {"jvp", "transpose"}:
                outermost = transformations
            scopes += [scope for scope in inner.split("/") if scope]
        if outermost is None:
            computed_again = COMPUTED_AGAIN in scopes
            return cls(tuple(scopes), computed_again, computed_again)
        return cls(tuple(scopes), True, "transpose" in outermost)


@functools.lru_cache(maxsize=1 << 16)
def merged_names(name: str) -> tuple[str, ...]:
    """The names of the operations that were merged into one; only its own if none were.

    >>> merged_names("jit(f)/(a/add:jvp(b)/(mul:sub))")
    ('jit(f)/a/add', 'jit(f)/jvp(b)/mul', 'jit(f)/jvp(b)/sub')
    >>> merged_names("jit(f)/vmap(a)/add")
    ('jit(f)/vmap(a)/add',)
    >>> merged_names("jit(f)/a/add;jit(f)/mul")
    ('jit(f)/a/add', 'jit(f)/mul')
    """
    whole = tuple(_split(name, ";"))
    if len(whole) > 1:
        return tuple(one for part in whole for one in merged_names(part))
    for component in re.finditer(r"(?:^|/)\(", name):
        start = component.end()
        end = _closing(name, start)
        if end is None:
            continue
        parts = list(_split(name[start:end], ":"))
        if len(parts) > 1:
            return tuple(
                one
                for part in parts
                for one in merged_names(name[: start - 1] + part + name[end + 1 :])
            )
    return (name,)


def _unwrapped(component: str) -> tuple[frozenset[str], str]:
    """The transformations around a scope, and the scope."""
    found: set[str] = set()
    while (call := _CALL.fullmatch(component)) and call[1] not in _OF_FUNCTIONS:
        found.add(call[1])
        component = call[2]
    return frozenset(found), component


def _split(text: str, separator: str) -> Iterator[str]:
    """The parts of a text between separators that are not in brackets."""
    depth, start = 0, 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if character == separator and depth == 0:
            yield text[start:i]
            start = i + 1
    yield text[start:]


def _closing(text: str, start: int) -> int | None:
    """Where the bracket closes that opens just before a position."""
    depth = 1
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    return None
