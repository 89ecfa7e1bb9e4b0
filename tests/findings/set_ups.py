"""Abstract models and meshes, and what tests of ``lint`` do with a finding: paste its fix."""

import dataclasses
import functools

import jax
import optax
from penzai import pz
from penzai.models.transformer.variants import gpt_neox, llamalike_common

import penzai_shard as pzs
from penzai_shard.findings.lint import lint
from penzai_shard.findings.set_up import ERRORS, Finding

_LOCAL = llamalike_common.AttentionTypeSlidingWindowCausal(2)
_GEMMA = {"mlp_variant": "geglu_approx", "tie_embedder_and_logits": True}
_GEMMA_2 = _GEMMA | {
    "use_post_attn_norm": True,
    "use_post_ffw_norm": True,
    "attn_logits_soft_cap": 50.0,
    "final_logit_softcap": 30.0,
    "attention_type": (_LOCAL, llamalike_common.AttentionTypeGlobalCausal()),
}
_HEADS = {"num_kv_heads": 1, "query_head_multiplier": 4}
FAMILIES = {
    "llama": {},
    "mistral": {"attention_type": _LOCAL},
    "gemma": _GEMMA,
    "gemma_2": _GEMMA_2,
    "gemma_3": _GEMMA_2 | _HEADS | {"attn_logits_soft_cap": None, "query_scaling_factor": 0.3},
    "gpt_neox": {
        "activation_fn": "gelu_exact",
        "rope_subset_size": 2,
        "rope_wavelength": 10_000,
        "layernorm_epsilon": 1e-5,
        "parameter_dtype": "float32",
        "activation_dtype": "float32",
    },
}
# Sizes of which every device holds more than 1 MiB of the largest parameters.
_WIDE = {"embedding_dim": 1024, "projection_dim": 64, "mlp_hidden_dim": 4096, "vocab_size": 8192}


@functools.cache
def transformer(family="llama", wide=False):
    small = {"embedding_dim": 8, "projection_dim": 4, "mlp_hidden_dim": 16, "vocab_size": 16}
    sizes = (_WIDE if wide else small) | {"num_decoder_blocks": 2}
    key = jax.random.key(0)
    if family == "gpt_neox":
        sizes |= {"num_attention_heads": 32 if wide else 2}
        config = gpt_neox.GPTNeoXTransformerConfig(**sizes, **FAMILIES[family])
        return pzs.abstract_model(gpt_neox.build_gpt_neox_transformer, config, key)
    heads = {"num_kv_heads": 8, "query_head_multiplier": 4} if wide else {}
    heads = {"num_kv_heads": 2, "query_head_multiplier": 2} | FAMILIES[family] | heads
    shared = {"mlp_variant": "swiglu", "tie_embedder_and_logits": False}
    config = llamalike_common.LlamalikeTransformerConfig(**(sizes | shared | heads))
    return pzs.abstract_model(llamalike_common.build_llamalike_transformer, config, key)


def mesh(**sizes):
    return pzs.make_mesh(sizes, abstract=True)


def struct(dtype="float32", **sizes):
    return jax.eval_shape(lambda: pz.nx.zeros(sizes, dtype))


def weights(**arrays):
    return {name: struct(**axes) for name, axes in arrays.items()}


def plain(**shapes):
    return {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}


def state_of(params):
    """A train state of AdamW, without its values."""
    return pzs.TrainState.initial_state(params, optax.adamw(1e-3), jax.random.key(0))


def keys(report):
    return {(one.kind, path) for one in report.findings for path in one.paths or [one.path]}


def paste(finding, subject):
    """The keyword arguments of ``lint`` after a fix was taken out of its sentence and run."""
    name, _, expression = finding.fix.removeprefix("Write ").removesuffix(".").partition("=")
    names = {name: getattr(pzs, name) for name in pzs.__all__}
    names |= {"pz": pz, "dataclasses": dataclasses}
    names |= subject | {"layout": subject["rules"], "model": subject["model_or_state"]}
    name = {"layout": "rules", "model": "model_or_state"}.get(name, name)
    return {**subject, name: eval(expression, names)}


def check_fixes(subject):
    """Each fix that is an argument of ``lint`` takes its finding away, and adds none.

    Kinds are listed where people look them up.
    """
    report = lint(**subject)
    hides_waste = any("waste was not looked for" in note for note in report.notes)
    for finding in report.findings:
        assert f'``"{finding.kind}"``' in Finding.__doc__
        if finding.fix.startswith(("Write rules=", "Write layout=", "Write model=")):
            after = keys(lint(**paste(finding, subject)))
            # Waste is looked for once the rules are right.
            new = {key for key in after - keys(report) if key[0] in ERRORS or not hides_waste}
            assert not new, (finding, new)
            places = {(finding.kind, path) for path in finding.paths or [finding.path]}
            assert not places & after or len(report.findings) > len(after), finding
    return report
