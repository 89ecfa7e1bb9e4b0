"""A page says what its reports say, is one file, and can be read by everybody."""

import functools
import html
import json
import re
import shutil
import subprocess

import jax
import optax
import pytest
from penzai import pz

import penzai_shard as pzs
from penzai_shard.errors import MeshError, RuleTypeError, ShardingError
from penzai_shard.views import page
from tests.layouts.transformers import build_llama, loss_fn

MESH = pzs.make_mesh({"data": 4, "model": 2}, abstract=True)
LAYOUT = pzs.Layout.two_dimensional(min_size=0)
HOSTILE = "<script>alert(1)</script><img src=x>\x1b[31m"
UNWRITABLE = ("report.html/page.html", "/proc/page.html", "a" * 300)
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@functools.cache
def trained():
    """A train state of shapes, and its compiled step."""
    state, step = LAYOUT.build(
        functools.partial(build_llama, blocks=2),
        mesh=MESH,
        loss_fn=loss_fn,
        optimizer=optax.adam(1e-3),
        rng=jax.random.key(0),
    )
    sharding = jax.NamedSharding(MESH, jax.P("data"))
    tokens = jax.ShapeDtypeStruct((8, 9), "int32", sharding=sharding)
    return state, pzs.compile_step(step, state, tokens=tokens)


@pytest.fixture(scope="module")
def trained_page(tmp_path_factory):
    state, step = trained()
    path = tmp_path_factory.mktemp("pages") / "new" / "page.html"
    return page.report(state, MESH, LAYOUT, step, path=path)


def write_wrong(path, rules):
    return page.report({HOSTILE: pz.nx.ones({"odd": 6, HOSTILE: 4})}, MESH, rules, path=path)


def words(path):
    """The text of a page in one line."""
    text = re.sub("<style>.*?</style>|<wbr>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return " ".join(html.unescape(re.sub("<[^>]*>", " ", text)).split())


def test_page_is_one_file_that_says_what_the_reports_say(trained_page, tmp_path):
    state, step = trained()
    assert [*trained_page.parent.iterdir()] == [trained_page]
    text = trained_page.read_text(encoding="utf-8")
    assert not re.search(r"<script|<img|<link|https?:|url\(|\bsrc=|@import", text)
    assert {*re.findall('href="(.)', text)} == {"#"}
    assert {*re.findall('href="#([^"]*)"', text)} <= {*re.findall(' id="([^"]*)"', text)}
    assert len(text) < 500_000
    said = words(trained_page)
    for one in (LAYOUT.plan(state, MESH), step.memory, step.collectives):
        report = one.report()
        assert all(" ".join(line.split()) in said for line in (report.verdict, *report.notes))
    # From where layouts come, and what each rule costs.
    assert "constraint layer transformer/block_*/attention" in said.partition("Findings nothing")[2]
    assert re.search(r"'heads' -> 'model' [\d.]+ KiB [\d.]+ KiB", said)
    again = page.report(state, MESH, LAYOUT, step, path=tmp_path / "again.html")
    assert again.read_bytes() == trained_page.read_bytes()


def test_largest_layers_are_named_first(trained_page):
    text = trained_page.read_text(encoding="utf-8")
    traffic = text.partition("Most traffic")[2].partition("</header>")[0]
    sent = trained()[1].collectives.by_layer()
    found = re.findall("<p><b>([^<]*)</b><span>([^<]*)</span></p>", traffic)
    assert len(found) == 3
    for layer, size in found:
        pattern = re.escape(layer).replace(re.escape("{0-1}"), "[01]")
        total = sum(one.wire_bytes for name, one in sent.items() if re.fullmatch(pattern, name))
        assert size == f"{total / 1024:.1f} KiB"
    assert "transformer/block_{0-1}" in found[0][0]


def test_rules_that_do_not_fit_are_on_the_page_and_names_are_written_out(tmp_path):
    for axis, said in {"dta": "'dta' names 'dta'", "data": "odd' (6) does not divide"}.items():
        path = write_wrong(tmp_path / "page.html", {"odd": axis})
        assert "There is no valid layout. There is 1 finding." in words(path)
        # In the plan's section, and in that of the findings.
        assert words(path).count(said) == 2
    assert words(path).count("no step is given") == 4
    assert not re.search("<(script|img)|\x1b", path.read_text(encoding="utf-8"))
    assert HOSTILE.replace("\x1b", "\\x1b") in words(path)


def test_named_inputs_of_a_step_are_the_batch_if_the_model_takes_them(tmp_path):
    layer = pz.nn.Linear.from_config("up", jax.random.key(0), {"embedding": 8}, {"neurons": 16})
    rules = {"neurons": "model"}
    model = pzs.make_plan(layer, MESH, rules).restore_structs()
    for axis, said in {"embedding": "whole batch", "other": "no batch was given"}.items():
        batch = {"x": pz.nx.ones({"batch": 8, axis: 8})}
        inputs = {"body": model, **pzs.make_plan(batch, MESH, {}).restore_structs()}
        path = tmp_path / "page.html"
        page.report(model, MESH, rules, lambda body, x: x, path=path, **inputs)
        assert said in words(path)
        assert "uncallable" not in words(path)


def test_step_that_cannot_be_compiled_is_said(tmp_path):
    sharding = jax.NamedSharding(MESH, jax.P())
    x = jax.ShapeDtypeStruct((8,), "float32", sharding=sharding)
    path = tmp_path / "page.html"
    page.report({"x": x}, MESH, {}, jax.ffi.ffi_call("nowhere", x), x, path=path)
    assert "The step cannot be compiled. Each device holds 32 B of 32 B." in words(path)


def test_mistake_is_refused_and_the_page_before_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = tmp_path / "report.html"
    before.write_text("The page before.")
    write = functools.partial(page.report, {"w": pz.nx.ones({"a": 8})})
    other = pzs.make_mesh({"data": 8}, abstract=True)
    for error, call in (
        (RuleTypeError, lambda: write({"data": 4}, {})),
        (RuleTypeError, lambda: write(MESH, {}, tokens=1)),
        (RuleTypeError, lambda: write(MESH, {}, "no step")),
        (RuleTypeError, lambda: write(MESH, {}, path=".")),
        (MeshError, lambda: write(other, {}, trained()[1])),
        (MeshError, lambda: write(MESH, {}, lambda x: x, 1.0)),
    ):
        with pytest.raises(ShardingError) as caught:
            call()
        assert type(caught.value) is error
        assert all(problem.fix for problem in caught.value.problems)
    for path in UNWRITABLE:
        with pytest.raises(OSError, match="Errno"):
            write(MESH, {}, path=path)
    # What a step raises is its own.
    with pytest.raises(ZeroDivisionError):
        write(MESH, {}, lambda x: 1 // 0, 1.0)
    assert [*tmp_path.iterdir()] == [before]
    assert before.read_text() == "The page before."


# For each frame its scroll width, its paper, and texts with a contrast below 4.5 as WCAG 2 has it.
MEASURE = """
const over = ([r, g, b, a = 1], under) => [r, g, b].map((c, i) => c * a + under[i] * (1 - a));
const parse = text => (text.match(/[\\d.]+/g) || []).map(Number);
const light = rgb => rgb.map(c => c / 255)
  .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0) + 0.05;
const measure = ({contentDocument: page}) => {
  const style = element => page.defaultView.getComputedStyle(element);
  const behind = element => element === null ? [255, 255, 255]
    : over(parse(style(element).backgroundColor), behind(element.parentElement));
  page.querySelectorAll('details').forEach(one => one.open = true);
  const weak = [...page.querySelectorAll('body *')].filter(element => {
    const paper = behind(element), ink = over(parse(style(element).color), paper);
    const [low, high] = [light(paper), light(ink)].sort((a, b) => a - b);
    return element.innerText && high / low < 4.5;
  }).map(element => element.innerText);
  return [page.documentElement.scrollWidth, style(page.body).backgroundColor, weak];
};
onload = () => document.body.textContent =
  JSON.stringify([...document.querySelectorAll('iframe')].map(measure));"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_page_can_be_read_on_narrow_and_wide_screens_by_day_and_by_night(trained_page, tmp_path):
    frames = ""
    for path in (trained_page, write_wrong(tmp_path / "wrong.html", {"odd": "data"})):
        content = html.escape(path.read_text(encoding="utf-8"))
        for scheme in ("light", "dark"):
            for width in (400, 1400):
                frame = f'style="border: 0; color-scheme: {scheme}" width={width} height=900'
                frames += f'<iframe {frame} srcdoc="{content}"></iframe>'
    frames_page = tmp_path / "frames.html"
    frames_page.write_text(f"<!doctype html><script>{MEASURE}</script><body>{frames}", "utf-8")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--hide-scrollbars", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", frames_page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    found = json.loads(html.unescape(re.search("<body>(.*)</body>", done.stdout)[1]))
    assert [width for width, *_ in found] == [400, 1400] * 4
    assert [weak for *_, weak in found] == [[]] * 8
    assert len({paper for _, paper, _ in found}) == 2
