"""Which levels, scale and feedback should a block of few-bit integers have? Prints the table of docs/codecs/blocks.md.

For each choice: |sent - gradient|^2 / |gradient|^2, the mean over the last 60 of 100 steps on independent gradients. It
is the noise that an optimizer sees beside the gradient: what is rounded now, and what was rounded before and is sent
now. Plain numpy, no codec of ours, always the same numbers.

    python benchmarks/block_levels.py [BLOCK]          64 unless said
"""

import sys
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[np.float64]  # a row for each block
Scale = Callable[[Blocks], Blocks]
BLOCKS, STEPS, COUNTED = 200, 100, 60
FEEDBACK = (1.0, 0.5, 0.25, 0.1)  # part of the residual that is added to a gradient


def largest(x: Blocks) -> Blocks:
    """The largest magnitude."""
    return np.abs(x).max(axis=1, keepdims=True) + 1e-30


def signed(x: Blocks) -> Blocks:
    """The value of largest magnitude."""
    top, bottom = x.max(axis=1, keepdims=True), x.min(axis=1, keepdims=True)
    return np.where(top >= -bottom, top, bottom) + 1e-30


def rms(x: Blocks) -> Blocks:
    """The root of the mean square."""
    return np.sqrt((x * x).mean(axis=1, keepdims=True)) + 1e-30


def mean(x: Blocks) -> Blocks:
    """The mean magnitude."""
    return np.abs(x).mean(axis=1, keepdims=True) + 1e-30


def uniform(low: float, high: float, scale: Scale, share: float) -> Callable[[Blocks], Blocks]:
    """Return rounding to multiples of scale * share from `low` to `high`, whole or, from 1.5, half ones."""

    def quantise(x: Blocks) -> Blocks:
        step = scale(x) * share
        shift = low % 1
        return (np.clip(np.floor(x / step - shift + 0.5) + shift, low, high)) * step

    return quantise


def two_means(x: Blocks) -> Blocks:
    """The mean of the values of the same sign, as onebit has it."""
    up = x >= 0
    means = [
        (x * side).sum(axis=1, keepdims=True) / np.maximum(side.sum(axis=1, keepdims=True), 1) for side in (up, ~up)
    ]
    return np.where(up, *means)


def four_levels(x: Blocks) -> Blocks:
    """The four levels with the least error for a Gaussian, whose mean magnitude is known."""
    scale, magnitude = mean(x), np.abs(x)
    return np.asarray(np.sign(x) * np.where(magnitude > 1.23 * scale, 1.893 * scale, 0.567 * scale))


CHOICES: dict[str, Callable[[Blocks], Blocks]] = {
    "4 bits, -7 to 7, max / 7": uniform(-7, 7, largest, 1 / 7),
    "4 bits, -7 to 8, signed max / 8": uniform(-7, 8, signed, 1 / 8),
    "4 bits, -7 to 7, rms * 0.36": uniform(-7, 7, rms, 0.36),
    "2 bits, -1.5 to 1.5, rms": uniform(-1.5, 1.5, rms, 1),
    "2 bits, -1.5 to 1.5, mean * 1.25": uniform(-1.5, 1.5, mean, 1.25),
    "2 bits, -1 to 1, max / 2": uniform(-1, 1, largest, 1 / 2),
    "2 bits, -1 to 2, signed max / 2": uniform(-1, 2, signed, 1 / 2),
    "2 bits, -1 to 2, signed max / 3": uniform(-1, 2, signed, 1 / 3),
    "2 bits, four levels by the mean": four_levels,
    "1 bit, two means": two_means,
}


def gradients(block: int) -> dict[str, Callable[[], Blocks]]:
    """Return what gradients are drawn from."""
    rng = np.random.default_rng(1)
    shape = BLOCKS, block
    deviations, chosen = np.exp(rng.standard_normal(shape)), rng.random(shape) < 0.05
    return {
        "Gauss": lambda: rng.standard_normal(shape),
        "Laplace": lambda: rng.laplace(size=shape),
        "t, 3": lambda: rng.standard_t(3, size=shape),
        "uneven": lambda: deviations * rng.standard_normal(shape),
        "sparse": lambda: chosen * rng.standard_normal(shape),
    }


def noise(quantise: Callable[[Blocks], Blocks], steps: list[Blocks], feedback: float) -> float:
    """Return how far what is sent is from the gradient, squared, relative to the gradient's square."""
    residual, found = np.zeros_like(steps[0]), []
    for gradient in steps:
        sent = quantise(gradient + feedback * residual)
        residual += gradient - sent
        found.append(float(((sent - gradient) ** 2).sum() / (gradient**2).sum()))
    return float(np.mean(found[-COUNTED:]))


if __name__ == "__main__":
    block = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    drawn = {name: [draw() for _ in range(STEPS)] for name, draw in gradients(block).items()}
    print(f"| levels, scale | feedback | {' | '.join(drawn)} |\n| --- | --- |{' --- |' * len(drawn)}")
    for name, quantise in CHOICES.items():
        for feedback in FEEDBACK:
            cells = (f"{noise(quantise, steps, feedback):.3f}" for steps in drawn.values())
            print(f"| {name} | {feedback:g} | {' | '.join(cells)} |")
