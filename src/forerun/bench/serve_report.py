"""What `bench serve` prints and keeps of its levels: table rows and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from forerun.bench.pictures import pyplot
from forerun.bench.serve_figures import Level, Spread

COLUMNS = (
    "load", "whole", "tok/s", "req/s", "good/s", "TTFT ms p50", "p95", "p99", "gap ms p50", "p95", "p99",
    "ms/token p50", "p95", "p99", "tok/chunk", "errors",
)  # fmt: skip


def rows(levels: Sequence[Level]) -> list[tuple[str, ...]]:
    """Table rows under COLUMNS."""
    return [_row(level) for level in levels]


def _row(level: Level) -> tuple[str, ...]:
    num_chunks = sum(len(answer.chunk_s) for answer in level.whole)
    return (
        level.label,
        f"{len(level.whole)}/{len(level.answers)}",
        f"{level.tok_per_s:.1f}",
        f"{len(level.whole) / level.seconds:.2f}",
        f"{len(level.good) / level.seconds:.2f}",
        *_cells(level.ttft_ms),
        *_cells(level.gap_ms),
        *_cells(level.token_ms),
        f"{level.num_tokens / num_chunks:.2f}" if num_chunks else "-",
        ", ".join(f"{count} {kind}" for kind, count in level.errors.items()) or "-",
    )


def _cells(spread: Spread | None) -> tuple[str, str, str]:
    if spread is None:
        return ("-", "-", "-")
    return (f"{spread.p50:.1f}", f"{spread.p95:.1f}", f"{spread.p99:.1f}")


def draw(arms: Mapping[str, Sequence[Level]], unit: str, title: str, path: Path) -> None:
    """Writes a picture: throughput, and medians with 95th percentiles of both times, over the load.

    Args:
        arms: levels by the name of who served them.
        unit: of the load.
        title: above the picture.
        path: of a file whose ending names the format.

    Raises:
        ConfigError: matplotlib is missing.
    """
    plots = pyplot()
    figure, axes = plots.subplots(1, 3, figsize=(13, 3.8))
    for name, levels in arms.items():
        loads = [level.load for level in levels]
        axes[0].plot(loads, [level.tok_per_s for level in levels], marker="o", label=name)
        for panel, spreads in ((axes[1], [x.ttft_ms for x in levels]), (axes[2], [x.token_ms for x in levels])):
            known = [(load, spread) for load, spread in zip(loads, spreads, strict=True) if spread]
            [line] = panel.plot(
                [load for load, _ in known], [spread.p50 for _, spread in known], marker="o", label=name
            )
            panel.plot([load for load, _ in known], [s.p95 for _, s in known], linestyle=":", color=line.get_color())
    names = ("tokens per second", "time to first token, ms (dotted: p95)", "time per token, ms (dotted: p95)")
    for panel, name in zip(axes, names, strict=True):
        panel.set_xlabel(unit)
        panel.set_title(name, fontsize=9)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plots.close(figure)
