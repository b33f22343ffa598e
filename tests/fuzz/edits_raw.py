"""Edits of bytes and of whole files, which know nothing of what is in them."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from random import Random

from tests.fuzz import values

RawEdit = Callable[[bytearray, list[int], Random], str]
FileEdit = Callable[[dict[str, bytes], Random], str]


def cut(raw: bytearray, cuts: list[int], rng: Random) -> str:
    """Cuts anywhere, or at or beside the end of a part."""
    at = rng.randrange(len(raw) + 1) if not cuts or rng.random() < 0.4 else rng.choice(cuts) + rng.choice([-1, 0, 1])
    at = min(max(at, 0), len(raw))
    del raw[at:]
    return f"cut at {at}"


def append(raw: bytearray, cuts: list[int], rng: Random) -> str:
    more = rng.choice([b"\0", b"\0" * 4096, b"}", b"]", bytes(raw[:64])])
    raw += more
    return f"{len(more)} bytes more"


def flip_bits(raw: bytearray, cuts: list[int], rng: Random) -> str:
    places = [rng.randrange(len(raw)) for _ in range(rng.choice([1, 2, 8, 64]))] if raw else []
    for at in places:
        raw[at] ^= 1 << rng.randrange(8)
    return f"bits flipped at {places[:8]}"


def set_bytes(raw: bytearray, cuts: list[int], rng: Random) -> str:
    places = [_place(raw, cuts, rng) for _ in range(rng.choice([1, 2, 8]))] if raw else []
    for at in places:
        raw[at] = rng.choice([0, 1, 0x20, 0x22, 0x5B, 0x7B, 0x7F, 0x80, 0xFF, rng.randrange(256)])
    return f"bytes set at {places}"


def set_number(raw: bytearray, cuts: list[int], rng: Random) -> str:
    """A number as binary headers have them."""
    size = rng.choice([4, 8])
    if len(raw) < 8:
        return "nothing"
    at = min(_place(raw, cuts, rng), len(raw) - size)
    value = values.number(rng) % (1 << 8 * size)
    raw[at : at + size] = struct.pack("<Q", value)[:size]
    return f"{value} at {at} in {size} bytes"


def set_digits(raw: bytearray, cuts: list[int], rng: Random) -> str:
    """A number as JSON has them."""
    found = list(re.finditer(rb"-?\d+(\.\d+)?", raw[: 1 << 16]))
    if not found:
        return "nothing"
    match = rng.choice(found)
    value = rng.choice(
        [str(values.number(rng)), "1e999", "-1e999", "1e-999", "NaN", "-Infinity", "0x10", "01", "9" * 5000]
    )
    raw[match.start() : match.end()] = value.encode()
    return f"{value:.40} at {match.start()}"


def remove_run(raw: bytearray, cuts: list[int], rng: Random) -> str:
    at, length = _place(raw, cuts, rng), rng.choice([1, 4, 8, 32, 1000])
    del raw[at : at + length]
    return f"{length} bytes removed at {at}"


def copy_run(raw: bytearray, cuts: list[int], rng: Random) -> str:
    start, at, length = _place(raw, cuts, rng), _place(raw, cuts, rng), rng.choice([1, 4, 8, 32, 1000])
    raw[at:at] = raw[start : start + length]
    return f"{length} bytes of {start} copied to {at}"


def zero_run(raw: bytearray, cuts: list[int], rng: Random) -> str:
    at, length = _place(raw, cuts, rng), rng.choice([8, 512, 4096, 1 << 20])
    length = min(length, len(raw) - at)
    raw[at : at + length] = bytes(length)
    return f"{length} bytes at {at} zeroed, as a hole in a download"


def recode(raw: bytearray, cuts: list[int], rng: Random) -> str:
    """A text file in another encoding."""
    encoding = rng.choice(["utf-16", "utf-8-sig", "utf-32"])
    try:
        raw[:] = bytes(raw).decode().encode(encoding)
    except UnicodeError:
        return "nothing"
    return f"recoded as {encoding}"


def double_key(raw: bytearray, cuts: list[int], rng: Random) -> str:
    """A JSON key twice."""
    found = list(re.finditer(rb'"[^"\\]{1,40}": ("[^"\\]*"|[0-9.]+|true|false|null)', raw[: 1 << 16]))
    if not found:
        return "nothing"
    match = rng.choice(found)
    raw[match.start() : match.start()] = match.group() + b", "
    return f"{match.group()!r:.60} twice"


def nest(raw: bytearray, cuts: list[int], rng: Random) -> str:
    """A JSON number, so deep in lists that whoever recurses has no stack left."""
    found = list(re.finditer(rb"-?\d+", raw[: 1 << 16]))
    if not found:
        return "nothing"
    match, depth = rng.choice(found), rng.choice([200, 500, 900, 940, 980, 100_000])
    raw[match.start() : match.end()] = b"[" * depth + match.group() + b"]" * depth
    return f"{depth} lists at {match.start()}"


def _place(raw: bytearray, cuts: list[int], rng: Random) -> int:
    """Somewhere, more often near the beginning of a part than by chance."""
    if not raw:
        return 0
    if cuts and rng.random() < 0.6:
        return min(max(rng.choice(cuts) + rng.randrange(-4, 32), 0), len(raw) - 1)
    return rng.randrange(len(raw))


RAW_EDITS: list[RawEdit] = [
    cut, cut, cut, append, flip_bits, set_bytes, set_number, set_number, remove_run, copy_run, zero_run,
]  # fmt: skip
TEXT_EDITS: list[RawEdit] = [*RAW_EDITS, set_digits, set_digits, recode, double_key, nest]


def move_file(files: dict[str, bytes], rng: Random) -> str:
    """A file goes, becomes empty, becomes another one, or changes places with it."""
    if not files:
        return "nothing"
    name, other = rng.choice(list(files)), rng.choice(list(files))
    how = rng.choice(["drop", "drop", "empty", "copy", "swap", "pickle"])
    if how == "drop":
        del files[name]
    elif how == "empty":
        files[name] = b""
    elif how == "copy":
        files[name] = files[other]
    elif how == "swap":
        files[name], files[other] = files[other], files[name]
    else:
        # Opened by whoever believes it, this would leave a file behind.
        files[name] = b"cposix\nsystem\n(S'touch PICKLE_WAS_RUN'\ntR."
    return f"{how} {name} {other}"
