"""Loading a model of Hugging Face onto eight simulated devices: seconds, and memory at its peak.

A directory shaped as a Llama (2,048 wide, blocks as many as the size takes, float32, two files or
more) is written without torch. Every contender loads it in a process of its own, fully sharded over
its embedding axis, in rounds whose order is reversed in every other one:

- ours: ``load_safetensors``, from the directory to Penzai's model.
- slices: ``safetensors.safe_open(...).get_slice`` in ``jax.make_array_from_callback``, tensors as
  they are stored.
- orbax: the safetensors layout of ``orbax.checkpoint.experimental.v1``, tensors as they are stored.
- torch: a model of transformers, Penzai's converter, ``jax.device_put``; if torch is installed.
- eighth: ours in eight processes of one device, whose coordinator reads its eighth beside seven
  others; the largest of them.
- save: ``save_safetensors`` of the loaded model; memory is what comes on top of it.
- back: ``load_safetensors`` of what was saved, with its checksums compared.

Anonymous memory is what the process has for itself, sampled every few milliseconds, above what it
had once everything was imported and JAX had its devices. Pages of mapped files are beside it: the
system takes them back when it needs them.

    python -m benchmarks.safetensors_loading [--gib 2.2] [--rounds 3] [--ways ours,slices]
        [--folder FOLDER]
"""

import argparse
import contextlib
import gc
import importlib.util
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from safetensors import safe_open
from safetensors.numpy import save_file

import benchmarks.simulated_devices  # noqa: F401
import penzai_shard as pzs
from benchmarks.contenders import chosen, median_ratios
from penzai_shard.pretrained.conversion import converted_model
from penzai_shard.pretrained.tensor_files import open_tensors, read_config
from penzai_shard.processes.launching import run_processes

RULES = {"embedding": "data"}
WIDTH, INNER, HEADS, KEY_HEADS, HEAD, VOCABULARY = 2048, 5632, 32, 4, 64, 32000
FILE_BYTES = 2**30
_SECONDS_BETWEEN_SAMPLES = 0.004


def block_shapes(number: int) -> dict[str, tuple[int, ...]]:
    block = f"model.layers.{number}"
    return {
        f"{block}.self_attn.q_proj.weight": (HEADS * HEAD, WIDTH),
        f"{block}.self_attn.k_proj.weight": (KEY_HEADS * HEAD, WIDTH),
        f"{block}.self_attn.v_proj.weight": (KEY_HEADS * HEAD, WIDTH),
        f"{block}.self_attn.o_proj.weight": (WIDTH, HEADS * HEAD),
        f"{block}.mlp.gate_proj.weight": (INNER, WIDTH),
        f"{block}.mlp.up_proj.weight": (INNER, WIDTH),
        f"{block}.mlp.down_proj.weight": (WIDTH, INNER),
        f"{block}.input_layernorm.weight": (WIDTH,),
        f"{block}.post_attention_layernorm.weight": (WIDTH,),
    }


def _bytes_of(shapes: dict[str, tuple[int, ...]]) -> int:
    return 4 * sum(int(np.prod(shape)) for shape in shapes.values())


def write_llama(folder: pathlib.Path, gib: float) -> None:
    """Writes a directory of Hugging Face with random weights of about this size."""
    ends = {"model.embed_tokens.weight": (VOCABULARY, WIDTH), "lm_head.weight": (VOCABULARY, WIDTH)}
    ends["model.norm.weight"] = (WIDTH,)
    blocks = max(1, round((gib * 2**30 - _bytes_of(ends)) / _bytes_of(block_shapes(0))))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": blocks,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "head_dim": HEAD,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    files: list[dict[str, tuple[int, ...]]] = [{}]
    shapes = dict(ends)
    for number in range(blocks):
        shapes |= block_shapes(number)
    for name, shape in shapes.items():
        if _bytes_of(files[-1]) + _bytes_of({name: shape}) > FILE_BYTES:
            files.append({})
        files[-1][name] = shape
    rng = np.random.default_rng(0)
    weight_map = {}
    for number, tensors in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        weights = {
            name: rng.standard_normal(shape, dtype=np.float32) / 50
            for name, shape in tensors.items()
        }
        save_file(weights, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": _bytes_of(shapes)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def ours(folder: str) -> Callable[[], Any]:
    return lambda: pzs.load_safetensors(folder, _mesh(), RULES)


def _tensor_layout(shape: tuple[int, ...]) -> NamedSharding:
    """Every tensor as it is stored, split along its embedding axis."""
    along = shape.index(WIDTH) if len(shape) == 1 or shape[0] == WIDTH else 1
    return NamedSharding(_mesh(), PartitionSpec(*[None] * along, "data"))


def slices(folder: str) -> Callable[[], Any]:
    def load() -> dict[str, jax.Array]:
        found = {}
        for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 (it is not a mapping)
                    part = file.get_slice(name)
                    shape = tuple(part.get_shape())
                    found[name] = jax.make_array_from_callback(
                        shape, _tensor_layout(shape), part.__getitem__
                    )
        return found

    return load


def orbax(folder: str) -> Callable[[], Any]:
    ocp = importlib.import_module("orbax.checkpoint.experimental.v1")

    def load() -> Any:
        wanted = {
            name: jax.ShapeDtypeStruct(
                tensor.shape, tensor.dtype, sharding=_tensor_layout(tensor.shape)
            )
            for name, tensor in open_tensors(folder).tensors.items()
        }
        context = ocp.Context()
        context.checkpoint_layout = ocp.options.CheckpointLayout.SAFETENSORS
        with context:
            return ocp.load(folder, wanted)

    return load


def torch(folder: str) -> Callable[[], Any]:
    transformers = importlib.import_module("transformers")
    common = importlib.import_module("penzai.models.transformer.variants.llamalike_common")

    def load() -> Any:
        model = transformers.LlamaForCausalLM.from_pretrained(folder)
        # transformers 5 says elsewhere what Penzai's converter looks for.
        model.config.rope_theta = 10000.0
        converted = common.llamalike_from_huggingface_model(model)
        return pzs.name_to_name_device_put(converted, _mesh(), RULES)

    return load


def save(folder: str) -> Callable[[], Any]:
    model = pzs.load_safetensors(folder, _mesh(), RULES)
    jax.block_until_ready(jax.tree.leaves(pzs.param_dict(model)))
    where = f"{folder}/saved"
    return lambda: (pzs.save_safetensors(where, model, overwrite=True), model)


def back(folder: str) -> Callable[[], Any]:
    model, _ = converted_model(*_described(folder))
    where = f"{folder}/saved"
    return lambda: pzs.load_safetensors(where, _mesh(), RULES, into=model)


def _described(folder: str) -> tuple[Any, Any]:
    config, _ = read_config(None, folder)
    return config, open_tensors(folder).tensors


WAYS = {
    "ours": ours,
    "slices": slices,
    "orbax": orbax,
    "torch": torch,
    "eighth": ours,
    "save": save,
    "back": back,
}


def _mesh() -> Any:
    return pzs.make_mesh({"data": jax.device_count()})


def _memory(kind: str) -> int:
    """A figure of this process' memory in bytes."""
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith(f"{kind}:"))


@contextlib.contextmanager
def _peaks() -> Iterator[dict[str, int]]:
    """How much more of each kind of memory there was at most during a block."""
    gc.collect()
    kinds = ("RssAnon", "RssFile")
    start = {kind: _memory(kind) for kind in kinds}
    peaks = dict.fromkeys(kinds, 0)
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(_SECONDS_BETWEEN_SAMPLES):
            for kind in kinds:
                peaks[kind] = max(peaks[kind], _memory(kind) - start[kind])

    thread = threading.Thread(target=sample)
    thread.start()
    yield peaks
    ended.set()
    thread.join()


def measure(way: str, folder: str, result: str) -> None:
    """Runs one contender here, and writes its figures to a file."""
    with contextlib.ExitStack() as stack:
        if way == "eighth":
            stack.enter_context(pzs.several_processes())
        jax.block_until_ready(jax.device_put(np.ones(8), jax.local_devices()[0]))
        load = WAYS[way](folder)
        with _peaks() as peaks:
            processor, start = time.process_time(), time.perf_counter()
            loaded = load()
            arrays = (
                [x for x in jax.tree.leaves(pzs.param_dict(loaded)) if hasattr(x, "nbytes")]
                if way != "save"
                else []
            )
            jax.block_until_ready(arrays)
            figures: dict[str, Any] = {
                "seconds": time.perf_counter() - start,
                "processor": time.process_time() - processor,
            }
        landed = sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards)
        figures |= {"landed": landed, "anonymous": peaks["RssAnon"], "mapped": peaks["RssFile"]}
        place = pathlib.Path(result)
        place.with_name(f"{place.name}.{jax.process_index()}").write_text(json.dumps(figures))


def measured_elsewhere(way: str, folder: str, scratch: pathlib.Path) -> dict[str, Any]:
    """The figures of one contender in processes of its own; of several the greatest."""
    result = scratch / f"{way}.json"
    command = [sys.executable, "-m", "benchmarks.safetensors_loading"]
    command += ["--measure", way, "--folder", folder, "--result", str(result)]
    if way == "eighth":
        flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
        if run_processes(command, 8, flags):
            sys.exit("the processes of 'eighth' failed.")
    else:
        subprocess.run(command, check=True)
    found = [json.loads(path.read_text()) for path in scratch.glob(f"{way}.json.*")]
    return {name: max(figures[name] for figures in found) for name in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gib", type=float, default=2.2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--folder", help="a directory that was written before, or to be written")
    parser.add_argument("--measure", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure, options.folder, options.result)
        return
    ways = chosen(options.ways, WAYS, "way")
    if "torch" in ways and importlib.util.find_spec("transformers") is None:
        print("torch: left out, for transformers is not installed.")
        ways.remove("torch")
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="safetensors_loading_"))
    folder = pathlib.Path(options.folder or scratch / "llama")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if not (folder / "config.json").exists():
            write_llama(folder, options.gib)
        rounds: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
        for turn in range(options.rounds):
            for way in ways[:: 1 if turn % 2 == 0 or "save" in ways else -1]:
                rounds[way].append(measured_elsewhere(way, str(folder), scratch))
        _print(rounds)
    finally:
        shutil.rmtree(scratch)


def _print(rounds: dict[str, list[dict[str, Any]]]) -> None:
    base = "torch" if "torch" in rounds else next(iter(rounds))
    ratios = median_ratios(
        {way: [f["seconds"] for f in figures] for way, figures in rounds.items()}, base
    )
    print(f"{'way':8}{'seconds':>9}{'of ' + base:>10}{'processor':>11}", end="")
    print(f"{'landed':>10}{'anonymous peak':>16}{'mapped peak':>13}")
    for way, figures in rounds.items():
        seconds, processor = (
            statistics.median(f[name] for f in figures) for name in ("seconds", "processor")
        )
        landed, anonymous, mapped = (
            max(f[name] for f in figures) / 2**20 for name in ("landed", "anonymous", "mapped")
        )
        share = f" ({anonymous / landed:.2f}x)" if landed else ""
        print(
            f"{way:8}{seconds:9.2f}{ratios[way]:10.2f}{processor:11.2f}{landed:6,.0f} MiB"
            f"{anonymous:8,.0f} MiB{share}{mapped:7,.0f} MiB"
        )


if __name__ == "__main__":
    main()
