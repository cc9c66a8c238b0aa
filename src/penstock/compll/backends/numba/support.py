"""What generated numba kernels call, in one place: each of them begins with `from support import *`.

Every helper is compiled into its caller. Their loops are written so that LLVM turns them into vector instructions:
known trip counts inside, no calls, 32-bit arithmetic. Only `add` may be reordered: fast-math flags sit on single
instructions, so allowing it there lets a sum run in vector lanes and changes no bit anywhere else.
"""

import numpy as np

from penstock.compll.backends.numba.bits import *  # noqa: F403
from penstock.compll.backends.numba.payload import *  # noqa: F403
from penstock.compll.backends.numba.random import *  # noqa: F403
from penstock.compll.select import _kth_key as kth_key  # noqa: F401
from penstock.compll.select import _select as select_largest  # noqa: F401

NONFINITE = -1  # what encode returns for NaN or infinity
DAMAGED = -1  # what decode returns for bytes that encode cannot have written
ONE = np.uint64(1)
