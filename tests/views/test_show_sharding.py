"""What is drawn of an array is what JAX says of its sharding, for any sharding and any array."""

import dataclasses
import io
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
import treescope
from jax._src.sharding_impls import GSPMDSharding
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from penzai import pz

import penzai_shard as pzs
from penzai_shard.errors import PlanError, RuleTypeError, ShardingError
from penzai_shard.views.sharding import show_sharding

MESH = pzs.make_mesh({"data": 4, "model": 2})
LARGE = pzs.make_mesh({"pod": 2, "data": 16, "model": 16}, abstract=True)


def struct(shape, sharding):
    return jax.ShapeDtypeStruct(shape, "float32", sharding=sharding)


def read_drawing(array):
    """For each device the intervals by dimension that the drawing says it holds."""
    table = array._repr_html_().partition('<table class="parts">')[2].partition("</table>")[0]
    across, names, before, held, texts = None, [], [], {}, []
    for row in re.findall("<tr>(.*?)</tr>", table):
        heads = re.findall("<th[^>]*>(.*?)</th>", row)
        cells = re.findall("<td[^>]*>(.*?)</td>", row)
        texts += cells
        if 'class="across"' in row:
            across = (heads[0], [head for head in heads if ":" in head])
        elif not cells:
            names = heads
        else:
            before = [new or old for new, old in zip(heads, before or heads, strict=True)]
            for number, cell in enumerate(cells):
                labels = dict(zip(names, before, strict=False))
                if across:
                    labels[across[0]] = across[1][number]
                for first, last in re.findall(r"(\d+)(?:-(\d+))?", cell.partition(" (")[0]):
                    where = {name: (*map(int, text.split(":")),) for name, text in labels.items()}
                    held |= dict.fromkeys(range(int(first), int(last or first) + 1), where)
    # The text has the same cells.
    assert re.findall(r"│ ([^│]*?) *(?=│)", str(array)) == texts
    return held


def check(array, sharding, shape, names):
    """That parts and drawing are what JAX says; a dimension that is not drawn is whole."""
    lengths = dict(zip(names, shape, strict=True))
    wanted = {
        device.id: {
            name: index.indices(length)[:2]
            for index, (name, length) in zip(indices, lengths.items(), strict=True)
        }
        for device, indices in sharding.devices_indices_map(shape).items()
    }
    parts = {
        device: dict(zip(names, part.intervals, strict=True))
        for part in array.parts
        for device in part.devices
    }
    assert parts == wanted
    whole = {name: (0, length) for name, length in lengths.items()}
    assert {device: whole | where for device, where in read_drawing(array).items()} == wanted


@pytest.mark.parametrize("seed", range(24))
def test_array_is_drawn_as_jax_lays_it_out(seed):
    rng = np.random.default_rng(seed)
    sizes = [(8,), (4, 2), (2, 3), (2, 2, 2)][seed % 4]
    devices = rng.permutation(jax.devices())[: math.prod(sizes)]
    mesh = Mesh(devices.reshape(sizes), tuple("xyz"[: len(sizes)]))
    entries = [[] for _ in range(rng.integers(6))]
    for axis in rng.permutation(mesh.axis_names).tolist():
        # One mesh axis in eight, and all of a scalar, stay free.
        if entries and rng.integers(8):
            entries[rng.integers(len(entries))].append(axis)
    spec = P(*(tuple(entry) or None for entry in entries))
    shape = tuple(
        math.prod(mesh.shape[axis] for axis in entry) * int(rng.integers(1, 4)) for entry in entries
    )
    sharding = NamedSharding(mesh, spec)
    names = [f"axis {i}" for i in range(len(shape))]
    named = pz.nx.NamedArray(dict(zip(names, shape, strict=True)), struct(shape, sharding))
    array = show_sharding(named)
    check(array, sharding, shape, names)
    assert array.bytes_per_device == 4 * math.prod(sharding.shard_shape(shape))
    # On an abstract mesh the same, by places for ids.
    abstract = show_sharding(struct(shape, NamedSharding(mesh.abstract_mesh, spec)))
    ids = [sorted(devices[place].id for place in part.devices) for part in abstract.parts]
    assert ids == [[*part.devices] for part in array.parts]
    assert [part.intervals for part in abstract.parts] == [part.intervals for part in array.parts]


@pytest.mark.parametrize(
    ("spec", "rank"), [(P("data", "model"), 2), (P(None, "model"), 3), (P(), 0)]
)
def test_sharding_without_a_mesh_is_drawn(spec, rank):
    devices = tuple(MESH.devices.flat)
    sharding = GSPMDSharding(devices, NamedSharding(MESH, spec)._to_xla_hlo_sharding(rank))
    if not rank:
        sharding = SingleDeviceSharding(jax.devices()[5])
    array = show_sharding(struct((8,) * rank, sharding))
    check(array, sharding, (8,) * rank, [f"dimension {i}" for i in range(rank)])
    assert array.mesh_axes is None


def test_512_devices_fit_into_32_by_16_cells(monkeypatch):
    for spec in (P("pod", "data", "model"), P(("pod", "data", "model")), P(None, "data", "model")):
        array = show_sharding(struct((32, 512, 512), NamedSharding(LARGE, spec)))
        page = array._repr_html_()
        assert page.count("<tr") < 32 + 10
        assert page.count("<td style") <= 32 * 16
        assert len(page) < 60_000
        assert sorted(i for part in array.parts for i in part.devices) == [*range(512)]
        for width in (60, 80):
            monkeypatch.setenv("COLUMNS", str(width))
            assert max(map(len, str(array).splitlines())) <= width
    text = str(show_sharding(struct((4096,), NamedSharding(LARGE, P(("pod", "data", "model"))))))
    assert [f"│ {i} " in text for i in (0, 15, 16, 496, 497, 511)] == [1, 1, 0, 0, 1, 1]


def test_parameter_is_drawn_by_its_logical_axes_and_as_its_plan():
    layer = pz.nn.Linear.from_config("mlp/up", jax.random.key(0), {"embedding": 8}, {"neurons": 16})
    rules = {"neurons": "model", "embedding": "data"}
    planned = show_sharding(pzs.make_plan(layer, MESH, rules).leaves[0])
    placed = show_sharding(pzs.place(layer, MESH, rules))
    assert placed.names == ("embedding", "neurons")
    assert placed.mesh_axes == (("data",), ("model",))
    assert placed.path == "mlp/up.weights"
    assert placed.to_json() == planned.to_json()
    assert "embedding=8, neurons=16], 512 B: 8 parts of 64 B, one device holds each" in str(placed)


def test_keys_and_deleted_arrays_are_drawn_without_their_data():
    keys = jax.device_put(jax.random.split(jax.random.key(0), 8), NamedSharding(MESH, P("data")))
    assert show_sharding(keys).bytes_per_device == keys.addressable_shards[0].data.nbytes
    array = jax.device_put(jnp.arange(8.0), NamedSharding(MESH, P("data")))
    before = str(show_sharding(array))
    array.delete()
    with jax.transfer_guard("disallow"):
        assert str(show_sharding(array)) == before


def test_length_that_does_not_divide_is_drawn_as_xla_pads_it():
    array = show_sharding(struct((5, 2), NamedSharding(MESH, P("data"))))
    intervals = [part.intervals[0] for part in array.parts]
    assert intervals == [(0, 2), (2, 4), (4, 5), (5, 5)]
    assert "dimension 0 (5) does not divide over data=4" in str(array)


def test_manual_and_unreduced_mesh_axes_are_noted():
    mesh = AbstractMesh((4, 2), ("x", "y"), axis_types=(AxisType.Manual, AxisType.Explicit))
    sharding = NamedSharding(mesh, P(None, unreduced={"y"}))
    notes = show_sharding(struct((8,), sharding)).report().notes
    assert [*notes[:2]] == ["manual over x=4", "not summed yet over y=2"]


@dataclasses.dataclass(frozen=True)
class Device:
    id: int
    process_index: int


class Elsewhere(Sharding):
    """A sharding whose devices belong to four processes, of which this one is the first."""

    memory_kind = None
    devices = tuple(Device(i, i // 2) for i in range(8))

    def check_compatible_aval(self, shape):
        assert shape == (16,)

    def devices_indices_map(self, global_shape):
        return {d: (slice(2 * d.id, 2 * d.id + 2),) for d in self.devices}


def test_array_on_other_processes_is_drawn_with_them():
    array = show_sharding(struct((16,), Elsewhere()))
    check(array, Elsewhere(), (16,), ["dimension 0"])
    cells = re.findall(r"│ ([^│]*?) *(?=│)", str(array))
    assert cells[:3] == ["0 (process 0) *", "1 (process 0) *", "2 (process 1)"]
    assert "* marks what this process (0) holds" in str(array)


def test_drawing_is_coloured_by_rich_and_stands_in_treescope():
    array = show_sharding(struct((64,), NamedSharding(MESH, P(("model", "data")))))
    stream = io.StringIO()
    rich.console.Console(file=stream, force_terminal=True, width=100).print(array)
    assert "\x1b[36m 0 " in stream.getvalue()
    plain = re.sub(r"\x1b\[[\d;]*m", "", stream.getvalue())
    assert [line.rstrip() for line in plain.splitlines()] == str(array).splitlines()
    page = treescope.render_to_html(array, compressed=False)
    assert "│ 7" in page


def test_names_with_markup_or_control_characters_are_written_out():
    names = {"<b>": 8, "<i>\x1b[31m\u202e": 2}
    sharding = NamedSharding(MESH, P("data", "model"))
    array = show_sharding(pz.nx.NamedArray(names, struct((8, 2), sharding)))
    page = array._repr_html_()
    assert not re.search("<[bi]>", page)
    assert "&lt;b&gt;" in page
    assert not {*"\x1b\u202e"} & {*str(array), *page}


def draw_in_jit():
    return jax.eval_shape(show_sharding, jnp.ones(3))


LEFT_TO_JAX = pzs.make_plan({"w": jnp.ones(3)}, MESH, {}, on_unnamed="infer").leaves[0]
UNCONSTRAINED = struct((8,), NamedSharding(MESH, P(P.UNCONSTRAINED)))


@pytest.mark.parametrize(
    ("draw", "error", "path"),
    [
        (lambda: show_sharding(MESH), RuleTypeError, ""),
        (lambda: show_sharding([]), RuleTypeError, ""),
        (lambda: show_sharding([jnp.ones(1), jnp.ones(2)]), RuleTypeError, ""),
        (lambda: show_sharding({"w": np.ones(3)}), PlanError, "w"),
        (lambda: show_sharding(jax.ShapeDtypeStruct((3,), "int8")), PlanError, ""),
        (lambda: show_sharding(LEFT_TO_JAX), PlanError, "w"),
        (lambda: show_sharding(UNCONSTRAINED), ShardingError, ""),
        (draw_in_jit, PlanError, ""),
    ],
)
def test_what_has_no_layout_is_refused(draw, error, path):
    with pytest.raises(error) as caught:
        draw()
    (problem,) = caught.value.problems
    assert type(caught.value) is error
    assert problem.path == path
    assert problem.fix or error is ShardingError
