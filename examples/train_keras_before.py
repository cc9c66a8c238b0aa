"""Learn a circle with Keras on one process: the script that `train_keras.py` makes parallel."""

import keras
import numpy as np

STEPS = 300

random = np.random.default_rng(1)
points = 2 * random.random((64 * STEPS, 2), np.float32) - 1
inside = (np.square(points).sum(1) < 0.5).astype(np.float32)
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(1)])
loss = keras.losses.BinaryCrossentropy(from_logits=True)
optimizer = keras.optimizers.SGD(0.5, momentum=0.9)
model.compile(optimizer=optimizer, loss=loss)
model.fit(points, inside, batch_size=64, verbose=0)
right = ((model.predict(points[:1000], verbose=0)[:, 0] > 0) == inside[:1000]).mean()
print("learned the circle" if right > 0.95 else f"only {100 * right:.0f}% right")
