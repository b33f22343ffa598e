"""Whatever is sent: an answer or a refusal in the one form, never a fault, and the next request is answered."""

from __future__ import annotations

import collections
import json

from tests.helpers.asgi import Reply, call
from tests.helpers.asynchronous import asynchronous
from tests.helpers.fake_worker import FakeServer, say
from tests.helpers.hostile import hostile

NUM_REQUESTS = 600
PLAIN = {"prompt": "hi", "seed": 1}


def check(reply: Reply) -> None:
    assert reply.is_complete
    if reply.status >= 400:
        error = reply.error
        assert "Traceback" not in error["message"]
        assert len(error["message"]) < 1000
    elif reply.headers["content-type"].startswith("text/event-stream"):
        assert reply.events()
    else:
        json.dumps(reply.json(), allow_nan=False)


@asynchronous
async def test_hostile_requests() -> None:
    statuses: collections.Counter[int] = collections.Counter()
    async with FakeServer(say("hello world")) as server:
        for number in range(NUM_REQUESTS):
            request = hostile(number)
            reply = await call(server.app, request.path, request.body, method="POST", **request.headers)
            assert reply.status in (200, 400, 404, 415), (number, request, reply.body)
            check(reply)
            statuses[reply.status] += 1
            if number % 20 == 0:
                plain = await call(server.app, "/v1/completions", PLAIN)
                assert plain.json()["choices"][0]["text"] == "hello world"
        assert server.hub.num_jobs == server.hub.num_open == 0
    assert min(statuses[200], statuses[400]) > NUM_REQUESTS / 20, "both kinds are tried"
