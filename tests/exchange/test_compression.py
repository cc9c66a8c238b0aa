"""What the options of compression mean, and which of them mean nothing."""

import re

import pytest

from penstock.codecs.registry import make_codec
from penstock.errors import CodecError
from penstock.exchange.compression import ANY, SPARSE, Compression, from_options, make_scheme
from penstock.exchange.momentum import Momentum
from penstock.planning.inputs import difference


def test_one_value_means_what_its_fields_mean_one_by_one():
    value = Compression("gtopk", density=0.1, warmup=[0.5], momentum=0.9, nesterov=True, clip=2.0, clip_by="tensor")
    kept = Momentum(0.9, nesterov=True, clip=2.0, clip_by="tensor")
    assert value.scheme() == make_scheme("gtopk", 0.1, [0.5], momentum=kept)
    assert from_options(Compression, value, "compression", {}) is value
    assert from_options(Compression, None, "compression", {"codec": "gtopk", "density": 0.1}) == Compression(
        "gtopk", density=0.1
    )


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (Compression("onebit"), {"density": 0.1}, "compression= and density=; wanted all of it in compression=Comp"),
        (Compression("onebit"), {"codec": "onebit"}, "compression= and codec=; wanted all of it in compression=Comp"),
        ("onebit", {}, "compression is 'onebit'; wanted a Compression"),
    ],
)
def test_a_value_and_its_fields_are_not_given_together(given, options, message):
    with pytest.raises(TypeError, match="^" + re.escape(message)):
        from_options(Compression, given, "compression", options)


def test_a_value_that_means_nothing_is_refused_where_it_is_written():
    with pytest.raises(CodecError, match="density or warmup without a codec"):
        Compression(density=0.1)
    with pytest.raises(TypeError, match="codce"):
        Compression(codce="onebit")


@pytest.mark.parametrize("density", [1 / 3, 0.1234567, 1e-9, 1, 0.9999999])
def test_a_density_keeps_all_its_digits(density):
    compression = make_scheme("gtopk", density)
    assert make_codec(compression.codec).density == density
    warming = make_scheme("gtopk", 0.5, warmup_spec=[density])
    assert make_codec(warming.codec_at(warming.codec, 0)).density == density


@pytest.mark.parametrize("codec", ["gtopk", "gtopk-published", "sparse", "published"])
def test_values_of_a_sparse_exchange_may_have_16_bits_also_while_it_warms_up(codec):
    compression = make_scheme(f"{codec}(density=0.1, value_bits=16)", warmup_spec=[0.5])
    for iteration, density in enumerate((0.5, 0.1)):
        made = make_codec(compression.codec_at(compression.codec, iteration))
        sparse = getattr(made, "codec", made)
        assert (sparse.density, sparse.value_bits) == (density, 16)


@pytest.mark.parametrize(("codec", "exchange"), [("sparse(density=0.1)", "gtopk"), ("published", "gtopk_published")])
def test_a_sparse_codec_as_plans_write_it_goes_by_the_strategies_of_its_exchange(codec, exchange):
    compression = make_scheme(codec)
    assert compression.strategies == SPARSE[exchange].strategies
    for strategy in ("gtopk", "auto"):
        compression.check_strategy(strategy)
    assert make_scheme("topk(density=0.1)").strategies == ANY  # the language's


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"codec": "gtopk(density=0.2)", "density": 0.1}, "codec 'gtopk(density=0.2)' and density=0.1; wanted one"),
        ({"codec": "gtopk(k=5)"}, "codec 'gtopk(k=5)': no parameter 'k'; wanted density or value_bits"),
        ({"codec": "gtopk(value_bits=12)"}, "value_bits is 12; wanted one of 32, 16"),
        ({"codec": "gtopk", "warmup_spec": "paper", "warmup_every": "5"}, "warmup_every is '5'; wanted at least 1"),
        ({"codec": "gtopk", "warmup_spec": "paper", "warmup_every": 1.5}, "warmup_every is 1.5; wanted at least 1"),
        (
            {"codec": "topk(density=0.1)", "warmup_spec": "paper"},
            "density or warmup with codec 'topk(density=0.1)'; wanted one of gtopk, topk, gtopk_published, "
            "or write topk(density=...)",
        ),
        (
            {"codec": "gtopk(value_bits=16)", "momentum": Momentum(0.5)},
            "codec 'gtopk(value_bits=16)' with momentum: masking finds what was sent by residuals of 0",
        ),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(CodecError, match="^" + re.escape(message)):
        make_scheme(**options)


def test_a_codec_without_a_density_is_not_said_to_have_one():
    with pytest.raises(CodecError, match=r"^density or warmup with codec 'auto'; wanted one of [a-z_, ]*$"):
        make_scheme("auto", 0.1)


@pytest.mark.parametrize(
    ("codec", "strategy", "message"),
    [
        (
            "topk",
            "gtopk",
            "strategy 'gtopk' is that of codec 'gtopk' or 'gtopk_published'; wanted 'topk_allgather' with",
        ),
        ("gtopk", "topk_allgather", "strategy 'topk_allgather' is that of codec 'topk'; wanted 'gtopk_doubling' or"),
        (
            "gtopk_published",
            "ring",
            "strategy 'ring' with 'published(density=0.001)', which compares its own block with",
        ),
        ("onebit", "hierarchical(outer=gtopk)", "strategy 'gtopk' merges sparse blocks; codec 'onebit' makes none"),
        (None, "hierarchical(outer=all_gather)", "strategy 'all_gather' sends every rank's payload to every rank"),
        (
            "auto",
            "hierarchical(outer=all_gather)",
            "codec 'auto' with strategy 'hierarchical(outer=all_gather)', which",
        ),
        ("onebit", "gtopk", "strategy 'gtopk' merges sparse blocks; codec 'onebit' makes none"),
    ],
)
def test_a_strategy_of_another_exchange_is_refused(codec, strategy, message):
    with pytest.raises(CodecError, match="^" + re.escape(message)):
        make_scheme(codec).check_strategy(strategy)


@pytest.mark.parametrize(
    ("codec", "candidates", "message"),
    [
        ("onebit", ["bf16"], "candidates with codec 'onebit'; wanted codec='auto', which chooses from them"),
        (None, ["bf16"], "candidates with codec None; wanted codec='auto'"),
        ("auto", "onebit", "candidates is 'onebit'; wanted a list of codecs such as ['bf16', "),
        ("auto", [], "candidates is []; wanted a list of codecs"),
        ("auto", 3, "candidates is 3; wanted a list of codecs"),
        ("auto", [3], "candidates has 3; wanted names of codecs such as 'bf16', "),
        ("auto", ["auto"], "candidates has 'auto'; wanted names of codecs"),
        ("auto", ["bf16", "bf16"], "candidates has 'bf16' twice; wanted each codec once, the safest first"),
        ("auto", ["twobit"], "codec 'twobit'; wanted one of "),
        ("auto", ["terngrad(bits=2)"], ""),
    ],
)
def test_candidates_that_mean_nothing_are_refused(codec, candidates, message):
    with pytest.raises(CodecError, match="^" + re.escape(message)):
        make_scheme(codec, candidates=candidates)


def test_every_candidate_must_go_by_the_strategy():
    with pytest.raises(CodecError, match="strategy 'gtopk' merges sparse blocks; codec 'bf16' makes none"):
        make_scheme("auto", candidates=["gtopk", "bf16"]).check_strategy("gtopk")
    make_scheme("auto", candidates=["gtopk"]).check_strategy("gtopk")
    with pytest.raises(CodecError, match="codec 'bf16' with strategy 'native': the engine compresses nothing"):
        make_scheme("auto").check_strategy("native")


def test_candidates_that_differ_between_ranks_are_named():
    held = [make_scheme("auto", candidates=each).options for each in (None, ["bf16"])]
    assert difference(held).startswith("candidates is ['bf16', ")
    assert difference(held).endswith(" on rank 0 and ['bf16'] on rank 1")
