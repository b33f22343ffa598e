"""The tables of request fields in the documentation, made from the schema. Run as a module to write them."""

from __future__ import annotations

import re
from pathlib import Path

from forerun.serve import responses, schema
from forerun.serve.schema import GenerationFields, support_table

PAGE = Path(__file__).parents[2] / "docs" / "server.md"
_TABLE = re.compile(r"(<!-- fields: (\w+) -->\n)(?:\n\|.*\n(?:\|.*\n)*)?")


def with_tables(text: str) -> str:
    """The page with its tables as the schema has them."""

    def table(match: re.Match[str]) -> str:
        model = getattr(responses if match[2] == "ResponsesRequest" else schema, match[2])
        common = GenerationFields if match[2] in ("CompletionRequest", "ChatRequest") else None
        return f"{match[1]}\n{support_table(model, common)}\n"

    return _TABLE.sub(table, text)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
