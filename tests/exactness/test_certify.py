"""The certificate: it passes what is exact, and planted faults, each of which has shipped somewhere, fail it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from forerun import LLM
from forerun._native import sampling_uniform
from forerun.bench import certify as certify_module
from forerun.bench.certify import Certificate, certify
from forerun.bench.chi_square import chi_square, survival
from forerun.cli.main import app
from forerun.drafters import chain
from forerun.drafters.base import Proposal
from forerun.drafters.chain import ChainDrafting
from forerun.drafters.spec import Speculation
from forerun.sampling.drafting import draft_from_shared
from forerun.sampling.native import NativeSampler
from forerun.sampling.noise import Stream
from forerun.types import Draft, VerifyRule
from forerun.verify import coupled, rounds
from tests.helpers.gguf_files import tiny_llama_metadata, tiny_llama_tensors, write_gguf, write_tiny_llama

NUM_RUNS = 1500


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certify")


@pytest.fixture(scope="module")
def path(folder: Path) -> Path:
    return write_tiny_llama(folder / "target.gguf", context_length=2048)


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return LLM(path, threads=1)


def write_noisy(path: Path, noise: float) -> Path:
    """The target's weights with some noise: a model whose law is near the target's, but not the same."""
    rng = np.random.default_rng(0)
    tensors = {
        name: values + (noise * values.std() * rng.standard_normal(values.shape)).astype(np.float32)
        for name, values in tiny_llama_tensors().items()
    }
    return write_gguf(path, tiny_llama_metadata(context_length=2048), tensors, vocab_size=320)


@pytest.fixture(scope="module")
def drafting(folder: Path) -> str:
    return f"draft:model={write_noisy(folder / 'near.gguf', 0.2)},k=3,policy=fixed"


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certify_module, "NUM_PROMPTS", 1)
    monkeypatch.setattr(certify_module, "EQUALITY_TOKENS", 16)
    monkeypatch.setattr(certify_module, "MIN_LAW_RUNS", NUM_RUNS)
    monkeypatch.setattr(certify_module, "MAX_LAW_RUNS", NUM_RUNS)


def run(llm: LLM, spec: str, rule: VerifyRule) -> Certificate:
    return certify(llm, Speculation.parse(spec), rule, max_s=60.0)


def failed(certificate: Certificate) -> list[str]:
    return [check.name for check in certificate.checks if not check.passed]


@pytest.mark.parametrize("rule", ["coupled", "token", "block"])
def test_what_is_exact_passes(llm: LLM, drafting: str, rule: VerifyRule) -> None:
    certificate = run(llm, drafting, rule)
    assert failed(certificate) == []
    assert certificate.num_drafted > NUM_RUNS
    assert 0.2 < certificate.num_accepted / certificate.num_drafted < 0.9


def test_the_targets_own_layers_pass(llm: LLM) -> None:
    certificate = run(llm, "self:layers=1-1,k=3,policy=fixed", "block")
    assert failed(certificate) == []
    assert certificate.num_drafted > NUM_RUNS
    assert certificate.num_accepted > NUM_RUNS / 10


def test_planted_q_of_another_temperature_is_caught(llm: LLM, drafting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    add = ChainDrafting._add

    def wrong(self: ChainDrafting, guess: Any, children: Any, law: Any, *rest: Any) -> None:
        add(self, guess, children, law, *rest)
        if guess.q_rows[-1] is not None:
            hotter = np.sqrt(guess.q_rows[-1])
            guess.q_rows[-1] = hotter / hotter.sum()

    monkeypatch.setattr(ChainDrafting, "_add", wrong)
    assert any(name.startswith("law:") for name in failed(run(llm, drafting, "token")))


def test_planted_shared_noise_with_a_ratio_test_is_caught(
    llm: LLM, drafting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def from_shared(sampler: Any, q: Any, key: int, committed_len: int, node: int, count: int = 1) -> Any:
        return draft_from_shared(sampler, q, key, committed_len + node, count)

    def last_from_shared(law: Any, sampler: Any, key: int, pos: int, committed_len: int) -> Any:
        return sampler.sample(law, key, pos, Stream.SHARED, 0)

    def coin_from_shared(self: Any, key: int, node: int, committed_len: int) -> float:
        return sampling_uniform(key, drafted[node], committed_len + node, 0, Stream.SHARED)

    drafted: dict[int, int] = {}
    add = ChainDrafting._add

    def remember(self: ChainDrafting, guess: Any, children: Any, *rest: Any) -> None:
        add(self, guess, children, *rest)
        drafted[len(guess.token_ids) - 1] = children[0]

    monkeypatch.setattr(ChainDrafting, "_add", remember)
    monkeypatch.setattr(NativeSampler, "coin", coin_from_shared)
    monkeypatch.setattr(chain, "draft_from_own", from_shared)
    monkeypatch.setattr(rounds, "last_draw", last_from_shared)
    assert any(name.startswith("law:") for name in failed(run(llm, drafting, "token")))


def test_planted_pruning_by_value_is_caught(llm: LLM, drafting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    proposal_of = ChainDrafting._proposal

    def pruned(self: ChainDrafting, guess: Any) -> Proposal:
        whole = proposal_of(self, guess)
        draft, count = whole.draft, 0
        for node, token_id in enumerate(draft.token_ids):
            q_V = draft.q_rows[node]
            if q_V is None or q_V[token_id] < 0.3:
                break
            count += 1
        kept = Draft(
            draft.token_ids[:count], draft.parents[:count], draft.origins[:count], draft.q_rows[:count],
            draft.stream, draft.pruning,
        )  # fmt: skip
        return Proposal(kept, whole.cells[:count])

    monkeypatch.setattr(ChainDrafting, "_proposal", pruned)
    assert any(name.startswith("law:") for name in failed(run(llm, drafting, "token")))


def test_planted_acceptance_of_a_wrong_token_is_caught(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule draws with the noise of the position before: equal in law, and not plain decoding's tokens."""
    verify = coupled.verify

    def late(draft: Draft, law_at: Any, sampler: Any, key: int, committed_len: int) -> Any:
        return verify(draft, law_at, sampler, key, committed_len - bool(draft.num_nodes))

    monkeypatch.setitem(certify_module.RULES, "coupled", coupled.RULE)
    monkeypatch.setattr("forerun.verify.RULES", {**certify_module.RULES, "coupled": replaced(coupled.RULE, late)})
    names = failed(run(llm, "ngram:k=4,policy=fixed", "coupled"))
    assert "equal: temperature" in names


def replaced(rule: Any, verify: Any) -> Any:
    from dataclasses import replace

    return replace(rule, verify=verify)


def test_a_drafter_that_never_drafts_certifies_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.drafters.base import NOTHING
    from forerun.drafters.ngram import NgramDrafter

    monkeypatch.setattr(NgramDrafter, "propose", lambda self, budget: NOTHING)
    assert failed(run(llm, "ngram", "coupled")) == ["the drafter was at work"]


def test_report_and_exit_status(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certify_module, "MAX_LAW_RUNS", 400)
    monkeypatch.setattr(certify_module, "MIN_LAW_RUNS", 10)
    report = tmp_path / "report.json"
    arguments = ["certify", str(path), "--spec", "ngram:k=3,policy=fixed", "--threads", "1"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(report), "--minutes", "0.2"])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout.splitlines()[-1])
    assert data == json.loads(report.read_text())
    assert data["passed"]
    assert {check["name"] for check in data["checks"]} >= {"equal: greedy", "law: all tokens together"}
    monkeypatch.setattr(certify_module, "ALPHA", 2.0)  # nothing is that likely
    assert CliRunner().invoke(app, [*arguments, "--minutes", "0.2"]).exit_code == 1
    assert CliRunner().invoke(app, ["certify", str(path), "--spec", "off"]).exit_code != 0


def test_chi_square_against_known_quantiles() -> None:
    # Upper 5 % and 0.1 % points of the distribution.
    for dof, five, tenth in ((1, 3.841459, 10.827566), (2, 5.991465, 13.815511), (7, 14.067140, 24.321886),
                             (26, 38.885139, 54.051962)):  # fmt: skip
        assert survival(five, dof) == pytest.approx(0.05, rel=1e-5)
        assert survival(tenth, dof) == pytest.approx(0.001, rel=1e-5)
    assert survival(0.0, 3) == 1.0


def test_chi_square_pools_small_cells_and_refuses_the_impossible() -> None:
    assert chi_square([50, 50], [0.5, 0.5]).statistic == 0.0
    assert chi_square([60, 40], [0.5, 0.5]).statistic == pytest.approx(4.0)
    assert chi_square([99, 1], [1.0, 0.0]).p_value == 0.0
    test = chi_square([90, 4, 3, 3], [0.9, 0.04, 0.03, 0.03])
    assert (test.dof, test.statistic) == (1, 0.0)
    assert chi_square([97, 3], [0.97, 0.03]).dof == 0


def test_chi_square_has_the_false_alarms_it_says() -> None:
    rng = np.random.default_rng(1)
    law = [0.4, 0.3, 0.2, 0.1]
    p_values = [chi_square(rng.multinomial(400, law).tolist(), law).p_value for _ in range(4000)]
    for level in (0.5, 0.1, 0.01):
        assert np.mean(np.array(p_values) < level) == pytest.approx(level, rel=0.25)
