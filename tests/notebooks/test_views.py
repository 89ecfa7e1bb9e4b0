"""In a real kernel, plans, rules and reports show a table, with treescope and without it."""

import json
import re

import nbformat
import pytest

from tests.notebooks.stored_notebooks import run

SET_UP = """
import json, sys
import jax, optax, treescope
from penzai import pz
import penzai_shard as pzs


def block(i):
    key = jax.random.key(i)
    sizes = {"embedding": 8}, {"neurons": 16}
    return pz.nn.Sequential([
        pz.nn.Linear.from_config(f"model/block_{i}/mlp/up", key, *sizes),
        pz.nn.Elementwise(jax.nn.relu),
        pz.nn.Linear.from_config(f"model/block_{i}/mlp/down", key, *sizes[::-1]),
    ])


def build(blocks):
    return pz.nn.Sequential([block(i) for i in range(blocks)])


mesh = pzs.make_mesh({"data": 4, "model": 2})
rules = pzs.data_parallel() | pzs.tensor_parallel(axes=("neurons",))
model = pzs.abstract_model(build, 96)
plan = pzs.make_plan(model, mesh, rules)
recipe = pzs.Recipe(
    pzs.insert_after(pz.nn.Linear, pzs.ConstrainShardingByName(mesh, rules)),
    pzs.wrap("sublayers/*/sublayers/1", pzs.Scoped, name="relu"),
)
report = recipe.report(model)
small = build(1)
x = pz.nx.ones({"batch": 4, "embedding": 8})
proof = pzs.check_equivalent(small, pzs.jit_root().apply(small), x)
placed = pzs.place(build(96), mesh, rules)
state = pzs.TrainState.initial_state(placed, optax.adamw(1e-3), jax.random.key(0))
trainer = pzs.StatefulTrainer.build(jax.random.key(0), small, optax.adamw(1e-3), lambda: None)
explained = rules.explain(("batch", "seq"), (8, 5), mesh)
drawn = pzs.show_sharding(plan.leaves[0])
"""

# What is shown, with the start of its verdict and something of its table.
VIEWS = {
    "plan": ("192 arrays, ", "model/block_*/mlp/down.weights"),
    "plan.table()": ("192 arrays, ", "model/block_*/mlp/up.weights"),
    "plan.table(collapse=False)": ("192 arrays, ", "model/block_17/mlp/up.weights"),
    "rules": ("2 rules, to mesh axes data, model", "neurons"),
    "report": ("2 edits of Sequential, 288 places", "sublayers/*/sublayers/*"),
    "proof": ("equivalent", "gradients"),
    "state": (
        "TrainState at step 0, 192 trainable, 0 frozen",
        "opt_state/0/mu/...",
    ),
    "trainer": ("TrainState at step 0, 2 trainable, 0 frozen", "model/block_0/mlp/up.weights"),
    "recipe": ("Recipe of 2 edits", "Scoped"),
    "explained": ("P(", "no rule"),
    "drawn": ("model/block_0/mlp/up.weights: float32[", "1, 3, 5, 7"),
}
# Run in the kernel: how much each view is, and how many calls it takes.
MEASURED = """
def measured(value):
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        shown = value._repr_html_()
    finally:
        sys.setprofile(None)
    return len(shown), calls


print(json.dumps({expression: measured(eval(expression)) for expression in EXPRESSIONS}))
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """The outputs of a notebook by its cells: every view without treescope, and then with it."""
    cells = [
        SET_UP,
        *VIEWS,
        MEASURED.replace("EXPRESSIONS", repr(list(VIEWS))),
        "treescope.display(plan)",
        "treescope.basic_interactive_setup(autovisualize_arrays=True)",
        *(f"{view} # with treescope" for view in VIEWS),
        "{'plan': plan, 'rules': rules, 'report': report}",
        "plan.tree(collapse=False)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    run(notebook, tmp_path_factory.mktemp("views"))
    return {cell.source: cell.outputs for cell in notebook.cells}


def without_tags(text):
    return re.sub(r"<style>.*?</style>|<[^>]*>", "", text)


@pytest.mark.parametrize("ending", ["", " # with treescope"], ids=["bare", "treescope"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_notebook_shows_a_table_with_the_verdict_first(outputs, view, ending):
    (output,) = outputs[view + ending]
    verdict, something = VIEWS[view]
    shown = output.data["text/html"]
    assert without_tags(shown).startswith(verdict)
    assert "<table" in shown
    assert something in without_tags(shown)
    assert "<script" not in shown
    # No private field, and no address of an object.
    assert not re.search(r"\b_numbers|0x[0-9a-f]{6}", shown)
    assert "\x1b" not in output.data["text/plain"]


def test_views_of_96_blocks_are_small_and_take_few_calls(outputs):
    (cell,) = [source for source in outputs if "def measured" in source]
    measured = json.loads(outputs[cell][0].text)
    assert measured.keys() == VIEWS.keys()
    for size, calls in measured.values():
        assert size < 200_000
        assert calls < 300_000  # A tenth of a second's work.


def test_inside_another_value_treescope_shows_verdicts(outputs):
    shown = outputs["{'plan': plan, 'rules': rules, 'report': report}"]
    assert sum(len(output.data["text/html"]) for output in shown) < 200_000
    (last,) = [output for output in shown if output.output_type == "execute_result"]
    assert "2 edits of Sequential, 288 places" in last.data["text/plain"]


@pytest.mark.parametrize("cell", ["treescope.display(plan)", "plan.tree(collapse=False)"])
def test_a_tree_of_96_blocks_unfolds_and_is_small(outputs, cell):
    """Shown by treescope, also where it is not the default renderer."""
    shown = [
        each.data["text/html"] for each in outputs[cell] if "text/html" in each.get("data", {})
    ]
    assert sum(map(len, shown)) < 100_000
    assert any("treescope" in html for html in shown)
