"""Verification rules: from the target's laws and a draft to a verdict.

A rule sees probabilities and drafts, never a model. A new one is a file here and a line in RULES, once its exactness is
enumerated. `studies` has rules for tests and comparisons, which no request can name.

What a rule is exact for is said by the rule (`Rule`), what a draft is by the draft (`Draft.traits`), and what a drafter
will make by the drafter; they meet in `check_traits`, before anything runs, and in each rule, with every draft.
"""

from __future__ import annotations

from forerun.errors import ConfigError
from forerun.sampling.distribution import RowSampler
from forerun.types import Draft, DraftTraits, NoiseStream, Verdict, VerifyRule
from forerun.verify import block, coupled, rrsw, token, traversal
from forerun.verify.rule import ArgmaxLaws, LawAt, Rule, Verify

__all__ = [
    "RULES",
    "ArgmaxLaws",
    "LawAt",
    "Rule",
    "Verify",
    "check_traits",
    "drafting_stream",
    "serving_rule",
    "verify",
]

RULES: dict[VerifyRule, Rule] = {
    "coupled": coupled.RULE,
    "token": token.RULE,
    "block": block.RULE,
    "rrsw": rrsw.RULE,
    "traversal": traversal.RULE,
}


def drafting_stream(rule: VerifyRule) -> NoiseStream:
    """The noise that drafters should draw from for requests that chose `rule`."""
    return "shared" if "shared" in RULES[rule].streams else "draft"


def serving_rule(rule: VerifyRule, traits: DraftTraits) -> VerifyRule:
    """The rule that verifies such drafts for a request that chose `rule`.

    Without sampled nodes it is `coupled`, whatever was chosen: a fixed set of proposals is accepted with its whole
    probability, which no rule can exceed, and for any shape. That step's tokens are drawn with SHARED noise, which no
    step that a ratio rule verifies has read.
    """
    return rule if traits.has_sampled else "coupled"


def check_traits(rule: VerifyRule, traits: DraftTraits) -> None:
    """Raises ConfigError with one sentence when a request's rule isn't exact for what a drafter makes."""
    reason = RULES[serving_rule(rule, traits)].refusal(traits)
    if reason is not None:
        raise ConfigError(reason)


def verify(
    rule: VerifyRule, draft: Draft, law_at: LawAt, sampler: RowSampler, key: int, committed_len: int
) -> tuple[VerifyRule, Verdict]:
    """Verifies a draft for a request that chose `rule`; see `verify.rule.Verify`.

    Returns:
        The rule that served, see `serving_rule`, and its verdict.

    Raises:
        EngineFault: the rule isn't exact for the draft, or a sampled node isn't drawn from the law that it carries.
    """
    serving = rule if rule == "coupled" else serving_rule(rule, draft.traits)
    return serving, RULES[serving].verify(draft, law_at, sampler, key, committed_len)
