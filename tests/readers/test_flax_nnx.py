"""Flax NNX: variables are read, planned, placed and initialised, by their names."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core.spmd import logical_axis_rules
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from penzai_shard import (
    TrainState,
    abstract_model,
    fully_sharded,
    make_mesh,
    make_plan,
    name_axes,
    param_dict,
    place,
    sharded_init,
)
from penzai_shard.errors import PlanError, SelectionError, ShardingError, ShardingWarning

RULES = {"embed": "data", "mlp": "model"}
MESH = AbstractMesh((4, 2), ("data", "model"))


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"data": 4, "model": 2})


class Block(nnx.Module):
    def __init__(self, rngs):
        named = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        self.up = nnx.Linear(8, 4, rngs=rngs, kernel_init=named, use_bias=False)
        self.scale = nnx.BatchStat(jnp.ones(4), out_sharding=("mlp",))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


class Model(nnx.Module):
    """A block used twice, and a weight that two modules hold."""

    def __init__(self, rngs):
        self.first = Block(rngs)
        self.second = Block(rngs)
        self.again = self.first
        self.tied = self.second.up.kernel
        self.depth = 2


def unsharded():
    with nnx.use_eager_sharding(False):
        return Model(nnx.Rngs(0))


def is_shared_as_written(model):
    return (
        model.again is model.first
        and model.tied is model.second.up.kernel
        and model.first.up is not model.second.up
        and model.depth == 2
    )


def variables(model):
    return {"/".join(map(str, path)): v for path, v in nnx.to_flat_state(nnx.state(model))}


def names_read(variable):
    """The names by which one variable would be laid out, or the text of the refusal."""
    try:
        (leaf,) = make_plan({"v": variable}, MESH, {}).leaves
    except PlanError as error:
        return str(error)
    return leaf.names


@pytest.mark.parametrize(
    "metadata",
    [
        {"out_sharding": ("embed", "mlp")},
        {"out_sharding": P("embed", "mlp")},
        {"out_sharding": ["embed", "mlp"]},
        {"out_sharding": ("embed", "mlp"), "mesh": MESH},
        {"out_sharding": NamedSharding(AbstractMesh((1, 1), ("embed", "mlp")), P("embed", "mlp"))},
    ],
    ids=["tuple", "spec", "list", "with a mesh", "sharding"],
)
def test_metadata_are_read_in_every_form(metadata):
    with nnx.use_eager_sharding(False):
        assert names_read(nnx.Param(jnp.ones((8, 4)), **metadata)) == ("embed", "mlp")


@pytest.mark.parametrize("key", ["sharding", "sharding_names"])
def test_deprecated_keys_are_read(key):
    with nnx.use_eager_sharding(False), pytest.warns(DeprecationWarning, match="out_sharding"):
        variable = nnx.Param(jnp.ones((8, 4)), **{key: (None, "mlp")})
    assert names_read(variable) == (None, "mlp")


@pytest.mark.parametrize("eager", [True, False])
def test_names_given_in_a_mesh_context_are_read(mesh, eager):
    with jax.set_mesh(mesh), nnx.use_eager_sharding(eager):
        variable = nnx.Param(jnp.ones((8, 4)), out_sharding=(None, "model"))
    plan = make_plan({"v": variable}, mesh)
    assert plan.leaves[0].spec == P(None, "model")


def test_positional_dimensions_stay_where_they_are():
    with nnx.use_eager_sharding(False):
        variable = nnx.Cache(jnp.ones((8, 3, 4, 5)), out_sharding=("embed", None, "mlp"))
    (leaf,) = make_plan(variable, MESH, RULES).leaves
    assert leaf.names == ("embed", None, "mlp", None)
    assert leaf.spec == P("data", None, "model")


def test_a_tuple_of_mesh_axes_is_one_name():
    with nnx.use_eager_sharding(False):
        variable = nnx.Param(jnp.ones((8, 4)), out_sharding=(("data", "model"), None))
    assert make_plan(variable, MESH).leaves[0].spec == P(("data", "model"))
    assert make_plan(variable, MESH, {("data", "model"): "model"}).leaves[0].spec == P("model")


@pytest.mark.parametrize(
    ("shape", "metadata", "text"),
    [
        ((8,), {"out_sharding": ("a", "b")}, "v: it has 2 axis names, ('a', 'b'), and rank 1."),
        ((8, 4), {"out_sharding": ("a", "a")}, "its axis names ('a', 'a') have one twice."),
        ((8,), {"out_sharding": (P.UNCONSTRAINED,)}, "leave a dimension to XLA. Give it a name"),
        ((8,), {"out_sharding": "embed"}, "its str as out_sharding is not read. Give a tuple"),
        ((8,), {"shard_axes": ("a",)}, "its metadata 'shard_axes' seem to be of sharding"),
    ],
)
@pytest.mark.parametrize("relaxed", [{}, {"on_unnamed": "replicate"}], ids=["", "replicate"])
def test_names_that_cannot_be_used_are_an_error(shape, metadata, text, relaxed):
    with nnx.use_eager_sharding(False):
        variable = nnx.Param(jnp.ones(shape), **metadata)
    with pytest.raises(PlanError) as caught:
        make_plan({"v": variable}, MESH, {}, **relaxed)
    assert text in str(caught.value)


def test_arrays_without_names_are_an_error_that_says_how_to_name_them():
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    text = r"kernel: .* no logical axis names. Name it where its layer is made, with kernel_meta"
    with pytest.raises(PlanError, match=text):
        make_plan(model, MESH, RULES)
    plan = make_plan(model, MESH, RULES, on_unnamed="replicate")
    assert [leaf.spec for leaf in plan.leaves] == [P(), P()]


def test_random_state_is_replicated_without_names():
    streams = nnx.Rngs(0).split(8)
    assert {leaf.shape for leaf in make_plan(streams, MESH, RULES).leaves} == {(8,)}
    assert {leaf.spec for leaf in make_plan(streams, MESH, RULES).leaves} == {P()}


mesh_axes = st.sampled_from([None, "data", "model", ("data", "model")])


@settings(max_examples=80)
@given(
    rules=st.fixed_dictionaries(dict.fromkeys("abc", mesh_axes)),
    names=st.permutations(["a", "b", "c", None]),
    shape=st.lists(st.sampled_from([3, 8, 16]), min_size=4, max_size=4),
    rank=st.integers(1, 4),
    as_pairs=st.booleans(),
)
def test_plans_are_those_of_flax_wherever_flax_gives_a_layout(rules, names, shape, rank, as_pairs):
    shape = tuple(shape[:rank])
    with nnx.use_eager_sharding(False):
        state = nnx.State({"w": nnx.Param(jax.ShapeDtypeStruct(shape, "f4"))})
    state["w"].set_metadata(out_sharding=tuple(names[:rank]))
    theirs, refusal = None, ""
    try:
        with logical_axis_rules(tuple(rules.items())):
            theirs = nnx.get_named_sharding(state, MESH)["w"].get_raw_value()
        theirs.shard_shape(shape)
    except Exception as error:
        theirs, refusal = None, type(error).__name__
    assert refusal in ("", "DuplicateSpecError", "IndivisibleError")
    try:
        plan = make_plan(state, MESH, list(rules.items()) if as_pairs else rules)
    except PlanError:
        assert theirs is None
    else:
        assert theirs is not None
        ours = plan.sharding_tree()["w"].get_raw_value()
        assert ours.is_equivalent_to(theirs, rank)


# Names, rules, the spec of NNX, and that of a plan where it is another on purpose.
DIFFERENCES = {
    "a name without a rule is unsharded": (("data", "mlp"), {"mlp": "model"}, P(None, "model")),
    "the first rule that fits": (("mlp",), [("mlp", "data"), ("mlp", "model")], P("data")),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_differences_from_flax_are_those_of_the_documented_table(case):
    names, rules, spec = DIFFERENCES[case]
    with nnx.use_eager_sharding(False):
        variable = nnx.Param(jnp.ones((8, 4)), out_sharding=names)
    pairs = tuple(rules.items()) if isinstance(rules, dict) else tuple(rules)
    with logical_axis_rules(pairs):
        theirs = nnx.get_partition_spec(variable).get_raw_value()
    ours = make_plan(variable, MESH, rules).leaves[0].spec
    assert ours == spec
    assert not NamedSharding(MESH, theirs).is_equivalent_to(NamedSharding(MESH, ours), 2)


def test_names_are_mesh_axes_without_rules_as_for_flax():
    with nnx.use_eager_sharding(False):
        variable = nnx.Param(jnp.ones((8, 4, 3)), out_sharding=(("data", "model"), None))
    theirs = nnx.get_partition_spec(variable).get_raw_value()
    ours = make_plan(variable, MESH).leaves[0].spec
    assert NamedSharding(MESH, theirs).is_equivalent_to(NamedSharding(MESH, ours), 3)
    with pytest.warns(ShardingWarning, match=r"a tuple of mesh axes, which therefore stays whole"):
        assert make_plan(variable, MESH, RULES).leaves[0].spec == P()


def test_an_optimizer_may_have_names_of_its_own():
    with nnx.use_eager_sharding(False):
        names = {"out_sharding": ("embed", "mlp"), "optimizer_sharding": ("mlp", None)}
        model = nnx.Dict(w=nnx.Param(jnp.ones((8, 4)), **names))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    plan = make_plan({"model": model, "optimizer": optimizer}, MESH, RULES)
    specs = {leaf.path: leaf.spec for leaf in plan.leaves}
    assert specs["model/w"] == P("data", "model")
    assert specs["optimizer/opt_state/0/trace/w"] == P("model")


def test_a_scanned_module_has_the_name_of_its_layers():
    @nnx.split_rngs(splits=4)
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def stack(rngs):
        return Block(rngs)

    with nnx.use_eager_sharding(False):
        model = nnx.eval_shape(lambda: stack(nnx.Rngs(0)))
    plan = make_plan(model, MESH, {"layers": "model", "embed": "data"})
    specs = {leaf.path: leaf.spec for leaf in plan.leaves}
    assert specs["up/kernel"] == P("model", "data")
    assert specs["scale"] == P("model")
    with logical_axis_rules((("layers", "model"), ("embed", "data"), ("mlp", None))):
        theirs = nnx.get_named_sharding(nnx.state(model), MESH)
    assert (
        theirs["up"]["kernel"]
        .get_raw_value()
        .is_equivalent_to(plan.sharding_tree().up.kernel.get_raw_value(), 3)
    )


def test_placing_keeps_modules_variables_and_what_is_shared(mesh):
    model = unsharded()
    kernel = model.first.up.kernel
    placed = place({"model": model, "part": model.first}, mesh, RULES)
    assert placed["part"] is placed["model"].first
    assert is_shared_as_written(placed["model"])
    assert kernel is model.first.up.kernel
    assert isinstance(kernel.get_raw_value().sharding, jax.sharding.SingleDeviceSharding)
    for path, before in variables(model).items():
        after = variables(placed["model"])[path]
        assert type(after) is type(before)
        assert after.get_metadata() == before.get_metadata()
        a, b = after.get_raw_value(), before.get_raw_value()
        assert a is not b
        assert a.sharding.mesh == mesh
        if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    made = placed["model"].tied.get_raw_value()
    assert {shard.data.shape for shard in made.addressable_shards} == {(2, 2)}


def test_states_and_plans_of_them(mesh):
    model = unsharded()
    graph, state = nnx.split(model)
    plan = make_plan(state, mesh, RULES)
    assert isinstance(plan.sharding_tree(), nnx.State)
    merged = nnx.merge(graph, place(state, plan))
    assert is_shared_as_written(merged)
    assert merged.tied.get_raw_value().sharding.spec == P("data", "model")
    # The same plan serves the module itself, and what nnx.eval_shape gives.
    assert place(model, plan).tied.get_raw_value().sharding.spec == P("data", "model")
    with nnx.use_eager_sharding(False):
        abstract = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    assert [leaf.spec for leaf in make_plan(abstract, mesh, RULES).leaves] == [
        leaf.spec for leaf in plan.leaves
    ]


def test_optimizers_are_laid_out_as_their_parameters(mesh):
    model = unsharded()
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    placed = place({"model": model, "optimizer": optimizer}, mesh, RULES)["optimizer"]
    moments = placed.opt_state[0]
    assert moments.mu["again"]["up"]["kernel"].get_raw_value().sharding.spec == P("data", "model")
    assert moments.count.get_raw_value().sharding.is_fully_replicated
    assert placed.step.get_raw_value().sharding.is_fully_replicated


def test_statistics_of_some_dimensions_are_laid_out_beside_their_model(mesh):
    with nnx.use_eager_sharding(False):
        named = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        linear = nnx.Linear(128, 256, rngs=nnx.Rngs(0), kernel_init=named, use_bias=False)
    optimizer = nnx.Optimizer(linear, optax.adafactor(1e-3), wrt=nnx.Param)
    plan = make_plan({"model": {"part": linear}, "optimizer": optimizer}, mesh, RULES)
    specs = {leaf.path.removeprefix("optimizer/opt_state/0/"): leaf.spec for leaf in plan.leaves}
    assert specs["v_row/kernel"] == P("data")
    assert specs["v_col/kernel"] == P("model")
    assert specs["v/kernel"] == P()
    with pytest.raises(PlanError, match=r"v_row/kernel: it has 2 axis names, .* and rank 1"):
        make_plan(optimizer, mesh, RULES)


@pytest.mark.parametrize("eager", [True, False])
def test_sharded_init_gives_the_values_of_the_init(mesh, eager):
    rngs = nnx.Rngs(0)
    with nnx.use_eager_sharding(eager):
        model = sharded_init(Model, rngs, mesh=mesh, rules=RULES)
    assert is_shared_as_written(model)
    # The random streams that were given are not used up.
    assert int(rngs.default.count[...]) == 0
    expected = variables(unsharded())
    made = variables(model)
    assert made.keys() == expected.keys()
    for path, variable in made.items():
        a, b = variable.get_raw_value(), expected[path].get_raw_value()
        assert variable.get_metadata() == expected[path].get_metadata()
        if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-7)
    assert made["second/up/kernel"].get_raw_value().sharding == (
        NamedSharding(mesh, P("data", "model"))
    )
    # The result works where it is: streams go on, variables can be assigned.
    assert model.first.dropout(jnp.ones(4)).shape == (4,)
    model.first.scale[...] = jnp.zeros(4)


def test_abstract_models_have_structs_for_parameters_alone():
    model = abstract_model(lambda: Model(nnx.Rngs(0)))
    assert is_shared_as_written(model)
    kinds = {
        path: isinstance(v.get_raw_value(), jax.ShapeDtypeStruct)
        for path, v in variables(model).items()
    }
    assert {path for path, is_struct in kinds.items() if is_struct} == {
        path for path in kinds if path.endswith("kernel")
    }


def test_rules_of_a_variable_must_agree_with_those_given():
    with nnx.use_eager_sharding(False):
        variable = nnx.Param(
            jnp.ones((8, 4)), out_sharding=("embed", "mlp"), sharding_rules=(("embed", "data"),)
        )
    assert make_plan(variable, MESH, RULES).leaves[0].spec == P("data", "model")
    with logical_axis_rules((("embed", "data"), ("mlp", "model"))):
        assert nnx.get_partition_spec(variable).get_raw_value() == P("data", "model")
    text = r"rules of its own, .* they give P\('data',\), and these rules give P\('model',\)"
    with pytest.raises(PlanError, match=text):
        make_plan(variable, MESH, {"embed": "model"})
    with (
        logical_axis_rules((("embed", "model"),)),
        pytest.raises(ValueError, match="Inconsistent logical axis"),
    ):
        nnx.get_partition_spec(variable)


def test_variables_without_names_get_them_by_path(mesh):
    model = nnx.Dict(a=nnx.Linear(8, 4, rngs=nnx.Rngs(0)), stream=nnx.Rngs(0))
    model.same = model.a
    named = name_axes(model, {"a/kernel": ("embed", "mlp"), "a/bias": ("mlp",)})
    assert named.same is named.a
    assert type(named.a.kernel) is nnx.Param
    assert named.a.kernel.get_metadata("out_sharding") == ("embed", "mlp")
    assert not model.a.kernel.has_metadata("out_sharding")
    specs = {leaf.path: leaf.spec for leaf in make_plan(named, mesh, RULES).leaves}
    assert specs["a/kernel"] == P("data", "model")
    # What has names is left alone, and the rest must be matched.
    with pytest.raises(SelectionError, match="'a/bias' matches no array"):
        name_axes(named, {"a/bias": ("mlp",)})
    with pytest.raises(SelectionError, match="a/kernel: no pattern matches this array"):
        name_axes(model, {"a/bias": ("mlp",)})
    largest = make_plan(model.a, mesh, fully_sharded("data", unnamed="largest", min_size=1))
    assert {leaf.path: leaf.spec for leaf in largest.leaves}["kernel"] == P("data")


class NoTree(nnx.Module, pytree=False):
    def __init__(self, rngs):
        self.linear = nnx.Linear(2, 2, rngs=rngs)


def with_defaults(**defaults):
    with nnx.var_defaults(**defaults), nnx.use_eager_sharding(False):
        return nnx.Param(jnp.ones((8, 4)), out_sharding=("embed", "mlp"))


MISTAKES = {
    "the class": (lambda mesh: make_plan(Block, mesh, RULES), "not the class Block. Give what it"),
    "an instance": (
        lambda mesh: sharded_init(nnx.Rngs(0), mesh=mesh, rules=RULES),
        "sharded_init builds a model and needs the function that does, not a Rngs.",
    ),
    "a seed": (
        lambda mesh: sharded_init(Block, 3, mesh=mesh, rules=RULES),
        "rngs=3: Flax NNX takes random streams. Write rngs=nnx.Rngs(3).",
    ),
    "a key": (
        lambda mesh: sharded_init(Block, rngs=jax.random.key(3), mesh=mesh, rules=RULES),
        "rngs=key: Flax NNX takes random streams. Write rngs=nnx.Rngs(key).",
    ),
    "streams from outside": (
        lambda mesh: sharded_init(
            lambda rngs=nnx.Rngs(0): Block(rngs),  # noqa: B008
            mesh=mesh,
            rules=RULES,
        ),
        "changes variables of Flax NNX that were there before, such as random streams. Make them",
    ),
    "a graph": (
        lambda mesh: place(nnx.split(unsharded())[0], mesh, RULES),
        "not an nnx.GraphDef, which has no arrays. Give the module, nnx.merge(graphdef, state)",
    ),
    "what split gives": (
        lambda mesh: TrainState.initial_state(
            nnx.split(unsharded()), optax.sgd(0.1), jax.random.key(0)
        ),
        "not the tuple that nnx.split gives, in which its arrays have other paths",
    ),
    "a flat state": (
        lambda mesh: param_dict(nnx.to_flat_state(nnx.state(unsharded()))),
        "not an nnx.FlatState, in which JAX numbers the arrays, so that other names would be other",
    ),
    "what split gives, as parameters": (
        lambda mesh: param_dict(nnx.split(unsharded())),
        "not the tuple that nnx.split gives, in which its arrays have other paths",
    ),
    "no pytree": (
        lambda mesh: make_plan({"m": NoTree(nnx.Rngs(0))}, mesh, RULES),
        "m: the NoTree was defined so that JAX takes it for a leaf. Define it as a pytree, class "
        "NoTree(nnx.Module) without pytree=False",
    ),
    "no pytree, to train": (
        lambda mesh: TrainState.initial_state(
            {"m": NoTree(nnx.Rngs(0)), "w": jnp.ones(2)}, optax.sgd(0.1), jax.random.key(0)
        ),
        "m: the NoTree was defined so that JAX takes it for a leaf.",
    ),
    "hijax": (
        lambda mesh: place({"w": with_defaults(hijax=True)}, mesh, RULES, on_unnamed="replicate"),
        "w: it is a variable in the form that nnx.var_defaults(hijax=True) makes, which is not",
    ),
    "references": (
        lambda mesh: place({"w": with_defaults(ref=True)}, mesh, RULES, on_unnamed="replicate"),
        "w: it holds a reference, as nnx.var_defaults(ref=True) makes them, which is not read.",
    ),
    "optimizer of Flax": (
        lambda mesh: TrainState.initial_state(
            unsharded(),
            nnx.Optimizer(unsharded(), optax.sgd(0.1), wrt=nnx.Param),
            jax.random.key(0),
        ),
        "the optimizer is a Optimizer, without init and update. Pass one of optax",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_of_new_users_are_named_with_a_fix(name, mesh):
    mistake, text = MISTAKES[name]
    with pytest.raises(ShardingError) as caught:
        mistake(mesh)
    assert text in str(caught.value)


def test_modules_that_contain_themselves_are_refused(mesh):
    model = nnx.Module()
    model.itself = model
    with pytest.raises(ShardingError, match="this Module contains itself"):
        place({"m": model}, mesh, RULES)
