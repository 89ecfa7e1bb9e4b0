"""What the processes of a job run with weights in safetensors files."""

import os

import jax
import jax.numpy as jnp
import numpy as np
from penzai import pz

import penzai_shard as pzs
from penzai_shard.pretrained.tensor_files import SafetensorsReader
from penzai_shard.processes import any_process
from tests.processes.programs import refused

UP = np.arange(16 * 24, dtype=np.float32).reshape(16, 24)
RULES = {"embedding": "data", "neurons": "model"}


def holds(model):
    """Whether every part that this process has is the right one."""
    return all(
        bool((np.asarray(shard.data) == whole[shard.index]).all())
        for name, whole in (("up", UP), ("bias", UP[0]))
        for shard in model[name].data_array.addressable_shards
    )


def flip_last_byte(path):
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


def weights(folder):
    """Saved by processes of which none has the whole, loaded under other layouts, and damaged."""
    me = jax.process_index()
    mesh = pzs.make_mesh({"data": 2, "model": 4})
    model = {
        "up": pz.nx.wrap(UP).tag("embedding", "neurons"),
        "bias": pz.nx.wrap(UP[0]).tag("neurons"),
    }
    placed = pzs.place(jax.tree.map(jnp.asarray, model), mesh, RULES)
    path = pzs.save_safetensors(f"{folder}/weights", placed, max_file_bytes=200)
    found = {
        "files": sorted(os.listdir(path)),
        "spread": not placed["up"].data_array.is_fully_addressable,
    }

    read = 0
    real = SafetensorsReader.read

    def counted(self, name, index):
        nonlocal read
        part = real(self, name, index)
        read += part.nbytes
        return part

    SafetensorsReader.read = counted
    loaded = pzs.load_safetensors(path, mesh, RULES, into=model)
    found |= {"read": read, "holds": holds(loaded)}
    found["replicated"] = holds(pzs.load_safetensors(path, mesh, {"neurons": "data"}, into=model))

    def other_path():
        return pzs.save_safetensors(f"{folder}/weights_{me}", placed)

    found["other path"] = refused(other_path)
    any_process(False, "all are there")
    if me == 0:
        flip_last_byte(f"{path}/{found['files'][1]}")
    any_process(False, "one byte is another")
    for layout, rules in (("damaged", RULES), ("damaged, replicated", {"neurons": "data"})):
        found[layout] = refused(
            lambda rules=rules: pzs.load_safetensors(path, mesh, rules, into=model)
        )
    gone = path if me == 0 else f"{path}s"
    found["gone"] = refused(lambda: pzs.load_safetensors(gone, mesh, RULES, into=model))
    return found
