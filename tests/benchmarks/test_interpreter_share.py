from interpreter_share import measure


def test_a_bucket_of_small_tensors_takes_as_many_instructions_as_one_of_large_ones():
    one, three = (measure(6, buckets, "onebit", 4, 1) for buckets in (1, 3))
    assert three["instructions"] == 3 * one["instructions"] == 3 * 23
    assert one["seconds"] > 0
