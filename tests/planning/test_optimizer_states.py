"""Plans of optimizer states: every moment lies as its parameter does, scalars are replicated."""

import collections

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P
from penzai import pz

from penzai_shard import fully_sharded, make_mesh, make_plan, tensor_parallel
from penzai_shard.errors import PlanError

RULES = {"embedding": "data", "neurons": "model", "vocabulary": "model", "heads": "model"}

SIZES = {
    "up": {"embedding": 128, "neurons": 256},
    "down": {"neurons": 256, "embedding": 128},
    "square": {"embedding": 256, "neurons": 256},
    "turned": {"neurons": 256, "embedding": 256},
    "cube": {"heads": 128, "embedding": 128, "projection": 128},
    "deep": {"embedding": 128, "heads": 128, "projection": 256},
    "scale": {"embedding": 128},
    "tiny": {"seq": 1, "neurons": 2},
    "gain": {},
}


def params():
    return {name: pz.nx.ones(sizes) for name, sizes in SIZES.items()}


def only_matrices(tree):
    return {name: len(array.named_shape) == 2 for name, array in tree.items()}


def label_by_rank(tree):
    return {name: f"rank {min(len(array.named_shape), 2)}" for name, array in tree.items()}


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "sgd with nesterov": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "sgd without momentum": lambda: optax.sgd(0.1),
    "adam": lambda: optax.adam(1e-3),
    "adamw": lambda: optax.adamw(1e-3),
    "lion": lambda: optax.lion(1e-3),
    "lamb": lambda: optax.lamb(1e-3),
    "rmsprop": lambda: optax.rmsprop(1e-3, momentum=0.9, centered=True),
    "adafactor": lambda: optax.adafactor(1e-3),
    "adafactor with momentum": lambda: optax.adafactor(1e-3, momentum=0.9),
    "sm3": lambda: optax.sm3(1e-3),
    "novograd": lambda: optax.novograd(1e-3),
    "yogi": lambda: optax.yogi(1e-3),
    "schedule_free_adamw": lambda: optax.contrib.schedule_free_adamw(1e-3),
    "muon": lambda: optax.contrib.muon(1e-3),
    "chain": lambda: optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.trace(0.9),
        optax.adamw(optax.linear_schedule(0, 1, 9)),
    ),
    "masked": lambda: optax.masked(optax.adam(1e-3), only_matrices),
    "masked adafactor": lambda: optax.masked(optax.adafactor(1e-3), only_matrices),
    "multi_transform": lambda: optax.multi_transform(
        {
            "rank 0": optax.set_to_zero(),
            "rank 1": optax.sgd(0.1, momentum=0.9),
            "rank 2": optax.adafactor(1e-3),
        },
        label_by_rank,
    ),
    "partition": lambda: optax.partition(
        {
            "rank 0": optax.set_to_zero(),
            "rank 1": optax.adam(0.1),
            "rank 2": optax.sm3(1e-3),
        },
        label_by_rank,
    ),
    "MultiSteps": lambda: optax.MultiSteps(optax.adamw(1e-3), every_k_schedule=4),
    "MultiSteps adafactor": lambda: optax.MultiSteps(optax.adafactor(1e-3), every_k_schedule=4),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(
        learning_rate=optax.linear_schedule(1e-3, 0.0, 100)
    ),
    "inject_hyperparams sm3": lambda: optax.inject_hyperparams(optax.sm3)(learning_rate=1e-3),
}

OTHERS = {
    "AdaBelief": lambda: optax.adabelief(1e-3),
    "amsgrad": lambda: optax.amsgrad(1e-3),
    "lookahead": lambda: optax.lookahead(optax.adam(1e-3), 5, 0.5),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-3), 5),
}
OPTIMIZERS |= OTHERS


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"data": 4, "model": 2})


def entries_by_name(plan):
    """For each parameter and logical axis, the entry of its spec."""
    table = {}
    for leaf in plan.leaves:
        entries = list(leaf.spec) + [None] * (len(leaf.shape) - len(leaf.spec))
        for name, entry in zip(leaf.names or (), entries, strict=True):
            table[leaf.path, name] = entry
    return table


def parameter_of(leaf):
    """The parameter that a statistic belongs to, by its path."""
    return next((name for name in reversed(leaf.path.split("/")) if name in SIZES), None)


@pytest.fixture(params=["by name", "by preset"])
def rules(request):
    if request.param == "by name":
        return RULES
    return fully_sharded(min_size=1000) | tensor_parallel()


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_an_optimizer_state_lies_as_its_parameters_do(mesh, rules, optimizer):
    made = OPTIMIZERS[optimizer]()
    abstract = jax.eval_shape(params)
    planned_params = {leaf.path: leaf for leaf in make_plan(abstract, mesh, rules).leaves}
    entries = entries_by_name(make_plan(abstract, mesh, rules))
    plan = make_plan(jax.eval_shape(made.init, abstract), mesh, rules)
    for leaf in plan.leaves:
        parameter = parameter_of(leaf)
        assert leaf.sharding is not None
        if not leaf.shape:
            assert leaf.spec == P()
        elif parameter is None:
            # Muon's coefficients belong to no parameter.
            assert leaf.path.endswith("ns_coeffs")
            assert leaf.spec == P()
        elif leaf.shape == planned_params[parameter].shape:
            assert leaf.spec == planned_params[parameter].spec, leaf
        else:
            # A statistic: each dimension that is left lies as in the parameter. One of more than
            # one element has a name for each.
            assert leaf.shape == (1,) or None not in leaf.names, leaf
            own = list(leaf.spec) + [None] * (len(leaf.shape) - len(leaf.spec))
            for name, size, entry in zip(leaf.names, leaf.shape, own, strict=True):
                if name is not None:
                    assert SIZES[parameter][name] == size, leaf
                    assert entry == entries[parameter, name], leaf
                else:
                    assert entry is None


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_a_real_optimizer_state_is_placed_as_planned(mesh, optimizer):
    state = OPTIMIZERS[optimizer]().init(params())
    plan = make_plan(state, mesh, RULES)
    abstract = make_plan(jax.eval_shape(lambda: state), mesh, RULES)
    assert [leaf.spec for leaf in plan.leaves] == [leaf.spec for leaf in abstract.leaves]
    placed = jax.device_put(state, plan.sharding_tree())
    arrays = jax.tree_util.tree_leaves(placed)
    assert len(arrays) == len(plan.leaves)
    for array, leaf in zip(arrays, plan.leaves, strict=True):
        assert array.sharding == leaf.sharding
        assert len(array.sharding.device_set) == 8
        assert {s.data.shape for s in array.addressable_shards} == {leaf.shard_shape}
        assert array.dtype == leaf.dtype


@pytest.mark.parametrize(
    "sizes",
    [
        {"embedding": 4, "neurons": 4},
        {"embedding": 4, "neurons": 4, "projection": 4},
        {"embedding": 4, "neurons": 4, "projection": 6},
        {"embedding": 8, "neurons": 4, "projection": 4},
    ],
)
def test_square_statistics_get_the_names_of_the_dimensions_that_they_keep(mesh, sizes):
    """Told by the values: the statistics of an update show which dimension was averaged away."""
    optimizer = optax.adafactor(1e-3, min_dim_size_to_factor=2, multiply_by_parameter_scale=False)
    weights = {"w": pz.nx.ones(sizes)}
    state = optimizer.init(weights)
    names = {leaf.path: leaf.names for leaf in make_plan(state, mesh, RULES).leaves}
    updated = jax.jit(lambda gradient: optimizer.update(gradient, state, weights)[1])
    for axis, size in sizes.items():
        # A gradient that differs along one dimension gives a statistic that differs along it
        # where the statistic keeps it, and is constant where it does not.
        slope = pz.nx.wrap(jnp.arange(1.0, 1 + size)).tag(axis)
        new_state = updated({"w": (slope * weights["w"]).order_like(weights["w"])})
        for field in ("v_row", "v_col"):
            kept = names[f"0/{field}/w"]
            assert len(kept) == len(sizes) - 1
            statistic = getattr(new_state[0], field)["w"].data_array
            varies = [
                name
                for i, name in enumerate(kept)
                if bool((jnp.take(statistic, 0, i) != jnp.take(statistic, -1, i)).any())
            ]
            assert varies == ([axis] if axis in kept else [])


def test_square_statistics_of_frozen_parameters_are_told_apart_too(mesh):
    values = {
        "w": pz.ParameterValue(
            label="w", value=pz.nx.ones({"embedding": 256, "neurons": 256}), metadata={}
        )
    }
    state = optax.adafactor(1e-3).init(values)
    specs = {leaf.spec for leaf in make_plan(state, mesh, RULES).leaves if leaf.shape == (256,)}
    assert specs == {P("data"), P("model")}
    state = optax.sm3(1e-3).init(values)
    specs = [leaf.spec for leaf in make_plan(state, mesh, RULES).leaves if leaf.shape == (256,)]
    assert set(specs) == {P("data"), P("model")}


def test_moments_of_frozen_parameters_are_all_counted(mesh):
    value = pz.ParameterValue(label="w", value=pz.nx.ones({"embedding": 8}), metadata={})
    plan = make_plan(optax.adam(1e-3).init([value]), mesh, RULES)
    assert plan.bytes_per_device == 4 + 8 + 8


def test_a_state_after_an_update_under_jit_keeps_its_plan(mesh):
    optimizer = optax.adamw(1e-3)
    weights = {name: pz.nx.ones(SIZES[name]) for name in ("up", "scale")}
    state = optimizer.init(weights)
    shardings = make_plan(state, mesh, RULES).sharding_tree()
    placed = jax.device_put(weights, make_plan(weights, mesh, RULES).sharding_tree())
    state = jax.device_put(state, shardings)
    update = jax.jit(lambda g, s, p: optimizer.update(g, s, p)[1], out_shardings=shardings)
    state = update(placed, state, placed)
    for array, sharding in zip(
        jax.tree_util.tree_leaves(state), jax.tree_util.tree_leaves(shardings), strict=True
    ):
        assert array.sharding == sharding


def test_a_statistic_that_fits_several_dimensions_is_replicated_only_when_asked_for(mesh):
    statistic = pz.nx.NamedArray(collections.OrderedDict(embedding=256, neurons=256), jnp.ones(256))
    with pytest.raises(PlanError, match="no valid layout") as caught:
        make_plan({"mean": statistic}, mesh, RULES)
    assert caught.value.problems == (
        "mean: its data of shape (256,) fits several of its logical axes (embedding=256, "
        "neurons=256). Name the array again with pz.nx.wrap(data).tag(...), or pass "
        'on_unnamed="replicate" for a copy on every device.',
    )
    (leaf,) = make_plan({"mean": statistic}, mesh, RULES, on_unnamed="replicate").leaves
    assert leaf.spec == P()
    assert leaf.reason == "names do not fit: replicated"


def square_preconditioner():
    """Keeps a matrix of second moments for each dimension, as Shampoo does."""

    def init(params):
        return jax.tree.map(lambda p: tuple(jnp.eye(size) for size in p.shape), params)

    return optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))


UNLIKE_PARAMETERS = {
    "galore": lambda: optax.contrib.galore(1e-3, rank=4),
    "preconditioner": square_preconditioner,
    "lbfgs": lambda: optax.lbfgs(),
    "flatten": lambda: optax.flatten(optax.adam(1e-3)),
}


@pytest.mark.parametrize("optimizer", list(UNLIKE_PARAMETERS))
def test_states_unlike_their_parameters_are_replicated_only_when_asked_for(mesh, optimizer):
    weights = {name: pz.nx.ones(SIZES[name]) for name in ("up", "scale")}
    abstract = jax.eval_shape(UNLIKE_PARAMETERS[optimizer]().init, weights)
    with pytest.raises(PlanError) as caught:
        make_plan(abstract, mesh, RULES)
    asked = make_plan(abstract, mesh, RULES, on_unnamed="replicate")
    refused = {problem.split(":")[0] for problem in caught.value.problems}
    replicated = {leaf.path for leaf in asked.leaves if leaf.reason.endswith(": replicated")}
    assert refused == {path for path in replicated if dict_of(asked)[path].shape}
    assert all(dict_of(asked)[path].spec == P() for path in refused)
    assert all('on_unnamed="replicate"' in problem for problem in caught.value.problems)
    moments = [leaf for leaf in asked.leaves if leaf.shape == (128, 256)]
    assert all(leaf.spec == P("data", "model") for leaf in moments)


def dict_of(plan):
    return {leaf.path: leaf for leaf in plan.leaves}
