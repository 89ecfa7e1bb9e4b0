"""Plans of Flax linen's train states, judged by Flax's own helpers under the same rules."""

from pathlib import Path

import flax.linen as nn
import hypothesis
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import struct
from flax.training.train_state import TrainState
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, PartitionSpec
from jax.sharding import PartitionSpec as P

from penzai_shard.axis_rules import AxisRules
from penzai_shard.errors import MeshError, PlanError, RuleTypeError
from penzai_shard.partition_specs import canonical_spec, mesh_axes_by_dimension
from penzai_shard.planning import make_plan
from penzai_shard.rule_presets import fully_sharded

MESH = AbstractMesh((2, 4), ("data", "model"))


class Block(nn.Module):
    """Two matrices, as in Flax's guide, and a bias."""

    @nn.compact
    def __call__(self, x, _=None):
        width = x.shape[-1]
        normal, zeros = nn.initializers.normal(), nn.initializers.zeros
        up = nn.Dense(
            2 * width,
            kernel_init=nn.with_logical_partitioning(normal, ("embed", "hidden")),
            bias_init=nn.with_logical_partitioning(zeros, ("hidden",)),
        )
        down = nn.with_logical_partitioning(normal, ("hidden", "embed"))
        return x + nn.relu(up(x)) @ self.param("down", down, (2 * width, width)), None


class Unrolled(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x, _ = Block()(x)
        return x


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            Block,
            length=4,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return layers()(x)[0]


class Tied(nn.Module):
    @nn.compact
    def __call__(self, x):
        table = nn.with_logical_partitioning(nn.initializers.normal(), ("vocabulary", "embed"))
        embed = nn.Embed(16, x.shape[-1], embedding_init=table)
        return embed.attend(Block()(x + embed(jnp.arange(8)))[0])


def abstract_state(module):
    def init(key, x):
        params = module.init(key, x)["params"]
        return TrainState.create(apply_fn=module.apply, params=params, tx=optax.adam(1e-3))

    return jax.eval_shape(init, jax.random.key(0), jnp.ones((8, 8)))


STATES = {module: abstract_state(module()) for module in (Unrolled, Scanned, Tied)}


def canonical(spec):
    return canonical_spec(mesh_axes_by_dimension(spec, len(spec)))


def specs_of_flax(tree, rules):
    """What Flax's guide does: specs of names, then rules for the names."""
    shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(tree), MESH, rules)
    return [canonical(sharding.spec) for sharding in jax.tree.leaves(shardings)]


def specs_of(tree, rules, **options):
    shardings = make_plan(tree, MESH, rules, **options).sharding_tree()
    return [sharding.spec for sharding in jax.tree.leaves(shardings)]


FORMS = {
    "pairs": (("embed", "data"), ("hidden", "model"), ("vocabulary", None)),
    "both": (("hidden", ("model", "data")), ("embed", None)),
    "layers": (("layers", "data"), ("hidden", "model")),
    "fallbacks": (
        ("vocabulary", "model"),
        ("hidden", "model"),
        ("embed", "model"),
        ("embed", "data"),
        ("embed", None),
    ),
    "nothing": (("heads", "model"),),
}


@pytest.mark.parametrize("rules", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("module", STATES)
def test_a_train_state_is_laid_out_as_by_flax(module, rules):
    wanted = specs_of_flax(STATES[module], rules)
    assert specs_of(STATES[module], rules) == wanted
    assert specs_of(STATES[module], AxisRules(rules)) == wanted
    if len(dict(rules)) == len(rules):
        assert specs_of(STATES[module], dict(rules)) == wanted
    assert (set(wanted) == {P()}) == (rules is FORMS["nothing"])


def test_mesh_axes_as_names_are_laid_out_as_by_flax():
    def annotated(names):
        return nn.Partitioned(jax.ShapeDtypeStruct((8, 8), jnp.float32), names)

    tree = {
        "a": annotated(("data", "model")),
        "b": annotated((None, ("model", "data"))),
        "c": annotated(("model",)),
        "step": jax.ShapeDtypeStruct((), jnp.int32),
    }
    flax = [canonical(sharding.spec) for sharding in jax.tree.leaves(nn.get_sharding(tree, MESH))]
    assert specs_of(tree, None) == flax


NAMES = ("embed", "hidden", "heads", "layers")
TARGETS = (None, "data", "model", ("data", "model"), ("model", "data"))


@st.composite
def boxes(draw):
    names = draw(st.lists(st.sampled_from((*NAMES, None)), max_size=4))
    given = [name for name in names if name is not None]
    hypothesis.assume(len(set(given)) == len(given))
    sizes = draw(st.lists(st.sampled_from((8, 16, 24)), min_size=len(names), max_size=4))
    kind = draw(st.sampled_from((nn.Partitioned, nn.LogicallyPartitioned)))
    return kind(jax.ShapeDtypeStruct(tuple(sizes), jnp.float32), tuple(names))


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    tree=st.lists(boxes(), min_size=1, max_size=4),
    rules=st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(TARGETS)), max_size=6),
)
def test_any_boxes_under_any_rules_are_laid_out_as_by_flax_or_refused(tree, rules):
    # What Flax drops in silence, (name, None) as the last pair allows here.
    allowed = [*rules, *((name, None) for name in NAMES)]
    wanted = specs_of_flax(tree, rules)
    assert specs_of(tree, allowed) == wanted == specs_of_flax(tree, allowed)
    first = dict(reversed(rules))
    whole = {
        name
        for box, spec in zip(tree, wanted, strict=True)
        for name, axes in zip(box.names, (*spec, *[None] * 4), strict=False)
        if axes is None
    }
    dropped = [name for name in whole if first.get(name) is not None]
    try:
        got = specs_of(tree, rules)
    except PlanError as error:
        got = error
    if isinstance(got, PlanError):
        # Only where Flax did not follow a rule.
        assert dropped
        message = str(got)
        assert "asked for twice" in message or "fits none of its rules" in message
    else:
        assert got == wanted


# The table of the documentation: where the two differ on purpose, row by row.


def box(names, *shape, kind=nn.LogicallyPartitioned, **fields):
    return kind(jax.ShapeDtypeStruct(shape, jnp.float32), names, **fields)


def flax_spec(node, rules):
    (spec,) = jax.tree.leaves(
        nn.logical_to_mesh(nn.get_partition_spec(node), rules),
        is_leaf=lambda node: isinstance(node, PartitionSpec),
    )
    return spec


def spec_of(node, rules, **options):
    (leaf,) = make_plan({"w": node}, MESH, rules, **options).leaves
    return leaf.spec


def test_row_a_length_that_does_not_divide():
    node, rules = box(("hidden",), 6), (("hidden", "model"),)
    assert flax_spec(node, rules) == P("model")
    sharding = nn.logical_to_mesh_sharding(nn.get_partition_spec(node), MESH, rules)
    with pytest.raises(ValueError, match="should evenly divide the shape"):
        sharding.shard_shape((6,))
    with pytest.raises(PlanError, match=r"w: logical axis 'hidden' \(6\) does not divide over"):
        spec_of(node, rules)
    assert spec_of(node, rules, on_indivisible="replicate") == P()


def test_row_fallback_for_a_length_that_does_not_divide():
    node, rules = box(("hidden",), 6), (("hidden", "model"), ("hidden", "data"))
    assert flax_spec(node, rules) == P("model")
    assert spec_of(node, rules) == P("data")


def test_row_a_mesh_axis_that_is_taken():
    node, rules = box(("embed", "hidden"), 8, 8), (("embed", "model"), ("hidden", "model"))
    assert flax_spec(node, rules) == P("model", None)
    with pytest.raises(PlanError, match=r"mesh axis 'model' \(4\) is asked for twice"):
        spec_of(node, rules)
    assert spec_of(node, (*rules, ("hidden", None))) == P("model")


def test_row_an_array_without_a_box():
    node = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    assert nn.get_partition_spec(node) == P()
    with pytest.raises(PlanError, match=r"w: this array of shape .* has no logical axis names"):
        spec_of(node, {})
    assert spec_of(node, {}, on_unnamed="replicate") == P()


def test_row_a_mesh_axis_that_does_not_exist():
    node, rules = box(("embed",), 8), (("hidden", "expert"),)
    assert flax_spec(node, rules) == P(None)
    with pytest.raises(MeshError, match=r"rule 'hidden' -> 'expert': the mesh .* has no mesh axis"):
        spec_of(node, rules)


def test_row_a_name_of_partitioned_under_rules():
    node, rules = box(("embed", "model"), 8, 8, kind=nn.Partitioned), (("embed", "data"),)
    with pytest.raises(ValueError, match="Resource axis: embed"):
        nn.get_sharding(node, MESH)
    assert spec_of(node, rules) == P("data")
    assert spec_of(node, None) == P(None, "model")


def test_row_a_tuple_of_mesh_axes_under_rules():
    node, rules = box((("data", "model"), "embed"), 8, 8), (("embed", None),)
    assert flax_spec(node, rules) == P(("data", "model"), None)
    with pytest.warns(match="a tuple of mesh axes, which therefore stays whole"):
        assert spec_of(node, rules) == P()
    own = ((("data", "model"), ("data", "model")), *rules)
    assert spec_of(node, own) == P(("data", "model"))


def test_row_a_dimension_that_is_left_to_the_compiler():
    node = box((P.UNCONSTRAINED, "embed"), 8, 8)
    assert flax_spec(node, (("embed", "data"),)) == P(P.UNCONSTRAINED, "data")
    with pytest.raises(PlanError, match="leave a dimension to the compiler"):
        spec_of(node, {"embed": "data"})


def test_row_more_names_than_dimensions():
    node, rules = box(("embed", "hidden"), 8), (("embed", "data"), ("hidden", None))
    assert flax_spec(node, rules) == P("data", None)
    with pytest.raises(PlanError, match=r"it has 2 axis names, .*, and rank 1"):
        spec_of(node, rules)


def test_row_rules_and_mesh_in_the_box():
    own = (("embed", "model"),)
    node, rules = box(("embed",), 8, rules=own), (("embed", "data"),)
    assert flax_spec(node, rules) == P("data")
    with pytest.raises(PlanError, match="it has rules of its own"):
        spec_of(node, rules)
    other = box(("embed",), 8, mesh=AbstractMesh((8,), ("data",)))
    assert flax_spec(other, rules) == P("data")
    with pytest.raises(PlanError, match="it has a mesh of its own"):
        spec_of(other, rules)


def test_row_what_an_optimizer_keeps_of_some_dimensions():
    def init():
        params = {"w": nn.LogicallyPartitioned(jnp.ones((256, 512)), ("embed", "hidden"))}
        return TrainState.create(apply_fn=len, params=params, tx=optax.adafactor(1e-3))

    state, rules = jax.eval_shape(init), (("embed", "data"), ("hidden", "model"))
    row = state.opt_state[0].v_row["w"]
    assert row.value.shape == (256,)
    assert flax_spec(row, rules) == P("data", "model")  # Of an array with one dimension.
    plan = {leaf.path: leaf.spec for leaf in make_plan(state, MESH, rules).leaves}
    assert plan["opt_state/0/v_row/w"] == P("data")
    assert plan["opt_state/0/v_col/w"] == P("model")


def test_row_rules_that_flax_does_not_have():
    node = box(("embed", "hidden"), 8, 16)
    with pytest.raises(ValueError, match="Unknown axis rule"):
        flax_spec(node, {"embed": "data"})
    assert spec_of(node, {"embed": "data"}) == P("data")
    assert spec_of(node, fully_sharded("data", min_size=0)) == P(None, "data")
    with pytest.raises(RuleTypeError, match="a mesh axis is a name, a tuple of names or None"):
        spec_of(node, (("embed", P.UNCONSTRAINED),))


def test_every_row_of_the_documented_table_has_a_test():
    page = (Path(__file__).parents[2] / "docs" / "models_from_elsewhere.md").read_text("utf-8")
    table = page.partition("| case | Flax | here |\n|---|---|---|\n")[2].partition("\n\n")[0]
    assert len(table.splitlines()) == sum(name.startswith("test_row_") for name in globals())


def test_a_second_model_of_other_widths_has_names_of_its_own():
    @struct.dataclass
    class Distillation:
        params: dict
        teacher_params: dict

    def dense(*shape):
        return {"kernel": nn.LogicallyPartitioned(jnp.ones(shape), ("embed", "hidden"))}

    state = Distillation({"dense": dense(8, 8)}, {"dense": dense(16, 32)})
    plan = make_plan(state, MESH, {"embed": "data", "hidden": "model"})
    assert {leaf.path: leaf.spec for leaf in plan.leaves} == {
        "params/dense/kernel": P("data", "model"),
        "teacher_params/dense/kernel": P("data", "model"),
    }
