"""What Gemma 3 has in its attention beyond Gemma 2, put into Penzai's model.

Penzai 0.2.5 has Gemma 1 and 2. The third differs in norms of queries and keys, and in that layers
have positions of their own. Names of parameters are those that Penzai gives them from then on.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from penzai import pz
from penzai.models.transformer import model_parts

from penzai_shard.pretrained.configurations import Rotary


@pz.pytree_dataclass
class ApplyScaledRoPE(pz.nn.Layer):
    """Rotary embeddings of positions that are divided by a number, so that longer texts fit.

    Attributes:
        rope: The rotary embeddings, with the name of the side input that has the positions.
        factor: What positions are divided by.
    """

    rope: pz.nn.ApplyRoPE
    factor: float = dataclasses.field(metadata={"pytree_node": False})

    def __call__(self, inputs: pz.nx.NamedArray, **side_inputs: Any) -> pz.nx.NamedArray:
        """Rotates the inputs."""
        name = self.rope.positions_input_name
        return self.rope(inputs, **{**side_inputs, name: side_inputs[name] / self.factor})


def with_positions(model: Any, by_block: Sequence[Rotary]) -> Any:
    """The model with rotary embeddings as said, for each block or for all alike."""

    def changed(block: Any, said: Rotary) -> Any:
        def rotated(rope: pz.nn.ApplyRoPE) -> Any:
            if rope.max_wavelength != said.theta:
                rope = dataclasses.replace(rope, max_wavelength=said.theta)
            return rope if said.factor == 1.0 else ApplyScaledRoPE(rope, said.factor)

        return pz.select(block).at_instances_of(pz.nn.ApplyRoPE).apply(rotated)

    if len(by_block) == 1:
        return changed(model, by_block[0])
    blocks = pz.select(model).at_instances_of(model_parts.TransformerBlock)
    return blocks.set_sequence(map(changed, blocks.get_sequence(), by_block))


def with_norms_of_heads(model: Any, scales: Mapping[str, Any], epsilon: float) -> Any:
    """The model with norms of queries and keys before they are rotated.

    Args:
        model: The model.
        scales: Their scales less one, by layer and name as in Google's checkpoints.
        epsilon: Their epsilon.
    """
    parameters = []

    def with_norm(sequence: Any, name: str, scale: Any) -> Any:
        norm = pz.nn.RMSLayerNorm.from_config(
            name=name,
            init_base_rng=None,
            across_axes={"projection": scale.shape[0]},
            dtype=scale.dtype,
            epsilon=epsilon,
        )
        value = pz.nx.wrap(1 + scale).tag("projection")
        parameters.append(pz.Parameter(value=value, label=f"{name}/scale.weights"))
        first, *others = sequence.sublayers
        return pz.nn.Sequential([first, norm, *others])

    def changed(block: Any, number: int) -> Any:
        name = f"transformer/block_{number}/attention"
        attention = pz.select(block).at_instances_of(pz.nn.Attention)
        return attention.apply(
            lambda layer: dataclasses.replace(
                layer,
                input_to_query=with_norm(
                    layer.input_to_query,
                    f"{name}/query_norm",
                    scales[f"layer_{number}/attn/_query_norm/scale"],
                ),
                input_to_key=with_norm(
                    layer.input_to_key,
                    f"{name}/key_norm",
                    scales[f"layer_{number}/attn/_key_norm/scale"],
                ),
            )
        )

    blocks = pz.select(model).at_instances_of(model_parts.TransformerBlock)
    changed_blocks = [changed(block, i) for i, block in enumerate(blocks.get_sequence())]
    return pz.bind_variables(blocks.set_sequence(changed_blocks), parameters)
