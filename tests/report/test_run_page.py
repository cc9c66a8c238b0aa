"""The page as text; what a browser makes of it stands in test_run_page_browser.py."""

import json
import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest

from penstock.report.found_runs import FoundRun
from penstock.report.run_report import report_document
from penstock.report.write_report import SCRIPTS, embedded_json, make_page
from report_samples import sample_runs


def page_of(document):
    return make_page(document)


@pytest.fixture(scope="module")
def document():
    return report_document([FoundRun(run.name, "run.json", run) for run in sample_runs()])


class Elements(HTMLParser):
    """Collects elements and the text of the data script."""

    def __init__(self):
        super().__init__()
        self.links, self.ids, self.data, self.inside = [], [], "", False

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.links += [found[name] for name in ("href", "src") if name in found]
        self.ids += [found["id"]] if "id" in found else []
        self.inside = found.get("id") == "report-data"

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        self.data += data if self.inside else ""


def test_the_page_holds_the_data_and_fetches_nothing(document):
    elements = Elements()
    elements.feed(page_of(document))
    assert json.loads(elements.data) == document
    assert all(link.startswith("data:") for link in elements.links)
    assert not re.search(r"@import|url\((?!#)|fetch\(|XMLHttpRequest", page_of(document))


def test_ids_are_unique_and_every_one_the_scripts_ask_for_is_there(document):
    elements = Elements()
    elements.feed(page_of(document))
    assert len(elements.ids) == len(set(elements.ids))
    asked = set(re.findall(r'byId\("([^"]+)"\)', page_of(document)))
    assert asked <= set(elements.ids)


@pytest.mark.parametrize("name", ["</script><script>alert(1)</script>", "<!--", "@STYLE@ @DATA@", "a & b"])
def test_a_name_in_a_record_cannot_become_markup(document, name):
    hostile = {**document, "title": name, "runs": [{**document["runs"][0], "name": name}]}
    elements = Elements()
    elements.feed(page_of(hostile))
    assert json.loads(elements.data)["runs"][0]["name"] == name
    assert page_of(hostile).count("<script") == 2


def test_embedded_json_has_no_angle_bracket():
    assert "<" not in embedded_json({"name": "</script>"})
    assert json.loads(embedded_json({"name": "</script>"})) == {"name": "</script>"}


def test_every_script_in_the_folder_is_part_of_the_page():
    folder = Path(str(files("penstock.report").joinpath("html")))
    assert sorted(SCRIPTS) == sorted(path.name for path in folder.glob("*.js"))
