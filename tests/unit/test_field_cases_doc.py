"""docs/field_cases.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROWS = re.findall(r"^\| (F\d{3}) .*", (ROOT / "docs/field_cases.md").read_text("utf-8"), re.MULTILINE)


def test_every_named_test_exists_and_every_case_has_one_of_its_number() -> None:
    assert len(ROWS) == len(set(ROWS))
    for row in (ROOT / "docs/field_cases.md").read_text("utf-8").splitlines():
        if not (case := re.match(r"\| (F\d{3}) ", row)):
            continue
        tests = re.findall(r"`([\w/]+\.py)::(\w+)`", row)
        assert any(case[1].lower() in name for _, name in tests)
        for path, name in tests:
            assert f"def {name}(" in (ROOT / path).read_text("utf-8"), f"{path}::{name}"
