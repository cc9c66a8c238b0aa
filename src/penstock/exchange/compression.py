"""What a user asks of compression (`Compression`), and what that means to an exchange (`Scheme`).

    DDP(model, codec="onebit")
    DDP(model, compression=Compression("gtopk", density=0.001, warmup="paper", warmup_every=steps_per_epoch))
    DDP(model, codec="gtopk(density=0.001, value_bits=16)")

`gtopk`, `topk` and `gtopk_published` are sparse exchanges: a codec that sends the largest entries together with the
strategies that merge them. `lowrank` sends factors, which dense strategies sum. Every other codec goes through any
strategy of ours.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypedDict, TypeVar

from penstock.codecs.codec import Codec
from penstock.codecs.low_rank import NAME as LOW_RANK
from penstock.codecs.registry import (
    SPARSE_CODECS,
    codec_name,
    codec_names,
    fingerprint,
    is_low_rank,
    is_object,
    make_codec,
    parameter_names,
)
from penstock.codecs.spec import parse_spec, write_spec
from penstock.errors import CodecError, PlanError, did_you_mean
from penstock.exchange.momentum import Momentum
from penstock.exchange.warmup import Schedule, Stages, warmup
from penstock.plan import Plan, Route
from penstock.strategies import coded_only_names, parse_strategy, sparse_names
from penstock.strategies.hierarchical import NAME as HIERARCHICAL

AUTO = "auto"
NATIVE = "native"
COMPRESSED_ONLY = coded_only_names()  # strategies that carry nothing dense
ALL_GATHER = "all_gather"
# What "auto" measures and lets the planner choose from; the first is preferred.
ANY = ("ring", "parameter_server", ALL_GATHER)
# The same where messages are queued on a device: as many bytes as a ring's in two rounds, and each waits for kernels.
ANY_ON_DEVICE = ("parameter_server", ALL_GATHER)
DENSE = (NATIVE, "ring", "recursive_doubling")  # that carry what is not encoded
NCCL = "nccl"  # the engine that queues them
MIXING_PLANNERS = ("joint", "selective")  # choose for each gradient whether to compress it, and in how many pieces
AUTO_PLANNERS = ("exact", *MIXING_PLANNERS)  # that go with codec="auto"; exact, the default, means joint there
# What codec="auto" considers, the safest first. The coarsest of them ended within 1% of dense in all recorded runs of
# 600 steps and more, with AdamW and with SGD (docs/choosing-a-codec.md). Not here: terngrad and onebit, which with SGD
# ended far behind on some tasks; lowrank, with AdamW more than 1% behind at the bytes of blocks; codecs with a
# threshold that must be tuned (tbq, adacomp, graddrop); those that send few entries, so that training needs a warm-up
# and many steps (dgc, topk, gtopk).
AUTO_CODECS = ("bf16", "blocks(bits=8)", "blocks(bits=4)")
_SAFE_FOR_ADAM = ("fp16", "bf16", "fp8")  # at whatever setting
_SHOWN_BLOCK = 128  # the most values that shared a step of `blocks` in recorded runs; 0 is one step for a whole tensor
GRANULARITIES = ("tensor", "bucket", "model")  # what entries are the largest of
DENSITY = 0.001
Warmup = Literal["paper", "dgc"] | Sequence[float] | Schedule | None
ClipBy = Literal["model", "tensor"]
Select = Literal["tensor", "bucket", "model"]
Group = TypeVar("Group")


@dataclass(frozen=True, slots=True)
class Compression:
    """How gradients are compressed: the same value for the wrapper, the hook and an exchange without torch.

    Bad values raise `CodecError` here, misspelt names `TypeError`.
    """

    codec: str | Codec | None = None  # of every bucket, with error feedback; "auto": one of candidates, where it pays
    density: float | None = None  # of gtopk and topk: part of each tensor that is sent; None: 0.001
    warmup: Warmup = None  # densities before that: "paper", "dgc", a list, or a function of the stage's number
    warmup_every: int = 1  # iterations of each stage of the warm-up
    dense_below: int = 0  # tensors of fewer elements travel dense
    momentum: float = 0.0  # corrected as in DGC, for an optimizer that has none
    nesterov: bool = False  # Nesterov's form of it
    momentum_masking: bool = True  # forget the velocity of what was sent
    clip: float | None = None  # what a rank adds to the average has at most norm clip / sqrt(ranks)
    clip_by: ClipBy = "model"  # the norm of all gradients together, or of each tensor
    select: Select = "tensor"  # what a sparse codec sends the largest entries of
    candidates: Sequence[str] | None = None  # of codec="auto", the safest first; None: AUTO_CODECS

    def __post_init__(self) -> None:
        self.scheme()

    def scheme(self) -> "Scheme":
        """Return what this means to an exchange."""
        kept = Momentum(self.momentum, self.nesterov, self.momentum_masking, self.clip, self.clip_by)
        warmup = self.warmup, self.warmup_every
        return make_scheme(self.codec, self.density, *warmup, self.dense_below, kept, self.select, self.candidates)


def check_aggregators(strategy: str, servers: int) -> None:
    """Refuse a strategy whose last ranks only aggregate where not exactly these, `servers` of them, have no gradients.

    Those that train would give gradients which count as zeros, and need not get the average.
    """
    options = parse_strategy(strategy)[1]
    named = options["servers"] if options.get("dedicated") else servers
    if named != servers:
        raise PlanError(
            f"strategy {strategy!r}: its last {named} ranks only aggregate, and {servers} of these are made servers; "
            f"wanted DDP(servers=ParameterServers({named})), or --servers {named} of penstock train"
        )


class CompressionOptions(TypedDict, total=False):
    """The fields of a `Compression` as keywords of a wrapper, for type checkers; `codec` is one of its own."""

    density: float | None
    warmup: Warmup
    warmup_every: int
    dense_below: int
    momentum: float
    nesterov: bool
    momentum_masking: bool
    clip: float | None
    clip_by: ClipBy
    select: Select
    candidates: Sequence[str] | None


def from_options(kind: type[Group], given: Group | None, name: str, options: dict[str, Any]) -> Group:
    """Return a group of options, given whole as `name` or one by one in `options`, from which they are taken out.

    >>> options = {"density": 0.01, "bucket_cap_mb": 25}
    >>> from_options(Compression, None, "compression", {"codec": "topk"} | options).density
    0.01
    """
    alone = {each: options.pop(each) for each in [one.name for one in fields(kind)] if each in options}  # type: ignore[arg-type]
    if given is None:
        return kind(**alone)
    if not isinstance(given, kind):
        raise TypeError(f"{name} is {given!r}; wanted a {kind.__name__}")
    if alone:
        raise TypeError(f"{name}= and {next(iter(alone))}=; wanted all of it in {name}={kind.__name__}(...)")
    return given


@dataclass(frozen=True, slots=True)
class SparseExchange:
    """A codec that sends few entries, and the strategies for its blocks."""

    codec: str
    strategies: tuple[str, ...]


SPARSE: Mapping[str, SparseExchange] = {
    "gtopk": SparseExchange("sparse", ("gtopk_doubling", "gtopk")),
    "topk": SparseExchange("sparse", ("topk_allgather",)),
    "gtopk_published": SparseExchange("published", ("gtopk",)),
}
_WRITTEN = {"sparse": "gtopk", "published": "gtopk_published"}  # a codec as plans write it: the exchange it is of
_SETTINGS = ("density", "value_bits")  # of a sparse exchange
SPARSE_STRATEGIES = sparse_names()


@dataclass(frozen=True, slots=True)
class Scheme:
    """How buckets are compressed, as an exchange needs it: checked, with the strategies that can carry the codec."""

    codec: str | None = None  # as plans write it, at its final density; None: not at all
    strategies: tuple[str, ...] = ANY  # that can carry it
    schedule: Schedule | None = None  # density of each stage of a warm-up
    stage_iterations: int = 1  # of each stage
    dense_below: int = 0  # tensors of fewer elements travel dense, beside the others of their bucket
    momentum: Momentum = field(default_factory=Momentum)
    select: str = "tensor"  # what a sparse exchange selects its entries from: each tensor, a bucket, or the model
    candidates: tuple["Scheme", ...] = ()  # what "auto" chooses from, the safest first
    chosen_by_us: bool = False  # the candidates: the user named none

    @property
    def options(self) -> dict[str, str]:
        """What all ranks must have asked for, as text; a function that warms up says nothing of itself."""
        warmup = self.schedule.densities if isinstance(self.schedule, Stages) else self.schedule is not None
        of_momentum = {each.name: getattr(self.momentum, each.name) for each in fields(self.momentum)}
        named = {"codec": self.codec, "warmup": warmup, "warmup_every": self.stage_iterations}
        named |= {"dense_below": self.dense_below, "select": self.select, "momentum": of_momentum.pop("factor")}
        chosen_from = {"candidates": repr([each.codec for each in self.candidates])}
        considered = [each.codec for each in self.candidates or (self,) if each.codec is not None]
        return {name: repr(value) for name, value in (named | of_momentum).items()} | chosen_from | texts_of(considered)

    @property
    def named(self) -> tuple[str, ...]:
        """The codecs that the user named, candidates included."""
        if self.codec == AUTO:
            return () if self.chosen_by_us else tuple(each.codec for each in self.candidates if each.codec)
        return () if self.codec is None else (self.codec,)

    def check_strategy(self, strategy: str) -> None:
        """Refuse a strategy that cannot carry the codec; one in two levels carries it between its nodes."""
        if (outer := parse_strategy(strategy)[1].get("outer")) is not None:
            if self.codec == AUTO and outer in COMPRESSED_ONLY:
                raise CodecError(
                    f"codec 'auto' with strategy {strategy!r}, which carries nothing dense to compare with"
                )
            self.check_strategy(outer)
            return
        for candidate in self.candidates:
            candidate.check_strategy(strategy)
        if self.codec == AUTO:
            return
        if is_low_rank(self.codec):
            if strategy in (*SPARSE_STRATEGIES, *COMPRESSED_ONLY):
                raise CodecError(
                    f"strategy {strategy!r} carries encoded blocks; codec {self.codec!r} has factors summed as they "
                    f"are: wanted one such as {', '.join(map(repr, DENSE))}"
                )
            return
        if strategy in SPARSE_STRATEGIES and strategy not in self.strategies:
            if self.strategies == ANY:
                raise CodecError(f"strategy {strategy!r} merges sparse blocks; codec {self.codec!r} makes none")
            owners = " or ".join(repr(name) for name, exchange in SPARSE.items() if strategy in exchange.strategies)
            own = " or ".join(map(repr, self.strategies))
            raise CodecError(f"strategy {strategy!r} is that of codec {owners}; wanted {own} with this one")
        published = self.codec is not None and parse_spec(self.codec)[0] == "published"
        if published and strategy not in (AUTO, *SPARSE_STRATEGIES):
            raise CodecError(
                f"strategy {strategy!r} with {self.codec!r}, which compares its own block with the final one; "
                f"wanted {SPARSE['gtopk_published'].strategies[0]!r}"
            )
        if self.codec is None and strategy in COMPRESSED_ONLY:
            raise CodecError(f"strategy {strategy!r} sends every rank's payload to every rank; wanted a codec with it")
        if self.codec is not None and strategy == NATIVE:
            raise CodecError(f"codec {self.codec!r} with strategy 'native': the engine compresses nothing; wanted ours")

    def strategies_by(self, engine: str, world_size: int | None = None) -> tuple[str, ...]:
        """Return the strategies that an engine, by name, may carry this codec with; the first is preferred.

        Between two ranks that is `all_gather`: as many bytes as any other, in one round instead of two, and gradients
        are rounded once, where the others round sums too. `world_size` None: not known.
        """
        if is_low_rank(self.codec) and engine == NCCL:
            return (NATIVE,)
        if self.strategies != ANY:
            return self.strategies
        found = ANY_ON_DEVICE if engine == NCCL else ANY
        return tuple(sorted(found, key=lambda name: name != ALL_GATHER)) if world_size == 2 else found

    def route(self, engine: str, world_size: int, strategy: str = AUTO) -> Route:
        """Return the route of all buckets where there is no plan; codec 'auto' compresses nothing without one."""
        if self.codec in (None, AUTO):
            return Route(NATIVE)
        return Route(self.strategies_by(engine, world_size)[0] if strategy == AUTO else strategy, self.codec)

    def local_strategy(self, engine: str = "") -> str | None:
        """Return local aggregation with this codec between hosts; None where "auto" must not choose it.

        With momentum each rank keeps a velocity, and only those that encode know what was sent and to be forgotten; the
        published exchange is there to be compared with; factors are small, and encoded nowhere.
        """
        if self.codec is None or self.momentum.factor or parse_spec(self.codec)[0] in ("published", LOW_RANK):
            return None
        return f"{HIERARCHICAL}(outer={self.strategies_by(engine)[0]})"

    def check_planner(self, planner: str) -> None:
        """Refuse a planner whose buckets do not hold what entries are to be selected from."""
        if self.select == "model" and planner != "single":
            raise CodecError(f"select='model' with planner {planner!r}; wanted 'single', which makes one bucket of all")
        if self.codec == AUTO and planner not in AUTO_PLANNERS:
            wanted = " or ".join(map(repr, AUTO_PLANNERS))
            raise CodecError(f"codec 'auto' with planner {planner!r}: it compares the best plans; wanted {wanted}")
        for candidate in self.candidates:
            candidate.check_planner(planner)

    def refuse_parts(self, where: str) -> None:
        """Refuse to select entries from the whole model where what travels together is a part of it."""
        if self.select == "model":
            raise CodecError(f"select='model' {where}; wanted select='tensor' or 'bucket'")

    def codec_at(self, spec: str, iteration: int) -> str:
        """Return what stands in for a plan's codec in an iteration: the same at another density while warming up."""
        if self.schedule is None:
            return spec
        name, parameters = parse_spec(spec)
        if name not in SPARSE_CODECS:
            return spec
        return write_spec(name, parameters | {"density": self.schedule(iteration // self.stage_iterations)})


def texts_of(codecs: Iterable[str]) -> dict[str, str]:
    """Return a fingerprint of the text of each codec: hosts may have different ones under one name."""
    return {f"the text of codec {codec!r} (fingerprint)": repr(fingerprint(codec)) for codec in codecs}


def make_scheme(
    codec: str | Codec | None,
    density: float | None = None,
    warmup_spec: Warmup = None,
    warmup_every: int = 1,
    dense_below: int = 0,
    momentum: Momentum | None = None,
    select: str = "tensor",
    candidates: Sequence[str] | None = None,
) -> Scheme:
    """Return what the options of a wrapper mean; refuse those that mean nothing."""
    codec = codec_name(codec) if isinstance(codec, Codec) else codec
    _check_types(codec, density, dense_below, warmup_every)
    _check_candidates(codec, candidates)
    if codec is not None:
        check_known(codec)
    if warmup_spec is None and warmup_every != 1:
        raise CodecError(f"warmup_every is {warmup_every}, and there is no warmup; wanted both, or neither")
    if select not in GRANULARITIES:
        raise CodecError(f"select={select!r}; wanted one of {', '.join(GRANULARITIES)}")
    kept = momentum or Momentum()
    exchange = None if codec is None else _sparse_exchange(codec)
    if codec is None or exchange is None:
        _refuse_density(codec, density, warmup_spec)
        if select != "tensor":
            raise CodecError(f"select={select!r} with codec {codec!r}; wanted one of {', '.join(SPARSE)}")
        if codec == AUTO:
            each = (make_scheme(one, dense_below=dense_below, momentum=kept) for one in candidates or AUTO_CODECS)
            return Scheme(
                codec,
                dense_below=dense_below,
                momentum=kept,
                candidates=tuple(each),
                chosen_by_us=candidates is None,
            )
        if codec is not None:
            make_codec(codec)
        if is_low_rank(codec):
            _check_low_rank(str(codec), kept)
            return Scheme(codec, DENSE, dense_below=dense_below, momentum=kept)
        return Scheme(codec, dense_below=dense_below, momentum=kept)
    settings = _settings(codec, density)
    spec = write_spec(exchange.codec, settings)
    make_codec(spec)
    _check_masking(codec, settings, kept)
    schedule = None if warmup_spec is None else warmup(warmup_spec, settings["density"])
    return Scheme(spec, exchange.strategies, schedule, warmup_every, dense_below, kept, select)


def _check_types(codec: object, density: object, dense_below: object, warmup_every: object) -> None:
    """Refuse what is not even of the kind that is wanted."""
    if codec is not None and not isinstance(codec, str):
        raise CodecError(f"codec is {codec!r}; wanted a name such as 'onebit', a Codec, or None")
    if density is not None and not isinstance(density, int | float):
        raise CodecError(f"density is {density!r}; wanted a number such as {DENSITY}")
    if not isinstance(dense_below, int) or dense_below < 0:
        raise CodecError(f"dense_below is {dense_below!r}; wanted a number of elements, 0 or more")
    if not isinstance(warmup_every, int) or warmup_every < 1:
        raise CodecError(f"warmup_every is {warmup_every!r}; wanted at least 1 iteration for each density")


def _check_candidates(codec: str | None, candidates: object) -> None:
    """Refuse what codec="auto" cannot choose from."""
    if candidates is None:
        return
    example = ", ".join(map(repr, AUTO_CODECS))
    if isinstance(candidates, str) or not isinstance(candidates, Sequence) or not candidates:
        raise CodecError(f"candidates is {candidates!r}; wanted a list of codecs such as [{example}]")
    if codec != AUTO:
        raise CodecError(f"candidates with codec {codec!r}; wanted codec='auto', which chooses from them")
    for index, each in enumerate(candidates):
        if not isinstance(each, str) or each == AUTO:
            raise CodecError(f"candidates has {each!r}; wanted names of codecs such as {example}")
        if each in candidates[:index]:
            raise CodecError(f"candidates has {each!r} twice; wanted each codec once, the safest first")


def is_safe_for_adam(codec: str) -> bool:
    """Say whether a codec is shown safe for Adam's family; of a user's own source nothing is known, and said."""
    name, parameters = parse_spec(codec)
    if name.endswith(".cll") or is_object(codec) or name in _SAFE_FOR_ADAM:
        return True
    shown = 0 < parameters.get("block", _SHOWN_BLOCK) <= _SHOWN_BLOCK and not parameters.get("stochastic", 0)
    return name == "blocks" and parameters.get("bits", 4) >= 4 and shown


def adam_warning(codecs: Iterable[str], optimizer: str, instead: str = "codec='blocks(bits=4)'") -> str:
    """Return what a user is told whose optimizer, by name, divides by past gradients; empty where all codecs are safe.

    >>> adam_warning(["blocks(bits=4)"], "Adam")
    ''
    """
    unsafe = next((codec for codec in codecs if not is_safe_for_adam(codec)), None)
    if unsafe is None:
        return ""
    return (
        f"codec {unsafe!r} with {optimizer}: its error goes into the second moment, and training with such ones ended "
        f"far behind dense in our runs. Use {instead}; see docs/choosing-a-codec.md"
    )


def codec_choices() -> tuple[str, ...]:
    """Return every name that may be asked for."""
    return tuple(dict.fromkeys((AUTO, LOW_RANK, *codec_names(), *SPARSE)))


def check_known(codec: str) -> None:
    """Refuse an unknown codec; the error names those that there are, each with its parameters."""
    name, _ = parse_spec(codec)
    known = (*codec_choices(), *SPARSE_CODECS)
    if name.endswith(".cll") or is_object(codec) or name.replace("-", "_") in known:
        return
    shipped = [f"{each}({', '.join(parameter_names(each))})".removesuffix("()") for each in codec_names()]
    sparse = [f"{each}({', '.join(_SETTINGS)})" for each in SPARSE if each not in codec_names()]
    others = [*sparse, f"{LOW_RANK}(rank, rounds)", AUTO]
    raise CodecError(
        f"codec {codec!r}; wanted one of {', '.join([*shipped, *others])}, or a path to a .cll file; parameters are "
        f"written as in terngrad(bitwidth=2){did_you_mean(name, known)}"
    )


def _sparse_exchange(codec: str) -> SparseExchange | None:
    """Return the exchange that a codec names; `topk(density=0.01)` is the codec of the language, for any strategy."""
    name, parameters = parse_spec(codec)
    name = _WRITTEN.get(name, name.replace("-", "_"))
    return None if is_object(codec) or (parameters and name in codec_names()) else SPARSE.get(name)


def _settings(codec: str, density: float | None) -> dict[str, float]:
    """Return what a sparse exchange is told, in its own text or beside it."""
    _, settings = parse_spec(codec)
    if unknown := sorted(settings.keys() - set(_SETTINGS)):
        near = did_you_mean(unknown[0], _SETTINGS)
        raise CodecError(f"codec {codec!r}: no parameter {unknown[0]!r}; wanted {' or '.join(_SETTINGS)}{near}")
    if density is not None and settings.get("density", density) != density:
        raise CodecError(f"codec {codec!r} and density={density!r}; wanted one density")
    return {"density": DENSITY if density is None else density} | settings


def _check_masking(codec: str, settings: Mapping[str, float], momentum: Momentum) -> None:
    """Refuse to look for zeros in a residual that keeps what 16 bits rounded: what was sent would not be found."""
    if settings.get("value_bits", 32) != 32 and momentum.factor and momentum.masking:
        raise CodecError(
            f"codec {codec!r} with momentum: masking finds what was sent by residuals of 0, and 16-bit values leave "
            "their rounding there; wanted value_bits=32, or momentum_masking=False"
        )


def refuse_factors(scheme: Scheme, plan: Plan | None, where: str) -> None:
    """Refuse low-rank codecs where checkpoints have no room for the factors that they start from."""
    planned = () if plan is None else (bucket.codec for bucket in plan.buckets if bucket.codec)
    for codec in (*scheme.named, *planned):
        if is_low_rank(codec):
            raise CodecError(
                f"codec {codec!r} with {where}: the factors that it starts from would not be in checkpoints; wanted "
                "another codec, such as 'blocks(bits=4)'"
            )


def _check_low_rank(codec: str, momentum: Momentum) -> None:
    """Refuse to look for zeros in what low-rank factors leave: no element of it was sent as it is."""
    if momentum.factor and momentum.masking:
        raise CodecError(
            f"codec {codec!r} with momentum: masking forgets the velocity of elements that were sent, and factors send "
            "none by itself; leave momentum to the optimizer, or pass momentum_masking=False"
        )


def _refuse_density(codec: str | None, density: float | None, warmup_spec: Warmup) -> None:
    if density is None and warmup_spec is None:
        return
    wanted = f"wanted one of {', '.join(SPARSE)}"
    if codec is None:
        raise CodecError(f"density or warmup without a codec; {wanted}")
    name, _ = parse_spec(codec)
    own = name in codec_names() and "density" in parameter_names(name)
    raise CodecError(f"density or warmup with codec {codec!r}; {wanted}" + (f", or write {name}(density=...)" * own))
