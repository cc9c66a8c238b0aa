"""What is measured, in which order, until when; and what was measured before is found again, or measured again."""

import torch_measuring as training
from penstock.network import LinearCost, load_network
from spawn import spawn

SLOW, FAST = LinearCost(1e-3, 1e-8), LinearCost(1e-3, 1e-10)


def test_a_measurement_is_kept_and_used_again_without_measuring(tmp_path):
    for first, again in spawn(2, training.survey, str(tmp_path), [{}, {}]):
        assert first[2] == ["links", "native", "close"]
        assert again[2] == ["check", "close"]
        assert again[:2] == first[:2]
        assert first[1] == ["native"]
    (path,) = tmp_path.iterdir()
    assert load_network(path).all_reduce == {"native": SLOW}


def test_without_a_folder_nothing_is_kept():
    for first, again in spawn(2, training.survey, None, [{}, {}]):
        assert first[2] == again[2] == ["links", "native", "close"]


def test_links_that_are_not_what_they_were_are_measured_again(tmp_path):
    changed = {"holds": False, "lines": {"native": FAST}}
    for _, again, after in spawn(2, training.survey, str(tmp_path), [{}, changed, {}]):
        assert again[2] == ["check", "links", "native", "close"]
        assert after[0].all_reduce == {"native": FAST}
    said = spawn(2, training.survey, str(tmp_path), [{"holds": False}])[0][0][4]
    assert "messages no longer take what they took then: measuring again" in said


def test_a_damaged_file_is_one_warning_and_measured_again(tmp_path):
    damaged = [{"file": text} for text in ("", "{", '{"format": "penstock-network/1"}', "\x00\x01")]
    first, second = spawn(2, training.survey, str(tmp_path), [{}, *damaged, {}])
    for found in first[1:-1]:
        assert found[2] == ["links", "native", "close"]
        (warning,) = found[3]
        assert warning.startswith(f"the kept measurement {tmp_path}")
        assert warning.endswith("measuring again")
    assert first[-1][2] == ["check", "close"]  # the file is whole again
    assert all(found[3] == [] for found in second)  # the other rank says nothing


def test_a_measurement_of_other_workers_is_not_used(tmp_path):
    spawn(2, training.survey, str(tmp_path), [{}])
    (path,) = tmp_path.iterdir()
    text = path.read_text().replace('"workers": 2', '"workers": 3')
    (found,), _ = spawn(2, training.survey, str(tmp_path), [{"file": text}])
    assert found[2] == ["links", "native", "close"]
    assert "it is of 3 workers, wanted 2" in found[3][0]


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    (first,), (second,) = spawn(2, training.survey, str(blocked / "measurements"), [{}])
    assert first[0].all_reduce == second[0].all_reduce == {"native": SLOW}
    (warning,) = first[3]
    assert "the next job measures again" in warning
    assert second[3] == []


PACKED = {"native": SLOW, "ring+onebit": LinearCost(2e-3, 1e-10), "ring+bf16": LinearCost(2e-3, 5e-9)}


def test_a_network_that_was_given_is_not_measured_but_for_codecs(tmp_path):
    given = {"given": load_given(), "routes": ("ring+onebit",), "lines": PACKED}
    for (found,) in spawn(2, training.survey, str(tmp_path), [given]):
        assert found[2] == ["ring+onebit", "close"]
        assert found[1] == ["ring+onebit"]
    assert list(tmp_path.iterdir()) == []


def load_given():
    from penstock.network import Network

    return Network(2, 1e-4, 1e-8, 1e-10)


AUTO = {"routes": ("native", "ring+bf16", "ring+onebit"), "lines": PACKED, "codec": "auto"}


def test_only_the_codecs_that_could_be_the_best_are_measured(tmp_path):
    for (found,) in spawn(2, training.survey, str(tmp_path), [AUTO]):
        assert found[2] == ["links", "native", "ring+onebit", "close"]  # bf16 sends half, which cannot be fast enough
        assert found[1] == ["native", "ring+onebit"]


def test_when_the_time_is_over_only_what_every_plan_needs_is_measured(tmp_path):
    late, codec = AUTO | {"clock": 11.0}, {"routes": ("ring+onebit",), "lines": PACKED, "clock": 11.0}
    first, second = spawn(2, training.survey, None, [late, codec])
    for found, asked in (first, second):
        assert found[1:3] == (["native"], ["links", "native", "close"])
        assert asked[1] == ["ring+onebit"]
    assert "ring+onebit might be faster, but measure_seconds=10 are over" in first[0][4]


def test_a_route_that_no_line_describes_is_left_out():
    for (found,) in spawn(2, training.survey, None, [AUTO | {"unfit": ("ring+onebit",)}]):
        assert found[1] == ["native", "ring+bf16"]


def test_an_engine_that_moves_device_memory_is_measured_there():
    networks = spawn(2, training.measure_on_device)
    assert networks[0] == networks[1]
    assert networks[0].workers == 2
    assert networks[0].all_reduce["native"].b_seconds_per_byte > 0
    assert networks[0].beta_seconds_per_byte > 0


def test_the_first_rank_says_what_is_profiled_measured_and_decided_and_the_others_nothing(capfd):
    first, second = spawn(
        2, training.speak, "plain", {"codec": "auto", "candidates": ["onebit"], "measurements": False}
    )
    assert second == []
    assert {level for level, _ in first} <= {"INFO", "WARNING"}  # the latter where it took more than two seconds
    said = [text for _, text in first]
    steps = [
        "profiling 2 iterations, with torch's own buckets; then planning",
        "measuring the links between 2 workers, about 0.8 s",
        "measuring native, about 1.2 s",
        "measuring all_gather+onebit, about 1.2 s",
    ]
    assert [text for text in said if text in steps] == steps
    assert any(text.startswith("measuring native, about 1.2 s: took ") for text in said)
    last = said[-1]
    assert last.startswith("training goes on, planning took ")
    assert "1 messages by all_gather+onebit; predicted iteration " in last
    assert "compression is on: onebit for all gradients" in last
    assert capfd.readouterr() == ("", "")


def test_training_goes_on_with_a_plan_where_measurements_cannot_be_kept(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    first, _ = spawn(2, training.speak, "plain", {"measurements": str(blocked / "measurements")})
    assert first[-1][1].startswith("training goes on, planning took ")
    assert "messages by native; predicted iteration " in first[-1][1]


def test_why_there_is_no_plan_is_said_without_being_asked():
    first, second = spawn(2, training.speak, "mixed", {})
    assert first == [("WARNING", f"no plan: {OBSTACLE}")]
    assert second == []


OBSTACLE = "its parameters have several types, and torch applies bucket limits to each type by itself"


def test_iterations_on_a_gpu_that_take_long_are_profiled_three_times_and_not_more() -> None:
    assert spawn(2, training.profiled_less) == [[8, 3, 8]] * 2
