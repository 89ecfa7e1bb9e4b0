"""What is drawn of an array is what JAX says of its sharding, for any sharding and any array."""

import dataclasses
import html.parser
import io
import itertools
import json
import math
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
import treescope
from jax._src.sharding_impls import GSPMDSharding
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    Sharding,
    SingleDeviceSharding,
)
from jax.sharding import PartitionSpec as P
from penzai import pz

import penzai_shard as pzs
from penzai_shard.errors import PlanError, RuleTypeError, ShardingError
from penzai_shard.views import showing_shardings

modest = hypothesis.settings(max_examples=60)


# What is drawn, read back from the text and from the HTML


class Cells(html.parser.HTMLParser):
    """The rows of the last table of some HTML, each cell with its tag, classes and text."""

    def __init__(self, text):
        super().__init__()
        self.rows = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag == "table":
            self.rows = []
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("th", "td"):
            self.rows[-1].append([tag, dict(attrs), ""])

    def handle_data(self, data):
        if self.rows and self.rows[-1]:
            self.rows[-1][-1][2] += data


def interval(text):
    start, stop = text.split(":")
    return int(start), int(stop)


def filled(labels):
    """Labels with those that are the same as before written again."""
    before = None
    for label in labels:
        before = label or before
        yield before


def devices_in(text):
    for run in re.sub(r" \(process.*", "", text).split(", "):
        first, _, last = run.partition("-")
        yield from range(int(first), int(last or first) + 1)


def read_text(text):
    """For each device the intervals by dimension that a drawing in text says it holds."""
    lines = text.splitlines()
    top = next(i for i, line in enumerate(lines) if "┌" in line)
    margin = lines[top].index("┌")
    walls = [i for i, c in enumerate(lines[top]) if c in "┌┬┐"]
    row_names = [(m.start(), m.group()) for m in re.finditer(r"\S+( \d+)?", lines[top][:margin])]
    across = []
    for line in itertools.takewhile(lambda line: ":" in line[margin:], reversed(lines[:top])):
        padded = line.ljust(walls[-1] + 1)
        heads = [padded[a + 1 : b].strip() for a, b in itertools.pairwise(walls)]
        across.append((line[:margin].strip(), list(filled(heads))))
    held, before = {}, {}
    for line in lines[top:]:
        if "│" not in line:
            continue
        starts = [start for start, _ in row_names] + [margin]
        for (start, stop), (_, name) in zip(itertools.pairwise(starts), row_names, strict=True):
            before[name] = line[start:stop].strip() or before[name]
        for column, (a, b) in enumerate(itertools.pairwise(walls)):
            where = {name: interval(label) for name, label in before.items()}
            where |= {name: interval(heads[column]) for name, heads in across}
            for device in devices_in(line[a + 1 : b].strip(" *")):
                assert held.setdefault(device, where) is where
    return held


def read_html(text):
    """The same of a drawing in HTML, from its headings and cells."""
    rows = Cells(text).rows
    across, names, before, held = [], [], {}, {}
    for row in rows:
        heads = [each for each in row if each[0] == "th"]
        cells = [each for each in row if each[0] == "td"]
        if not cells:
            if len(heads) > 1 and heads[1][1].get("class") == "c":
                across.append((heads[0][2], list(filled([head[2] for head in heads[1:]]))))
            else:
                names = [head[2] for head in heads]
            continue
        for name, head in zip(names, heads, strict=False):
            before[name] = head[2] or before[name]
        for column, (_, attributes, shown) in enumerate(cells):
            where = {name: interval(label) for name, label in before.items()}
            where |= {name: interval(labels[column]) for name, labels in across}
            devices = attributes["title"].rpartition(" on ")[2].split(", ")
            assert list(map(int, devices)) == list(devices_in(shown))
            for device in map(int, devices):
                assert held.setdefault(device, where) is where
    return held


def wanted(sharding, shape, names):
    """For each device the intervals by dimension that JAX says it holds."""
    return {
        device.id: {
            name: part.indices(length)[:2]
            for name, part, length in zip(names, index, shape, strict=True)
        }
        for device, index in sharding.devices_indices_map(shape).items()
    }


def assert_drawn(drawing, held, shape, names):
    """That the text, the HTML and the JSON of a drawing say that devices hold these parts."""
    whole = {name: (0, length) for name, length in zip(names, shape, strict=True)}
    text = drawing.table().plain_text(200)
    for drawn in (read_text(text), read_html(drawing._repr_html_())):
        # A dimension that is not drawn is whole, as the table above says.
        assert {device: whole | where for device, where in drawn.items()} == held
    for part in json.loads(drawing.to_json())["parts"]:
        for device in part["devices"]:
            assert dict(zip(names, map(tuple, part["intervals"]), strict=True)) == held[device]
    for name, length in whole.items():
        assert re.search(rf"^{name} +{length[1]:,} ", text, re.MULTILINE)


MESHES = (
    {"x": 8},
    {"x": 4, "y": 2},
    {"x": 2, "y": 3},
    {"x": 2, "y": 1, "z": 3},
    {"x": 2, "y": 2, "z": 2},
)


@st.composite
def layouts(draw):
    """A mesh of devices in any order, a spec, and a shape that it splits evenly."""
    sizes = draw(st.sampled_from(MESHES))
    devices = draw(st.permutations(jax.devices()))[: math.prod(sizes.values())]
    kind = draw(st.sampled_from([AxisType.Auto, AxisType.Explicit]))
    mesh = Mesh(
        np.array(devices).reshape(*sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes)
    )
    rank = draw(st.integers(0, 6))
    entries = [[] for _ in range(rank)]
    for axis in draw(st.permutations(list(sizes))):
        dimension = draw(st.integers(0, rank))
        if dimension < rank:
            entries[dimension].append(axis)
    counts = [math.prod(sizes[axis] for axis in entry) for entry in entries]
    shape = tuple(count * draw(st.integers(1, 3)) for count in counts)
    names = [draw(st.sampled_from([f"name{i}", None])) for i in range(rank)]
    return shape, mesh, P(*(tuple(entry) or None for entry in entries)), names


@hypothesis.given(layouts())
@modest
def test_any_sharding_is_drawn_as_jax_lays_it_out(layout):
    shape, mesh, spec, names = layout
    sharding = NamedSharding(mesh, spec)
    called = [name or f"dimension {i}" for i, name in enumerate(names)]
    struct = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    view = pz.nx.NamedArrayView(
        data_shape=shape,
        data_axis_for_logical_axis=tuple(i for i, name in enumerate(names) if name is None),
        data_axis_for_name={name: i for i, name in enumerate(names) if name is not None},
        data_array=struct,
    )
    drawing = pzs.show_sharding(view)
    assert_drawn(drawing, wanted(sharding, shape, called), shape, called)
    assert drawing.bytes_per_device == 4 * math.prod(sharding.shard_shape(shape))
    used = {axis for entry in spec if entry is not None for axis in entry}
    assert set(drawing.parts.replicating) == {
        axis for axis, size in mesh.shape.items() if axis not in used and size > 1
    }
    # Without devices, their places in the mesh are drawn.
    abstract = pzs.show_sharding((shape, NamedSharding(mesh.abstract_mesh, spec)))
    unnamed = [f"dimension {i}" for i in range(len(shape))]
    by_place = wanted(sharding, shape, unnamed)
    assert_drawn(
        abstract,
        {place: by_place[device.id] for place, device in enumerate(mesh.devices.flat)},
        shape,
        unnamed,
    )


def without_mesh(sharding, rank):
    """The same sharding as JAX has it of what the compiler laid out, without a mesh."""
    devices = tuple(sharding.mesh.devices.flat)
    return GSPMDSharding(devices, sharding._to_xla_hlo_sharding(rank))


@hypothesis.given(layouts())
@modest
def test_shardings_without_a_mesh_are_drawn_as_well(layout):
    shape, mesh, spec, _ = layout
    named = NamedSharding(mesh, spec)
    sharding = without_mesh(named, len(shape))
    names = [f"dimension {i}" for i in range(len(shape))]
    assert_drawn(pzs.show_sharding((shape, sharding)), wanted(named, shape, names), shape, names)


MESH = pzs.make_mesh({"data": 4, "model": 2})


def test_a_parameter_is_drawn_by_its_label_and_logical_axes():
    layer = pz.nn.Linear.from_config("mlp/up", jax.random.key(0), {"embedding": 8}, {"neurons": 16})
    layer = pzs.place(layer, MESH, {"neurons": "model", "embedding": "data"})
    weights = layer.select().at_instances_of(pz.nx.NamedArray).get_sequence()
    (parameter,) = pz.unbind_params(layer)[1]
    drawings = [pzs.show_sharding(each) for each in (parameter, parameter.freeze(), layer)]
    for drawing in drawings:
        assert drawing.path == "mlp/up.weights"
        assert [each.name for each in drawing.parts.dimensions] == ["embedding", "neurons"]
        assert "float32[embedding=8, neurons=16], 512 B, is in 8 parts" in str(drawing)
        assert "64 B on each device" in str(drawing)
    assert not weights
    plan = pzs.make_plan(layer, MESH, {"neurons": "model", "embedding": "data"})
    assert pzs.show_sharding(plan.leaves[0]).to_json() == drawings[0].to_json()


def test_one_device_scalars_and_empty_arrays():
    on_one = jax.device_put(jnp.ones((2, 3)), jax.devices()[5])
    assert isinstance(on_one.sharding, SingleDeviceSharding)
    names = ["dimension 0", "dimension 1"]
    drawing = pzs.show_sharding(on_one)
    assert_drawn(drawing, {5: {"dimension 0": (0, 2), "dimension 1": (0, 3)}}, (2, 3), names)
    assert "24 B, is on one device" in str(drawing)
    assert "?" not in str(drawing)
    everywhere = pzs.show_sharding(jax.device_put(1.0, NamedSharding(MESH, P())))
    assert_drawn(everywhere, {i: {} for i in range(8)}, (), [])
    assert "is whole on each of 8 devices, 4 B on each" in str(everywhere)
    empty = pzs.show_sharding(((0, 8), NamedSharding(MESH, P("data"))))
    assert empty.bytes_per_device == 0
    assert [part.devices for part in empty.parts.parts] == [tuple(range(8))]


def test_keys_and_deleted_arrays_are_drawn_and_nothing_is_moved():
    keys = jax.device_put(jax.random.split(jax.random.key(0), 8), NamedSharding(MESH, P("data")))
    assert pzs.show_sharding(keys).bytes_per_device == keys.addressable_shards[0].data.nbytes
    array = jax.device_put(jnp.arange(8.0), NamedSharding(MESH, P("data")))
    before = str(pzs.show_sharding(array))
    array.delete()
    with jax.transfer_guard("disallow"):
        assert str(pzs.show_sharding(array)) == before


def test_lengths_that_do_not_divide_are_drawn_as_xla_pads_them_and_said():
    drawing = pzs.show_sharding(((5, 2), NamedSharding(MESH, P("data"))))
    assert [(part.intervals[0], part.devices) for part in drawing.parts.parts] == [
        ((0, 2), (0, 1)),
        ((2, 4), (2, 3)),
        ((4, 5), (4, 5)),
        ((5, 5), (6, 7)),
    ]
    assert "dimension 0 (5) does not divide over data=4: JAX refuses this" in str(drawing)
    assert "4 of 0 to 2" in str(drawing)


def test_what_is_manual_left_to_the_compiler_or_not_summed_is_said():
    kinds = (AxisType.Manual, AxisType.Auto)
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=kinds)
    manual = pzs.show_sharding(((8, 8), NamedSharding(mesh, P("model"))))
    assert "one device holds each" in str(manual)
    assert "manual over data=4: this is the array of one place along them" in str(manual)
    assert manual.parts.replicating == ()
    left = pzs.show_sharding(((8, 8), NamedSharding(MESH, P("data", P.UNCONSTRAINED))))
    assert "at least 4 parts; the compiler decides" in str(left)
    assert "left to the compiler" in str(left)
    assert left.parts.replicating == ()
    explicit = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    summed = NamedSharding(explicit, P("data", unreduced={"model"}))
    unreduced = pzs.show_sharding(((8, 8), summed))
    assert "not summed yet over model=2: each device holds a summand" in str(unreduced)
    assert unreduced.parts.replicating == ()
    on_host = NamedSharding(MESH, P("data"), memory_kind="pinned_host")
    assert "in memory of kind pinned_host" in str(pzs.show_sharding(((8,), on_host)))


def test_traced_arrays_are_drawn_where_their_type_says_the_layout():
    explicit = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    drawn = []

    def draw(x):
        drawn.append(pzs.show_sharding(x))
        return x

    struct = jax.ShapeDtypeStruct((8, 8), "float32", sharding=NamedSharding(explicit, P("data")))
    jax.eval_shape(draw, struct)
    assert [part.devices for part in drawn[0].parts.parts] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert "replicated over model=2: 2 devices hold the same part, unless jax.vmap" in str(drawn[0])
    mapped = jax.shard_map(draw, mesh=MESH, in_specs=P("data"), out_specs=P("data"))
    jax.eval_shape(mapped, struct.update(sharding=None))
    assert drawn[1].parts.manual == ("data", "model")
    assert drawn[1].parts.shape == (2, 8)
    with pytest.raises(PlanError, match="is traced, and the compiler decides its layout later"):
        jax.eval_shape(draw, jnp.ones(3))
    partly = jax.shard_map(
        draw, mesh=MESH, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )
    with pytest.raises(PlanError, match="decides its layout over 'model' later"):
        jax.eval_shape(jax.jit(partly), struct.update(sharding=None))


def test_512_devices_fit_on_a_screen_and_all_are_in_the_table():
    mesh = pzs.make_mesh({"pod": 2, "data": 16, "model": 16}, abstract=True)
    for spec in (P("pod", "data", "model"), P(("pod", "data", "model")), P(None, "data", "model")):
        drawing = pzs.show_sharding(((32, 512, 512), NamedSharding(mesh, spec)))
        for width in (60, 100):
            lines = drawing.table().plain_text(width).splitlines()
            assert len(lines) < 60
            assert all(len(line) <= width for line in lines)
        assert len(drawing._repr_html_()) < 100_000
        text = drawing.table(collapse=False).plain_text(100)
        numbers = {int(n) for row in text.splitlines()[3:] for n in re.findall(r"\b\d+\b", row)}
        assert numbers >= set(range(512))
    rows = pzs.show_sharding(((4096,), NamedSharding(mesh, P(("pod", "data", "model")))))
    assert "of 512 rows the first and the last are drawn" in str(rows)
    assert "0:8          │ 0 " in str(rows)
    assert "4088:4096    │ 511 " in str(rows)


# Arrays of several processes


@dataclasses.dataclass(frozen=True)
class Device:
    id: int
    process_index: int
    platform: str = "tpu"


class OfOthers(Sharding):
    """A sharding whose devices belong to four processes, of which this one is the first."""

    memory_kind = None
    devices = tuple(Device(i, i // 2) for i in range(8))

    def devices_indices_map(self, global_shape):
        length = global_shape[0] // 8
        return {d: (slice(d.id * length, (d.id + 1) * length),) for d in self.devices}


def test_an_array_that_is_not_fully_addressable_is_drawn_with_its_processes(monkeypatch):
    called = []
    monkeypatch.setattr(showing_shardings, "show_own_parts", lambda: called.append(1))
    drawing = pzs.show_sharding(((16,), OfOthers()))
    assert called
    text = str(drawing.table())
    names = ["dimension 0"]
    held = {i: {"dimension 0": (2 * i, 2 * i + 2)} for i in range(8)}
    assert_drawn(drawing, held, (16,), names)
    assert re.search(r"\b1 \(process 0\) \*", text)
    assert re.search(r"\b2 \(process 1\) +│", text)
    assert "* marks what this process (0) has" in text
    assert drawing._repr_html_().count('class="own"') == 2
    assert called == [1]


def test_treescope_is_changed_only_by_the_drawing_of_an_array_of_others(monkeypatch):
    monkeypatch.setattr(showing_shardings, "show_own_parts", None)
    assert "process" not in str(pzs.show_sharding(jnp.ones(3)))


# Where it is shown


def test_it_is_shown_by_rich_in_colour_and_inside_other_values_by_treescope():
    drawing = pzs.show_sharding(((64,), NamedSharding(MESH, P(("model", "data")))))
    stream = io.StringIO()
    rich.console.Console(file=stream, force_terminal=True, width=100).print(drawing)
    coloured = stream.getvalue()
    assert "\x1b[" in coloured
    plain = re.sub(r"\x1b\[[\d;]*m", "", coloured)
    assert [line.rstrip() for line in plain.splitlines()] == str(drawing).splitlines()
    assert "<script" not in drawing._repr_html_()
    with treescope.active_autovisualizer.set_scoped(treescope.ArrayAutovisualizer()):
        inside = treescope.render_to_text({"w": drawing})
    assert "<ShardingDrawing: array[64], 64 elements, is in 8 parts" in inside


def test_names_that_are_markup_or_steer_a_terminal_are_written_out():
    array = pz.nx.NamedArray(
        {"<b>": 8, "<i>\x1b[31m": 2},
        jax.device_put(jnp.ones((8, 2)), NamedSharding(MESH, P("data", "model"))),
    )
    drawing = pzs.show_sharding(array)
    assert not re.search("<[bi]>", drawing._repr_html_())
    assert "\x1b" not in str(drawing) + drawing._repr_html_()


# What cannot be drawn


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (NamedSharding(MESH, P("data")), RuleTypeError, "has no shape, .*show_sharding\\(\\(shape"),
        (P("data"), RuleTypeError, "a spec alone .*, NamedSharding\\(mesh, spec\\)"),
        (MESH, RuleTypeError, "Mesh holds no array that could be drawn. Give an array of JAX"),
        (
            pzs.make_plan({"w": pz.nx.ones({"a": 8})}, MESH, {}),
            RuleTypeError,
            r"a plan is of several arrays \(1\).*param_dict\(plan.restore_structs\(\)\)\[name\]",
        ),
        ("text", RuleTypeError, "str holds no array that could be drawn"),
        ([], RuleTypeError, "list holds no array"),
        (
            [jnp.ones(1), jnp.ones(2)],
            RuleTypeError,
            "list holds 2 arrays, .*: 0, 1. Give one of .*name",
        ),
        (np.ones(3), PlanError, "the array is in the memory of this process.*place\\(tree, mesh"),
        ({"w": 1.5}, PlanError, "w: it is in the memory of this process.*\\(float\\)"),
        (jax.ShapeDtypeStruct((3,), "int8"), PlanError, "a jax.ShapeDtypeStruct without a shard"),
        (((8,), P("data")), RuleTypeError, "a spec alone .*NamedSharding\\(mesh, spec\\)"),
        (((8,), NamedSharding(MESH, P(None, "data"))), ShardingError, "splits 2 dimensions, and"),
        (
            (
                (7,),
                without_mesh(NamedSharding(MESH, P("data")), 1),
            ),
            ShardingError,
            "is not one of an array of shape \\(7,\\)",
        ),
    ],
)
def test_what_has_no_layout_is_refused_with_what_to_give(given, error, message):
    with pytest.raises(error, match=message):
        pzs.show_sharding(given)


def test_an_array_that_the_plan_leaves_to_jax_is_refused():
    plan = pzs.make_plan({"w": jnp.ones(3)}, MESH, {}, on_unnamed="infer")
    with pytest.raises(PlanError, match="w: the plan leaves its layout to JAX"):
        pzs.show_sharding(plan.leaves[0])
