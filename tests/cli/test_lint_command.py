"""``penzai-shard lint`` as a shell sees it."""

import json
import re
import shlex

import pytest

RULES = """
[parameters]
in = "dta"
out = "model"

[compute]
batch = "data"
"""


def findings(printed):
    return json.loads(printed)["lint"]["findings"]


@pytest.mark.parametrize(
    ("mesh", "chosen", "kinds"),
    [
        ("data=4,model=2", "--rules in=data,out=modle", ["unknown"]),
        ("data=4,model=2", "--rules in=data,outs=model", ["unused"]),
        ("data=4,model=2", "--rules in=data,out=data", ["doubled"]),
        ("data=4,model=8", "--rules in=data,out=model", ["indivisible", "idle mesh axis"]),
        ("data=4,model=2", "--rules data_parallel()", ["idle mesh axis"]),
        ("data=4,model=2", "--layout tensor_parallel(names={'heads':None})", ["misfit"]),
    ],
)
def test_what_is_found_is_mended_by_what_is_said_to_the_shell(mesh, chosen, kinds, shell):
    command = ["lint", "own.py:build", "--mesh", mesh, "--json"]
    status, printed, errors = shell(*command, *chosen.split(" ", 1))
    found = findings(printed)
    assert (status, errors, [each["kind"] for each in found]) == (1, "", kinds)
    for _ in kinds:
        fixed = shlex.split(found[0]["fix"])
        assert fixed[0] in ("--rules", "--layout")
        status, printed, _ = shell(*command, *fixed)
        found = findings(printed)
    assert (status, found) == (0, [])


def test_in_a_file_of_rules_a_line_is_changed(shell, tmp_path):
    path = tmp_path / "rules.toml"
    path.write_text(RULES)
    command = ("lint", "own.py:build", "--mesh", "data=4,model=2", "--rules", "rules.toml")
    status, printed, _ = shell(*command, "--json")
    (finding,) = findings(printed)
    assert (status, finding["kind"], finding["path"]) == (1, "unknown", "layout.parameters")
    where, _, line = finding["fix"].partition(": ")
    assert where == "in rules.toml"
    path.write_text(re.sub(r"\[parameters\].*?\n\n", f"{line}\n", RULES, flags=re.DOTALL))
    assert shell(*command)[0] == 0


def test_the_text_says_model_layout_and_findings_with_their_fix(shell):
    command = ("lint", "own.py:build(1024)", "--mesh", "data=4,model=2", "--min-bytes", "4KiB")
    status, printed, errors = shell(*command, "--rules", "batch=data,in=model,out=none")
    assert (status, errors) == (0, "")
    status, printed, errors = shell(*command, "--rules", "in=model", "--layout", "zero1")
    assert (status, printed) == (2, "")
    assert "--rules and --layout are two ways" in errors
    status, printed, errors = shell(*command, "--rules", "in=data", "--optimizer", "adamw")
    said = " ".join(printed.split())
    assert (status, errors) == (1, "")
    assert said.startswith(
        "own.py:build(1024): 8,192 parameters, float32 --rules in=data 2 findings"
    )
    assert "[in=8, out=1024] of float32 is whole over mesh axis 'model' (2)" in said
    assert "Fix: --rules \"AxisRules({'in': 'data', 'out': 'model'})\"" in said
    assert "each device holds 16.0 KiB more than it must" in said


def test_what_flows_is_looked_at_if_the_batch_is_said(shell):
    small = "pythia-14m(num_hidden_layers=1)"
    command = ("lint", small, "--mesh", "data=2", "--rules", "embedding=data")
    status, printed, _ = shell(*command)
    assert (status, "not looked at: see --batch" in printed) == (0, True)
    status, printed, _ = shell(*command, "--batch", "3", "--seq", "8")
    said = " ".join(printed.split())
    assert "not looked at" not in said


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        ("pythia-14m", "--batch 0", "--batch must be at least 1, not 0."),
        ("pythia-14m", "--batch 2 --seq 0", "--seq must be at least 1, not 0."),
        ("pythia-14m", "--seq 8", "Give --batch 8 too."),
        ("own.py:build", "--batch 2", "l, the model cannot be called with this batch: this Linear"),
        ("own.py:build", "--batch 2", "leave out --batch, and give a function that returns (model"),
        ("own.py:called", "--batch 2", "says itself what its model is called with."),
        ("own.py:matmul", "--batch 2", "return (model, args), or (model, args, kwargs)."),
    ],
)
def test_a_batch_that_is_no_batch_of_the_model_is_a_mistake_of_one_line(
    model, options, said, shell
):
    status, printed, errors = shell("lint", model, "--mesh", "data=2", *options.split())
    assert (status, printed, errors.count("\n")) == (2, "", 1)
    assert said in errors


def test_a_function_may_say_what_its_model_is_called_with(shell):
    command = ("--mesh", "data=2,model=3", "--rules", "batch=model,out=data")
    status, printed, _ = shell("lint", "own.py:called", *command)
    said = " ".join(printed.split())
    assert (status, "not looked at" in said) == (1, False)
    assert "[batch=4, in=8]: logical axis 'batch' (4) does not divide" in said
    status, printed, _ = shell("lint", "own.py:called(('batch', 'on'))", *command)
    assert (status, "the model cannot be called with this batch" in printed) == (1, True)


def test_a_train_state_is_linted_with_its_optimizer(shell):
    rules = ("--mesh", "data=4,model=2", "--rules", "in=dat")
    assert shell("lint", "own.py:state", *rules)[0] == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("--mesh", "data"),
        ("--mesh", "data=4", "--rules", "in"),
        ("--mesh", "data=4", "--rules", "in=data", "--min-bytes", "many"),
        ("--mesh", "data=4", "--layout", "sharded"),
        ("--rules", "in=data"),
    ],
)
def test_a_wrong_command_line_ends_with_status_2(arguments, shell):
    status, printed, errors = shell("lint", "own.py:build", *arguments)
    assert (status, printed) == (2, "")
    assert errors.startswith("penzai-shard: ")
