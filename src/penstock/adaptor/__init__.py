"""What adaptors for frameworks other than PyTorch have in common; no framework is imported here.

`world.py`: which ranks there are, and small collectives between them. `session.py`: the gradients of one model, from
"ready" to "averaged", planned while it trains, in the memory of `buckets.py`. An adaptor says when gradients are ready
and where they lie:

    world = join()                                        # torchrun's, mpirun's or Slurm's ranks; alone without them
    session = Session(
        world,
        [Gradient("dense/kernel", (784, 10), "float32"), Gradient("dense/bias", (10,), "float32")],  # of all ranks
        codec="onebit",                                   # fields of `Compression` and `Planning`, as in penstock.torch
    )                                                     # compares ranks: one error on all of them
    for step in range(steps):
        for index, values in gradients_as_they_come:      # any order, any thread; numpy arrays, copied at once
            session.put(index, values)                    # a bucket is sent when it and those before it are whole
        averages = session.wait()                         # arrays by index; copy them before the next `put`
    session.close()

Between two iterations, in `wait`, the session goes on with profiling and planning, all ranks at the same place. The
framework's graph need not know of buckets: they change when a plan comes.
"""
