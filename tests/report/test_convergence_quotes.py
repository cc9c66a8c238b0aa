"""Tables of convergence studies from rows with known ends."""

from penstock.report.convergence_quotes import behind_table, published_table


def study(ends):
    """Return a record of an LSTM: `ends` by method, workers and seed."""
    same = {"task": "lstm", "global_batch": 8, "steps": 1000, "metric_name": "m", "better": "lower"}
    return {
        "rows": [
            same | {"method": method, "workers": workers, "seed": seed, "final": end, "learning_rate": 1.0}
            for (method, workers, seed), end in ends.items()
        ]
    }


def test_methods_near_dense_are_bold_and_what_was_not_run_is_a_dash():
    record = study({("dense", 4, 1): 100.0, ("dense", 8, 1): 100.0, ("gtopk 0.1, dense below 5", 4, 1): 100.94,
                    ("onebit", 4, 1): 102.0, ("onebit", 8, 1): 99.96})  # fmt: skip
    assert behind_table(record).splitlines()[0::2] == [
        "|  | LSTM, 1,000 steps |",
        "| `gtopk 0.1` | **0.9%** / - |",
    ]
    assert behind_table(record).splitlines()[3] == "| `onebit` | 2.0% / **0.0%** |"


def test_gtopk_is_paired_with_the_published_rule_seed_by_seed():
    ends = {("dense", 4, seed): 100.0 for seed in (1, 2)}
    ends |= {("gtopk 0.1", 4, 1): 50.0, ("gtopk 0.1", 4, 2): 100.0}
    ends |= {("gtopk-published 0.1", 4, 1): 51.0, ("gtopk-published 0.1", 4, 2): 104.0}
    assert published_table(study(ends)).splitlines()[-1] == "| `gtopk 0.1`, 4 workers | +3.0% +- 1.0 |"
