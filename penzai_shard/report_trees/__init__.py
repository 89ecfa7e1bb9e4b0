"""How a report unfolds: a tree of lines with figures, and its view in treescope.

A report gives a ``ReportTree``, most with ``tree_of``, which nests rows by their paths. It is plain
data: ``treescope_part`` draws it, and so may any other view.
"""

from penzai_shard.report_trees.building import TreeRow, tree_of
from penzai_shard.report_trees.nodes import ReportTree, TreeFigure, TreeNode
from penzai_shard.report_trees.readable_text import (
    bytes_text,
    count_text,
    printable,
    quantity_text,
    share_text,
)
from penzai_shard.report_trees.treescope_view import treescope_part

__all__ = [
    "ReportTree",
    "TreeFigure",
    "TreeNode",
    "TreeRow",
    "bytes_text",
    "count_text",
    "printable",
    "quantity_text",
    "share_text",
    "tree_of",
    "treescope_part",
]
