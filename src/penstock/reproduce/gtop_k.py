"""gTop-k S-SGD (Shi et al.): Tables I and VII, Fig. 8 to 11; what its convergence figures would need."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from penstock.cost.clusters import CLUSTERS
from penstock.cost.papers import dense, gtop_k, top_k
from penstock.network import Network
from penstock.program import Program
from penstock.reproduce.claim import (
    Claim,
    check_number,
    check_printed,
    check_statement,
    compare_measured,
    compare_own,
    measured_rows,
    not_here,
    quotient,
    rounded,
)
from penstock.simulator.program import CodecCost, program_seconds
from penstock.strategies import build, build_compressed

NETWORK = CLUSTERS["gtop-k-1gbe"]
WORKERS = 32
FEW_WORKERS = 4
DENSITY = 0.001
_ALPHA_MS, _BETA_MS_PER_BYTE = 0.436, 9e-6  # section IV-C, in the paper's units
_CONVERGENCE = "curves without printed numbers; "


@dataclass(frozen=True, slots=True)
class Model:
    """A row of Tables V to VII, and of Fig. 11, which prints no numbers: those are typed into its plot script."""

    name: str
    parameters: int  # of the architecture; the paper gives none
    batch: int
    compute: str  # Table VI: seconds
    images: str  # Table VI: a second, by one GPU
    compress_seconds: float  # Fig. 11
    commu_seconds: float  # Fig. 11
    throughputs: tuple[str, str, str]  # Table VII, dense, top-k, gTop-k: images per second, all workers together
    over_dense: str  # Table VII, g/d
    over_top_k: str  # Table VII, g/t
    plotted: tuple[str, str, str]  # Fig. 10's plot script: the same throughputs, of one worker

    @property
    def compute_seconds(self) -> float:
        """Of an iteration."""
        return float(self.compute)


MODELS = (
    Model("VGG-16", 14_728_266, 128, "0.097", "1317", 0.091353, 0.811753, ("403", "2016", "3020"), "7.5x", "1.5x",
          ("12.6", "63.002", "123.2")),
    Model("ResNet-20", 269_722, 128, "0.146", "876", 0.001618, 0.024686, ("9212", "22272", "25280"), "2.7x",
          "1.1x", ("287.9", "696.029", "789.3")),
    Model("AlexNet", 61_100_840, 64, "0.369", "173", 0.383776, 3.36298, ("39", "296", "505"), "12.8x", "1.7x",
          ("1.234", "9.236", "15.777")),
    Model("ResNet-50", 25_557_032, 256, "4.842", "52", 0.15405, 1.424253, ("343", "978", "1251"), "3.65x",
          "1.3x", ("10.721", "30.583", "39.119")),
)  # fmt: skip

FIG_10 = {  # its plot script: images/s of one worker, dense, top-k and gTop-k, in the order of MODELS, by workers
    4: ((104.2, 110.576, 131.06), (821.7, 908.837, 916.26), (14.01, 14.238, 16.536), (39.002, 37.729, 39.795)),
    8: ((92.56, 109.9, 130.551), (705.2, 752.985, 868.73), (12.118, 13.865, 16.446), (36.989, 35.703, 39.713)),
    16: ((39.48, 97.865, 126.434), (520.4, 737.594, 808.5), (4.936, 13.352, 16.359), (23.176, 34.495, 39.06)),
}


def claims(record: Mapping[str, Any] | None = None) -> list[Claim]:
    """Return every claim; `record` is one of `benchmarks/gtop_k.py`, instead of the one that is shipped."""
    return [
        *_table_1(),
        not_here("fig-5", "Fig. 5, VGG-16 and ResNet-20 on CIFAR-10", _CONVERGENCE + "140 epochs on 4 GPUs"),
        not_here("fig-6", "Fig. 6, AlexNet and ResNet-50 on ImageNet", _CONVERGENCE + "ImageNet is not here"),
        not_here("fig-7", "Fig. 7, LSTM on PTB, density 0.005", _CONVERGENCE + "40 epochs; an LSTM on PTB at density "
                 "0.01: docs/choosing-a-codec.md"),
        _figure_8(),
        *_figure_9(),
        *_figure_10(),
        _figure_11(),
        not_here("fig-12", "Fig. 12, densities 0.0005 to 0.005", _CONVERGENCE + "140 epochs on 4 GPUs"),
        *_table_7(),
        *_own(),
        *_sparse(),
        *_replayed(record),
    ]  # fmt: skip


def _table_1() -> list[Claim]:
    """Set the three printed formulas, in the paper's units, beside simulated programs: 100 MB, 32 workers."""
    nbytes, log = 100_000_000, 5
    elements = DENSITY * nbytes / 4
    printed = {
        "ring": 2 * 31 * _ALPHA_MS + 2 * 31 / 32 * nbytes * _BETA_MS_PER_BYTE,
        "topk_allgather": log * _ALPHA_MS + 2 * 31 * elements * 4 * _BETA_MS_PER_BYTE,
        "gtopk": 2 * log * _ALPHA_MS + 4 * elements * log * 4 * _BETA_MS_PER_BYTE,
    }
    why = "ours sends each of the others a block, P-1 messages; those of the formula carry several, in log P startups"
    return [
        check_number(f"table-1/{name}", f"Table I, {name}, 100 MB, 32 workers (ms)", ms, 1e3 * seconds(name, nbytes),
                     "simulated program", why)
        for name, ms in printed.items()
    ]  # fmt: skip


def seconds(strategy: str, nbytes: int, workers: int = WORKERS) -> float:
    """Return what a program takes on the paper's network; selecting and merging cost nothing, as in its model."""
    program = _program(strategy, workers)
    return program_seconds(program, NETWORK, nbytes / program.numel, CodecCost(ratio=2 * DENSITY))


@cache
def _program(strategy: str, workers: int) -> Program:
    """Return a program of elements as long as the simulator is told; a ring's chunk is one, as in the formula."""
    if strategy == "ring":
        return build("all_reduce", strategy, workers, workers)
    return build_compressed(strategy, workers, (0, 1))[0]


def _figure_8() -> Claim:
    """Alpha and beta of a message are the paper's machines'; ours stand beside them."""
    ours = [1e9 * row["beta_seconds_per_byte"] for _, row in measured_rows("collectives")]
    why = (
        "those machines; taken as published. Our emulated links of 1 Gb/s have beta "
        f"{min(ours):.1f} to {max(ours):.1f} ns/B, it has 9"
    )
    return not_here("fig-8", "Fig. 8, alpha and beta of its 1 GbE", why, "0.436 ms, 9e-6 ms per byte")


def _figure_9() -> list[Claim]:
    """TopKAllReduce is faster on few workers, gTopKAllReduce on many and for large messages (density 0.001)."""
    few, many = (
        [1e3 * seconds(name, 100_000_000, p) for name in ("topk_allgather", "gtopk")] for p in (FEW_WORKERS, WORKERS)
    )
    gains = [
        1e3 * (seconds("topk_allgather", nbytes) - seconds("gtopk", nbytes)) for nbytes in (10**7, 10**8, 10**9)
    ]  # fmt: skip
    how, words = "simulated programs", "{:.1f} and {:.1f} ms"
    return [
        check_statement("fig-9/few", "Fig. 9 left: top-k faster than gTop-k on 4 workers, 100 MB", few[0] < few[1], how,
                        words.format(*few), "it is not"),
        check_statement("fig-9/many", "Fig. 9 left: gTop-k faster on 32 workers, 100 MB", many[0] > many[1], how,
                        words.format(*many), "it is not"),
        check_statement("fig-9/sizes", "Fig. 9 right: gTop-k gains more the larger the message, 32 workers",
                        gains[0] < gains[1] < gains[2], how,
                        "{:.1f}, {:.1f} and {:.1f} ms of 10 MB to 1 GB".format(*gains), "it does not"),
    ]  # fmt: skip


def _figure_10() -> Iterator[Claim]:
    """Compare gTop-k with the other two on 4, 8 and 16 workers as Table VII does on 32."""
    why = "curves without printed numbers; those of 32 GPUs in its plot script are compared with Table VII"
    yield not_here("fig-10", "Fig. 10, efficiencies on 4 to 32 GPUs", why)
    for workers, speeds in FIG_10.items():
        took = [_times_formula(speeds, place, workers) for place in range(3)]
        for place, (other, name) in enumerate((("ring", "dense"), ("topk_allgather", "top-k"))):
            texts = [f"{each[2] / each[place]:.2f}x" for each in speeds]
            ours = [
                iteration_seconds(model, other, workers) / iteration_seconds(model, "gtopk", workers)
                for model in MODELS
            ]
            what = f"Fig. 10, {workers} workers, gTop-k over {name}: VGG-16, ResNet-20, AlexNet, ResNet-50"
            why = f"its iterations took there {took[place]} ({name}) and {took[2]} times (gTop-k) what programs take"
            source = "quotients of its plot script"
            yield check_printed(f"fig-10/{workers}/{other}", what, texts, ours, "simulated programs", why, source)


def _times_formula(speeds: Sequence[tuple[float, float, float]], place: int, workers: int) -> str:
    """Return how many times as long as simulated the iterations behind these speeds took."""
    method = ("ring", "topk_allgather", "gtopk")[place]
    factors = [
        model.batch / each[place] / iteration_seconds(model, method, workers)
        for model, each in zip(MODELS, speeds, strict=True)
    ]
    return f"{min(factors):.1f} to {max(factors):.1f}"


def _figure_11() -> Claim:
    why = f"bars without printed numbers; those of its plot script are {_times_eq_7()} times Eq. 7's"
    return not_here("fig-11", "Fig. 11, seconds of communication", why)


def _times_eq_7() -> str:
    """Return how many times as long as its formula says gTop-k's communication took, by the plot script."""
    line = gtop_k(NETWORK, WORKERS, DENSITY)
    factors = [model.commu_seconds / line.seconds(4 * model.parameters) for model in MODELS]
    return f"{min(factors):.0f} to {max(factors):.0f}"


def _table_7() -> list[Claim]:
    """Simulate iterations: computation, compression and communication one after the other, as the paper runs them."""
    printed = {"ring": [model.over_dense for model in MODELS], "topk_allgather": [model.over_top_k for model in MODELS]}
    names = {"ring": "g/d, gTop-k over dense", "topk_allgather": "g/t, gTop-k over top-k"}
    what = "Table VII, {}: VGG-16, ResNet-20, AlexNet, ResNet-50"
    factors = [WORKERS * model.batch / float(model.throughputs[0]) / _eq_5(model) for model in MODELS]
    took = f"that cluster's dense iterations took {min(factors):.0f} to {max(factors):.0f} times what Eq. 5 says"
    slow = f"that cluster's gTop-k communicated for {_times_eq_7()} times what Eq. 7 says; top-k sends more"
    why = {"ring": took, "topk_allgather": slow}
    return [
        check_printed(f"table-7/{other}", what.format(names[other]), texts,
                      [iteration_seconds(model, other) / iteration_seconds(model, "gtopk") for model in MODELS],
                      "simulated programs", why[other])
        for other, texts in printed.items()
    ]  # fmt: skip


def iteration_seconds(model: Model, strategy: str, workers: int = WORKERS) -> float:
    """Return an iteration, nothing overlapped."""
    compressing = 0.0 if strategy == "ring" else model.compress_seconds
    return model.compute_seconds + compressing + seconds(strategy, 4 * model.parameters, workers)


def _own() -> Iterator[Claim]:
    """Compare columns of Tables VI and VII with one another, with the text and with Eq. 5."""
    for column, name in ((0, "g/d"), (1, "g/t")):
        texts = [(model.over_dense, model.over_top_k)[column] for model in MODELS]
        ratios = [quotient(model.throughputs[2], model.throughputs[column]) for model in MODELS]
        yield compare_own(f"own/{name}", f"Table VII: {name} from its throughputs", texts, ratios, "computed")
    what = "Table VII: throughputs of four models by three methods, from Fig. 10's plot script"
    throughputs = [text for model in MODELS for text in model.throughputs]
    plotted = [(WORKERS * low, WORKERS * high) for model in MODELS for low, high in map(rounded, model.plotted)]
    why = "gTop-k has 3942 with VGG-16 there, and 25258 with ResNet-20; the others are the same, cut off or rounded"
    yield compare_own("own/fig-10", what, throughputs, plotted, "computed", why)
    columns = ([model.over_dense for model in MODELS], [model.over_top_k for model in MODELS])
    averages = [_mean([rounded(text) for text in texts]) for texts in columns]
    what = "section IV-D: averages of Table VII's g/d and g/t"
    yield compare_own("own/averages", what, ("6.7x", "1.4x"), averages, "computed")
    images = [(model.batch / most, model.batch / least) for model in MODELS for least, most in [rounded(model.compute)]]
    what = "Table VI: images per second from its batches and seconds"
    why = "ResNet-50's are 52.9: cut off, not rounded"
    yield compare_own("own/table-6", what, [model.images for model in MODELS], images, "computed", why)
    what = "abstract: gTop-k 'up to 2.7 - 12x' over dense, from Table VII's least and largest g/d"
    ends = [rounded(text) for text in sorted(columns[0], key=rounded)]
    why = "AlexNet's 12.8x is cut off"
    yield compare_own("own/abstract", what, ("2.7x", "12x"), [ends[0], ends[-1]], "compared", why)
    what = "introduction: gTop-k 'generally up to 1.5 times faster' than top-k, from Table VII's largest g/t"
    largest = max((rounded(model.over_top_k) for model in MODELS), key=max)
    yield compare_own("own/introduction", what, "1.5x", [largest], "compared", "that is VGG-16's; AlexNet has 1.7x")
    efficiencies = [_efficiency(model) for model in MODELS if model.name.startswith("ResNet")]
    best = max(low for low, _ in efficiencies), max(high for _, high in efficiencies)
    what = "section IV-E: efficiency 'up to 80%' with ResNet-20 and ResNet-50, from Tables VI and VII (%)"
    yield compare_own("own/efficiency", what, "80%", [best], "computed", "the tables give more with ResNet-20")
    what = "Table VII: dense throughput on 32 GPUs of four models, from Table VI and Eq. 5 (images/s)"
    allowed = [WORKERS * model.batch / _eq_5(model) for model in MODELS]
    why = "its hosts (1.1 GHz, a PCIe lane of 250 MB/s) are not in the model"
    texts = [model.throughputs[0] for model in MODELS]
    yield compare_own("own/eq-5", what, texts, [(each, each) for each in allowed], "computed with Eq. 5", why)


def _eq_5(model: Model) -> float:
    """Return a dense iteration's seconds."""
    return model.compute_seconds + dense(NETWORK, WORKERS).seconds(4 * model.parameters)


def _mean(ranges: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the least and the most that the mean of printed numbers can be."""
    return sum(low for low, _ in ranges) / len(ranges), sum(high for _, high in ranges) / len(ranges)


def _efficiency(model: Model) -> tuple[float, float]:
    (low, high), (least, most) = rounded(model.throughputs[2]), rounded(model.compute)
    images = WORKERS * model.batch
    return 100 * low * least / images, 100 * high * most / images


def _sparse() -> Iterator[Claim]:
    """Eq. 6 and 7 with alpha and beta of emulated hosts, beside exchanges measured on them: 25 million elements.

    Densities are the paper's two.
    """
    equations = {"topk_allgather": ("Eq. 6", top_k), "gtopk": ("Eq. 7", gtop_k)}
    for record, row in measured_rows("sparse"):
        name, engine, hosts, density = (row[key] for key in ("strategy", "engine", "hosts", "density"))
        number, equation = equations[name]
        network = Network(hosts, row["alpha_seconds"], row["beta_seconds_per_byte"], 0.0)
        formula = equation(network, hosts, density).seconds(row["nbytes"])
        what = f"{number} by {engine}, {hosts} hosts at 1 Gb/s, density {density:g} (s)"
        yield compare_measured(f"sparse/{name}/{engine}/{hosts}/{density:g}", what, formula, row["seconds"], record)


def _replayed(given: Mapping[str, Any] | None) -> Iterator[Claim]:
    """Table VII's iteration by Eq. 5-7 with the hosts' own alpha and beta, beside iterations replayed on them."""
    rows, missing = measured_rows("gtop-k", given), set[str]()
    for record, row in rows:
        model = next(each for each in MODELS if each.name == row["model"])
        if row.get("alpha_seconds") is None:
            missing.add(record)
        elif (formula := _formula(model, row)) is not None:
            method, hosts = row["method"], row["hosts"]
            what = f"Table VII, {model.name}, {method}: iteration replayed on {hosts} emulated hosts (s)"
            yield compare_measured(f"replay/{model.name}/{method}/{hosts}", what, formula, row["seconds"], record)
    for record in sorted(missing):
        why = "its hosts' alpha and beta were not measured; run benchmarks/gtop_k.py"
        yield not_here("replay", f"Table VII replayed on emulated hosts: {record}", why)


def _formula(model: Model, row: Mapping[str, Any]) -> float | None:
    """Return an iteration by the equation of the row's method; None where the paper has none."""
    network = Network(row["hosts"], row["alpha_seconds"], row["beta_seconds_per_byte"], 0.0)
    nbytes, work = 4 * model.parameters, model.compute_seconds + model.compress_seconds
    if row["method"] == "ring":
        return model.compute_seconds + dense(network, row["hosts"]).seconds(nbytes)
    equation = {"topk_allgather": top_k, "gtopk": gtop_k}.get(row["method"])
    return None if equation is None else work + equation(network, row["hosts"], DENSITY).seconds(nbytes)
