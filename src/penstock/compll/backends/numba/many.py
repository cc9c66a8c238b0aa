"""Kernels for several tensors in one call: a loop over the segments of one flat array, around the kernel for one.

Small tensors cost their codec more time in the interpreter than in the kernel. These loops run inside: segment j is
elements boundaries[j] to boundaries[j + 1], it gets the random numbers of call `calls[j]`, and its bytes follow those
of the one before. What comes out for a segment is what the kernel for one tensor writes.
"""

LOOPS = {
    "encode_many": """
def encode_many(gradient, out, boundaries, sizes, calls, seed_high{own}):
    place = 0
    for j in range(sizes.size):
        segment = gradient[boundaries[j] : boundaries[j + 1]]
        sizes[j] = encode(segment, out[place:], calls[j], seed_high{own})
        if sizes[j] < 0:
            return -1 - j
        place += sizes[j]
    return place
""",
    "encode_many_feedback": """
def encode_many_feedback(gradient, residual, out, boundaries, sizes, calls, seed_high{own}):
    place = 0
    for j in range(sizes.size):
        segment, left = gradient[boundaries[j] : boundaries[j + 1]], residual[boundaries[j] : boundaries[j + 1]]
        sizes[j] = encode_feedback(segment, left, out[place:], calls[j], seed_high{own})
        if sizes[j] < 0:
            return -1 - j
        place += sizes[j]
    return place
""",
    "decode_many": """
def decode_many(payload, out, boundaries, sizes{own}):
    place = 0
    for j in range(sizes.size):
        if decode(payload[place : place + sizes[j]], out[boundaries[j] : boundaries[j + 1]]{own}) != 0:
            return -1 - j
        place += sizes[j]
    return 0
""",
    "decode_add_many": """
def decode_add_many(payload, out, boundaries, sizes, factor{own}):
    place = 0
    for j in range(sizes.size):
        if decode_add(payload[place : place + sizes[j]], out[boundaries[j] : boundaries[j + 1]], factor{own}) != 0:
            return -1 - j
        place += sizes[j]
    return 0
""",
}
INSIDE = {kind: kind.replace("_many", "") for kind in LOOPS}  # the kernel for one tensor that a loop calls
ARGUMENTS = {
    "encode_many": ["gradient", "out", "boundaries", "sizes", "calls", "seed_high"],
    "encode_many_feedback": ["gradient", "residual", "out", "boundaries", "sizes", "calls", "seed_high"],
    "decode_many": ["payload", "out", "boundaries", "sizes"],
    "decode_add_many": ["payload", "out", "boundaries", "sizes", "factor"],
}


def loop_source(kind: str, own: list[str]) -> str:
    """Return the text of one loop; `own` are the program's parameters."""
    return LOOPS[kind].format(own="".join(f", {name}" for name in own))
