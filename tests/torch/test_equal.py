"""Ranks that would part ways without a word, or wait for one another, are stopped: all of them, by the same error."""

import pytest

import torch_equal as training
from spawn import spawn

SAME = "; give all ranks the same"


def alike(function, *arguments, world_size=2):
    """Return what all ranks return, which must be the same."""
    first, *others = spawn(world_size, function, *arguments)
    assert all(other == first for other in others)
    return first


@pytest.fixture(scope="module")
def of_options():
    return alike(training.different_options)


@pytest.mark.parametrize(
    ("name", "here", "there"),
    [
        ("find_unused_parameters", "False", "True"),
        ("static_graph", "False", "True"),
        ("gradient_as_bucket_view", "True", "False"),
        ("bucket_cap_mb", "25", "1"),
        ("skip_all_reduce_unused_params", "False", "True"),
        ("on_nonfinite", "'raise'", "'skip'"),
    ],
)
def test_an_option_that_changes_what_is_sent_is_compared(of_options, name, here, there):
    assert of_options[name] == f"PlanError: {name} is {here} on rank 0 and {there} on rank 1{SAME}"


def test_options_are_compared_where_torchs_own_buckets_are_kept(of_options):
    wanted = f"PlanError: find_unused_parameters is False on rank 0 and True on rank 1{SAME}"
    assert of_options["torch's buckets"] == of_options["hook, find_unused_parameters"] == wanted


def test_the_bare_hook_compares_its_options(of_options):
    assert (
        of_options["hook, on_nonfinite"] == f"PlanError: on_nonfinite is 'raise' on rank 0 and 'skip' on rank 1{SAME}"
    )


def test_an_option_left_out_is_one_at_its_default(of_options):
    assert of_options["by default"] == "no error"


@pytest.fixture(scope="module")
def of_models():
    return alike(training.different_models)


@pytest.mark.parametrize(
    ("case", "here", "there"),
    [
        ("shape", "'weight', (2, 4) of torch.float32 with strides (4, 1)", "'weight', (3, 4) of torch.float32 with"),
        ("hook", "'weight', (2, 4) of torch.float32 with strides (4, 1)", "'weight', (3, 4) of torch.float32 with"),
        ("name", "'a.weight', (2, 2)", "'b.weight', (2, 2)"),
        ("order", "'a.weight', (2, 2)", "'b.weight', (2, 2)"),
        ("memory", "'0.weight', (4, 3, 3, 3) of torch.float32 with strides (27, 9, 3, 1)", "strides (27, 1, 9, 3)"),
        ("count", "'0.bias', (4,)", "'1.weight', (4, 4, 3, 3)"),
        ("frozen", "'weight', (2, 2)", "not trained"),
    ],
)
def test_models_that_differ_are_refused_by_the_first_parameter_that_does(of_models, case, here, there):
    message = of_models[case]
    assert message.startswith(("PlanError: parameter 0 is ", "PlanError: parameter 1 is "))
    assert message.endswith("; give all ranks the same model")
    assert here in message
    assert there in message


def test_parameters_that_torch_is_told_to_ignore_may_differ(of_models):
    assert of_models["ignored"] == "no error"


@pytest.fixture(scope="module")
def of_texts(tmp_path_factory):
    return spawn(2, training.different_texts, str(tmp_path_factory.mktemp("texts")))


@pytest.mark.parametrize("codec", ["mine.cll", "twice.cll"])  # another text, and another operator
@pytest.mark.parametrize("where", ["codec", "plan", "hook"])
def test_codecs_of_one_name_and_another_text_are_refused(of_texts, codec, where):
    messages = {rank[f"{codec}, {where}"] for rank in of_texts}
    assert len(messages) == 1
    assert messages.pop().startswith(f"PlanError: the text of codec '{codec}' (fingerprint) is '")


def test_so_are_candidates_of_which_one_has_another_text(of_texts):
    assert len({rank["mine.cll, candidate"] for rank in of_texts}) == 1
    assert of_texts[0]["mine.cll, candidate"].startswith("PlanError: the text of codec 'mine.cll' (fingerprint) is ")


@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
def test_nan_in_a_node_that_another_rank_leads_is_raised_or_skipped_by_all(on_nonfinite):
    found = alike(training.nan_on_hosts, "aba", on_nonfinite, world_size=3)
    if on_nonfinite == "skip":
        assert found == [0, 1, 3]
    else:
        assert found.startswith("NonFiniteError: the gradient of 'first' holds NaN or infinity on some rank")


def test_a_gradient_too_large_for_a_half_reaches_the_gradient_scaler():
    """Half of a rank's gradient of 1 times the scale: 65504 holds 2^16, and no more."""
    scales, applied = alike(training.scale_down, "fp16", True)
    assert scales == [2.0**19, 2.0**18, 2.0**17, *[2.0**16] * 9]
    assert applied == [8 / 2] * 57


def test_without_a_scaler_it_is_raised_on_all_ranks():
    message = alike(training.scale_down, "fp16", False)
    wanted = (
        "NonFiniteError: the gradient of 'first', 'second' holds NaN or infinity on some rank, or what fp16 cannot hold"
    )
    assert message.startswith(wanted)


def test_a_codec_whose_range_is_a_floats_needs_no_smaller_scale():
    scales, applied = alike(training.scale_down, "bf16", True)
    assert scales == [2.0**20] * 12
    assert applied == [6.0] * 57
