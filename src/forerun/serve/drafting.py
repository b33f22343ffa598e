"""How a request says who drafts, under all the names that clients know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.drafters.spec import Speculation
from forerun.engine.run import MAX_STEP_NODES
from forerun.serve.problems import Problem
from forerun.serve.schema import GenerationFields, Prediction
from forerun.serve.settings import ReportLevel, ServeSettings
from forerun.types import VerifyRule

# Names that other engines give to drafters, and ours.
DRAFTER_ALIASES = {
    "prompt-lookup": "ngram",
    "prompt_lookup": "ngram",
    "ngram-simple": "ngram",
    "ngram-map-k": "ngram",
    "suffix-decoding": "suffix",
    "draft_model": "draft",
    "draft-model": "draft",
    "draft-simple": "draft",
    "self_speculative": "self",
}


@dataclass(frozen=True, slots=True)
class Drafting:
    """How one request is drafted.

    Attributes:
        spec: who drafts.
        rule: the verification rule.
        method: only this drafter; None is all of them.
        k: draft tokens per step at most; None leaves it to the engine.
        prediction: what the answer is expected to look like.
        report: what the answer's `metrics` holds.
    """

    spec: str
    rule: VerifyRule
    method: str | None
    k: int | None
    prediction: str | None
    report: ReportLevel


def drafting_of(request: GenerationFields, settings: ServeSettings) -> Drafting:
    """Settles what a request says.

    Raises:
        Problem: a drafter that isn't loaded, a k above the largest, or fields that contradict each other.
    """
    asked = request.speculative
    k, k_name = _k(request)
    method, method_name = _method(request, loaded_drafters(settings.spec))
    is_off = (asked is not None and asked.enabled is False) or k == 0
    if is_off and request.prediction is not None:
        raise Problem(400, "a prediction is given, but speculation is switched off by the same request", "prediction")
    if is_off and method is not None:
        raise Problem(
            400, f"{method_name} names a drafter, but speculation is switched off by the request", method_name
        )
    if asked is not None and asked.enabled is False and k:
        raise Problem(400, f"{k_name} is {k}, but speculation is switched off by the same request", k_name)
    if asked is not None and asked.enabled and Speculation.parse(settings.spec).is_off:
        raise Problem(400, "this server has no drafter, so speculation can't be enabled", "speculative.enabled")
    return Drafting(
        spec="off" if is_off else settings.spec,
        rule=(asked.rule if asked else None) or settings.verify,
        method=method,
        k=k or None,
        prediction=None if request.prediction is None else prediction_text(request.prediction),
        report=(asked.metrics if asked else None) or settings.report,
    )


def loaded_drafters(spec: str) -> tuple[str, ...]:
    """Names of a spec's drafters."""
    return tuple(options.name for options in Speculation.parse(spec).drafters)


def prediction_text(prediction: Prediction) -> str:
    """The text of a prediction; parts are joined."""
    content = prediction.content
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _k(request: GenerationFields) -> tuple[int | None, str]:
    """The k of a request and the name it is given under; None where it is left to the engine."""
    asked = request.speculative.k if request.speculative else None
    given: dict[str, int | str | None] = {
        "speculative.k": asked,
        "num_draft_tokens": request.num_draft_tokens,
        "draft_num_predict": request.draft_num_predict,
    }
    name, value = _agreed(given)
    if isinstance(value, int) and value > MAX_STEP_NODES:
        raise Problem(400, f"{name} is {value}, but this server drafts at most {MAX_STEP_NODES} tokens a step", name)
    return (value if isinstance(value, int) else None), name


def _method(request: GenerationFields, loaded: Sequence[str]) -> tuple[str | None, str]:
    """The drafter a request names, by our name for it, and the field; None where all may draft."""
    asked = request.speculative.method if request.speculative else None
    given: dict[str, int | str | None] = {
        "speculative.method": DRAFTER_ALIASES.get(asked, asked) if asked is not None else None,
        "draft_model": DRAFTER_ALIASES.get(request.draft_model, request.draft_model) if request.draft_model else None,
    }
    name, value = _agreed(given)
    if value is None or value == "auto":
        return None, name
    if value not in loaded:
        known = ", ".join([*loaded, "auto"]) if loaded else "none"
        raise Problem(400, f"{name} is {value!r:.80}, but the drafters of this server are: {known}", name)
    return str(value), name


def _agreed(given: dict[str, int | str | None]) -> tuple[str, int | str | None]:
    """The one value of several spellings, and the spelling.

    Raises:
        Problem: two spellings disagree.
    """
    named = {name: value for name, value in given.items() if value is not None}
    if len(set(named.values())) > 1:
        shown = " and ".join(f"{name} {value!r:.40}" for name, value in named.items())
        raise Problem(400, f"{shown} contradict each other; send one of them", next(reversed(named)))
    return next(iter(named.items())) if named else (next(iter(given)), None)
