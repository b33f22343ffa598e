"""Other engines' speculation flags, as a SPEC."""

from __future__ import annotations

import json

import pytest

from forerun.drafters.spec import Speculation
from forerun.errors import ConfigError
from forerun.serve.spec_flags import SpecFlags, spec_of


@pytest.mark.parametrize(
    ("flags", "spec"),
    [
        (SpecFlags(), "auto"),
        (SpecFlags(spec="ngram:k=3"), "ngram:k=3"),
        (SpecFlags(is_off=True), "off"),
        (SpecFlags(method="prompt-lookup", k=5), "ngram:k=5"),
        (SpecFlags(method="suffix", k=0), "off"),
        (SpecFlags(model="some model+x.gguf", k=3), 'draft:model="some model+x.gguf",k=3'),
        (SpecFlags(method="draft_model", model="a"), "draft:model=a"),
        (SpecFlags(config='{"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 3}'), "ngram:min=2,max=3"),
        (SpecFlags(config='{"model": "m", "num_speculative_tokens": 2}'), "draft:model=m,k=2"),
    ],
)
def test_what_flags_mean(flags: SpecFlags, spec: str) -> None:
    assert spec_of(flags) == str(Speculation.parse(spec))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (SpecFlags(spec="auto", is_off=True), "choose one way"),
        (SpecFlags(spec="auto", k=3), "choose one way"),
        (SpecFlags(k=3), "no drafter is named"),
        (SpecFlags(method="draft"), "needs a model"),
        (SpecFlags(method="ngram", model="m"), "has no setting model"),
        (SpecFlags(method="lookahead", k=3), "has no setting k"),
        (SpecFlags(method="ngrm"), "did you mean 'ngram'"),
        (SpecFlags(method="eagle3"), "no drafter 'eagle3'"),
        (SpecFlags(method="ngram", k=-1), "k is -1"),
        (SpecFlags(config="{"), "not valid JSON"),
        (SpecFlags(config="[]"), "JSON object"),
        (SpecFlags(config='{"method": "ngram", "num_speculativ_tokens": 3}'), "did you mean 'num_speculative_tokens'"),
        (SpecFlags(config='{"method": "ngram", "num_speculative_tokens": true}'), "a whole number"),
        (SpecFlags(config='{"method": 3}'), "a string"),
        (SpecFlags(config=json.dumps({"num_speculative_tokens": 3})), "no drafter is named"),
        (SpecFlags(config='{"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3}'), "min"),
    ],
)
def test_F019_flags_that_leave_something_open(flags: SpecFlags, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        spec_of(flags)
