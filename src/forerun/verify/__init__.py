"""Verification rules: from the target's laws and a draft to a verdict.

A rule sees probabilities and drafts, never a model. A new one is a file here and a line in RULES.
"""

from __future__ import annotations

from forerun.types import Draft, VerifyRule
from forerun.verify import coupled, token
from forerun.verify.rule import LawAt, Rule, Verify

__all__ = ["RULES", "LawAt", "Rule", "Verify", "check_draft"]

RULES: dict[VerifyRule, Rule] = {"coupled": coupled.RULE, "token": token.RULE}


def check_draft(rule: VerifyRule, draft: Draft) -> None:
    """Raises ConfigError with one sentence when the rule isn't exact for such a draft."""
    RULES[rule].check(draft)
