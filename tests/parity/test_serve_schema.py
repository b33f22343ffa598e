"""The server against its own description: whatever a client makes of `/openapi.json`, nothing ends in a fault."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from forerun.models.store import known_model, path_of
from tests.helpers.served import ServedProcess

schemathesis = pytest.importorskip("schemathesis")
GenerationMode = schemathesis.GenerationMode

DEMO = path_of(known_model("demo"))
pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(not DEMO.exists(), reason="the demo model is not in the cache; `forerun pull demo` fetches it"),
]

NUM_EXAMPLES = 12
TIMEOUT_S = 60
ASKED = {"prompt", "messages", "input", "tokens"}  # without which there is nothing to answer
# Of so many fields at once some are always wrong together: this share of the bodies has a few of them.
SPARSE = 0.7
KNOWN: dict[str, Any] = {"prompt": "One, two, three,", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[ServedProcess]:
    with ServedProcess("demo", "--max-model-len", "256") as process:
        yield process.until_ready()


def test_no_request_by_the_schema_ends_in_a_fault(server: ServedProcess) -> None:
    known = server.post("/v1/completions", KNOWN)["choices"][0]["text"]
    schema = schemathesis.openapi.from_url(server.url + "/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) > 10
    statuses = {operation.label: statuses_of(operation) for operation in operations}
    served = {label for label, seen in statuses.items() if label.startswith("POST") and 200 in seen}
    assert len(served) >= 3, statuses
    assert server.post("/v1/completions", KNOWN)["choices"][0]["text"] == known


def statuses_of(operation: Any) -> set[int]:
    """Asks what an operation's schema allows, and what it forbids; the statuses of the answers."""
    seen: set[int] = set()
    rng = random.Random(0)

    @settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(GenerationMode.POSITIVE) | operation.as_strategy(GenerationMode.NEGATIVE))
    def ask(case: Any) -> None:
        if isinstance(case.body, dict) and case.body and rng.random() < SPARSE:
            asked = sorted(ASKED & case.body.keys())
            kept = {*rng.sample(sorted(case.body), min(2, len(case.body))), *rng.sample(asked, len(asked[:1]))}
            case.body = {name: value for name, value in case.body.items() if name in kept - {"model"}}
        reply = case.call(timeout=TIMEOUT_S)
        seen.add(reply.status_code)
        assert reply.status_code < 500, (case.as_curl_command(), reply.text[:300])

    ask()
    return seen
