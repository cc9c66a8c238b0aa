"""Does compressed training end where dense training ends? Several workers in one process, on one device.

Computation is real; the network is not there, and is not needed: what a worker receives does not depend on how fast it
came. All methods and seeds take a step together, and a launch does all runs and workers (`layers`, `recurrence`), so
that dozens of runs of thousands of steps fit into minutes on one GPU. The exchanges are written anew over all workers
at once (`sparse`, `quantised`), and tests hold them against the programs that the runtime executes.
"""
