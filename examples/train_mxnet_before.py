"""Learn a circle with MXNet's Gluon in one process: the script that `train_mxnet.py` makes parallel."""

import numpy

numpy.bool = bool  # which MXNet reads when it is imported, and numpy 1.24 took away

# isort: split
import mxnet as mx
from mxnet import autograd, gluon, nd

STEPS = 600

mx.random.seed(0)
net = gluon.nn.Sequential()
net.add(gluon.nn.Dense(64, activation="relu", in_units=2), gluon.nn.Dense(1, in_units=64))
net.initialize(mx.init.Xavier())
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5, "momentum": 0.9})
loss_of = gluon.loss.SigmoidBinaryCrossEntropyLoss()
for _ in range(STEPS):
    points = nd.random.uniform(-1, 1, (64, 2))
    inside = (points**2).sum(1) < 0.5
    with autograd.record():
        loss = loss_of(net(points)[:, 0], inside)
    loss.backward()
    trainer.step(64)
points = nd.random.uniform(-1, 1, (1000, 2))
right = ((net(points)[:, 0] > 0) == ((points**2).sum(1) < 0.5)).mean().asscalar()
print("learned the circle" if right > 0.95 else f"only {100 * right:.0f}% right")
