"""What browsers ask for: other origins, the page and the schema of the API."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.serve import app as app_module
from tests.helpers.asgi import call
from tests.helpers.asynchronous import asynchronous
from tests.helpers.fake_worker import FakeServer, with_settings

PATH = "/v1/completions"
ORIGIN = "https://page.example"


@asynchronous
async def test_other_origins_are_let_in_by_name() -> None:
    async with FakeServer(settings=with_settings(cors_origins=(ORIGIN,), api_keys=("k",))) as server:
        preflight = {"origin": ORIGIN, "access_control_request_method": "POST"}
        reply = await call(server.app, PATH, method="OPTIONS", **preflight)
        assert reply.status == 200
        assert reply.headers["access-control-allow-origin"] == ORIGIN
        for body in ({"prompt": "hi"}, {"prompt": "hi", "stream": True}, {"prompt": 5}):
            reply = await call(server.app, PATH, body, origin=ORIGIN, authorization="Bearer k")
            assert reply.headers["access-control-allow-origin"] == ORIGIN
        other = await call(server.app, PATH, {"prompt": "hi"}, origin="https://other", authorization="Bearer k")
        assert "access-control-allow-origin" not in other.headers
    async with FakeServer() as server:
        reply = await call(server.app, PATH, {"prompt": "hi"}, origin=ORIGIN)
        assert "access-control-allow-origin" not in reply.headers


@asynchronous
async def test_the_page_is_at_the_root_unless_it_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "index.html").write_text("<title>chat</title>")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.js").write_text("1")
    monkeypatch.setattr(app_module, "PAGE", tmp_path)
    async with FakeServer(settings=with_settings(api_keys=("k",))) as server:
        assert (await call(server.app, "/")).body == b"<title>chat</title>"
        assert (await call(server.app, "/a/b.js")).headers["content-type"].startswith("text/javascript")
        assert (await call(server.app, PATH, authorization="Bearer k")).error["code"] == "method_not_allowed"
        assert (await call(server.app, "/health")).status == 200
        assert (await call(server.app, "/nothing")).error["code"] == "not_found"
        assert (await call(server.app, "/v1/models")).status == 401
    async with FakeServer(settings=with_settings(has_page=False)) as server:
        assert (await call(server.app, "/")).status == 404


@asynchronous
async def test_the_schema_of_the_api_holds_together() -> None:
    async with FakeServer() as server:
        schema = (await call(server.app, "/openapi.json")).json()
    defined = {f"#/components/schemas/{name}" for name in schema["components"]["schemas"]}

    def references(value: object) -> set[str]:
        if isinstance(value, dict):
            found = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
            return found.union(*map(references, value.values()))
        return set().union(*map(references, value)) if isinstance(value, list) else set()

    assert references(schema) <= defined
    assert {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize"} <= set(schema["paths"])
