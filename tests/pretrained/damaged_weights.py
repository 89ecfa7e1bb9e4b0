"""Run as a program: damages files of weights in many ways, and judges what loading them does.

Usage: python -m tests.pretrained.damaged_weights [--count 120] [--seed 0] [--kind TEXT] [--show]

The judge is that of damaged checkpoints: a refusal within two seconds that names a file or tensor
concerned, or exactly the values that were written. Bytes that change within a tensor cannot be seen
in a safetensors file of anybody else's, which has no checksums, so they change in ours alone.
"""

import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tests.simulated_devices import EIGHT_DEVICES_FAST

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = EIGHT_DEVICES_FAST

import jax
import numpy as np
from penzai import pz

import penzai_shard as pzs
from tests.checkpointing.checkpoint_editing import as_text
from tests.checkpointing.damage_verdicts import Judged, Verdict, contents_of, judged, run_as_program
from tests.checkpointing.damages import TEXTS, THINGS, Damage, Save, chosen
from tests.pretrained.safetensors_editing import (
    INDEX,
    read_file,
    write_file,
    write_parts,
    write_tensors,
)

CONFIG = "config.json"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
LLAMA_SHAPES = {
    "model.embed_tokens.weight": (32, 16),
    "model.layers.0.self_attn.q_proj.weight": (16, 16),
    "model.layers.0.self_attn.k_proj.weight": (8, 16),
    "model.layers.0.self_attn.v_proj.weight": (8, 16),
    "model.layers.0.self_attn.o_proj.weight": (16, 16),
    "model.layers.0.mlp.gate_proj.weight": (24, 16),
    "model.layers.0.mlp.up_proj.weight": (24, 16),
    "model.layers.0.mlp.down_proj.weight": (16, 24),
    "model.layers.0.input_layernorm.weight": (16,),
    "model.layers.0.post_attention_layernorm.weight": (16,),
    "model.norm.weight": (16,),
    "lm_head.weight": (32, 16),
}


def made_weights(directory: pathlib.Path) -> list[Judged]:
    """Weights in one file, in several, of a model of Hugging Face, and in a file of ours."""
    mesh = pzs.make_mesh({"data": 4, "model": 2})
    rng = np.random.default_rng(0)

    def drawn(shape: tuple[int, ...]) -> np.ndarray:
        return rng.normal(size=shape).astype("float32")

    arrays = {"up": ("a", "b"), "down": ("a", "b"), "norm": ("a",), "head/out": ("c", "a")}
    lengths = {"a": 8, "b": 12, "c": 6}
    shapes = {name: tuple(lengths[a] for a in axes) for name, axes in arrays.items()}
    plain = {name: drawn(shape) for name, shape in shapes.items()}
    like = {name: pz.nx.wrap(plain[name]).tag(*axes) for name, axes in arrays.items()}

    def into(path: pathlib.Path) -> Any:
        return pzs.load_safetensors(
            path, mesh, {"a": "data"}, into=like, axes=arrays, progress=False
        )

    one, several, llama, ours = (directory / n for n in ("one", "several", "llama", "ours"))
    for folder in (one, several, llama, ours):
        folder.mkdir()
    write_tensors(one / "model.safetensors", plain)
    write_parts(several, plain)
    write_parts(llama, {name: drawn(shape) for name, shape in LLAMA_SHAPES.items()})
    (llama / CONFIG).write_text(json.dumps(LLAMA, indent=1))
    pzs.save_safetensors(ours / "model.safetensors", like)
    made = [
        _judged("one file", one, into, like, tuple(plain)),
        _judged("several files", several, into, like, tuple(plain)),
        _judged("a file of ours", ours, into, like, tuple(plain)),
    ]

    def convert(path: pathlib.Path) -> Any:
        return pz.freeze_params(pzs.load_safetensors(path, mesh, {}, progress=False))

    converted = _judged("a Llama", llama, convert, convert(llama), tuple(LLAMA_SHAPES))
    # Of a configuration with more layers than the files have, every missing tensor is named.
    return [*made, dataclasses.replace(converted, most_lines=50)]


def _judged(
    name: str, path: pathlib.Path, load: Callable[..., Any], like: Any, names: tuple[str, ...]
) -> Judged:
    save = Save(name, path, path, names, ())
    return Judged(save, load, contents_of(like), jax.tree.structure(like))


KINDS: dict[str, Callable[[np.random.Generator, Save], Damage | None]] = {}


def kind(name: str) -> Callable[[Any], Any]:
    """Registers a kind of damage; it gives None for weights that have nothing of the kind."""

    def register(draw: Any) -> Any:
        def draw_named(rng: np.random.Generator, save: Save) -> Damage | None:
            drawn = draw(rng, save)
            return drawn and Damage(name, save, *drawn)

        KINDS[name] = draw_named
        return draw

    return register


def drawn_damages(saves: list[Save], seed: int, count: int) -> Iterator[Damage]:
    """So many damages, as equally many of every kind as possible."""
    kinds = list(KINDS.values())
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        drawn = (kinds[number % len(kinds)](rng, saves[i]) for i in rng.permutation(len(saves)))
        yield next(damage for damage in drawn if damage is not None)


def _weights(save: Save) -> list[str]:
    return sorted(p.name for p in save.path.glob("*.safetensors"))


def _tensors(save: Save, file: str) -> list[str]:
    return [name for name in read_file(save.path / file)[0] if name != "__metadata__"]


@kind("a file cut")
def _(rng: np.random.Generator, save: Save) -> Any:
    file = chosen(rng, _weights(save))
    content = (save.path / file).read_bytes()
    kept = chosen(rng, [0, 4, 8, 40, len(content) // 2, len(content) - 1])
    return (file,), f"after {kept} bytes", lambda c: (c / file).write_bytes(content[:kept])


@kind("a file grown")
def _(rng: np.random.Generator, save: Save) -> Any:
    file = chosen(rng, _weights(save))
    content = (save.path / file).read_bytes()
    more = chosen(rng, [b"\0", b"\n", content, bytes(512)])
    return (file,), f"{len(more)} bytes", lambda c: (c / file).write_bytes(content + more)


@kind("another content")
def _(rng: np.random.Generator, save: Save) -> Any:
    files = [f.name for f in save.path.iterdir()]
    file, what = chosen(rng, sorted(files)), chosen(rng, TEXTS)
    return (file,), what, lambda c: (c / file).write_bytes(TEXTS[what])


@kind("another thing in place of a file")
def _(rng: np.random.Generator, save: Save) -> Any:
    file, what = chosen(rng, sorted(f.name for f in save.path.iterdir())), chosen(rng, THINGS)

    def edit(copy: pathlib.Path) -> None:
        (copy / file).unlink()
        THINGS[what](copy / file)

    return (file, "."), what, edit


@kind("a file removed")
def _(rng: np.random.Generator, save: Save) -> Any:
    file = chosen(rng, sorted(f.name for f in save.path.iterdir()))
    # Nothing else tells that a single file should be there.
    return (file, ".", *save.arrays), "removed", lambda c: (c / file).unlink()


@kind("two files swapped")
def _(rng: np.random.Generator, save: Save) -> Any:
    files = sorted(f.name for f in save.path.iterdir())
    if len(files) < 2:
        return None
    first, second = rng.choice(files, 2, replace=False)

    def edit(copy: pathlib.Path) -> None:
        one, other = (copy / first).read_bytes(), (copy / second).read_bytes()
        (copy / first).write_bytes(other)
        (copy / second).write_bytes(one)

    return (first, second), f"{first} and {second}", edit


@kind("the header's length")
def _(rng: np.random.Generator, save: Save) -> Any:
    file = chosen(rng, _weights(save))
    content = (save.path / file).read_bytes()
    length = int.from_bytes(content[:8], "little")
    other = chosen(rng, [0, 2, length - 8, length + 8, 2**31, 2**40, 2**63, 2**64 - 1])
    changed = other.to_bytes(8, "little") + content[8:]
    return (file,), f"{other}, not {length}", lambda c: (c / file).write_bytes(changed)


@kind("bytes of a header")
def _(rng: np.random.Generator, save: Save) -> Any:
    file = chosen(rng, _weights(save))
    content = bytearray((save.path / file).read_bytes())
    place = int(rng.integers(8, 8 + int.from_bytes(content[:8], "little")))
    content[place] ^= int(rng.integers(1, 256))
    names = (file, *save.arrays)
    return names, f"byte {place}", lambda c: (c / file).write_bytes(content)


@kind("what a header says of a tensor")
def _(rng: np.random.Generator, save: Save) -> Any:
    file = chosen(rng, _weights(save))
    name = chosen(rng, _tensors(save, file))
    what = chosen(rng, ENTRIES)

    def edit(copy: pathlib.Path) -> None:
        header, data = read_file(copy / file)
        ENTRIES[what](header, name)
        write_file(copy / file, header, data)

    return (file, name, f"{name}x"), f"{what} of {name}", edit


def _shifted(first: int, last: int) -> Callable[[Any, str], None]:
    def edit(header: Any, name: str) -> None:
        offsets = header[name]["data_offsets"]
        header[name]["data_offsets"] = [offsets[0] + first, offsets[1] + last]

    return edit


def _set(field: str, value: Any) -> Callable[[Any, str], None]:
    return lambda header, name: header[name].update({field: value})


def _rename(header: Any, name: str) -> None:
    header[f"{name}x"] = header.pop(name)


def _swap_lengths(header: Any, name: str) -> None:
    shape = header[name]["shape"]
    # The lengths of a square matrix look the same either way.
    header[name]["shape"] = shape[::-1] if len(set(shape)) > 1 else [*shape, 1]


ENTRIES: dict[str, Callable[[Any, str], None]] = {
    "offsets overlapping": _shifted(-4, -4),
    "a hole before": _shifted(4, 4),
    "offsets out of range": _shifted(0, 2**40),
    "offsets negative": _set("data_offsets", [-8, 0]),
    "offsets reversed": lambda h, n: h[n]["data_offsets"].reverse(),
    "offsets huge": _set("data_offsets", [2**63, 2**64]),
    "offsets missing": lambda h, n: h[n].pop("data_offsets"),
    "three offsets": lambda h, n: h[n]["data_offsets"].append(0),
    "dtype unknown": _set("dtype", "F33"),
    "dtype of integers": _set("dtype", "I32"),
    "dtype of other size": _set("dtype", "F64"),
    "dtype null": _set("dtype", None),
    "dtype missing": lambda h, n: h[n].pop("dtype"),
    "lengths swapped": _swap_lengths,
    "a length more": lambda h, n: h[n]["shape"].append(2),
    "a length negative": _set("shape", [-1]),
    "a length huge": _set("shape", [2**62, 4]),
    "no lengths": _set("shape", []),
    "lengths a text": _set("shape", "8, 8"),
    "lengths fractions": _set("shape", [1.5]),
    "lengths without end": _set("shape", ["@digits@"]),
    "renamed": _rename,
    "dropped": lambda h, n: h.pop(n),
    "an entry null": lambda h, n: h.update({n: None}),
    "an entry deep": lambda h, n: h.update({n: "@deep@"}),
}


@kind("a name twice")
def _(rng: np.random.Generator, save: Save) -> Any:
    file = chosen(rng, _weights(save))
    name = chosen(rng, _tensors(save, file))

    def edit(copy: pathlib.Path) -> None:
        header, data = read_file(copy / file)
        text = json.dumps(header)
        write_file(
            copy / file, (text[:-1] + f', "{name}": {json.dumps(header[name])}}}').encode(), data
        )

    return (file, name), name, edit


@kind("what the index says")
def _(rng: np.random.Generator, save: Save) -> Any:
    if not (save.path / INDEX).exists():
        return None
    name = chosen(rng, save.arrays)
    what = chosen(rng, INDEXES)

    def edit(copy: pathlib.Path) -> None:
        content = json.loads((copy / INDEX).read_text())
        edited = INDEXES[what](content, name)
        content = edited if what.startswith("all") else content
        (copy / INDEX).write_text(as_text(content))

    names = (INDEX, name, "other", "model-00003-of-00003.safetensors", *_weights(save))
    return names, f"{what} of {name}", edit


def _other_file(content: Any, name: str) -> None:
    where = content["weight_map"]
    where[name] = next(file for file in where.values() if file != where[name])


INDEXES: dict[str, Callable[[Any, str], Any]] = {
    "a file that is missing": lambda c, n: c["weight_map"].update(
        {n: "model-00003-of-00003.safetensors"}
    ),
    "the other file": _other_file,
    "a tensor dropped": lambda c, n: c["weight_map"].pop(n),
    "a tensor too many": lambda c, n: c["weight_map"].update(other=c["weight_map"][n]),
    "a file elsewhere": lambda c, n: c["weight_map"].update({n: "../other.safetensors"}),
    "a device": lambda c, n: c["weight_map"].update({n: "/dev/zero"}),
    "a file null": lambda c, n: c["weight_map"].update({n: None}),
    "a file empty": lambda c, n: c["weight_map"].update({n: ""}),
    "a file of many": lambda c, n: c["weight_map"].update({n: [c["weight_map"][n]]}),
    "no weight map": lambda c, n: c.pop("weight_map"),
    "an empty weight map": lambda c, n: c.update(weight_map={}),
    "a weight map as list": lambda c, n: c.update(weight_map=list(c["weight_map"])),
    "a weight map deep": lambda c, n: c.update(weight_map="@deep@"),
    "all a list": lambda c, n: [c],
    "all null": lambda c, n: None,
}


@kind("a field of the configuration")
def _(rng: np.random.Generator, save: Save) -> Any:
    if not (save.path / CONFIG).exists():
        return None
    # Other fields may have other values in a model that is as whole as this one.
    sizes = [f for f in LLAMA if f.endswith("_size") or f.startswith("num_") or f == "head_dim"]
    field = chosen(
        rng, [*sizes, *(f for f in LLAMA if f not in (*sizes, "max_position_embeddings"))]
    )
    value = chosen(rng, ["abc", -1, [], {}, "@NaN@", "@1e999@", "@digits@", "@deep@", 3.5])
    if field in sizes:
        value = chosen(rng, [value, LLAMA[field] + 1, LLAMA[field] * 2, 0, None])

    def edit(copy: pathlib.Path) -> None:
        (copy / CONFIG).write_text(as_text({**LLAMA, field: value}))

    return (CONFIG, field, *save.arrays, "Llama"), f"{field}: {value}", edit


@kind("bytes of a tensor in a file with checksums")
def _(rng: np.random.Generator, save: Save) -> Any:
    if save.name != "a file of ours":
        return None
    (file,) = _weights(save)
    content = bytearray((save.path / file).read_bytes())
    header, data = read_file(save.path / file)
    name = chosen(rng, _tensors(save, file))
    place = len(content) - len(data) + int(rng.integers(*header[name]["data_offsets"]))
    content[place] ^= 1 << int(rng.integers(8))
    return (file, name), f"byte {place}, in {name}", lambda c: (c / file).write_bytes(content)


@kind("two tensors exchanged in a file with checksums")
def _(rng: np.random.Generator, save: Save) -> Any:
    if save.name != "a file of ours":
        return None
    (file,) = _weights(save)

    def edit(copy: pathlib.Path) -> None:
        header, data = read_file(copy / file)
        header["up"], header["down"] = header["down"], header["up"]
        write_file(copy / file, header, data)

    return (file, "up", "down"), "up and down", edit


def verdicts(
    saves: list[Judged], directory: pathlib.Path, seed: int, count: int, kind: str = ""
) -> Iterator[Verdict]:
    """The verdicts of drawn damages."""
    by_name = {how.save.name: how for how in saves}
    for damage in drawn_damages([how.save for how in saves], seed, count):
        if kind in damage.kind:
            yield judged(damage, by_name[damage.save.name], directory)


if __name__ == "__main__":
    sys.exit(run_as_program(__doc__.splitlines()[0], made_weights, verdicts, KINDS, count=120))
