import pytest

from forerun.drafters.draft_model import DraftModelOptions
from forerun.drafters.ngram import NgramOptions
from forerun.drafters.spec import OFF, REGISTRY, Speculation
from forerun.errors import ConfigError, RequestError
from forerun.types import VerifyRule
from forerun.verify import RULES
from tests.helpers.model_drafter import ChainOptions, SharedTreeOptions


@pytest.mark.parametrize("spec", ["off", "ngram:k=0", "ngram:k=0,policy=fixed"])
def test_off(spec: str) -> None:
    speculation = Speculation.parse(spec)
    assert speculation == OFF
    assert speculation.is_off
    assert str(speculation) == "off"


def test_ngram_defaults_and_settings() -> None:
    assert Speculation.parse("ngram").drafters == (NgramOptions(),)
    assert Speculation.parse("ngram:").drafters == (NgramOptions(),)
    speculation = Speculation.parse(" ngram:k=12, min=2,max = 3,policy=fixed")
    assert speculation.drafters == (NgramOptions(k=12, min=2, max=3, policy="fixed"),)


def test_auto_is_a_choice_of_drafters_that_cost_next_to_nothing() -> None:
    speculation = Speculation.parse("auto")
    assert speculation.is_auto
    assert not speculation.is_off
    assert str(speculation) == "auto"


def test_predictions_are_used_by_prediction_and_auto_alone() -> None:
    for spec in ("prediction", "auto", "ngram+prediction:k=3"):
        Speculation.parse(spec).check_prediction()
    for spec in ("off", "ngram", "prediction:k=0", "recycling+lookahead"):
        with pytest.raises(RequestError, match="no drafter that uses it") as error:
            Speculation.parse(spec).check_prediction()
        assert error.value.param == "prediction"


@pytest.mark.parametrize("name", REGISTRY)
def test_every_drafter_is_known_by_its_name_and_prints_its_settings(name: str) -> None:
    needs_model = REGISTRY[name].needs == "a second model"
    speculation = Speculation.parse(f"{name}:model=some/model.gguf" if needs_model else name)
    assert [options.name for options in speculation.drafters] == [name]
    assert Speculation.parse(str(speculation)) == speculation
    assert str(speculation).startswith(f"{name}:")


@pytest.mark.parametrize("spec", ["off", "auto", "ngram", "ngram:k=3", "ngram:k=1,min=2,max=2,policy=fixed"])
def test_text_reads_back(spec: str) -> None:
    speculation = Speculation.parse(spec)
    assert Speculation.parse(str(speculation)) == speculation


@pytest.mark.parametrize(
    "path", ["a.gguf", "a+b.gguf", "a, b.gguf", 'the "new" one.gguf', " a ", "a=b:c.gguf", '"', '""', "+,", "a\nb"]
)
def test_any_path_can_be_named(path: str) -> None:
    quoted = '"' + path.replace('"', '""') + '"'
    for spec in (f"draft:model={quoted},k=3+ngram:k=2", f"ngram:k=2+draft:k=3, model = {quoted} "):
        speculation = Speculation.parse(spec)
        (draft,) = (options for options in speculation.drafters if isinstance(options, DraftModelOptions))
        assert (draft.model, draft.k) == (path, 3)
        assert Speculation.parse(str(speculation)) == speculation


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ('draft:model="a+b', "leaves a quote open"),
        ('draft:model=a"+b', "leaves a quote open"),
        ('draft:model=""', "setting model has no value"),
        ("", "speculation '' is unknown; known are: off, auto, ngram"),
        ("auto:k=3", "'auto' takes no settings, but has 'k=3'"),
        ("auto+ngram", "'auto' can't be combined"),
        ("ngram+off", "'off' can't be combined"),
        ("eagle", "'eagle' is unknown"),
        ("NGRAM", "'NGRAM' is unknown"),
        ("off:k=1", "takes no settings"),
        ("ngram:gamma=3", "setting 'gamma' is unknown; known are: k, min, max, policy"),
        ("ngram:k", "setting k has no value"),
        ("ngram:k=", "setting k has no value"),
        ("ngram:k=two", "k is 'two', but must be a whole number"),
        ("ngram:k=1.5", "whole number"),
        ("ngram:k=1,k=2", "k is given twice"),
        ("ngram:k=64", "k is 64, but must be between 0"),
        ("ngram:min=3,max=2", "min is 3"),
        ("ngram:max=500", "max is 500, but must be between 1 and 16"),
        ("ngram:policy=clever", "adaptive or fixed"),
        ("ngram+ngram", "names drafter ngram twice"),
        ("ngram+eagle", "'eagle' is unknown"),
    ],
)
def test_f019_illegal_specs_are_refused(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Speculation.parse(spec)


@pytest.mark.parametrize("rule", RULES)
def test_fixed_proposals_go_with_every_rule(rule: VerifyRule) -> None:
    Speculation.parse("ngram").check_rule(rule)
    OFF.check_rule(rule)


def test_a_rule_that_is_not_exact_for_a_drafter_is_refused_before_anything_is_made() -> None:
    speculation = Speculation((SharedTreeOptions(),))
    speculation.check_rule("coupled")
    with pytest.raises(ConfigError, match="rule block verifies chains, not trees"):
        speculation.check_rule("block")
    with pytest.raises(ConfigError, match="rule traversal is exact for nodes sampled from draft noise only"):
        speculation.check_rule("traversal")


@pytest.mark.parametrize("rule", RULES)
def test_a_drafter_that_samples_shares_its_tree_under_coupled_only(rule: VerifyRule) -> None:
    Speculation((ChainOptions(),)).check_rule("token")
    several = Speculation((NgramOptions(), ChainOptions()))
    if rule == "coupled":
        several.check_rule(rule)
    else:
        with pytest.raises(ConfigError, match=f"rule {rule} is exact for the drafts of one drafter that samples, but"):
            several.check_rule(rule)
