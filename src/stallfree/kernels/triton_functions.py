# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The functions that run on the device, one program per tile; `triton.py` builds their tables and launches them."""

import triton
import triton.language as tl

# Kernels. Addresses are int64 and never specialized on, so that no value of an argument causes a compilation in mid-training
# (in tuples they would be: `triton_launch.py` sees to it).
# UNIT: the tables count lengths (and columns) in units of 8 elements, if all are multiples of 8: the compiler then knows that
# rows begin at multiples of 16 bytes, and moves 16 bytes at a time where ALIGNED says that the tensors do, too.

INTERPRETED = triton.knobs.runtime.interpret  # triton reads it where kernels are defined
kernel = triton.jit(
    do_not_specialize=(
        *("tiles", "targets", "channel_of", "partial", "squares", "selected", "deferred", "values", "low", "high"),
        *("addresses", "present"),
        *("factors", "base", "skip", "lr", "beta1", "beta2", "eps", "weight_decay"),
    )
)


@triton.jit
def _pointer(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BYTES: tl.constexpr = 16):
    """An address as a typed pointer; if ALIGNED, to a multiple of BYTES, which each thread then moves at a time."""
    pointer = address.to(tl.int64).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, BYTES)
    return pointer


@triton.jit
def _choose(addresses, segment):
    """addresses[segment], for a tuple in kernel arguments, which have no index."""
    address = addresses[0].to(tl.int64)
    for i in tl.static_range(1, len(addresses)):
        address = tl.where(segment == i, addresses[i].to(tl.int64), address)
    return address


@triton.jit
def _round(x, DTYPE: tl.constexpr):
    """fp32 to DTYPE, to nearest, ties to even. bf16 by hand: the interpreter's conversion truncates."""
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where(x == x, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)
        rounded = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        rounded = x.to(DTYPE)
    return rounded


@kernel
def split_kernel(
    tiles: tl.int64,  # [programs, 9]
    targets: tl.int64,
    partial: tl.int64,
    squares: tl.int64,
    selected: tl.int64,
    deferred: tl.int64,
    low: tl.int64,  # of deferred elements, only those of rows that begin from here ...
    high: tl.int64,  # ... to here; the rest, if this is the first piece: low is 0
    present: tl.int64,
    addresses,  # the weights' or gradients'
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNIT: tl.constexpr,
    CHANNELS: tl.constexpr,
    LENGTH: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """CHANNELS channels, CHUNK elements of each: copy them to their rows, and sum their squares."""
    row = _pointer(tiles, tl.int64, False) + tl.program_id(0) * 9  # all of it is loaded at once, before the first use
    segment = tl.load(row)
    channel = tl.load(row + 1).to(tl.int32) * CHANNELS + tl.arange(0, CHANNELS)
    chunk = tl.load(row + 2).to(tl.int32)
    channels = tl.load(row + 3).to(tl.int32)
    length = tl.load(row + 4).to(tl.int32) * UNIT
    first_channel = tl.load(row + 5)
    to_selected = _pointer(selected, DTYPE, ALIGNED) + tl.load(row + 6) * UNIT
    first_deferred = tl.load(row + 7) * UNIT
    first_partial = tl.load(row + 8)  # -1: the channels have one chunk only
    if ((present >> segment) & 1) == 0:
        return
    if COLUMNS:
        channels = channels * UNIT
    inside = channel < channels
    target = tl.load(_pointer(targets, tl.int32, False) + first_channel + channel, mask=inside, other=0)
    place = tl.where(target < 0, -1 - target, target).to(tl.int64)
    start_deferred = first_deferred + place * length
    to_deferred = _pointer(deferred, DTYPE, ALIGNED) + start_deferred
    to = tl.where(target < 0, to_deferred, to_selected + place * length)
    in_piece = inside & (target < 0) & (start_deferred >= low) & (start_deferred < high)
    if low != 0:  # noqa: SIM102 (here `and` would work the maximum out for every first piece, too)
        if tl.max(in_piece.to(tl.int32), axis=0) == 0:
            return
    copied = in_piece | (inside & (target >= 0) & (low == 0))
    grad = _pointer(_choose(addresses, segment), DTYPE, ALIGNED)
    if COLUMNS:  # tiles [LENGTH, CHANNELS], turned on their way out
        total = tl.zeros([LENGTH, CHANNELS], tl.float32)
    else:  # tiles [CHANNELS, LENGTH]
        total = tl.zeros([CHANNELS, LENGTH], tl.float32)
    for done in range(0, CHUNK, LENGTH):
        start = chunk * CHUNK + done
        if start < length:
            position = start + tl.arange(0, LENGTH)
            if COLUMNS:
                mask = (position < length)[:, None] & inside[None, :]
                x = tl.load((grad + position.to(tl.int64) * channels)[:, None] + channel[None, :], mask=mask, other=0.0)
                tl.store(to[None, :] + position[:, None], x, mask=(position < length)[:, None] & copied[None, :])
            else:
                mask = inside[:, None] & (position < length)[None, :]
                x = tl.load((grad + channel.to(tl.int64) * length)[:, None] + position[None, :], mask=mask, other=0.0)
                tl.store(to[:, None] + position[None, :], x, mask=copied[:, None] & (position < length)[None, :])
            wide = x.to(tl.float32)
            total += wide * wide
    sums = tl.sum(total, axis=0 if COLUMNS else 1)
    parts = _pointer(partial, tl.float32, False) + first_partial + chunk.to(tl.int64) * channels
    out = tl.where(first_partial < 0, _pointer(squares, tl.float32, False) + first_channel, parts)
    tl.store(out + channel, sums, mask=inside & (low == 0))


@kernel
def sum_chunks_kernel(
    tiles: tl.int64,  # [programs, 7]
    partial: tl.int64,
    squares: tl.int64,
    present: tl.int64,
    CHANNELS: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    """Squared norms of CHANNELS channels from the sums of their chunks."""
    row = _pointer(tiles, tl.int64, False) + tl.program_id(0) * 7
    segment = tl.load(row)
    channel = tl.load(row + 1) * CHANNELS + tl.arange(0, CHANNELS)
    channels = tl.load(row + 3)
    chunks = tl.load(row + 4)
    out = _pointer(squares, tl.float32, False) + tl.load(row + 5) + channel
    parts = _pointer(partial, tl.float32, False) + tl.load(row + 6) + channel
    if ((present >> segment) & 1) == 0:
        return
    inside = channel < channels
    total = tl.zeros([CHUNKS, CHANNELS], tl.float32)
    start = 0
    while start < chunks:  # no range(): the interpreter cannot make its bound from a loaded value
        chunk = start + tl.arange(0, CHUNKS)
        mask = (chunk < chunks)[:, None] & inside[None, :]
        total += tl.load((chunk * channels)[:, None] + parts[None, :], mask=mask, other=0.0)
        start += CHUNKS
    tl.store(out, tl.sum(total, axis=0), mask=inside)


@triton.jit
def _power(base, exponent):
    """base ** exponent for an fp64 scalar and non-negative int32: by squaring, since its error must not grow with exponent."""
    power = tl.zeros_like(exponent).to(tl.float64) + 1.0
    for bit in tl.static_range(31):
        power = tl.where(((exponent >> bit) & 1) == 1, power * base, power)
        base = base * base
    return power


@triton.jit
def _is_present(present, place):
    """present: words of a bit mask, as a tuple in kernel arguments; place: word * 64 + bit."""
    return ((_choose(present, place >> 6) >> (place & 63)) & 1) != 0


@kernel
def count_kernel(
    tiles: tl.int64,  # [programs, 7]
    factors: tl.int64,
    skip: tl.int64,
    lr: tl.int64,  # from here on: the bits of a double
    beta1: tl.int64,
    beta2: tl.int64,
    eps: tl.int64,
    weight_decay: tl.int64,
    present,
    PLACES: tl.constexpr,
) -> None:
    """Advance the step counts of places, and work out what `adamw_kernel` multiplies with at this count."""
    row = _pointer(tiles, tl.int64, False) + tl.program_id(0) * 7
    segment = tl.load(row)
    place = tl.load(row + 1) * PLACES + tl.arange(0, PLACES)
    selected = tl.load(row + 3)
    weight = tl.load(row + 4)
    count = _pointer(tl.load(row + 5), tl.int32, False) + place
    settings = _pointer(tl.load(row + 6), tl.float32, False)
    skipped = tl.load(_pointer(skip, tl.int8, False)) != 0
    if skipped | (_is_present(present, segment) == 0):
        return
    inside = place < selected
    n = tl.load(count, mask=inside, other=0) + 1
    tl.store(count, n, mask=inside)
    lr_ = lr.to(tl.int64).to(tl.float64, bitcast=True)
    beta1_ = beta1.to(tl.int64).to(tl.float64, bitcast=True)
    beta2_ = beta2.to(tl.int64).to(tl.float64, bitcast=True)
    eps_ = eps.to(tl.int64).to(tl.float64, bitcast=True)
    decay = 1.0 - lr_ * weight_decay.to(tl.int64).to(tl.float64, bitcast=True)
    tl.store(settings, tl.load(_pointer(factors, tl.float32, False) + weight))  # all programs of a weight write the same
    tl.store(settings + 1, decay.to(tl.float32))
    tl.store(settings + 2, beta1_.to(tl.float32))
    tl.store(settings + 3, (1.0 - beta1_).to(tl.float32))
    tl.store(settings + 4, beta2_.to(tl.float32))
    tl.store(settings + 5, (1.0 - beta2_).to(tl.float32))
    tl.store(settings + 6, eps_.to(tl.float32))
    own = settings + 8 + place
    tl.store(own, (lr_ / (1.0 - _power(beta1_, n))).to(tl.float32), mask=inside)
    tl.store(own + selected, tl.sqrt(1.0 - _power(beta2_, n)).to(tl.float32), mask=inside)


@kernel
def adamw_kernel(
    tiles: tl.int64,  # [programs, 14]
    base: tl.int64,  # of gradients that have a place there
    skip: tl.int64,
    present,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNIT: tl.constexpr,
    PLACES: tl.constexpr,
    LENGTH: tl.constexpr,
) -> None:
    """One AdamW step of LENGTH elements of PLACES selected channels, and what the weight shows of it."""
    G_BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 2  # 4 elements per thread, as of the state: nothing is rearranged
    row = _pointer(tiles, tl.int64, False) + tl.program_id(0) * 14
    segment = tl.load(row)
    place = tl.load(row + 1).to(tl.int32) * PLACES + tl.arange(0, PLACES)
    position = tl.load(row + 2).to(tl.int32) * LENGTH + tl.arange(0, LENGTH)
    length = tl.load(row + 3).to(tl.int32) * UNIT
    channels = tl.load(row + 4)
    selected = tl.load(row + 5).to(tl.int32)
    channel_of = _pointer(tl.load(row + 6), tl.int32, False)
    settings = _pointer(tl.load(row + 7), tl.float32, False)
    master = _pointer(tl.load(row + 8), tl.float32, ALIGNED)
    exp_avg = _pointer(tl.load(row + 9), tl.float32, ALIGNED)
    exp_avg_sq = _pointer(tl.load(row + 10), tl.float32, ALIGNED)
    grad = _pointer(tl.load(row + 11) + tl.load(row + 13) * base.to(tl.int64), DTYPE, ALIGNED, G_BYTES)  # times 0 or 1
    weight = _pointer(tl.load(row + 12), DTYPE, ALIGNED and not COLUMNS, G_BYTES)
    skipped = tl.load(_pointer(skip, tl.int8, False)) != 0
    if skipped | (_is_present(present, segment) == 0):
        return
    inside = place < selected
    start = place.to(tl.int64) * length  # [PLACES]
    mask = inside[:, None] & (position < length)[None, :]
    channel = tl.load(channel_of + place, mask=inside, other=0).to(tl.int64)
    # Settings are a weight's; the last two depend on the place's step count.
    factor = tl.load(settings)
    decay = tl.load(settings + 1)
    beta1 = tl.load(settings + 2)
    rest1 = tl.load(settings + 3)
    beta2 = tl.load(settings + 4)
    rest2 = tl.load(settings + 5)
    eps = tl.load(settings + 6)
    own = settings + 8 + place
    step_size = tl.load(own, mask=inside, other=1.0)[:, None]
    root = tl.load(own + selected, mask=inside, other=1.0)[:, None]

    to_master = (master + start)[:, None] + position[None, :]
    to_avg = (exp_avg + start)[:, None] + position[None, :]
    to_avg_sq = (exp_avg_sq + start)[:, None] + position[None, :]
    g = tl.load((grad + start)[:, None] + position[None, :], mask=mask, other=0.0)
    g = g.to(tl.float32) * factor
    m = beta1 * tl.load(to_avg, mask=mask, other=0.0) + rest1 * g
    v = beta2 * tl.load(to_avg_sq, mask=mask, other=0.0) + rest2 * g * g
    direction = tl.math.div_rn(m, tl.math.div_rn(tl.math.sqrt_rn(v), root) + eps)
    w = decay * tl.load(to_master, mask=mask, other=0.0) - step_size * direction
    tl.store(to_avg, m, mask=mask)
    tl.store(to_avg_sq, v, mask=mask)
    tl.store(to_master, w, mask=mask)

    shown = _round(w, DTYPE)
    if COLUMNS:  # neighbouring threads take neighbouring places, whose channels often share a sector of a weight's row
        tl.store((weight + channel)[:, None] + (position.to(tl.int64) * channels)[None, :], shown, mask=mask)
    else:
        tl.store((weight + channel * length)[:, None] + position[None, :], shown, mask=mask)


@kernel
def publish_kernel(
    tiles: tl.int64,  # those of `split_kernel`
    targets: tl.int64,
    values: tl.int64,
    low: tl.int64,  # only those of rows that begin from here ...
    high: tl.int64,  # ... to here
    present: tl.int64,
    addresses,  # the weights' or gradients'
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNIT: tl.constexpr,
    CHANNELS: tl.constexpr,
    LENGTH: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Copy CHUNK elements of the deferred ones among CHANNELS channels into their weight."""
    row = _pointer(tiles, tl.int64, False) + tl.program_id(0) * 9
    segment = tl.load(row)
    channel = tl.load(row + 1).to(tl.int32) * CHANNELS + tl.arange(0, CHANNELS)
    chunk = tl.load(row + 2).to(tl.int32)
    channels = tl.load(row + 3).to(tl.int32)
    length = tl.load(row + 4).to(tl.int32) * UNIT
    to_target = _pointer(targets, tl.int32, False) + tl.load(row + 5) + channel
    first_value = tl.load(row + 7) * UNIT
    if ((present >> segment) & 1) == 0:
        return
    if COLUMNS:
        channels = channels * UNIT
    target = tl.load(to_target, mask=channel < channels, other=0)
    start_value = first_value + (-1 - target).to(tl.int64) * length  # [CHANNELS]
    source = _pointer(values, DTYPE, ALIGNED) + start_value
    in_piece = (target < 0) & (start_value >= low) & (start_value < high)
    # Between selected columns single elements are written: with a pointer of unknown alignment a warp writes neighbours.
    weight = _pointer(_choose(addresses, segment), DTYPE, ALIGNED and not COLUMNS)
    for done in range(0, CHUNK, LENGTH):
        start = chunk * CHUNK + done
        if start < length:
            position = start + tl.arange(0, LENGTH)
            if COLUMNS:
                mask = (position < length)[:, None] & in_piece[None, :]
                x = tl.load(source[None, :] + position[:, None], mask=mask, other=0.0)
                tl.store((weight + position.to(tl.int64) * channels)[:, None] + channel[None, :], x, mask=mask)
            else:
                mask = in_piece[:, None] & (position < length)[None, :]
                x = tl.load(source[:, None] + position[None, :], mask=mask, other=0.0)
                tl.store((weight + channel.to(tl.int64) * length)[:, None] + position[None, :], x, mask=mask)
