"""Makes the programs anew that the tests in this folder read: ``programs/PLATFORM/NAME.hlo``.

Each is small, compiled ahead of time for eight devices on the mesh ``{"data": 4, "model": 2}``, and
nothing runs. Without hardware: simulated CPUs; TPUs by libtpu; GPUs by JAX' CUDA plugin and a
target configuration, one of those in XLA's ``xla/backends/gpu/target_config/specs``.

    python tests/compiled_programs/record_programs.py cpu
    python tests/compiled_programs/record_programs.py tpu
    python tests/compiled_programs/record_programs.py tpu_slices  # Two of four devices each.
    python tests/compiled_programs/record_programs.py gpu --target-config h100_sxm.txtpb
    python tests/compiled_programs/record_programs.py cpu --folder cpu_jax_0_12  # By such a JAX.
"""

import argparse
import functools
import os
import pathlib
import re

FOLDER = pathlib.Path(__file__).parent / "programs"
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# What makes texts long and says nothing that is read.
FRAMES = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n(\d+ .*\n)*\n?", re.M)
FRAME = re.compile(
    r" stack_frame_id=\d+| source_(?:file|line|end_line|column|end_column)=\S+(?=[ }])"
)


def shortened(text):
    """A program's text without what nobody reads, its structure as it was."""
    from penzai_shard.compiled_programs.instruction_text import _pieces

    lines = []
    for line in FRAME.sub("", FRAMES.sub("", text)).splitlines():
        head, separator, behind = line.partition("backend_config={")
        if separator and "known_trip_count" not in behind:
            rest = list(_pieces(separator + behind))[1:]
            line = ", ".join([head.removesuffix(", "), *rest])
        lines.append(line)
    return "\n".join(lines) + "\n"


def devices(platform, target_config):
    import jax
    from jax.experimental import topologies

    if platform == "cpu":
        return jax.devices()
    if platform == "tpu":
        return topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
    if platform == "tpu_slices":
        return topologies.get_topology_desc(
            platform="tpu", topology_name="v5e:2x2", num_slices=2
        ).devices
    jax.devices()
    return topologies.get_topology_desc(
        platform="cuda",
        topology_name="h100",
        topology="1x1x8",
        target_config=pathlib.Path(target_config).read_text(encoding="utf-8"),
    ).devices


def programs(devices):
    """Functions with abstract arguments, by the name of their file."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = Mesh(np.array(devices).reshape(4, 2), ("data", "model"))
    split = Mesh(np.array(devices).reshape(2, 2, 2), ("outer", "inner", "model"))

    def struct(shape, *spec, dtype=jnp.bfloat16, on=mesh):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(on, P(*spec)))

    def manual(into, out, on=mesh):
        return functools.partial(
            jax.shard_map, mesh=on, in_specs=into, out_specs=out, check_vma=False
        )

    around = [(i, (i + 1) % 4) for i in range(4)]

    @manual(P("data", "model"), P("data", "model"))
    def one_of_each(x):
        with jax.named_scope("summed"):
            x = x + jax.lax.psum(x, "data")
        with jax.named_scope("summed_everywhere"):
            a, b = jax.lax.psum((x * 2, x[:1] + 1), ("data", "model"))
            x = x * a + b
        with jax.named_scope("gathered"):
            x = x + jnp.tanh(jax.lax.all_gather(x, "model", axis=1, tiled=True))[:, :256]
        with jax.named_scope("scattered"):
            x = x + jax.lax.psum_scatter(jnp.tile(x, (4, 1)), "data", tiled=True)
        with jax.named_scope("exchanged"):
            x = x + jax.lax.all_to_all(x, "data", 1, 0, tiled=True).reshape(x.shape)
        with jax.named_scope("rotated"):
            x = x + jax.lax.ppermute(x, "data", around)
        with jax.named_scope("shifted"):
            return x + jax.lax.ppermute(x, "data", [(0, 1), (1, 2)])

    @manual(P(("outer", "inner"), "model"), P(("outer", "inner"), "model"), split)
    def parts_of_axes(x):
        x = x + jax.lax.psum(x, "inner")
        x = x * jax.lax.psum(x, "outer")
        return x + jax.lax.pmax(x, ("inner", "model"))

    @manual((P("data", "model"), P()), P("data", "model"))
    def loops(x, n):
        def turn(carry, _):
            inner = lambda c, _: (jax.lax.psum(c, "data") * 0.5, None)  # noqa: E731
            return jax.lax.pmax(jax.lax.scan(inner, carry, None, length=3)[0], "model"), None

        x, _ = jax.lax.scan(turn, x, None, length=5)
        go_on = lambda c: jax.lax.psum(c.sum(), "model") > 1  # noqa: E731
        x = jax.lax.while_loop(go_on, lambda c: jax.lax.ppermute(c, "data", around) * 0.5, x)
        return jax.lax.cond(
            n[0] > 3,
            lambda x: jax.lax.fori_loop(0, 7, lambda i, x: jax.lax.psum(x, "model"), x),
            lambda x: jax.lax.psum(x, ("data", "model")),
            x,
        )

    def constrain(x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def layer(x, w):
        with jax.named_scope("mlp"):
            hidden = constrain(x @ w[0], "data", "model")
            return constrain(jax.nn.relu(hidden) @ w[1], "data"), None

    def step(weights, x, *, unroll):
        def loss(weights):
            y, _ = jax.lax.scan(layer, x, weights, unroll=unroll)
            return (y.astype(jnp.float32) ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(weights)
        with jax.named_scope("optimizer"):
            norm = jnp.sqrt(sum((g.astype(jnp.float32) ** 2).sum() for g in gradients))
            new = [(w - g / norm).astype(w.dtype) for w, g in zip(weights, gradients, strict=True)]
        return new, value

    weights = [
        struct((2, 256, 512), None, "data", "model"),
        struct((2, 512, 256), None, "model", "data"),
    ]
    batch = struct((64, 256), "data")
    n = struct((1,), dtype=jnp.int32)
    x = struct((64, 512), "data", "model")
    return {
        "one_of_each": (one_of_each, (x,)),
        "parts_of_axes": (
            parts_of_axes,
            (struct((64, 512), ("outer", "inner"), "model", on=split),),
        ),
        "loops": (loops, (x, n)),
        "step_in_a_loop": (functools.partial(step, unroll=1), (weights, batch)),
        "step": (functools.partial(step, unroll=True), (weights, batch)),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("platform", choices=("cpu", "tpu", "tpu_slices", "gpu"))
    parser.add_argument("--folder", help="under programs/; by default the platform")
    parser.add_argument("--target-config", help="of a GPU")
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    import jax

    folder = FOLDER / (arguments.folder or arguments.platform)
    folder.mkdir(parents=True, exist_ok=True)
    found = devices(arguments.platform, arguments.target_config)
    for name, (function, structs) in programs(found).items():
        if arguments.platform == "tpu_slices" and name.startswith("step"):
            continue
        text = jax.jit(function).lower(*structs).compile().as_text()
        origin = f"// jax {jax.__version__}, {found[0].device_kind}\n"
        (folder / f"{name}.hlo").write_text(origin + shortened(text), encoding="utf-8")
        print(folder / f"{name}.hlo", len(text))


if __name__ == "__main__":
    main()
