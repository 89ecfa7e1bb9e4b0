"""What is drawn of an array is what JAX says of its sharding, for any sharding and any array."""

import collections
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import treescope
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from penzai import pz

import penzai_shard as pzs
from penzai_shard.errors import PlanError, RuleTypeError, ShardingError
from penzai_shard.views.sharding import show_sharding
from tests.refusals import refused

MESH = pzs.make_mesh({"data": 4, "model": 2})
LARGE = pzs.make_mesh({"pod": 2, "data": 16, "model": 16}, abstract=True)


def struct(shape, sharding, spec=None):
    sharding = sharding if spec is None else NamedSharding(sharding, spec)
    return jax.ShapeDtypeStruct(shape, "float32", sharding=sharding)


def read_drawing(array):
    """For each device the intervals by dimension that the drawing says it holds."""
    lines = ["".join(text for text, _ in line) for line in array.report().drawing(1000)]
    top = next(number for number, line in enumerate(lines) if "┌" in line)
    end = lines[top].index("┌")
    # The dimension that runs across, if one does, stands above with its intervals.
    names = re.findall(r"\w+ \d+", lines[top][:end] + lines[0][:end] * top)
    heads = lines[0][end:].split() if top else [""]
    held = {}
    for line in lines[top + 1 : -1]:
        for head, cell in zip(heads, line[end + 1 :].split("│"), strict=False):
            labels = zip(names, [*line[:end].split(), head], strict=False)
            where = {name: (*map(int, text.split(":")),) for name, text in labels}
            for first, last in re.findall(r"(\d+)(?:-(\d+))?", cell.partition(" (")[0]):
                held |= dict.fromkeys(range(int(first), int(last or first) + 1), where)
    return held


def check(array, sharding, shape, names):
    """That parts and drawing are what JAX says; a dimension that is not drawn is whole."""
    wanted = {
        device.id: tuple(map(lambda own, length: own.indices(length)[:2], indices, shape))
        for device, indices in sharding.devices_indices_map(shape).items()
    }
    assert {i: part.intervals for part in array.parts for i in part.devices} == wanted
    lengths = dict(zip(names, shape, strict=True))
    assert {
        device: tuple(where.get(name, (0, length)) for name, length in lengths.items())
        for device, where in read_drawing(array).items()
    } == wanted


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
    counts = [math.prod(mesh.shape[axis] for axis in entry) for entry in entries]
    shape = tuple(count * int(rng.integers(1, 4)) for count in counts)
    names = [f"axis {i}" for i in range(len(shape))]
    given = struct(shape, mesh, spec)
    array = show_sharding(pz.nx.NamedArray(dict(zip(names, shape, strict=True)), given))
    check(array, given.sharding, shape, names)
    assert array.bytes_per_device == 4 * math.prod(given.sharding.shard_shape(shape))
    # On an abstract mesh the same, by places for ids.
    abstract = show_sharding(struct(shape, mesh.abstract_mesh, spec))
    ids = [sorted(devices[place].id for place in part.devices) for part in abstract.parts]
    assert ids == [[*part.devices] for part in array.parts]
    assert [part.intervals for part in abstract.parts] == [part.intervals for part in array.parts]


def test_512_devices_fit_into_32_by_16_cells(monkeypatch):
    for spec in (P("pod", "data", "model"), P(("pod", "data", "model")), P(None, "data", "model")):
        array = show_sharding(struct((512, 512, 512), LARGE, spec))
        assert sorted(i for part in array.parts for i in part.devices) == [*range(512)]
        for width in (60, 80, 400):
            monkeypatch.setenv("COLUMNS", str(width))
            lines = str(array).splitlines()
            assert max(map(len, lines)) <= width
            rows = [line.count("│") - 1 for line in lines if "│" in line]
            assert (len(rows) <= 32, max(rows) <= 16) == (True, True)
    text = str(show_sharding(struct((4096,), LARGE, P(("pod", "data", "model")))))
    assert [f"│ {i} " in text for i in (0, 15, 16, 496, 497, 511)] == [1, 1, 0, 0, 1, 1]


def test_parameter_is_drawn_by_its_logical_axes_and_as_its_plan():
    layer = pz.nn.Linear.from_config("mlp/up", jax.random.key(0), {"embedding": 8}, {"neurons": 16})
    rules = {"neurons": "model", "embedding": "data"}
    placed = show_sharding(pzs.place(layer, MESH, rules))
    assert (placed.path, placed.names) == ("mlp/up.weights", ("embedding", "neurons"))
    assert placed.mesh_axes == (("data",), ("model",))
    assert placed.to_json() == show_sharding(pzs.make_plan(layer, MESH, rules).leaves[0]).to_json()


def test_keys_and_deleted_arrays_are_drawn_without_their_data():
    keys = jax.device_put(jax.random.split(jax.random.key(0), 8), NamedSharding(MESH, P("data")))
    assert show_sharding(keys).bytes_per_device == keys.addressable_shards[0].data.nbytes
    before = str(show_sharding(keys))
    keys.delete()
    assert str(show_sharding(keys)) == before
    assert str(show_sharding(jnp.ones(()))).startswith("float32[], 4 B: whole on one device\n")


def test_what_is_rare_is_noted():
    mesh = AbstractMesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    notes = show_sharding(struct((8,), mesh, P(None, unreduced={"y"}))).report().notes
    assert [*notes[:2]] == ["replicated over x", "not summed yet over y"]


Device = collections.namedtuple("Device", "id process_index")


class Elsewhere(Sharding):
    """A sharding without a mesh, over devices of four processes, of which this is the first."""

    memory_kind = None

    def check_compatible_aval(self, shape):
        assert shape == (16,)

    def devices_indices_map(self, shape):
        return {Device(i, i // 2): (slice(2 * i, 2 * i + 2),) for i in range(8)}


def test_array_on_other_processes_is_drawn_like_any_other():
    array = show_sharding(struct((16,), Elsewhere()))
    check(array, Elsewhere(), (16,), ["dimension 0"])
    assert array.mesh_axes is None
    assert "│ 2 │\n" in str(array)
    assert [part.processes for part in array.parts] == [(i // 2,) for i in range(8)]


def test_drawing_is_in_all_views_and_names_are_written_out():
    given = struct((8, 2), MESH, P("data", "model"))
    array = show_sharding(pz.nx.NamedArray({"<b>": 8, "<i>\x1b[31m\u202e": 2}, given))
    pages = [array._repr_html_(), treescope.render_to_html(array, compressed=False)]
    assert all("│ 7" in re.sub("<[^>]*>", "", page) for page in pages)
    assert not any(re.search("<[bi]>", page) for page in pages)
    assert not {*"\x1b\u202e"} & {*str(array), *pages[0], *pages[1]}


LEFT_TO_JAX = pzs.make_plan({"w": jnp.ones(3)}, MESH, {}, on_unnamed="infer").leaves[0]
REFUSED = [
    (RuleTypeError, "", MESH),
    (RuleTypeError, "", [jnp.ones(1), jnp.ones(2)]),
    (PlanError, "w", {"w": np.ones(3)}),
    (PlanError, "w", LEFT_TO_JAX),
    (PlanError, "", struct((3,), None)),
    (ShardingError, "", struct((8,), MESH, P(P.UNCONSTRAINED))),
    (ShardingError, "", struct((5, 2), MESH, P(("data", "model")))),
]


def test_what_has_no_layout_is_refused():
    for error, path, given in REFUSED:
        with pytest.raises(ShardingError) as caught:
            show_sharding(given)
        assert (type(caught.value), caught.value.problems[0].path) == (error, path)
    refused(PlanError, jax.eval_shape, show_sharding, jnp.ones(3))
