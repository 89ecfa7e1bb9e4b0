"""A padded array computes as the true one, inside of programs and outside, and gives no padding."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import treescope
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from penzai import pz

from penzai_shard import PaddedArray, Padding, make_mesh
from penzai_shard.even_layouts import true_layout
from penzai_shard.meshes import auto_twin
from penzai_shard.padded_arrays import pad_to, padded_like, without_padding

TRUE = np.arange(60, dtype=np.float32).reshape(10, 6) + 1
LAYOUT = PartitionSpec("data", "model")
PADDING = Padding((12, 6), (("data",), ("model",)))
AXES = {"a": 10, "b": 6}


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"data": 4, "model": 2})


@pytest.fixture(scope="module")
def padded(mesh):
    # What the padding holds never matters, so it is not zero here.
    stored = np.full((12, 6), np.nan, np.float32)
    stored[:10] = TRUE
    return PaddedArray(jax.device_put(stored, NamedSharding(mesh, LAYOUT)), AXES, PADDING)


def of_all(array):
    rows = array.untag("b").sum()
    return (rows * pz.nx.arange("a", rows.named_shape["a"])).untag("a").sum().unwrap()


TRUE_ARRAY = pz.nx.wrap(jnp.asarray(TRUE), "a", "b")

USES = {
    "unwrap": lambda x: x.unwrap("b", "a"),
    "untag": lambda x: x.untag("a").mean().unwrap("b"),
    "nmap": lambda x: pz.nx.nmap(jnp.cos)(x).unwrap("a", "b"),
    "nmap of two": lambda x: pz.nx.nmap(jnp.add)(x, x).unwrap("a", "b"),
    "from the left": lambda x: (2.0 * x).unwrap("a", "b"),
    "from the right": lambda x: (x - TRUE_ARRAY).unwrap("a", "b"),
    "negated": lambda x: (-x).unwrap("a", "b"),
    "method": lambda x: x.astype("bfloat16").unwrap("a", "b"),
    "comparison": lambda x: (x > 5).unwrap("a", "b"),
    "looked up": lambda x: x[{"a": pz.nx.wrap(jnp.array([9, 0]), "k")}].unwrap("k", "b"),
    "beyond the end": lambda x: x[{"a": 11}].unwrap("b"),
    "from the end": lambda x: x[{"a": -1}].unwrap("b"),
    "slice": lambda x: x[{"a": pz.slice[7:]}].unwrap("a", "b"),
    "set": lambda x: x.at[{"a": 3}].set(0.0).unwrap("a", "b"),
    "order_as": lambda x: x.order_as("b", "a").data_array,
    "canonicalize": lambda x: x.canonicalize().data_array,
    "data_array": lambda x: x.data_array,
    "view": lambda x: x.as_namedarrayview().data_array,
    "softmax": lambda x: pz.nx.nmap(jax.nn.softmax)(x.untag("a")).tag("a").unwrap("a", "b"),
    "argmax": lambda x: x.untag("a").argmax().unwrap("b"),
    "concatenate": lambda x: pz.nx.concatenate([x, x], "a").unwrap("a", "b"),
    "stack": lambda x: pz.nx.stack([x, x], "c").unwrap("a", "b", "c"),
    "broadcast": lambda x: x.broadcast_to((), {"a": 10, "b": 6, "c": 2}).unwrap("a", "b", "c"),
}


def test_every_use_gets_the_true_array(padded):
    for name, use in USES.items():
        expected = np.asarray(use(TRUE_ARRAY))
        assert np.array_equal(np.asarray(use(padded)), expected), name


def test_every_use_gets_the_true_array_inside_of_a_program(padded):
    uses = jax.jit(lambda x: {name: use(x) for name, use in USES.items()})
    expected = uses(TRUE_ARRAY)
    for name, result in uses(padded).items():
        assert np.array_equal(result, expected[name]), name


def test_lengths_and_names_are_the_true_ones(padded):
    assert padded.named_shape == AXES
    assert padded.named_axes == TRUE_ARRAY.named_axes
    assert padded.positional_shape == ()
    assert padded.dtype == jnp.float32
    assert padded.data_array.shape == (10, 6)


@pytest.mark.parametrize(
    "grad_of",
    [jax.grad, lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(jax.checkpoint(f))],
    ids=["outside", "program", "rematerialised"],
)
def test_gradients_are_stored_alike_with_zeros(padded, grad_of):
    gradient = grad_of(lambda x: (of_all(x) * 1e-3) ** 2)(padded)
    expected = jax.grad(lambda x: (of_all(x) * 1e-3) ** 2)(TRUE_ARRAY)
    assert jax.tree.structure(gradient) == jax.tree.structure(padded)
    assert gradient.stored.sharding.is_equivalent_to(padded.stored.sharding, 2)
    np.testing.assert_allclose(gradient.stored[:10], expected.data_array, rtol=1e-6)
    assert not np.any(gradient.stored[10:])


def test_inside_of_a_program_no_part_is_gathered(padded):
    def product(x, w):
        return (x.untag("a").dot(w.untag("a"))).unwrap("b").sum()

    text = jax.jit(product).lower(padded, pz.nx.ones({"a": 10})).compile().as_text()
    assert "all-gather" not in text
    assert "all-reduce" in text


def test_inside_of_a_program_the_true_array_is_pinned_as_it_is_stored(padded):
    program = jax.jit(lambda x: of_all(x)).lower(padded).as_text().splitlines()
    pins = [line for line in program if "sharding_constraint" in line]
    of_true = [line for line in pins if "tensor<10x6xf32>" in line]
    assert of_true
    assert all('[{"data"}, {"model"}]' in line for line in of_true)


def test_outside_a_mesh_axis_splits_another_dimension_that_divides(mesh):
    stored = jax.device_put(np.ones((12, 16)), NamedSharding(mesh, LAYOUT))
    array = PaddedArray(stored, {"a": 10, "b": 16}, Padding((12, 16), (("data",), ("model",))))
    assert array.data_array.sharding.spec == PartitionSpec(None, ("model", "data"))


def test_outside_what_nothing_divides_is_whole(mesh, padded):
    assert padded.data_array.sharding.spec == PartitionSpec(None, "model")
    prime = true_layout(NamedSharding(mesh, LAYOUT), (7, 5))
    assert prime.is_fully_replicated


def test_explicit_meshes_give_arrays_of_the_auto_twin(padded):
    explicit = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    moved = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(explicit, LAYOUT)), padded)
    with jax.set_mesh(explicit):
        assert np.array_equal(moved.data_array, TRUE)
        assert np.array_equal(padded.data_array, TRUE)
        meshes = []

        def true_array(x):
            meshes.append(jax.typeof(x.data_array).sharding.mesh)
            return x.data_array

        inside = jax.jit(true_array)(moved)
    assert meshes[0].axis_types == auto_twin(explicit).axis_types
    assert np.array_equal(inside, TRUE)


def test_any_leaf_can_stand_in_its_place(padded):
    structure = jax.tree.structure(padded)
    for leaf in ("text", None, 3, object(), NamedSharding(make_mesh({"data": 8}), PartitionSpec())):
        made = jax.tree.unflatten(structure, [leaf])
        assert made.stored is leaf
        assert made.data_array is leaf
        assert made.named_shape == AXES
    struct = jax.eval_shape(lambda x: x, padded)
    assert struct.stored.shape == (12, 6)
    assert struct.data_array.shape == (10, 6)


def test_what_is_no_padded_array_is_refused_when_computed_with(padded):
    cut = jax.tree.map(lambda x: x[:10], padded)
    with pytest.raises(
        ValueError,
        match=r"true lengths \(10, 6\) stores an array whose last leng"
        r"ths are \(12, 6\), and this holds a ArrayImpl of shape \(10, 6\)",
    ):
        cut + 1
    with pytest.raises(ValueError, match="this holds a str"):
        jax.tree.map(lambda x: "text", padded).unwrap("a", "b")


def test_it_is_pickled_copied_mapped_and_donated(padded):
    for same in (
        pickle.loads(pickle.dumps(padded)),
        copy.copy(padded),
        copy.deepcopy(padded),
        jax.tree.map(lambda x: x, padded),
        jax.device_get(padded),
    ):
        assert type(same) is PaddedArray
        assert jax.tree.structure(same) == jax.tree.structure(padded)
        assert np.array_equal(same.data_array, TRUE)
    copied = jax.tree.map(jnp.copy, padded)
    result = jax.jit(lambda x: jax.tree.map(lambda y: y * 2, x), donate_argnums=0)(copied)
    assert copied.stored.is_deleted()
    assert np.array_equal(result.data_array, TRUE * 2)


def test_another_padding_is_another_structure(padded):
    others = [
        PaddedArray(padded.stored, {"a": 9, "b": 6}, PADDING),
        PaddedArray(padded.stored, {"b": 10, "a": 6}, PADDING),
        PaddedArray(padded.stored, AXES, Padding((12, 6), (("model",), ("data",)))),
        PaddedArray(padded.stored, AXES, Padding((16, 6), PADDING.mesh_axes)),
        TRUE_ARRAY,
    ]
    for other in others:
        assert jax.tree.structure(other) != jax.tree.structure(padded)


def test_positional_dimensions_come_first_and_are_kept():
    stored = np.arange(24.0).reshape(2, 4, 3)
    array = PaddedArray(stored, {"a": 3, "b": 3}, Padding((4, 3), (("data",), ())))
    assert array.positional_shape == (2,)
    assert np.array_equal(array.data_array, stored[:, :3])
    assert array.spec == PartitionSpec(None, "data")


def test_padding_comes_off_and_goes_on_again(padded):
    plain = without_padding({"w": padded, "other": 3})["w"]
    assert type(plain) is pz.nx.NamedArray
    assert np.array_equal(plain.data_array, TRUE)
    again = padded_like(plain.order_as("b", "a"), padded)
    assert jax.tree.structure(again) == jax.tree.structure(padded)
    assert np.array_equal(again.stored, pad_to(TRUE, (12, 6)))

    @jax.jit
    def twice(x):
        return padded_like(without_padding(x) * 2, x)

    result = twice(padded)
    assert result.stored.sharding.is_equivalent_to(padded.stored.sharding, 2)
    assert np.array_equal(result.stored, pad_to(TRUE * 2, (12, 6)))


def test_treescope_shows_the_true_array_and_that_it_is_padded(padded):
    text = treescope.render_to_text(padded)
    assert "a:10, b:6" in text
    assert "stored padded: 'a' as 12 over 'data'" in text
    assert "nan" not in text
    assert "stored padded" in repr(padded)
    assert "stored padded" in treescope.render_to_text(jax.eval_shape(lambda x: x, padded))
    donated = jax.tree.map(jnp.copy, padded)
    donated.stored.delete()
    assert treescope.render_to_text(donated).endswith("'a' as 12 over 'data', deleted")


@settings(max_examples=20, deadline=None)
@given(
    length=st.integers(1, 23),
    parts=st.sampled_from([1, 2, 4, 8]),
    dtype=st.sampled_from([np.float32, np.int32, np.bool_, jnp.bfloat16]),
)
def test_any_length_comes_back(length, parts, dtype):
    values = (np.arange(length * 2) % 5).reshape(length, 2).astype(dtype)
    stored = pad_to(values, (-(-length // parts) * parts, 2))
    padding = Padding(stored.shape, (("data",), ()))
    layout = NamedSharding(make_mesh({"data": parts, "rest": 8 // parts}), PartitionSpec("data"))
    array = PaddedArray(jax.device_put(stored, layout), {"a": length, "b": 2}, padding)
    assert np.array_equal(array.data_array, values)
    assert np.array_equal(array.order_as("b", "a").data_array, values.T)
