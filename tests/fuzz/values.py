"""Values that break what believes them: numbers at the edges of types, texts that are none, regexes that never end."""

from __future__ import annotations

from random import Random
from typing import Any

NUMBERS = [
    *range(-2, 12), 15, 16, 17, 31, 32, 33, 63, 64, 100, 127, 128, 255, 256, 257, 1023, 1024, 4095, 4096, 65535, 65536,
    1 << 20, (1 << 22) - 1, 1 << 22, 1 << 24, 1 << 28, (1 << 31) - 1, 1 << 31, -(1 << 31), (1 << 32) - 1, 1 << 32,
    1 << 40, (1 << 53) + 1, 1 << 62, (1 << 63) - 1, 1 << 63, -(1 << 63), (1 << 64) - 1,
]  # fmt: skip
FLOATS = [
    0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1.0000001, 1e-45, 5e-324, 1e-38, 1e-30, 1e-12, 1e-6, 1e3, 1e6, 1e12, 1e30, 3.4e38,
    1e300, 1e308, float("inf"), float("-inf"), float("nan"),
]  # fmt: skip
TEXTS = [
    b"", b" ", b"\0", b"\n", b"a", b"a" * 100_000, b"\xff\xfe", b"\xed\xa0\x80", b"\xc3", "é".encode(),
    "\u202e".encode(),
    b"\x1b[31mred\x1b[0m", "▁".encode(), "▁▁".encode(), b"<|im_end|>", b"<s>", b"<unk>", b"<0x41>", b"<0xZZ>", b"##a",
    b"../../etc/passwd", b"%s%n%x", b"{0.__class__}", b"llama", b"gpt2", b"bert", b"gemma4", b"smollm", b"llama-bpe",
    b"a b", b" a", b"a ", b"  ", "Ġ".encode(), "Ġt".encode(), "𐐀".encode(), "\ufdd0".encode(), b"<" * 5000, b"phi-3",
]  # fmt: skip

# Regular expressions that never end, that blow up when compiled, that end a matcher, or that are none.
REGEXES = [
    r"(a*)*b", r"(a|a)*b", r"(x+x+)+y", r"((.+)+)+\d", r"(.*)*$", r"(\w+\s?)*$", r"(?:a?){50}a{50}", r"(?=(a+)+b)",
    r"(?<=a{1000})", r"\1(a)", r"(a)\1+", r"(?<n>a\g<n>?b)", "[", "(?P<", "a{1000000}", "((a{1000}){1000}){1000}",
    "(?:" * 2000 + ")" * 2000, "(" * 100_000, r"\p{Foo}", "", "\\", r"(?i:ß*)*", r"[^\s\S]", "$", "^", r"(?!)", r"()*",
    r"(?:)*", r"a*a*a*a*a*a*a*a*[^a]", r"(.*)(.*)(.*)(.*)(.*)q", r"\s*\s*\s*\s*q", "[" * 3000, "a|" * 20_000,
    r"(?~a)", r"\X+", r"\K", r"(?<=(a|aa))b", "(?i)" + "[a-z]" * 500, r"\x{110000}", r"[[:foo:]]", ".{0,60000}q",
    r"(?:a|b|ab)*c", r"(?:[a-z]+[0-9]*)+!", r"\R*\R*q", r"(a?){64}q", r"\G\G*", r"(?>a*)*b", r"(a++)*b",
]  # fmt: skip


def number(rng: Random, near: Any = None) -> int:
    """An edge, or a number a little off a given one."""
    if type(near) is int and rng.random() < 0.4:
        return rng.choice([near + 1, near - 1, near + 32, near - 32, near * 2, near // 2, -near, near + (1 << 32)])
    return rng.choice(NUMBERS)


def text(rng: Random) -> bytes:
    """A text, or what is none."""
    return rng.choice(TEXTS)


def nested(rng: Random, depth: int = 0) -> Any:
    """A small tree of JSON values."""
    kind = rng.randrange(4 if depth < 3 else 2)
    if kind == 3:
        return {rng.choice(["type", "a", "id", "content", ""]): nested(rng, depth + 1) for _ in range(rng.randrange(3))}
    if kind == 2:
        return [nested(rng, depth + 1) for _ in range(rng.randrange(3))]
    return json_scalar(rng)


def json_scalar(rng: Random) -> Any:
    """A number, text or constant; texts may hold halves of surrogate pairs."""
    kind = rng.randrange(5)
    if kind == 0:
        return rng.choice([None, True, False])
    if kind == 1:
        return rng.choice([*NUMBERS, 10**40, 10**400])
    if kind == 2:
        return rng.choice(FLOATS)
    if kind == 3:
        return rng.choice(["\ud800", "a\udfff", "x" * 5000, "\x00", "\x1b[2J"])
    return rng.choice(TEXTS).decode("utf-8", "replace")
