"""Does compressed training end where dense training ends? Several workers in one process, on one device.

Computation is real; the network is not there, and is not needed: what a worker receives does not depend on how fast it
came. The exchanges are written anew over all workers at once (`sparse`, `quantised`), so that hundreds of runs fit on
one GPU, and tests hold them against the programs that the runtime executes.
"""
