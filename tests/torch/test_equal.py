"""Ranks that would part ways without a word, or wait for one another, are stopped: all of them, by the same error."""

import numpy as np
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


def test_nan_in_a_node_that_another_rank_leads_is_raised_or_skipped_by_all():
    raised, taken = alike(training.nan_on_hosts, "aba", world_size=3)
    assert raised.startswith("NonFiniteError: the gradient of 'first' holds NaN or infinity on some rank")
    assert taken == [0, 1, 3]


def test_a_gradient_too_large_for_a_half_reaches_the_gradient_scaler_or_is_raised_on_all_ranks():
    """Half of a rank's gradient of 1 times the scale: halves hold 2^15, not 2^16; bf16 holds any."""
    (scales, applied), raised, (scales_of_bf16, applied_by_bf16) = alike(training.scale_down)
    assert scales == [2.0**19, 2.0**18, 2.0**17, *[2.0**16] * 9]
    assert applied == [8 / 2] * 57
    assert raised.startswith(
        "NonFiniteError: the gradient of 'first', 'second' holds NaN or infinity on some rank, or "
    )
    assert "what fp16 cannot hold; fix the loss, or pass on_nonfinite" in raised
    assert scales_of_bf16 == [2.0**20] * 12
    assert applied_by_bf16 == [6.0] * 57


def test_what_is_owed_stays_with_its_element_when_a_run_resumes_in_another_memory_format():
    for rank in spawn(2, training.resume_in_other_memory_format):
        for whole, parts, owed, owed_in_parts in rank:
            np.testing.assert_array_equal(parts, whole)
            np.testing.assert_array_equal(owed_in_parts, owed)
            assert owed.any()


def test_a_memory_format_that_changes_under_buckets_is_refused_by_all():
    before_a_plan, after_steps, before_the_hook = alike(training.change_memory_format)
    assert before_a_plan == "no error"
    wanted = (
        "has strides (72, 9, 3, 1), and had (72, 1, 24, 8) when it was wrapped; change the memory format of a model"
    )
    assert after_steps.startswith(f"PlanError: parameter 'first' {wanted} before it is wrapped")
    assert before_the_hook.startswith("PlanError: parameter 'first' has strides (72, 1, 24, 8), and had (72, 9, 3, 1)")


def test_a_state_that_is_wrong_on_one_rank_is_refused_by_all_and_changes_nothing():
    found = alike(training.load_what_is_wrong)
    where = "PlanError: on rank 1, exchange state: residual of 'first': found"
    fits = "wanted (4, 8, 3, 3), as the parameter is: the state of this model"
    assert found["shape"] == f"{where} (8, 4, 3, 3); {fits}"
    assert found["flat"] == f"{where} (288,); {fits}"
    assert found["type"] == f"{where} '(4, 8, 3, 3) of torch.float64'; wanted a tensor of torch.float32"
    assert found["values"].startswith("PlanError: ranks load different exchange states (checksums: rank 0 ")
    assert found["all"] == "FormatError: exchange state: format: found 'other'; wanted penstock-exchange/2"
    assert found["is as before"]
    assert found["right"] == "no error"


@pytest.mark.parametrize("hook", [False, True])
def test_a_state_loaded_on_one_rank_only_is_refused_at_once(hook):
    wanted = "PlanError: an exchange state is loaded on rank 0, and not on all others; call load_exchange_state_dict on"
    loaded, went_on = spawn(2, training.load_on_one_rank, True, hook)
    assert loaded == went_on
    assert loaded.startswith(wanted)
    loaded, _ = spawn(2, training.load_on_one_rank, False, hook)  # the other waits for rank 0's gradients by then
    assert loaded.startswith(wanted)
