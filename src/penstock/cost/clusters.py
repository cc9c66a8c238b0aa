"""Published clusters by name, as networks. Each says where its numbers come from and what was not published."""

from collections.abc import Mapping

from penstock.errors import NetworkError
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
        name="gtop-k-1gbe",
        source="gTop-k section IV-C: alpha 0.436 ms, beta 9e-6 ms per byte; no gamma published",
    ),
    Network(
        workers=16,
        alpha_seconds=0.20337e-3,
        beta_seconds_per_byte=8.5005e-7 * 1e-3 / 4,
        gamma_seconds_per_byte=0.0,
        name="hipress-100gbps",
        source="HiPress's planner constants, one ring step (ms per float32 element); 37.6 Gb/s of the nominal 100",
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
        raise NetworkError(f"no network called {name_or_path!r}; wanted a .json file or one of {', '.join(CLUSTERS)}")
    return load_network(name_or_path)
