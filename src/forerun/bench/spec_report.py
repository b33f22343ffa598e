"""What `bench spec` prints and keeps: tables, plain values, a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forerun.bench.pictures import pyplot
from forerun.bench.spec import ALL, AUTO, PLAIN, Comparison, Tally

COLUMNS = (
    "category", "arm", "tokens/pass", "rows/token", "tok/s", "speed-up", "low", "high", "accepted by depth",
)  # fmt: skip


def arm_values(comparison: Comparison, arm: str, category: str) -> dict[str, Any]:
    """The figures of one arm in one category, or in all."""
    tally = comparison.tally(arm, category)
    speedup = comparison.speedup(arm, category)
    values = {
        "speedup": speedup.value,
        "low": speedup.low,
        "high": speedup.high,
        "tokens_per_pass": tally.tokens_per_pass,
        "rows_per_token": tally.rows_per_token,
        "tok_per_s": tally.tok_per_s,
        "acceptance_by_depth": tally.acceptance(),
        "num_tokens": tally.tokens,
        "prefill_tok_per_s": tally.prompt_tokens / tally.prefill_s if tally.prefill_s else 0.0,
    }
    if comparison.warm:
        values["warm_tok_per_s"] = comparison.tally(arm, category, comparison.warm).tok_per_s
    return {name: _rounded(value) for name, value in values.items()}


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Everything as plain values. `categories` and the rates at the top are those of `auto` beside plain decoding."""
    categories = comparison.categories
    arms = {
        arm: {"all": arm_values(comparison, arm, ALL)}
        | {"categories": {category: arm_values(comparison, arm, category) for category in categories}}
        for arm in comparison.tallies
    }
    short = ("speedup", "low", "high", "tokens_per_pass")
    return {
        "plain_tok_per_s": arms[PLAIN]["all"]["tok_per_s"],
        "auto_tok_per_s": arms[AUTO]["all"]["tok_per_s"],
        "speedup": {name: arms[AUTO]["all"][name] for name in short},
        "categories": {
            category: {name: arms[AUTO]["categories"][category][name] for name in short} for category in categories
        },
        "arms": arms,
        "num_prompts": {category: _count(comparison, category) for category in categories},
        "num_repeats": comparison.num_repeats,
        "seconds": round(comparison.seconds, 1),
        "different": [list(pair) for pair in comparison.different],
    }


def rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Table rows under COLUMNS: all categories together first, then each."""
    out: list[tuple[str, ...]] = []
    for category in (ALL, *comparison.categories):
        for index, arm in enumerate(comparison.tallies):
            tally = comparison.tally(arm, category)
            speedup = comparison.speedup(arm, category)
            out.append(
                (
                    f"{category} ({_count(comparison, category)})" if index == 0 else "",
                    arm,
                    f"{tally.tokens_per_pass:.2f}",
                    f"{tally.rows_per_token:.2f}",
                    f"{tally.tok_per_s:.1f}",
                    f"{speedup.value:.2f}",
                    f"{speedup.low:.2f}",
                    f"{speedup.high:.2f}",
                    _acceptance(tally),
                )
            )
    return out


def draw(comparison: Comparison, title: str, path: Path) -> None:
    """Writes a picture: speed-up by category and arm with intervals.

    Raises:
        ConfigError: matplotlib is missing.
    """
    plots = pyplot()
    arms = [arm for arm in comparison.tallies if arm != PLAIN]
    categories = [ALL, *comparison.categories]
    figure, axes = plots.subplots(figsize=(9, 1.2 + 0.16 * len(categories) * (len(arms) + 1)))
    height = 0.8 / len(arms)
    for index, arm in enumerate(arms):
        speedups = [comparison.speedup(arm, category) for category in categories]
        places = [place + height * (index - (len(arms) - 1) / 2) for place in range(len(categories))]
        errors = [[s.value - s.low for s in speedups], [s.high - s.value for s in speedups]]
        axes.barh(places, [s.value for s in speedups], height, xerr=errors, label=arm, error_kw={"linewidth": 0.8})
    axes.axvline(1.0, color="black", linewidth=1.0)
    axes.set_yticks(range(len(categories)), [f"{name} ({_count(comparison, name)})" for name in categories])
    axes.invert_yaxis()
    axes.set_xlabel("decode speed over plain decoding, 95 % interval")
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plots.close(figure)


def _acceptance(tally: Tally) -> str:
    return " ".join("-" if rate is None else f"{rate:.2f}" for rate in tally.acceptance()[:8])


def _count(comparison: Comparison, category: str) -> int:
    return sum(category in (ALL, prompt.category) for prompt in comparison.prompts)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value
