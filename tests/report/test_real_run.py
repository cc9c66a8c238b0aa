"""A real run of `penstock train`, as the report and a browser show it."""

import json
import subprocess
import sys

import pytest

from browser import PATIENCE_MS, chromium

pytest.importorskip("torch")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    command = [sys.executable, "-m", "penstock", "train", "--task", "chars", "--workers", "2", "--steps", "10"]
    for method in (["--stock"], ["--codec", "onebit"]):
        more = [*method, "--batch", "2", "--out", str(out)]
        result = subprocess.run([*command, *more], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
    result = subprocess.run([sys.executable, "-m", "penstock", "report", str(out)], capture_output=True, check=False)
    assert result.returncode == 0, result.stderr
    return out


def test_the_record_of_a_real_run_fills_every_part_of_the_report(folder):
    report = json.loads((folder / "report.json").read_text())
    assert len(report["methods"]) == 2
    assert all(method["speedup"] and method["measured"] and method["metric"] for method in report["methods"])
    assert report["plans"][0]["tensors"]
    assert "onebit" in report["what_if"]["models"][0]["network"]["codecs"]
    (compressed,) = (run for run in report["runs"] if run["codec"])
    lanes = {span["lane"] for span in compressed["timeline"]["measured"]}
    assert lanes == {"compute", "network", "computation", "communication"}
    drawn = {
        how: [span for span in spans if span["lane"] != "compute"] for how, spans in compressed["timeline"].items()
    }
    assert {span["rank"] for span in drawn["measured"]} == {0, 1}
    buckets = {how: {span["name"].split(": ")[0] for span in spans} for how, spans in drawn.items()}
    assert buckets["predicted"] == buckets["measured"] == {each["message"] for each in report["plans"][0]["buckets"]}
    assert buckets["measured"] <= set(report["bucket_colours"])
    actions = {how: {span["name"].split(": ")[-1].split()[0] for span in spans} for how, spans in drawn.items()}
    assert {"encode", "send", "recv"} <= actions["predicted"] & actions["measured"]


def test_a_browser_draws_all_of_it_without_complaint(folder):
    with chromium() as browser:
        page = browser.new_page()
        page.set_default_timeout(PATIENCE_MS)
        complaints = []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto((folder / "report.html").as_uri())
        for section in ("methods", "curves", "breakdown", "timeline", "plan", "bytes", "whatif"):
            assert page.locator(f"#{section}").is_visible()
        page.locator("#whatif-codec").select_option(label="ring+onebit")
        assert page.locator("#whatif-chart path.curve").count() == 6
        assert complaints == []
