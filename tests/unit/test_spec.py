import pytest

from forerun.drafters.ngram import NgramOptions
from forerun.drafters.spec import OFF, REGISTRY, Speculation
from forerun.errors import ConfigError, RequestError


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
    speculation = Speculation.parse(name)
    assert [options.name for options in speculation.drafters] == [name]
    assert Speculation.parse(str(speculation)) == speculation
    assert str(speculation).startswith(f"{name}:")


@pytest.mark.parametrize("spec", ["off", "auto", "ngram", "ngram:k=3", "ngram:k=1,min=2,max=2,policy=fixed"])
def test_text_reads_back(spec: str) -> None:
    speculation = Speculation.parse(spec)
    assert Speculation.parse(str(speculation)) == speculation


@pytest.mark.parametrize(
    ("spec", "message"),
    [
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
