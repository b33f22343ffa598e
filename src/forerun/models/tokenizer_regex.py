"""Whether a regular expression that came with a model can be trusted with any text.

The library's matcher backtracks: where an expression can split a stretch of text in many ways and what follows does not
match, it tries them all, which takes exponential time. So expressions are read here, in Oniguruma's syntax (its
`doc/RE`), before any text is. Refused is what repeats something that varies by itself, which is where exponents come
from, more than `MAX_DEGREE` repeats before something that can fail, and what refers to other parts of the expression.
Nearly every expression in `tokenizer_pre` is fine.

From each of its places, a text of n equal characters takes n ** d steps where d repeats without a limit stand before
something that can fail. Repeats at the end of an expression can't fail any more.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

MAX_DEGREE = 1
MAX_WAYS = 4096
MAX_CHARS = 20_000
_MAX_DEPTH = 50
_MAX_COUNT = 1000
_FEW = 16  # a choice among so many numbers of times counts as ways, among more as a repeat without a limit

_GROUP = re.compile(r"\?(?::|=|!|>|<=|<!|<[A-Za-z_]\w*>|[im]*(?:-[im]+)?[:)])")
_INTERVAL = re.compile(r"\{(\d{1,6})?(,?)(\d{1,6})?\}")
_ESCAPE = re.compile(
    r"\\(?:[pP]\{\^?[\w ]+\}|x\{[0-9A-Fa-f]+\}|x[0-9A-Fa-f]{1,2}|u[0-9A-Fa-f]{4}|0[0-7]{0,2}"
    r"|[dDwWsShHbBAzZntrfvaeNO]|[^0-9A-Za-z])"
)


class HardRegexError(ValueError):
    """An expression that may take too long, or that can't be judged; says why."""


@dataclass(frozen=True, slots=True)
class _Cost:
    """Of matching a part of an expression in all the ways there are.

    Attributes:
        degree: repeats without a limit, where something that can fail follows.
        end_degree: those of them that stand before something in the part itself that can fail.
        ways: bounded choices, all combined.
        varies: it has any choice.
        can_fail: there are texts that it does not match at all.
        count: how often the innermost part is repeated at least.
    """

    degree: int = 0
    end_degree: int = 0
    ways: int = 1
    varies: bool = False
    can_fail: bool = True
    count: int = 1


_ONE = _Cost()
_NOTHING = _Cost(can_fail=False)


def check_regex(pattern: str) -> None:
    """Accepts an expression whose time is bounded by the text's length and the longest run in it.

    Raises:
        HardRegexError: it is not, or it is written in a way that is not understood here.
    """
    if len(pattern) > MAX_CHARS:
        raise HardRegexError(f"it has {len(pattern)} characters, more than the {MAX_CHARS} that are read")
    reader = _Reader(pattern)
    cost = reader.alternatives(0)
    if reader.pos != len(pattern):
        raise HardRegexError("it closes a group that is not open")
    _check(cost)


def _check(cost: _Cost) -> _Cost:
    if cost.end_degree > MAX_DEGREE:
        raise HardRegexError(f"it has {cost.end_degree} repeats before something that can fail, more than {MAX_DEGREE}")
    if cost.ways > MAX_WAYS:
        raise HardRegexError(f"it has more than {MAX_WAYS} choices")
    return cost


def _either(one: _Cost, other: _Cost) -> _Cost:
    return _check(
        _Cost(
            degree=max(one.degree, other.degree),
            end_degree=max(one.end_degree, other.end_degree),
            ways=one.ways + other.ways,
            varies=True,
            can_fail=one.can_fail and other.can_fail,
            count=max(one.count, other.count),
        )
    )


def _followed(one: _Cost, rest: _Cost) -> _Cost:
    return _check(
        _Cost(
            degree=one.degree + rest.degree,
            end_degree=(one.degree if rest.can_fail else one.end_degree) + rest.end_degree,
            ways=one.ways * rest.ways,
            varies=one.varies or rest.varies,
            can_fail=one.can_fail or rest.can_fail,
            count=max(one.count, rest.count),
        )
    )


class _Reader:
    """Recursive descent; each method reads one construct and gives its cost."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.pos = 0

    def alternatives(self, depth: int) -> _Cost:
        """Up to the end of the group or the expression."""
        if depth > _MAX_DEPTH:
            raise HardRegexError(f"its groups are nested more than {_MAX_DEPTH} deep")
        cost = self._sequence(depth)
        while self._take("|"):
            cost = _either(cost, self._sequence(depth))
        return cost

    def _sequence(self, depth: int) -> _Cost:
        parts = []
        while self.pos < len(self.pattern) and self.pattern[self.pos] not in "|)":
            parts.append(self._repeated(self._atom(depth)))
        total = _NOTHING
        for part in reversed(parts):
            total = _followed(part, total)
        return total

    def _atom(self, depth: int) -> _Cost:
        char = self.pattern[self.pos]
        if char == "(":
            return self._group(depth)
        if char == "[":
            return self._char_class()
        if char == "\\":
            match = _ESCAPE.match(self.pattern, self.pos)
            if match is None:
                raise HardRegexError(f"it has {self.pattern[self.pos : self.pos + 3]!r}, which is not supported")
            self.pos = match.end()
            return _ONE
        if char in "*+?":
            raise HardRegexError("it repeats nothing")
        self.pos += 1
        return _ONE

    def _group(self, depth: int) -> _Cost:
        self.pos += 1
        match = None
        if self.pattern.startswith("?", self.pos):
            match = _GROUP.match(self.pattern, self.pos)
            if match is None:
                raise HardRegexError(f"it has {self.pattern[self.pos - 1 : self.pos + 3]!r}, which is not supported")
            self.pos = match.end()
            if match.group().endswith(")"):  # options for what follows
                return _NOTHING
        is_look = match is not None and match.group()[:2] in ("?=", "?!", "?<") and match.group()[-1] in "=!"
        cost = self.alternatives(depth + 1)
        if not self._take(")"):
            raise HardRegexError("it leaves a group open")
        # A look starts anew at each try, so what it ends with counts, too.
        return replace(cost, end_degree=cost.degree, can_fail=True) if is_look else cost

    def _char_class(self) -> _Cost:
        depth = 0
        while True:
            if self.pos >= len(self.pattern):
                raise HardRegexError("it leaves a class of characters open")
            char = self.pattern[self.pos]
            self.pos += 2 if char == "\\" else 1
            if char == "[":
                depth += 1
                self._take("^")
                self._take("]")  # the first one stands for itself
            elif char == "]":
                depth -= 1
                if depth == 0:
                    return _ONE

    def _repeated(self, cost: _Cost) -> _Cost:
        """The cost of an atom with the quantifiers that follow it."""
        while (bounds := self._quantifier()) is not None:
            low, high = bounds
            if (high is None or high > 1) and cost.varies:
                raise HardRegexError("it repeats something that varies by itself")
            count = cost.count * max(low, 1)
            if count > _MAX_COUNT:
                raise HardRegexError(f"it counts to more than {_MAX_COUNT}")
            is_few = high is not None and high - low <= _FEW
            cost = _Cost(
                degree=cost.degree if is_few else 1,
                end_degree=cost.end_degree,
                ways=cost.ways + 1 if (low, high) == (0, 1) else high - low + 1 if high is not None and is_few else 1,
                varies=cost.varies or low != high,
                can_fail=cost.can_fail and low > 0,
                count=count,
            )
        return cost

    def _quantifier(self) -> tuple[int, int | None] | None:
        """(least, most) or None. Whether it is greedy, lazy or possessive changes the order of the steps alone."""
        for char, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(char):
                _ = self._take("?") or self._take("+")
                return bounds
        # After an interval these are quantifiers of their own.
        match = _INTERVAL.match(self.pattern, self.pos)
        if match is None or (match[1] is None and match[3] is None):
            return None
        self.pos = match.end()
        low = int(match[1] or 0)
        return (low, low) if not match[2] else (low, int(match[3]) if match[3] else None)

    def _take(self, char: str) -> bool:
        if not self.pattern.startswith(char, self.pos):
            return False
        self.pos += len(char)
        return True
