"""The documentation says what the code does."""

from __future__ import annotations

from forerun.serve import schema
from tests.helpers.fields_doc import PAGE, with_tables


def test_the_tables_of_fields_are_the_schema() -> None:
    text = PAGE.read_text()
    assert with_tables(text) == text, "run scripts/write-fields"
    for name in ("top_k", "messages", "echo", "tool_call_id"):
        assert f"\n| `{name}` |" in text


def test_every_field_says_what_becomes_of_it() -> None:
    for model in (schema.CompletionRequest, schema.ChatRequest, schema.Speculative, schema.Message):
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"
