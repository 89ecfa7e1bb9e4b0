"""Rules and layouts as text: the expressions that their ``repr`` gives, read without running them.

``data_parallel() | fully_sharded(min_size=1024)`` is read by names that are known and by literals
alone; nothing else of Python is in the language.
"""

import ast
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from penzai_shard.axis_rules import AxisRules
from penzai_shard.errors import RuleTypeError
from penzai_shard.rule_kinds import nearest_name
from penzai_shard.rule_presets import data_parallel, fully_sharded, tensor_parallel

RULES: dict[str, Callable[..., AxisRules]] = {
    "AxisRules": AxisRules,
    "data_parallel": data_parallel,
    "fully_sharded": fully_sharded,
    "tensor_parallel": tensor_parallel,
}
"""What rules are made with, by name."""

_EXAMPLE = "Write for instance data_parallel() | tensor_parallel() | fully_sharded(min_size=1024)."


def read_rules_expression(text: str) -> AxisRules:
    """Reads rules as code has them; brackets without anything in them may be left out.

    Args:
        text: Names of ``RULES`` with literals, combined by ``|`` or, as shells like it, by ``+``.

    Raises:
        RuleTypeError: The text says something else.

    >>> read_rules_expression("data_parallel | fully_sharded('model', min_size=8)")
    AxisRules({'batch': 'data'}) | fully_sharded('model', min_size=8)
    """
    rules: AxisRules | None = None
    for part in _parts(_parsed(text, _EXAMPLE), text):
        made = read_call(part, text, RULES, _EXAMPLE)
        rules = made if rules is None else rules | made
    assert rules is not None
    return rules


def read_call(
    node: ast.expr | str, text: str, known: Mapping[str, Callable[..., Any]], example: str
) -> Any:
    """Calls a function of a table as a text says.

    Args:
        node: The text, or what was parsed of it: a name, or a call with literals.
        text: The whole text, for messages.
        known: The functions.
        example: A sentence with an example.

    Raises:
        RuleTypeError: There is no such function, or it does not take these arguments.

    >>> read_call("max([2, 3])", "max([2, 3])", {"max": max}, "")
    3
    """
    if isinstance(node, str):
        node = _parsed(node, example)
    function = node.func if isinstance(node, ast.Call) else node
    if isinstance(function, ast.Attribute):
        # As code has it: pzs.fully_sharded(), Layout.fully_sharded().
        function = ast.Name(function.attr)
    if not isinstance(function, ast.Name):
        raise RuleTypeError(f"cannot read {text!r} as names and literals. {example}")
    name = function.id
    if name not in known:
        near = nearest_name(name, known) or nearest_name(name.lower(), known)
        fix = f"Did you mean {near}?" if near else f"There are {', '.join(known)}."
        raise RuleTypeError(f"there is no {name!r}, in {text!r}. {fix}")
    args, kwargs = _literals(node, text, example)
    try:
        return known[name](*args, **kwargs)
    except RuleTypeError:
        raise
    except TypeError as error:
        # Python guesses since 3.13 which name was meant.
        said = str(error).partition(". Did you mean")[0]
        raise RuleTypeError(f"{text!r}: {said}.{_taken(known[name], kwargs)}") from error


def _taken(function: Callable[..., Any], given: Collection[str]) -> str:
    """What a function takes by name, where something else was given.

    >>> _taken(lambda mesh_axis, axes=(): None, {"axis": 0})
    ' It takes mesh_axis, axes.'
    """
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters = inspect.signature(function).parameters.values()
    names = [each.name for each in parameters if each.kind in kinds]
    return f" It takes {', '.join(names)}." if set(given) - set(names) else ""


def _parsed(text: str, example: str) -> ast.expr:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise RuleTypeError(f"cannot read {text!r} as names and literals. {example}") from error


def _parts(node: ast.expr, text: str) -> list[ast.expr]:
    if not isinstance(node, ast.BinOp):
        return [node]
    if not isinstance(node.op, ast.BitOr | ast.Add):
        raise RuleTypeError(f"rules are combined by |, not as in {text!r}. {_EXAMPLE}")
    return [*_parts(node.left, text), *_parts(node.right, text)]


def _literals(node: ast.expr, text: str, example: str) -> tuple[list[Any], dict[str, Any]]:
    if not isinstance(node, ast.Call):
        return [], {}
    try:
        keywords = {str(each.arg): ast.literal_eval(each.value) for each in node.keywords}
        return [ast.literal_eval(each) for each in node.args], keywords
    except ValueError as error:
        raise RuleTypeError(
            f"{text!r}: arguments are literals, such as 'data', 1024 or ('neurons', 'heads'). "
            f"{example}"
        ) from error
