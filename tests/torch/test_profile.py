"""The profiler against injected times, autograd's own order, and every kind of parameter and loop."""

import copy
import pickle
import time
import warnings
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="penstock.torch needs torch")
from torch import nn  # noqa: E402

from penstock.errors import ProfileError  # noqa: E402
from penstock.torch.clocks import HostClock  # noqa: E402
from penstock.torch.profile import Profiler, profile_backward  # noqa: E402
from penstock.zoo import ZOO  # noqa: E402

CPU = torch.device("cpu")


class Naps:
    """A clock that only naps move: exact whatever else the machine does."""

    def __init__(self):
        self.now = 0.0

    def nap(self, seconds):
        self.now += seconds


@pytest.fixture
def naps(monkeypatch):
    naps = Naps()
    for name in ("start", "mark"):
        monkeypatch.setattr(HostClock, name, staticmethod(lambda: naps.now))
    return naps


class Sleep(torch.autograd.Function):
    """Passes values through and naps on the way back."""

    @staticmethod
    def forward(ctx, x, seconds, naps):
        ctx.seconds, ctx.naps = seconds, naps
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.naps.nap(ctx.seconds)
        return gradient, None, None


class SlowLayers(nn.Module):
    def __init__(self, naps, backward_naps, forward_nap=0.0):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in backward_naps)
        self.naps, self.backward_naps, self.forward_nap = naps, backward_naps, forward_nap

    def forward(self, x):
        self.naps.nap(self.forward_nap)
        for layer, nap in zip(self.layers, self.backward_naps, strict=True):
            x = Sleep.apply(layer(x), nap, self.naps)
        return x


def mlp(*widths):
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


def names(profile):
    return [tensor.name for tensor in profile.trace.tensors]


def hooks_left(model):
    parameters = sum(len(each._post_accumulate_grad_hooks or ()) for each in model.parameters())
    return len(model._forward_pre_hooks) + len(model._forward_hooks) + parameters


def autograd_order(model, step):
    """Return the order in which a hook of this test's own sees gradients."""
    seen = []
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda _, n=name: seen.append(n))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    step()
    for handle in handles:
        handle.remove()
    return seen


def test_injected_times_are_recovered(naps):
    model = SlowLayers(naps, [0.05, 0.15, 0.10], forward_nap=0.075)
    profile = profile_backward(model, lambda: model(torch.ones(2, 8)).sum().backward(), iterations=5, warmup=1)
    by_name = {tensor.name: tensor.backward_seconds for tensor in profile.trace.tensors}
    for index, seconds in enumerate(model.backward_naps):
        assert by_name[f"layers.{index}.bias"] == pytest.approx(seconds)
        assert by_name[f"layers.{index}.weight"] == pytest.approx(0)
    assert profile.trace.forward_seconds == pytest.approx(0.075)
    assert profile.trace.backward_seconds == pytest.approx(0.30)
    assert profile.trace.times == "measured"


def test_the_time_of_real_work_is_seen():
    """On the machine's own clock, without a bound from above: how busy the machine is shows there."""
    model = mlp(8, 8)

    def step():
        time.sleep(0.01)
        output = model(torch.ones(2, 8))
        output.register_hook(lambda _gradient: time.sleep(0.02))
        output.sum().backward()

    trace = profile_backward(model, step, iterations=2, warmup=0).trace
    assert trace.compute_seconds >= 0.02


def test_the_loss_and_its_gradient_count_as_forward(naps):
    model = SlowLayers(naps, [0.01])

    def step():
        Sleep.apply(model(torch.ones(2, 8)), 0.1, naps).sum().backward()

    profile = profile_backward(model, step, iterations=3, warmup=0)
    assert profile.trace.forward_seconds == pytest.approx(0.1)
    assert profile.trace.backward_seconds == pytest.approx(0.01)


@pytest.mark.parametrize("name", ["resnet20", "gpt_small"])
def test_the_order_is_autograds(name):
    task = ZOO[name]()
    model = task.build()
    inputs, targets = task.make_batch(2, CPU)

    def step():
        task.compare(model(inputs), targets).backward()

    profile = profile_backward(model, step, iterations=2, warmup=1)
    assert names(profile) == autograd_order(model, step)
    assert {t.name: t.numel for t in profile.trace.tensors} == {n: p.numel() for n, p in model.named_parameters()}


class RandomGraph(nn.Module):
    """Layers that each read a sum of earlier results; layers may be shared between places, frozen, or unused."""

    def __init__(self, places, layers, frozen):
        super().__init__()
        self.places = places  # (which layer, which earlier results it reads)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(layers))
        for index in frozen:
            self.layers[index].requires_grad_(False)
        if all(not parameter.requires_grad for parameter in self.parameters()):
            self.layers[0].requires_grad_(True)

    def forward(self, x):
        results = [x]
        for layer, reads in self.places:
            results.append(self.layers[layer](sum(results[i] for i in reads)))
        return results[-1]


@st.composite
def graphs(draw):
    layers = draw(st.integers(1, 5))
    places = [
        (draw(st.integers(0, layers - 1)), draw(st.lists(st.integers(0, count), min_size=1, max_size=3)))
        for count in range(draw(st.integers(1, 8)))
    ]
    return places, layers, draw(st.sets(st.integers(0, layers - 1), max_size=layers))


@settings(max_examples=60)
@given(graphs())
def test_a_trace_holds_each_parameter_with_a_gradient_once(graph):
    model = RandomGraph(*graph)

    def step():
        model.zero_grad(set_to_none=True)
        output = model(torch.ones(1, 3))
        if output.requires_grad:
            output.sum().backward()

    step()
    learned = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    if not learned:
        with pytest.raises(ProfileError, match="0 backward passes seen"):
            profile_backward(model, step, iterations=1, warmup=0)
        return
    profile = profile_backward(model, step, iterations=2, warmup=1)
    assert sorted(names(profile)) == sorted(learned)
    assert names(profile) == autograd_order(model, step)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert set(profile.unused) == trainable - set(learned)
    assert hooks_left(model) == 0


def test_only_the_synchronising_pass_of_gradient_accumulation_counts(naps):
    model, synchronises = SlowLayers(naps, [0.0]), [False]
    profiler = Profiler(warmup=0, counts=lambda: synchronises[0])
    with profiler.attached(model):
        for _ in range(3):
            for nap, synchronises[0] in ((0.1, False), (0.1, False), (0.01, True)):
                model.backward_naps = [nap]
                model(torch.ones(2, 8)).sum().backward()
    profile = profiler.profile()
    assert profiler.iterations == profile.iterations == 3
    assert profile.trace.backward_seconds == pytest.approx(0.01)


def test_several_backward_passes_of_one_forward_pass_are_one_iteration():
    model = mlp(4, 4, 2)

    def step():
        first, second = model(torch.ones(3, 4)).unbind(1)
        first.sum().backward(retain_graph=True)
        second.sum().backward()

    profile = profile_backward(model, step, iterations=2, warmup=0)
    assert (profile.iterations, sorted(names(profile))) == (2, sorted(n for n, _ in model.named_parameters()))


def test_two_forward_passes_before_a_backward_pass_are_one_iteration(naps):
    model = SlowLayers(naps, [0.0], forward_nap=0.01)
    step = lambda: (model(torch.ones(2, 8)) + model(torch.zeros(2, 8))).sum().backward()  # noqa: E731
    profile = profile_backward(model, step, iterations=3, warmup=0)
    assert profile.iterations == 3
    assert profile.trace.forward_seconds == pytest.approx(0.02)


def test_evaluation_between_steps_is_not_an_iteration(naps):
    model = SlowLayers(naps, [0.02], forward_nap=0.01)
    profiler = Profiler(warmup=0)
    with profiler.attached(model):
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
            with torch.no_grad():
                model.forward_nap = 0.1
                model(torch.ones(2, 8))
                model.forward_nap = 0.01
    assert profiler.iterations == 2
    assert profiler.trace().forward_seconds == pytest.approx(0.01)


def test_shared_parameters_count_once_under_their_first_name():
    model = mlp(4, 4, 4)
    model[1].weight = model[0].weight
    profile = profile_backward(model, lambda: model(torch.ones(1, 4)).sum().backward(), iterations=1, warmup=0)
    assert sorted(names(profile)) == ["0.bias", "0.weight", "1.bias"]
    assert names(profile)[-1] == "0.weight"  # complete only when its first use has been reached


def test_several_types_are_counted_in_bytes_of_the_commonest():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.narrow = nn.Linear(8, 8), nn.Linear(8, 3).to(torch.bfloat16)

        def forward(self, x):
            return self.narrow(self.wide(x).to(torch.bfloat16))

    model = Mixed()
    trace = profile_backward(model, lambda: model(torch.ones(1, 8)).sum().backward(), iterations=1, warmup=0).trace
    sizes = {tensor.name: tensor.numel for tensor in trace.tensors}
    assert trace.dtype == "float32"
    assert sizes == {"wide.weight": 64, "wide.bias": 8, "narrow.weight": 12, "narrow.bias": 2}  # 3 bfloat16: 6 bytes


def test_half_precision_models_have_half_precision_traces():
    model = mlp(4, 4).to(torch.bfloat16)
    step = lambda: model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()  # noqa: E731
    trace = profile_backward(model, step, iterations=1, warmup=0).trace
    assert (trace.dtype, sorted(t.numel for t in trace.tensors)) == ("bfloat16", [4, 16])


class Swapping(nn.Module):
    """Two branches in an order that changes in some iterations."""

    def __init__(self, swapped):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.swapped = iter(swapped)

    def forward(self, x):
        first, second = (self.b, self.a) if next(self.swapped) else (self.a, self.b)
        return second(first(x))


def test_changed_orders_give_the_most_frequent_and_a_warning_that_names_the_tensors():
    model = Swapping([True, False, False])
    with pytest.warns(UserWarning, match=r"different orders; the most frequent one is kept. Moved: (a|b).weight$"):
        profile = profile_backward(model, lambda: model(torch.ones(1, 2)).sum().backward(), iterations=3, warmup=0)
    assert names(profile) == ["b.weight", "a.weight"]
    assert len(profile.moved) == 1


def test_a_parameter_used_now_and_then_is_kept_and_named():
    model, uses = mlp(2, 2, 2), iter([True, False, False, False])
    step = lambda: (model(torch.ones(1, 2)) if next(uses) else model[0](torch.ones(1, 2))).sum().backward()  # noqa: E731
    profiler = Profiler(warmup=0)
    with profiler.attached(model):
        for _ in range(4):
            profiler.begin()  # the loop does not always call the model itself
            step()
            profiler.finish()
    with pytest.warns(UserWarning, match="not every one of 4 iterations gave a gradient to 1.bias, 1.weight"):
        profile = profiler.profile()
    assert sorted(names(profile)) == sorted(n for n, _ in model.named_parameters())
    assert profile.occasional == ("1.bias", "1.weight")


def test_a_steady_model_gives_no_warning():
    model = mlp(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        profile = profile_backward(model, lambda: model(torch.ones(1, 2)).sum().backward(), iterations=2)
    assert sorted(names(profile)) == sorted(name for name, _ in model.named_parameters())


def test_what_a_step_raises_is_passed_on_and_no_hook_is_left():
    model = mlp(2, 2)

    def step():
        model(torch.ones(1, 2)).sum().backward()
        raise ZeroDivisionError("the user's own")

    with pytest.raises(ZeroDivisionError, match="the user's own"):
        profile_backward(model, step)
    assert hooks_left(model) == 0


def test_an_iteration_that_broke_off_does_not_change_the_trace():
    model, fails = mlp(2, 2, 2), [False]
    model[0].weight.register_hook(lambda gradient: 1 / 0 if fails[0] else None)
    profiler = Profiler(warmup=0)
    with profiler.attached(model):
        for fails[0] in (False, True, False):
            try:
                model(torch.ones(1, 2)).sum().backward()
            except ZeroDivisionError:
                assert fails[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert names(profiler.profile()) == ["1.bias", "1.weight", "0.bias", "0.weight"]


def test_a_copy_of_a_watched_model_reports_to_nobody():
    model, profiler = mlp(2, 2), Profiler(warmup=0)
    with profiler.attached(model):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for each in copies:
            each(torch.ones(1, 2)).sum().backward()
    assert profiler.iterations == 0


def test_name_batch_and_device_have_sensible_defaults():
    model = mlp(4, 2)
    trace = profile_backward(model, lambda: model(torch.ones(7, 4)).sum().backward(), iterations=1).trace
    assert (trace.model, trace.batch) == ("Sequential", 7)
    assert "thread" in trace.device
    assert trace.source == "penstock.torch.profile: median of 1 iterations after 5 to warm up, backward spread 0.0%"


def test_nested_outputs_mark_the_end_of_the_forward_pass(naps):
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            return {"all": [self.layer(x), "text"], "more": (None, self.layer(x))}

    model = Many()
    step = lambda: Sleep.apply(model(torch.ones(1, 2))["all"][0], 0.1, naps).sum().backward()  # noqa: E731
    trace = profile_backward(model, step, iterations=1, warmup=0).trace
    assert (trace.forward_seconds, trace.backward_seconds) == pytest.approx((0.1, 0.0))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.ReLU(), "parameters that learn on no device; wanted all on one device"),
        (nn.Linear(2, 2, device="meta"), "parameters on 'meta'; penstock times work on cpu and cuda"),
        (
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")),
            "parameters that learn on cpu and meta; wanted all on one device",
        ),
    ],
)
def test_models_that_cannot_be_timed_are_refused(model, message):
    with pytest.raises(ProfileError) as caught:
        profile_backward(model, lambda: None)
    assert str(caught.value) == message
    assert hooks_left(model) == 0


def test_a_step_that_never_calls_the_model_is_explained():
    model = mlp(2, 2)
    with pytest.raises(ProfileError, match=r"0 backward passes seen, 1 of them.*call the model itself \(not its meth"):
        profile_backward(model, lambda: model.forward(torch.ones(1, 2)).sum().backward(), iterations=3, warmup=1)


def test_a_live_loop_under_ddp_is_profiled_between_its_own_hooks(tmp_path):
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        ddp = DistributedDataParallel(mlp(4, 8, 2))
        profiler = Profiler(warmup=1, counts=lambda: ddp.require_backward_grad_sync)
        with profiler.attached(ddp.module):
            for _ in range(3):
                with ddp.no_sync():
                    ddp(torch.ones(2, 4)).sum().backward()
                ddp(torch.ones(2, 4)).sum().backward()
        assert profiler.iterations == 2
        assert [t.name for t in profiler.trace().tensors] == ["1.bias", "1.weight", "0.bias", "0.weight"]
        assert hooks_left(ddp.module) == 0
    finally:
        distributed.destroy_process_group()


@pytest.mark.slow
def test_a_compiled_model_is_profiled():
    model = torch.compile(mlp(4, 8, 2), backend="aot_eager")
    profile = profile_backward(model, lambda: model(torch.ones(2, 4)).sum().backward(), iterations=2, warmup=2)
    assert len(names(profile)) == 4


@pytest.mark.gpu
def test_on_a_gpu_the_times_add_up_to_the_wall_clock():
    task = ZOO["resnet50"]()
    device = torch.device("cuda")
    model = task.build().to(device)
    inputs, targets = task.make_batch(32, device)

    def step():
        model.zero_grad(set_to_none=True)
        task.compare(model(inputs), targets).backward()

    profile = profile_backward(model, step, iterations=20, warmup=5)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        step()
    torch.cuda.synchronize()
    assert profile.trace.compute_seconds == pytest.approx((time.perf_counter() - start) / 20, rel=0.1)
