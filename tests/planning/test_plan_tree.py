"""A plan unfolds as the model does, with its figures to the byte."""

import types

import IPython
import jax
import optax
import pytest
import treescope
from IPython.core.formatters import DisplayFormatter
from penzai import pz

from penzai_shard import (
    TrainState,
    abstract_model,
    data_parallel,
    fully_sharded,
    make_mesh,
    make_plan,
    tensor_parallel,
)
from tests.report_trees.test_treescope_view import page

RULES = data_parallel() | fully_sharded(min_size=32) | tensor_parallel()


def build(blocks):
    def block(i):
        def linear(name, given, made):
            return pz.nn.Linear.from_config(
                f"lm/block_{i}/mlp/{name}", jax.random.key(0), given, made
            )

        return [
            pz.nn.RMSLayerNorm.from_config(
                f"lm/block_{i}/norm", jax.random.key(0), {"embedding": 8}
            ),
            linear("up", {"embedding": 8}, {"neurons": 16}),
            linear("down", {"neurons": 16}, {"embedding": 8}),
        ]

    return pz.nn.Sequential([layer for i in range(blocks) for layer in block(i)])


@pytest.fixture(scope="module")
def plan():
    mesh = make_mesh({"data": 4, "model": 2})
    return make_plan(abstract_model(build, 4), mesh, RULES, on_unnamed="replicate")


def figure(tree, name):
    return next((figure.value for figure in tree.figures if figure.name == name), None)


@pytest.mark.parametrize("collapse", [True, False])
def test_its_sums_are_those_of_the_plan(plan, collapse):
    tree = plan.tree(collapse=collapse)
    assert figure(tree, "per device") == plan.bytes_per_device > 0
    assert figure(tree, "replicated") == plan.replicated_bytes > 0
    assert sum(figure(node, "per device") for node in tree.children) == plan.bytes_per_device
    replicated = next(each for each in tree.figures if each.name == "replicated")
    assert replicated.share == plan.replicated_bytes / plan.bytes_per_device


def test_every_array_is_a_node_with_its_bytes_and_reason(plan):
    nodes = {node.path: node for node in plan.tree(collapse=False).walk()}
    for leaf in plan.leaves:
        node = nodes[leaf.path]
        assert figure(node, "per device") == leaf.bytes_per_device
        assert (figure(node, "replicated") is not None) == leaf.is_replicated
        assert leaf.reason in node.details
        assert str(leaf.dtype) in node.line


def test_equal_blocks_are_one_node_and_scalars_another(plan):
    nodes = {node.path: node for node in plan.tree().walk()}
    assert nodes["lm/block_{0-3}"].count == 4
    assert (
        nodes["lm/block_{0-3}/mlp/up.weights"].line == "embedding=8/data, neurons=16/model  float32"
    )
    assert nodes["(scalars)"].line == "4 arrays"


def test_gradients_of_a_train_state_count_too():
    mesh = make_mesh({"data": 4, "model": 2})
    state = TrainState.initial_state(build(2), optax.adam(1e-3), jax.random.key(0))
    plan = make_plan(state, mesh, RULES, on_unnamed="replicate")
    tree = plan.tree()
    assert figure(tree, "per device") == plan.bytes_per_device
    gradients = next(node for node in tree.children if node.path.startswith("gradients"))
    assert figure(gradients, "per device") == plan.transient_bytes_per_device > 0


def test_a_plan_of_nothing_and_of_one_array_without_a_path_unfold():
    mesh = make_mesh({"data": 4, "model": 2})
    nothing = make_plan({}, mesh, {})
    assert nothing.tree().children == ()
    assert treescope.render_to_text(nothing.tree()).startswith("<ShardingPlan: 0 arrays")
    alone = make_plan(pz.nx.ones({"embedding": 8}), mesh, {"embedding": "data"})
    (node,) = alone.tree().walk()
    assert (node.label, figure(node, "per device")) == ("the root", 8)


def test_treescope_shows_the_tree_and_then_the_table(plan):
    text = treescope.render_to_text({"plan": plan})
    assert "block_{0-3} x 4  per device" in text
    shown = page(plan)
    assert "# Rich HTML representation" in shown.text
    assert any(title.startswith("lm/block_{0-3}\nper device: ") for title in shown.titles)
    assert "<table" in plan._repr_html_()


def test_at_the_end_of_a_cell_a_tree_unfolds_and_without_treescope_it_is_its_lines(
    plan, monkeypatch
):
    formatter = DisplayFormatter()
    tree = plan.tree()
    assert formatter.format(tree)[0] == {"text/plain": str(tree)}
    assert "lm/block_{0-3} x 4  per device" in str(tree)
    shell = types.SimpleNamespace(display_formatter=formatter)
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    treescope.register_as_default(streaming=False, compress_html=False)
    html = formatter.format(tree)[0]["text/html"]
    assert all(text in html for text in ("lm/block_{0-3} x 4", "pzs-bar"))
    assert "<table" in formatter.format(plan)[0]["text/html"]
