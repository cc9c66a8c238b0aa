"""Published clusters by name, as networks. Each says where its numbers come from and what was not published."""

from collections.abc import Mapping

from penstock.curves import CodecCurves, Curve
from penstock.errors import NetworkError, did_you_mean
from penstock.network import LinearCost, Network, load_network

_GBIT = 1e9 / 8  # bytes per second


def _from_ring_line(name: str, a_seconds: float, b_seconds_per_byte: float, figure: str) -> Network:
    """Return the network whose ring all-reduce on 16 workers costs `a + b M`, summation included in beta.

    Fig. 4 of MG-WFBP publishes only the collective's line. Table 2's ring gives alpha = a / 30 and, with gamma taken
    as 0 (it cannot be told from beta in such a fit), beta = 16 b / 30.
    """
    steps = 2 * (16 - 1)
    return Network(
        workers=16,
        alpha_seconds=a_seconds / steps,
        beta_seconds_per_byte=b_seconds_per_byte * 16 / steps,
        gamma_seconds_per_byte=0.0,
        all_reduce={"ring": LinearCost(a_seconds, b_seconds_per_byte)},
        name=name,
        source=f"MG-WFBP {figure}: a and b on 16 GPUs; alpha and beta by inverting the ring, gamma taken as 0",
    )


_MS_PER_ELEMENT = 1e-3 / 4  # -> seconds per byte
HIPRESS_RATIO = 1 / 16  # its planner's; one bit for a float32 would be 1/32


def curve_of_elements(per_element_ms: float, startup_ms: float, floor_ms: float) -> Curve:
    """Return a curve that HiPress's planner has in milliseconds and float32 elements."""
    return Curve(per_element_ms * _MS_PER_ELEMENT, startup_ms * 1e-3, floor_ms * 1e-3)


# HiPress's planner: onebit on a V100. Its decode curve is of the payload's elements, ours of the gradient's.
_HIPRESS_ONEBIT = CodecCurves(
    ratio=HIPRESS_RATIO,
    encode=curve_of_elements(1.4133e-08, 0.058938, 0.05408),
    decode=curve_of_elements(HIPRESS_RATIO * 6.2041e-09, 0.13956, 0.07287),
)
# gTop-k at density 0.001: an index and a value for each entry. Selecting takes 1.55 ns a byte on a P102-100, within 4%
# of all four models of its Fig. 11; what merging and adding blocks take is left out of its model.
_GTOPK_SPARSE = CodecCurves(
    ratio=0.002,
    encode=Curve(1.55e-9, 0.0),
    decode=Curve(0.0, 0.0),
    block_merge=Curve(0.0, 0.0),
)
_PUBLISHED = (
    _from_ring_line("mg-wfbp-k80-10gbe", 9.72e-4, 1.97e-9, "Fig. 4(a)"),
    _from_ring_line("mg-wfbp-v100-10gbe", 9.08e-4, 7.4e-10, "Fig. 4(b)"),
    _from_ring_line("mg-wfbp-v100-56gbib", 2.36e-4, 4.06e-10, "Fig. 4(c)"),
    Network(
        workers=64,
        alpha_seconds=45.25e-6,
        beta_seconds_per_byte=1.2 / (9 * 2**30 / 8),
        gamma_seconds_per_byte=2.5e-9,
        name="mg-wfbp-simulation",
        source="constants that give MG-WFBP's Fig. 10 (erratum 3); not those of Fig. 4",
    ),
    Network(
        workers=32,
        alpha_seconds=0.436e-3,
        beta_seconds_per_byte=9e-9,
        gamma_seconds_per_byte=0.0,
        codecs={"sparse": _GTOPK_SPARSE},
        name="gtop-k-1gbe",
        source="gTop-k section IV-C: alpha 0.436 ms, beta 9e-6 ms per byte; no gamma published; sparse: density 0.001, "
        "selection as in Fig. 11, merging not counted",
    ),
    Network(
        workers=16,
        alpha_seconds=0.20337e-3,
        beta_seconds_per_byte=8.5005e-7 * 1e-3 / 4,
        gamma_seconds_per_byte=0.0,
        codecs={"onebit": _HIPRESS_ONEBIT},
        name="hipress-100gbps",
        source="HiPress's planner constants, one ring step (ms per float32 element); 37.6 Gb/s of the nominal 100; "
        "onebit's curves and rate of 1/16 are that planner's",
    ),
    Network(
        workers=16,
        alpha_seconds=2.36e-4 / 30,
        beta_seconds_per_byte=1 / (56 * _GBIT),
        gamma_seconds_per_byte=0.0,
        name="hipress-56gbps",
        source="nominal 56 Gb/s; HiPress publishes no latency: alpha is that of MG-WFBP's 56 Gb/s cluster",
    ),
)  # fmt: skip
CLUSTERS: Mapping[str, Network] = {network.name: network for network in _PUBLISHED}


def find_network(name_or_path: str) -> Network:
    """Return a published cluster by name, or read a `penstock-network/1` file."""
    if name_or_path in CLUSTERS:
        return CLUSTERS[name_or_path]
    if "/" not in name_or_path and not name_or_path.endswith(".json"):
        near = did_you_mean(name_or_path, CLUSTERS)
        wanted = f"a .json file or one of {', '.join(CLUSTERS)}{near}"
        raise NetworkError(f"no network called {name_or_path!r}; wanted {wanted}")
    return load_network(name_or_path)
