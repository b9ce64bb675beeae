"""One choice of a response: turns a sequence's tokens into text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Literal, Protocol

import orjson

from ...transport.messages.messages import TokenLogprobs
from ..chat_output.markers import StopStrings
from ..lifecycle.request import Ended
from ..metrics.metrics import BatchedHistogram
from ..text.tokenizer import Tokenizer
from .formats import ChoiceResult, CompletionFormat, ReportedReason, Usage
from .logprobs import TokenEntry, first
from .plan import RequestPlan
from .prompts import Prompt


class Exchange(Protocol):
    """The HTTP exchange of a choice."""

    plan: RequestPlan
    form: CompletionFormat
    itl: BatchedHistogram
    tokenizer: Tokenizer

    def begin(self) -> None:
        """Send the headers of the stream, once."""

    def write(self, data: bytes) -> None:
        """Send chunks."""

    def usage_so_far(self) -> Usage:
        """Return the usage so far, for clients that want it on every chunk."""

    def stop_met(self, choice: Choice) -> None:
        """Cancel the sequence of a choice that a stop string has completed."""

    def choice_ended(self, choice: Choice, ended: Ended) -> None:
        """Take note that the choice's sequence has ended."""


class Choice:
    """A ``Sink``. Stop strings and log probabilities are handled as each token comes, so that a stream and a
    whole response are cut at the same place; a plain token costs one list lookup and one append.

    Log probabilities wait with the text of their tokens: those of a stop string are never shown.
    """

    __slots__ = (
        "_around", "_checked", "_detokenizer", "_entries", "_exchange", "_form", "_hidden",
        "_itl", "_logprob_sum", "_num_chars", "_num_shown", "_of_prompt", "_of_vector", "_opened", "_parts",
        "_plain", "_plan", "_showed_prompt", "_step", "_stops", "_token_ids", "_write", "ended",
        "first_token_at", "index", "last_write", "num_tokens", "prompt", "request_id", "timed_out",
    )  # fmt: skip

    def __init__(self, exchange: Exchange, index: int, prompt: Prompt, request_id: str) -> None:
        plan = exchange.plan
        shown = prompt.text if plan.echo else plan.echoed
        self.index = index
        self.prompt = prompt
        self.request_id = request_id
        self.num_tokens = 0
        self.first_token_at = 0.0  # monotonic seconds
        self.ended: Ended | None = None
        self.timed_out: Literal["timeout", "length"] | None = None  # finish reason if a deadline has cut it
        self._exchange = exchange
        self._plan = plan
        self._form = exchange.form
        self._itl = exchange.itl
        self._detokenizer = exchange.tokenizer.detokenizer(prompt.shown_ids, special=plan.show_special)
        self._step: Callable[[int], str] = self._detokenizer.step
        self._write = exchange.write
        self._stops = StopStrings(plan.stop, included=plan.include_stop) if plan.stop else None
        is_silent = not plan.show_special and plan.hidden_ids <= exchange.tokenizer.table.special
        self._hidden = () if is_silent else plan.hidden_ids
        self._entries: list[TokenEntry] | None = [] if plan.num_logprobs is not None else None
        self._parts: list[str] = [shown] if shown else []  # text that has not been written
        self._num_chars = len(shown)  # of all text, held back or not
        self._num_shown = 0
        self._plain = False
        self._token_ids: list[int] | None = [] if plan.return_token_ids else None  # not shown yet
        self._showed_prompt = False  # the prompt's token ids
        self._checked = (  # a chunk holds more than text
            plan.num_logprobs is not None or plan.return_token_ids or plan.usage_on_every_chunk or plan.padded
        )
        self._of_prompt: asyncio.Future[orjson.Fragment] | None = None
        self._of_vector: orjson.Fragment | float | None = None
        self._logprob_sum = 0.0
        self._opened = False
        self.last_write = 0.0  # monotonic seconds
        self._around = exchange.form.around_text(index) if plan.streamed else (b"", b"")

    def push(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        if self._plain:
            self.num_tokens += 1
            self._parts.append(self._step(token_id))
        else:
            self._push_checked(token_id, logprobs)

    def push_prompt_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None:
        if self._plan.num_prompt_logprobs is not None:
            ids, written = self.prompt.token_ids, self._form.of_prompt
            self._of_prompt = self._exchange.tokenizer.aside(lambda: written(ids, logprobs))
        if self._entries is None or not self._plan.echo:
            return
        offset, most, table = 0, self._plan.num_logprobs or 0, self._exchange.tokenizer.table
        lengths = self.prompt.lengths(self._exchange.tokenizer)
        for token_id, entry, length in zip(self.prompt.token_ids, (None, *logprobs), lengths, strict=True):
            start = offset + table.num_before(token_id, length)
            self._entries.append(TokenEntry(token_id, entry and first(entry, most), start))
            offset += length

    def flush(self) -> None:
        parts = self._parts
        if not parts or not self._plan.streamed:
            return
        if not self._opened or self._checked:
            self._flush_checked()
            return
        text = parts[0] if len(parts) == 1 else "".join(parts)
        if text:
            head, tail = self._around
            self._write(head + orjson.dumps(text) + tail)
            now = monotonic()
            self._itl.observe((now - self.last_write) / len(parts))
            self.last_write = now
        parts.clear()

    def end(self, ended: Ended) -> None:
        if self._of_prompt is not None and not self._of_prompt.done():
            self._of_prompt.add_done_callback(lambda _: self.end(ended))
            return
        if ended.embedding:
            self._of_vector = self._form.of_vector(ended.embedding)
        self.ended = ended
        self._exchange.choice_ended(self, ended)

    def finish_reason(self) -> ReportedReason | None:
        """Return the finish reason; None if it was cancelled or has failed."""
        if self._stops is not None and self._stops.matched:
            return "stop"
        return self.timed_out or (self.ended.finish_reason if self.ended else None)

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of its tokens in a thought."""
        return 0

    @property
    def mean_logprob(self) -> float:
        """Mean log probability of its tokens, if they were reported."""
        return self._logprob_sum / max(1, self.num_tokens)

    def last_chunk(self, reason: ReportedReason) -> bytes:
        """Return the rest of the text and the finish reason, as a chunk."""
        return self._opening() + self._chunk(self._rest(), reason)

    def result(self, reason: ReportedReason) -> ChoiceResult:
        """Return the whole choice, if it was not streamed."""
        text = self._rest()
        return ChoiceResult(
            self.index,
            text,
            self._show(text, last=True),
            reason,
            more=self._more(),
            of_prompt=None if self._of_prompt is None else self._of_prompt.result(),
            of_vector=self._of_vector,
        )

    def _push_checked(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        stops = self._stops
        if stops is not None and stops.matched:
            return
        if not self.num_tokens:
            self.first_token_at = monotonic()
        self.num_tokens += 1
        if self._token_ids is not None:
            self._token_ids.append(token_id)
        if logprobs is not None:
            self._logprob_sum += logprobs.logprob
        ends = token_id in self._hidden and self.num_tokens > self._plan.samplings[0].min_tokens
        text = "" if ends else self._step(token_id)
        if self._entries is not None and logprobs is not None:
            offset = self._num_chars + self._exchange.tokenizer.table.num_before(token_id, len(text))
            self._entries.append(TokenEntry(token_id, logprobs, offset))
        self._num_chars += len(text)
        if stops is not None and self.num_tokens > self._plan.samplings[0].min_tokens:
            text = stops.feed(text)
            if stops.matched:
                self._exchange.stop_met(self)
        self._parts.append(text)
        self._plain = (
            stops is None
            and not self._hidden
            and self._entries is None
            and self._token_ids is None
            and self._plan.num_best is None
        )

    def _flush_checked(self) -> None:
        text, num_tokens = "".join(self._parts), len(self._parts)
        self._parts.clear()
        if not (chunks := self._chunks(text)):
            return
        opened = self._opened
        self._exchange.begin()
        self._write(self._opening() + chunks)
        now = monotonic()
        if opened:
            self._itl.observe((now - self.last_write) / num_tokens)
        self.last_write = now

    def _opening(self) -> bytes:
        if self._opened:
            return b""
        self._opened = True
        usage = self._exchange.usage_so_far() if self._plan.usage_on_every_chunk else None
        return self._form.opening(self.index, usage)

    def _chunks(self, text: str) -> bytes:
        """Return the chunks of more text; empty: it shows nothing."""
        return self._chunk(text, None) if text else b""

    def _chunk(self, part: str | dict[str, Any], reason: ReportedReason | None) -> bytes:
        usage = self._exchange.usage_so_far() if self._plan.usage_on_every_chunk else None
        entries = self._show(part if isinstance(part, str) else "", last=reason is not None)
        return self._form.chunk(
            self.index, part, entries=entries, finish_reason=reason, usage=usage, more=self._more()
        )

    def _more(self) -> dict[str, Any] | None:
        """Return the stop string that has cut the text, and the token ids that were not shown yet; before the
        first, also the prompt's."""
        cut = {"stop_reason": self._stops.matched} if self._stops is not None and self._stops.matched else {}
        if self._token_ids is None:
            return cut or None
        shown, self._token_ids = self._token_ids, []
        prompt = {} if self._showed_prompt else self._form.prompt_ids(self.prompt.shown_ids)
        self._showed_prompt = True
        return {**prompt, "token_ids": shown, **cut}

    def _show(self, text: str, *, last: bool) -> list[TokenEntry] | None:
        """Return the log probabilities of tokens whose text begins before the end of the shown text."""
        self._num_shown += len(text)
        if self._entries is None:
            return None
        cut = self._stops is not None and self._stops.matched
        everything = last and not cut
        shown = [entry for entry in self._entries if everything or entry.offset < self._num_shown]
        del self._entries[: len(shown)]
        return shown

    def _rest(self) -> str:
        if self._stops is None:
            self._parts.append(self._detokenizer.finish())
        elif not self._stops.matched:
            self._parts.append(self._stops.feed(self._detokenizer.finish()))
            self._parts.append(self._stops.finish())
        text = "".join(self._parts)
        self._parts.clear()
        return text


def best_of(choices: Sequence[Choice], n: int) -> list[Choice]:
    """Return each prompt's ``n`` likeliest choices by token, best first."""
    by_prompt: dict[int, list[Choice]] = {}
    for choice in choices:
        by_prompt.setdefault(id(choice.prompt), []).append(choice)
    return [
        best
        for group in by_prompt.values()
        for best in sorted(group, key=lambda c: (not c.num_tokens, -c.mean_logprob))[:n]
    ]
