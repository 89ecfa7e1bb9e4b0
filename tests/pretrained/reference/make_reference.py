"""Saves small models with transformers and keeps what they compute, as a reference without torch.

    python -m tests.pretrained.reference.make_reference

writes a directory per model and version of transformers beside this file: what
``save_pretrained`` makes, and ``logits.npy``. The version is that of the environment; those before
5 need no JAX. Each version has a configuration of its own; weights are kept once.
"""

import pathlib
import shutil

import numpy as np

from tests.pretrained.hugging_face_models import logits_of_torch, model_of_torch

FOLDER = pathlib.Path(__file__).parent
KEPT = ("llama", "llama_tied", "mistral", "gpt_neox", "gemma", "gemma2", "gemma3_longer_texts")
CONFIG = "config_transformers_{}.json"
SMALL = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 40}


def main():
    import transformers

    version = transformers.__version__.partition(".")[0]
    for name in KEPT:
        # In bfloat16, as most are, and half the size; the reference computes in float32.
        model = model_of_torch(name, "bfloat16", **SMALL)
        folder = FOLDER / name
        made = folder / "made"
        model.save_pretrained(made, max_shard_size="15KB")
        # Read anew, as converting the model would have rounded its wavelengths too.
        read = type(model).from_pretrained(made, dtype="float32", attn_implementation="eager")
        logits = logits_of_torch(read)
        (made / "config.json").rename(folder / CONFIG.format(version))
        for file in made.glob("*.safetensors*"):
            file.replace(folder / file.name)
        shutil.rmtree(made)
        np.save(folder / "logits.npy", logits)


if __name__ == "__main__":
    main()
