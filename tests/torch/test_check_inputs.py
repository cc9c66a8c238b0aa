"""A plan or a trace of another model is refused, and so is one with routes that nothing can take."""

import re
from dataclasses import replace

import pytest

from penstock.errors import PenstockError
from penstock.exchange.compression import make_scheme
from penstock.plan import Bucket, Plan, Route
from penstock.planning.inputs import check_codecs, check_plan, check_route, check_trace
from penstock.trace import Tensor, Trace

GRADIENTS = {"weight": 8, "bias": 4}
PLAN = Plan("m", 2, "hand", (Bucket(("bias",), 4, "native"), Bucket(("weight",), 8, "ring", "onebit")))
TRACE = Trace("m", "cpu", 1, "float32", 0.1, (Tensor("bias", 1, 0.1), Tensor("weight", 2, 0.1)))


def with_last(**changes):
    return replace(PLAN, buckets=(PLAN.buckets[0], replace(PLAN.buckets[1], **changes)))


def test_a_plan_and_a_trace_of_the_model_are_taken():
    check_plan(PLAN, GRADIENTS, False, 2)
    check_trace(TRACE, GRADIENTS, False)
    check_codecs(PLAN, make_scheme("onebit"))
    check_codecs(PLAN, make_scheme(None))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (replace(PLAN, workers=64), "the plan is for 64 workers and this group has 2; plan anew for as many"),
        (with_last(tensors=("head",)), "the plan holds 'head', and the model trains 'weight' and 1 more"),
        (replace(PLAN, buckets=PLAN.buckets[:1]), "the plan lacks 'weight', which the model trains"),
        (with_last(nbytes=12), "bucket 1 of the plan has 12 bytes, and its tensors' gradients 8; plan anew"),
        (with_last(strategy="rnig"), "no all-reduce strategy called 'rnig'; wanted one of ring"),
        (with_last(codec="onebti"), "codec 'onebti'; wanted one of 3lc"),
        (with_last(codec="terngrad(bitwidth=99)"), "parameter bitwidth is 99; wanted one of 1, 2, 4, 8"),
        (with_last(strategy="gtopk"), "strategy 'gtopk' merges sparse blocks; codec 'onebit' makes none"),
        (with_last(strategy="native"), "codec 'onebit' with strategy 'native': the engine compresses nothing"),
        (with_last(strategy="all_gather", codec=None), "strategy 'all_gather' sends every rank's payload"),
    ],
)
def test_a_plan_that_cannot_be_followed_is_refused(plan, message):
    with pytest.raises(PenstockError, match="^" + re.escape(message)):
        check_plan(plan, GRADIENTS, False, 2)


@pytest.mark.parametrize(
    "route",
    [
        Route("gtopk", "sparse(density=0.1)"),
        Route("all_gather", "tbq"),
        Route("ring"),
        Route("hierarchical(ranks_per_node=4, outer=gtopk)", "sparse(density=0.1)"),
        Route("parameter_server(servers=1)", "tbq"),
    ],
)
def test_routes_that_training_takes_are_allowed(route):
    check_route(route)


def test_parameters_without_a_gradient_need_no_place_where_torch_allows_them():
    check_plan(replace(PLAN, buckets=PLAN.buckets[:1]), GRADIENTS, True, 2)
    check_trace(replace(TRACE, tensors=TRACE.tensors[:1]), GRADIENTS, True)


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        (replace(TRACE, tensors=TRACE.tensors[:1]), "the trace lacks 'weight', which the model trains"),
        (replace(TRACE, tensors=(Tensor("zzz", 1, 0.1),)), "the trace holds 'zzz', and the model trains 'weight'"),
        (replace(TRACE, dtype="float16"), "'bias' has 2 bytes in the trace and 4 in the model; profile anew"),
    ],
)
def test_the_trace_of_another_model_is_refused(trace, message):
    with pytest.raises(PenstockError, match="^" + re.escape(message)):
        check_trace(trace, GRADIENTS, False)


@pytest.mark.parametrize(
    ("plan", "codec", "found"),
    [
        (with_last(codec=None), "onebit", "nothing"),
        (PLAN, "tbq", "by onebit"),
        (PLAN, "auto", "by onebit"),
    ],
)
def test_a_codec_that_the_plan_does_not_use_is_refused(plan, codec, found):
    wanted = f"codec {codec!r} beside a plan that compresses {found}; leave codec out, or plan with it"
    with pytest.raises(PenstockError, match=re.escape(wanted)):
        check_codecs(plan, make_scheme(codec))


def test_entries_are_not_the_largest_of_the_model_in_a_plan_of_several_buckets():
    first, last = (replace(each, strategy="gtopk", codec="sparse(density=0.1)") for each in PLAN.buckets)
    merged = Bucket((*first.tensors, *last.tensors), 12, "gtopk", "sparse(density=0.1)")
    compression = make_scheme("gtopk", 0.1, select="model")
    check_codecs(replace(PLAN, buckets=(merged,)), compression)
    wanted = "select='model' beside a plan of 2 buckets; wanted select='tensor' or 'bucket'"
    with pytest.raises(PenstockError, match=re.escape(wanted)):
        check_codecs(replace(PLAN, buckets=(first, last)), compression)
