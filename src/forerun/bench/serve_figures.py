"""From answers to figures: percentiles, rates, errors by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forerun.bench.serve_client import Answer

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Limits:
    """What an answer must keep to count as good.

    Attributes:
        ttft_s: seconds to the first text; None is any.
        token_s: seconds per token after the first, over the whole answer; None is any.
    """

    ttft_s: float | None = None
    token_s: float | None = None

    def allow(self, answer: Answer) -> bool:
        """Whether it is whole and within both; an answer of one token has no time per token to judge."""
        if not answer.is_ok:
            return False
        ttft_s, token_s = answer.ttft_s, answer.token_s
        is_prompt = self.ttft_s is None or (ttft_s is not None and ttft_s <= self.ttft_s)
        return is_prompt and (self.token_s is None or token_s is None or token_s <= self.token_s)


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of one quantity, all in one unit."""

    p50: float
    p95: float
    p99: float
    mean: float

    @staticmethod
    def of(values: Sequence[float], factor: float = 1.0) -> Spread | None:
        """Percentiles by linear interpolation, times the factor; None without values.

        >>> Spread.of([0.4, 0.1, 0.2, 0.3, 0.5], 1000.0)
        Spread(p50=300.0, p95=480.0, p99=496.0, mean=300.0)
        """
        if not values:
            return None
        array = np.asarray(values, np.float64) * factor
        # Rounded, so that no figure shows the digits of binary fractions.
        return Spread(*(round(float(value), 6) for value in (*np.percentile(array, PERCENTILES), array.mean())))

    def to_json(self) -> dict[str, float]:
        """Five significant digits each."""
        return {name: rounded(getattr(self, name)) for name in ("p50", "p95", "p99", "mean")}


@dataclass(frozen=True, slots=True)
class Level:
    """One load and what came of it.

    Attributes:
        label: the load in words, for instance `4 clients`.
        load: its number: clients, or requests per second; 0 for replayed arrivals.
        answers: in the order in which they were sent.
        seconds: from the first request to the last answer.
        cpu_share: processor seconds that sending and reading took, per second.
        limits: what counts as good.
    """

    label: str
    load: float
    answers: tuple[Answer, ...]
    seconds: float
    cpu_share: float
    limits: Limits

    @property
    def good(self) -> list[Answer]:
        """The answers within the limits."""
        return [answer for answer in self.answers if self.limits.allow(answer)]

    @property
    def whole(self) -> list[Answer]:
        """The answers that came completely."""
        return [answer for answer in self.answers if answer.is_ok]

    @property
    def num_tokens(self) -> int:
        """Tokens of whole answers, as the server counts them."""
        return sum(answer.num_tokens for answer in self.whole)

    @property
    def tok_per_s(self) -> float:
        """Tokens of whole answers per second of the level."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def errors(self) -> dict[str, int]:
        """How many failed, by kind, the most frequent first."""
        return dict(Counter(answer.error for answer in self.answers if answer.error).most_common())

    @property
    def ttft_ms(self) -> Spread | None:
        """Milliseconds to the first text."""
        return _spread(answer.ttft_s for answer in self.whole)

    @property
    def gap_ms(self) -> Spread | None:
        """Milliseconds between chunks, of all answers together. Several tokens may come in one chunk."""
        return _spread(gap for answer in self.whole for gap in answer.gaps_s)

    @property
    def token_ms(self) -> Spread | None:
        """Milliseconds per token after the first, one value per answer."""
        return _spread(answer.token_s for answer in self.whole)

    @property
    def latency_ms(self) -> Spread | None:
        """Milliseconds from request to the end of the answer."""
        return _spread(answer.latency_s for answer in self.whole)

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        spreads = {name: getattr(self, name) for name in ("ttft_ms", "gap_ms", "token_ms", "latency_ms")}
        num_chunks = sum(len(answer.chunk_s) for answer in self.whole)
        first = next((answer.detail for answer in self.answers if answer.error and answer.detail), None)
        return {
            "label": self.label,
            "load": self.load,
            "num_requests": len(self.answers),
            "num_whole": len(self.whole),
            "num_good": len(self.good),
            "errors": self.errors,
            "first_error": first,
            "seconds": rounded(self.seconds),
            "tok_per_s": rounded(self.tok_per_s),
            "requests_per_s": rounded(len(self.whole) / self.seconds),
            "goodput_per_s": rounded(len(self.good) / self.seconds),
            **{name: spread.to_json() if spread else None for name, spread in spreads.items()},
            "num_tokens": self.num_tokens,
            "num_prompt_tokens": sum(answer.num_prompt_tokens for answer in self.whole),
            "tokens_per_chunk": rounded(self.num_tokens / num_chunks) if num_chunks else None,
            "num_drafted": sum(answer.num_drafted for answer in self.whole),
            "num_accepted": sum(answer.num_accepted for answer in self.whole),
            "client_cpu_share": rounded(self.cpu_share),
        }


def _spread(seconds: Iterable[float | None]) -> Spread | None:
    return Spread.of([value for value in seconds if value is not None], 1000.0)


def rounded(value: float) -> float:
    """Five significant digits."""
    return float(f"{value:.5g}")
