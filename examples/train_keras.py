"""Learn a circle with Keras on several ranks: `torchrun --nproc-per-node 2 examples/train_keras.py`, or by mpirun.

`train_keras_before.py` beside it is the same script for one process: six lines differ.
"""

import keras
import numpy as np
import penstock.tensorflow as pk

STEPS = 300

pk.init()
random = np.random.default_rng(1 + pk.rank())
points = 2 * random.random((64 * STEPS, 2), np.float32) - 1
inside = (np.square(points).sum(1) < 0.5).astype(np.float32)
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(1)])
loss = keras.losses.BinaryCrossentropy(from_logits=True)
optimizer = pk.DistributedOptimizer(keras.optimizers.SGD(0.5, momentum=0.9))
model.compile(optimizer=optimizer, loss=loss)
model.fit(points, inside, batch_size=64, verbose=0, callbacks=[pk.BroadcastGlobalVariablesCallback(0)])
right = ((model.predict(points[:1000], verbose=0)[:, 0] > 0) == inside[:1000]).mean()
if pk.rank() == 0:
    print("learned the circle" if right > 0.95 else f"only {100 * right:.0f}% right")
