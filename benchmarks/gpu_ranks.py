"""Coded programs queued over NCCL: bits against the route through the host, then ms per iteration beside peers.

One rank of four (gpu_hosts.py starts them). usage: gpu_queue.py OUT.json [resnet] [gpt] [nobits]
"""
import hashlib, json, os, sys, time, traceback
from functools import partial
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

sys.path.insert(0, os.path.dirname(__file__))
START = time.time()
OUT = sys.argv[1]
WANTED = sys.argv[2:]
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(0)
DEVICE = torch.device("cuda", 0)
RESULT = {"bits": {}, "ms": {}, "host_ms": {}, "kernels_us": {}, "notes": []}


def say(*words):
    if RANK == 0:
        print(f"[{time.time() - START:6.1f}]", *words, flush=True)
        with open(OUT, "w") as file:
            json.dump(RESULT, file, indent=1)


def digest(tensor):
    return hashlib.sha256(tensor.detach().cpu().numpy().tobytes()).hexdigest()[:16]


def gathered(value):
    found = [None] * WORLD
    dist.all_gather_object(found, value)
    return found


def check_bits():
    from penstock.codecs.wire import wire_codec
    from penstock.runtime import Communicator
    from penstock.runtime.cuda.messages import device_messages
    from penstock.runtime.transport.c10d import C10dTransport

    gloo = dist.new_group(backend="gloo")
    messages = device_messages(dist.group.WORLD, 120.0)
    assert messages is not None
    cases = [(c, s) for c in ("onebit", "terngrad") for s in ("parameter_server", "ring", "all_gather", "hierarchical(ranks_per_node=2)")]
    cases += [("fp8", "parameter_server"), ("bf16", "ring"), ("tbq", "all_gather")]
    parts = [0, 700, 700, 300_000, 3_000_017, 3_000_117]
    for spec, strategy in cases:
        results = []
        for by_host in (True, False):
            communicator = Communicator(C10dTransport(gloo), timeout_seconds=60, messages=messages)
            codec = wire_codec(spec, seed=RANK)
            data, residual, found = torch.empty(parts[-1], device=DEVICE), torch.zeros(parts[-1], device=DEVICE), []
            for step in range(3):
                data.copy_(torch.randn(parts[-1], generator=torch.Generator().manual_seed(100 * step + RANK)))
                communicator.all_reduce(data, strategy=strategy, codec=codec, residual=residual, parts=parts, scale=0.25, by_host=by_host)
                found.append(digest(data))
            results.append((found, digest(residual)))
        everyone = gathered(results)
        same_routes = all(host == queued for host, queued in everyone)
        same_ranks = all(one[1][0] == everyone[0][1][0] for one in everyone)
        RESULT["bits"][f"{spec} {strategy}"] = [same_routes, same_ranks]
        say("bits", spec, strategy, "routes equal" if same_routes else "ROUTES DIFFER", "ranks equal" if same_ranks else "RANKS DIFFER")
    # What is not finite is NaN on every rank, and heard of one call later.
    communicator = Communicator(C10dTransport(gloo), timeout_seconds=60, messages=messages)
    codec = wire_codec("onebit", seed=RANK)
    data = torch.ones(parts[-1], device=DEVICE)
    if RANK == 2:
        data[500_000] = float("nan")
    communicator.all_reduce(data, strategy="parameter_server", codec=codec, parts=parts)
    spoilt = [bool(data[500_000].isnan()), bool(data[:300_000].isfinite().all())]
    data.fill_(1.0)
    try:
        communicator.all_reduce(data, strategy="parameter_server", codec=codec, parts=parts)
        heard = "nothing"
    except Exception as error:
        heard = f"{type(error).__name__}: {error}"
    RESULT["notes"].append(("nan", gathered((spoilt, heard))))
    say("nan", RESULT["notes"][-1])


def make_model(name):
    torch.manual_seed(0)
    if name == "resnet":
        from penstock.zoo.resnet import ResNet

        model = ResNet((3, 4, 6, 3)).to(DEVICE)
        inputs, targets = torch.randn(64, 3, 128, 128, device=DEVICE), torch.randint(0, 1000, (64,), device=DEVICE)
        loss = lambda out: nn.functional.cross_entropy(out, targets)
    else:
        from penstock.zoo.gpt import GPT

        model = GPT(50257, 1024, width=768, depth=12, heads=12, dropout=0.1).to(DEVICE)
        inputs = torch.randint(0, 50257, (8, 257), device=DEVICE)
        targets, inputs = inputs[:, 1:].contiguous(), inputs[:, :-1].contiguous()
        loss = lambda out: nn.functional.cross_entropy(out.flatten(0, 1), targets.flatten())
    return model, inputs, loss


class Timed:
    """A hook, and how long the host is in it."""

    def __init__(self, hook):
        self.inner, self.seconds = hook, 0.0

    def hook(self, state, bucket):
        start = time.perf_counter()
        future = self.inner(state, bucket)
        self.seconds += time.perf_counter() - start
        return future


def noop(state, bucket):
    future = torch.futures.Future(devices=[DEVICE])
    future.set_result(bucket.buffer())
    return future


def ours(ddp, strategy="parameter_server", codec="onebit", host=False, ctas=None, module=None):
    from penstock.runtime.cuda import messages as m
    from penstock.torch import comm_hook

    if ctas is not None:
        if ctas not in GROUPS:
            m._OWN.clear()
            m.MOST_BLOCKS = ctas
            m.device_messages(dist.group.WORLD, 120.0)
            GROUPS[ctas] = m._OWN[dist.group.WORLD]
        m._OWN[dist.group.WORLD] = GROUPS[ctas]
    sender, hook = comm_hook(strategy, codec=codec)
    if host:
        sender._communicator.messages = None
    return sender, hook


GROUPS = {}


def methods(name):
    import plain_gpu_hook
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

    def power(ddp):
        return powersgd.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2), powersgd.powerSGD_hook

    found = {
        "none": None,
        "ddp, nothing sent": lambda ddp: (None, noop),
        "stock": "stock",
        "powersgd 4": power,
        "plain hook": lambda ddp: (plain_gpu_hook.State(), plain_gpu_hook.hook_a2a),
        "onebit by host": partial(ours, host=True),
        "onebit queued, 1 cta": partial(ours, ctas=1),
        "onebit queued, 4 ctas": partial(ours, ctas=4),
        "onebit queued, 16 ctas": partial(ours, ctas=16),
        "onebit queued, all_gather": partial(ours, ctas=4, strategy="all_gather"),
    }
    return found


class Runner:
    def __init__(self, name, method):
        self.model, self.inputs, self.loss = make_model(name)
        self.timed = None
        self.wrapped = self.model if method is None else TorchDDP(self.model, device_ids=[0])
        if callable(method):
            state, hook = method(self.wrapped)
            self.timed = Timed(hook)
            self.wrapped.register_comm_hook(state, self.timed.hook)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        self.loss(self.wrapped(self.inputs)).backward()
        self.optimizer.step()

    def time(self, iterations):
        self.step()
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        if self.timed:
            self.timed.seconds = 0.0
        start = time.perf_counter()
        for _ in range(iterations):
            self.step()
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / iterations
        self.optimizer.zero_grad(set_to_none=True)
        host = self.timed.seconds / iterations if self.timed else 0.0
        return max(gathered(seconds)) * 1e3, host * 1e3


def times(name, iterations, limit):
    begun, runners, rows = time.time(), {}, {}
    for method, how in methods(name).items():
        try:
            runners[method] = Runner(name, how)
            for _ in range(4):
                runners[method].step()
            torch.cuda.synchronize()
            say(name, method, "ready")
        except Exception:
            traceback.print_exc()
            RESULT["notes"].append((name, method, traceback.format_exc()[-500:]))
            raise
    for round_ in range(3):
        for method, runner in runners.items():
            count = max(3, iterations // 4) if method == "stock" else iterations
            ms, host = runner.time(count)
            rows.setdefault(method, []).append(round(ms, 2))
            RESULT["host_ms"].setdefault(name, {})[method] = round(host, 3)
        RESULT["ms"][name] = rows
        say(name, "round", round_, {m: v[-1] for m, v in rows.items()})
        enough = [time.time() - begun > limit] if RANK == 0 else [None]
        dist.broadcast_object_list(enough)
        if enough[0]:
            break
    for method, runner in runners.items():
        if "onebit" in method:
            same = len(set(gathered(digest(torch.cat([p.detach().flatten() for p in runner.model.parameters()]))))) == 1
            RESULT["notes"].append((name, method, "weights equal on all ranks" if same else "WEIGHTS DIFFER"))
    say(name, "host ms in the hook", RESULT["host_ms"][name])
    say("peak memory GB", torch.cuda.max_memory_allocated() / 1e9)
    runners.clear()
    torch.cuda.empty_cache()
    dist.barrier()


def wrapper(name, iterations):
    """Time the wrapper itself, which profiles, measures and plans first."""
    from penstock.torch import DistributedDataParallel

    model, inputs, loss = make_model(name)
    wrapped = DistributedDataParallel(model, device_ids=[0], codec="onebit")
    optimizer, begun = torch.optim.SGD(model.parameters(), lr=1e-4), time.time()

    def steps(count):
        for _ in range(count):
            optimizer.zero_grad(set_to_none=True)
            loss(wrapped(inputs)).backward()
            optimizer.step()
        torch.cuda.synchronize()

    for _ in range(8):
        steps(5)
    say(name, "wrapper ready after", round(time.time() - begun, 1))
    found = []
    for _ in range(3):
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        steps(iterations)
        found.append(round(max(gathered((time.perf_counter() - start) / iterations)) * 1e3, 2))
    RESULT["ms"].setdefault(name, {})["wrapper onebit"] = found
    RESULT["notes"].append((name, "wrapper", wrapped.explain()))
    say(name, "wrapper", found)
    if RANK == 0:
        print(wrapped.explain(), flush=True)
    same = len(set(gathered(digest(torch.cat([p.detach().flatten() for p in model.parameters()]))))) == 1
    RESULT["notes"].append((name, "wrapper", "weights equal on all ranks" if same else "WEIGHTS DIFFER"))
    torch.cuda.empty_cache()


def kernels():
    """Time our kernels on a bucket of 6.5M values as ResNet-50 has them; rank 0 alone."""
    if RANK == 0:
        from penstock.codecs.wire import wire_codec
        from penstock.strategies.batches import make_batches

        for spec in ("onebit", "terngrad", "fp8"):
            codec = wire_codec(spec)
            form = codec.on_device(DEVICE)
            sizes = [64, 64, 36864, 16384, 256, 1024, 262144, 589824, 1048576, 2359296, 2048, 2048000, 1000] * 1
            bounds = [0]
            for size in sizes:
                bounds.append(bounds[-1] + size)
            pieces = sorted(p for b in make_batches(bounds, 4, None, 1 << 30).pieces for p in b)
            places, at = [], 0
            for start, stop in pieces:
                places.append(at)
                at += -(-codec.max_nbytes(stop - start) // 16) * 16
            memory = torch.zeros(at, dtype=torch.uint8, device=DEVICE)
            bucket, residual = torch.randn(bounds[-1], device=DEVICE), torch.zeros(bounds[-1], device=DEVICE)
            encode = form.queued_encoder(bucket, residual, memory, pieces, places, range(len(pieces)))
            decode = form.queued_decoder(bucket, memory, pieces, [places], False)
            add = form.queued_decoder(bucket, memory, pieces, [places] * 3, True)
            found = {"elements": bounds[-1], "pieces": len(pieces)}
            for label, work in (("encode", encode), ("decode", decode), ("add 3", add), ("mul", lambda: bucket.mul_(0.999))):
                for _ in range(3):
                    work()
                torch.cuda.synchronize()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                host = time.perf_counter()
                begin.record()
                for _ in range(50):
                    work()
                end.record()
                host = (time.perf_counter() - host) / 50
                torch.cuda.synchronize()
                found[label] = [round(begin.elapsed_time(end) * 20, 1), round(host * 1e6, 1)]  # us: device, host
            RESULT["kernels_us"][spec] = found
            say("kernels", spec, found)
    dist.barrier()


def main():
    dist.init_process_group("nccl")
    dist.all_reduce(torch.zeros(1, device=DEVICE))
    say("connected")
    if "nobits" not in WANTED:
        check_bits()
    kernels()
    if "resnet" in WANTED:
        times("resnet", 20, 100)
    if "gpt" in WANTED:
        times("gpt", 8, 110)
    if "wrapper" in WANTED:
        for name, count in (("resnet", 20), ("gpt", 8)):
            if name in WANTED:
                wrapper(name, count)
    say("done")
    dist.barrier()
    os._exit(0)


try:
    main()
except BaseException:
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)
