"""The page of hostile conditions counts what records have, and shows what was not good."""

import page_soak

ORIGIN = {
    "commit": "c",
    "commits": ["b"],
    "command": "x.py",
    "date": "2026-11-17T05:57:59+00:00",
    "machine": {"cores": 2, "gpus": "1 x H200"},
    "versions": {"torch": "2"},
}


def case(seed):
    kill = {"engine": "mpi", "route": "ring", "ranks": 3, "victim": 1, "signal": "SIGSTOP"}
    return {"case": {"seed": seed, **kill}, "phase": "save", "outcomes": {"hangs": 1, "named": 1}}


def test_kills_are_summed_by_engine_and_signal_and_bad_ones_are_listed():
    rows = [
        {"engine": "mpi", "signal": "SIGSTOP", "cases": 2, "outcomes": {"named": 3, "hangs": 1}},
        {"engine": "mpi", "signal": "SIGSTOP", "cases": 1, "outcomes": {"cannot know": 2}},
        {"engine": "gloo", "signal": "SIGKILL", "cases": 1, "outcomes": {"named": 1}},
    ]
    limit = {"times_the_timeout": 1.5, "and_seconds": 40.0}
    told = {"good": 6 / 7, "slowest_seconds": {"SIGKILL": 2.5}, "hangs_after": limit, "not_begun": [3, 9]}
    text = page_soak.kills_text(ORIGIN | told | {"rows": rows, "findings": [case(7)], "earlier": [case(8)]})
    assert "| gloo, SIGKILL | 1 | 1 | 1 | 0 | 0 |" in text
    assert "| mpi, SIGSTOP | 3 | 6 | 3 | 2 | **1 hangs** |" in text
    assert "4 kills: 85.71% of survivors" in text
    assert "Not good:\n\n- seed 7: SIGSTOP to rank 1 of 3 over mpi, ring, phase save: 1 hangs, 1 named" in text
    assert "run again since:\n\n- seed 8" in text
    assert "On 2 cores, 1 x H200, torch 2, ended on 2026-11-17 with commit c, begun with b: `x.py`." in text
    assert "**No kill** in the cases of seeds 3, 9" in text


def test_damage_that_is_neither_read_nor_refused_stands_out():
    rows = [
        {"kind": "payloads", "of": "onebit", "cases": 3, "outcomes": {"loaded": 1, "refused": 2}},
        {"kind": "payloads", "of": "fp16", "cases": 1, "outcomes": {"refused": 1}},
        {"kind": "files", "of": "plan", "cases": 2, "outcomes": {"refused": 1, "slow": 1}},
    ]
    found = [{"of": "plan", "damage": "bits", "result": "slow"}]
    text = page_soak.damage_text(ORIGIN | {"rows": rows, "findings": found, "earlier": []})
    assert "| payloads of 2 codecs | 4 | 1 | 3 | 0 |" in text
    assert "| plan | 2 | 0 | 1 | **1** |" in text
    assert text.endswith("Found, and open:\n\n- plan, bits: slow")


def test_iterations_that_are_missing_and_quantities_that_grow_stand_out():
    row = {"quantity": "rss_nbytes", "before": 2**20, "last": 3 * 2**20, "growth": 2**21, "noise": 0.0, "grows": True}
    told = {"iterations": 62_000, "job": {"iterations": 100_000}, "plans": 7, "same_weights": True}
    text = page_soak.iterations_text(ORIGIN | told | {"rows": [row]})
    assert "| rss, MiB | 1.0 | 3.0 | 2.0 | 0.0 | **yes** |" in text
    assert "**62,000 of the 100,000 iterations asked for**, 7 plans; ranks ended with the same weights." in text
    cut_off = page_soak.iterations_text(ORIGIN | told | {"rows": [row], "same_weights": None})
    assert "**did not compare their weights**" in cut_off


def test_a_part_that_was_run_apart_is_named_with_its_commit():
    apart = {"mpi": {"command": "y.py", "commit": "d"}}
    text = page_soak.elastic_text(ORIGIN | {"rows": []} | apart)
    assert text.endswith("begun with b: `x.py`. Of it, `y.py` was run with commit d.")


def test_a_round_that_came_to_no_end_is_a_row_too():
    good = {"seed": 1, "ranks": [3, 2, 3], "last_step": 90, "unsent": 0.5, "lost": 1e-9, "loss": 0.25, "good": True}
    rows = [good | {"until_fewer_save_seconds": 61.0}, {"seed": 2, "good": False, "said": "no checkpoint"}]
    text = page_soak.elastic_text(ORIGIN | {"rows": rows})
    assert "| 1 | 3, 2, 3 | 90 | 0.5 | 1e-09 | 0.25 | 61 s | yes |" in text
    assert "| 2 |  |  |  |  |  |  | **no** |" in text
