"""Structural tags: both forms become a grammar; what is not built is a 400."""

from __future__ import annotations

from typing import Any

import httpx
import orjson
import pytest
from coordinator.generate.test_structured_output import CHAT, SCHEMA, follows
from coordinator.http.test_calls_at_will import followers, grammar_of, with_marks
from support.http_fakes import FakeDispatcher

from splitserve.coordinator.chat_output.style import ChatStyle
from splitserve.coordinator.text.served_model import ServedModel

JSON = {"type": "json_schema", "json_schema": SCHEMA}
ANY = {"type": "any_text"}
CALL = {"type": "tag", "begin": "<function=f>", "content": JSON, "end": "</function>"}
OTHER = {**CALL, "begin": "<function=g>", "content": {"type": "regex", "pattern": "[0-9]+/x"}}
THOUGHT = {"type": "tag", "begin": "<t>", "content": ANY, "end": "</t>"}
CALLS = {"type": "triggered_tags", "triggers": ["<function="], "tags": [CALL, OTHER]}
F, G = '<function=f>{"a": 1}</function>', "<function=g>12/x</function>"
OLDER = {
    "structures": [{"begin": "<function=f>", "schema": SCHEMA, "end": "</function>"}],
    "triggers": ["<function="],
}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def sequence(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": elements}


def times(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "content": const("x"), **more}


SEPARATED = {"type": "tags_with_separator", "tags": [CALL], "separator": ", "}
# fmt: off
CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (OLDER, ["", "Hi.", F, f"a{F}b{F}\nc", "< f"],
     ["<function=", f"{F}<function=g>", "<function=f>{}</function>"]),
    ({"format": CALLS}, ["Hi.", f"a{G}b{F}", "<funct"], ["a<function=h>", "<function=f>1</function>"]),
    ({"format": {**CALLS, "at_least_one": True}}, [F, f"{F} and {G}."], ["", "Hi.", f"a{F}"]),
    ({"format": {**CALLS, "stop_after_first": True}}, ["Hi.", f"a{F}"], [f"a{F}b", F + F]),
    ({"format": {**CALLS, "at_least_one": True, "stop_after_first": True}}, [F, G], ["", F + F, f"a{F}"]),
    ({"format": {**CALLS, "excludes": ["no"]}}, ["on", f"a{F}"], ["no", f"no{F}", f"{F} no"]),
    ({"format": sequence(THOUGHT, CALLS)}, ["<t></t>", f"<t>{F}<t></t>a{F}"],
     ["a", "<t>a", "<t></t><function=1"]),
    ({"format": {**THOUGHT, "end": ["</t>", "</e>"]}}, ["<t>a</t>", "<t>b</e>"], ["<t>a", "<t>a</t>b"]),
    ({"format": {**THOUGHT, "content": CALLS}}, ["<t>a</t>", f"<t>a{F}b{G}</t>"],
     ["<t>a", "<t><function=</t>"]),
    ({"format": sequence(const("A: "), ANY)}, ["A: ", "A: b"], ["b"]),
    ({"format": sequence(ANY, const("END"), JSON)}, ['aEND{"a": 1}', 'END{"a":1}'],
     ["END", 'EENDEND{"a":1}']),
    ({"format": {"type": "or", "elements": [const("yes"), JSON]}}, ["yes", '{"a": 3}'], ["no", "yes{"]),
    ({"format": {"type": "any_text", "excludes": ["</t>", "x"]}}, ["a", ""], ["a</t>", "yxy"]),
    ({"format": {"type": "grammar", "grammar": 'root ::= "yes" | "no"'}}, ["yes", "no"], ["", "maybe"]),
    ({"format": {"type": "token", "token": "yes"}}, ["yes"], ["no"]),
    ({"format": times("optional")}, ["", "x"], ["xx"]),
    ({"format": times("plus")}, ["x", "xxx"], [""]),
    ({"format": times("star")}, ["", "xxx"], ["y"]),
    ({"format": times("repeat", min=1, max=2)}, ["x", "xx"], ["", "xxx"]),
    ({"format": times("repeat", min=2, max=-1)}, ["xx", "xxxx"], ["x"]),
    ({"format": SEPARATED}, ["", F, f"{F}, {F}"], ["a", F + F, f"{F}, "]),
    ({"format": {**SEPARATED, "at_least_one": True, "stop_after_first": True}}, [F], ["", f"{F}, {F}"]),
    ({"format": {"type": "dispatch", "rules": [["<f>", JSON]]}}, ["a", 'a<f>{"a": 1}b<f>{"a": 2}'],
     ["<f>", "a<f>b"]),
    (
        {"format": {"type": "dispatch", "rules": [["<f>", JSON]], "loop": False}},
        ["a", 'a<f>{"a": 1}'],
        ['<f>{"a": 1}b'],
    ),
    (
        {"format": {**JSON, "style": "qwen_xml"}},
        ["<parameter=a>\n7\n</parameter>\n"],
        ["", "<parameter=a>\nb\n</parameter>\n"],
    ),
    (
        {"format": {**JSON, "style": "deepseek_xml"}},
        ['<｜DSML｜parameter name="a" string="false">7</｜DSML｜parameter>\n'],
        ['<｜DSML｜parameter name="a" string="true">7</｜DSML｜parameter>\n'],
    ),
    ({"format": {**JSON, "style": "glm_xml"}}, ["<arg_key>a</arg_key>\n<arg_value>7</arg_value>\n"], ["{}"]),
]
# fmt: on


@pytest.mark.parametrize(("tag", "good", "bad"), CASES)
async def test_the_grammar_follows_the_tag(
    http: httpx.AsyncClient,
    dispatcher: FakeDispatcher,
    model: ServedModel,
    tag: dict[str, Any],
    good: list[str],
    bad: list[str],
) -> None:
    asked = {"type": "structural_tag", **tag}
    for fields in (
        {"response_format": asked},
        {"structured_outputs": {"structural_tag": asked}},
        {"structured_outputs": {"structural_tag": orjson.dumps(asked).decode()}},
    ):
        answer = await http.post("/v1/chat/completions", json={**CHAT, **fields})
        assert answer.status_code == 200, answer.text
    grammar = dispatcher.requests[-1].sampling.grammar
    assert [text for text in good if not follows(grammar, text, model)] == []
    assert [text for text in bad if follows(grammar, text, model)] == []


@pytest.mark.parametrize(
    ("tag", "named"),
    [
        ({}, "`format`, or `structures` and `triggers`"),
        ({"structures": [{"begin": "<g>", "schema": {}, "end": ""}], "triggers": ["<f"]}, "'<g>'"),
        ({"structures": [{"schema": {}, "end": ""}], "triggers": ["<f"]}, "'begin'"),
        ({"format": {"type": "token_dispatch"}}, "'token_dispatch' is not built"),
        ({"format": {"type": "token", "token": []}}, "cannot be read"),
        ({"format": {"type": "any_text", "max_tokens": 5}}, "'max_tokens' of 'any_text' is not built"),
        ({"format": {**JSON, "any_order": True}}, "'any_order'"),
        ({"format": {**JSON, "style": "minimax_xml"}}, "'minimax_xml'"),
        ({"format": sequence(ANY, ANY)}, "free text must stand last"),
        ({"format": times("repeat", min=1, max=10**9)}, "'repeat'"),
        ({"format": {"type": "regex", "pattern": "(a"}}, "regular expression"),
        ({"format": {"type": "json_schema", "json_schema": {"type": "objec"}}}, "objec"),
        ({"format": {"type": "const_string", "value": 5}}, "cannot be read"),
    ],
)
async def test_what_is_not_built_is_a_400_that_names_it(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, tag: dict[str, Any], named: str
) -> None:
    body = {**CHAT, "response_format": {"type": "structural_tag", **tag}}
    answer = await http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")
    assert named in answer.json()["error"]["message"]


@pytest.mark.parametrize("depth", [100, 600])
async def test_nesting_is_bounded(http: httpx.AsyncClient, dispatcher: FakeDispatcher, depth: int) -> None:
    inner = '{"type": "const_string", "value": "x"}'
    deep = '{"type": "star", "content": ' * depth + inner + "}" * depth
    asked = '"response_format": {"type": "structural_tag", "format": ' + deep + "}"
    body = orjson.dumps(CHAT).decode()[:-1] + ", " + asked + "}"
    answer = await http.post(
        "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == (200 if depth == 100 else 400), answer.text
    assert len(dispatcher.requests) == (depth == 100)


@pytest.mark.parametrize("trigger", ["<tool", "<tool_call>"])
def test_marks_that_are_tokens(model: ServedModel, trigger: str) -> None:
    """As Qwen's: a trigger that stops within the mark stands for the whole mark."""
    served = with_marks(model, ChatStyle("hermes"), special=True)
    number = {"type": "regex", "pattern": "[0-9]+"}
    tag = {"begin": '<tool_call>\n{"a": ', "content": number, "end": "}\n</tool_call>"}
    calls = {"type": "triggered_tags", "triggers": [trigger], "tags": [tag]}
    asked = {"type": "structural_tag", "format": calls}
    grammar = grammar_of(served, tools=None, response_format=asked)
    good, bad = '<tool_call>\n{"a": 7}\n</tool_call>', '<tool_call>\n{"a": "7"}\n</tool_call>'
    assert followers(grammar, ["Hm.", good, f"Hm.{good} So.{good}", bad, f"Hm.{bad}"], served) == [
        "Hm.", good, f"Hm.{good} So.{good}",
    ]  # fmt: skip
