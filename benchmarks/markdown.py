"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def markdown_table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A pipe table; a pipe inside a cell becomes a dot."""
    lines = [list(header), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(cell.replace("|", "·") for cell in line) + " |" for line in lines)


def provenance_table(where: Mapping[str, Any]) -> str:
    """Provenance as a table."""
    rows = [
        (name, " ".join(map(str, value)) if isinstance(value, list) else str(value)) for name, value in where.items()
    ]
    return markdown_table(("provenance", "value"), rows)
