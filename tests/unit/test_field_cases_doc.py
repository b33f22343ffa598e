"""docs/field_cases.md names tests that exist, or says why there is none."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINES = (ROOT / "docs/field_cases.md").read_text("utf-8").splitlines()
ROWS = [line for line in LINES if re.match(r"\| F\d{3} ", line)]
WITHOUT_TESTS = re.compile(r"\| F\d{3} [^|]+ \| (later|not applicable): [^|]+ \| \|")


def test_every_case_has_one_row() -> None:
    cases = [row[2:6] for row in ROWS]
    assert len(cases) == len(set(cases)) > 40


def test_every_named_test_exists_and_every_case_has_one_of_its_number() -> None:
    for row in ROWS:
        if WITHOUT_TESTS.fullmatch(row):
            continue
        tests = re.findall(r"`([\w/]+\.py)::(\w+)`", row)
        assert any(row[2:6].lower() in name.lower() for _, name in tests), row
        for path, name in tests:
            assert f"def {name}(" in (ROOT / path).read_text("utf-8"), f"{path}::{name}"
