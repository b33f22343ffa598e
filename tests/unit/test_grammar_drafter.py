from __future__ import annotations

import dataclasses

import pytest

from forerun.drafters.base import NOTHING, Budget
from forerun.drafters.grammar import RATES, GrammarDrafter, GrammarOptions
from forerun.drafters.spec import Speculation
from forerun.errors import ConfigError
from forerun.models.grammar import GrammarCompiler
from forerun.models.structured import Structured
from tests.helpers.drafting import context, target
from tests.helpers.toy_vocab import TOY

FORM = Structured.choice(["the other thing and the hand", "the other thing and the handle"])


def drafter(options: GrammarOptions, **changes: object) -> GrammarDrafter:
    state = GrammarCompiler(TOY, TOY.vocab_size).compile(FORM).open()
    asked = dataclasses.replace(context([5]), grammar=state, **changes)  # type: ignore[arg-type]
    opened = options.bind(target(TOY.vocab_size)).open(asked)
    assert isinstance(opened, GrammarDrafter)
    return opened


def budget(max_nodes: int) -> Budget:
    return Budget(max_nodes, (0.0,) * max_nodes, lambda cell: 1.0)


def test_proposes_what_must_follow() -> None:
    proposal = drafter(GrammarOptions()).propose(budget(63))
    ids = TOY.encode("the other thing and the hand", add_bos=False)
    draft = proposal.draft
    assert draft.token_ids == tuple(ids[: draft.num_nodes])
    assert draft.num_nodes > 4
    assert draft.is_chain
    assert set(draft.origins) == {"grammar"}
    assert proposal.cells[:4] == (0, 1, 2, 2)
    assert max(proposal.cells) < len(RATES)


def test_is_silent_where_there_is_a_choice() -> None:
    one = drafter(GrammarOptions())
    one._grammar.advance(TOY.encode("the other thing and the hand", add_bos=False))
    assert one.propose(budget(8)) is NOTHING


def test_keeps_to_k_and_to_the_budget_and_ends_at_an_end_id() -> None:
    assert drafter(GrammarOptions(k=3)).propose(budget(8)).draft.num_nodes == 3
    assert drafter(GrammarOptions()).propose(budget(2)).draft.num_nodes == 2
    second = TOY.encode("the other", add_bos=False)[1]
    ended = drafter(GrammarOptions(), end_ids=frozenset({second})).propose(budget(8))
    assert ended.draft.token_ids[-1] == second
    assert ended.draft.num_nodes == 2


def test_a_request_without_a_grammar_has_no_drafter() -> None:
    assert GrammarOptions().bind(target(TOY.vocab_size)).open(context([5])) is None
    assert GrammarOptions in map(type, Speculation.parse("auto").drafters)


@pytest.mark.parametrize(
    ("spec", "message"), [("k=64", "between 0"), ("k=-1", "between 0"), ("policy=never", "adaptive or fixed")]
)
def test_settings_out_of_range_are_refused(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Speculation.parse(f"grammar:{spec}")
    assert Speculation.parse("grammar:k=0").is_off
