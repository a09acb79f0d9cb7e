"""Reference implementations of the draws, bit-identical to the core. ``key`` is (seed, round, client, purpose).

Reference: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Threefry4x64-20).
"""

from collections.abc import Iterator, Sequence
from itertools import count as counting
from itertools import pairwise
from math import exp, isqrt

import numpy as np
import numpy.typing as npt

from fedcore.arrays import F64, I64

Key = Sequence[int]
U64 = npt.NDArray[np.uint64]

# The second word of the counter, which names the use of the random words.
WITHOUT_REPLACEMENT, WEIGHTED_WITHOUT_REPLACEMENT, WITH_REPLACEMENT, BERNOULLI, PERMUTATION = range(1, 6)
FAN = 32

_ROTATIONS = [(14, 16), (52, 57), (23, 40), (5, 37), (25, 33), (46, 12), (58, 22), (32, 32)]
_MASK = 2**64 - 1


def _blocks(key: Key, use: Sequence[int], counters: U64) -> U64:
    """Return uint64[blocks, 4]: Threefry4x64-20 of the counters (counters[i], *use)."""

    def rotated(x: U64, bits: int) -> U64:
        return (x << np.uint64(bits)) | (x >> np.uint64(64 - bits))

    schedule = [*key, 0x1BD11BDAA9FC1A22 ^ key[0] ^ key[1] ^ key[2] ^ key[3]]
    x = [counters, *(np.full_like(counters, word) for word in use)]
    x = [x[i] + np.uint64(key[i]) for i in range(4)]
    for r in range(20):
        for a, b, bits in zip((0, 2), (1, 3) if r % 2 == 0 else (3, 1), _ROTATIONS[r % 8], strict=True):
            x[a] = x[a] + x[b]
            x[b] = rotated(x[b], bits) ^ x[a]
        if r % 4 == 3:
            s = r // 4 + 1
            x = [x[i] + np.uint64((schedule[(s + i) % 5] + (s if i == 3 else 0)) & _MASK) for i in range(4)]
    return np.stack(x, axis=1)


def random_words(key: Key, use: Sequence[int], first: int, blocks: int) -> U64:
    """Return the random words of the blocks ``first`` to ``first + blocks - 1``."""
    return _blocks(key, use, np.arange(blocks, dtype=np.uint64) + np.uint64(first)).ravel()


def _words(key: Key, use: int) -> Iterator[int]:
    """Yield the random words of a use one by one."""
    for first in counting(0, 64):
        yield from random_words(key, (use, 0, 0), first, 64).tolist()


def unit(words: U64) -> F64:
    """Return the words as multiples of 2^-53 in [0, 1)."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def without_replacement(population: int, k: int, key: Key) -> I64:
    """Return the first k numbers of a shuffle that swaps position j with a uniform one in j .. population - 1."""
    words, moved, drawn = _words(key, WITHOUT_REPLACEMENT), dict[int, int](), []
    for j in range(k):
        bound = population - j
        product = next(words) * bound
        while product & _MASK < 2**64 % bound:  # reject 2^64 mod bound words, so that the rest are uniform
            product = next(words) * bound
        place = j + (product >> 64)
        drawn.append(moved.get(place, place))
        moved[place] = moved.get(j, j)
    return np.array(drawn, np.int64)


def _sums(s: F64) -> F64:
    """Return the sum of every 32 numbers, padded with zeros: eight lanes, reduced in a tree."""
    rows = np.append(s, np.zeros(-len(s) % FAN)).reshape(-1, 4, 8)
    lanes = ((rows[:, 0] + rows[:, 1]) + rows[:, 2]) + rows[:, 3]
    l0, l1, l2, l3 = (lanes[:, j] + lanes[:, j + 4] for j in range(4))
    return (l0 + l2) + (l1 + l3)


def _tree(weights: F64) -> list[F64] | None:
    """Return the levels of a tree of sums, from the weights to the total; None if the weights are invalid."""
    levels = [weights, _sums(weights)]
    while len(levels[-1]) > 1:
        levels.append(_sums(levels[-1]))
    return levels if np.isfinite(levels[-1][0]) and (weights >= 0).all() else None


def _choose(levels: list[F64], units: Sequence[float]) -> int:
    """Return a leaf: walk down from the root, and choose one of 32 children per level."""
    node = 0
    for level, u in zip(range(len(levels) - 2, -1, -1), units, strict=True):
        children = levels[level][FAN * node : FAN * (node + 1)]
        child = int(np.searchsorted(np.cumsum(children), u * levels[level + 1][node], side="right"))
        if child == len(children):  # rounding made the running sum smaller than the total
            child = int(np.flatnonzero(children)[-1])
        node = FAN * node + child
    return node


def weighted_without_replacement(weights: F64, k: int, key: Key) -> I64 | None:
    """Repeatedly draw by weight, set the drawn weight to zero, and update the sums above it."""
    if len(weights) == 0:
        return np.empty(0, np.int64)
    levels = _tree(np.array(weights, np.float64))
    if levels is None:
        return None
    words, drawn = _words(key, WEIGHTED_WITHOUT_REPLACEMENT), list[int]()
    while len(drawn) < k and levels[-1][0] > 0:
        units = unit(np.array([next(words) for _ in levels[1:]], np.uint64)).tolist()
        i = _choose(levels, units)
        drawn.append(i)
        levels[0][i] = 0
        for below, above in pairwise(levels):
            i //= FAN
            above[i] = _sums(below[FAN * i : FAN * (i + 1)])[0]
    return np.array(drawn, np.int64)


def with_replacement(weights: F64, k: int, key: Key) -> I64 | None:
    """Draw k times by weight."""
    if len(weights) == 0:
        return np.empty(0, np.int64)
    levels = _tree(np.asarray(weights))
    if levels is None:
        return None
    if not levels[-1][0] > 0:
        return np.empty(0, np.int64)
    depth = len(levels) - 1
    words = random_words(key, (WITH_REPLACEMENT, 0, 0), 0, -(-k * depth // 4))
    units = unit(words[: k * depth]).reshape(k, depth)
    return np.array([_choose(levels, row) for row in units.tolist()], np.int64)


def bernoulli(population: int, p: float | F64, key: Key) -> I64 | None:
    """Draw each i whose uniform number is below p_i."""
    chances = np.broadcast_to(np.asarray(p, np.float64), population)
    if not ((chances >= 0) & (chances <= 1)).all():
        return None
    words = random_words(key, (BERNOULLI, 0, 0), 0, -(-population // 4))[:population]
    return np.flatnonzero(unit(words) < chances)


def _round_values(key: Key, round: int, half: U64, modulus: int) -> U64:
    """Return the words at the indices ``half`` of the round's stream, scaled to [0, modulus), modulus < 2^32."""
    blocks = _blocks(key, (PERMUTATION, round, 0), half // np.uint64(4))
    words = blocks[np.arange(len(half)), half % np.uint64(4)]
    m, shift = np.uint64(modulus), np.uint64(32)
    values: U64 = ((words >> shift) * m + (((words & np.uint64(2**32 - 1)) * m) >> shift)) >> shift
    return values


def permutation(population: int, start: int, count: int, key: Key) -> I64:
    """Apply a Feistel network on [0, rows) x [0, columns) until each result is below ``population``."""
    rows = isqrt(population - 1) + 1  # the smallest integer whose square is at least the population
    rows += rows % 2
    columns = -(-population // rows)
    x = np.arange(count, dtype=np.uint64) + np.uint64(start)
    outside = np.arange(count)
    while len(outside):
        left, right = x[outside] // np.uint64(columns), x[outside] % np.uint64(columns)
        for round in range(0, 64 if population <= 4096 else 12, 2):
            left = (left + _round_values(key, round, right, rows)) % np.uint64(rows)
            right = (right + _round_values(key, round + 1, left, columns)) % np.uint64(columns)
        x[outside] = left * np.uint64(columns) + right
        outside = outside[x[outside] >= np.uint64(population)]
    return x.astype(np.int64)


def chacha20(key: bytes, counter: int, nonce: bytes, groups: int) -> npt.NDArray[np.uint32]:
    """Return the words of the blocks from ``counter`` on (RFC 8439, Sec. 2.3): of each 16 blocks word 0, word 1, ..."""
    start = np.zeros((16, 16 * groups), np.uint32)
    start[:4] = np.frombuffer(b"expand 32-byte k", "<u4")[:, None]
    start[4:12] = np.frombuffer(key, "<u4")[:, None]
    start[12] = np.arange(counter, counter + 16 * groups) % 2**32
    start[13:] = np.frombuffer(nonce, "<u4")[:, None]
    x = start.copy()
    columns = [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)]
    diagonals = [(0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)]
    for _ in range(10):
        for a, b, c, d in columns + diagonals:
            for to, other, turned, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
                x[to] += x[other]
                x[turned] ^= x[to]
                x[turned] = x[turned] << np.uint32(bits) | x[turned] >> np.uint32(32 - bits)
    return (x + start).reshape(16, groups, 16).transpose(1, 0, 2).ravel()


def _exp_of_minus(x: float) -> float:
    total = 1.0
    for i in range(18, 0, -1):
        total = 1.0 - total * x / i
    return total


def _alias_table(masses: list[int], column: int) -> list[tuple[int, int]]:
    """Return Vose's table: for each column the mass that it keeps, and the entry with the rest."""
    small = [j for j, mass in enumerate(masses) if mass < column]
    large = [j for j, mass in enumerate(masses) if mass >= column]
    table = [(column, j) for j in range(len(masses))]
    while small:
        low, high = small.pop(), large[-1]
        table[low] = masses[low], high
        masses[high] -= column - masses[low]
        if masses[high] < column:
            small.append(large.pop())
    return table


def add_discrete_gaussian(sum: F64, grid: float, sigma: int, key: bytes, *, out: F64) -> None:
    """Write (round(sum / grid) + y) grid, with y by rejection from 512 intervals of a power of two integers."""
    bits = max(0, sigma.bit_length() - 5)  # 2^bits <= sigma / 16
    scale = 0.5 / float(sigma**2)
    weights = [_exp_of_minus(x * 2.0**-10) if (x := float(j << bits) ** 2 * scale) < 64 else 0.0 for j in range(512)]
    for _ in range(10):
        weights = [weight * weight for weight in weights]
    total = 0.0
    for weight in weights:
        total += weight
    masses = [int(weight / total * 2.0**62 + 0.5) for weight in weights]
    masses[0] += 2**62 - int(np.sum(masses, dtype=object))
    table = _alias_table(masses, 2**53)
    for begin in range(0, len(sum), 16384):
        nonce = (begin // 16384).to_bytes(8, "little") + bytes(4)
        words = iter(_stream(key, nonce))
        for j in range(begin, min(begin + 16384, len(sum))):
            out[j] = (np.rint(sum[j] / grid) + _gaussian(words, table, bits, scale)) * grid


def _stream(key: bytes, nonce: bytes) -> Iterator[int]:
    for counter in counting(0, 64):
        yield from chacha20(key, counter, nonce, 4).view("<u8").tolist()


def _gaussian(words: Iterator[int], table: list[tuple[int, int]], bits: int, scale: float) -> int:
    while True:
        first, second = next(words), next(words)
        column = first % 512
        kept, other = table[column]
        start = (column if first >> 11 < kept else other) << bits
        y, negative = start + second % 2**bits, first >> 9 & 1
        if negative and not y:
            continue
        x = float((y - start) * (y + start)) * scale
        if (second >> 22) * 2.0**-42 < (1.0 if x == 0 else exp(-x)):
            return -y if negative else y
