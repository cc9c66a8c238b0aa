"""What ranks compare outside of the gradients, and what an iteration is made of."""

import hashlib

import numpy as np

import train_jobs
from penstock.train.loop import History, Split
from spawn import spawn


def test_scalar_and_empty_parameters_are_compared_too():
    wanted = hashlib.sha256(np.full(7, 1.5, np.float32).tobytes()).hexdigest()
    assert spawn(2, train_jobs.digest, [(), (0,), (2, 3)]) == [wanted] * 2


def test_an_iterations_parts_add_up_to_it_though_passes_alone_were_slower():
    history = History()
    history.add_steps(1, [1.0, 1.0], [0.5, 0.5])
    history.communications.append(0.25)
    assert history.split(0.375) == Split(0.5, 0.375, 0.125, 0.125)
    assert history.split(0.75) == Split(0.5, 0.5, 0.25, 0.0)
