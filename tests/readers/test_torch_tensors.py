"""Tensors of torch are named, planned, placed, saved and trained as they are."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from penzai_shard import (
    TrainState,
    build_eval_step_fn,
    build_train_step_fn,
    fully_sharded,
    make_mesh,
    make_plan,
    name_axes,
    place,
    restore_params,
    save_params,
    shard_batch,
    sharded_init,
)
from penzai_shard.errors import (
    CheckpointMismatchError,
    PlanError,
    RuleTypeError,
    SelectionError,
    ShardingError,
    ShardingWarning,
)

torch = pytest.importorskip(
    "torch", reason="torch is not installed: pip install 'penzai-shard[torch]'"
)

MESH = make_mesh({"data": 4, "model": 2})
NAMES = {"*.weight": ("out", "in"), "*.bias": ("out",)}
SHARED_DTYPES = [
    *("bool", "uint8", "uint16", "uint32", "int8", "int16", "int32"),
    *("float16", "bfloat16", "float32", "complex64"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
]


def layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))


def named(tensor, names=("a",)):
    return name_axes({"w": tensor}, {"w": names})["w"]


def problems_of(kind, call):
    with pytest.raises(kind) as caught:
        call()
    return " ".join(caught.value.problems) or str(caught.value)


@pytest.mark.parametrize("dtype", SHARED_DTYPES)
def test_tensors_of_every_dtype_are_named_without_a_copy(dtype):
    tensor = torch.tensor([[1, 2], [0, 1], [2, 1]]).to(getattr(torch, dtype))
    array = named(tensor, ("a", "b")).data_array
    assert array.dtype == jnp.dtype(dtype)
    assert array.__array_interface__["data"][0] == tensor.data_ptr()
    widest = np.complex64 if tensor.is_complex() else np.float32
    expected = tensor.to(torch.complex64 if tensor.is_complex() else torch.float32).numpy()
    np.testing.assert_array_equal(array.astype(widest), expected)
    (leaf,) = make_plan(named(tensor, ("a", "b")), MESH, {"b": "model"}).leaves
    assert (leaf.dtype, leaf.spec, leaf.shard_shape) == (jnp.dtype(dtype), P(None, "model"), (3, 1))
    placed = place(named(tensor, ("a", "b")), MESH, {"b": "model"}).data_array
    np.testing.assert_array_equal(np.asarray(placed), array)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(12.0, dtype=torch.bfloat16).reshape(2, 6)[:, ::2].t(),
        torch.nn.Parameter(torch.arange(6.0).reshape(3, 2)),
        torch.nn.Buffer(torch.arange(6.0).reshape(3, 2)),
        torch.arange(6.0).reshape(3, 2).requires_grad_() * 2,
        torch.ones(2).expand(3, 2),
        torch.ones(3, 0),
        torch.tensor(3.0, dtype=torch.bfloat16),
    ],
    ids=[
        "transposed",
        "strided",
        "parameter",
        "buffer",
        "with_gradient",
        "expanded",
        "empty",
        "scalar",
    ],
)
def test_views_parameters_and_scalars_are_named_without_a_copy(tensor):
    array = named(tensor, ("a", "b")[: tensor.ndim]).data_array
    assert isinstance(array, np.ndarray)
    assert array.__array_interface__["data"][0] == tensor.data_ptr() or not tensor.numel()
    np.testing.assert_array_equal(array.astype(np.float32), tensor.detach().float().numpy())


def test_conjugated_and_negated_views_have_their_values():
    tensor = torch.tensor([1 + 2j, 3 - 1j])
    np.testing.assert_array_equal(named(tensor.conj()).data_array, [1 - 2j, 3 + 1j])
    np.testing.assert_array_equal(named(tensor.conj().imag).data_array, [-2, 1])


def test_state_dicts_keep_their_order_and_names():
    weights = layers().state_dict()
    tree = name_axes(weights, NAMES)
    assert list(tree) == list(weights) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    plan = make_plan(tree, MESH, {"out": "model", "in": "data"})
    assert {leaf.path: leaf.spec for leaf in plan.leaves} == {
        "0.weight": P("model", "data"),
        "0.bias": P("model"),
        "2.weight": P("model", "data"),
        "2.bias": P("model"),
    }


def test_tensors_on_meta_are_planned_like_those_with_memory():
    with torch.device("meta"):
        abstract = layers().state_dict()
    tree = name_axes(abstract, NAMES)
    assert tree["0.weight"].data_array == jax.ShapeDtypeStruct((16, 8), jnp.float32)
    rules = {"out": "model"}
    expected = make_plan(name_axes(layers().state_dict(), NAMES), MESH, rules)
    assert make_plan(tree, MESH, rules).leaves == expected.leaves
    with pytest.raises(ShardingError, match="these have a shape and no value"):
        place(tree, MESH, rules)


def test_fake_tensors_are_structs():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(3, 4, device="cuda", dtype=torch.bfloat16)
    assert named(fake, ("a", "b")).data_array == jax.ShapeDtypeStruct((3, 4), jnp.bfloat16)


def test_64_bit_integers_are_narrowed_where_no_value_changes():
    limits = torch.tensor([-(2**31), 2**31 - 1])
    array = named(limits).data_array
    assert array.dtype == np.int32
    assert array.tolist() == limits.tolist()
    counts = torch.nn.BatchNorm1d(4).state_dict()
    features = dict.fromkeys(("weight", "bias", "running_*"), ("features",))
    tree = name_axes(counts, {"num_batches_tracked": (), **features})
    assert tree["num_batches_tracked"].data_array.dtype == np.int32
    assert named(torch.empty(2, dtype=torch.int64, device="meta")).data_array.dtype == np.int32
    with jax.enable_x64(True):
        assert named(limits).data_array.dtype == np.int64


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.tensor([2**31]), r"w: has values of int64 beyond those of int32, which"),
        (lambda: torch.tensor([2**32], dtype=torch.uint64), r"w: has values of uint64 beyond"),
        (
            lambda: torch.ones(2, dtype=torch.float64),
            r"w: is of float64, of which JAX would keep float32\. Convert it, "
            r"tensor\.to\(torch\.float32\), or set jax\.config\.update\('jax_enable_x64', True\)\.",
        ),
        (lambda: torch.ones(2, dtype=torch.complex128), r"is of complex128, of which JAX would ke"),
        (lambda: torch.zeros(2, dtype=torch.complex32), r"of complex32, a dtype that JAX does not"),
        (lambda: torch.eye(2).to_sparse(), r"of layout sparse_coo\. Give tensor\.to_dense\(\)\."),
        (lambda: torch.eye(2).to_sparse_csr(), r"is a tensor of layout sparse_csr\. Give tensor"),
        (lambda: torch.eye(2).to_mkldnn(), r"is a tensor of layout _mkldnn\. Give tensor\.to_de"),
        (
            lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
            r"is a quantised tensor of qint8\. Give tensor\.dequantize\(\)\.",
        ),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            r"is a nested tensor\. Give an ordinary one, torch\.nested\.to_padded_tensor",
        ),
        (
            lambda: torch.nn.LazyLinear(3).weight,
            r"is a UninitializedParameter of torch, which has no shape yet\. Call its module once",
        ),
        (lambda: freed(), r"whose memory was freed, as torch's FullyShardedDataParallel does"),
        (lambda: OwnTensor(torch.ones(2)), r"is a OwnTensor of .*, and not an ordinary tensor\."),
        (
            lambda: torch.nn.Linear(2, 2),
            r"is a module of torch, Linear, and not its weights\. Give these: "
            r"name_axes\(module\.state_dict\(\), \{\.\.\.\}\)\.",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_no_ordinary_tensor_is_refused_by_name_everywhere(make, message, tmp_path):
    tree = {"w": make(), "b": torch.ones(3)}
    relaxed = {"on_unnamed": "replicate"}
    calls = [
        (SelectionError, lambda: name_axes(tree, {"*": ("a",)})),
        (PlanError, lambda: make_plan(tree, MESH, **relaxed)),
        (PlanError, lambda: make_plan(tree, MESH, on_unnamed="infer")),
        (PlanError, lambda: place(tree, MESH, **relaxed)),
        (CheckpointMismatchError, lambda: save_params(tmp_path / "w", tree)),
        (
            ShardingError,
            lambda: TrainState.initial_state(tree, optax.sgd(0.1), jax.random.key(0)),
        ),
        (ShardingError, lambda: sharded_init(lambda: tree, mesh=MESH, **relaxed)),
    ]
    for kind, call in calls:
        assert re.search(message, problems_of(kind, call))


def freed():
    tensor = torch.ones(2)
    tensor.untyped_storage().resize_(0)
    return tensor


class OwnTensor(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


def test_parts_of_tensors_over_processes_are_refused():
    import torch.distributed.tensor

    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        devices = distributed.init_device_mesh("cpu", (1,))
        part = distributed.tensor.distribute_tensor(torch.ones(4), devices)
        with pytest.raises(
            SelectionError,
            match=r"w: is a DTensor of torch\.distributed\.tensor, which can be a part of a "
            r"whole, and not an ordinary tensor\. Give one, such as tensor\.full_tensor\(\)\.",
        ):
            named(part)
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize(
    "call",
    [
        lambda tree: restore_params("nowhere", tree, MESH),
        lambda tree: name_axes(tree, NAMES),
        lambda tree: make_plan(tree, MESH),
        lambda tree: place(tree, MESH),
        lambda tree: TrainState.initial_state(tree, optax.sgd(0.1), jax.random.key(0)),
    ],
)
def test_modules_and_paths_are_refused_with_what_to_give(call):
    with pytest.raises(RuleTypeError, match=r"this is a module of torch, Sequential, and not its"):
        call(layers())
    with pytest.raises(
        RuleTypeError, match=r"not a path, 'm\.pt'.*torch\.load\('m\.pt', map_location='cpu'"
    ):
        call("m.pt")


def test_tied_weights_are_named_with_a_warning():
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 2), "head": torch.nn.Linear(2, 4)})
    model["head"].weight = model["embed"].weight
    message = r"'embed\.weight' and 'head\.weight' are one array, as tied weights are\..* Give one"
    with pytest.warns(ShardingWarning, match="name_axes: " + message):
        tree = name_axes(model.state_dict(), {"*.weight": ("words", "in"), "*.bias": ("words",)})
    np.testing.assert_array_equal(tree["head.weight"].data_array, tree["embed.weight"].data_array)
    with pytest.warns(ShardingWarning, match=r"TrainState\.initial_state: " + message):
        TrainState.initial_state(model.state_dict(), optax.sgd(0.1), jax.random.key(0))


def test_tensors_without_names_are_treated_like_other_arrays_without_names(tmp_path):
    weights = layers().state_dict()
    message = r"0\.weight: this array of shape \(16, 8\) has no logical axis names"
    for call in (make_plan, place):
        with pytest.raises(PlanError, match=message):
            call(weights, MESH, {})
    plan = make_plan(weights, MESH, {}, on_unnamed="replicate")
    assert [leaf.dtype for leaf in plan.leaves] == [jnp.float32] * 4
    for placed in (
        place(weights, plan),
        place(weights, MESH, {}, on_unnamed="replicate"),
        sharded_init(lambda: weights, mesh=MESH, rules={}, on_unnamed="replicate"),
    ):
        assert list(placed) == list(weights)
        for name, array in placed.items():
            assert array.sharding == jax.NamedSharding(MESH, P())
            np.testing.assert_array_equal(array, weights[name])
    saved = save_params(tmp_path / "weights", weights)
    abstract = {name: tensor.to("meta") for name, tensor in weights.items()}
    restored = restore_params(saved, abstract, MESH, {}, on_unnamed="replicate")
    for name, array in restored.items():
        np.testing.assert_array_equal(array, weights[name])


def test_what_torch_does_to_its_tensors_changes_nothing_here():
    weights = {"w": torch.ones(2**12), "b": torch.ones(8)}
    names = {"w": ("a",), "b": ("b",)}
    placed = [
        place(name_axes(weights, names), MESH, rules) for rules in ({"a": "data"}, {"b": "model"})
    ]
    placed.append(place(weights, MESH, on_unnamed="replicate"))
    states = [
        TrainState.initial_state(tree, optax.sgd(0.1), jax.random.key(0))
        for tree in (weights, name_axes(weights, names))
    ]
    placed += [
        jax.device_put(state.params, jax.tree.map(lambda _: jax.NamedSharding(MESH, P()), s))
        for state in states
        for s in [state.params]
    ]
    jax.block_until_ready(placed)
    for tensor in weights.values():
        tensor.mul_(3)
    assert {float(x) for leaf in jax.tree.leaves(placed) for x in (leaf.max(), leaf.min())} == {1}


def test_named_weights_are_saved_and_restored_onto_another_mesh(tmp_path):
    weights = layers().state_dict()
    saved = save_params(tmp_path / "weights", name_axes(weights, NAMES))
    with torch.device("meta"):
        abstract = name_axes(layers().state_dict(), NAMES)
    other = make_mesh({"data": 2, "model": 4})
    restored = restore_params(saved, abstract, other, {"out": "model", "in": "data"})
    assert restored["2.weight"].data_array.sharding.spec == P("model", "data")
    for name, array in restored.items():
        np.testing.assert_array_equal(array.data_array, weights[name])
    renamed = name_axes(weights, {"*.weight": ("rows", "in"), "*.bias": ("rows",)})
    with pytest.raises(CheckpointMismatchError, match=r"0\.bias: .*'?out'?.*rows"):
        restore_params(saved, renamed, other, {})


def test_batches_of_tensors_are_placed_by_name():
    batch = name_axes({"x": torch.ones(8, 3)}, {"x": ("batch", None)})
    placed = shard_batch(batch, MESH, {"batch": "data"})["x"].data_array
    assert placed.sharding.shard_shape(placed.shape) == (2, 3)


def test_weights_are_split_without_names_where_that_is_asked_for():
    weights = layers().state_dict()
    placed = place(weights, MESH, fully_sharded(min_size=16, unnamed="largest"))
    assert placed["2.weight"].sharding.spec == P(None, "data")
    assert placed["2.bias"].sharding.spec == P()
    np.testing.assert_array_equal(placed["2.weight"], weights["2.weight"])


def test_parameters_are_not_read_from_a_module_or_from_one_tensor(tmp_path):
    with pytest.raises(RuleTypeError, match=r"from a model, and this is a module of torch, Seq"):
        save_params(tmp_path / "weights", layers())
    with pytest.raises(RuleTypeError, match="not from a single array"):
        save_params(tmp_path / "weights", torch.ones(2))


def test_parameters_of_a_module_are_no_tree_before_they_are_collected():
    with pytest.raises(RuleTypeError, match=r"not a generator, .* dict\(\.\.\.\)\."):
        name_axes(layers().named_parameters(), NAMES)
    named = name_axes(dict(layers().named_parameters()), NAMES)
    assert dict(named["2.weight"].named_shape) == {"out": 8, "in": 16}


def test_steps_take_batches_of_tensors():
    def loss_fn(model, rng, state, x):
        loss = (x @ model["w"]).mean()
        return loss, state, {"loss": loss}

    state = TrainState.initial_state({"w": torch.ones(3, 2)}, optax.sgd(0.1), jax.random.key(0))
    step, evaluate = build_train_step_fn(loss_fn), build_eval_step_fn(loss_fn)
    batch = torch.full((4, 3), 2.0, dtype=torch.bfloat16)
    assert float(evaluate(state, x=batch)[0]) == 6
    state, aux = step(state, x=batch)
    assert float(aux["loss"]) == 6
    np.testing.assert_allclose(state.params["w"], 1 - 0.1 * np.ones((3, 2)))
    with pytest.raises(ShardingError, match=r"a step: .* read:\n  x: .* layout sparse_coo"):
        step(state, x=batch.to_sparse())
    plain = shard_batch({"x": torch.ones(8, 3)}, MESH, {"batch": "data"}, first_axis="batch")
    assert plain["x"].sharding.spec == P("data")
