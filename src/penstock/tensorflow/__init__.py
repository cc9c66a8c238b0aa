"""Data-parallel training in TensorFlow (2.16 and newer) and Keras 3, with Horovod's names where it has them.

    import penstock.tensorflow as pk          # was: import horovod.tensorflow as hvd

    pk.init()                                 # torchrun, mpirun or Slurm started the ranks
    model.compile(optimizer=pk.DistributedOptimizer(keras.optimizers.Adam(1e-3), codec="blocks(bits=4)"), loss=...)
    model.fit(data, callbacks=[pk.BroadcastGlobalVariablesCallback(0), pk.MetricAverageCallback()])

or, in a training loop of one's own, inside of `tf.function` or not:

    with tf.GradientTape() as tape:
        loss = ...
    tape = pk.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)

Gradients are handed to a `Session` (`penstock/adaptor`) as TensorFlow computes them, so that buckets travel while later
gradients are still computed. docs/frameworks.md says what is supported.
"""

from typing import Any

from penstock.errors import naming_extra

with naming_extra():
    import tensorflow  # noqa: F401

from penstock.adaptor.current import (
    Average,
    Compression,
    Max,
    Min,
    Product,
    Sum,
    absent,
    allgather_object,
    broadcast_object,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from penstock.tensorflow.averaging import sessions
from penstock.tensorflow.callbacks import (
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)
from penstock.tensorflow.ops import (
    allgather,
    allreduce,
    broadcast,
    broadcast_variables,
    grouped_allgather,
    grouped_allreduce,
    local_rank_op,
    local_size_op,
    rank_op,
    size_op,
)
from penstock.tensorflow.optimizer import DistributedOptimizer, load_model
from penstock.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape

__all__ = [
    "Average",
    "BroadcastGlobalVariablesCallback",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "Max",
    "MetricAverageCallback",
    "Min",
    "PartialDistributedGradientTape",
    "Product",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_object",
    "broadcast_variables",
    "grouped_allgather",
    "grouped_allreduce",
    "init",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "rank",
    "rank_op",
    "sessions",
    "shutdown",
    "size",
    "size_op",
]


def __getattr__(name: str) -> Any:
    raise absent(__name__, name)
