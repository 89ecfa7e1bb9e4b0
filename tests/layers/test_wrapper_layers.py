"""What all wrappers have in common: they change how a layer runs, not what it computes."""

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import treescope
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from penzai import pz
from penzai.deprecated.v1 import pz as pz_v1

import penzai_shard as pzs
from tests.models import counted_mlp, mlp_v1, penzai_mlp
from tests.refusals import problems_of

AUTO, EXPLICIT = (pzs.make_mesh({"data": 4, "model": 2}, explicit=e) for e in (False, True))
RULES = {"batch": "data", "features": "model"}
WRAPPERS = {
    "jitted": pzs.Jitted,
    "checkpointed": pzs.Checkpointed,
    "scoped": lambda body: pzs.Scoped(body, "scope"),
    "activations": lambda body: pzs.ConstrainActivations(body, AUTO, (RULES,), (RULES, RULES)),
    "by name": lambda body: pz.nn.Sequential([body, pzs.ConstrainShardingByName(AUTO, RULES)]),
    "gathered": lambda body: pzs.GatherParameters(body, AUTO, {}),
    "in float32": lambda body: pzs.InPrecision(body, "float32"),
    "axis order": pzs.KeepAxisOrder,
    "behind another": pzs.Recipe(pzs.insert_before(pzs.ROOT, pz.nn.Identity())).apply,
    "sharded": lambda body: pzs.ShardMapped(body, AUTO, {}, {"batch": "data"}),
    "nested": lambda body: pzs.Jitted(pzs.Checkpointed(pzs.Jitted(pzs.Scoped(body, "inner")))),
}
# Those that call the body as it is or are made of others, and those that transform its call.
PLAIN = ("scoped", "axis order", "behind another", "activations", "by name", "nested")
TRANSFORMING = [name for name in WRAPPERS if name not in (*PLAIN, "jitted")]
X = pz.nx.wrap(jax.random.normal(jax.random.key(1), (8, 8)), "batch", "features")


def assert_same(actual, expected):
    # A product of matrices sums in another order where they are split.
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)
    jax.tree.map(close, actual, expected)


def pure(model):
    """A model's call as a function of the values of its variables, and these values."""
    unbound, values = pz.unbind_variables(model, freeze=True)

    def call(values, x):
        live = [value.unfreeze_as_copy() for value in values]
        output = pz.bind_variables(unbound, live)(x).order_as(*x.named_shape)
        return output, tuple(variable.freeze() for variable in live)

    return call, values


def gradients(call, values, x):
    def loss(values, x):
        output, state = call(values, x)
        return (output.data_array**2).sum(), (output, state)

    return jax.grad(loss, (0, 1), has_aux=True)(values, x)


WAYS = {
    "eager": lambda call, values, x: call(values, x),
    "jit": lambda call, *inputs: jax.jit(functools.partial(gradients, call))(*inputs),
    "remat": lambda call, *inputs: gradients(jax.checkpoint(call), *inputs),
    "rows": lambda call, values, x: jax.vmap(call, (None, 0))(
        values, x.untag("batch").with_positional_prefix()
    ),
    "models": lambda call, values, x: jax.vmap(call, (0, None))(
        jax.tree.map(lambda value: jnp.stack([value, 2 * value]), values), x
    ),
    "scan": lambda call, values, x: jax.lax.scan(
        lambda values, _: call(values, x)[::-1], values, length=2
    ),
}


@functools.cache
def expected(way):
    return WAYS[way](*pure(counted_mlp()), X)


@pytest.mark.parametrize(
    ("wrapper", "way"),
    [(wrapper, way) for wrapper in WRAPPERS for way in WAYS if wrapper not in PLAIN]
    + [(wrapper, way) for wrapper in PLAIN for way in ("jit", "scan")],
)
def test_output_gradients_and_state_are_those_of_the_layer(wrapper, way):
    assert_same(WAYS[way](*pure(WRAPPERS[wrapper](counted_mlp())), X), expected(way))


@pytest.mark.parametrize(
    ("wrapper", "mesh"),
    # A bare layer does not run on an Explicit mesh.
    [(wrapper, EXPLICIT) for wrapper in ("jitted", "nested", *TRANSFORMING)]
    + [(wrapper, AUTO) for wrapper in ("jitted", "scoped", "activations", *TRANSFORMING)],
)
def test_arrays_on_a_mesh(wrapper, mesh):
    call, values = pure(WRAPPERS[wrapper](counted_mlp()))
    values = jax.device_put(values, NamedSharding(mesh, P()))
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    assert_same(WAYS["jit"](call, values, x), expected("jit"))
    for ambient in (AUTO, EXPLICIT) if mesh is AUTO else (AUTO,):
        with jax.set_mesh(ambient):
            output = call(values, x)[0]
        assert_same(output, expected("eager")[0])
        assert output.data_array.sharding.mesh == AUTO


# Around and in other layers


@pytest.mark.parametrize("wrapper", ["jitted", "checkpointed", "by name"])
def test_first_generation_models(wrapper):
    model = mlp_v1()
    edited = pz.select(model).at_instances_of(pz_v1.nn.Affine).apply(WRAPPERS[wrapper])
    for layer in (edited, WRAPPERS[wrapper](model)):
        assert_same(layer(X).order_as("batch", "features"), model(X))
    loss = lambda model: (model(X).untag("batch", "features") ** 2).sum().unwrap()  # noqa: E731
    assert_same(*(jax.tree.leaves(jax.grad(loss)(x)) for x in (edited, model)))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_selectors_and_treescope_see_through(wrapper):
    model = penzai_mlp()
    wrapped = pz.select(model).at_instances_of(pz.nn.Affine).apply(WRAPPERS[wrapper])
    variables, bare_variables = (pz.unbind_variables(x)[1] for x in (wrapped, model))
    assert [*map(id, variables)] == [*map(id, bare_variables)]
    before = treescope.render_to_text(wrapped)
    wrapped(X)
    assert treescope.render_to_text(wrapped) == before
    assert pz.select(wrapped).at_instances_of(pz.nn.Affine).count() == 2
    frozen = pz.freeze_variables(wrapped)
    frozen(X)
    for duplicate in (copy.deepcopy(frozen), jax.tree.map(jnp.array, frozen)):
        assert_same(duplicate(X), model(X))


def test_wrappers_show_attributes_of_the_body_and_are_pickled():
    inner = pzs.Scoped(pz.nn.ConstantRescale(by=3.0), "inner")
    layer = pzs.Scoped(pzs.Jitted(inner), "outer")
    assert float(layer(2.0)) == float(pickle.loads(pickle.dumps(layer))(2.0)) == 6
    assert (layer.by, layer.name, layer.body.name) == (3.0, "outer", "inner")
    # A function has a __name__, and a layer around it has none.
    function = pzs.Scoped(jnp.sin, "scope")
    assert [hasattr(function, name) for name in ("__name__", "missing")] == [False, False]


def test_scoped_names_operations_forward_and_backward():
    layer = pzs.Scoped(pz.nn.Elementwise(jnp.sin), "block_3/mlp")
    backward = jax.jit(jax.grad(lambda x: layer(x).sum()))
    assert "jvp(block_3/mlp" in backward.lower(jnp.ones(3)).as_text(debug_info=True)


# What is refused


@pytest.mark.parametrize("wrapper", ["jitted", "checkpointed", "scoped"])
def test_arrays_that_nothing_runs_on_are_refused_by_path(wrapper):
    for error, spoil in (
        (pzs.ShardingError, lambda value: value.data_array.delete() or value),
        (pzs.ShardingError, lambda value: jax.eval_shape(lambda: value)),
        (pzs.MeshError, lambda value: jax.device_put(value, NamedSharding(AUTO, P("model")))),
    ):
        model = WRAPPERS[wrapper](penzai_mlp())
        parameter = pz.unbind_variables(model)[1][0]
        parameter.__dict__["_raw_value"] = spoil(parameter.value)
        problems = problems_of(error, model, jax.device_put(X, jax.devices()[3]))
        assert [problem.path for problem in problems] == [parameter.label]
        assert problems[0].fix


LAYER, STACK = pz.nn.Identity(), pz.nn.LayerStack(pz.nn.Identity(), "layers", 2)
ROLLED = pzs.RolledLayerStack.from_layer_stack
SPLIT = pzs.ConstrainSharding(NamedSharding(AUTO, P(None, "data")))
DELETED = jnp.ones((8, 8))
DELETED.delete()
# The error, the path, a part of the fix, and a wrong use.
WRONG_USES = [
    (
        "RuleType",
        "policy",
        "'dots_without_batch'",
        lambda: pzs.Checkpointed(LAYER, "dots_wthout_batch"),
    ),
    ("RuleType", "compute_dtype", "'bfloat16'", lambda: pzs.InPrecision(LAYER, "bf16")),
    ("RuleType", "keep", "keep=()", lambda: pzs.InPrecision(LAYER, "bfloat16", keep=["norms"])),
    ("RuleType", "keep", "keep=()", lambda: pzs.InPrecision(LAYER, "bfloat16", keep=LAYER)),
    ("RuleType", "policy", "'nested'", lambda: ROLLED(STACK, policy="nestd")),
    ("Sharding", "argument", "donation", lambda: ROLLED(STACK)(DELETED)),
    ("RuleType", "sharding", "ByName", lambda: pzs.ConstrainSharding({"x": "data"})),
    ("RuleType", "", "like", lambda: pzs.ConstrainSharding({"x": P()})({"y": X})),
    ("Plan", "x", "NamedSharding", lambda: pzs.ConstrainSharding(P("data"))({"x": jnp.ones(8)})),
    ("Plan", "x", "divides", lambda: SPLIT({"x": jnp.ones((8, 6))})),
    ("Plan", "0", "divides", lambda: jax.jit(SPLIT)([jnp.ones(8)])),
    ("Sharding", "x", "donation", lambda: SPLIT({"x": DELETED})),
    ("RuleType", "mesh", "make_mesh", lambda: pzs.ConstrainShardingByName(RULES, RULES)),
    ("Mesh", "", "'data'", lambda: pzs.ConstrainShardingByName(AUTO, {"batch": "date"})),
    ("RuleType", "", "'infer'", lambda: pzs.ConstrainShardingByName(AUTO, {}, on_unnamed="all")),
    ("RuleType", "", "inputs=(", lambda: pzs.ConstrainActivations(LAYER, AUTO, RULES)),
    ("RuleType", "mesh", "make_mesh", lambda: pzs.ConstrainActivations(LAYER, RULES)),
    ("Mesh", "", "'model'", lambda: pzs.GatherParameters(LAYER, AUTO, {"neurons": "modle"})),
    ("RuleType", "rules", "mesh=mesh", lambda: pzs.GatherParameters(LAYER, {}, AUTO)),
]


@pytest.mark.parametrize(("error", "path", "fix", "use"), WRONG_USES)
def test_wrong_uses_are_refused_with_path_and_fix(error, path, fix, use):
    (problem,) = problems_of(getattr(pzs, f"{error}Error"), use)
    assert (problem.path, fix in problem.fix) == (path, True)
