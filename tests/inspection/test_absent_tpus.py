"""Steps compiled for slices of TPUs that are not there, by libtpu itself."""

import importlib.util
import json
import os
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from penzai import pz

import penzai_shard as pzs
from penzai_shard.errors import CompilationError, MeshError
from penzai_shard.inspection.devices.device_figures import device_figures

# Importing it would set a variable of the environment.
if importlib.util.find_spec("libtpu") is None:
    pytest.skip("libtpu is not installed: pip install 'penzai-shard[tpu]'", allow_module_level=True)

LAYERS = 5


def mesh_of(**sizes):
    types = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


def arguments(mesh, width):
    def array(shape, *spec):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    weights = array((LAYERS, width, width), None, "data", "model")
    return weights, array((16 * mesh.shape["data"], width), "data")


def sgd_step(weights, x):
    def loss(weights):
        out, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)
        return (out.astype(jnp.float32) ** 2).mean()

    value, gradients = jax.value_and_grad(loss)(weights)
    return value, weights - 0.1 * gradients


def ahead(topology, width=512, step=sgd_step, **sizes):
    mesh = mesh_of(**sizes)
    same = (None, NamedSharding(mesh, PartitionSpec(None, "data", "model")))
    jitted = jax.jit(step, donate_argnums=0, out_shardings=same)
    return pzs.compile_ahead(jitted, *arguments(mesh, width), topology=topology)


@pytest.fixture(scope="module")
def report():
    before, devices = dict(os.environ), jax.devices()
    # Where libtpu writes its logs if it is not told otherwise.
    folder = pathlib.Path(tempfile.gettempdir(), "tpu_logs")
    logs = set(folder.glob("*"))
    report = ahead("v5e:4x4", data=4, model=4)
    assert dict(os.environ) == before
    assert jax.devices() == devices
    assert set(folder.glob("*")) == logs
    return report


def test_memory_of_a_slice_that_is_not_there_is_exact(report):
    weights = LAYERS * 512 * 512 * 2 // 16
    assert report.device_kind == "TPU v5 lite"
    assert report.device_count == 16
    assert report.memory.inputs == weights + 16 * 512 * 2
    assert report.memory.donated == weights
    assert report.memory.limit == device_figures("TPU v5 lite").memory
    assert report.fits is True
    assert report.exact == ("program", "memory", "collectives")
    assert json.loads(report.to_json())["compiler"].startswith("libtpu ")


def test_collectives_of_a_slice_that_is_not_there_run_in_every_turn_of_a_loop(report):
    gathers = [one for one in report.collectives.collectives if one.kind == "all-gather"]
    assert gathers
    assert any(one.times == LAYERS for one in gathers)
    assert all(one.times is not None for one in report.collectives.collectives)
    assert set(report.collectives.by_mesh_axis()) >= {"data", "model"}


def test_what_is_too_large_is_reported_with_figures():
    report = ahead("v5e:4x4", width=131072, data=4, model=4)
    assert report.fits is False
    assert report.collectives is None
    assert report.memory.inputs == (LAYERS * 131072 * 131072 // 16 + 16 * 131072) * 2
    assert report.memory.total > report.memory.inputs
    assert report.memory.limit == device_figures("TPU v5 lite").memory
    assert str(report).startswith(f"needs {report.memory.total / 2**30:.1f} GiB of 15.75 GiB: does")


@pytest.mark.parametrize(
    ("topology", "sizes", "kind"),
    [
        ("v4:2x2x1", {"data": 2, "model": 2}, "TPU v4"),
        ("v6e:1x1", {"data": 1, "model": 1}, "TPU v6 lite"),
        ("v5p:4x4x4", {"data": 16, "model": 4}, "TPU v5"),
        ("tpu7x:2x2x1", {"data": 4, "model": 2}, "TPU7x"),
    ],
)
def test_every_generation_is_described_as_it_runs(topology, sizes, kind):
    report = ahead(topology, **sizes)
    assert report.device_kind == kind
    assert report.fits is True
    assert report.device_count == sizes["data"] * sizes["model"]


def test_several_slices_are_one_mesh_and_its_first_axis_goes_over_them():
    report = ahead("v5e:16x16*4", data=64, model=16)
    assert report.device_count == 1024
    assert "slices          4: 4 along 'data'" in str(report)
    assert report.program.slice_of == tuple(sorted([0, 1, 2, 3] * 256))
    # What goes between slices: groups of four, one device of each slice.
    between = "data (4 of 64, 16 apart)"
    assert between in report.collectives.by_mesh_axis()
    assert all(
        one.group_size == 4 for one in report.collectives.collectives if one.axes_text == between
    )


def test_a_mesh_that_jax_cannot_lay_over_a_slice_is_refused_in_its_words():
    with pytest.raises(
        MeshError, match=r"\(data=32, model=2\) over topology 'v5p:4x4x4'.*physical"
    ):
        ahead("v5p:4x4x4", data=32, model=2)


def test_a_step_that_calls_back_to_python_is_refused_by_name():
    def talking(weights, x):
        jax.debug.print("{}", x.sum())
        return sgd_step(weights, x)

    with pytest.raises(CompilationError, match="calls back to Python"):
        ahead("v5e:4x4", step=talking, data=4, model=4)


def test_a_layout_is_chosen_by_programs_for_the_hardware_itself():
    def build():
        axes = {"embedding": 1024}, {"neurons": 4096}
        return pz.nn.Linear.from_config("up", jax.random.key(0), *axes)

    def loss_fn(model, rng, state, x):
        return (model(x).untag("batch", "neurons") ** 2).mean().unwrap(), state, {}

    choices = pzs.choose_layout(
        pzs.abstract_model(build),
        loss_fn,
        optax.sgd(0.1),
        devices="v5e:4",
        batch={"x": pz.nx.ones({"batch": 1024, "embedding": 1024})},
        propagated=3,
        compiled=2,
        compile_for="hardware",
        progress=False,
    )
    assert len(choices) == 2
    for choice in choices:
        assert choice.priced_by == "compiled"
        stored = choice.layout.plan(
            pzs.abstract_model(build), choice.mesh(abstract=True)
        ).bytes_per_device
        # Beside them the number of the step and the key of the run.
        assert 0 <= choice.memory["parameters"] - stored <= 16
        forward = 2 * 1024 * 1024 * 4096
        assert choice.priced.cost.flops == pytest.approx(2 * forward / 4, rel=1e-3)
        assert choice.memory_bytes <= choices.memory_limit
