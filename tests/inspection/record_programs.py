"""Makes the programs that ``test_recorded_programs.py`` reads: ``programs/PLATFORM/NAME.hlo``.

Each is compiled for eight devices on the mesh ``{"data": 4, "model": 2}``, and nothing runs.
Without hardware: simulated CPUs; TPUs by libtpu; GPUs by JAX' CUDA plugin and one of the files in
XLA's ``xla/backends/gpu/target_config/specs``.

    export JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8
    export TPU_SKIP_MDS_QUERY=1 TPU_WORKER_HOSTNAMES=localhost
    python tests/inspection/record_programs.py cpu
    python tests/inspection/record_programs.py tpu v5e:2x4
    python tests/inspection/record_programs.py gpu h100_sxm.txtpb
"""

import functools
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.topologies import get_topology_desc
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# What makes texts long and says nothing that is read.
STACK_FRAMES = r"^(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:\d+ .*\n)*\n?"
UNREAD = STACK_FRAMES + r"| stack_frame_id=\d+|, backend_config=\{(?!.*known_trip_count).*$"
AROUND = [(i, (i + 1) % 4) for i in range(4)]
# By the scope that each is in; x is what one device has.
MOVES = {
    "summed": lambda x: lax.psum(x, "data"),
    "summed_everywhere": lambda x: sum(lax.psum((x * 2, x[:1] + 1), ("data", "model"))),
    "gathered": lambda x: jnp.tanh(lax.all_gather(x, "model", axis=1, tiled=True))[:, :256],
    "scattered": lambda x: lax.psum_scatter(jnp.tile(x, (4, 1)), "data", tiled=True),
    "exchanged": lambda x: lax.all_to_all(x, "data", 1, 0, tiled=True).reshape(x.shape),
    "rotated": lambda x: lax.ppermute(x, "data", AROUND),
    "shifted": lambda x: lax.ppermute(x, "data", [(0, 1), (1, 2)]),
}


def one_of_each(x):
    for scope, move in MOVES.items():
        with jax.named_scope(scope):
            x = x + move(x)
    return x


def parts_of_axes(x):
    x = x + lax.psum(x, "data", axis_index_groups=[[0, 1], [2, 3]])
    x = x * lax.psum(x, "data", axis_index_groups=[[0, 2], [1, 3]])
    return x + lax.pmax(x, ("data", "model"), axis_index_groups=[[0, 1, 2, 3], [4, 5, 6, 7]])


def loops(x):
    def turn(x, _):
        x = lax.fori_loop(0, 3, lambda i, x: lax.psum(x, "data") * 0.5, x)
        return lax.pmax(x, "model"), None

    x, _ = lax.scan(turn, x, length=5)
    is_large = lambda x: lax.psum(x.sum(), "model") > 1  # noqa: E731
    x = lax.while_loop(is_large, lambda x: lax.ppermute(x, "data", AROUND) * 0.5, x)
    seven = lambda x: lax.fori_loop(0, 7, lambda i, x: lax.psum(x, "model"), x)  # noqa: E731
    return lax.cond(x[0, 0] > 3, seven, lambda x: lax.psum(x, ("data", "model")), x)


def step(options, weights, x):
    """A train step of two layers in a loop, each split over both mesh axes."""

    def layer(x, w):
        with jax.named_scope("mlp"):
            hidden = lax.with_sharding_constraint(x @ w[0], P("data", "model"))
            return lax.with_sharding_constraint(jax.nn.relu(hidden) @ w[1], P("data")), None

    def loss(weights):
        one = jax.checkpoint(layer) if options == "remat" else layer
        y, _ = lax.scan(one, x, weights, unroll=options == "unroll")
        return (y.astype(jnp.float32) ** 2).mean()

    value, gradients = jax.value_and_grad(loss)(weights)
    with jax.named_scope("optimizer"):
        norm = jnp.sqrt(sum((g.astype(jnp.float32) ** 2).sum() for g in gradients))
        return jax.tree.map(lambda w, g: (w - g / norm).astype(w.dtype), weights, gradients), value


def main(platform, target=None):
    devices = jax.devices()
    if platform == "tpu":
        devices = get_topology_desc(target, "tpu").devices
    elif platform == "gpu":
        config = {"topology": "1x1x8", "target_config": pathlib.Path(target).read_text()}
        devices = get_topology_desc("h100", "cuda", **config).devices
    jax.set_mesh(mesh := Mesh(np.array(devices).reshape(4, 2), ("data", "model")))
    spec = P("data", "model")

    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))

    weights = [struct((2, 256, 512), None, *spec), struct((2, 512, 256), None, "model", "data")]
    programs = {
        one.__name__: (jax.shard_map(one, in_specs=spec, out_specs=spec, check_vma=False),)
        for one in (one_of_each, parts_of_axes, loops)
    }
    for name, options in (("step", "unroll"), ("step_in_a_loop", ""), ("step_with_remat", "remat")):
        programs[name] = functools.partial(step, options), weights
    for name, (function, *arguments) in programs.items():
        x = struct((64, 256), "data") if arguments else struct((64, 512), *spec)
        text = jax.jit(function).lower(*arguments, x).compile().as_text()
        text = re.sub(UNREAD, "", text, flags=re.MULTILINE)
        origin = f"// jax {jax.__version__}, {devices[0].device_kind}\n"
        path = pathlib.Path(__file__).parent / "programs" / platform / f"{name}.hlo"
        path.write_text(origin + text)


if __name__ == "__main__":
    main(*sys.argv[1:])
