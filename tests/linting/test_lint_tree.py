"""Findings unfold where their arrays are, and add up to what is wasted."""

import jax
import treescope
from jax.sharding import AbstractMesh
from penzai import pz

from penzai_shard import abstract_model
from penzai_shard.linting.findings import Finding
from penzai_shard.linting.lint_report import LintReport
from penzai_shard.linting.linting import lint

MESH = AbstractMesh((4, 2), ("data", "model"))


def build():
    def linear(name, given, made):
        return pz.nn.Linear.from_config(name, jax.random.key(0), given, made)

    layers = []
    for i in range(3):
        layers += [
            linear(f"lm/block_{i}/up", {"embedding": 64}, {"neurons": 64}),
            linear(f"lm/block_{i}/down", {"hidden": 64}, {"heads": 64}),
        ]
    return pz.nn.Sequential(layers)


def total(node, name):
    return next((figure.value for figure in node.figures if figure.name == name), 0)


def test_every_finding_is_where_its_arrays_are_with_its_fix():
    rules = {"embedding": "data", "neurons": "model", "embeding": None}
    report = lint(abstract_model(build), MESH, rules, min_bytes=1024)
    assert report.wasted_bytes > 0
    for collapse in (True, False):
        tree = report.tree(collapse=collapse)
        assert tree.ok is False
        assert total(tree, "wasted") == report.wasted_bytes
    nodes = {node.path: node for node in report.tree(collapse=False).walk()}
    for finding in report.findings:
        for path in finding.paths or (finding.path,):
            assert finding.problem in nodes[path].details
            assert f"Fix: {finding.fix}" in nodes[path].details
            assert nodes[path].ok is False
    text = treescope.render_to_text({"found": report})
    assert "<LintReport: " in text
    assert "lm/block_{0-2}" in text


def test_an_array_over_two_free_mesh_axes_is_wasted_once():
    paths = ("a/w", "b/w", "c/w")
    findings = (
        Finding("under-sharded", "*/w", "over 'data'", wasted_bytes=31, paths=paths),
        Finding("under-sharded", "*/w", "over 'model'", wasted_bytes=16, paths=paths),
        Finding("idle mesh axis", "mesh", "nothing is split over 'x'."),
    )
    report = LintReport(findings, MESH, 3)
    tree = report.tree()
    assert total(tree, "wasted") == report.wasted_bytes == 31
    assert [node.label for node in tree.children] == ["a/w", "b/w", "c/w", "mesh"]
    assert tree.children[0].details == ("over 'data'", "over 'model'")


def test_nothing_found_is_a_good_verdict_alone():
    tree = LintReport((), MESH, 5).tree()
    assert (tree.ok, tree.children) == (True, ())
    assert treescope.render_to_text(tree).startswith("<LintReport: nothing found: 5 arrays")
