"""Counts the code lines of each room, and fails where a room is more than 5 % over its budget.

Code lines are lines that are no docstring, comment or blank. A room is a folder of the package;
the modules directly in the package are the room ``root``.
"""

import ast
import io
import pathlib
import sys
import tokenize
from collections import Counter

BUDGETS = {
    "root": 735,
    "jax_internals": 180,
    "reports": 480,
    "readers": 385,
    "arrays": 500,
    "planning": 562,
    "placement": 581,
    "propagation": 700,
    "processes": 273,
    "layers": 1543,
    "surgery": 1447,
    "training": 1115,
    "fitting": 484,
    "layouts": 690,
    "checkpoints": 1935,
    "pretrained": 815,
    "inspection": 2205,
    "causes": 640,
    "findings": 635,
    "views": 360,
    "naming": 1134,
    "choosing": 1927,
    "cli": 425,
}
# Without the tolerance of rooms.
PACKAGE_BUDGET, TESTS_BUDGET, MODULES_BUDGET = 20_000, 18_000, 155
TOLERANCE = 1.05
MOST_FUNCTION_LINES, MOST_FILE_LINES, MOST_MODULES = 60, 500, 18

_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def read_code(path: pathlib.Path) -> tuple[ast.Module, set[int]]:
    """A file's syntax tree, and the numbers of its lines that hold code."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | _Function) and ast.get_docstring(node):
            lines -= _span(node.body[0])
    return tree, lines


def _span(node: ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def main(root: pathlib.Path) -> int:
    """Prints each room against its budget, then what is large; the exit status."""
    rooms: Counter[str] = Counter()
    modules: Counter[pathlib.Path] = Counter()
    large: list[str] = []
    for path in sorted((root / "penzai_shard").rglob("*.py")):
        name = path.relative_to(root)
        tree, lines = read_code(path)
        rooms[name.parts[1] if len(name.parts) > 2 else "root"] += len(lines)
        modules[name.parent] += path.name != "__init__.py"
        if len(lines) > MOST_FILE_LINES:
            large.append(f"{name}: {len(lines)} lines")
        for node in ast.walk(tree):
            if isinstance(node, _Function) and len(lines & _span(node)) > MOST_FUNCTION_LINES:
                large.append(f"{name}: {node.name} has {len(lines & _span(node))} lines")
    large += [f"{folder}: {n} modules" for folder, n in modules.items() if n > MOST_MODULES]
    tests = sum(len(read_code(path)[1]) for path in (root / "tests").rglob("*.py"))

    # A room that the table does not name has no lines.
    rows = [(room, rooms[room], BUDGETS.get(room, 0), TOLERANCE) for room in BUDGETS | rooms]
    rows += [("package", rooms.total(), PACKAGE_BUDGET, 1), ("tests", tests, TESTS_BUDGET, 1)]
    rows += [("modules", modules.total(), MODULES_BUDGET, 1)]
    for room, count, budget, tolerance in rows:
        mark = "  over budget" if count > budget * tolerance else ""
        print(f"{room:14}{count:7,} of {budget:6,}{mark}")
    print(*large, sep="\n")
    return int(any(count > budget * tolerance for _, count, budget, tolerance in rows))


if __name__ == "__main__":
    repository = pathlib.Path(__file__).parents[1]
    sys.exit(main(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else repository))
