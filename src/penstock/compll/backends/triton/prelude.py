"""Functions that generated Triton kernels share: loads and stores of tiles, packing, random numbers, the last program.

A tile is [BLOCK / 8, 8]: eight neighbours in a row, so that a row of one-bit values is a byte. Integers of every width
are int32 in registers. `full` says that a tile lies wholly inside the vector: then loads carry no mask, and become
16-byte accesses whatever the size is.
"""

import triton
import triton.language as tl

ROW = tl.constexpr(8)
UNIFORM_SHIFT = tl.constexpr(8)  # see philox.py
UNIFORM_SCALE = tl.constexpr(2.0**-24)
NOT_FINITE = tl.constexpr(0x7F800000)  # magnitude bits of infinity; NaN is above
FLAGS_OFFSET = tl.constexpr(6)  # `codecs/header.py`: the byte that says whether a gradient was finite
NOT_FINITE_FLAG = tl.constexpr(2)

# Bits of a status word: what a kernel found wrong, for the host to raise when it looks.
WRONG_FIELD = tl.constexpr(2)
WRONG_INDEX = tl.constexpr(4)
WRONG_GRADIENT = tl.constexpr(8)


@triton.jit
def positions(block, BLOCK: tl.constexpr):
    """Return the indices of a tile's elements."""
    row = block * (BLOCK // ROW) + tl.arange(0, BLOCK // ROW)
    return row[:, None] * ROW + tl.arange(0, ROW)[None, :]


@triton.jit
def load(pointer, i, size, full):
    """Return the elements at `i`, 0 beyond the end."""
    if full:
        value = tl.load(pointer + i)
    else:
        value = tl.load(pointer + i, mask=i < size, other=0)
    return value


@triton.jit
def store(pointer, i, value, size, full):
    """Write the elements at `i` that lie inside."""
    if full:
        tl.store(pointer + i, value.to(pointer.dtype.element_ty))
    else:
        tl.store(pointer + i, value.to(pointer.dtype.element_ty), mask=i < size)


@triton.jit
def held(value, i, size, full, other):
    """Return a tile with `other` where it reaches beyond the end."""
    if not full:
        value = tl.where(i < size, value, other)
    return value


@triton.jit
def block_places(block, N: tl.constexpr, BLOCK: tl.constexpr):
    """Return the numbers of the blocks of N elements that a tile has."""
    return block * (BLOCK // N) + tl.arange(0, BLOCK // N)


@triton.jit
def by_block(value, N: tl.constexpr, BLOCK: tl.constexpr):
    """Return a tile with one row for each block of N elements."""
    return tl.reshape(value, (BLOCK // N, N))


@triton.jit
def spread(value, N: tl.constexpr, BLOCK: tl.constexpr):
    """Return a tile in which each element has its block's value."""
    return tl.reshape(tl.broadcast_to(value[:, None], (BLOCK // N, N)), (BLOCK // ROW, ROW))


@triton.jit
def store_packed(pointer, value, block, size, full, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Write a tile of BITS-bit values (1, 2 or 4) from the low bit of each byte up; padding is 0."""
    per_byte: tl.constexpr = 8 // BITS
    nbytes: tl.constexpr = BLOCK // per_byte
    if not full:
        value = tl.where(positions(block, BLOCK) < size, value, 0)
    shifts = tl.arange(0, per_byte) * BITS
    packed = tl.sum(tl.reshape(value, (nbytes, per_byte)) << shifts[None, :], axis=1)
    store(pointer, block * nbytes + tl.arange(0, nbytes), packed, tl.cdiv(size, per_byte), full)


@triton.jit
def load_packed(pointer, block, size, full, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Return a tile of BITS-bit values (1, 2 or 4); a row of them is BITS bytes."""
    row = block * (BLOCK // ROW) + tl.arange(0, BLOCK // ROW)
    word = tl.zeros_like(row)
    for byte in tl.static_range(BITS):
        word |= load(pointer, row * BITS + byte, tl.cdiv(size, 8 // BITS), full).to(tl.int32) << (8 * byte)
    return (word[:, None] >> (tl.arange(0, ROW) * BITS)[None, :]) & ((1 << BITS) - 1)


@triton.jit
def load_packed_at(pointer, i, size, BITS: tl.constexpr):
    """Return the BITS-bit values (1, 2 or 4) at any `i`; 0 beyond the end."""
    per_byte: tl.constexpr = 8 // BITS
    byte = tl.load(pointer + i // per_byte, mask=i < size, other=0).to(tl.int32)
    return (byte >> (i % per_byte * BITS)) & ((1 << BITS) - 1)


@triton.jit
def store_words(pointer, i, value, size, full, NBYTES: tl.constexpr, ALIGNED: tl.constexpr):
    """Write integers of 2 or 4 bytes, little-endian, that may start at any byte unless ALIGNED."""
    if ALIGNED:
        word: tl.constexpr = tl.uint16 if NBYTES == 2 else tl.int32
        store(pointer.to(tl.pointer_type(word)), i, value, size, full)
    else:
        at = i.to(tl.int64) * NBYTES
        for byte in tl.static_range(NBYTES):
            tl.store(pointer + at + byte, ((value >> (8 * byte)) & 255).to(tl.uint8), mask=i < size)


@triton.jit
def load_words(pointer, i, size, full, NBYTES: tl.constexpr, ALIGNED: tl.constexpr):
    """Return integers of 2 or 4 bytes, little-endian, that may start at any byte unless ALIGNED; 0 beyond the end."""
    if ALIGNED:
        word: tl.constexpr = tl.uint16 if NBYTES == 2 else tl.int32
        value = load(pointer.to(tl.pointer_type(word)), i, size, full).to(tl.int32)
    else:
        at = i.to(tl.int64) * NBYTES
        value = tl.zeros_like(i)
        for byte in tl.static_range(NBYTES):
            value |= tl.load(pointer + at + byte, mask=i < size, other=0).to(tl.int32) << (8 * byte)
    return value


@triton.jit
def store_scalar(pointer, value, NBYTES: tl.constexpr):
    """Write one integer, or the bits of one float, at any byte."""
    value = tl.cast(value, tl.int32)
    for byte in tl.static_range(NBYTES):
        tl.store(pointer + byte, ((value >> (8 * byte)) & 255).to(tl.uint8))


@triton.jit
def load_scalar(pointer, NBYTES: tl.constexpr):
    """Return one integer that may start at any byte."""
    value = tl.load(pointer).to(tl.int32)
    for byte in tl.static_range(1, NBYTES):
        value |= tl.load(pointer + byte).to(tl.int32) << (8 * byte)
    return value


@triton.jit
def as_bits(value):
    """Return the bits of a float32 as int32."""
    return tl.cast(value, tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def as_float(bits):
    """Return the float32 of some bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def is_finite(value):
    """Say whether a float32 is neither NaN nor infinite."""
    return (as_bits(value) & 0x7FFFFFFF) < NOT_FINITE


@triton.jit
def to_uint(value, HIGH: tl.constexpr):
    """Return a float cut towards zero and held in 0..HIGH; NaN is 0."""
    held = tl.where(value > 0.0, value, 0.0)
    return tl.where(held < HIGH, held, HIGH).to(tl.int32)


@triton.jit
def to_int(value):
    """Return a float cut towards zero and held in int32; NaN is 0."""
    held = tl.where(value > -2147483648.0, value, tl.where(value == value, -2147483648.0, 0.0))
    return tl.where(held < 2147483520.0, held, 2147483520.0).to(tl.int32)


@triton.jit
def words(seed, stream, block, BLOCK: tl.constexpr):
    """Return the random words of a tile: element i takes word i % 4 of counter i // 4."""
    counter = block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    zero = tl.zeros_like(counter)
    a, b, c, d = tl.philox(seed, counter, zero, zero + stream, zero)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (BLOCK // ROW, ROW))


@triton.jit
def words_at(seed, stream, i):
    """Return the random words of elements in any order."""
    zero = tl.zeros_like(i)
    a, b, c, d = tl.philox(seed, i // 4, zero, zero + stream, zero)
    low = tl.where(i % 2 == 0, a, b)
    high = tl.where(i % 2 == 0, c, d)
    return tl.where(i % 4 < 2, low, high)


@triton.jit
def uniform(word):
    """Return random words as floats in [0, 1)."""
    return (word >> UNIFORM_SHIFT).to(tl.float32) * UNIFORM_SCALE


@triton.jit
def below(word, low, high):
    """Return random words as integers in low .. high - 1."""
    span = (high - low).to(tl.uint32, bitcast=True).to(tl.uint64)
    return low + ((word.to(tl.uint64) * span) >> 32).to(tl.int32)


@triton.jit
def is_last(ticket_ptr):
    """Say whether all other programs have come here before; what they stored is then visible. Resets itself."""
    return is_last_of(ticket_ptr, tl.num_programs(0))


@triton.jit
def partial(partials_ptr, slot, other, PROGRAMS: tl.constexpr):
    """Return what each program stored in a slot, past the first-level cache; `other` where there was no program."""
    return partial_of(tl.num_programs(0), partials_ptr, slot, other, PROGRAMS)


@triton.jit
def is_last_of(ticket_ptr, programs):
    """The same where only some programs of the grid work together."""
    tl.debug_barrier()  # every thread's stores come before the ticket
    last = tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == programs - 1
    if last:
        tl.store(ticket_ptr, 0)
    return last


@triton.jit
def partial_of(programs, partials_ptr, slot, other, PROGRAMS: tl.constexpr):
    """The same where only some programs of the grid work together."""
    program = tl.arange(0, PROGRAMS)
    return tl.load(partials_ptr + slot * PROGRAMS + program, mask=program < programs, other=other, cache_modifier=".cg")


@triton.jit
def same_bytes(found_ptr, wanted_ptr, NBYTES: tl.constexpr):
    """Say whether NBYTES bytes agree; NBYTES is a multiple of 16, at most 176."""
    at = tl.arange(0, 256)
    found = tl.load(found_ptr + at, mask=at < NBYTES, other=0)
    return tl.max((found != tl.load(wanted_ptr + at, mask=at < NBYTES, other=0)).to(tl.int32), axis=0) == 0


@triton.jit
def copy_bytes(to_ptr, from_ptr, NBYTES: tl.constexpr):
    """Copy at most 256 bytes."""
    at = tl.arange(0, 256)
    tl.store(to_ptr + at, tl.load(from_ptr + at, mask=at < NBYTES, other=0), mask=at < NBYTES)


@triton.jit
def bit_count(word):
    """Return how many bits of each uint32 are set, as int32."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    word = word + (word >> 8)
    return ((word + (word >> 16)) & 63).to(tl.int32)


@triton.jit
def lowest_bit(word):
    """Return the number of the lowest set bit of each uint32; of 0, nothing meaningful."""
    low = word & (0 - word)
    return (low.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127  # a power of two is its exponent


# NaN for whole tensors of a bucket, where something in them was not finite; the host is not asked.


@triton.jit
def fill_nan(program, programs, out_ptr, numel, BLOCK: tl.constexpr):
    """Write NaN to a piece, as one of several programs."""
    for block in tl.range(program, tl.cdiv(numel, BLOCK), programs):
        i = block * BLOCK + tl.arange(0, BLOCK)
        tl.store(out_ptr + i, tl.full([BLOCK], float("nan"), tl.float32), mask=i < numel)


@triton.jit
def mark(table_ptr, places_ptr, payload_ptr, header_ptr, flags_ptr, COLUMNS: tl.constexpr, HEADER: tl.constexpr):
    """Write the header of what is not finite over the payload of a piece whose flag is up, and take the flag down."""
    piece = tl.program_id(0)
    if tl.load(flags_ptr + piece) != 0:
        header = tl.load(table_ptr + piece * COLUMNS + 2)
        copy_bytes(payload_ptr + tl.load(places_ptr + piece) - HEADER, header_ptr + header, HEADER)
        tl.store(flags_ptr + piece, 0)


@triton.jit(do_not_specialize=["count"])
def look_at_firsts(values_ptr, firsts_ptr, count, status_ptr, found_ptr, BLOCK: tl.constexpr):
    """Say whether the first value of some piece is NaN, as all of it then are; and what decoding has reported."""
    seen = tl.zeros([BLOCK], tl.int32)
    for block in tl.range(0, tl.cdiv(count, BLOCK)):
        i = block * BLOCK + tl.arange(0, BLOCK)
        first = tl.load(values_ptr + tl.load(firsts_ptr + i, mask=i < count, other=0), mask=i < count, other=0.0)
        seen = seen | (first != first).to(tl.int32)
    tl.store(found_ptr, tl.max(seen, axis=0))
    tl.store(found_ptr + 1, tl.load(status_ptr))
