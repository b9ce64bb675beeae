"""Separates the thought at the beginning of an answer from the rest."""

from __future__ import annotations

from typing import Literal, NamedTuple

from .events import Content, Event, OutputParser, Reasoning, joined
from .markers import MarkFinder

SPACE = " \n\r\t"


class ThoughtMarks(NamedTuple):
    """``repeated``: thoughts may begin anywhere, not only at the answer's start. ``around``: marks around the
    answer that follows a thought."""

    opens: str
    closes: str
    repeated: bool = False
    around: tuple[str, ...] = ()


ThoughtStyle = Literal["granite33", "think", "seed_oss", "mistral", "granite", "gpt_oss", "gemma4"]
THOUGHTS: dict[ThoughtStyle, ThoughtMarks] = {
    "granite33": ThoughtMarks("<think>", "</think>", around=("<response>", "</response>")),
    "think": ThoughtMarks("<think>", "</think>"),
    "seed_oss": ThoughtMarks("<seed:think>", "</seed:think>"),
    "mistral": ThoughtMarks("[THINK]", "[/THINK]"),
    "granite": ThoughtMarks("Here is my thought process:", "Here is my response:"),
    "gpt_oss": ThoughtMarks("<|channel|>analysis", "<|end|>", repeated=True),
    "gemma4": ThoughtMarks("<|channel>thought", "<channel|>"),
}


class Unwrapped:
    """``OutputParser``: what stands between the marks around an answer, which ``then`` reads."""

    def __init__(self, then: OutputParser | None, around: tuple[str, ...]) -> None:
        self._then, self._finder = then, MarkFinder(around)
        self._space = ""  # content only if text follows
        self._has_text = False

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        while text:
            before, mark, text = self._finder.feed(text)
            events += self._pass_on(before)
            if mark is not None:
                self._space = ""
        return joined(events)

    def finish(self) -> list[Event]:
        events = self._pass_on(self._finder.finish())
        return joined([*events, *(self._then.finish() if self._then is not None else ())])

    def _pass_on(self, text: str) -> list[Event]:
        text = self._space + text if self._has_text else text.lstrip(SPACE)
        bare = text.rstrip(SPACE)
        self._space, self._has_text = text[len(bare) :], self._has_text or bool(bare)
        if not bare:
            return []
        return self._then.feed(bare) if self._then is not None else [Content(bare)]


class ReasoningParser:
    """``OutputParser``: thoughts first, then the answer, which ``then`` reads (None: it is content).

    ``opened``: the prompt ends with the opening mark already. Otherwise a mark at the answer's start opens,
    and nothing later does. White space next to a mark belongs to neither part.
    """

    def __init__(self, then: OutputParser | None, marks: ThoughtMarks, *, opened: bool) -> None:
        self._then = Unwrapped(then, marks.around) if marks.around else then
        self._open, self._close = MarkFinder([marks.opens]), MarkFinder([marks.closes])
        self._mode = "thinking" if opened else "start"
        self._space = ""  # at the start: content, if nothing is thought
        self._has_text = False  # something of the present part

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        if self._mode == "start":
            text = self._look_for_start(text)
        if self._mode == "thinking":
            text = self._think(text, events)
        if self._mode == "answer skipping space":
            text = text.lstrip(SPACE)
            self._mode = "answer" if text else self._mode
        if self._mode == "answer" and text:
            events += self._then.feed(text) if self._then is not None else [Content(text)]
        return joined(events)

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self._mode == "thinking":
            events.append(Reasoning(self._close.finish()))
        elif self._mode == "start":
            events += self.feed_answer(self._space + self._open.finish())
        if self._then is not None:
            events += self._then.finish()
        return joined(events)

    def feed_answer(self, text: str) -> list[Event]:
        """It was no thought after all."""
        self._mode = "answer"
        return self._then.feed(text) if self._then is not None and text else [Content(text)]

    def _look_for_start(self, text: str) -> str:
        """Returns what is left for the next mode."""
        if not self._open_begun:
            bare = text.lstrip(SPACE)
            self._space += text[: len(text) - len(bare)]
            text = bare
        if not text:
            return ""
        before, mark, after = self._open.feed(text)
        if before:
            self._mode = "answer"
            rest = self._space + before + (mark or "") + after + self._open.finish()
            self._space = ""
            return rest
        if mark is not None:
            self._mode = "thinking"
            return after
        self._open_begun = True
        return ""

    _open_begun = False

    def _think(self, text: str, events: list[Event]) -> str:
        if not self._has_text:
            text = text.lstrip(SPACE)
            if not text:
                return ""
        before, mark, after = self._close.feed(text)
        self._has_text = True
        events.append(Reasoning(before))
        if mark is None:
            return ""
        self._mode = "answer skipping space"
        return after
