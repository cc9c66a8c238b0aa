"""What the page of benchmarks says about each benchmark: its title, its question, and who competes with whom."""

from dataclasses import dataclass

from page_tables import Choice, Rivalry

_SIMULATED = (
    "`simulated` uses the network as measured in the same run (`native`: the line of gloo's all-reduce; `ring`: the "
    "closed form from alpha, beta and gamma); `error` is how far it is off what was measured."
)


@dataclass(frozen=True, slots=True)
class Section:
    """One benchmark on the page."""

    title: str
    text: str  # beside all rows: every column explained
    rivalry: Rivalry | None = None
    hidden: tuple[str, ...] = ()  # fields that stay in the JSON
    shares: tuple[str, ...] = ()  # fields that are shown in percent
    brief: str = ""  # on the page: the question, and what to see; "": `text`
    columns: tuple[str, ...] = ()  # fields that the page shows; none: all


def begins(*words: str) -> Choice:
    """Return what picks the names that begin with one of the words."""
    return lambda name: name.startswith(words)


def equals(*words: str) -> Choice:
    """Return what picks these names."""
    return lambda name: name in words


def other(choice: Choice) -> Choice:
    """Return what picks all other names."""
    return lambda name: not choice(name)


def replayed(ours: Choice, peer: Choice, *further: str) -> Rivalry:
    """Return the rivalry of replayed iterations, told apart by `how`; `further` fields must agree too."""
    return Rivalry(("hosts", "rate", "what", *further), "how", ours, peer, "measured_seconds")


SECTIONS: dict[str, Section] = {
    "demo": Section(
        "The demo",
        "What `make demo` shows: a small GPT on text, AdamW, four emulated hosts, by stock DDP and as recommended. "
        "`metric` is held-out bits per character at the end, `loses` what is worse than with stock DDP, ties aside.",
        brief="A small GPT, AdamW, four emulated hosts at 500 Mb/s: what `make demo` shows.",
        columns=("method", "metric", "iteration_seconds", "bytes_sent", "speedup", "loses"),
    ),
    "train": Section(
        "Training",
        "Real iterations on emulated hosts: forward, backward with communication, the optimizer's step; from the "
        "last rank's end to the last rank's next end. All methods of one table take turns in one process group, "
        "those that crash excepted. "
        "`no-communication` is the bare module on every rank, `exposed` what a method takes longer than it, `bytes "
        "sent` what the busiest host sends in an iteration, headers included. `ddp` is torch's "
        "DistributedDataParallel as it comes, `ddp-N` the same with `bucket_cap_mb=N`, `ddp-fp16` and the like its "
        "communication hooks. `penstock-NAME` is our wrapper with that planner, which also chooses the all-reduce of "
        "each bucket (`strategies`); with `-native` it is the engine's own. `penstock-bsp-split` is an all-reduce of "
        "which half travels during the next forward pass. `predicted` is the plan's own iteration, which does not "
        "count the optimizer's step. On CPUs ranks have glibc keep the memory of gradients from one iteration to the "
        "next; in records made before 21:30 on 2026-11-19 it kept it or not by where gradients happened to lie, and "
        "without it the bare module alone makes 22,000 pages anew in each iteration of VGG-16, a fifth of its time.",
        Rivalry(("hosts", "rate", "model"), "method", begins("penstock"), begins("ddp"), "iteration_seconds"),
        brief="Real iterations on emulated hosts, `exposed` is what it takes longer than computing.",
        columns=("method", "iteration_seconds", "exposed_seconds", "bytes_sent", "ratio_to_ddp"),
    ),
    "memory": Section(
        "Memory",
        "The most memory that a rank's process held (the kernel's VmHWM), the interpreter and all libraries included. "
        "Fresh processes for every run: `ddp-views`, torch's wrapper with `gradient_as_bucket_view=True`, runs without "
        "our wrapper imported. A run covers all phases: profiling, measuring the network, planning, the switch of "
        "buckets, and iterations after it. `ratio range` is over pairs of runs that followed one another. `ratio less "
        "imports` leaves out what a process held before the model was made (`imports`: ours and torch's alike).",
        brief="The most memory that a rank's process held, from profiling to planned iterations.",
        columns=("method", "peak_nbytes", "ratio_to_views", "ratio_less_imports"),
    ),
    "replay": Section(
        "Planners on a real network",
        "Replayed iterations: communication is real (gloo, emulated hosts), computation is waiting for as long as the "
        f"trace says. {_SIMULATED} VGG-16 is left out: its 553 MB take 7 s an iteration at 1 Gb/s.",
        replayed(equals("exact"), other(equals("exact"))),
        brief="Communication is real, computation is waiting for as long as a trace of an H200 says.",
        columns=("what", "measured_seconds", "simulated_seconds", "error"),
    ),
    "gains": Section(
        "What exact plans gain",
        "Replayed settings in which exact merging is predicted to gain: `threshold` is stock DDP's fixed buckets (1 "
        "MiB first, then 25 MiB), `greedy` MG-WFBP's Algorithm 1 as published. Computation waits as long as it took on "
        "a CPU (`benchmarks/traces`), communication is real; `latency` is added to every message "
        "of a long link, and to the engine's all-reduce as often as messages must follow one another at least. "
        "`predicted gain` and `measured gain` are the plan's time over exact's. Settings were chosen in simulation.",
        replayed(equals("exact"), other(equals("exact")), "latency_seconds"),
        brief="Settings, chosen in simulation, in which merging should pay: slow computation, or links with long "
        "startups.",
        columns=("hosts", "rate", "latency_seconds", "what", "messages", "measured_seconds", "measured_gain"),
    ),
    "casync": Section(
        "Compression, step by step",
        "HiPress's Fig. 11 as our own table: replayed iterations on emulated hosts, communication and compression "
        "real, computation waiting as long as the trace says. `stock` is DDP's buckets by gloo's all-reduce. `+ codec` "
        "sends every tensor compressed, one after the other (in newer records a rank computes nothing while it "
        "sends); `+ pipelining` has four under way, so that one is encoded while another travels; `+ bulk` sends those "
        "in a row as one message where the plan says that it pays; `+ selective` is `joint`: buckets, and whether and "
        "how to compress each, chosen together. `compressed share` is of the bytes. `wire floor` is what the bytes "
        "take on the wire, `core floor` what the ranks' processes took of the cores: all ranks share this machine's, "
        "so encoding is slower here than on as many hosts. Where `slower` is N, links were N times as slow, "
        "computation waited for N times as long, and times are divided by N: against its links the core that each of 4 "
        "hosts has on two cores is then N / 2 times as fast as one of this machine, of 8 hosts N / 4 times. A target "
        "is met by a step that gains for certain, turn by turn or, in records without turns, by more than the spread; "
        "rows that agree in every figure are one measurement, of one plan.",
        hidden=("turns_seconds",),
        shares=("compressed_share",),
        brief="HiPress's Fig. 11 as our own table: each row adds one step to the row before.",
        columns=("how", "messages", "measured_seconds", "spread", "times_as_fast_as_before", "times_as_fast"),
    ),
    "joint": Section(
        "All choices at once, simulated",
        "`joint` beside the best of twenty hand-made configurations: each tensor by itself, one message, buckets of 5, "
        "25 (stock) and 100 MiB, each by a dense ring, a ring with either codec, and parameter servers. Codec curves "
        "are measured on this machine, computation is an H200's, networks are published ones.",
        hidden=("compute_seconds",),
        brief="`joint` beside the best of twenty configurations made by hand, simulated on published networks.",
        columns=(
            "network",
            "workers",
            "trace",
            "best_hand_made",
            "best_hand_made_seconds",
            "joint_seconds",
            "joint_over_best",
        ),
    ),
    "joint_replayed": Section(
        "All choices at once, replayed",
        "The same on emulated hosts, with the lines of all routes measured first: `joint`, and the hand-made "
        "configurations that were predicted to be fastest.",
        replayed(equals("joint"), other(equals("joint"))),
        hidden=("turns_seconds",),
        shares=("compressed_share",),
        brief="The same on emulated hosts, beside the hand-made configurations that were predicted to be fastest.",
        columns=("what", "measured_seconds", "simulated_seconds", "error", "times_as_fast"),
    ),
    "interpreter_share": Section(
        "What Python costs",
        "Real training with our wrapper while lanes walk their programs in Python: calls a second, and for each "
        "iteration of a rank the processor time of kernels and of the engine's compiled calls, which run without the "
        "interpreter's lock, and of the walk, which is all else that lanes' threads do, calling kernels included "
        "(`dispatch`, timed with kernels that do nothing): the most that they have held the lock for. Each thread's "
        "own clock is read; figures are medians of three parts. `share` is the walk of all ranks, of all cores. With "
        "`wfbp` each tensor is a message: nothing is claimed of these rows, which show what plans and bulks save.",
        shares=("share", "share_spread"),
        brief="How much of all cores (`share`) lanes take at most while they hold the interpreter's lock, in real "
        "training. `wfbp` sends a message for each tensor, to show what plans and bulks save.",
        columns=("model", "planner", "messages", "iteration_seconds", "calls_per_second", "walk_seconds", "share"),
    ),
    "coordinator": Section(
        "Bulk communication",
        "A model's gradients, one bit an element, each tensor in one piece per host, on their way to the aggregators "
        "while the backward pass makes them ready. `at will`: every message is sent as soon as it is ready. `bulks`: "
        "what training does, those in a row as one message, planned once. `online`: "
        "rank 0 hears what is ready, batches it and tells who sends to whom, no two links meeting. `steady`: the same "
        "decisions, made once and replayed without a coordinator.",
        replayed(equals("bulks", "online", "steady"), equals("at will")),
        brief="ResNet-50's gradients, one bit an element, to their aggregators. `at will` sends each message when "
        "it is ready, `bulks` is what training does, `online` asks a coordinator, `steady` repeats its decisions.",
        columns=("hosts", "how", "measured_seconds", "spread"),
    ),
    "scaling": Section(
        "More hosts",
        f"One all-reduce and one replayed trace on 2 to 16 emulated hosts of this machine. {_SIMULATED} `floor` is "
        "what the wire alone would take.",
        replayed(equals("ring", "exact"), equals("native", "wfbp", "threshold")),
        brief="One all-reduce of 16 MB and one replayed trace, on 2 to 16 hosts of this machine.",
        columns=("hosts", "what", "how", "measured_seconds", "error"),
    ),
    "rates": Section(
        "Slower and faster links",
        f"The same on 4 hosts, from 100 Mb/s to links without a limit. {_SIMULATED}",
        replayed(equals("ring", "exact"), equals("native", "wfbp", "threshold")),
        brief="The same on 4 hosts, from 100 Mb/s to links without a limit.",
        columns=("rate", "what", "how", "measured_seconds", "error"),
    ),
    "collectives": Section(
        "Collectives",
        "Our programs beside the engines' own (`native`), taking turns on the same emulated hosts. `floor` is what "
        "the wire alone would take, `predicted` the simulator's time on the network as measured in the same run.",
        Rivalry(
            ("hosts", "rate", "engine", "operation", "nbytes"),
            "implementation",
            begins("penstock"),
            other(begins("penstock")),
        ),
        hidden=("alpha_seconds", "beta_seconds_per_byte", "gamma_seconds_per_byte", "samples"),
        brief="Our programs beside the engines' own, in turn; `floor` is what the wire alone would take.",
        columns=("engine", "operation", "strategy", "nbytes", "seconds", "floor_seconds"),
    ),
    "sparse": Section(
        "Sparse all-reduce",
        "Blocks of the largest entries of a 25M-parameter gradient, 8 bytes per entry, exchanged by all-gather "
        "(`topk_allgather`), by tree and broadcast (`gtopk`) and at doubling distances (`gtopk_doubling`); `ring` is "
        "the dense gradient. What is timed is the exchange, messages and merges: selecting from the gradient and "
        "writing the result into it is work of each host's own processor (the record's `local` has it). Merges are "
        "`computed`, on the cores that all hosts share, or `waited` for as long as one takes on a core of its own. "
        "`predicted` adds up the program's steps, each as long as so many messages and merges at once took in the same "
        "run, since emulated hosts share processors; `error` is how far it is off. `alpha beta` is the simulator's "
        "time for hosts that share nothing, with alpha, beta and a merge as measured; `floor` the bytes that stand one "
        "after the other at the NIC's rate. (Records without these columns have the simulator's as `predicted`.)",
        Rivalry(
            ("hosts", "rate", "engine", "density", "merges"), "strategy", begins("gtopk"), equals("topk_allgather")
        ),
        hidden=("alpha_seconds", "beta_seconds_per_byte", "gamma_seconds_per_byte", "latency_seconds", "rounds"),
        brief="Blocks of the largest entries of 25 million, exchanged by all-gather, by tree (`gtopk`) and at "
        "doubling distances; `ring` is the dense gradient.",
        columns=("engine", "density", "strategy", "merges", "seconds", "error"),
    ),
    "gtop-k": Section(
        "gTop-k's Table VII",
        "Iterations as the paper runs them, computing, compressing and communicating one after the other, density "
        "0.001. Communication is real; computing and compressing is waiting as long as the paper's GPU took. The paper "
        "has 32 hosts with a processor each; here all of them share one machine. `penstock reproduce gtop-k --record` "
        "compares.",
        Rivalry(("hosts", "rate", "model"), "method", begins("gtopk"), other(begins("gtopk"))),
        hidden=("alpha_seconds", "beta_seconds_per_byte", "gamma_seconds_per_byte"),
        brief="The paper's iterations at density 0.001; communication is real, computing is waiting as long as the "
        "paper's GPU took.",
        columns=("model", "method", "seconds", "spread"),
    ),
    "codecs": Section(
        "Compressors",
        "Encoding and decoding gradients: generated kernels beside the same in torch, eager and compiled, and "
        "beside copying the gradient. `moved` are the bytes that an operation cannot avoid to read and write, `floor` "
        "their time at the bandwidth of the copy. One-pass operations (tbq, every decode) are at that floor on a GPU, "
        "and so is `torch.compile`: there is nothing left to be faster by. On a CPU a kernel may pass it, where a copy "
        "does not reach the memory's bandwidth or finds the gradient in the cache.",
        Rivalry(
            ("device", "codec", "operation", "nbytes"), "implementation", begins("penstock"), other(begins("penstock"))
        ),
        shares=("spread",),
        brief="Encoding and decoding 64 MB on one core, beside the same in torch, eager and compiled.",
        columns=("codec", "operation", "seconds", "copy_seconds", "floor_seconds"),
    ),
    "planners": Section(
        "Planning",
        "How long planning takes on one core; random traces with a fixed seed.",
        Rivalry(("tensors",), "planner", begins("exact"), begins("greedy")),
        brief="How long planning takes on one core.",
        columns=("planner", "tensors", "seconds"),
    ),
    "overlap": Section(
        "Compression on a GPU",
        "Training steps on one GPU, by the build of 15 November 2026, in which a single worker compressed too and "
        "buckets went through a thread of the host: forward, backward, update; methods take turns. `slowdown` is "
        "against "
        "`no-communication`, the bare model; `ddp` is torch's own wrapper, `penstock` ours without a codec. Two "
        "workers share the GPU over gloo and take turns on it. `codec seconds` is what kernels "
        "beside the model's run in a step, `hidden` the part of that during which one of the model's ran "
        "too, from torch's profiler.",
        hidden=("all_seconds", "kinds", "model_seconds"),
        shares=("slowdown", "against_ddp", "hidden"),
        brief="Training steps on one GPU, by the build of 15 November 2026 (commit b677cbc), in which a single worker "
        "compressed too and buckets went through a thread of the host. Neither is so any more: these rows say what "
        "kernels cost, not what one worker pays today ([above](#gpu-ranks)). `slowdown` is against the bare model.",
        columns=("batch", "method", "iteration_seconds", "slowdown", "against_ddp"),
    ),
    "profile": Section(
        "Profiling",
        "What the profiler's hooks cost: iterations with and without them, in turn.",
        brief="What the profiler's hooks cost: iterations with and without them, in turn.",
        columns=("model", "batch", "iteration_seconds", "profiled_iteration_seconds", "overhead"),
    ),
    "links": Section(
        "Emulated links",
        "What emulated links deliver, beside what was asked of them.",
        brief="What emulated links deliver, beside what was asked of them.",
        columns=("rate", "pairs", "median_bits_per_second", "worst_deviation", "latency_seconds"),
    ),
    "frameworks": Section(
        "TensorFlow and JAX",
        "An iteration of a small network of 11.9 million parameters in each framework. `none` only computes; `own` is "
        "the framework's own data parallelism (TensorFlow's MultiWorkerMirroredStrategy, JAX's `pmean`); `dense` and "
        "`onebit` are ours. In the same processes and in turns with them: `bare-` is the same exchange alone; `apart-` "
        "computes, then exchanges as many values from memory of the exchange's own, then applies; `hand-` copies the "
        "gradients there and applies them from there. `routes` is how gradients travelled, `sent nbytes` what a rank "
        "put on the wire in an iteration.",
        hidden=("samples",),
        brief="A small network of 11.9 million parameters in each framework: computing alone (`none`), the framework's "
        "own data parallelism (`own`), ours, and our exchange without the framework (`bare`).",
        columns=("framework", "method", "iteration_seconds", "spread_seconds", "sent_nbytes"),
    ),
    "fsdp-time": Section(
        "Sharded training",
        "Iterations of a GPT of 32 million parameters, sharded over two ranks of each host and replicated over two "
        "hosts, on processors. `no traffic between hosts` is torch's FSDP inside each host, and ours the same by "
        "`fully_shard_with`, which exchanges shards directly over gloo; `torch's HSDP` is torch's own. Milliseconds; "
        "`best` is the shortest iteration.",
        hidden=("ms_per_iteration",),
        brief="A GPT of 32 million parameters, sharded over two ranks of each host and replicated over two hosts, on "
        "processors; milliseconds per iteration.",
        columns=("method", "median_ms", "best_ms"),
    ),
    "fsdp-across": Section(
        "Shards between slow hosts",
        "The same GPT on two hosts of one rank each. Shards on two hosts: all-gathers of weights and reduce-scatters "
        "of gradients cross the slow link, as torch sends them, or by `shard_codec`. A replica on each host: ours, "
        "where a host holds all weights. Older records name the rows `torch's FSDP`, the same with `messages` (by a "
        "codec of ours), and `ours`.",
        hidden=("ms_per_iteration",),
        brief="A GPT of 32 million parameters sharded over two hosts, on processors; milliseconds per iteration.",
        columns=("method", "median_ms", "best_ms"),
    ),
}


def section_of(benchmark: str) -> Section:
    """Return what is said about a benchmark; of those not in the table, only what their rows say."""
    return SECTIONS.get(benchmark, Section(benchmark.replace("_", " ").replace("-", " ").capitalize(), ""))


def position(benchmark: str) -> int:
    """Return where a benchmark stands on the page; those not in the table come last."""
    names = list(SECTIONS)
    return names.index(benchmark) if benchmark in names else len(names)
