"""Where layouts come from, on a tree of the model."""

import dataclasses

import pytest
import treescope

from penzai_shard import WhyReport, why
from penzai_shard.inspection.sharding_causes.records import ShardingLoss
from tests.inspection.sharding_causes.test_why import BLOCKS, lowered_train_step
from tests.small_train_steps import build_mlp


@pytest.fixture(scope="module")
def report() -> WhyReport:
    return why(lowered_train_step(BLOCKS, build=lambda: build_mlp(3)))


def test_every_row_is_where_its_layer_is_with_its_axes_and_its_causes(report):
    nodes = list(report.tree(collapse=False).walk())
    assert len(report.rows) > 6
    for row in report.rows:
        found = [
            node
            for node in nodes
            if node.path == row.label
            and f"[{row.axes}]" in node.line
            and all(cause.source in node.details[0] for cause in row.causes)
            and all(cause.reason in node.details[0] for cause in row.causes)
        ]
        assert found
        assert any(node.line.startswith(row.kind) or row.path in node.label for node in found)
        assert {node.ok for node in found} == {None}
    paths = [node.path for node in nodes]
    layers = [f"block_{i}/{name}" for i in range(3) for name in ("up", "down")]
    assert [path for path in paths if path in layers] == layers


def test_a_lost_sharding_marks_its_layer_and_all_around_it(report):
    loss = ShardingLoss("data", "batch", "reshape", "block_1/up", "a.py:1", "it mixes", "Do so.")
    rows = tuple(
        dataclasses.replace(row, losses=(loss,)) if row.what == "output of block_1/up" else row
        for row in report.rows
    )
    tree = dataclasses.replace(report, rows=rows).tree()
    bad = [node.path for node in tree.walk() if node.ok is False]
    assert bad == ["block_1", "block_1/up"]
    assert tree.ok is False
    assert [(figure.name, figure.value) for figure in tree.figures] == [("shardings lost", 1)]
    assert "was lost at reshape in layer block_1/up" in treescope.render_to_text(tree)


def test_narrowed_it_says_the_whole_way(report):
    (node,) = (n for n in report.narrowed("block_1/up.weights").tree().walk() if n.details)
    assert "gradient" in node.line
    assert dataclasses.replace(report, rows=()).tree().children == ()
