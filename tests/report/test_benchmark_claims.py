from penstock.report.benchmark_claims import claims_text

HELD = {"text": "ring, speed", "value": 1.02, "wanted": 1.0, "at_most": False, "holds": True}
MISSED = {"text": "pipeline, time on 8 hosts over 2", "value": 1.5, "wanted": 1.2, "at_most": True, "holds": False}


def test_a_record_says_what_was_missed_and_by_how_much():
    text = claims_text({"claims": [HELD, MISSED], "note": "The machine was busy."})
    assert text == (
        "Of what was asked, 1 of 2 holds. Missed:\n\n"
        "- **pipeline, time on 8 hosts over 2: 1.5**, wanted at most 1.2: missed by 25%\n\n"
        "The machine was busy.\n\n"
    )


def test_a_record_that_holds_everything_says_only_that():
    assert claims_text({"claims": [HELD]}) == "Of what was asked, 1 of 1 holds.\n\n"


def test_a_record_without_claims_says_nothing():
    assert claims_text({"rows": []}) == claims_text({"claims": [], "note": ""}) == ""
