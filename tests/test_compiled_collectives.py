"""The reader of compiled programs that tests and benchmarks count collectives with."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.compiled_collectives import bytes_moved, counts, read_collectives
from penzai_shard.meshes import make_mesh

MESH = make_mesh({"data": 4, "model": 2})
P = PartitionSpec
X = jax.ShapeDtypeStruct((16, 8), jnp.float32)


def per_device(function, into, out, *arguments):
    """The collectives of a function that runs per device."""
    mapped = jax.shard_map(function, mesh=MESH, in_specs=into, out_specs=out, check_vma=False)
    return read_collectives(jax.jit(mapped).lower(*arguments or (X,)).compile(), MESH)


ONE_OF_EACH = {
    # Kind and mesh axes; the whole array in bytes, and what each device sends of it.
    "all-reduce": (
        lambda x: jax.lax.psum(x, "data"),
        (P("data", "model"), P(None, "model")),
        (("data",), 4, 4 * 4 * 4, 2 * 3 / 4),
    ),
    "all-gather": (
        lambda x: jax.lax.all_gather(x, "model", axis=1, tiled=True),
        (P("data", "model"), P("data")),
        (("model",), 2, 4 * 8 * 4, 1 / 2),
    ),
    "reduce-scatter": (
        lambda x: jax.lax.psum_scatter(x, "data", tiled=True),
        (P(None, "model"), P("data", "model")),
        (("data",), 4, 16 * 4 * 4, 3 / 4),
    ),
    "all-to-all": (
        lambda x: jax.lax.all_to_all(x, "data", 1, 0, tiled=True),
        (P("data"), P(None, "data")),
        (("data",), 4, 4 * 8 * 4, 3 / 4),
    ),
    "collective-permute": (
        lambda x: jax.lax.ppermute(x, "data", [(i, (i + 1) % 4) for i in range(4)]),
        (P("data"), P("data")),
        (("data",), 2, 4 * 8 * 4, 1),
    ),
}


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_each_kind_is_found_with_its_mesh_axes_and_bytes(kind):
    function, specs, (axes, group_size, payload, share) = ONE_OF_EACH[kind]
    (one,) = per_device(function, *specs)
    assert (one.kind, one.meaning, one.mesh_axes, one.group_size) == (kind, kind, axes, group_size)
    assert one.payload_bytes == payload
    assert one.times == 1
    assert one.bytes_moved() == one.bytes_moved(as_meant=True) == payload * share


def test_a_collective_over_several_mesh_axes_and_of_several_arrays_is_one():
    (one,) = per_device(
        lambda x: jax.lax.psum((x, 2 * x[:1]), ("data", "model")), P("data", "model"), P()
    )
    assert one.mesh_axes == ("data", "model")
    assert one.arrays == ("f32[4,4]", "f32[1,4]")
    assert one.payload_bytes == (4 + 1) * 4 * 4


def test_loops_count_each_turn():
    def turn(carry, _):
        inner = lambda c, _: (jax.lax.psum(c, "data") * 0.5, None)  # noqa: E731
        return jax.lax.pmax(jax.lax.scan(inner, carry, None, length=3)[0], "model"), None

    found = per_device(
        lambda x: jax.lax.scan(turn, x, None, length=5)[0], P("data", "model"), P("data", "model")
    )
    assert counts(found) == {("all-reduce", ("data",)): 15, ("all-reduce", ("model",)): 5}
    assert counts(found, executed=False).total() == 2
    assert bytes_moved(found) == 64 * (15 * 1.5 + 5 * 1)


def test_a_loop_without_a_known_number_of_turns_is_refused():
    def function(x):
        turn = lambda x: jax.lax.psum(x, "data") * 0.1  # noqa: E731
        return jax.lax.while_loop(lambda x: x.sum() > 1, turn, x)

    mapped = jax.shard_map(function, mesh=MESH, in_specs=P(), out_specs=P(), check_vma=False)
    compiled = jax.jit(mapped).lower(X).compile()
    with pytest.raises(ValueError, match="in a loop whose number of turns the program does not"):
        read_collectives(compiled, MESH)
    (one,) = read_collectives(compiled, MESH, unknown_trip_count=7)
    assert one.times == 7


# On CPUs the partitioner writes a reduce-scatter as an all-reduce and a slice.


def gradient(out_spec, dtype="float32"):
    """The collectives of a gradient summed over the data axis, laid out in some way."""

    def function(w, x):
        return jax.grad(lambda w: (x.astype(dtype) @ w).sum() * 0.5)(w)

    def struct(shape, spec, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(MESH, spec))

    step = jax.jit(function, out_shardings=NamedSharding(MESH, out_spec))
    lowered = step.lower(
        struct((8, 16), P(None, "model"), dtype), struct((16, 8), P("data"), "float32")
    )
    return read_collectives(lowered.compile(), MESH)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_all_reduce_that_is_only_sliced_is_meant_as_a_reduce_scatter(dtype):
    (one,) = gradient(P("data", "model"), dtype)
    assert (one.kind, one.meaning, one.mesh_axes) == ("all-reduce", "reduce-scatter", ("data",))
    assert one.scattered_bytes == one.payload_bytes
    assert one.bytes_moved(as_meant=True) == one.bytes_moved() / 2
    assert counts([one]) == {("reduce-scatter", ("data",)): 1}
    assert counts([one], as_meant=False) == {("all-reduce", ("data",)): 1}


def test_an_all_reduce_whose_whole_result_is_used_stays_one():
    (one,) = gradient(P(None, "model"))
    assert (one.meaning, one.scattered_bytes) == ("all-reduce", 0)


SLICED = """
HloModule jit_step

%half (whole: f32[4,4], i: s32[]) -> (f32[1,4], f32[4,4]) {
  %whole = f32[4,4]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %doubled = f32[4,4]{1,0} add(%whole, %whole)
  %slice = f32[1,4]{1,0} dynamic-slice(%doubled, %i, %zero), dynamic_slice_sizes={1,4}
  ROOT %both = (f32[1,4]{1,0}, f32[4,4]{1,0}) tuple(%slice, %doubled)
}

ENTRY %main_spmd (p: f32[4,4]) -> f32[1,4] {
  %p = f32[4,4]{1,0} parameter(0)
  %i = s32[] constant(0)
  %r = (f32[4,4]{1,0}, f32[4,4]{1,0}) all-reduce(%p, %p), replica_groups=[2,4]<=[4,2]T(1,0)
  %first = f32[4,4]{1,0} get-tuple-element(%r), index=0
  %second = f32[4,4]{1,0} get-tuple-element(%r), index=1
  %fused = (f32[1,4]{1,0}, f32[4,4]{1,0}) fusion(%first, %i), kind=kLoop, calls=%half
  %sliced = f32[1,4]{1,0} get-tuple-element(%fused), index=0
  %whole_again = f32[4,4]{1,0} get-tuple-element(%fused), index=1
  %later = f32[1,4]{1,0} dynamic-slice(%whole_again, %i, %i), dynamic_slice_sizes={1,4}
  ROOT %end = f32[1,4]{1,0} add(%sliced, %later)
}
"""


@pytest.mark.parametrize(
    ("before", "after", "scattered"),
    [
        ("", "", 64),
        # The second array of the same operation is used whole, or sliced too.
        ("add(%sliced, %later)", "dot(%sliced, %second)", 64),
        ("add(%sliced, %later)", "dynamic-slice(%second, %i, %i)", 128),
        # The first is used whole, by one of its users, or cut into halves instead of quarters.
        ("dynamic-slice(%whole_again, %i, %i)", "dot(%whole_again, %p)", 0),
        ("f32[1,4]{1,0} dynamic-slice(%whole_again", "f32[2,4]{1,0} dynamic-slice(%whole_again", 0),
        ("dynamic-slice(%whole_again, %i, %i)", "dynamic-slice(%p, %whole_again)", 0),
        (
            "ROOT %end = f32[1,4]{1,0} add(%sliced, %later)",
            "ROOT %end = (f32[4,4]) tuple(%first)",
            0,
        ),
    ],
)
def test_slices_are_followed_through_fusions_and_tuples(before, after, scattered):
    assert before in SLICED
    (one,) = read_collectives(SLICED.replace(before, after) if before else SLICED, MESH)
    assert (one.payload_bytes, one.scattered_bytes) == (128, scattered)
    assert one.meaning == ("reduce-scatter" if scattered == 128 else "all-reduce")
    assert one.bytes_moved(as_meant=True) == 128 * 1.5 - scattered * 0.75


ADDED = """
HloModule jit_step

%add_up (a: f32[4,4], b: f32[4,4], c: f32[4,4]) -> f32[4,4] {
  %a = f32[4,4]{1,0} parameter(0)
  %b = f32[4,4]{1,0} parameter(1)
  %c = f32[4,4]{1,0} parameter(2)
  %some = f32[4,4]{1,0} add(%b, %c)
  %all = f32[4,4]{1,0} add(%some, %a)
  ROOT %more = f32[4,4]{1,0} multiply(%all, %all)
}

ENTRY %main_spmd (p: f32[4,4]) -> f32[4,4] {
  %p = f32[4,4]{1,0} parameter(0)
  %r = (f32[4,4]{1,0}, f32[4,4]{1,0}, f32[4,4]{1,0}) all-reduce(%p, %p, %p), replica_groups={{0,1}}
  %x = f32[4,4]{1,0} get-tuple-element(%r), index=0
  %y = f32[4,4]{1,0} get-tuple-element(%r), index=1
  %z = f32[4,4]{1,0} get-tuple-element(%r), index=2
  ROOT %end = f32[4,4]{1,0} fusion(%x, %z, %y), kind=kLoop, calls=%add_up
}
"""


@pytest.mark.parametrize(
    ("before", "after", "added"),
    [
        ("", "", 128),
        # Another use of one of them, of a part of the sum, or another operation than a sum.
        ("calls=%add_up", "calls=%add_up\n  %other = f32[4,4] copy(%y)", 0),
        ("multiply(%all, %all)", "multiply(%all, %some)", 0),
        ("multiply(%all, %all)", "multiply(%all, %b)", 0),
        ("add(%some, %a)", "multiply(%some, %a)", 0),
        ("fusion(%x, %z, %y), kind=kLoop, calls=%add_up", "add(%x, %z)", 64),
    ],
)
def test_what_is_only_added_up_afterwards_counts_once(before, after, added):
    assert before in ADDED
    (one,) = read_collectives(ADDED.replace(before, after) if before else ADDED)
    assert (one.payload_bytes, one.added_bytes) == (192, added)
    assert one.bytes_moved() == 192
    assert one.bytes_moved(as_meant=True) == 192 - added


# What other versions, other devices and larger meshes write, as it was recorded.

PROGRAM = """
HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}

ENTRY %main_spmd (p: f32[4,4]) -> f32[4,4] {{
  %p = f32[4,4]{{1,0:T(8,128)S(1)}} parameter(0), metadata={{op_name="x (y)"}}
  {}
}}
"""


def read_line(line, mesh=MESH):
    return read_collectives(PROGRAM.format(line), mesh)


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,2,4,6},{1,3,5,7}}", ("data",)),
        ("{{1,3,5,7},{6,4,2,0}}", ("data",)),
        ("{{0,1},{2,3},{4,5},{6,7}}", ("model",)),
        ("{{0,1,2,3,4,5,6,7}}", ("data", "model")),
        ("{}", ("data", "model")),
        ("[2,4]<=[4,2]T(1,0)", ("data",)),
        ("[4,2]<=[8]", ("model",)),
        ("[1,8]<=[8]", ("data", "model")),
        ("[8,1]<=[8]", ()),
        ("mesh['data'=4,'model'=2] {'data'}", ("data",)),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_1'}", ("model",)),
        ("mesh['a'=4,'b'=2] {'a','b'}", ("data", "model")),
        ("mesh['a'=8] {'a':(4)2}", ("model",)),
        ("mesh['a'=8] {'a':(1)4}", ("data",)),
        ("mesh['a'=2,'b'=4], device_ids=([8]<=[4,2]T(1,0)) {'b'}", ("data",)),
        ("mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'a'}", None),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", ("data",)),
        ("mesh['a'=4,'b'=2], device_ids=([8]) {'b'}", ("model",)),
        ("mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'a'}", ("model",)),
        # Parts of the data axis, and devices that share no line.
        ("[4,2]<=[2,4]T(1,0)", None),
        ("{{0,1,2,3},{4,5,6,7}}", None),
        ("{{0,3},{1,2},{4,7},{5,6}}", None),
        ("{{0,1},{2,3}}", None),
    ],
)
def test_groups_are_read_in_every_form(groups, axes):
    (one,) = read_line(
        f"ROOT %r = f32[4,4]{{1,0}} all-reduce(%p), channel_id=1, replica_groups={groups}, "
        'use_global_device_ids=true, to_apply=%add, metadata={op_name="jit(f)/psum"}'
    )
    assert one.mesh_axes == axes
    assert (one.payload_bytes, one.scope) == (64, "jit(f)/psum")


def test_4096_devices_on_three_mesh_axes():
    mesh = {"replica": 4, "data": 128, "model": 8}
    line = "ROOT %r = f32[4,4] all-reduce(%p), replica_groups={}, to_apply=%add"
    for groups, axes in [
        ("[32,128]<=[4,128,8]T(0,2,1)", ("data",)),
        ("[8,512]<=[512,8]T(1,0)", ("replica", "data")),
        ("[512,8]<=[4096]", ("model",)),
    ]:
        assert read_line(line.format(groups), mesh)[0].mesh_axes == axes


@pytest.mark.parametrize(
    ("line", "kind", "payload"),
    [
        (
            "%r = (bf16[4,4]{1,0}, bf16[16,4]{1,0}) all-gather-start(%p), "
            "replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}",
            "all-gather",
            16 * 4 * 2,
        ),
        (
            "%r = ((f32[4,4]{1,0:T(8,128)}, f32[2]), (f32[16,4]{1,0:T(8,128)}, f32[8])) "
            "all-gather-start(%p, %q), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}",
            "all-gather",
            (16 * 4 + 8) * 4,
        ),
        (
            "%r = (f32[4,4]{1,0}, /*index=1*/f32[2]{0}) all-reduce-start(%p, %q), "
            "replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add",
            "all-reduce",
            (16 + 2) * 4,
        ),
        (
            "%r = (f32[4,4]{1,0}, f32[4,4]{1,0}, u32[], u32[]) collective-permute-start(%p), "
            "source_target_pairs={{0,2},{2,4},{4,6},{6,0},{1,3},{3,5},{5,7},{7,1}}",
            "collective-permute",
            64,
        ),
        (
            "%r = f8e4m3fn[4,4]{1,0} reduce-scatter(%p), dimensions={0}, "
            "replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add",
            "reduce-scatter",
            4 * 16,
        ),
    ],
)
def test_asynchronous_and_accelerators_forms(line, kind, payload):
    done = f"ROOT %done = f32[16,4] {kind}-done(%r)"
    (one,) = read_line(f"{line}\n  {done}")
    assert (one.kind, one.mesh_axes, one.payload_bytes) == (kind, ("data",), payload)


def test_what_cannot_be_read_is_an_error():
    with pytest.raises(ValueError, match="its groups of devices cannot be read"):
        read_line("ROOT %r = f32[4,4] all-reduce(%p), replica_groups=new_form, to_apply=%add")
    with pytest.raises(ValueError, match="it has no ENTRY"):
        read_collectives(jax.jit(jnp.sin).lower(X).as_text())


def test_without_a_mesh_axes_are_not_named():
    (one,) = read_line("ROOT %r = f32[4] all-reduce(%p), replica_groups=[2,4]<=[8]", None)
    assert (one.mesh_axes, one.group_size) == (None, 4)
