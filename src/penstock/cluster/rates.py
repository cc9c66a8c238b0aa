"""Reading rates and delays as people write them: `1gbit`, `100mbit`, `none`; `5ms`, `200us`."""

import re

from penstock.errors import ClusterError, shorten

RATE_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
DELAY_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
UNSHAPED = "none"
SLOWEST, FASTEST = 10**5, 10**11  # bits per second; outside, the buckets of `links.py` make no sense


def parse_rate(text: str) -> int | None:
    """Return bits per second, or None for `none`, a link without a limit.

    >>> parse_rate("2.5gbit")
    2500000000
    """
    if text.strip().lower() == UNSHAPED:
        return None
    number, unit = _split(text, RATE_UNITS, f"rate {shorten(text)}: wanted a number and one of bit, kbit, mbit, gbit")
    bits_per_second = round(number * RATE_UNITS[unit])
    if not SLOWEST <= bits_per_second <= FASTEST:
        raise ClusterError(f"rate {shorten(text)}: wanted 100kbit to 100gbit, or none for no limit")
    return bits_per_second


def parse_rates(text: str, hosts: int) -> tuple[int | None, ...]:
    """Return one rate per host from `1gbit` (all the same) or `1gbit,1gbit,100mbit` (one each)."""
    rates = tuple(parse_rate(part) for part in text.split(","))
    if len(rates) == 1:
        return rates * hosts
    if len(rates) != hosts:
        raise ClusterError(f"rate {shorten(text)} names {len(rates)} hosts of {hosts}; give one rate, or one per host")
    return rates


def parse_delay(text: str) -> float:
    """Return seconds.

    >>> parse_delay("5ms")
    0.005
    """
    number, unit = _split(
        text, DELAY_UNITS, f"latency {shorten(text)}: wanted a number and one of us, ms, s, as in 5ms"
    )
    return number * DELAY_UNITS[unit]


def format_rate(bits_per_second: int | None) -> str:
    """Return a rate in the unit a person would write.

    >>> format_rate(2_500_000_000)
    '2.5gbit'
    """
    if bits_per_second is None:
        return UNSHAPED
    for unit, scale in sorted(RATE_UNITS.items(), key=lambda item: -item[1]):
        if bits_per_second >= scale:
            return f"{bits_per_second / scale:g}{unit}"
    return f"{bits_per_second}bit"


def _split(
    text: str, units: dict[str, object] | dict[str, int] | dict[str, float], complaint: str
) -> tuple[float, str]:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text.lower())
    if match is None or match[2] not in units:
        raise ClusterError(complaint)
    return float(match[1]), match[2]
