"""Laws that stay in their rows: the same bits as laws that are written down, and nobody reads them too late."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from forerun.batch import Batch
from forerun.drafters.base import Budget
from forerun.drafters.chain import ChainDrafting, ChainSettings
from forerun.errors import EngineFault
from forerun.sampling import make_sampler
from forerun.sampling.history import History
from forerun.sampling.native import NativeSampler, RowLaw
from forerun.sampling.noise import Stream
from forerun.sampling.reference import ReferenceSampler
from forerun.types import Float32Array, ForwardOutput, NoiseStream, SamplingParams, StepRecord, VerifyRule
from tests.helpers.drafting import context
from tests.helpers.engines import Drafts, FakeEngine
from tests.helpers.fake_target import VOCAB_SIZE, FakeTarget, prefix_logits
from tests.helpers.isa_levels import ISA_LEVELS, at_level
from tests.helpers.model_drafter import ModelDrafter

SIZES = [1, 7, 16, 31, 32, 33, 127, 128, 129, 300, 1000]
TEMPERATURES = [1e-5, 0.02, 0.3, 0.8, 1.3, 50.0, 1e6]


@pytest.fixture(params=ISA_LEVELS)
def isa_level(request: pytest.FixtureRequest) -> Iterator[int]:
    yield from at_level(request.param)


def rows(vocab_size: int) -> dict[str, Float32Array]:
    rng = np.random.default_rng(vocab_size)
    natural = (rng.standard_normal(vocab_size) * 3).astype(np.float32)
    peaked = natural - np.float32(20)
    peaked[rng.integers(0, vocab_size)] = 12
    masked = natural.copy()
    masked[rng.random(vocab_size) < 0.9] = -np.inf
    masked[vocab_size // 2] = 1.0
    one = np.full(vocab_size, -np.inf, np.float32)
    one[vocab_size - 1] = -7.5
    # Around the least weight that isn't 0; some ratios overflow, and then they are ties.
    faint = (-708.0 + rng.random(vocab_size) * 0.5 - 0.25).astype(np.float32)
    faint[vocab_size // 3] = 0.0
    return {
        "natural": natural,
        "peaked": peaked,
        "masked": masked,
        "one": one,
        "faint": faint,
        "ties": rng.integers(0, 3, vocab_size).astype(np.float32),
        "equal": np.full(vocab_size, -2.5, np.float32),
        "ascending": np.linspace(-20, 5, vocab_size).astype(np.float32),
        "descending": np.linspace(5, -20, vocab_size).astype(np.float32),
        "huge": (natural * np.float32(1e37)).astype(np.float32),
        "subnormal": (natural * np.float32(1e-42)).astype(np.float32),
        "zeros": np.where(rng.random(vocab_size) < 0.5, np.float32(0.0), np.float32(-0.0)),
    }


def assert_same(row: Float32Array, temperature: float, keys: range, counts: tuple[int, ...] = (1, 2, 64)) -> None:
    """Everything that can be asked, the weights last, so that all before is computed from the row."""
    vocab_size = len(row)
    native, reference = make_sampler(vocab_size), make_sampler(vocab_size, "numpy")
    params = SamplingParams(temperature=temperature)
    history = History(params, ()).along()
    got, want = native.law(row, params, history), reference.law(row, params, history)
    assert isinstance(got, RowLaw)
    assert (got.token_ids, got.only_id, got.total) == (None, None, want.total)
    for key in keys:
        race = native.sample(got, key, 31)
        assert race == reference.sample(want, key, 31)
        assert native.score(got, key, 31, race.token_id) == race.score
        assert native.sample(got, key, 3, Stream.RESIDUAL, 9) == reference.sample(want, key, 3, Stream.RESIDUAL, 9)
        for count in counts:
            assert native.draw(got, key, 3, count, Stream.DRAFT, 9) == reference.draw(
                want, key, 3, count, Stream.DRAFT, 9
            )
    for token_id in {0, vocab_size // 3, vocab_size // 2, vocab_size - 1, race.token_id}:
        assert got.weight(token_id) == want.weight(token_id)
        assert got.prob(token_id) == want.prob(token_id)
        assert native.score(got, 5, 31, token_id) == reference.score(want, 5, 31, token_id)
    assert got.weights.tobytes() == want.weights.tobytes()
    assert got.weights is got.weights
    assert got.dense(vocab_size).tobytes() == want.dense(vocab_size).tobytes()


@pytest.mark.usefixtures("isa_level")
@pytest.mark.parametrize("vocab_size", SIZES)
def test_every_answer_is_the_references(vocab_size: int) -> None:
    for row in rows(vocab_size).values():
        for temperature in TEMPERATURES:
            assert_same(row, temperature, range(2))


@pytest.mark.usefixtures("isa_level")
@pytest.mark.parametrize(("name", "temperature"), [("natural", 1.0), ("natural", 3.0), ("peaked", 0.5), ("equal", 1.0)])
def test_no_winner_is_missed_in_many_races(name: str, temperature: float) -> None:
    assert_same(rows(1000)[name], temperature, range(300), (5,))


@pytest.mark.usefixtures("isa_level")
@pytest.mark.parametrize("vocab_size", [49_152, 49_153])
def test_whole_vocabularies(vocab_size: int) -> None:
    for name, temperature in (("natural", 0.8), ("ties", 1.0), ("ascending", 0.1)):
        assert_same(rows(vocab_size)[name], temperature, range(2))


@pytest.mark.usefixtures("isa_level")
def test_the_first_of_equal_ratios_has_the_place() -> None:
    """Ratios that overflow are equal, and get the last places in the order of their ids."""
    row = np.full(70, -707.99, np.float32)
    row[40] = 0.0
    for key in range(200):
        assert_same(row, 1.0, range(key, key + 1), (64,))


@pytest.mark.usefixtures("isa_level")
@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF, 0x7F800000])
@pytest.mark.parametrize("at", [0, 5, 63, 128, 299])
def test_what_is_not_a_number_is_found_wherever_it_is(bits: int, at: int) -> None:
    row = rows(300)["natural"]
    row.view(np.uint32)[at] = bits
    params = SamplingParams(temperature=0.8)
    message = rf"position 0: the logits hold {'NaN' if bits & 0x7FFFFF else '.inf'} at token id {at}"
    with pytest.raises(EngineFault, match=message):
        make_sampler(300).law(row, params, History(params, ()).along())


@pytest.mark.usefixtures("isa_level")
@pytest.mark.parametrize("vocab_size", [5, 300])
def test_rows_that_allow_nothing_are_refused(vocab_size: int) -> None:
    params = SamplingParams(temperature=0.8)
    row = np.full(vocab_size, -np.inf, np.float32)
    for last, message in ((-np.inf, "no token is allowed"), (np.nan, "the logits hold NaN at token id")):
        row[-1] = last
        for sampler in (make_sampler(vocab_size), make_sampler(vocab_size, "numpy")):
            with pytest.raises(EngineFault, match=message):
                sampler.law(row, params, History(params, ()).along())


def test_laws_that_are_cut_or_changed_are_written_down() -> None:
    sampler, row = make_sampler(300), rows(300)["natural"]
    for fields in ({"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"logit_bias": {3: 1.0}}, {"presence_penalty": 0.1}):
        params = SamplingParams(temperature=0.8, **fields)
        assert not isinstance(sampler.law(row, params, History(params, ()).along()), RowLaw)
    params = SamplingParams(temperature=0.8)
    assert not isinstance(sampler.law(row, params, History(params, ()).along(), np.array([2], np.int32)), RowLaw)


def test_ids_beyond_the_vocabulary_have_no_weight() -> None:
    params = SamplingParams(temperature=0.8)
    law = make_sampler(16).law(rows(16)["natural"], params, History(params, ()).along())
    for token_id in (-1, 16):
        with pytest.raises(IndexError, match="lies outside the vocabulary of 16"):
            law.weight(token_id)


# ---- how long they last ----


class ForgetfulTarget(FakeTarget):
    """Its rows last no longer than they must: the next pass begins with ruining them."""

    last: Float32Array | None = None

    def forward(self, batch: Batch) -> ForwardOutput:
        self.forget()
        rows = super().forward(batch)
        self.last = rows.logits
        return rows

    def forget(self) -> None:
        if self.last is not None:
            self.last.fill(np.nan)


def told(record: StepRecord) -> tuple[object, ...]:
    """What a record says, but for times."""
    draft = record.draft
    q_rows = [None if q_V is None else q_V.tobytes() for q_V in draft.q_rows]
    return record.rule, record.verdict, record.emitted, draft.token_ids, draft.parents, q_rows


DRAFTS: dict[str, tuple[VerifyRule, Drafts]] = {
    "plain": ("coupled", None),
    "ngram": ("coupled", "ngram:k=4,policy=fixed"),
    "shared": ("coupled", ModelDrafter(11, (2, 1), "shared")),
    "token": ("token", ModelDrafter(11, (1, 1, 1))),
    "block": ("block", ModelDrafter(11, (1, 1, 1))),
    "rrsw": ("rrsw", ModelDrafter(11, (2, 2))),
    "traversal": ("traversal", ModelDrafter(11, (2, 2))),
}


@pytest.mark.parametrize("name", DRAFTS)
def test_steps_are_done_with_rows_before_the_next_pass(name: str) -> None:
    rule, drafts = DRAFTS[name]
    params = SamplingParams(max_tokens=30, temperature=1.1, ignore_eos=True, logprobs=3)
    native = FakeEngine(64, sampler=NativeSampler(VOCAB_SIZE), target=ForgetfulTarget)
    reference = FakeEngine(64)
    got, want = (engine.events([4, 7], params, drafts, rule, noise_key=11) for engine in (native, reference))
    native.target.forget()  # type: ignore[attr-defined]
    assert [told(event.record) for event in got] == [told(event.record) for event in want]
    assert len(got) == len(want) > 5
    assert got[-1].completion.logprobs == want[-1].completion.logprobs  # type: ignore[union-attr]


class ForgetfulModel:
    """A model that writes every row to one place, and ruins it with every token that it takes."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = list(token_ids)
        self._row: Float32Array = np.empty(VOCAB_SIZE, np.float32)

    def has_room(self, num_guesses: int, num_nodes: int) -> bool:
        return True

    def is_step(self) -> bool:
        return False

    def run(self) -> Float32Array:
        self._row[:] = prefix_logits(self._token_ids)
        return self._row

    def extend(self, token_id: int) -> None:
        self._token_ids.append(token_id)
        self._row.fill(np.nan)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("stream", ["shared", "draft"])
def test_drafters_are_done_with_a_row_before_the_next_one(stream: NoiseStream, width: int) -> None:
    asked = context([4, 7], params=SamplingParams(temperature=1.1), stream=stream)
    settings = ChainSettings(5, width, "law", "fixed")
    proposals = []
    for sampler in (NativeSampler(VOCAB_SIZE), ReferenceSampler(VOCAB_SIZE)):
        model = ForgetfulModel([4, 7])
        drafting = ChainDrafting(model, settings, sampler, VOCAB_SIZE, "model", asked)
        proposals.append(drafting.propose(Budget(15, (0.0,) * 15, lambda cell: 0.5)))
        model.extend(0)
    got, want = proposals
    assert got.draft.num_nodes == 5 * width
    assert (got.draft.token_ids, got.draft.parents, got.cells) == (want.draft.token_ids, want.draft.parents, want.cells)
    assert all(q_V is not None for q_V in got.draft.q_rows) == (stream == "draft")
    assert [None if q_V is None else q_V.tobytes() for q_V in got.draft.q_rows] == [
        None if q_V is None else q_V.tobytes() for q_V in want.draft.q_rows
    ]
