"""Layouts in files: what is written is read as the same, and mistakes are named."""

import pytest

import penzai_shard as pzs
from penzai_shard.layouts.layout import Layout
from tests.refusals import problem_paths

LAYOUTS = [
    Layout.data_parallel(),
    Layout.zero1(min_size=3),
    Layout.fully_sharded(unnamed="largest", reshard_after_forward=True),
    Layout.tensor_parallel(experts="expert", names={"neurons": ("mlp", "ff"), "heads": None}),
    Layout.sequence_parallel(vocabulary=None, precision="bfloat16", rematerialise="dots"),
    Layout.two_dimensional(blocks=()),
    Layout.hybrid(manual=True, blocks="**/block"),
    Layout(parameters=None, compute={"batch": ("a", "b"), "x": None}),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written_is_read(layout, tmp_path):
    path = tmp_path / "layout.toml"
    layout.to_toml(path)
    assert Layout.from_toml(path) == layout
    layout.to_toml(path, mesh_shape={"data": 8}, microbatches=2)
    found = Layout.read_toml(path)
    assert (found.layout, found.mesh_shape, found.microbatches) == (layout, {"data": 8}, 2)


def read(text, tmp_path):
    path = tmp_path / "layout.toml"
    path.write_text(text)
    return Layout.from_toml(path)


def test_what_people_write_is_read(tmp_path):
    text = 'layout = "two_dimensional"\nprecision = "bfloat16"\n[options]\nmin_size = 8'
    assert read(text, tmp_path) == Layout.two_dimensional(min_size=8, precision="bfloat16")
    text = '[parameters]\nembed = "data"\nmlp = ["x", "y"]\n[names]\nheads = []'
    rules = {"embed": "data", "mlp": ("x", "y")}
    expected = Layout(parameters=rules, compute={"batch": "data"}, names={"heads": None})
    assert read(text, tmp_path) == expected


@pytest.mark.parametrize(
    ("text", "fixes"),
    [
        ('layot = "zero1"', ["'layout'", "layout ="]),
        ('layout = "fsdp"\noptions = 3', ["options =", "fully_sharded"]),
        ('layout = "zero1"\noptions = { min_sise = 3 }', ["'min_size'"]),
        ('layout = "zero1"\nparameters = { a = "data" }', ["layout ="]),
        ('parameters = [{ logical = "x" }]', ["'logical_axis'"]),
        ("parameters = { a = 3 }", ["for instance"]),
        ('layout = "zero1"\nprecision = "fp8"\nnames = { neuron = "x" }', ["'neurons'", "'bf"]),
        ("=", ["TOML"]),
    ],
)
def test_mistakes_of_a_file_are_named(text, fixes, tmp_path):
    with pytest.raises(pzs.RuleTypeError) as caught:
        read(text, tmp_path)
    found = [problem.fix for problem in caught.value.problems]
    assert all(fix in given for fix, given in zip(fixes, found, strict=True))
    assert "layout.toml" in str(caught.value)


def test_what_has_no_form_in_toml_is_refused(tmp_path):
    write = Layout.zero1(blocks=dict).to_toml
    assert problem_paths(pzs.RuleTypeError, write, tmp_path / "layout.toml") == ["blocks"]


def test_a_file_that_is_missing_is_refused(tmp_path):
    assert problem_paths(pzs.RuleTypeError, Layout.from_toml, tmp_path / "none.toml") == [""]
