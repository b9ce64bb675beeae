"""Pages that clients of vLLM, SGLang, llama.cpp and SageMaker look for, and /docs."""

from __future__ import annotations

from pathlib import Path

import httpx
import orjson
import pytest
from support.browser import CHROMIUM, browser
from support.http_fakes import ADMIN_KEY, ANSWER, CHAT_TEMPLATE, FakeDispatcher

from splitserve import __version__
from splitserve.coordinator.http.access.operators import Operators
from splitserve.coordinator.http.limits import LARGE_BODY_BYTES
from splitserve.coordinator.server import AppParts, HttpApp, HttpServer
from splitserve.coordinator.text.served_model import ServedModel

HELLO = [{"role": "user", "content": "Hi!"}]
ANYBODY = {"authorization": ""}


async def test_invocations_are_chats_or_completions_by_their_body(http: httpx.AsyncClient) -> None:
    chat = {"messages": HELLO, "temperature": 0}
    answer = (await http.post("/invocations", json=chat)).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["content"] == ANSWER
    assert answer["id"].startswith("chatcmpl-")
    text = (await http.post("/invocations", json={"prompt": "Hi", "temperature": 0})).json()
    assert text["object"] == "text_completion"
    stream = (await http.post("/invocations", json={**chat, "stream": True})).text
    assert '"chat.completion.chunk"' in stream
    assert stream.endswith("data: [DONE]\n\n")
    metrics = (await http.get("/metrics")).text
    assert 'endpoint="/v1/chat/completions"' in metrics
    assert 'endpoint="/invocations"' not in metrics


async def test_the_reader_process_tells_large_invocations_apart(http: httpx.AsyncClient) -> None:
    large = "a" * (LARGE_BODY_BYTES + 1)
    body = {"prompt": large, "truncate_prompt_tokens": 5, "temperature": 0}
    assert (await http.post("/invocations", json=body)).json()["object"] == "text_completion"
    body = {"messages": [{"role": "user", "content": large}]}
    assert (await http.post("/invocations", json=body)).json()["error"]["code"] == "context_length_exceeded"


async def test_an_invocation_of_neither_kind_is_refused(http: httpx.AsyncClient) -> None:
    answer = await http.post("/invocations", json={"input": "embed me"})
    assert answer.status_code == 400
    assert "`messages`" in answer.json()["error"]["message"]
    broken = await http.post("/invocations", content=b"{", headers={"content-type": "application/json"})
    assert broken.json()["error"]["code"] == "invalid_json"
    assert (await http.get("/invocations")).status_code == 405


async def test_the_tokenizer_and_the_properties_of_the_model(
    http: httpx.AsyncClient, model: ServedModel
) -> None:
    info = (await http.get("/tokenizer_info", headers=ANYBODY)).json()
    assert (info["bos_token"], info["chat_template"]) == ("<|bos|>", CHAT_TEMPLATE)
    props = (await http.get("/props", headers=ANYBODY)).json()
    assert props["default_generation_settings"]["n_ctx"] == model.max_model_len
    assert props["default_generation_settings"]["params"]["top_k"] == 20
    assert (props["model_alias"], props["eos_token"]) == ("tiny", "<|eos|>")


async def test_load_and_server_info_are_operators_pages(
    dispatcher: FakeDispatcher, model: ServedModel
) -> None:
    settings = {"usage_url": "postgresql://me:hidden@db/usage", "max_queue": 7}
    app = HttpApp(
        dispatcher,
        model,
        AppParts(system=dispatcher.system, operators=Operators(ADMIN_KEY), settings=settings),
    )
    server = HttpServer(app)
    await server.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as http:
        for path in ("/load", "/server_info"):
            assert (await http.get(path)).status_code == 401
        http.headers["authorization"] = f"Bearer {ADMIN_KEY}"
        dispatcher.hold = True
        async with http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}):
            await dispatcher.until(lambda: len(dispatcher.running) == 1)
            assert (await http.get("/load")).json() == {"server_load": 1, "waiting": 4, "running": 1}
            dispatcher.hold = False
        info = (await http.get("/server_info")).json()
    await server.stop(grace_s=0)
    assert (info["version"], info["model"], info["workers"]) == (__version__, "tiny", {"decode": 1})
    assert info["settings"] == {"usage_url": "postgresql://***@db/usage", "max_queue": 7}


async def test_paths_that_peers_have_below_v1(http: httpx.AsyncClient) -> None:
    assert (await http.get("/v1/health", headers=ANYBODY)).json() == (await http.get("/health")).json()
    asked = {"prompt": "quick"}
    tokens = (await http.post("/v1/tokenize", json=asked)).json()
    assert tokens == (await http.post("/tokenize", json=asked)).json()
    assert (await http.post("/v1/detokenize", json={"tokens": tokens["tokens"][1:]})).json() == {
        "prompt": "quick"
    }


async def test_docs_load_nothing_from_elsewhere(http: httpx.AsyncClient) -> None:
    answer = await http.get("/docs", headers=ANYBODY)
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "://" not in answer.text.replace("http://www.w3.org/2000/svg", "")  # a namespace
    assert (await http.get("/docs/", headers=ANYBODY)).headers["location"] == "../docs"


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
async def test_docs_show_every_operation(http: httpx.AsyncClient, server: HttpServer, tmp_path: Path) -> None:
    document = orjson.loads((await http.get("/openapi.json")).content)
    expected = sum(len(set(methods) - {"parameters"}) for methods in document["paths"].values())
    async with browser(tmp_path) as page:
        await page.open(f"http://127.0.0.1:{server.port}/docs")
        await page.until(f"document.querySelectorAll('#operations details').length === {expected}")
        names = await page.value("document.querySelectorAll('#schemas details').length")
        assert names == len(document["components"]["schemas"])
        await page.value("location.hash = '#schema-ChatCompletionRequest'")
        await page.until("document.querySelector('#schema-ChatCompletionRequest').open")
        assert "max_completion_tokens" in await page.text("#schema-ChatCompletionRequest")
        await page.value("document.querySelector('#filter').value = 'tokenize'")
        await page.value("document.querySelector('#filter').dispatchEvent(new Event('input'))")
        shown = "document.querySelectorAll('#operations details:not([hidden])').length"
        assert await page.value(shown) == 5  # with /tokenizer_info
        await page.look(390, 844, "dark")
        assert await page.value("document.documentElement.scrollWidth <= 390")
        assert page.problems == []
