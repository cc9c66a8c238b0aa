from training_claims import OVER_NOTHING, claims


def rows(**seconds):
    return [
        {"model": "vgg", "method": name.replace("_", "-"), "iteration_seconds": each} for name, each in seconds.items()
    ]


def test_codecs_are_compared_with_no_communication_where_a_record_is_about_them():
    measured = rows(no_communication=1.0, penstock_onebit=1.13, penstock_gtopk=1.15, penstock_terngrad=1.0)
    found = claims(measured)
    assert [(claim.value, claim.wanted, claim.holds) for claim in found] == [
        (1.13, OVER_NOTHING["penstock-onebit"], False),
        (1.15, OVER_NOTHING["penstock-gtopk"], True),
        (1.0, OVER_NOTHING["penstock-terngrad"], True),
    ]
    assert claims([*measured, *rows(ddp=2.0)]) == []  # of many methods in one process


def test_bulks_are_to_be_faster_and_a_method_that_failed_is_left_out():
    found = claims([*rows(penstock_wfbp=2.6, penstock_wfbp_bulk=2.0), {"method": "ddp", "error": "died"}])
    assert [(claim.value, claim.holds) for claim in found] == [(1.3, True)]
