"""/v1/rerank as Jina's and Cohere's clients know it, /v1/score as vLLM's; and nonsense gets a sentence."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from support.http_fakes import ADMIN_KEY, MAX_MODEL_LEN, FakeDispatcher

from splitserve.coordinator.errors import ContextTooLong
from splitserve.coordinator.generate.bodies.rerank import RerankRequest
from splitserve.coordinator.generate.conversation import key_of
from splitserve.coordinator.generate.plan import Planner
from splitserve.coordinator.http.access.operators import Operators
from splitserve.coordinator.http.limits import LARGE_BODY_BYTES, HttpLimits
from splitserve.coordinator.server import AppParts, HttpApp, HttpServer
from splitserve.coordinator.text.chat_template import ChatTemplate
from splitserve.coordinator.text.reranking import RerankRules
from splitserve.coordinator.text.served_model import ServedModel

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}!"
DOCUMENTS = ["a dog", "the quick brown fox", "a"]


@pytest.fixture
def rules() -> RerankRules:
    return RerankRules("", (5, 6))


@pytest.fixture
async def server(
    dispatcher: FakeDispatcher, model: ServedModel, limits: HttpLimits, rules: RerankRules
) -> AsyncIterator[HttpServer]:
    served = replace(model, rerank=rules, chat_template=ChatTemplate(TEMPLATE, {}))
    server = HttpServer(
        HttpApp(dispatcher, served, AppParts(limits, dispatcher.system, Operators(ADMIN_KEY)))
    )
    await server.start()
    yield server
    await server.stop(grace_s=0)
    assert not dispatcher.running
    assert server.app.metrics.num_open == 0


def score(count: int) -> Any:
    """The score of the fake for a prompt of ``count`` tokens."""
    return pytest.approx(1 / (1 + math.exp(0.5 - count / 100)), rel=1e-6)


async def post(http: httpx.AsyncClient, path: str, status: int = 200, **body: Any) -> Any:
    answer = await http.post(path, json={"model": "tiny", **body})
    assert answer.status_code == status, answer.text
    return answer.json()


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_the_best_come_first(http: httpx.AsyncClient, dispatcher: FakeDispatcher, path: str) -> None:
    answer = await post(http, path, query="fox", documents=DOCUMENTS)
    counts = [len(request.prompt_token_ids) for request in dispatcher.requests]
    assert [(r.embeds, r.logits_of, r.sampling.max_tokens) for r in dispatcher.requests] == [
        (True, (5, 6), 0)
    ] * 3
    assert answer["results"] == [
        {"index": i, "document": {"text": DOCUMENTS[i]}, "relevance_score": score(counts[i])}
        for i in (1, 0, 2)
    ]
    assert (answer["model"], answer["id"][:7]) == ("tiny", "rerank-")
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == sum(counts)


async def test_a_prompt_is_the_template_with_both(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, model: ServedModel
) -> None:
    await post(http, "/v1/rerank", query="fox", documents=["dog"])
    (request,) = dispatcher.requests
    text = model.tokenizer.fast.encode("<query>fox<document>dog!", add_special_tokens=False).ids
    assert list(request.prompt_token_ids) == text


async def test_some_results_without_their_documents(http: httpx.AsyncClient) -> None:
    objects = [{"text": text} for text in DOCUMENTS]
    more = {"top_n": 2, "return_documents": False}
    answer = await post(http, "/v1/rerank", query="fox", documents=objects, **more)
    assert [sorted(result) for result in answer["results"]] == [["index", "relevance_score"]] * 2
    assert [result["index"] for result in answer["results"]] == [1, 0]


async def test_a_large_body_is_planned_aside(http: httpx.AsyncClient) -> None:
    documents = ["the quick brown fox " * 9] * (LARGE_BODY_BYTES // 170)
    answer = await post(http, "/v1/rerank", query="fox", documents=documents, top_n=1)
    assert [result["index"] for result in answer["results"]] == [0], "of equals the first"


@pytest.mark.parametrize("text", ["the quick brown fox", "é" * 9, "fox " * 40_000, "a"])
async def test_a_documents_first_tokens(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, model: ServedModel, text: str
) -> None:
    answer = await post(http, "/v1/rerank", query="q", documents=[text], max_tokens_per_doc=4)
    (request,) = dispatcher.requests
    encode = model.tokenizer.fast.encode
    kept = text[: encode(text, add_special_tokens=False).offsets[:4][-1][1]]
    ids = encode(f"<query>q<document>{kept}!", add_special_tokens=False).ids
    assert list(request.prompt_token_ids) == ids
    assert answer["results"][0]["document"] == {"text": text}, "it is shown whole"


@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [("q", "d", ["qd"]), ("q", ["d", "ee"], ["qd", "qee"]), (["q", "rrr"], ["d", "e"], ["qd", "rrre"])],
)
@pytest.mark.parametrize("path", ["/v1/score", "/score"])
async def test_scores(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, path: str, first: Any, second: Any, pairs: Any
) -> None:
    answer = await post(http, path, text_1=first, text_2=second)
    counts = [len(request.prompt_token_ids) for request in dispatcher.requests]
    assert answer["data"] == [
        {"index": i, "object": "score", "score": score(count)} for i, count in enumerate(counts)
    ]
    assert len(counts) == len(pairs)
    assert (answer["object"], answer["id"][:6]) == ("list", "score-")


@pytest.mark.parametrize("rules", [RerankRules("", (5,), is_bounded=False)])
async def test_a_logit_itself(http: httpx.AsyncClient, dispatcher: FakeDispatcher) -> None:
    answer = await post(http, "/v1/score", text_1="q", text_2="d")
    count = len(dispatcher.requests[0].prompt_token_ids)
    assert answer["data"][0]["score"] == pytest.approx(count / 100)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/rerank", {"query": "q"}, "documents: "),
        ("/v1/rerank", {"query": "q", "documents": []}, "documents: must be a list of strings, one or more"),
        ("/v1/rerank", {"query": "q", "documents": "d"}, "documents: must be a list of strings"),
        ("/v1/rerank", {"query": "q", "documents": [{"title": "d"}]}, "or an object with a `text`"),
        ("/v1/rerank", {"query": "", "documents": ["d"]}, "query: "),
        ("/v1/rerank", {"query": "q", "documents": ["d"], "top_n": -1}, "top_n: "),
        ("/v1/rerank", {"query": "q", "documents": ["d" * 9 * MAX_MODEL_LEN]}, "maximum context length"),
        (
            "/v1/rerank",
            {"query": "q", "documents": ["d"], "truncate_prompt_tokens": -1},
            "truncate_prompt_tokens: must be null",
        ),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1 has 2 texts, text_2 1"),
        ("/v1/score", {"text_1": "a"}, "text_2: "),
    ],
)
async def test_what_is_refused(http: httpx.AsyncClient, path: str, body: Any, message: str) -> None:
    answer = await post(http, path, 400, **body)
    assert message in answer["error"]["message"]


@pytest.mark.parametrize("rules", [RerankRules()])
async def test_a_model_that_is_no_reranker(http: httpx.AsyncClient) -> None:
    answer = await post(http, "/v1/rerank", 400, query="q", documents=["d"])
    assert answer["error"]["message"] == (
        "The model 'tiny' reranks nothing here: it is no reranker (its folder has no modules.json with a "
        "LogitScore)."
    )


def test_prompts_are_never_all_in_memory(model: ServedModel, rules: RerankRules, limits: HttpLimits) -> None:
    """Each prompt has the query again: 1 MB for 2,048 documents would be 2 GB."""
    served = replace(model, rerank=rules, chat_template=ChatTemplate(TEMPLATE, {}))
    planner = Planner(served, limits)
    long = RerankRequest(query="fox " * 250_000, documents=["a"] * 2048)
    many = RerankRequest(query="fox " * 40, documents=["a"] * 64)
    tracemalloc.start()
    assert not planner.is_quick(long)
    assert not planner.is_quick(many), "10,000 characters in all"
    assert key_of(long, {}) == key_of(RerankRequest(query=long.query, documents=["b"]), {})
    assert planner.is_quick(RerankRequest(query="fox", documents=["a", "b"]))
    with pytest.raises(ContextTooLong):
        planner.plan(long, {}, "standard")
    assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()
