"""The vocabulary of the architectures: what a layer learns, and what its two passes compute and move.

A `Layer` is a fact about an architecture, not about a device: parameter shapes, multiply-accumulates, elements
read and written. `estimate_traces.py` turns it into seconds. Nothing here imports torch.
"""

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter tensor."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the tensor, and of its gradient."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Work:
    """What one kernel, or a run of `launches` dependent kernels, does."""

    macs: int = 0  # multiply-accumulates per sample
    activations: int = 0  # elements read and written per sample
    weights: int = 0  # elements read and written whatever the batch
    launches: int = 1  # kernels, one after another


@dataclass(frozen=True, slots=True)
class Layer:
    """One step of the forward pass; `parameters` may be empty, as for an activation function.

    Parameters stand in the order in which torch's autograd hands out their gradients: a linear layer's bias comes
    before its weight (`addmm` lists it first), everywhere else the weight comes first.
    """

    name: str
    forward: tuple[Work, ...]
    backward: tuple[Work, ...]
    parameters: tuple[Parameter, ...] = ()

    @property
    def macs(self) -> int:
        """Multiply-accumulates of the forward pass per sample."""
        return sum(work.macs for work in self.forward)


def conv(
    name: str, channels: int, size: int, outputs: int, kernel: int, output_size: int, *, bias: bool, first: bool
) -> Layer:
    """Return a square convolution; the `first` layer of a network needs no gradient of its input, the image."""
    weight = Parameter(f"{name}.weight", (outputs, channels, kernel, kernel))
    parameters = (weight, Parameter(f"{name}.bias", (outputs,))) if bias else (weight,)
    macs = weight.numel * output_size**2
    return _matrix_product(name, parameters, macs, channels * size**2, outputs * output_size**2, first=first)


def linear(name: str, positions: int, inputs: int, outputs: int, *, transposed: bool = False) -> Layer:
    """Return a linear layer applied to `positions` vectors per sample; `transposed` is GPT-2's (inputs, outputs)."""
    weight = Parameter(f"{name}.weight", (inputs, outputs) if transposed else (outputs, inputs))
    bias = Parameter(f"{name}.bias", (outputs,))
    return _matrix_product(
        name, (bias, weight), positions * inputs * outputs, positions * inputs, positions * outputs, first=False
    )


def tied_linear(name: str, positions: int, inputs: int, outputs: int) -> Layer:
    """Return a linear layer that borrows an embedding's table: its work is here, its gradient waits for the table's."""
    moved = Work(positions * inputs * outputs, positions * (inputs + outputs), inputs * outputs)
    return Layer(name, (moved,), (moved, moved))


def _matrix_product(
    name: str, parameters: tuple[Parameter, ...], macs: int, inputs: int, outputs: int, *, first: bool
) -> Layer:
    """Backward: one product for the input's gradient, one for the weight's, a sum for the bias's."""
    weights = sum(parameter.numel for parameter in parameters if len(parameter.shape) > 1)
    product = Work(macs, inputs + outputs, weights)
    sums = tuple(Work(0, outputs, p.numel) for p in parameters if len(p.shape) == 1)
    return Layer(name, (product,), (product, *(() if first else (product,)), *sums), parameters)


def batch_norm(name: str, channels: int, elements: int) -> Layer:
    """Return a normalisation of `elements` values: forward reads twice, backward reads value and gradient twice."""
    return _normalisation(name, channels, Work(0, 3 * elements, launches=2), Work(0, 5 * elements, launches=2))


def layer_norm(name: str, positions: int, width: int) -> Layer:
    """Return a normalisation of each position; a row fits on chip, so forward reads it once."""
    elements = positions * width
    return _normalisation(name, width, Work(0, 2 * elements), Work(0, 5 * elements, launches=2))


def _normalisation(name: str, width: int, forward: Work, backward: Work) -> Layer:
    parameters = (Parameter(f"{name}.weight", (width,)), Parameter(f"{name}.bias", (width,)))
    return Layer(name, (forward,), (backward,), parameters)


def embedding(name: str, positions: int, rows: int, width: int) -> Layer:
    """Return a table look-up: forward gathers rows, backward writes a dense gradient and adds rows into it."""
    table = Parameter(f"{name}.weight", (rows, width))
    gathered = positions * width
    return Layer(name, (Work(0, 2 * gathered),), (Work(0, 3 * gathered, table.numel, launches=2),), (table,))


def elementwise(name: str, elements: int, inputs: int = 1) -> Layer:
    """Return an activation, a dropout, a loss, or with two inputs the sum of a residual connection.

    Backward reads a gradient and a saved value (or, at a residual's fork, two gradients) and writes one.
    """
    return Layer(name, (Work(0, (inputs + 1) * elements),), (Work(0, 3 * elements),))


def resample(name: str, inputs: int, outputs: int) -> Layer:
    """Return a pooling or a concatenation: reads `inputs`, writes `outputs`, and the reverse."""
    return Layer(name, (Work(0, inputs + outputs),), (Work(0, inputs + outputs),))


def attention(name: str, positions: int, width: int, heads: int) -> Layer:
    """Return scores, softmax, dropout and the weighted sum, between the projections; scores are stored, not fused."""
    product, vectors, scores = positions**2 * width, positions * width, heads * positions**2
    forward = (
        Work(product, 2 * vectors + scores),
        Work(0, 4 * scores, launches=2),
        Work(product, 2 * vectors + scores),
    )
    backward = (
        Work(2 * product, 3 * vectors + 2 * scores, launches=2),
        Work(0, 6 * scores, launches=2),
        Work(2 * product, 4 * vectors + scores, launches=2),
    )
    return Layer(name, forward, backward)


def lstm(name: str, index: int, steps: int, inputs: int, hidden: int) -> Layer:
    """Return layer `index` of `torch.nn.LSTM`: the input products of all steps at once, then one step after another.

    Each step reads the recurrent weights again (they do not stay on chip) and takes two kernels, product and gates.
    """
    gates = 4 * hidden
    weight_ih = Parameter(f"{name}.weight_ih_l{index}", (gates, inputs))
    weight_hh = Parameter(f"{name}.weight_hh_l{index}", (gates, hidden))
    biases = tuple(Parameter(f"{name}.bias_{part}_l{index}", (gates,)) for part in ("ih", "hh"))
    batched = Work(steps * weight_ih.numel, steps * (inputs + gates), weight_ih.numel)
    stepped = Work(steps * weight_hh.numel, steps * (2 * hidden + 2 * gates), steps * weight_hh.numel, 2 * steps)
    recurrent_gradient = Work(steps * weight_hh.numel, steps * (hidden + gates), weight_hh.numel)
    sums = Work(0, steps * gates, 2 * gates, launches=2)
    unrolled = replace(stepped, macs=(steps - 1) * weight_hh.numel)  # the state before the first step is a constant
    backward = (unrolled, batched, batched, recurrent_gradient, sums)
    return Layer(name, (batched, stepped), backward, (weight_ih, weight_hh, *biases))
