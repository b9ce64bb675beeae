"""A chat in the terminal: streamed answers, and after each one line that shows where the time went."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson

from ...loadgen.refusal import error_sentence
from ..checks import read_key
from ..config import CommandError
from ..server_access import trust
from ..settings import ChatSettings
from .chat_commands import KEYS, ChatCommands, show
from .chat_screen import AnswerScreen, lines

Message = dict[str, str]


@dataclass(slots=True)
class Answer:
    """What has arrived of one answer. ``usage`` is the server's account of it, empty until the end."""

    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    finish_reason: str = ""


def main(settings: ChatSettings) -> int:
    """``splitserve chat``: returns the exit status."""
    try:
        return asyncio.run(converse(settings))
    except KeyboardInterrupt:
        return 130


async def answer_once(settings: ChatSettings, prompt: str, certificate: Path | None = None) -> int:
    """Prints the streamed answer to one question. ``certificate``: of a server that this process has started.
    Returns the exit status."""
    async with _client(settings, certificate) as client:
        conversation = Conversation(client, settings)
        try:
            print(f"> {prompt}\n", flush=True)
            await conversation.ask(prompt)
        except CommandError as error:
            return _fail(error)
    return 0


async def converse(settings: ChatSettings, certificate: Path | None = None) -> int:
    """Reads questions until the end of input. ``certificate``: as in ``answer_once``. Returns the exit
    status."""
    async with _client(settings, certificate) as client:
        conversation = Conversation(client, settings)
        commands = ChatCommands(conversation, lambda: models(client))
        asked = sys.stdin.isatty()
        if asked:
            try:
                await models(client, conversation.model)
            except CommandError as error:
                return _fail(error)
            show(KEYS, "dim")
        async for line in lines():
            text = line.strip()
            asked = asked or bool(text)
            try:
                if text.startswith("/"):
                    if not await commands.run(text):
                        break
                elif text:
                    await conversation.ask(text)
            except CommandError as error:
                if _fail(error) and not sys.stdin.isatty():
                    return 1
    if not asked:
        print(
            "splitserve: standard input held no question; write one a line, or run this in a terminal",
            file=sys.stderr,
        )
    return 0 if asked else 1


def _fail(error: CommandError) -> int:
    print(f"splitserve: {error}", file=sys.stderr)
    return 1


class Conversation:
    """The messages so far, and how to ask for the next."""

    def __init__(self, client: httpx.AsyncClient, settings: ChatSettings) -> None:
        self.client = client
        self.model = settings.served_model_name
        self.messages: list[Message] = []
        self._settings = settings
        self.system = settings.system

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self.messages = [message for message in self.messages if message["role"] == "system"]

    @property
    def system(self) -> str:
        """The system message; empty: none."""
        return next((message["content"] for message in self.messages if message["role"] == "system"), "")

    @system.setter
    def system(self, text: str) -> None:
        others = [message for message in self.messages if message["role"] != "system"]
        self.messages = [{"role": "system", "content": text}, *others] if text else others

    async def ask(self, question: str) -> None:
        """Print the answer as it comes; Ctrl-C stops it and keeps the text so far. Raises CommandError."""
        self.messages.append({"role": "user", "content": question})
        answer, screen = Answer(), AnswerScreen()
        try:
            with _interrupt_cancels(asyncio.ensure_future(self._stream(answer, screen))) as task:
                await task
        except asyncio.CancelledError:
            if (current := asyncio.current_task()) is not None and current.cancelling():
                raise
            screen.end()
            print("[stopped]")
        except CommandError:
            screen.end()
            self.messages.pop()
            raise
        else:
            screen.end()
        self.messages.append({"role": "assistant", "content": answer.text})
        if answer.usage:
            show(account(answer.usage, answer.finish_reason), "dim")
        print()

    async def _stream(self, answer: Answer, screen: AnswerScreen) -> None:
        settings = self._settings
        self.model = self.model or (await models(self.client))[0]
        body: dict[str, Any] = {
            "model": self.model,
            "messages": self.messages,
            "temperature": settings.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if settings.max_tokens:
            body["max_tokens"] = settings.max_tokens
        async for chunk in events(self.client, "/v1/chat/completions", body):
            if error := chunk.get("error"):
                raise CommandError(f"the answer broke off: {error['message']}")
            answer.usage = chunk.get("usage") or answer.usage
            for choice in chunk["choices"]:
                if thought := choice["delta"].get("reasoning_content"):
                    screen.write(thought, thought=True)
                if text := choice["delta"].get("content"):
                    answer.text += text
                    screen.write(text)
                answer.finish_reason = choice["finish_reason"] or answer.finish_reason


async def events(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each server-sent event of a streamed answer. Raises CommandError."""
    try:
        async with client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                raise CommandError(error_sentence(response.status_code, await response.aread()))
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield orjson.loads(line[6:])
    except httpx.HTTPError as error:
        raise CommandError(_unreachable(client, error)) from error


async def models(client: httpx.AsyncClient, named: str = "") -> list[str]:
    """Return the models that the server lists, at least one; ``named`` where it has no list. Raises
    CommandError."""
    try:
        response = await client.get("/v1/models")
        if named and response.status_code == 404:
            return [named]
        response.raise_for_status()
        names = [str(card["id"]) for card in response.json()["data"]]
        if not names:
            raise LookupError
        return names
    except httpx.HTTPStatusError as error:
        raise CommandError(error_sentence(error.response.status_code, error.response.content)) from error
    except httpx.HTTPError as error:
        raise CommandError(_unreachable(client, error)) from error
    except (ValueError, LookupError) as error:
        raise CommandError(
            f"{client.base_url} answers, but lists no models: is it an OpenAI-compatible server?"
        ) from error


SHOWN_STAGES = {
    "queue_s": "queue",
    "prefill_s": "prefill",
    "handoff_s": "KV handoff",
    "decode_s": "decode",
    "coordinator_s": "coordinator",
}


def account(usage: dict[str, Any], finish_reason: str = "") -> str:
    """Return one line with the stages of an answer's time, from the usage that ends a stream."""
    num_tokens = usage.get("completion_tokens", 0)
    parts = []
    stages = usage.get("splitserve") or {}
    for name, label in SHOWN_STAGES.items():
        if name in stages:
            parts.append(f"{label} {duration(stages[name])}")
    if stages.get("decode_s") and num_tokens > 1:
        parts.append(f"{(num_tokens - 1) / stages['decode_s']:.0f} tokens/s")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    parts.append(f"{cached} of {usage.get('prompt_tokens', 0)} prompt tokens cached")
    if finish_reason == "length":
        parts.append("cut by the time limit" if stages.get("timed_out") else "cut at the length limit")
    return " · ".join(parts)


def duration(seconds: float) -> str:
    return f"{seconds * 1e3:.{int(seconds < 0.01)}f} ms" if seconds < 1 else f"{seconds:.2f} s"


ADVICE = {
    "CERTIFICATE_VERIFY": "--tls-ca FILE names its certificate",
    "WRONG_VERSION": "does its --url begin with http://?",
    "without sending": "does its --url begin with https://?",
    "": "start a server with `splitserve up`, or give --url",
}
"""By a part of the error."""


def _unreachable(client: httpx.AsyncClient, error: httpx.HTTPError) -> str:
    advice = next(advice for part, advice in ADVICE.items() if part in str(error))
    return f"no connection to {client.base_url} ({error or type(error).__name__}); {advice}"


def _client(settings: ChatSettings, certificate: Path | None) -> httpx.AsyncClient:
    key = read_key("--api-key-file", settings.api_key_file)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    verify, timeout = trust(settings.url, settings.tls_ca, certificate), httpx.Timeout(None, connect=5)
    return httpx.AsyncClient(
        base_url=settings.url, headers=headers, timeout=timeout, trust_env=False, verify=verify
    )


@contextlib.contextmanager
def _interrupt_cancels(task: asyncio.Future[None]) -> Any:
    """While inside, Ctrl-C cancels ``task`` and nothing else."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        yield task
    finally:
        task.cancel()
        loop.remove_signal_handler(signal.SIGINT)
