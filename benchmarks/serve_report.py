"""What `scripts/bench serve` shows and keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.markdown import markdown_table, provenance_table
from benchmarks.measure import Measured, Summary
from forerun.bench.serve_figures import Level, Spread

_FIGURES: dict[str, Callable[[Level], float]] = {
    "tok_per_s": lambda level: level.tok_per_s,
    "ttft_ms_p50": lambda level: _of(level.ttft_ms).p50,
    "ttft_ms_p95": lambda level: _of(level.ttft_ms).p95,
    "gap_ms_p95": lambda level: _of(level.gap_ms).p95,
    "token_ms_p50": lambda level: _of(level.token_ms).p50,
    "token_ms_p95": lambda level: _of(level.token_ms).p95,
}
_LEVEL_COLUMNS = (
    "clients", "server", "tok/s", "quartiles", "ratio", "TTFT p50", "p95", "gap p95",
    "ms/tok p50", "p95",
)  # fmt: skip
_LONG_COLUMNS = ("server", "gap ms before: p50", "p95", "while it is read: p50", "p95", "largest", "its TTFT ms")


@dataclass(frozen=True, slots=True)
class ServeResult:
    """What was measured.

    Attributes:
        model: the file's stem.
        arms: names of the servers, in the order of the tables.
        clients: numbers of clients.
        new_tokens: per answer.
        levels: by server and number of clients, one per round.
        shares: by number of clients, who used the CPUs.
        provenance: where the numbers come from.
    """

    model: str
    arms: Sequence[str]
    clients: Sequence[int]
    new_tokens: int
    levels: Mapping[tuple[str, int], Sequence[Level]]
    shares: Mapping[int, Measured]
    provenance: Mapping[str, Any]

    def summary(self, arm: str, num_clients: int, figure: str) -> Summary:
        """Median and quartiles over the rounds."""
        return Summary.of([_FIGURES[figure](level) for level in self.levels[arm, num_clients]])

    def ratio(self, arm: str, num_clients: int) -> Summary:
        """Tokens per second over those of the first server, round by round: both had the same questions then."""
        pairs = zip(self.levels[arm, num_clients], self.levels[self.arms[0], num_clients], strict=True)
        return Summary.of([one.tok_per_s / first.tok_per_s for one, first in pairs])

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values, each round's figures included."""
        return {
            "bench": "serve",
            "model": self.model,
            "new_tokens": self.new_tokens,
            "levels": [
                {
                    "clients": num_clients,
                    "idle_cpu_share": round(self.shares[num_clients].idle_cpu_share, 4),
                    "other_cpu_share": round(self.shares[num_clients].other_cpu_share, 4),
                    "arms": {arm: self._arm_json(arm, num_clients) for arm in self.arms},
                }
                for num_clients in self.clients
            ],
            "provenance": dict(self.provenance),
        }

    def _arm_json(self, arm: str, num_clients: int) -> dict[str, Any]:
        figures = {name: self.summary(arm, num_clients, name).to_json() for name in _FIGURES}
        ratio = self.ratio(arm, num_clients).to_json()
        rounds = [level.to_json() for level in self.levels[arm, num_clients]]
        return {**figures, "tok_per_s_of_the_first": ratio, "rounds": rounds}


def _of(spread: Spread | None) -> Spread:
    """Of answers of several chunks, which all of these are."""
    assert spread is not None
    return spread


def levels_rows(result: ServeResult) -> list[tuple[str, ...]]:
    """Rows under the columns of the levels' table."""
    rows = []
    for num_clients in result.clients:
        for index, arm in enumerate(result.arms):
            rate = result.summary(arm, num_clients, "tok_per_s")
            rows.append(
                (
                    str(num_clients) if index == 0 else "",
                    arm,
                    f"{rate.median:.1f}",
                    f"{rate.q1:.1f}-{rate.q3:.1f}",
                    f"{result.ratio(arm, num_clients).median:.2f}",
                    *(f"{result.summary(arm, num_clients, name).median:.1f}" for name in list(_FIGURES)[1:]),
                )
            )
    return rows


def levels_table(result: ServeResult) -> Table:
    """For a terminal."""
    return _table(
        f"{result.model}, {result.new_tokens} new tokens, greedy; times in ms", _LEVEL_COLUMNS, levels_rows(result), 2
    )


def levels_markdown(result: ServeResult) -> str:
    """For people who read the results' folder."""
    idle = max(measured.idle_cpu_share for measured in result.shares.values())
    other = max(measured.other_cpu_share for measured in result.shares.values())
    return (
        "\n\n".join(
            (
                f"# Servers beside each other: {result.model}",
                f"Spec-Bench questions, {result.new_tokens} new tokens each, greedy; medians of the rounds, times "
                "in ms, ratio to the first server in the same round. Servers "
                f"that were not asked used at most {idle:.1%} of a processor, others {other:.1%} of the CPUs.",
                markdown_table(_LEVEL_COLUMNS, levels_rows(result)),
                provenance_table(result.provenance),
            )
        )
        + "\n"
    )


def long_rows(arms: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Rows under the columns of the long prompt's table."""
    return [
        (
            name,
            *(f"{of['quiet_gap_ms'][p]:.1f}" for p in ("p50", "p95")),
            *(f"{of['busy_gap_ms'][p]:.1f}" for p in ("p50", "p95")),
            f"{of['busy_gap_max_ms']:.0f}",
            f"{Summary.of(of['long_ttft_ms']).median:.0f}",
        )
        for name, of in arms.items()
    ]


def long_table(arms: Mapping[str, Mapping[str, Any]]) -> Table:
    """For a terminal."""
    return _table("gaps between chunks of 4 streams when a long prompt arrives", _LONG_COLUMNS, long_rows(arms), 1)


def long_markdown(document: Mapping[str, Any]) -> str:
    """For people who read the results' folder."""
    num_tokens = next(iter(document["arms"].values()))["num_prompt_tokens"]
    return (
        "\n\n".join(
            (
                f"# A long prompt beside running streams: {document['model']}",
                f"{document['num_streams']} streams run when a prompt of {num_tokens} tokens arrives: gaps between "
                "their chunks before it, and while it is read.",
                markdown_table(_LONG_COLUMNS, long_rows(document["arms"])),
                provenance_table(document["provenance"]),
            )
        )
        + "\n"
    )


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], num_left: int) -> Table:
    table = Table(title=title, box=box.SIMPLE, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < num_left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
