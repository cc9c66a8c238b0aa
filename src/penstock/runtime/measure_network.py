"""Measures a network from inside: alpha, beta, gamma, and the line of the engine's own all-reduce.

All ranks measure together and agree on every time (the slowest rank's counts), so all of them return the same network.
Messages go round a ring, every rank sending and receiving at once, as the collectives do; each size is repeated back to
back, so that a token bucket or a switch buffer cannot flatter it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from penstock.cost.fit import Fit, fit_measured
from penstock.network import Network
from penstock.plan import parse_route
from penstock.program import Collective
from penstock.runtime.communicator import Communicator
from penstock.runtime.hosts import processors
from penstock.runtime.measure_codecs import measure_codecs
from penstock.runtime.measure_compressed import compressed_line, with_cores
from penstock.runtime.pages import fresh_pages
from penstock.runtime.reduce import Merge, merge_kernel
from penstock.runtime.timed import (
    LEAST,
    PILOTS,
    SIZES,
    WAIT_SECONDS,
    CoreClock,
    Points,
    Round,
    agreed_points,
    agreed_seconds,
    gathered,
    machines,
    plain_values,
)
from penstock.runtime.transport import Bytes, Transport

LARGEST = 1 << 26  # of dense messages: a startup hides behind its own transfer, and up to 16 MiB the line is too flat
LARGER = (LARGEST, SIZES[-1])  # where growing sizes ended below, one of these is measured too
_CORES_NBYTES = 1 << 22  # of dense messages that tell what each byte takes of the cores
NATIVE = "native"  # the engine's own all-reduce
OFF = 1.3  # times as long, or as short, as was kept: a measurement no longer holds
CHECKED, CHECKS = (1 << 22, 1 << 20, 1 << 18, 1 << 16), 4  # bytes of the message that checks it, and how often at most
CHECK_SECONDS = 0.05  # that one may take
TAG = 1


@dataclass(frozen=True, slots=True)
class Measurement:
    """A network and how well its lines describe what was measured."""

    network: Network
    fits: dict[str, Fit]  # "link", "merge" and the strategies, those that were measured


def measure_network(
    transport: Transport,
    name: str = "measured",
    seconds: float = 4.0,
    strategies: Sequence[str] = (NATIVE,),
    codecs: Sequence[str] = (),
    whole_nbytes: int = 0,
    most_nbytes: int = LARGEST,
) -> Measurement:
    """Measure within about `seconds`; every rank must call this at the same time.

    `strategies` are all-reduces whose lines are measured as they run: the engine's own, and any of ours, dense or
    through a codec (`ring+onebit`). `codecs` are compressors whose curves are measured too, in a quarter of the time
    again for each. `whole_nbytes` are the gradients of a model, where that is known: compressed all-reduces are then
    measured up to one message with all of them. Dense messages of more than 16 MiB are left out where `most_nbytes` is
    less than they take: buffers are memory that training may not have.
    """
    curves = measure_codecs(codecs, transport, seconds / 4)
    links = measure_links(transport, name, seconds / 2)
    if transport.world_size == 1:
        return replace(links, network=replace(links.network, codecs=curves))
    lines = measure_lines(transport, strategies, seconds / 2, links.network, whole_nbytes, most_nbytes)
    all_reduce = {strategy: fit.line for strategy, fit in lines.items()}
    return Measurement(replace(links.network, all_reduce=all_reduce, codecs=curves), {**links.fits, **lines})


def measure_links(transport: Transport, name: str = "measured", seconds: float = 2.0) -> Measurement:
    """Measure alpha, beta and gamma; every rank must call this at the same time."""
    kernel = merge_kernel("float32")  # compiled before the clock starts
    summing = partial(agreed_points, transport, partial(_merge_round, kernel), seconds / 4)
    merge = fit_measured(summing, "summation times")
    gamma = merge.line.b_seconds_per_byte
    if transport.world_size == 1:
        return Measurement(Network(1, 0.0, 0.0, gamma, name=name, cores=processors()), {"merge": merge})
    link = fit_measured(partial(agreed_points, transport, _link_round, seconds * 3 / 4), "point-to-point times")
    alpha, beta = link.line.a_seconds, link.line.b_seconds_per_byte
    cores, ranks = shared_cores(transport)
    network = Network(transport.world_size, alpha, beta, gamma, name=name, cores=cores, ranks_per_machine=ranks)
    return Measurement(network, {"merge": merge, "link": link})


def shared_cores(transport: Transport) -> tuple[int, int]:
    """Return the cores of a machine, and how many ranks in a row share them: (0, 1) where machines have them otherwise.

    Emulated hosts are one machine: what its ranks share are cores, whatever lies between them on the network. Every
    rank must call this at the same time.
    """
    cores, found = int(gathered(transport, float(processors())).min()), machines(transport)
    ranks = len(found[0])
    alike = all(len(each) == ranks == each[-1] - each[0] + 1 for each in found)
    return (cores, ranks) if alike else (0, 1)


def link_holds(transport: Transport, network: Network) -> bool:
    """Say whether messages between neighbours still take what `network` says, in a tenth of a second or so.

    The best of a few counts: whatever else a machine does only ever adds. Every rank must call this at the same time,
    and all say the same.
    """
    if transport.world_size == 1:
        return True
    nbytes = next((size for size in CHECKED if network.link.seconds(size) <= CHECK_SECONDS), CHECKED[-1])
    first, second = plain_values(nbytes), fresh_pages(nbytes)
    agreed_seconds(transport, _link_round, first, second, PILOTS)
    taken = float("inf")
    for _ in range(CHECKS):
        taken = min(taken, agreed_seconds(transport, _link_round, first, second, 1))
        if 1 / OFF <= taken / network.link.seconds(nbytes) <= OFF:
            return True
    return False


def measure_lines(
    transport: Transport,
    strategies: Sequence[str],
    seconds: float,
    network: Network,
    whole_nbytes: int = 0,
    most_nbytes: int = LARGEST,
) -> dict[str, Fit]:
    """Measure all-reduces as they run, by name, as `measure_network` does."""
    share = seconds / max(1, len(strategies))
    return {name: measure_line(transport, name, share, network, whole_nbytes, most_nbytes) for name in strategies}


def measure_line(
    transport: Transport,
    strategy: str,
    seconds: float,
    network: Network | None = None,
    whole_nbytes: int = 0,
    most_nbytes: int = LARGEST,
) -> Fit:
    """Measure one all-reduce as it runs, dense or through a codec; every rank must call this at the same time.

    On `network`, whose links were measured before, a linear pipeline has the blocks that it will have in training.
    """
    if "+" in strategy:
        return compressed_line(transport, strategy, seconds, whole_nbytes)
    return _dense_line(transport, strategy, seconds, network, most_nbytes)


def _dense_line(transport: Transport, strategy: str, seconds: float, network: Network | None, most_nbytes: int) -> Fit:
    one_round = _native_round if strategy == NATIVE else _route_round(transport, strategy, network)

    def points() -> Points:
        found = agreed_points(transport, one_round, seconds)
        return found + _larger_point(transport, one_round, seconds, found[-1], most_nbytes)

    fit = fit_measured(points, f"all-reduce times by {strategy}")
    if strategy == NATIVE:
        return fit
    values = plain_values(_CORES_NBYTES)
    timed = partial(agreed_seconds, transport, one_round, values, values)
    timed(PILOTS)
    clock = CoreClock(transport)
    used = min(clock.seconds(partial(timed, 1))[1] for _ in range(LEAST))
    return replace(fit, line=with_cores(transport, fit.line, one_round, clock, _CORES_NBYTES, used))


def _larger_point(
    transport: Transport, one_round: Round, seconds: float, last: tuple[float, float], most_nbytes: int
) -> Points:
    """Return (bytes, seconds) of one larger size, of which a round takes no more than half of the budget.

    Buckets are often larger than what the budget allows three rounds of. The better of two rounds: so few cannot be
    told from a hiccup by their mean.
    """
    size, taken = last
    allowed = (each for each in LARGER if size < each <= max(most_nbytes, SIZES[-1]))
    nbytes = next((each for each in allowed if taken * each / size <= seconds / 2), None)
    if nbytes is None:
        return []
    values = plain_values(nbytes)
    return [(float(nbytes), min(agreed_seconds(transport, one_round, values, values, 1) for _ in range(2)))]


def _link_round(transport: Transport, outgoing: Bytes, incoming: Bytes) -> None:
    after, before = (transport.rank + 1) % transport.world_size, (transport.rank - 1) % transport.world_size
    receiving = transport.irecv(incoming, before, TAG)
    sending = transport.isend(outgoing, after, TAG)
    receiving.wait(WAIT_SECONDS)
    sending.wait(WAIT_SECONDS)


def _native_round(transport: Transport, values: Bytes, _: Bytes) -> None:
    transport.native(Collective.ALL_REDUCE, values.view(np.float32), "float32", 0, WAIT_SECONDS)


def _route_round(transport: Transport, text: str, network: Network | None) -> Round:
    """Return what carries out one dense all-reduce by a route of ours."""
    communicator, route = Communicator(transport, WAIT_SECONDS, network=network), parse_route(text)
    return lambda _, values, __: communicator.all_reduce(values.view(np.float32), route.strategy, **route.options)


def _merge_round(kernel: Merge, _: Transport, out: Bytes, other: Bytes) -> None:
    kernel(out.view(np.float32), other.view(np.float32))
