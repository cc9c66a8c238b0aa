import json

from penstock.bench.record import make_record, save_record


def test_a_record_says_where_its_figures_come_from(tmp_path):
    save_record(make_record("toy", [{"seconds": 1.0}], floor_seconds=0.5), tmp_path / "new" / "toy.json")
    record = json.loads((tmp_path / "new" / "toy.json").read_text())
    assert record["format"] == "penstock-bench/1"
    assert record["rows"] == [{"seconds": 1.0}]
    assert record["floor_seconds"] == 0.5
    assert record["machine"]["cores"] >= 1
    assert record["versions"]["numpy"]
    assert {"benchmark", "date", "command", "commit"} <= set(record)
