"""The README's commands are those that CI runs, and its tour works as printed."""

import re
from pathlib import Path

import jax
import numpy as np
from penzai import pz

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_readme_begins_with_the_two_commands_and_ci_runs_the_second_word_for_word():
    main_job, tests = (block.strip() for block in blocks("sh")[:2])
    assert "\n" not in main_job
    assert "\n" not in tests
    assert main_job.endswith("penzai-shard demo")
    assert tests.endswith("-m pytest")
    assert tests in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()


def test_the_constraints_pin_exact_versions_and_name_no_index():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    assert lines
    for line in lines:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line)


def test_the_tour_runs_as_printed(tmp_path, monkeypatch, capsys):
    from penzai.models.transformer.variants import llamalike_common

    from penzai_shard.cli.demo import next_byte_loss

    def build_model(seed):
        config = llamalike_common.LlamalikeTransformerConfig(
            num_kv_heads=4,
            query_head_multiplier=1,
            embedding_dim=16,
            projection_dim=4,
            mlp_hidden_dim=32,
            num_decoder_blocks=1,
            vocab_size=16,
            mlp_variant="swiglu",
            tie_embedder_and_logits=False,
        )
        return llamalike_common.build_llamalike_transformer(
            config, init_base_rng=jax.random.key(seed), name="transformer"
        )

    monkeypatch.chdir(tmp_path)
    tokens = pz.nx.wrap(np.arange(8 * 9, dtype=np.int32).reshape(8, 9) % 16, "batch", "seq")
    namespace = {"build_model": build_model, "loss_fn": next_byte_loss, "tokens": tokens}
    tour, surgery = blocks("python")
    exec(compile(tour, "README.md", "exec"), namespace)
    assert "each device holds" in capsys.readouterr().out
    assert np.isfinite(float(namespace["aux"]["loss"]))
    trained = namespace["pzs"].param_dict(namespace["state"].model)
    restored = namespace["pzs"].param_dict(namespace["restored"])
    for name, value in trained.items():
        np.testing.assert_array_equal(
            np.asarray(value.data_array), np.asarray(restored[name].data_array)
        )

    namespace["bare"] = build_model(0)
    namespace["inputs"] = tokens
    exec(compile(surgery.replace("expect=2", "expect=1"), "README.md", "exec"), namespace)
    assert namespace["same"] == namespace["recipe"]
    shown = capsys.readouterr().out
    assert "insert_after(TransformerBlock, ConstrainShardingByName(...))" in shown
    assert "equivalent" in shown
