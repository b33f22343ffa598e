"""Mutants of model files in the installed build, and the fuzz itself: it must see whatever can go wrong.

`scripts/test-native` runs many more, with sanitizers.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import forerun.models.bound as bound
from forerun.errors import ForerunError, LoadError
from forerun.models.tokenizer import Tokenizer
from tests.fuzz.fleet import MAX_CPU_S, Outcome, Tally, Worker, run_fleet
from tests.fuzz.mutants import Mutant, make_mutant, unchanged
from tests.fuzz.use import Fault, use_model

NUM_MUTANTS = 250
MUTANTS = {mutant.base: mutant for mutant in unchanged()}


def used(mutant: Mutant, folder: Path) -> str:
    mutant.write(folder)
    return use_model(folder, mutant.entry, mutant.number).how


@pytest.mark.parametrize("base", MUTANTS)
def test_a_model_that_nobody_touched_works(base: str, tmp_path: Path) -> None:
    assert used(MUTANTS[base], tmp_path) == "works"


def test_f052_f053_f054_mutants_work_or_are_refused(tmp_path: Path) -> None:
    how = []
    for number in range(NUM_MUTANTS):
        mutant = make_mutant(1, number)
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            how.append(used(mutant, folder))
        except Fault as fault:
            raise AssertionError(f"{mutant}: {fault}") from fault
    assert min(how.count("works"), how.count("refused")) > NUM_MUTANTS // 10


def test_a_mutant_is_the_same_every_time() -> None:
    for number in range(40):
        assert make_mutant(5, number) == make_mutant(5, number)
    assert make_mutant(5, 0) != make_mutant(6, 0)


# ---- what it must see ------------------------------------------------------------------------------------------------


class SurpriseError(BaseException):
    """Nothing that anybody raises on purpose."""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (KeyError("x"), "KeyError: 'x'"),
        (SurpriseError("panic"), "SurpriseError: panic"),
        (MemoryError(), "MemoryError"),
        (ForerunError("a plain one of the base class"), "an error of type ForerunError"),
        (LoadError("somewhere is a tensor of no shape"), "does not name the file"),
        (LoadError("{folder}: two\nlines are a page"), "can't be shown"),
        (LoadError("{folder}: colours \x1b[31m and so on"), "can't be shown"),
        (LoadError("{folder}: " + "long " * 400), "can't be shown"),
    ],
)
def test_errors_that_nobody_designed_are_faults(
    error: BaseException, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised = LoadError(str(error).format(folder=tmp_path)) if "{folder}" in str(error) else error

    def refuse(*_: object) -> None:
        raise raised

    monkeypatch.setattr(bound, "num_pages_for", refuse)
    with pytest.raises(Fault, match=words.replace("[", r"\[")):
        used(MUTANTS["gguf llama"], tmp_path)


def test_ids_outside_the_vocabulary_are_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text, **_: [self.vocab_size])
    with pytest.raises(Fault, match="ids outside the vocabulary"):
        used(MUTANTS["gguf llama"], tmp_path)


ANSWER = '{"how": "works", "fault": "", "cpu_s": %s, "peak_mb": %s}'


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ("os.abort()", "the process ended"),
        ("sys.exit('==1==ERROR: AddressSanitizer: over')", "the process ended: ==1==ERROR: AddressSanitizer: over"),
        ("time.sleep(99)", "took longer than"),
        ("hog = bytearray(b'x') * (600 << 20); time.sleep(99)", "used more than 300 MB"),
        (f"answer = {ANSWER % (MAX_CPU_S + 1, 1)!r}", "of CPU and 1 MB"),
        (f"answer = {ANSWER % (1, 9999)!r}", "1.0 s of CPU and 9999 MB"),
    ],
)
def test_what_a_process_does_is_seen(action: str, words: str) -> None:
    code = f"""
import os, sys, time
for line in sys.stdin:
    answer = {ANSWER % (1, 1)!r}
    if line == "7\\n":
        {action}
    print(answer, flush=True)
"""
    with Worker([sys.executable, "-c", code], os.environ, kill_s=4.0, kill_mb=300.0) as worker:
        assert worker.run(6).how == "works"
        outcome = worker.run(7)
        assert (outcome.number, outcome.how) == (7, "fault")
        assert words in outcome.fault
        assert worker.run(8).how == "works"  # in a new process


def test_a_fleet_runs_every_number_once() -> None:
    tally = Tally()
    outcomes = list(run_fleet(0, range(60, 90), 2))
    for outcome in outcomes:
        tally.add(outcome)
    assert sorted(outcome.number for outcome in outcomes) == list(range(60, 90))
    assert tally.counts["fault"] == 0
    assert sum(tally.counts.values()) == 30


def test_a_tally_remembers_the_worst() -> None:
    tally = Tally()
    for outcome in (Outcome(1, "works", "", 2.0, 5.0), Outcome(2, "fault", "x", 1.0, 9.0), Outcome(3, "refused")):
        tally.add(outcome)
    assert tally.faults == [Outcome(2, "fault", "x", 1.0, 9.0)]
    assert str(tally) == (
        "3 mutants: 1 work, 1 are refused, 1 end in a fault; 3 s of CPU, slowest 2.0 s (1), most memory 9 MB (2)"
    )
