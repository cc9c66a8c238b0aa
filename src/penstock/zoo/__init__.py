"""Ready-made training tasks: the models of the papers and two small ones on random data, and two that learn something.

Nothing is downloaded. Where a trace of the same name is shipped (`penstock.traces`), the parameters have its tensors'
names and sizes. `ZOO` maps the name of a model to a function that returns its task; `find_task` finds a user's too.
"""

from penstock.zoo.load import ZOO, find_task
from penstock.zoo.task import RandomTask, Shard, Task

__all__ = ["ZOO", "RandomTask", "Shard", "Task", "find_task"]
