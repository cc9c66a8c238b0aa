"""The page in a real browser: it renders, nothing complains, its numbers are those of the JSON, sliders move curves."""

import json
from pathlib import Path

import pytest

from browser import PATIENCE_MS, chromium
from penstock.report.write_report import write_report
from penstock.timeline import LANES
from report_samples import save_sample_runs

SECTIONS = ("methods", "curves", "breakdown", "timeline", "plan", "bytes", "whatif")
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 375, "height": 720}


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return write_report(save_sample_runs(tmp_path_factory.mktemp("runs")))


@pytest.fixture
def open_page(browser, report):
    """Open the report in a page that fails the test on any complaint or request."""
    contexts, complaints = [], []

    def opened(path: Path = report.page, viewport=DESKTOP, **settings):
        context = browser.new_context(viewport=viewport, **settings)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request", lambda asked: complaints.extend([asked.url] * (asked.url.split(":")[0] in ("http", "https")))
        )
        page.goto(path.resolve().as_uri())
        page.wait_for_selector("html[data-ready=true]", state="attached")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


def cells(page, table):
    return page.eval_on_selector_all(
        f"#{table} tbody tr", "rows => rows.map(row => [...row.children].map(cell => cell.textContent))"
    )


def move(page, name, steps):
    """Move a slider by keyboard, as somebody without a mouse does."""
    page.focus(f"#whatif-{name}")
    for _ in range(abs(steps)):
        page.keyboard.press("ArrowRight" if steps > 0 else "ArrowLeft")


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_section_is_drawn_and_fits_the_width(open_page, viewport, scheme):
    page = open_page(viewport=viewport, color_scheme=scheme)
    for section in SECTIONS:
        assert page.locator(f"#{section}").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    outside = "all => all.filter(one => one.getBoundingClientRect().right > innerWidth + 1).length"
    assert page.eval_on_selector_all("svg, canvas", outside) == 0


def test_dark_and_light_have_enough_contrast(open_page):
    for scheme in ("light", "dark"):
        page = open_page(color_scheme=scheme)
        for name in ("ink", "quiet", "warn", "compute", "encode", "wire", "decode", *(f"method-{n}" for n in range(7))):
            assert page.evaluate(CONTRAST, name) >= (4.5 if name in ("ink", "quiet", "warn") else 3.0), (scheme, name)


CONTRAST = """name => {
  const style = getComputedStyle(document.documentElement);
  const light = (colour) => [0, 2, 4]
    .map(at => parseInt(style.getPropertyValue(colour).trim().slice(1).slice(at, at + 2), 16) / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
  const [a, b] = [light(`--${name}`), light('--paper')].sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05);
}"""


def test_the_table_shows_the_numbers_of_the_json(open_page, report):
    page = open_page()
    rows = cells(page, "methods-table")
    assert len(rows) == len(report.document["methods"])
    for cell, method in zip(rows, report.document["methods"], strict=True):
        assert cell[0] == method["name"]
        assert float(cell[1]) == pytest.approx(method["metric"], rel=1e-3)
        assert cell[2].endswith(" ms")
        assert float(cell[2][:-3]) / 1e3 == pytest.approx(method["iteration_seconds"], rel=5e-3)
        assert float(cell[3][:-1]) == pytest.approx(method["speedup"], rel=5e-3)
        assert float(cell[6][:-2]) / 100 == pytest.approx(method["ratio"], rel=5e-3)
    assert "worse held-out bits per character than stock DDP" in rows[2][7]
    assert page.locator("#methods-table tr.loses").count() == 1


def test_the_data_in_the_page_is_the_file_beside_it(open_page, report):
    page = open_page()
    assert page.evaluate("REPORT") == json.loads(report.data.read_text())


def test_loss_curves_go_through_the_steps(open_page, report):
    page = open_page()
    for axis in ("step", "seconds"):
        paths = page.locator(f"#loss-by-{axis} path.raw")
        assert paths.count() == 3
        points = paths.first.get_attribute("d").count("L") + 1
        assert points == len(report.document["runs"][0]["steps"])
    assert page.locator("#metric-by-step circle").count() == 3 * 6


def test_axes_have_numbers_in_order(open_page):
    page = open_page()
    texts = "all => all.map(one => one.textContent)"
    for chart in ("loss-by-step", "loss-by-seconds", "metric-by-step", "metric-by-seconds", "whatif-chart"):
        for anchor, least in (("end", 3), ("middle", 3)):
            ticks = page.eval_on_selector_all(f"#{chart} text.tick[text-anchor={anchor}]", texts)
            numbers = [float(tick.split()[0]) for tick in ticks]
            assert len(numbers) >= least
            assert numbers == sorted(numbers)


def test_curves_of_different_tasks_do_not_share_axes(open_page, tmp_path):
    folder = save_sample_runs(tmp_path)
    file = folder / "onebit" / "run.json"
    run = json.loads(file.read_text()) | {"task": "another", "metric_name": "accuracy"}
    file.write_text(json.dumps(run))
    page = open_page(write_report(folder).page)
    assert page.locator("#loss-by-step path.raw").count() == 1
    assert page.text_content("#metric-title") == "accuracy (higher is better)"
    page.locator("#curves-choice select").select_option(index=1)
    assert page.locator("#loss-by-step path.raw").count() == 2
    assert page.text_content("#metric-title") == "held-out bits per character (lower is better)"


def test_bars_are_as_long_as_their_seconds(open_page, report):
    page = open_page()
    bars = page.eval_on_selector_all(
        "#breakdown-bars .measured",
        "all => all.map(bar => [...bar.querySelectorAll('rect')].map(r => r.width.baseVal.value))",
    )
    methods = report.document["methods"]
    scale = sum(bars[0][:2]) / methods[0]["iteration_seconds"]
    for widths, method in zip(bars, methods, strict=True):
        parts = method["measured"]
        assert widths[0] == pytest.approx(parts["compute_seconds"] * scale, rel=1e-3)
        assert widths[1] == pytest.approx(parts["exposed_seconds"] * scale, rel=1e-3)
        assert widths[2] == pytest.approx(parts["hidden_seconds"] * scale, rel=1e-3)


def test_the_timeline_zooms_by_wheel_and_moves_by_dragging(open_page):
    page = open_page()
    page.locator("#timeline-canvas").scroll_into_view_if_needed()
    box = page.locator("#timeline-canvas").bounding_box()
    middle = (box["x"] + box["width"] / 2, box["y"] + 60)
    page.mouse.move(*middle)
    page.mouse.wheel(0, -400)
    page.wait_for_function("TIMELINE.to - TIMELINE.from < TIMELINE.end * 0.9")
    before = page.evaluate("[TIMELINE.from, TIMELINE.to]")
    page.mouse.down()
    page.mouse.move(middle[0] - 100, middle[1])
    page.mouse.up()
    after = page.evaluate("[TIMELINE.from, TIMELINE.to]")
    assert after[0] > before[0]
    assert after[1] - after[0] == pytest.approx(before[1] - before[0])
    page.click("#zoom-all")
    assert page.evaluate("[TIMELINE.from, TIMELINE.to === TIMELINE.end]") == [0, True]


def test_the_timeline_obeys_the_keyboard(open_page):
    page = open_page()
    page.focus("#timeline-canvas")
    page.keyboard.press("+")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("TIMELINE.to - TIMELINE.from") == pytest.approx(0.7 * page.evaluate("TIMELINE.end"))
    page.keyboard.press("0")
    assert page.evaluate("TIMELINE.from") == 0


def test_predicted_lanes_stand_above_measured_ones(open_page):
    page = open_page()
    page.locator("#timeline-choice select").select_option(label="onebit")
    rows = page.evaluate("TIMELINE.rows.map(row => [row.how, row.rank, row.lane || ''])")
    order = [how for how, _, _ in rows]
    assert order == sorted(order, reverse=True)  # predicted, then measured
    measured = {(rank, lane) for how, rank, lane in rows if how == "measured" and lane}
    assert measured == {(rank, lane) for rank in range(4) for lane in LANES if lane not in ("push", "pull")}


def test_pointing_at_a_bar_says_what_it_is(open_page):
    page = open_page()
    page.locator("#timeline-choice select").select_option(label="exact plan")
    page.locator("#timeline-canvas").scroll_into_view_if_needed()
    box = page.locator("#timeline-canvas").bounding_box()
    page.mouse.move(box["x"] + 125, box["y"] + 22 + 21 + 9)
    assert (
        page.locator("#timeline-status")
        .text_content()
        .startswith("predicted, rank 0, compute: forward, 0 s to 3.00 ms")
    )


def test_buckets_and_tensors_are_all_there(open_page, report):
    page = open_page()
    plan = report.document["plans"][0]
    assert page.locator("#bucket-strip rect.tensor").count() == len(plan["tensors"])
    assert page.locator("#bucket-strip rect.bucket").count() == len(plan["buckets"])
    assert len(cells(page, "bucket-table")) == len(plan["buckets"])
    assert page.locator("#tensor-bars .bar-row").count() == len(plan["tensors"])
    page.locator("#plan-choice select").select_option(label="onebit")
    assert page.locator("#tensor-bars rect.encoded").count() == len(plan["tensors"])


@pytest.mark.parametrize("name", ["workers", "rate", "latency"])
def test_a_slider_moves_what_it_should(open_page, name):
    page = open_page()
    seen = "#whatif-chart path, #whatif-chart line.marker"
    before = page.eval_on_selector_all(seen, "all => all.map(e => e.getAttribute('d') || e.getAttribute('x1'))")
    table = cells(page, "whatif-table")
    assert "(as measured)" in page.text_content(f"#whatif-{name}-value")
    move(page, name, 3)
    after = page.eval_on_selector_all(seen, "all => all.map(e => e.getAttribute('d') || e.getAttribute('x1'))")
    assert before != after
    assert cells(page, "whatif-table") != table
    assert page.get_attribute(f"#whatif-{name}", "aria-valuetext") == page.text_content(f"#whatif-{name}-value")
    move(page, name, -3)
    assert cells(page, "whatif-table") == table


def test_hostile_names_stay_text(open_page, tmp_path):
    folder = save_sample_runs(tmp_path)
    file = folder / "stock-ddp" / "run.json"
    run = json.loads(file.read_text())
    run["name"] = "</script><img src=x onerror=console.log(1)>"
    file.write_text(json.dumps(run))
    page = open_page(write_report(folder).page)
    assert page.locator("img").count() == 0
    assert cells(page, "methods-table")[0][0] == run["name"]


def test_a_run_of_which_little_is_known_still_makes_a_page(open_page, tmp_path):
    folder = save_sample_runs(tmp_path)
    absent = ("plan", "trace", "network", "iteration_seconds", "compute_seconds", "bytes_per_iteration")
    for file in folder.rglob("run.json"):
        run = json.loads(file.read_text())
        run |= dict.fromkeys(absent) | {"steps": [], "evaluations": [], "timeline": None}
        file.write_text(json.dumps(run))
    page = open_page(write_report(folder).page)
    assert page.locator("#methods").is_visible()
    for section in ("timeline", "plan", "bytes", "whatif", "breakdown"):
        assert not page.locator(f"#{section}").is_visible()


def test_on_a_phone_a_wide_table_says_that_there_is_more_until_it_is_scrolled_to_its_end(open_page):
    page = open_page(viewport={"width": 390, "height": 844})
    has_hint = "element => element.hasAttribute('data-more')"
    assert page.eval_on_selector("#methods-table", has_hint)
    page.eval_on_selector("#methods-table", "element => { element.scrollLeft = element.scrollWidth }")
    page.wait_for_selector("#methods-table:not([data-more])", state="attached")
    assert not open_page().eval_on_selector("#buckets-table, #methods-table", has_hint)


def test_loss_against_seconds_comes_first(open_page):
    order = open_page().eval_on_selector_all("main section, .chart", "found => found.map(each => each.id)")
    assert order[:2] == ["curves", "loss-by-seconds"]
