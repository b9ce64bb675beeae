"""A model's own way to call tools and to think, read from its chat template or set by an option."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .tool_parsers import MARKS, ToolStyle

ToolParserOption = Literal["auto", "hermes", "llama3", "mistral"]
ReasoningOption = Literal["auto", "none", "think"]
THOUGHT_MARKS = ("<think>", "</think>")


@dataclass(frozen=True, slots=True)
class ChatStyle:
    """``tools``: how calls are written; ``thinks``: whether answers may begin with a thought."""

    tools: ToolStyle = "hermes"
    thinks: bool = False

    @classmethod
    def of(
        cls, template: str, tools: ToolParserOption = "auto", reasoning: ReasoningOption = "auto"
    ) -> ChatStyle:
        """Return the style by a chat template's source; options other than ``auto`` take precedence."""
        thinks = (
            any(mark in template for mark in THOUGHT_MARKS) if reasoning == "auto" else reasoning == "think"
        )
        return cls(_detected(template) if tools == "auto" else tools, thinks)

    def marks(self, *, tools: bool) -> tuple[str, ...]:
        """What the parsers look for; where it is a special token, its name has to be text."""
        return (*(MARKS[self.tools] if tools else ()), *(THOUGHT_MARKS if self.thinks else ()))


def _detected(template: str) -> ToolStyle:
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return "hermes"
    if "<|python_tag|>" in template or '"parameters"' in template:
        return "llama3"
    return "hermes"
