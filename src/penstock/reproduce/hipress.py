"""HiPress (Bai et al.): Tables 1 to 7, the volume that one bit saves, and Fig. 7 to 13."""

import re
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from penstock.compll.backends.reference import ReferenceKernels
from penstock.compll.frontend.parameters import bind_arguments
from penstock.compll.frontend.parser import parse
from penstock.compll.frontend.source import compile_file
from penstock.cost.papers import CASYNC
from penstock.network import Network
from penstock.program import Op, Program
from penstock.reproduce.architectures import bert, lstm_wikitext_2, resnet50_v2, transformer_base, ugatit
from penstock.reproduce.claim import (
    Claim,
    check_at_most,
    check_equal,
    check_printed,
    compare_measured,
    compare_own,
    measured_rows,
    not_here,
    quotient,
    rounded,
)
from penstock.reproduce.hipress_fig_11 import figure_8, figure_11, figure_12b, own_efficiency, replayed_seconds
from penstock.reproduce.hipress_table_7 import table_7
from penstock.simulator.program import CodecCost, program_seconds
from penstock.strategies import Options, build_compressed
from penstock.traces import load_shipped

# With compression and without: efficiencies and shares of communication; and the printed gains
TABLE_1 = {("0.61", "0.47"): "29.8%", ("0.76", "0.71"): "7.0%", ("70.3", "76.8"): "-8.5%", ("60.9", "63.6"): "-4.2%"}
TABLE_5 = {  # lines of logic and of functions, common operators, lines of integration
    "onebit": (21, 9, 4, 0),
    "tbq": (13, 18, 3, 0),
    "terngrad": (23, 7, 5, 0),
    "dgc": (29, 15, 6, 0),
    "graddrop": (29, 21, 6, 0),
}
# Section 4.4: "AdaComp needs map, reduce, filter, concat and extract, while 3LC needs reduce, map, concat, filter and
# extract"; "69 lines to express the encode function of 3LC"
ALSO_WRITTEN = {name: {"map", "reduce", "filter", "concat", "extract"} for name in ("adacomp", "3lc")}
ENCODE_3LC_LINES = 69
COMMON_OPERATORS = ("sort", "filter", "map", "reduce", "random", "concat", "extract")  # Table 4
OTHER_OPERATORS = ("topk", "sample", "scan", "scatter")  # ours beyond them: `compll.operators`
TABLE_6 = {  # MB, largest gradient in MB, gradients
    "VGG19": ("548.05", "392", 38),
    "ResNet50": ("97.46", "9", 155),
    "UGATIT": ("2558.75", "1024", 148),
    "UGATIT-light": ("511.25", "128", 148),
    "Bert-base": ("420.02", "89.42", 207),
    "Bert-large": ("1282.60", "119.23", 399),
    "LSTM": ("327.97", "190.42", 10),
    "Transformer": ("234.08", "65.84", 185),
}
EFFICIENCY_BYTEPS, MOST_EFFICIENCY = "0.71", "0.92"  # Table 1, Bert-large; conclusion: 'up to', of HiPress
GAINS_BERT_LARGE = ("32.3%", "44.1%", "23.3%")  # section 6.2: HiPress over BytePS, over Ring, over BytePS with onebit
GAINS_VGG19 = ("110.5%", "60.4%")  # over BytePS, over Ring
OVER_BYTEPS_ONEBIT, RESNET50 = "69.5%", "20.7%"  # section 6.2: VGG19 over BytePS with onebit; over all baselines
BEST_SPEEDUP = "1.3x"  # introduction: of Transformer with compression
GAINS_TRANSFORMER = ("101.4%", "41.1%")  # over the baselines, over Ring with DGC
_MIB = 2**20
_THROUGHPUT = "throughputs of 128 V100 with BytePS and Horovod; neither their layer times nor the bars are printed"


def claims(record: Mapping[str, Any] | None = None) -> list[Claim]:
    """Return every claim; `record` is one of `benchmarks/casync.py`, instead of those that are shipped."""
    return [
        not_here(
            "table-1",
            "Table 1, efficiencies and communication ratios of Transformer and Bert-large",
            _THROUGHPUT,
            "0.47, 0.61; 0.71, 0.76; 76.8%, 70.3%; 63.6%, 60.9%",
        ),
        *_own(),
        *_own_introduction(),
        _volume(),
        _operators_of_a_gradient(),
        *_table_3(),
        *(claim for name in TABLE_5 for claim in _table_5(name)),
        _integration(),
        not_here(
            "table-5/oss",
            "Table 5, open source: lines of logic and of integration",
            "which versions of which programs were counted, and by what rule, is not said",
            "80, 445 (onebit); 100, 384 (TBQ); 170, 513 (TernGrad); 1298, 1869 (DGC)",
        ),
        *_section_4_4(),
        *_table_6(),
        _small_gradients(),
        *table_7(),
        not_here(
            "fig-7",
            "Fig. 7, VGG19, ResNet50 and UGATIT on 128 V100",
            "how much of an iteration is computation is printed of none of them",
            "110.5%, 60.4%, 69.5%; 20.7%; 2.1x",
        ),
        *figure_8(),
        not_here(
            "fig-8",
            "Fig. 8, Transformer and LSTM; BytePS",
            "no layer times of these two; BytePS over TCP is not modelled",
            "101.4%, 41.1%; 2.1x; 32.3%, 23.3%",
        ),
        *_between_systems(),
        not_here("fig-9", "Fig. 9, GPU utilisation", "curves of nvidia-smi on those GPUs"),
        not_here(
            "fig-10",
            "Fig. 10, speed-ups on 32 GTX 1080 Ti and 56 Gb/s",
            "neither its latency nor layer times are given",
            "133.1%, 53.3%, 8.5%",
        ),
        *figure_11(),
        own_efficiency(),
        *_steps_measured(record),
        not_here("fig-12a", "Fig. 12a, two networks each", "bars without printed numbers"),
        *figure_12b(),
        not_here("fig-12b", "Fig. 12b, DGC at 0.1%, 1% and 5%", "no curves of DGC are published", "6.7%, 11.3%"),
        not_here(
            "fig-13",
            "Fig. 13, convergence of LSTM and ResNet-50",
            "32 GPUs for hours, ImageNet",
            "86.28; 77.11%; 28.6%",
        ),
    ]


def payload_nbytes(name: str, numel: int) -> int:
    """Return the bytes that a shipped compressor makes of `numel` normal random values, by its numpy kernels."""
    with resources.as_file(resources.files("penstock.compll") / "algorithms" / f"{name}.cll") as path:
        return len(_payload(path, numel))


def _payload(path: Path, numel: int) -> bytes:
    program = compile_file(path, {})
    names = [parameter.name for parameter in program.arguments]
    arguments = dict(zip(names, bind_arguments(program, {}), strict=True))
    values = np.random.default_rng(0).standard_normal(numel).astype(np.float32)
    return bytes(ReferenceKernels(program).encode(values, arguments, 0))


def _volume() -> Claim:
    numel = 1 << 20
    how = "encoded: 2^20 values"
    saved = 100 * (1 - payload_nbytes("onebit", numel) / (4 * numel))
    return check_printed("section-2.4/volume", "section 2.4: volume that onebit saves", "96.9%", saved, how)


def _operators_of_a_gradient() -> Claim:
    """Count encodes and decodes of one chunk over all ranks of a compressed ring: at most 3N - 2, says section 2.5."""
    n = 16
    program, _ = build_compressed("ring", n, (0, 1 << 16), Options(partitions=n))
    encoded = {buffer.name for buffer in program.buffers if buffer.encoded}
    found = 0
    for instruction in (each for rank in program.ranks for each in rank):
        merges = instruction.op is Op.MERGE and instruction.read is not None and instruction.read.buffer in encoded
        found += instruction.op in (Op.ENCODE, Op.DECODE) or merges
    why = "the rank that has the sum decodes what it sent, so that all ranks hold the same bits"
    what = "section 2.5: encodes and decodes of a gradient, ring of 16"
    return check_equal("section-2.5/operators", what, 3 * n - 2, found // program.numel, "counted in the program", why)


def serial_counts(program: Program) -> tuple[int, int, int]:
    """Return how many sends, encodes and decodes of a program nothing else hides, where a send takes far longer."""
    network, tick = Network(program.world_size, 1.0, 0.0, 0.0), 1e-3
    sends = program_seconds(program, network, 1)

    def extra(op: Op) -> int:
        cost = CodecCost(seconds=lambda each, nbytes: tick if each is op else 0.0)
        return round((program_seconds(program, network, 1, cost) - sends) / tick)

    return round(sends), extra(Op.ENCODE), extra(Op.DECODE)


def _table_3() -> list[Claim]:
    """Table 3's counts, and section 6.1's of co-located servers, beside the programs: N = K = 16."""
    n = 16
    programs = {
        "ring": build_compressed("ring", n, (0, 1 << 16), Options(partitions=n))[0],
        "own": build_compressed(
            "parameter_server", 2 * n, (0, 1 << 16), Options(partitions=n, servers=n, dedicated=True)
        )[0],
        "co-located": build_compressed("parameter_server", n, (0, 1 << 16), Options(partitions=n))[0],
    }
    found = {name: serial_counts(program) for name, program in programs.items()}
    own = CASYNC["casync_ps"](n, n)
    why = (
        "ours encodes and decodes most pieces while others are on their way, which the counts K and N leave out: Eq. 2 "
        "is what a server takes that does one thing at a time"
    )
    how = "simulated program"
    return [
        check_equal("table-3/ring", "Table 3, CaSync-Ring: sends, encodes, decodes", (30, 16, 16), found["ring"], how),
        check_equal("table-3/ps/sends", "Table 3, CaSync-PS: sends", own.sends, found["own"][0], how),
        check_equal("table-3/ps/codec", "Table 3, CaSync-PS: encodes, decodes", (own.encodes, own.decodes),
                    found["own"][1:], how, why),
        check_equal("section-6.1/sends", "section 6.1, CaSync-PS co-located: sends", 30, found["co-located"][0], how),
        check_equal("section-6.1/codec", "section 6.1, CaSync-PS co-located: encodes, decodes", (16, 16),
                    found["co-located"][1:], how, why),
    ]  # fmt: skip


def _table_5(name: str) -> Iterator[Claim]:
    """Count our lines by one rule: those of encode and decode, those of other functions; comments left out."""
    *printed, operators, _ = TABLE_5[name]
    common, beyond = operators_of(name)
    what = f"Table 5, {name}: lines of logic and of functions"
    yield check_at_most(f"table-5/{name}/lines", what, tuple(printed), lines_of(name), "counted")
    why = f"{', '.join(common)}; beyond Table 4: {', '.join(beyond) or 'none'}"
    yield check_equal(
        f"table-5/{name}/operators", f"Table 5, {name}: common operators", operators, len(common), "counted", why
    )


def _integration() -> Claim:
    """Compile a copy of each compressor under another name outside the package, as users have theirs, and encode."""
    printed = [name for name in TABLE_5 if TABLE_5[name][3] == 0]
    found, numel = list[str](), 1 << 12
    with TemporaryDirectory() as folder:
        for name in TABLE_5:
            copied, own = Path(folder) / f"{name}-copy.cll", resources.files("penstock.compll") / "algorithms"
            copied.write_text(_source(name))
            with resources.as_file(own / f"{name}.cll") as path:
                if _payload(copied, numel) == _payload(path, numel):
                    found.append(name)
    what, why = "Table 5, integration: compressors that need no line of it", "it encodes otherwise from a user's file"
    return check_equal(
        "table-5/integration", what, printed, found, "encoded, each from a copy outside the package", why
    )


def _section_4_4() -> Iterator[Claim]:
    """Check which operators two further compressors call, and how long one of them is: encode and what it calls."""
    for name, printed in ALSO_WRITTEN.items():
        common, beyond = operators_of(name)
        why = f"beyond Table 4: {', '.join(beyond)}"
        what = f"section 4.4, {name}: common operators"
        yield check_equal(f"section-4.4/{name}", what, sorted(printed), sorted(common), "counted", why)
    ours = sum(count for function, count in function_lines("3lc").items() if function != "decode")
    what = "section 4.4, 3LC: lines of encode, ours with all functions"
    yield check_at_most("section-4.4/lines", what, (ENCODE_3LC_LINES,), (ours,), "counted")
    yield not_here(
        "section-4.4/speed",
        "section 4.4, encode against open-source code",
        "those programs on those GPUs; 12x is 3.2 ms. Our TBQ on an H200: benchmarks/results/codecs_cuda.json",
        "12x (TBQ, 38.2 ms for 256 MB), 5.1x (DGC), 35.6x (onebit, processor)",
    )


def function_lines(name: str) -> dict[str, int]:
    """Return how many lines each function of a shipped compressor has that hold more than a comment."""
    text = _source(name)
    lines = text.splitlines()
    return {
        function.name: sum(
            bool(line.split("//")[0].strip()) for line in lines[function.at.line - 1 : function.end.line]
        )
        for function in parse(text).functions
    }


def lines_of(name: str) -> tuple[int, int]:
    """Return how many lines of a shipped compressor are encode and decode, and other functions; comments left out."""
    counted = function_lines(name)
    logic = counted["encode"] + counted["decode"]
    return logic, sum(counted.values()) - logic


def operators_of(name: str) -> tuple[list[str], list[str]]:
    """Return which operators of the paper's Table 4 a shipped compressor calls, and which of ours beyond them."""
    code = re.sub(r"//.*", "", _source(name))
    called = set(re.findall(r"\b(\w+)(?:<\w+>)?\(", code))
    return [each for each in COMMON_OPERATORS if each in called], [each for each in OTHER_OPERATORS if each in called]


def _source(name: str) -> str:
    return (resources.files("penstock.compll") / "algorithms" / f"{name}.cll").read_text()


def nbytes_of(name: str) -> list[int]:
    """Return the bytes of each gradient of a model of Table 6, in the implementation whose sizes it has."""
    counted: dict[str, Callable[[], list[int]]] = {
        "VGG19": lambda: [tensor.numel for tensor in load_shipped("vgg19").tensors],
        "ResNet50": resnet50_v2,
        "UGATIT": ugatit,
        "UGATIT-light": lambda: ugatit(light=True),
        "Bert-base": lambda: bert(12, 768),
        "Bert-large": lambda: bert(24, 1024),
        "LSTM": lstm_wikitext_2,
        "Transformer": transformer_base,
    }
    return [4 * numel for numel in counted[name]()]


def _table_6() -> Iterator[Claim]:
    why = "with both heads of its pretraining the model has all of its bytes and one tensor less"
    for name, (total, largest, gradients) in TABLE_6.items():
        nbytes, key, what = nbytes_of(name), f"table-6/{name}", f"Table 6, {name}"
        yield check_printed(f"{key}/total", f"{what}: MB in all", total, sum(nbytes) / _MIB, "counted", why)
        yield check_printed(f"{key}/largest", f"{what}: MB of the largest", largest, max(nbytes) / _MIB, "counted", why)
        yield check_equal(f"{key}/gradients", f"{what}: gradients", gradients, len(nbytes), "counted", why)


def _small_gradients() -> Claim:
    nbytes = nbytes_of("Bert-base")
    ours = 100 * sum(each < 16 << 10 for each in nbytes) / len(nbytes)
    what, why = "section 6.3, Bert-base: gradients below 16 KB", "129 of 206; no part of Table 6's 207 is 62.7% either"
    return check_printed("section-6.3/small", what, "62.7%", ours, "counted", why)


def _own() -> Iterator[Claim]:
    """Compare Tables 1, 5 and 6 and the text with one another."""
    what = "Table 1: gains and losses from its efficiencies and ratios"
    yield compare_own("own/table-1", what, list(TABLE_1.values()), [_gain(*each) for each in TABLE_1], "computed")
    what = "section 6.2, Bert-large: BytePS over Ring, with onebit over without, from HiPress's gains over each"
    over_byteps, over_ring, over_onebit = (_times(text) for text in GAINS_BERT_LARGE)
    gains = [_gain(over_ring, over_byteps), _gain(over_byteps, over_onebit)]
    yield compare_own("own/section-6.2", what, ("8.9%", "7.3%"), gains, "computed")
    what = "section 6.2, VGG19: Ring over BytePS, 'by 31.3-50.3%', from HiPress's gains over each on 128 GPUs"
    over_byteps_vgg19, over_ring_vgg19 = (_times(text) for text in GAINS_VGG19)
    yield compare_own("own/vgg19", what, "31.3%", [_gain(over_byteps_vgg19, over_ring_vgg19)], "computed")
    what = "section 6.2, Transformer: Ring with DGC over BytePS, 'up to 42.8%', from HiPress's gains over each"
    over_both, over_dgc = (_times(text) for text in GAINS_TRANSFORMER)
    yield compare_own("own/transformer/dgc", what, "42.8%", [_gain(over_both, over_dgc)], "computed")
    alone, gained = rounded(EFFICIENCY_BYTEPS), rounded(over_byteps)
    what = "conclusion: HiPress's efficiency 'up to 0.92', from Table 1's of BytePS and HiPress's gain with Bert-large"
    why = "that gain over BytePS's 0.71 is 0.94"
    follows = [(alone[0] * gained[0], alone[1] * gained[1])]
    yield compare_own("own/conclusion", what, MOST_EFFICIENCY, follows, "computed", why)
    what = "section 6.2, Transformer: Ring with DGC over Ring, 'up to', from Table 1's efficiencies"
    why = "Table 1 has 29.8%, and the introduction 1.3x"
    yield compare_own("own/transformer", what, "22.1%", [_gain("0.61", "0.47")], "computed", why)
    logic, functions = ([row[column] for row in TABLE_5.values()] for column in (0, 1))
    mean = sum(logic) / len(logic)
    what = "introduction: lines of five compressors on average, from Table 5's logic"
    yield compare_own("own/table-5/mean", what, "23", [(mean, mean)], "computed", "the table has more")
    operators = [row[2] for row in TABLE_5.values()]
    what, ends = "section 4.4: 'only 3 to 6 common operators', from Table 5", (min(operators), max(operators))
    yield compare_own("own/table-5/operators", what, ("3", "6"), [(each, each) for each in ends], "compared", "Table 5")
    most = [(each, each) for each in (max(logic), max(functions))]
    what, why = (
        "section 4.4: 'fewer than 29' lines of logic and 'fewer than 21' of functions: at most 28 and 20",
        "Table 5",
    )
    yield compare_own("own/table-5/most", what, ("28", "20"), most, "compared", f"{why} has 29 and 21")
    gradients = TABLE_6["Bert-base"][2]
    shares = [100 * small / gradients for small in range(gradients + 1)]
    near = min(shares, key=lambda share: abs(share - 62.7))
    what, why = (
        "section 6.3, Bert-base: gradients below 16 KB, as a share of Table 6's 207",
        "129 are 62.3%, 130 are 62.8%",
    )
    yield compare_own("own/small", what, "62.7%", [(near, near)], "computed", why)


def _own_introduction() -> Iterator[Claim]:
    """Compare what the introduction says with section 6.2 and Table 1."""
    least, most = (speed * alone for speed, alone in zip(rounded(BEST_SPEEDUP), rounded("0.47"), strict=True))
    what = "introduction, Transformer: 1.3x is '38.1% lower than the expected performance', 1 / Table 1's 0.47"
    yield compare_own("own/expected", what, "38.1%", [(100 * (1 - most), 100 * (1 - least))], "computed")
    what = (
        "introduction: improvements of up to 110.5% over dense systems and 69.5% over others, the most in section 6.2"
    )
    of_dense = (*GAINS_VGG19, *GAINS_BERT_LARGE[:2], GAINS_TRANSFORMER[0], RESNET50)
    of_coded = (OVER_BYTEPS_ONEBIT, GAINS_BERT_LARGE[2], GAINS_TRANSFORMER[1])
    most_gained = [max(map(rounded, gains)) for gains in (of_dense, of_coded)]
    yield compare_own("own/improvements", what, ("110.5%", "69.5%"), most_gained, "compared")


def _between_systems() -> Iterator[Claim]:
    """List what is printed of one baseline over another, and of HiPress's least gains."""
    why = (
        "'up to' over numbers of GPUs whose bars have no numbers; on 128, 10% follow from Table 1 and section 6.2, "
        "with RDMA"
    )
    yield not_here(
        "fig-8/tensorflow", "section 6.2, Transformer: Ring over BytePS, with RDMA and without", why, "30.9%; 23.5%"
    )
    why = "BytePS without RDMA is not modelled, and the bars have no numbers"
    yield not_here("fig-7/tcp", "section 6.2, VGG19: Ring over BytePS without RDMA", why, "19.3-36.6%")
    why = "which model, system and number of GPUs they are of is not said, and the bars have no numbers"
    yield not_here("section-1/least", "introduction: HiPress's least improvements", why, "17.3%; 17.2%")
    why = (
        "throughputs of BytePS with either codec, of which only the quotient is printed; Fig. 11 has the like of VGG19"
    )
    yield not_here("section-2.5/overhead", "section 2.5: overhead of onebit on processors in BytePS", why, "95.2%")


def _times(percent: str) -> str:
    """Return a printed gain as a printed ratio: 32.3% is 1.323."""
    return f"{1 + float(percent.strip('%')) / 100:.3f}"


def _gain(after: str, before: str) -> tuple[float, float]:
    """Return the least and the most percent by which one printed number is above another."""
    least, most = quotient(after, before)
    return 100 * (least - 1), 100 * (most - 1)


def _steps_measured(given: Mapping[str, Any] | None) -> Iterator[Claim]:
    """Fig. 11's steps on emulated hosts: the iteration simulated on their network beside the measured one."""
    incomplete = set[str]()
    for record, row in measured_rows("casync", given):
        if "buckets" not in row:
            incomplete.add(record)
            continue
        place = f"{row['what']} on {row['hosts']} hosts at {_rate(row)}, {row['how']}"
        key = f"fig-11-measured/{row['what']}/{row['how']}/{row['hosts']}/{_rate(row)}"
        formula, measured = replayed_seconds(row), row["measured_seconds"]
        yield compare_measured(key, f"Fig. 11's steps, {place} (s)", formula, measured, record)
    for record in sorted(incomplete):
        why = "it does not keep the network and the plans; run benchmarks/casync.py"
        yield not_here(f"fig-11-measured/{record}", f"Fig. 11's steps on emulated hosts: {record}", why)


def _rate(row: Mapping[str, Any]) -> str:
    return f"{row['rate']}" + (f" in {row['slower']:g}x slow motion" if row.get("slower") else "")
