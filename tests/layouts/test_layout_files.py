"""Layouts as TOML: what is written is read as the same, and mistakes are named."""

import hypothesis
import hypothesis.strategies as st
import pytest

import penzai_shard as pzs
from penzai_shard.errors import RuleTypeError
from penzai_shard.layouts.example_file import EXAMPLE
from penzai_shard.layouts.layout_file import PRESETS
from penzai_shard.layouts.rule_expressions import read_rules_expression
from penzai_shard.rule_kinds import IdentityRule, LargestDimensionRule, NameRule

LOGICAL = st.sampled_from(["batch", "embedding", "neurons", "a b", 'a"b', "ü", "1", "none", "x.y"])
MESH = st.lists(st.sampled_from(["data", "model", "none", "b\\n"]), max_size=3, unique=True)
RULE = st.one_of(
    st.builds(NameRule, LOGICAL, MESH.map(tuple), st.booleans(), st.booleans()),
    st.builds(
        LargestDimensionRule,
        MESH.filter(bool).map(tuple),
        st.integers(0, 2**40),
        st.booleans(),
    ),
    st.just(IdentityRule()),
)
RULES = st.lists(RULE, max_size=5).map(pzs.AxisRules.from_rules)


@pytest.fixture
def read(tmp_path):
    def read(text):
        (tmp_path / "rules.toml").write_text(text, encoding="utf-8")
        return pzs.Layout.from_toml(tmp_path / "rules.toml")

    return read


@hypothesis.settings(max_examples=150)
@hypothesis.given(parameters=RULES, compute=RULES, optimizer=st.none() | RULES)
def test_rules_that_are_written_are_read_as_the_same(
    tmp_path_factory, parameters, compute, optimizer
):
    layout = pzs.Layout(parameters=parameters, compute=compute, optimizer=optimizer)
    path = tmp_path_factory.getbasetemp() / "written.toml"
    path.write_text(layout.to_toml(), encoding="utf-8")
    again = pzs.Layout.from_toml(path)
    # What a rule is for counts as little as the order of rules where equality is concerned; here
    # all of it is to come back, but for a rule that yields, which says nothing of activations.
    for one, other in zip(
        (parameters, compute, optimizer or pzs.AxisRules({})),
        (again.parameters, again.compute, again.optimizer or pzs.AxisRules({})),
        strict=True,
    ):
        assert one.rules == other.rules
        assert [_is_for_activations(rule) for rule in one.rules] == [
            _is_for_activations(rule) for rule in other.rules
        ]


def _is_for_activations(rule):
    return isinstance(rule, NameRule) and rule.for_activations and not rule.yields


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_written_and_read(preset, read):
    layout = getattr(pzs.Layout, preset)()
    assert read(layout.to_toml()) == layout
    assert read(f'layout = "{preset}"') == layout


def test_what_is_not_a_table_of_rules_is_written_too(read):
    layout = pzs.Layout.two_dimensional(
        names={"neurons": "mlp", "heads": None, "seq": ("seq", "kv_seq")},
        reshard_after_forward=True,
        rematerialise="dots",
    )
    assert read(layout.to_toml()) == layout
    assert read(pzs.Layout.fully_sharded(manual=True).to_toml()).manual


def test_a_file_says_the_mesh_and_the_microbatches_of_a_step_too(tmp_path):
    layout = pzs.Layout.zero1(blocks=(), rematerialise=None)
    mesh = {"data": 8, "a b": 4}
    (tmp_path / "rules.toml").write_text(layout.to_toml(mesh, microbatches=2))
    found = pzs.Layout.read_toml(tmp_path / "rules.toml")
    assert (found.layout, found.mesh_shape, found.microbatches) == (layout, mesh, 2)
    assert list(found.mesh_shape) == list(mesh)
    assert pzs.Layout.from_toml(tmp_path / "rules.toml") == layout
    (tmp_path / "rules.toml").write_text(layout.to_toml())
    found = pzs.Layout.read_toml(tmp_path / "rules.toml")
    assert (found.mesh_shape, found.microbatches) == (None, None)


def test_the_example_reads_and_says_what_it_means(read):
    layout = read(EXAMPLE)
    assert layout.parameters == pzs.AxisRules(
        {
            "vocabulary": "model",
            "neurons": "model",
            "heads": "model",
            "embedding": "data",
            "projection": None,
        }
    )
    assert "batch" in layout.compute.logical_axes


def test_what_the_example_has_in_comments_reads(read):
    """Each example in a comment, which is further in than the words around it, by itself."""
    blocks = []
    for line in EXAMPLE.splitlines():
        if line.startswith("#   ") and "penzai-shard" not in line:
            blocks[-1].append(line[4:])
        elif not blocks or blocks[-1]:
            blocks.append([])
    blocks = ["\n".join(block) for block in blocks if block]
    assert len(blocks) >= 4
    for block in blocks:
        own = "" if block.startswith(("layout", "parameters")) else '\n[parameters]\nbatch = "data"'
        if "[optimizer]" not in block:
            block, _, names = block.partition("\n\n[names]")
            own += f"\n[names]{names}" if names else ""
        read(f"{block}\n{own}")


def test_a_file_with_parameters_alone_computes_by_what_does_not_take_the_axis_of_the_batch(read):
    layout = read('[parameters]\nbatch = "data"\nembedding = "data"\nneurons = "model"\n')
    assert layout.compute == pzs.AxisRules({"batch": "data", "neurons": "model"})
    assert layout.optimizer is None


MISTAKES = {
    "": "says neither layout nor parameters",
    "layout = 3": "cannot read '3' as names and literals|there is no",
    'layout = "two_dimensionl"': "Did you mean two_dimensional",
    'layout = "zero1(min_sise=3)"': "min_sise=3: this preset has no such option",
    "layout = \"__import__('os')\"": "there is no '__import__'",
    "parameters = [\"tensor_parallel('model', axis=('neurons',))\"]": (
        r"got an unexpected keyword argument 'axis'\. It takes \w+, axes\."
    ),
    'layout = "fully_sharded(open(1))"': "arguments are literals",
    "[parmeters]\na = 'b'": "parmeters: is not known. Did you mean parameters",
    "[parameters]\nembedding = 3": "embedding: is 3, and has to be a mesh axis",
    "[parameters]\nembedding = ['data', 'data']": "names a mesh axis twice",
    "[parameters]\nembedding = ''": "has to be a mesh axis",
    "parameters = 3": "parameters: is 3, and has to be a table",
    "parameters = [3]": "each has to be a pair",
    "parameters = [['a', 'b', 'c']]": "each has to be a pair",
    "parameters = 'fully_shard()'": "Did you mean fully_sharded",
    "parameters = 'data_parallel() - 1'": "rules are combined by",
    "parameters = 'data_parallel('": "cannot read",
    "[parameters]\na = 'b'\n[names]\nnuerons = 'b'": "Did you mean 'neurons'",
    "names = 3\n[parameters]\na = 'b'": "names: is 3, and has to be a table",
    "manual = 'yes'\n[parameters]\na = 'b'": "manual: is 'yes', and has to be true or false",
    "rematerialise = 'dotz'\n[parameters]\na = 'b'": "dotz",
    "mesh = 8\n[parameters]\na = 'b'": r"mesh: is 8, .* mesh = \{ data = 8, model = 4 \}",
    "[mesh]\n[parameters]\na = 'b'": "mesh: is {}, and has to say the size of each mesh axis",
    "mesh = {data = true}\n[parameters]\na = 'b'": "has to say the size of each mesh axis",
    "microbatches = 0\n[parameters]\na = 'b'": "microbatches: is 0, and has to be at least 1",
    "blocks = ['b']\n[parameters]\na = 'b'": r"blocks: is \['b'\], and a file can say \[\] alone",
    "[parameters]\na = = 'b'": r"is not TOML: .*line 2",
    "[parameters]\na = 'b'\na = 'c'": "is not TOML: Cannot overwrite a value",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_is_named_with_its_file(text, read):
    with pytest.raises(RuleTypeError, match=MISTAKES[text]) as caught:
        read(text)
    assert "rules.toml" in str(caught.value)


def test_all_mistakes_of_a_file_are_reported_at_once(read):
    with pytest.raises(RuleTypeError) as caught:
        read("wrong = 1\nmanual = 2\n[parameters]\na = 3\nb = 4\n")
    assert len(caught.value.problems) == 4


def test_a_file_that_is_not_there_is_said_to_be_none(tmp_path):
    with pytest.raises(RuleTypeError, match="No such file or directory"):
        pzs.Layout.from_toml(tmp_path / "absent.toml")
    with pytest.raises(
        RuleTypeError, match=r"path of its file is needed\. Write it to one: pathlib"
    ):
        pzs.Layout.read_toml(pzs.Layout.fully_sharded().to_toml())
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(RuleTypeError, match="not a text in UTF-8"):
        pzs.Layout.from_toml(tmp_path / "binary.toml")


def test_layers_and_names_that_are_no_texts_cannot_be_written():
    with pytest.raises(RuleTypeError, match="blocks: layers cannot be written"):
        pzs.Layout.fully_sharded(blocks="**/block").to_toml()
    with pytest.raises(RuleTypeError, match=r"logical axis \('a', 'b'\) is a tuple"):
        pzs.Layout(parameters={("a", "b"): "data"}, compute={}).to_toml()


@pytest.mark.parametrize(
    "rules",
    [
        pzs.data_parallel() | pzs.tensor_parallel() | pzs.fully_sharded(min_size=8),
        pzs.AxisRules({"a": None, "b": ("data", "model")}),
        pzs.AxisRules([("a", "data"), ("a", "model")]),
        pzs.AxisRules(),
    ],
)
def test_what_rules_print_is_read_as_the_rules(rules):
    assert read_rules_expression(repr(rules)) == rules
