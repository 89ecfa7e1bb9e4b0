"""Small models of every family, as transformers wrote them."""

import json
import pathlib

import numpy as np

from tests.checkpoints.safetensors_files import read_file, write_parts, write_tensors

REFERENCE = pathlib.Path(__file__).parent / "reference"
_READ = {path.parent.name: json.loads(path.read_text()) for path in REFERENCE.glob("*/config.json")}
_GEMMA_3 = _READ.pop("gemma3_longer_texts")
_ALIKE = {"layer_types": ["full_attention"] * 2, "attn_logit_softcapping": None}
CONFIGS = {
    **_READ,
    "llama": {key: value for key, value in _READ["llama"].items() if key != "head_dim"},
    "llama_one_key_head": _READ["llama"]
    | {"num_key_value_heads": 1, "rope_parameters": None, "rope_theta": 5e5},
    "gemma2_alike": _READ["gemma2"] | _ALIKE | {"final_logit_softcapping": 5.0},
    "gemma3": _GEMMA_3,
    "gemma3_images": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": _GEMMA_3,
        "vision_config": {"hidden_size": 8},
        "image_token_index": 39,
        "mm_tokens_per_image": 4,
    },
}
_FOLDERS = {"llama_one_key_head": "llama", "gemma2_alike": "gemma2"}
_FOLDERS |= dict.fromkeys(("gemma3", "gemma3_images"), "gemma3_longer_texts")


def shapes(name):
    """The shape of each tensor of a small model."""
    found = {}
    for file in (REFERENCE / _FOLDERS.get(name, name)).glob("*.safetensors"):
        header, _ = read_file(file)
        header.pop("__metadata__")
        found |= {key: entry["shape"] for key, entry in header.items()}
    if name == "llama_one_key_head":
        found |= {key: [4, 16] for key in found if "k_proj" in key or "v_proj" in key}
    if name == "gemma3_images":
        found = {f"language_model.{key}": shape for key, shape in found.items()}
        found["vision_tower.head.probe"] = [1, 8]
    return found


def draw_tensors(name, dtype="float32", seed=0):
    """Tensors whose every number matters: of size one where the model computes, norms too."""
    generator = np.random.default_rng(seed)

    def draw(shape):
        noise = generator.standard_normal(shape)
        return (0.3 * noise if len(shape) == 1 else noise / shape[1] ** 0.5).astype(dtype)

    return {tensor: draw(shape) for tensor, shape in shapes(name).items()}


def write_model(folder, name="llama", tensors=None, several=False):
    """A folder as Hugging Face has it."""
    folder.mkdir(exist_ok=True)
    tensors = draw_tensors(name) if tensors is None else tensors
    if several:
        write_parts(folder, tensors)
    else:
        write_tensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    return folder
