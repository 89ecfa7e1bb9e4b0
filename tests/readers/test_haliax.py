"""Models of Haliax as their users wrote them: planned, placed, trained and batched by name."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding

import penzai_shard as pzs
from penzai_shard.errors import PlanError, RuleTypeError, ShardingError
from penzai_shard.named_leaves import leaves_of
from tests.readers.haliax_model import (
    BATCH,
    EMBED,
    LAYERS,
    MLP,
    RULES,
    Model,
    eqx,
    hax,
    skip_without_dot_products,
)

# Haliax uses what JAX has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:jax:DeprecationWarning")

partitioning = hax.partitioning


def error_of(model, x, y):
    return hax.mean((model(x) - y) ** 2)


def loss_fn(model, rng, state, x, y):
    loss = error_of(model, x, y)
    return loss, state, {"loss": loss.scalar(), "outputs": hax.mean(model(x), EMBED)}


def is_named(node):
    return isinstance(node, hax.NamedArray)


def arrays(tree):
    """The arrays of a tree by path, as Haliax holds them."""
    return {
        jax.tree_util.keystr(path): node
        for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_named)
        if is_named(node)
    }


@pytest.fixture(scope="module")
def abstract():
    return pzs.abstract_model(Model.init, jax.random.key(0))


@pytest.fixture(scope="module")
def model():
    return jax.jit(Model.init)(jax.random.key(0))


@pytest.fixture(scope="module")
def mesh():
    return pzs.make_mesh({"data": 2, "model": 4})


@pytest.fixture(scope="module")
def batch():
    random = np.random.default_rng(0)
    numbers = {name: random.normal(size=(8, 8)).astype(np.float32) for name in "xy"}
    return {name: hax.NamedArray(jnp.asarray(x), (BATCH, EMBED)) for name, x in numbers.items()}


def test_paths_and_names_are_those_of_the_model(abstract):
    found = {leaf.path: leaf.names for leaf in leaves_of(abstract)}
    assert found == {
        "blocks/stacked/up/weight": ("layers", "mlp", "embed"),
        "blocks/stacked/up/bias": ("layers", "mlp"),
        "blocks/stacked/down/weight": ("layers", "embed", "mlp"),
        "blocks/stacked/down/bias": ("layers", "embed"),
        "norm/weight": ("embed",),
        "norm/bias": ("embed",),
    }


TARGETS = st.one_of(
    st.sampled_from(["data", "model"]),
    st.lists(st.sampled_from(["data", "model"]), min_size=1, max_size=2, unique=True).map(tuple),
)


@settings(max_examples=60)
@given(
    mapping=st.dictionaries(st.sampled_from(["layers", "mlp", "embed", "batch"]), TARGETS),
    sizes=st.sampled_from([(2, 4), (4, 2), (1, 8), (8, 1), (3, 2)]),
)
def test_plans_are_what_haliax_infers_or_refuse_what_jax_would(abstract, mapping, sizes):
    mesh = AbstractMesh(sizes, ("data", "model"))
    refused = {}
    theirs = {}
    for leaf in leaves_of(abstract):
        try:
            spec = partitioning.pspec_for_axis(leaf.names, mapping)
            theirs[leaf.path] = NamedSharding(mesh, spec)
            theirs[leaf.path].shard_shape(leaf.shape)
        except Exception as error:
            refused[leaf.path] = error
    if refused:
        with pytest.raises(PlanError) as caught:
            pzs.make_plan(abstract, mesh, mapping)
        assert {problem.partition(": ")[0] for problem in caught.value.problems} == set(refused)
        return
    plan = pzs.make_plan(abstract, mesh, mapping)
    for leaf in plan.leaves:
        assert leaf.sharding.is_equivalent_to(theirs[leaf.path], len(leaf.shape)), leaf.path


def test_a_plan_is_what_infer_resource_partitions_gives(abstract, mesh):
    mapping = {"mlp": "model", "embed": "data", "layers": ()}
    theirs = partitioning.infer_resource_partitions(
        abstract, mapping, preserve_existing_shardings=False, mesh=mesh
    )
    ours = pzs.make_plan(abstract, mesh, mapping).sharding_tree()
    shapes = arrays(abstract)
    assert theirs.norm.weight.spec == jax.sharding.PartitionSpec("data")
    assert len(arrays(ours)) == 6
    for path, node in arrays(ours).items():
        mine, other = node.array, dict_of(theirs)[path]
        assert mine.is_equivalent_to(other, shapes[path].array.ndim), path


def dict_of(shardings):
    return {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(shardings)
    }


def test_placing_keeps_haliax_arrays_and_their_values(model, mesh):
    placed = pzs.place(model, mesh, RULES)
    assert jax.tree.structure(placed) == jax.tree.structure(model)
    up = placed.blocks.stacked.up.weight
    assert up.axes == (LAYERS, MLP, EMBED)
    assert up.array.sharding.shard_shape(up.array.shape) == (2, 4, 8)
    for path, node in arrays(placed).items():
        assert np.array_equal(node.array, arrays(model)[path].array), path


def test_sharded_init_gives_the_values_of_its_own_init(model, mesh):
    made = pzs.sharded_init(Model.init, jax.random.key(0), mesh=mesh, rules=RULES)
    assert jax.tree.structure(made) == jax.tree.structure(model)
    assert made.blocks.stacked.up.weight.array.sharding.shard_shape((2, 16, 8)) == (2, 4, 8)
    for path, node in arrays(made).items():
        assert np.allclose(node.array, arrays(model)[path].array, rtol=1e-6, atol=0), path


def test_statistics_of_optimizers_are_laid_out_like_their_weights(abstract):
    mesh = AbstractMesh((2, 4), ("data", "model"))
    weights = {"w": abstract.blocks.stacked.up.weight, "b": abstract.norm.bias}
    states = jax.eval_shape(
        lambda w: (optax.adafactor(min_dim_size_to_factor=4).init(w), optax.sm3(1.0).init(w)),
        weights,
    )
    plan = pzs.make_plan(states, mesh, {"mlp": "model", "embed": "data"})
    by_shape = {(leaf.path.split("/")[-1], leaf.shape): leaf for leaf in plan.leaves}
    assert by_shape["w", (2, 8)].names == ("layers", "embed")
    assert by_shape["w", (2, 16)].names == ("layers", "mlp")
    assert {leaf.spec for leaf in plan.leaves if leaf.shape == (16,)} == {
        jax.sharding.PartitionSpec("model")
    }
    assert {leaf.names for leaf in plan.leaves if leaf.shape == (1,)} == {(None,)}


def test_data_that_fits_no_axes_is_refused():
    wrong = jax.tree.map(lambda x: x[:3], hax.ones((EMBED,)))
    with pytest.raises(PlanError, match=r"w: its logical axes \(embed=8\) do not fit its data"):
        pzs.make_plan({"w": wrong}, AbstractMesh((2,), ("data",)), {})
    with pytest.raises(
        ShardingError, match=r"w: its logical axes \(embed=8\) do not fit its data of shape \(3"
    ):
        pzs.TrainState.initial_state({"w": wrong}, optax.sgd(1.0), jax.random.key(0))


def haliax_losses(model, batch, mesh, steps):
    """Losses, outputs of the first and the model after the last of Haliax's own steps."""
    optimizer = optax.adam(1e-2)

    @hax.named_jit(axis_resources=RULES)
    def step(model, state, x, y):
        def error(model):
            return error_of(model, x, y).scalar(), hax.mean(model(x), EMBED)

        found, grads = eqx.filter_value_and_grad(error, has_aux=True)(model)
        updates, state = optimizer.update(grads, state)
        return eqx.apply_updates(model, updates), state, found

    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    found = []
    with partitioning.set_mesh(mesh):
        for _ in range(steps):
            model, state, both = step(model, state, **batch)
            found.append(both)
    return [float(loss) for loss, _ in found], found[0][1], model


@pytest.fixture(scope="module")
def theirs(model, batch, mesh):
    skip_without_dot_products()
    return haliax_losses(model, batch, mesh, 3)


def trained(model_init, batch, mesh, **options):
    layout = pzs.Layout(parameters=RULES, compute=RULES, blocks=())
    state, step = layout.build(
        model_init,
        jax.random.key(0),
        mesh=mesh,
        loss_fn=loss_fn,
        optimizer=optax.adam(1e-2),
        rng=jax.random.key(1),
        **options,
    )
    auxes = []
    for _ in range(3):
        state, aux = step(state, **layout.shard_batch(batch, mesh))
        auxes.append(aux)
    return state, auxes


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_steps": 2}, {"manual_axes": ("data",)}],
    ids=["whole", "microbatches", "per device"],
)
def test_losses_are_those_of_haliaxs_own_steps(theirs, batch, mesh, options):
    """Also where the batch is split along the axis of a Haliax array and put together again."""
    losses, outputs, model = theirs
    state, auxes = trained(Model.init, batch, mesh, **options)
    assert [float(aux["loss"]) for aux in auxes] == pytest.approx(losses, rel=1e-5)
    ours = pzs.strip(state.model)
    assert jax.tree.structure(ours) == jax.tree.structure(model)
    weight = ours.blocks.stacked.up.weight.array
    assert weight.sharding.shard_shape(weight.shape) == (2, 4, 8)
    for path, node in arrays(ours).items():
        assert np.allclose(node.array, arrays(model)[path].array, atol=1e-5), path
    # The examples have the order of the batch.
    assert auxes[0]["outputs"].axes == (BATCH,)
    assert np.allclose(auxes[0]["outputs"].array, outputs.array, atol=1e-5)


def constraints_of(function, *args):
    """The specs of all constraints that a function makes, with the mesh axes of each dimension."""
    found = []

    def look(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "sharding_constraint":
                found.append((eqn.outvars[0].aval.shape, tuple(eqn.params["sharding"].spec)))
            for inner in jax.tree.leaves(
                list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
            ):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    look(inner)

    look(jax.make_jaxpr(function)(*args).jaxpr)
    return found


def test_a_layouts_compute_is_in_force_in_haliaxs_own_constraints(model, batch, mesh):
    skip_without_dot_products()
    layout = pzs.Layout(parameters={}, compute=RULES, blocks=())

    def computed(loss_fn):
        return lambda model, x, y: loss_fn(model=model, rng=None, state=None, x=x, y=y)

    arguments = model, batch["x"], batch["y"]
    bare = constraints_of(computed(loss_fn), *arguments)
    pinned = constraints_of(computed(layout.computing(loss_fn, mesh)), *arguments)
    assert bare == []
    assert {spec for shape, spec in pinned if shape == (8, 16)} == {("data", "model")}
    assert {spec[0] for shape, spec in pinned if shape == (8, 8)} == {"data"}
    assert partitioning.current_thread_local_mapping() is None


def test_a_compute_that_haliax_cannot_follow_is_refused(model, batch, mesh):
    arguments = {"model": model, "rng": None, "state": None, **batch}

    def computing(compute):
        return pzs.Layout(parameters={}, compute=compute, blocks=()).computing(loss_fn, mesh)

    with pytest.raises(RuleTypeError, match=r"'mlp' -> None: 'mlp' has the rule 'mlp' -> 'model' "):
        computing([("mlp", "model"), ("mlp", None)])(**arguments)
    with pytest.raises(RuleTypeError, match=r"Haliax has only rules for names. Leave it out of co"):
        computing(pzs.fully_sharded())(**arguments)
    with (
        partitioning.axis_mapping({"mlp": "data"}),
        pytest.raises(RuleTypeError, match=r"another mapping, {'mlp': 'data'}, .*{'mlp': 'model'}"),
    ):
        computing({"mlp": "model"})(**arguments)


def test_batches_of_haliax_arrays_are_laid_out_by_name(batch, mesh):
    for local in (False, True):
        placed = pzs.shard_batch(batch, mesh, RULES, local=local)
        assert placed["x"].axes == (BATCH, EMBED)
        assert placed["x"].array.sharding.shard_shape((8, 8)) == (4, 8)
        assert np.array_equal(placed["y"].array, batch["y"].array)


def test_microbatches_that_do_not_divide_are_refused_by_name(batch):
    state = pzs.TrainState.initial_state({"w": hax.ones(EMBED)}, optax.sgd(0.1), jax.random.key(0))
    step = pzs.build_train_step_fn(
        lambda model, rng, state, x: (hax.mean(model["w"] * x), state, {}), accumulate_steps=3
    )
    with pytest.raises(ShardingError, match=r"input x: logical axis 'batch' \(8\) does not divide"):
        step(state, x=batch["x"])
    with pytest.raises(ShardingError, match=r"x: its logical axes are \('embed',\)"):
        step(state, x=hax.NamedArray(jnp.ones(8), EMBED))


def test_a_loss_with_axes_is_refused_and_a_scalar_of_haliax_is_a_loss():
    state = pzs.TrainState.initial_state({"w": hax.ones(EMBED)}, optax.sgd(0.1), jax.random.key(0))
    step = pzs.build_train_step_fn(lambda model, rng, state: (model["w"], state, {}))
    with pytest.raises(ShardingError, match=r"the loss has logical axes \(embed=8\); it must be a"):
        step(state)
    step = pzs.build_eval_step_fn(lambda model, rng, state: (hax.sum(model["w"]), state, {}))
    assert float(step(state)[0]) == 8.0


def test_constraints_by_name_pin_haliax_arrays(batch, mesh):
    constrain = pzs.ConstrainShardingByName(mesh, {"embed": "model"})
    pinned = jax.jit(lambda x: constrain(x + 1.0))(batch["x"])
    assert pinned.axes == (BATCH, EMBED)
    assert pinned.array.sharding.shard_shape((8, 8)) == (8, 2)
    with pytest.raises(PlanError, match=r"'embed' \(6\) does not divide over mesh axis 'model'"):
        constrain(hax.NamedArray(np.ones((8, 6)), (BATCH, EMBED.resize(6))))


def test_names_that_a_field_declares_are_not_dropped(mesh):
    class Scaled(eqx.Module):
        inner: hax.nn.LayerNorm
        scale: jax.Array = hax.field(axis_names=("embed",))

    class Outer(eqx.Module):
        parts: list

    made = Outer([Scaled(hax.nn.LayerNorm.init(EMBED), jnp.ones(8))])
    for options in ({}, {"on_unnamed": "replicate"}):
        with pytest.raises(
            PlanError,
            match=r"parts/0/scale: the axis names \('embed',\) that its field declares are not "
            r"read. .* name_axes\(module, {'parts/0/scale': \('embed',\)}\)",
        ):
            pzs.make_plan(made, mesh, {"embed": "model"}, **options)
    named = pzs.name_axes(made, {"parts/0/scale": ("embed",)})
    specs = {leaf.spec for leaf in pzs.make_plan(named, mesh, {"embed": "model"}).leaves}
    assert specs == {jax.sharding.PartitionSpec("model")}


def test_the_text_of_the_documentation_runs(capsys, monkeypatch):
    skip_without_dot_products()
    monkeypatch.setenv("XLA_FLAGS", "")  # Put back afterwards.
    page = (Path(__file__).parents[2] / "docs" / "models_from_elsewhere.md").read_text("utf-8")
    section = page.split("## Haliax")[1].partition("\n## ")[0]
    [script] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    exec(compile(script, "models_from_elsewhere.md", "exec"), {"__name__": "page"})
    shown = capsys.readouterr().out
    assert "layers=4, mlp=64/model, embed=16" in shown
    losses = [float(line.split()[1]) for line in shown.splitlines() if line.startswith("loss")]
    assert losses[2] < losses[1] < losses[0]
