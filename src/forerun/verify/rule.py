"""What a verification rule is: a function and the drafts it is exact for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forerun.errors import ConfigError
from forerun.sampling.distribution import Law, RowSampler
from forerun.types import Draft, NoiseStream, Verdict, VerifyRule

# The target's law of the token after a draft node; -1 is the root. Rules ask for walked nodes only, each once.
LawAt = Callable[[int], Law]
# (draft, law_at, sampler, key, committed_len): key is the request's seed, committed_len the number of tokens before the
# step, which is also the position that the root's children propose.
Verify = Callable[[Draft, LawAt, RowSampler, int, int], Verdict]


@dataclass(frozen=True, slots=True)
class Rule:
    """One verification rule.

    Attributes:
        name: as requests and operators write it.
        verify: turns laws and a draft into a verdict.
        accepts_trees: whether a node may have several children.
        sampled_streams: the noise streams that sampled nodes may be drawn from.
        is_path_exact: whether the emitted tokens, not only their law, are those of plain seeded decoding.
    """

    name: VerifyRule
    verify: Verify
    accepts_trees: bool
    sampled_streams: frozenset[NoiseStream]
    is_path_exact: bool

    def check(self, draft: Draft) -> None:
        """Raises ConfigError when the rule isn't exact for such a draft."""
        if not self.accepts_trees and not draft.is_chain:
            raise ConfigError(f"rule {self.name} verifies chains, but the draft is a tree; use rule coupled")
        if draft.stream not in self.sampled_streams and any(q_V is not None for q_V in draft.q_rows):
            allowed = " or ".join(sorted(self.sampled_streams))
            raise ConfigError(
                f"rule {self.name} is exact for nodes sampled from {allowed} noise only, not from {draft.stream}"
            )
