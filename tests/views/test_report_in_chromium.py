"""Pages as a browser shows them: nothing is loaded, all unfolds, on wide and narrow screens."""

import functools
import itertools

import jax
import pytest
from penzai import pz

from penzai_shard import Layout, abstract_model, make_mesh, report
from penzai_shard.pretrained.published_models import find_published
from tests.small_train_steps import EVERYTHING, build_mlp, report_of
from tests.views.browsers import MILLISECONDS, chromium

WIDE = {"width": 1280, "height": 900}
NARROW = {"width": 480, "height": 800}
SCREENS = {"wide": WIDE, "narrow": NARROW}
LARGEST = {"step": 400_000, "large": 2_000_000, "wrong": 100_000}
HOSTILE = "<img src=x onerror=alert(1)>\"'&</title><script>alert(2)</script>\x1b[31m"


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A train step of 12 blocks, a plan of 96 blocks without one, and rules that do not fit."""
    folder = tmp_path_factory.mktemp("pages")
    build = functools.partial(build_mlp, blocks=12)
    program = report_of(EVERYTHING, build=build).program
    mesh = program.step.mesh
    large = find_published("llama-3-70b").with_changes({"num_hidden_layers": 96}).model()
    large_mesh = make_mesh({"data": 16, "model": 16}, abstract=True)
    layout = Layout.two_dimensional(vocabulary="model", names={"heads": None})
    named = jax.ShapeDtypeStruct((6, 4), "float32")
    hostile = {HOSTILE: pz.nx.NamedArray({"odd": 6, HOSTILE: 4}, named)}
    return {
        "step": report(abstract_model(build), mesh, EVERYTHING, program, path=folder / "step.html"),
        "large": report(large, large_mesh, layout, path=folder / "large.html"),
        "wrong": report(hostile, mesh, {"odd": "data"}, path=folder / "wrong.html"),
    }


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture
def opened(browser, pages):
    """Opens a page, and keeps what it says and asks for."""
    contexts = []

    def open_page(name, screen=WIDE, color_scheme="light"):
        context = browser.new_context(
            viewport=screen, color_scheme=color_scheme, reduced_motion="reduce"
        )
        context.set_default_timeout(MILLISECONDS)
        contexts.append(context)
        page = context.new_page()
        page.heard = []
        page.on("console", lambda message: page.heard.append(message.text))
        page.on("pageerror", lambda error: page.heard.append(str(error)))
        page.on("dialog", lambda dialog: page.heard.append(dialog.message))
        page.on("request", lambda request: page.heard.append(request.url))
        page.goto(pages[name].as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()


@pytest.mark.parametrize("name", LARGEST)
def test_a_page_asks_for_itself_alone_and_says_nothing(opened, pages, name):
    page = opened(name)
    assert page.heard == [pages[name].as_uri()]
    assert pages[name].stat().st_size < LARGEST[name]


def test_names_are_shown_as_they_are_and_never_run(opened):
    page = opened("wrong")
    shown = HOSTILE.replace("\x1b", "\\x1b")
    assert shown in page.locator("#plan").inner_text()
    assert page.locator("img, script").count() == 0


@pytest.mark.parametrize("name", ["step", "large"])
@pytest.mark.parametrize("screen", SCREENS)
def test_what_costs_most_is_seen_without_scrolling_and_nothing_is_wider_than_the_screen(
    opened, name, screen
):
    page = opened(name, SCREENS[screen])
    rankings = page.locator(".rankings > section")
    assert rankings.locator("h2").all_inner_texts() == (
        ["Most memory", "Most traffic"] if name == "step" else ["Most memory"]
    )
    for ranking in rankings.all():
        box = ranking.locator("li").first.bounding_box()
        assert box["y"] + box["height"] <= SCREENS[screen]["height"]
    page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    assert page.evaluate("document.documentElement.scrollWidth") == SCREENS[screen]["width"]


def test_every_line_that_unfolds_does_so_by_click_and_by_key(opened):
    page = opened("step")
    assert page.locator("main > section").count() == 5
    ways = itertools.cycle(["Enter", "click", "Space"])
    unfolded = 0
    while (line := page.query_selector("details:not([open]) > summary")) is not None:
        below = line.query_selector("xpath=following-sibling::*")
        assert not below.is_visible()
        if (way := next(ways)) == "click":
            line.click()
        else:
            line.focus()
            page.keyboard.press(way)
        assert below.is_visible()
        unfolded += 1
    assert unfolded > 10


def test_a_link_to_what_costs_most_opens_its_place(opened):
    page = opened("step")
    page.evaluate("for (const one of document.querySelectorAll('details')) one.open = false")
    for link in page.locator(".rankings li a").all():
        link.click()
        target = page.locator(f"[id='{link.get_attribute('href')[1:]}']")
        assert target.is_visible()
        assert target.locator("xpath=ancestor-or-self::section").count() == 1


# For each text its contrast with what is behind it, as WCAG 2 has it; of a gradient the worst.
CONTRASTS = """() => {
  const parse = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const over = (top, bottom) => {
    const [r, g, b, a = 1] = top;
    return [r, g, b].map((c, i) => c * a + bottom[i] * (1 - a));
  };
  const luminance = rgb => rgb.map(c => c / 255)
    .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const contrast = (a, b) => {
    const [high, low] = [luminance(a), luminance(b)].sort((x, y) => y - x);
    return (high + 0.05) / (low + 0.05);
  };
  const behind = element => {
    const around = element.parentElement ? behind(element.parentElement) : [[255, 255, 255]];
    const style = getComputedStyle(element);
    let found = around.map(color => over(parse(style.backgroundColor), color));
    const stops = style.backgroundImage.match(/rgba?\\([^)]*\\)/g) || [];
    return stops.length ? stops.flatMap(s => found.map(c => over(parse(s), c))) : found;
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const rows = [];
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !element.checkVisibility()) continue;
    const ink = parse(getComputedStyle(element).color);
    const worst = Math.min(...behind(element).map(color => contrast(over(ink, color), color)));
    rows.push([worst, walker.currentNode.textContent.trim(), element.className]);
  }
  return rows;
}"""


@pytest.mark.parametrize("color_scheme", ["light", "dark"])
def test_every_text_has_the_contrast_that_the_guidelines_ask_for(opened, color_scheme):
    for name in ("step", "wrong"):
        page = opened(name, WIDE, color_scheme)
        page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
        rows = page.evaluate(CONTRASTS)
        assert len(rows) > 40
        assert [row for row in rows if row[0] < 4.5] == []
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (max(map(int, paper[4:-1].split(","))) < 64) == (color_scheme == "dark")


def test_paper_has_all_of_it(opened):
    page = opened("step")
    hidden = "document.querySelectorAll('details:not([open])').length"
    page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    whole = page.locator("main").bounding_box()["height"]
    page.evaluate("for (const one of document.querySelectorAll('details')) one.open = false")
    page.emulate_media(media="print")
    assert page.evaluate(hidden) > 10
    assert page.locator("main").bounding_box()["height"] > 0.5 * whole


def test_a_screen_reader_finds_its_way(opened):
    page = opened("step")
    assert page.locator("html").get_attribute("lang") == "en"
    assert page.locator("h1").count() == 1
    assert page.title() == "Sequential on mesh (data=4, model=2)"
    for link in page.locator("nav a").all():
        section = page.locator(link.get_attribute("href"))
        assert section.locator("h2").first.inner_text() == link.inner_text()
    # Bars say nothing that is not said in words.
    assert page.locator(".bar:not([aria-hidden])").count() == 0
    assert all(text.strip() for text in page.locator("summary").all_text_contents())
