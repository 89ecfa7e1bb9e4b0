"""``penzai-shard plan`` and ``rules`` as a shell sees them."""

import json
import os
import subprocess
import sys

import jax
import pytest
from jax.sharding import AbstractMesh

import penzai_shard as pzs
from penzai_shard.cli.main import main
from penzai_shard.pretrained.published_models import find_published

SMALL = "llama-3-8b(num_hidden_layers=2)"


def test_a_published_model_is_planned_as_in_code(shell):
    status, printed, errors = shell("plan", SMALL, "--mesh", "data=8,model=4", "--json")
    assert (status, errors) == (0, "")
    found = json.loads(printed)
    model = find_published("llama-3-8b").with_changes({"num_hidden_layers": 2}).model()
    layout = pzs.Layout.two_dimensional(vocabulary="model")
    wanted = layout.plan(model, AbstractMesh((8, 4), ("data", "model")))
    assert found["plan"] == json.loads(wanted.to_json())
    assert found["fits"]
    assert found["findings"] == []
    assert "two_dimensional(vocabulary='model')" in found["layout"]
    assert found["parameters"] == sum(a.data_array.size for a in pzs.param_dict(model).values())


def test_the_text_says_the_model_the_layout_and_what_a_device_holds(shell):
    status, printed, errors = shell("plan", "pythia-14m", "--mesh", "data=8")
    assert (status, errors) == (0, "")
    assert printed.startswith("pythia-14m: 14,067,712 parameters, bfloat16; 14.1M are published")
    assert "(model card EleutherAI/pythia-14m)" in " ".join(printed.split())
    assert "--layout" in printed
    assert "block_*/attention/query" in printed
    assert "on mesh (data=8) each device holds" in " ".join(printed.split())
    every = shell("plan", "pythia-14m", "--mesh", "data=8", "--all")[1]
    assert "block_5/attention/query" in every


def test_the_70b_model_has_a_layout_by_default_on_a_mesh_that_its_heads_do_not_divide_over(shell):
    changed = "llama-3-70b(num_hidden_layers=1)"
    status, printed, _ = shell("plan", changed, "--mesh", "data=16,model=16", "--json")
    found = json.loads(printed)
    assert status == 0
    assert "'heads': None" in found["layout"]
    assert "do not divide over mesh axis 'model' (16)" in " ".join(found["layout_notes"])
    # What is said to be the layout gives the same plan if it is asked for.
    asked = found["layout"].removeprefix("--layout ").strip('"')
    _, again, _ = shell("plan", changed, "--mesh", "data=16,model=16", "--layout", asked, "--json")
    assert json.loads(again)["plan"] == found["plan"]


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        ("data=4", "fully_sharded()"),
        ("model=4", "tensor_parallel(data=(), vocabulary='model')"),
        ("model=2,data=2", "two_dimensional(vocabulary='model')"),
        ("replica=2,data=2", "hybrid()"),
    ],
)
def test_meshes_of_the_usual_names_have_a_layout_by_default(mesh, layout, shell):
    status, printed, _ = shell("plan", SMALL, "--mesh", mesh, "--json")
    found = json.loads(printed)
    assert (status, found["layout"]) == (0, f'--layout "{layout}"')
    _, again, _ = shell("plan", SMALL, "--mesh", mesh, "--layout", layout, "--json")
    assert json.loads(again)["plan"] == found["plan"]


RULES = {
    "in=data": ["data"],
    "in=data,out=none": ["data"],
    "in=data+model": [["data", "model"]],
    "out=model,batch=data": [None, "model"],
    "AxisRules({'in': 'model'})": ["model"],
    "fully_sharded(min_size=1)": ["data"],
    "data_parallel + fully_sharded('model', min_size=1)": ["model"],
}


@pytest.mark.parametrize("rules", RULES)
def test_rules_are_pairs_or_as_code_has_them(rules, shell):
    status, printed, errors = shell(
        "plan", "own.py:build", "--mesh", "data=2,model=2", "--rules", rules, "--json"
    )
    assert (status, errors) == (0, "")
    (array,) = json.loads(printed)["plan"]["arrays"]
    assert array["spec"] == RULES[rules]


def test_the_example_file_is_good_for_published_models(shell, tmp_path):
    status, printed, errors = shell("rules", "--example")
    assert (status, errors) == (0, "")
    (tmp_path / "rules.toml").write_text(printed)
    for model in (SMALL, "gemma-2b(num_hidden_layers=1)", "pythia-14m"):
        status, printed, _ = shell(
            "plan", model, "--mesh", "data=8,model=4", "--rules", "rules.toml", "--json"
        )
        assert status == 0, printed
        assert json.loads(printed)["findings"] == []


def test_the_state_of_an_optimizer_is_planned_with_its_gradients(shell):
    status, printed, _ = shell(
        "plan", "pythia-14m", "--mesh", "data=8", "--optimizer", "adamw", "--json"
    )
    plan = json.loads(printed)["plan"]
    assert status == 0
    parameters = sum(a["bytes_per_device"] for a in plan["arrays"] if a["path"][:6] == "params")
    assert plan["transient_bytes_per_device"] == parameters
    moments = [a for a in plan["arrays"] if "/mu/" in a["path"] or "/nu/" in a["path"]]
    assert sum(a["bytes_per_device"] for a in moments) == 2 * parameters


def test_a_function_may_give_a_train_state(shell):
    status, printed, _ = shell("plan", "own.py:state", "--mesh", "data=2", "--rules", "in=data")
    assert status == 0
    assert "opt_state/0/mu/l.weights" in printed
    assert printed.startswith("own.py:state: 32 parameters")


def test_what_has_no_layout_is_found_and_exit_status_1(shell):
    arguments = ("plan", "own.py:build(width=6)", "--mesh", "data=4", "--rules", "out=data")
    status, printed, errors = shell(*arguments)
    assert (status, errors) == (1, "")
    assert "NO VALID LAYOUT" in printed
    assert "'out' (6) does not divide over mesh axis 'data' (4)" in printed
    found = json.loads(shell(*arguments, "--json")[1])
    assert not found["fits"]
    assert len(found["findings"]) == 1
    assert shell(*arguments, "--on-indivisible", "replicate")[0] == 0
    assert "Or store it padded: --on-indivisible pad." in printed
    assert "out=6(8)/data" in shell(*arguments, "--on-indivisible", "pad")[1]
    linted = " ".join(shell("lint", *arguments[1:])[1].split())
    assert "Or store it padded: --on-indivisible pad." in linted
    assert shell("lint", *arguments[1:], "--on-indivisible", "pad")[0] == 0


def test_a_rule_that_no_array_follows_is_found_with_what_was_meant(shell):
    arguments = ("--mesh", "data=4", "--rules", "inn=data,batch=data")
    status, printed, errors = shell("plan", "own.py:build", *arguments)
    assert (status, errors) == (1, "")
    assert "no array has logical axis 'inn'. Did you mean 'in'?" in " ".join(printed.split())
    assert "batch" not in printed.partition("FOUND")[2]


def test_arrays_without_names_are_found_with_the_option_that_allows_them(shell):
    arguments = ("plan", "own.py:plain", "--mesh", "data=2", "--rules", "in=data")
    status, printed, _ = shell(*arguments)
    assert status == 1
    assert "pass --on-unnamed replicate" in printed
    assert shell(*arguments, "--on-unnamed", "replicate")[0] == 1  # The rule has no array.


MISTAKES = {
    ("plan",): "the following arguments are required: MODEL",
    ("plan", SMALL): "the mesh is needed too: --mesh data=8,model=4",
    ("plan", "--mesh", "data=8"): "the following arguments are required: MODEL",
    ("paln", "llama-3-8b"): "invalid choice: 'paln'",
    ("plan", SMALL, "--mesh", "data"): "write for instance data=4,model=2",
    ("plan", SMALL, "--mesh", "data=0"): "write for instance data=4,model=2",
    ("plan", SMALL, "--mesh", "data=4,data=2"): "has the mesh axis 'data' twice",
    ("plan", SMALL, "--mehs", "data=4"): "Did you mean --mesh",
    ("plan", SMALL, "--mesh", "data=4", "--rule=in=data", "--jsom"): "Did you mean --json",
    ("plan", "llama-3-9b", "--mesh", "data=8"): "Did you mean llama-3-",
    ("plan", "llama-3-8b(layers=2)", "--mesh", "data=8"): "Did you mean num_hidden_layers",
    ("plan", "llama-3-8b(2)", "--mesh", "data=8"): "what is changed has a name",
    ("plan", "llama-3-8b(num_hidden_layers=n)", "--mesh", "data=8"): "arguments are literals",
    ("plan", "llama-3-8b(num_hidden_layers=0)", "--mesh", "data=8"): "a whole number above 0",
    ("plan", "llama-3-8b(num_attention_heads=5)", "--mesh", "data=8"): "does not divide hidden",
    ("plan", "own.py", "--mesh", "data=8"): "own.py:build_model",
    ("plan", "absent.py:build", "--mesh", "data=8"): "there is no file absent.py",
    ("plan", "own.py:jax", "--mesh", "data=8"): "jax is of type module, not a model",
    ("plan", "own.py:biuld", "--mesh", "data=8"): "Did you mean own.py:build?",
    ("plan", "own.py:build(wide=3)", "--mesh", "data=8"): "fails with TypeError",
    ("plan", "absent_module:build", "--mesh", "data=8"): "cannot import absent_module",
    ("plan", "a model?", "--mesh", "data=8"): "cannot read the model 'a model?'",
    ("plan", "own.py:build", "--mesh", "data=8", "--dtype", "float32"): "--dtype float32: is for",
    ("plan", "own.py:build", "--mesh", "data=8", "--stacked"): "--stacked: is for published",
    ("plan", "gemma-2-2b", "--mesh", "data=8", "--stacked"): "layers of this Gemma 2 differ",
    ("plan", SMALL, "--mesh", "data=8", "--dtype", "int4"): "invalid choice: 'int4'",
    ("plan", SMALL, "--mesh", "rows=8"): "--layout \"fully_sharded('rows')\"",
    ("plan", SMALL, "--mesh", "rows=8", "--rules", "embedding=data"): "no mesh axis 'data'",
    ("plan", SMALL, "--mesh", "data=8", "--rules", ""): "--rules is empty",
    ("plan", SMALL, "--mesh", "data=8", "--rules", "embedding"): "there is no 'embedding'",
    ("plan", SMALL, "--mesh", "data=8", "--rules", "embedding="): "cannot read 'embedding='",
    ("plan", SMALL, "--mesh", "data=8", "--rules", "absent.toml"): "cannot be read: No such file",
    ("plan", SMALL, "--mesh", "data=8", "--rules", "zero1"): "--layout zero1",
    ("plan", SMALL, "--mesh", "data=8", "--rules", "fully_shared"): "Did you mean fully_sharded",
    ("plan", SMALL, "--mesh", "data=8", "--layout", "zero2"): "Did you mean zero1",
    (
        "plan",
        SMALL,
        "--mesh",
        "data=8",
        "--layout",
        "zero1(x=1)",
    ): "x=1: this preset has no such",
    (
        *("plan", SMALL, "--mesh", "data=8"),
        *("--layout", "zero1", "--rules", "a=data"),
    ): "Leave one of them out",
    ("plan", SMALL, "--mesh", "data=8", "--optimizer", "adamm"): "Did you mean adam",
    ("plan", SMALL, "--mesh", "data=8", "--optimizer", "adamw(lr=3)"): "adamw",
    ("rules",): "required: --example",
}


@pytest.mark.parametrize("arguments", MISTAKES, ids=" ".join)
def test_a_mistake_is_one_line_and_exit_status_2(arguments, shell):
    status, printed, errors = shell(*arguments)
    assert (status, printed) == (2, "")
    assert MISTAKES[arguments] in errors
    assert errors.startswith("penzai-shard: ")
    assert errors.count("\n") == 1


def test_the_published_models_are_listed(shell):
    status, printed, _ = shell("plan", "--list")
    assert status == 0
    assert "llama-3.1-405b" in printed
    assert "406B" in printed


@pytest.mark.parametrize("command", ["plan", "rules", "price", "lock"])
def test_help_has_an_example(command, shell):
    status, printed, _ = shell(command, "--help")
    assert status == 0
    assert f"For example: penzai-shard {command} " in " ".join(printed.split())


def test_a_narrow_terminal_gets_narrow_lines(shell, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    _, printed, _ = shell("plan", "pythia-14m", "--mesh", "data=8")
    assert max(map(len, printed.splitlines())) <= 60


def test_planning_a_published_model_loads_no_optional_dependency_and_starts_no_accelerator():
    code = (
        "import sys\n"
        "from penzai_shard.cli.main import main\n"
        "assert main(['plan', 'pythia-14m', '--mesh', 'data=8']) == 0\n"
        "optional = ('optax', 'orbax', 'rich', 'grain', 'transformers', 'torch', 'safetensors')\n"
        "assert not [name for name in optional if name in sys.modules]\n"
        "from jax._src import xla_bridge\n"
        "assert set(xla_bridge._backends) <= {'cpu'}, xla_bridge._backends\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_memory_is_used_for_a_model_of_any_size(shell):
    before = len(jax.live_arrays())
    assert shell("plan", "llama-3.1-405b(num_hidden_layers=1)", "--mesh", "data=8")[0] == 0
    assert len(jax.live_arrays()) - before < 50


def test_a_reader_of_the_list_that_leaves_early_gets_no_complaint(monkeypatch, capsys):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        with pytest.raises(SystemExit) as ended:
            main(["plan", "--list"])
    assert ended.value.code == 141
    assert capsys.readouterr().err == ""
