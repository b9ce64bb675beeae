"""Messages of gpt-oss in their channels."""

from __future__ import annotations

import pytest
from coordinator.chat_output.test_families import parsed

from splitserve.coordinator.chat_output.events import CallArguments, CallStarted, Content, Event, Reasoning
from splitserve.coordinator.chat_output.style import ChatStyle

ANALYSIS, CALL = "<|channel|>analysis<|message|>", "<|channel|>commentary to=functions.now"
NOW_CALLED = [CallStarted(0, "now"), CallArguments(0, "{}")]


@pytest.mark.parametrize(
    ("text", "events"),
    [
        ("Hello, to you.", [Content("Hello, to you.")]),
        ("assist", [Content("assist")]),
        ("<|channel|>final Hello to you.<|return|>", [Content("<|channel|>final Hello to you.")]),
        ("<|channel|> to=functions.now <|constrain|> js", []),
        (f"{CALL} <|constrain|>js", []),
        (f"{ANALYSIS}Hm.<|end|><|start|>assistant", [Reasoning("Hm.")]),
        (f"{ANALYSIS}A<|end|><|start|>assistant{ANALYSIS}B", [Reasoning("A\nB")]),
        (f"{CALL} <|constrain|>json<|message|>oops", [Content(f"{CALL} <|constrain|>json<|message|>oops")]),
        (f"{CALL}<|message|>{{}} so", [CallStarted(0, "now"), CallArguments(0, "{}"), Content("so")]),
        (f"{CALL}<|message|><|call|>", [CallStarted(0, "now"), CallArguments(0, "{}")]),
        (" to=functions.now<|channel|>commentary json<|message|>{}<|call|>", NOW_CALLED),
        ("<|channel|>final<|message|>A <|x|> b<|return|>", [Content("A <|x|> b")]),
    ],
)
def test_messages_of_gpt_oss(text: str, events: list[Event]) -> None:
    assert parsed(ChatStyle("gpt_oss", "gpt_oss"), text) == events
    assert parsed(ChatStyle("gpt_oss", "gpt_oss"), *text) == events


def test_a_message_that_the_prompt_has_begun() -> None:
    prompt = "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>final<|message|>Once"
    assert parsed(ChatStyle("gpt_oss", "gpt_oss"), " upon", prompt=prompt) == [Content(" upon")]
