"""The main job on a small transformer: plan it, build it in place, edit it, run it on real text."""

import os
import pydoc_data.topics


def run_demo() -> None:
    """Runs the demo on 8 simulated devices; prints what it does."""
    # Before JAX is imported, which reads them once.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    import jax
    import jax.numpy as jnp
    from penzai import pz
    from penzai.models.transformer import model_parts
    from penzai.models.transformer.variants import llamalike_common

    import penzai_shard as pzs

    mesh = pzs.make_mesh({"data": 4, "model": 2})
    rules = {"embedding": "data", "neurons": "model", "heads": "model", "vocabulary": "model"}
    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=4,
        query_head_multiplier=1,
        embedding_dim=64,
        projection_dim=16,
        mlp_hidden_dim=128,
        num_decoder_blocks=4,
        vocab_size=256,
        mlp_variant="swiglu",
        tie_embedder_and_logits=True,
    )

    def build(key: jax.Array) -> model_parts.TransformerLM:
        return llamalike_common.build_llamalike_transformer(config, init_base_rng=key)

    print("1. Plan it: shapes are enough, and nothing is made yet.\n")
    print(pzs.make_plan(pzs.abstract_model(build, jax.random.key(0)), mesh, rules))

    print("\n2. Build it: each device makes its own part of every array.\n")
    model = pzs.sharded_init(build, jax.random.key(0), mesh=mesh, rules=rules)
    name = "transformer/block_0/mlp/out_linear.weights"
    weights = pz.select(model).at_instances_of(pz.Parameter).where(lambda p: p.label == name)
    print(f"{name}: {weights.get().value.data_array.sharding.spec}")

    print("\n3. Edit it: after each block goes a layer that lays the batch over 'data'.\n")

    @pz.pytree_dataclass
    class LayOutBatch(pz.nn.Layer):  # type: ignore[misc]
        def __call__(self, x: pz.nx.NamedArray, **side_inputs: object) -> pz.nx.NamedArray:
            return pzs.place(x, mesh, {"batch": "data"})

    blocks = pz.select(model).at_instances_of(model_parts.TransformerBlock)
    model = blocks.insert_after(LayOutBatch())
    print(f"{blocks.count()} layers are inserted.")

    print("\n4. Run it: 8 pieces of Python's own help pages, byte by byte.\n")
    text = "".join(pydoc_data.topics.topics.values()).encode()[: 8 * 129]
    tokens = pz.nx.wrap(jnp.asarray(list(text), jnp.int32).reshape(8, 129)).tag("batch", "seq")
    tokens = pzs.place(tokens, mesh, {"batch": "data"})
    logits = pz.variable_jit(lambda model, ids: model(ids))(model, tokens[{"seq": pz.slice[:-1]}])
    log_probs = pz.nx.nmap(jax.nn.log_softmax)(logits.untag("vocabulary")).tag("vocabulary")
    right = log_probs[{"vocabulary": tokens[{"seq": pz.slice[1:]}]}]
    loss = -right.untag("batch", "seq").unwrap().mean()
    print(f"logits {dict(logits.named_shape)} lie as {logits.data_array.sharding.spec}")
    print(f"an untrained model of 256 bytes: {loss:.2f} nats per byte (guessing: 5.55)")
