"""Momentum around a sparse exchange, against the formulas of the papers written out."""

import numpy as np
import pytest

from penstock.codecs.sparse.sparse_codec import SparseCodec
from penstock.errors import CodecError
from penstock.exchange.momentum import Momentum, sent_from
from sparse_oracle import dyadic, keep_largest


def exchange(momentum, gradients, density):
    """One rank alone: return what was applied in each step, velocity and residual."""
    numel = gradients.shape[1]
    velocity, residual = np.zeros(numel, np.float32), np.zeros(numel, np.float32)
    codec, applied = SparseCodec(density), []
    block = np.zeros(codec.max_nbytes(numel), np.uint8)
    for gradient in gradients:
        data = gradient.copy()
        momentum.before(data, velocity)
        codec.encode(data, residual, block)
        momentum.after(velocity, sent_from(residual))
        codec.decode(block, data)
        applied.append(data)
    return np.array(applied), velocity, residual


@pytest.mark.parametrize("nesterov", [False, True])
def test_with_everything_sent_correction_is_torchs_momentum(nesterov):
    torch = pytest.importorskip("torch")
    gradients = np.random.default_rng(0).standard_normal((5, 20)).astype(np.float32)
    applied, _, _ = exchange(Momentum(0.9, nesterov, masking=False), gradients, density=1.0)
    weight = torch.zeros(20, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9, nesterov=nesterov)
    for gradient in gradients:
        weight.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
    np.testing.assert_allclose(-applied.sum(axis=0), weight.detach().numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("masking", [False, True])
def test_corrected_momentum_goes_as_deep_gradient_compression_writes_it(masking):
    gradients, density = dyadic(np.random.default_rng(1), (6, 40), bits=4), 0.1
    u, v, wanted = np.zeros(40), np.zeros(40), []
    for gradient in gradients:  # DGC, algorithm 4 with momentum 1/2
        u = 0.5 * u + gradient
        v = v + u
        sent = keep_largest(v, 4)
        wanted.append(sent)
        v = v - sent
        if masking:
            u = u * (v != 0)  # whatever was sent, or was 0 in the first place
    applied, velocity, residual = exchange(Momentum(0.5, masking=masking), gradients, density)
    assert np.array_equal(applied, wanted)
    assert np.array_equal(velocity, u)
    assert np.array_equal(residual, v)


def test_plain_momentum_leaves_gradients_to_the_optimizer():
    gradient = np.arange(4, dtype=np.float32)
    Momentum().before(gradient, None)
    Momentum().after(None, np.array([0]))
    assert gradient.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("norm", "factor"), [(10.0, 0.2), (2.0, 1.0), (0.0, 1.0), (np.inf, 1.0), (np.nan, 1.0)])
def test_a_rank_is_clipped_to_its_share_of_the_joint_norm(norm, factor):
    assert Momentum(clip=6.0).shrinks_by(norm, world_size=9) == pytest.approx(factor)
    assert Momentum().shrinks_by(norm, world_size=9) == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"factor": 1.0}, r"momentum 1\.0; wanted 0 or more and less than 1"),
        ({"factor": "0.9"}, "momentum '0.9'; wanted 0 or more and less than 1"),
        ({"clip": 0.0}, "gradients clipped to norm 0.0; wanted more than 0"),
        ({"clip": "1"}, "gradients clipped to norm '1'; wanted more than 0"),
        ({"clip": 1.0, "clip_by": "layer"}, "gradients clipped by 'layer'; wanted one of model, tensor"),
        ({"nesterov": True}, "Nesterov's momentum with factor 0; set the factor"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(CodecError, match=message):
        Momentum(**arguments)
