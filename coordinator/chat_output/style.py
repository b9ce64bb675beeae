"""A model's own way to call tools and to think, recognised in its chat template or set by an option."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .call_formats import FORMATS, MARK, MISTRAL_LIST, CallFormat, ToolStyle
from .call_parser import CallParser
from .events import OutputParser
from .harmony import HARMONY_MARKS, HarmonyParser
from .reasoning import SPACE, THOUGHTS, ReasoningParser, ThoughtMarks, ThoughtStyle

ToolParserOption = Literal["auto", ToolStyle]
ReasoningOption = Literal["auto", "none", ThoughtStyle]
CALL_SIGNS: tuple[tuple[ToolStyle, tuple[str, ...]], ...] = (
    ("gpt_oss", ("<|channel|>",)),
    ("gemma4", ("<|tool_call>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("deepseek_v32", ("｜DSML｜",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("qwen3_coder", ("<function=",)),
    ("glm45", ("<arg_key>",)),
    ("hermes", ("<tool_call>",)),
    ("phi4", ("<|tool|>",)),
    ("phi4", ("functools[",)),
    ("granite", ("<|tool_call|>",)),
    ("granite", ("<|start_of_role|>",)),
    ("pythonic", ("func_name1(",)),
    ("llama3", ("<|python_tag|>",)),
    ("llama3", ('"parameters"',)),
)
"""The style that a chat template shows by all of these texts; the first that is found counts."""


@dataclass(frozen=True, slots=True)
class ChatStyle:
    """``tools``: how calls are written; ``thoughts``: how a thought before the answer is, None: there is
    none."""

    tools: ToolStyle = "hermes"
    thoughts: ThoughtStyle | None = None

    @classmethod
    def of(
        cls, template: str, tools: ToolParserOption = "auto", reasoning: ReasoningOption = "auto"
    ) -> ChatStyle:
        """Return the style by a chat template's source; options other than ``auto`` take precedence."""
        if tools == "auto":
            found = (style for style, signs in CALL_SIGNS if all(sign in template for sign in signs))
            return cls.of(template, next(found, "hermes"), reasoning)
        if tools == "gpt_oss" or reasoning == "gpt_oss":
            return cls("gpt_oss", "gpt_oss")  # one goes with the other: all of an answer stands in channels
        if reasoning != "auto":
            return cls(tools, None if reasoning == "none" else reasoning)
        known = ((style, marks) for style, marks in THOUGHTS.items() if style != "gpt_oss")
        signs = ((style, marks.around[1] if marks.around else marks.closes) for style, marks in known)
        return cls(tools, next((style for style, sign in signs if sign in template), None))

    @property
    def thought_marks(self) -> ThoughtMarks | None:
        """The marks of a thought; None for a model that does not think."""
        return None if self.thoughts is None else THOUGHTS[self.thoughts]

    @property
    def thinks(self) -> bool:
        """Whether answers may begin with a thought."""
        return self.thoughts is not None

    @property
    def typed(self) -> bool:
        """Whether the parser needs the tools' schemas: arguments are written as plain text."""
        return "$parameters" in FORMATS[self.tools].call

    def marks(self, *, tools: bool) -> tuple[str, ...]:
        """What the parsers look for; where it is a special token, its name has to be text."""
        if self.thoughts == "gpt_oss":
            return HARMONY_MARKS
        thought = self.thought_marks
        texts = () if thought is None else (thought.opens, thought.closes, *thought.around)
        thoughts = (found[0] if (found := MARK.match(text)) else text for text in texts)
        return (*(FORMATS[self.tools].marks if tools else ()), *thoughts)

    def has_only(self, found: Collection[str], *, tools: bool) -> bool:
        """Whether every ``<`` that the parsers look for begins one of these marks."""
        text = " ".join([*self.marks(tools=tools), FORMATS[self.tools].text if tools else ""])
        for mark in sorted(found, key=len, reverse=True):
            text = text.replace(mark, "")
        return "<" not in text

    def forced_format(self, *, has_args_mark: bool) -> CallFormat:
        """Return the format for calls that are forced. ``has_args_mark``: the tokenizer has ``[ARGS]``."""
        old = self.tools == "mistral" and not has_args_mark
        return MISTRAL_LIST if old else FORMATS[self.tools]

    def thinks_already(self, prompt: str) -> bool:
        """Whether the chat template has opened a thought that the model goes on with."""
        return self.thoughts is not None and prompt.rstrip(SPACE).endswith(THOUGHTS[self.thoughts].opens)

    def parser(self, tools: Mapping[str, Any], prompt: str) -> OutputParser:
        """Return a new parser of one answer to the prompt that ends like this. ``tools``: the parameters'
        schema, where ``typed``, of each that may be called."""
        if self.tools == "gpt_oss":
            return HarmonyParser(tools, prompt)
        calls = CallParser(FORMATS[self.tools], tools) if tools else None
        if (marks := self.thought_marks) is not None:
            return ReasoningParser(calls, marks, opened=self.thinks_already(prompt))
        assert calls is not None, "a chat that neither thinks nor offers tools is not parsed"
        return calls
