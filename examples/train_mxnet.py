"""Learn a circle with MXNet's Gluon on all ranks: `mpirun -n 2 python examples/train_mxnet.py`.

`train_mxnet_before.py` beside it is the same script for one process.
"""

import penstock.mxnet as pk  # before mxnet, for which it mends a name of numpy's

# isort: split
import mxnet as mx
from mxnet import autograd, gluon, nd

STEPS = 600

pk.init()
mx.random.seed(pk.rank())
net = gluon.nn.Sequential()
net.add(gluon.nn.Dense(64, activation="relu", in_units=2), gluon.nn.Dense(1, in_units=64))
net.initialize(mx.init.Xavier())
pk.broadcast_parameters(net.collect_params())
trainer = pk.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.5, "momentum": 0.9})
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
if pk.rank() == 0:
    print("learned the circle" if right > 0.95 else f"only {100 * right:.0f}% right")
