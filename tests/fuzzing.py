"""Damage to files, for fuzzing parsers: the same seed gives the same damage."""

import os
import random

TRIES = int(os.environ.get("LLM_PERF_FUZZ", "400"))
"""Damaged files per kind of file: few in `make test`, 4,000 in `make test-all`; fewer of those that take long to read."""
SEED = int(os.environ.get("LLM_PERF_EXPLORE", "0")) * 1_000_003
"""Added to every seed: nothing, unless `make explore` draws new damage."""

_INTERESTING = (
    b"\x00",
    b"\xff",
    b"\x7f",
    b"\x80",
    b"\xff\xff\xff\xff",
    b"\x00\x00\x00\x00",
    b"\xc3\x28",
    b"\xed\xa0\x80",
    b"\n",
    b",",
    b'"',
)


def truncated(data: bytes, chance: random.Random) -> bytes:
    """The beginning of it, from nothing to all but a byte."""
    return data[: chance.randrange(len(data))] if data else data


def bits_flipped(data: bytes, chance: random.Random) -> bytes:
    """One to thirty bits turned."""
    damaged = bytearray(data)
    for _ in range(chance.randint(1, 30) if damaged else 0):
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
    return bytes(damaged)


def block_replaced(data: bytes, chance: random.Random, size: int = 4096) -> bytes:
    """An aligned block filled with noise, zeros, ones, or another block."""
    if len(data) <= size:
        return bits_flipped(data, chance)
    at = chance.randrange(len(data) // size) * size
    other = chance.randrange(len(data) // size) * size
    block = chance.choice([chance.randbytes(size), bytes(size), b"\xff" * size, data[other : other + size]])
    return data[:at] + block + data[at + size :]


def bytes_inserted(data: bytes, chance: random.Random) -> bytes:
    """Awkward bytes put in, or written over what was there."""
    damaged = bytearray(data)
    for _ in range(chance.randint(1, 8)):
        at = chance.randrange(len(damaged) + 1)
        piece = chance.choice(_INTERESTING)
        damaged[at : at + len(piece) * chance.randint(0, 1)] = piece
    return bytes(damaged)


def piece_moved(data: bytes, chance: random.Random) -> bytes:
    """A piece cut out, and put elsewhere or twice or nowhere."""
    if len(data) < 4:
        return data
    start = chance.randrange(len(data))
    end = min(len(data), start + chance.randint(1, 2000))
    piece, rest = data[start:end], data[:start] + data[end:]
    at = chance.randrange(len(rest) + 1)
    return rest[:at] + piece * chance.randint(0, 2) + rest[at:]


BYTE_DAMAGE = (truncated, bits_flipped, block_replaced, bytes_inserted, piece_moved)


def damaged(data: bytes, chance: random.Random) -> bytes:
    """One kind of damage, sometimes two."""
    for _ in range(chance.choice([1, 1, 1, 2])):
        data = chance.choice(BYTE_DAMAGE)(data, chance)
    return data
