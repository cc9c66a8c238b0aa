"""Profiles of tasks: what the trace says about itself, and devices."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="the zoo is made of torch modules")

from penstock.errors import ProfileError, TaskError  # noqa: E402
from penstock.torch.profile import Profile  # noqa: E402
from penstock.zoo import ZOO  # noqa: E402
from penstock.zoo.load import module_task  # noqa: E402
from penstock.zoo.run_task import find_device, profile_task, training_step  # noqa: E402


def quick(name="gpt_small", **settings) -> Profile:
    return profile_task(ZOO[name](), **({"batch": 2, "iterations": 2, "warmup": 1} | settings))


def test_a_trace_says_what_was_run():
    trace = quick(source="this test").trace
    assert (trace.model, trace.batch, trace.dtype, trace.times) == ("small GPT", 2, "float32", "measured")
    assert trace.source.startswith(
        f"this test: torch {torch.__version__}, float32, a sample is a sequence of 128 bytes; median of 2 iterations"
    )


def test_autocast_keeps_gradients_in_float32_and_says_so():
    trace = quick(dtype="bfloat16").trace
    assert trace.dtype == "float32"
    assert "bfloat16 autocast" in trace.source


def test_autocast_reaches_the_forward_pass():
    seen = set()
    task = ZOO["gpt_small"]()
    model = task.build()
    model.transformer.h[0].attn.c_attn.register_forward_hook(lambda _, __, output: seen.add(output.dtype))
    training_step(task, model, 1, torch.device("cpu"), torch.bfloat16)()
    assert seen == {torch.bfloat16}


def test_the_tasks_own_batch_is_the_default():
    task = replace(ZOO["gpt_small"](), batch=3)
    assert profile_task(task, iterations=1, warmup=0).trace.batch == 3


def test_a_batch_that_does_not_fit_is_explained():
    def build():
        raise torch.OutOfMemoryError("CUDA out of memory")

    task = replace(ZOO["gpt_small"](), build=build)
    message = "^small GPT with batch 9 needs more memory than cpu has; choose a smaller batch$"
    with pytest.raises(ProfileError, match=message):
        profile_task(task, batch=9)


def test_what_a_users_forward_pass_raises_is_one_line():
    task = module_task(torch.nn.Linear(4, 4), "net.py:net", (5,))
    with pytest.raises(TaskError, match=r"^Linear raised RuntimeError: mat1 and mat2 shapes cannot be multiplied \("):
        profile_task(task, iterations=1, warmup=0)


def test_unknown_types_are_refused():
    with pytest.raises(ProfileError, match=r"^dtype 'int8'; wanted one of float32, bfloat16$"):
        quick(dtype="int8")


@pytest.mark.parametrize("name", ["gpu", "cuda:x", ""])
def test_unknown_devices_are_refused(name):
    with pytest.raises(ProfileError, match=f"^device '{name}'; wanted auto, cpu, cuda or cuda:N$"):
        find_device(name)


def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(ProfileError, match=r"^device 'cuda:99': torch sees \d+ GPUs here; wanted one that exists$"):
        find_device("cuda:99")
    assert find_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
