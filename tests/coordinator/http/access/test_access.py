"""Which hosts' names, origins and content types are accepted, and the CORS answers to browsers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import httpx
import pytest
from support.http_fakes import FakeDispatcher
from support.websocket_client import connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Origin

from splitserve.coordinator.errors import ApiError, InvalidRequest
from splitserve.coordinator.front_door import FrontDoor, front_door_of
from splitserve.coordinator.http.access.access import Access
from splitserve.coordinator.server import AppParts, HttpApp, HttpServer
from splitserve.coordinator.settings import CoordinatorSettings
from splitserve.coordinator.text.served_model import ServedModel

BODY = {"model": "tiny", "prompt": "Hi", "max_tokens": 3, "temperature": 0}
APP = "https://app.example"


@pytest.fixture
async def shared(dispatcher: FakeDispatcher, model: ServedModel) -> AsyncIterator[httpx.AsyncClient]:
    """A server that pages of two origins may use."""
    access = Access(["llm.example"], [APP, "http://localhost:*"])
    server = HttpServer(HttpApp(dispatcher, model, AppParts(front=FrontDoor(access, access))))
    await server.start()
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{server.port}", verify=False, timeout=60
    ) as http:
        yield http
    await server.stop(grace_s=0)


def allows_host(access: Access, host: str) -> bool:
    try:
        access.check("GET", {b"host": host.encode()})
    except InvalidRequest:
        raise
    except ApiError:
        return False
    return True


ALWAYS = [
    "localhost",
    "localhost:8000",
    "LocalHost",
    "localhost.",
    "a.localhost",
    "127.0.0.1:8000",
    "[::1]:8000",
    "10.2.3.4",
    "[fd00::1]",
]
PRIVATE = [
    "splitserve",
    "splitserve.models.svc",
    "splitserve.models.svc.cluster.local:8000",
    "gpu-1.internal",
    "box.local",
]
FOREIGN = [
    "evil.example",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "evillocalhost",
    "0x7f.1",
    "cluster.local.evil.example",
]


def test_names_of_loopback_and_addresses_are_always_allowed() -> None:
    for access in (Access(), Access(["llm.example"]), Access(private_names=True)):
        assert all(allows_host(access, host) for host in ALWAYS)
    assert not any(allows_host(Access(), host) for host in FOREIGN + PRIVATE)


def test_private_and_listed_names() -> None:
    access = Access(["llm.example", "*.llm.example"], private_names=True)
    assert all(allows_host(access, host) for host in [*PRIVATE, "llm.example:443", "eu.llm.example"])
    assert not any(
        allows_host(access, host) for host in FOREIGN if host != "evillocalhost"
    )  # no page's name has no dot
    assert all(allows_host(Access(["*"]), host) for host in FOREIGN)


@pytest.mark.parametrize(
    "host", ["", " ", "a b", "a/b", "user@localhost", "localhost:x", "[::1", "a,b", "é", "a" * 300]
)
def test_what_is_no_host_is_400(host: str) -> None:
    with pytest.raises(InvalidRequest):
        Access(["*"]).check("GET", {b"host": host.encode()})


def settings(**more: object) -> CoordinatorSettings:
    return CoordinatorSettings.model_validate({"model": "m", "insecure": True, **more})


def test_hosts_as_configured() -> None:
    def allowed(name: str, **more: object) -> bool:
        return allows_host(front_door_of(settings(**more)).access, name)

    assert not allowed("llm.example")
    assert not allowed("splitserve.models.svc")
    assert not allowed("llm.example", host="0.0.0.0", open_access=True)
    assert allowed("splitserve.models.svc", host="0.0.0.0", open_access=True)
    assert allowed("llm.example", host="0.0.0.0", open_access=True, allowed_hosts="llm.example")
    assert allowed("llm.example", tenants_file="x")  # nothing without a key
    assert not allowed("llm.example", tenants_file="x", allowed_hosts="other.example")
    assert allows_host(front_door_of(settings()).admin_access, "llm.example")  # its key is always asked for


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"allowed_hosts": "https://llm.example"}, "without scheme"),
        ({"allowed_origins": "app.example"}, "SCHEME://HOST"),
        ({"allowed_origins": "https://app.example/"}, "SCHEME://HOST"),
        ({"trusted_proxies": "proxy"}, "neither an address nor a network"),
        ({"tls_key": "key.pem"}, "--tls-cert"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(more: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**more)


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/tokenize", "/debug/state", "/health", "/", "/v1/chat/completions"]
)
async def test_a_rebound_name_gets_nothing(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, path: str
) -> None:
    for method in ("GET", "POST"):
        response = await http.request(method, path, json=BODY, headers={"host": "evil.example"})
        assert response.status_code == 403
        assert response.json()["error"]["code"] == "host_not_allowed"
        assert "--allowed-hosts evil.example" in response.json()["error"]["message"]
    assert not dispatcher.requests


async def test_a_rebound_name_gets_no_websocket(server: HttpServer) -> None:
    with pytest.raises(InvalidStatus, match="403"):
        await connect("ws://evil.example/v1/stream", host="127.0.0.1", port=server.port)


async def test_pages_of_other_sites_change_nothing(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher
) -> None:
    for origin in ("http://evil.example", "null", "http://127.0.0.1"):
        for ask in (
            "POST /v1/completions",
            "POST /tokenize",
            "POST /v1/files",
            "DELETE /v1/files/x",
            "PUT /x",
        ):
            response = await http.request(*ask.split(), json=BODY, headers={"origin": origin})
            assert (response.status_code, response.json()["error"]["code"]) == (403, "origin_not_allowed")
        response = await http.options(
            "/v1/completions", headers={"origin": origin, "access-control-request-method": "POST"}
        )
        assert response.status_code == 403
        assert "access-control-allow-origin" not in response.headers
    assert not dispatcher.requests
    own = {"origin": str(http.base_url).rstrip("/")}
    assert (await http.post("/v1/completions", json=BODY, headers=own)).status_code == 200
    assert "access-control-allow-origin" not in (await http.get("/v1/models", headers=own)).headers


@pytest.mark.parametrize(
    "kind",
    [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/jsonx"],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
async def test_a_json_body_is_called_that(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, path: str, kind: str | None
) -> None:
    headers = {} if kind is None else {"content-type": kind}
    response = await http.post(path, content=json.dumps(BODY), headers=headers)
    assert response.status_code == 415
    assert "-H 'Content-Type: application/json'" in response.json()["error"]["message"]
    assert not dispatcher.requests


async def test_parameters_of_the_content_type_are_fine(http: httpx.AsyncClient) -> None:
    for kind in ("application/json; charset=utf-8", "Application/JSON", "application/json ;x=y"):
        assert (
            await http.post("/v1/completions", content=json.dumps(BODY), headers={"content-type": kind})
        ).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/files"])
async def test_a_preflight_is_answered_without_a_key(shared: httpx.AsyncClient, path: str) -> None:
    for origin in (APP, "http://localhost:3000"):
        asked = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,x-stainless-os",
        }
        response = await shared.options(path, headers={"origin": origin, **asked})
        assert response.status_code == 204
        assert response.headers["access-control-allow-origin"] == origin
        assert "POST" in response.headers["access-control-allow-methods"]
        assert response.headers["access-control-allow-headers"] == "authorization,x-stainless-os"
        assert response.headers["vary"] == "Origin"
    refused = await shared.options(
        path, headers={"origin": "https://evil.example", "access-control-request-method": "POST"}
    )
    assert refused.status_code == 403
    assert "access-control-allow-origin" not in refused.headers


async def test_pages_of_allowed_origins_read_answers_errors_and_streams(shared: httpx.AsyncClient) -> None:
    headers = {"origin": APP}
    answers = [
        await shared.post("/v1/completions", json={**BODY, **more}, headers=headers)
        for more in ({}, {"stream": True}, {"n": 0})
    ]
    answers += [await shared.get(path, headers=headers) for path in ("/v1/models", "/nothing", "/ready")]
    answers.append(await shared.post("/tokenize", content="{}", headers=headers))
    assert [answer.status_code for answer in answers] == [200, 200, 400, 200, 404, 200, 415]
    assert {answer.headers["access-control-allow-origin"] for answer in answers} == {APP}
    assert {answer.headers["access-control-expose-headers"] for answer in answers} == {"*"}
    assert "access-control-allow-credentials" not in answers[0].headers


async def test_every_origin(dispatcher: FakeDispatcher, model: ServedModel) -> None:
    server = HttpServer(HttpApp(dispatcher, model, AppParts(front=FrontDoor(Access(origins=["*"])))))
    await server.start()
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{server.port}", verify=False, timeout=60
    ) as http:
        for origin in ("https://any.example", "null"):
            answer = await http.post("/v1/completions", json=BODY, headers={"origin": origin})
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")
    async with connect(f"ws://127.0.0.1:{server.port}/v1/stream", origin=Origin("https://any.example")):
        pass
    await server.stop(grace_s=0)
