import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from every_call import dense_calls, sparse_calls
from penstock.cli.main import app
from penstock.errors import PlanError, StrategyError
from penstock.program.document import load_program, save_program
from penstock.strategies import build


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["verify", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_json_has_the_numbers_of_the_proof():
    found = json.loads(run("ring", "--workers", "7", "--numel", "70", "--json"))
    assert found["strategy"] == "ring"
    assert found["workers"] == 7
    assert found["proved"] is True
    assert found["findings"] == []
    assert (found["steps"], found["messages"]) == (12, 84)
    assert found["bytes_per_link"] == found["bytes_per_nic"] == found["least_bytes_per_nic"] == 480
    assert (found["least_steps"], found["step_ratio"], found["byte_ratio"]) == (3, 4.0, 1.0)
    assert found["links"][0] == {"source": 0, "target": 1, "nbytes": 480}


def test_three_workers_show_wangs_nine_steps_by_default():
    assert json.loads(run("linear-pipeline", "--workers", "3", "--json"))["steps"] == 9


def test_the_summary_and_a_drawing_are_printed():
    output = run("ring", "--workers", "7")
    assert "all_reduce by ring, 7 ranks, 65536 elements: proved" in output
    assert "   1  a > 1   b > 2   c > 3   d > 4   e > 5   f > 6   g > 0" in output
    assert "steps" in output
    assert "4x" in output


def test_the_list_names_every_strategy():
    output = run("--list")
    assert all(name in output for _, name in dense_calls())
    found = json.loads(run("--list", "--json"))
    assert {(operation, name) for operation, known in found.items() for name in known} == {
        *dense_calls(),
        *sparse_calls(),
    }


def test_every_choice_reaches_the_strategy():
    rooted = json.loads(
        run(
            "linear-pipeline",
            "--operation",
            "broadcast",
            "--root",
            "2",
            "--block-numel",
            "10",
            "--numel",
            "40",
            "--json",
        )
    )
    assert (rooted["root"], rooted["steps"]) == (2, 3 + 4 - 1)
    served = json.loads(run("parameter-server", "--partitions", "1", "--workers", "3", "--numel", "8", "--json"))
    assert served["bytes_per_nic"] == 2 * 8 * 4
    dedicated = json.loads(run("parameter-server", "--servers", "1", "--itemsize", "2", "--numel", "8", "--json"))
    assert {link["target"] for link in dedicated["links"] if link["source"] != 3} == {3}
    assert dedicated["bytes_per_link"] == 8 * 2
    nodes = json.loads(run("hierarchical", "--workers", "8", "--ranks-per-node", "4", "--outer", "recursive-doubling",
                           "--inner", "linear-pipeline", "--numel", "8", "--json"))  # fmt: skip
    assert {(link["source"], link["target"]) for link in nodes["links"]} >= {(0, 4), (4, 0)}
    uneven = json.loads(run("hierarchical", "--workers", "5", "--nodes", "0,2,3/1,4", "--numel", "8", "--json"))
    between = {(0, 1), (1, 0)}
    within = {(0, 2), (2, 0), (0, 3), (3, 0), (2, 3), (3, 2), (1, 4), (4, 1)}
    links = {(link["source"], link["target"]) for link in uneven["links"]}
    assert uneven["proved"]
    assert between < links <= between | within


def test_the_instructions_are_printed_on_request():
    assert "    0 send   data[0:8] -> 1" in run(
        "spanning-tree", "--operation", "broadcast", "--workers", "2", "--numel", "8", "--program"
    )


def test_a_picture_and_a_program_file_are_written_and_the_file_can_be_verified(tmp_path):
    run(
        "ring",
        "--workers",
        "3",
        "--numel",
        "9",
        "--picture",
        str(tmp_path / "p.svg"),
        "--out",
        str(tmp_path / "p.json"),
    )
    assert (tmp_path / "p.svg").exists()
    assert load_program(tmp_path / "p.json") == build("all_reduce", "ring", 3, 9)
    assert json.loads(run(str(tmp_path / "p.json"), "--json"))["steps"] == 4


def test_a_broken_program_exits_with_one_and_says_why(tmp_path):
    program = build("all_reduce", "ring", 3, 9)
    save_program(replace(program, ranks=(program.ranks[0][:-1], *program.ranks[1:])), tmp_path / "broken.json")
    shown = CliRunner().invoke(app, ["verify", str(tmp_path / "broken.json")])
    assert shown.exit_code == 1
    assert "NOT PROVED" in shown.output
    assert "unmatched recv: rank 1, instruction" in shown.output
    found = CliRunner().invoke(app, ["verify", str(tmp_path / "broken.json"), "--json"])
    assert found.exit_code == 1
    assert json.loads(found.output)["proved"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rung"], "no strategy 'rung' for all_reduce; known: ring, linear_pipeline"),
        (["ring", "--operation", "all-to-all"], "no operation 'all-to-all'; known: all_reduce"),
        ([], "no strategy named; say which, as in `penstock verify ring`, or ask with --list"),
        (["spanning-tree", "--operation", "reduce", "--root", "9"], "spanning_tree: root 9; wanted 0"),
        (["hierarchical", "--nodes", "0,1/two"], "--nodes 0,1/two: wanted ranks, and a / between nodes, as in 0,2,3/1"),
        (["hierarchical", "--nodes", "0,1/1,2,3"], "wanted each of the ranks 0 to 3 once, and no empty node"),
    ],
)
def test_bad_input_is_one_clear_line(arguments, message):
    with pytest.raises(StrategyError, match=message):
        CliRunner().invoke(app, ["verify", *arguments], catch_exceptions=False)


def test_a_codec_shows_the_compressed_program_and_its_bytes():
    output = run("ring", "--workers", "3", "--numel", "30000", "--codec", "onebit", "--program")
    assert "all_reduce by ring, 3 ranks, 30000 elements: proved" in output
    assert "encode out[0:10000] = data[0:10000]" in output
    assert "decode data[0:10000] = final[0:10000]" in output
    found = json.loads(run("ring", "--workers", "3", "--numel", "30000", "--codec", "onebit", "--json"))
    payload = 48 + 1 + 4 + 4 + 10000 // 8  # header, tail, two means, bits
    assert (found["proved"], found["steps"], found["bytes_per_link"]) == (True, 4, 4 * payload)


def test_a_plan_is_proved_as_one_iteration_in_lanes(tmp_path):
    path = str(tmp_path / "plan.json")
    planned = ["plan", "resnet50", "--network", "gtop-k-1gbe", "--workers", "4", "--all-reduce", "ring", "--out", path]
    assert CliRunner().invoke(app, planned, catch_exceptions=False).exit_code == 0
    found = json.loads(run("resnet50", "--plan", path, "--json"))
    assert (found["proved"], found["workers"], found["lanes"]) == (True, 4, 4)
    assert found["messages"] == len(json.loads((tmp_path / "plan.json").read_text())["buckets"])
    assert "whenever gradients become ready: proved" in run("--plan", path)
    with pytest.raises(PlanError, match="does not have; plan anew"):
        run("vgg16", "--plan", path)
