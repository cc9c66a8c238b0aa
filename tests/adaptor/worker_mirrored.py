"""What TensorFlow's own data parallelism learns of the task that ranks of ours are given: the loss to compare with."""

import keras
import numpy as np
import tensorflow as tf

from adaptor.frameworks import report
from adaptor.worker_tensorflow import LOSS, STEPS_OF_TRAINING, task

if __name__ == "__main__":
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    keras.utils.set_random_seed(3)
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(3)])
        model.compile(optimizer=keras.optimizers.SGD(0.1), loss=LOSS)
    batches = [task(step, rank) for step in range(STEPS_OF_TRAINING) for rank in range(2)]
    inputs, labels = (np.concatenate(each) for each in zip(*batches, strict=True))
    model.fit(inputs, labels, batch_size=32, shuffle=False, verbose=0)
    together = [np.concatenate(each) for each in zip(*(task(900, rank, 500) for rank in range(2)), strict=True)]
    report(0, loss=float(model.evaluate(*together, verbose=0, batch_size=1000)))
