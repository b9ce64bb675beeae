"""The bodies of Ollama's /api/chat and /api/generate, and the completions they stand for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from ...transport.messages.fields import MAX_TEMPERATURE
from ...transport.messages.images import MAX_IMAGES
from ..generate.bodies.content import BASE64
from ..generate.bodies.fields import INT64, NULL, OWN_SAMPLER, Body, Refused, check_others, invalid, schema
from ..generate.bodies.messages import MAX_MESSAGES
from ..generate.bodies.sampling import STOP
from ..generate.bodies.tools import MAX_TOOLS, Tool

LATEST = ":latest"
Images = Annotated[list[str], Field(max_length=MAX_IMAGES)] | None
"""In base64; they stand before the text, as in Ollama."""
IGNORED_OPTIONS = {
    "num_ctx": "how much memory is set aside; the server's context holds, and a longer prompt is refused",
    "num_keep": "of a context that shifts; here an answer ends with the context",
    "num_batch": "how it is computed", "num_gpu": "where it runs", "main_gpu": "where it runs",
    "num_thread": "how fast it runs", "numa": "where it runs", "low_vram": "how much memory is set aside",
    "f16_kv": "how it is stored", "use_mmap": "how weights are read", "use_mlock": "how weights are read",
    "vocab_only": "how weights are read", "logits_all": "what is computed beside the answer",
    "embedding_only": "which endpoint is used",
    "mirostat_tau": "of mirostat, which is refused", "mirostat_eta": "of mirostat, which is refused",
}  # fmt: skip
"""By name: what it is about, which is why it cannot change an answer."""
REFUSED_OPTIONS: Refused = {
    "repeat_last_n": ("`repeat_penalty` counts the whole sequence", (-1,)),
    "tfs_z": (OWN_SAMPLER, (1,)),
    "typical_p": (OWN_SAMPLER, (1,)),
    "mirostat": (OWN_SAMPLER, (0,)),
    "penalize_newline": ("newlines are penalized as all tokens", (True,)),
}
REFUSED: Refused = {
    "images": ("they stand in messages", ([],)),
    "suffix": ("filling in is not built; send the model's own marks in `prompt` with `raw` true", ("",)),
    "template": ("the server renders with the model's own template", ("",)),
    "context": ("send the conversation to /api/chat", ([],)),
    "truncate": ("a prompt that does not fit is refused", (False,)),
    "shift": ("an answer ends with the context", (False,)),
    "width": ("the server makes no images", (0,)),
    "height": ("the server makes no images", (0,)),
    "steps": ("the server makes no images", (0,)),
    "debug_render_only": ("use /tokenize", (False,)),
}
CHAT_OPTIONS = {"repeat_penalty": "repetition_penalty"}
"""Options whose name in a chat is another."""


def _format(value: Any) -> Any:
    if value is None or value in ("", "json") or isinstance(value, dict):
        return value or None
    raise invalid("must be 'json' or a JSON schema, an object")


FORMAT = schema({"enum": ["", "json"]}, {"type": "object"}, NULL)


class Options(Body):
    """Sampling. Ranges are those of chats."""

    num_predict: Annotated[int, Field(ge=-2, lt=INT64)] | None = None
    """Most new tokens; without a number above 0 as many as the context takes."""
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=INT64)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    stop: Annotated[list[str] | str, STOP] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None

    @model_validator(mode="after")
    def _known(self) -> Self:
        check_others(self.model_extra, REFUSED_OPTIONS, "options.")
        known = {*IGNORED_OPTIONS, *REFUSED_OPTIONS}
        if unknown := sorted(set(self.model_extra or ()) - known):
            names = ", ".join(type(self).model_fields)
            raise invalid(f"options.{unknown[0][:64]}: is no option of this server, which has {names}")
        return self

    def unknown_fields(self) -> list[str]:
        return []  # each is refused, or known to change nothing

    def for_chat(self) -> dict[str, Any]:
        """Return the chat's fields beside ``num_predict``."""
        given = {name: getattr(self, name) for name in type(self).model_fields if name != "num_predict"}
        return {CHAT_OPTIONS.get(name, name): value for name, value in given.items() if value is not None}


class OllamaFunction(Body):
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class OllamaCall(Body):
    """A call that the model made earlier in the chat; ``id`` is missing from older clients."""

    id: str | None = None
    function: OllamaFunction


class OllamaMessage(Body):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: Images = None


class OllamaRequest(Body):
    """The fields of both endpoints."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    stream: bool | None = None
    """Only false is an answer in one piece."""
    format: Annotated[Any, BeforeValidator(_format), FORMAT] = None
    options: Options | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    keep_alive: float | str | None = None
    """Ignored: the one model there is stays loaded."""

    @model_validator(mode="after")
    def _all_built(self) -> Self:
        check_others(self.model_extra, REFUSED)
        return self

    def unknown_fields(self) -> list[str]:
        return [name for name in super().unknown_fields() if name not in REFUSED]

    def sampling(self) -> dict[str, Any]:
        """Return the fields that chats and completions share."""
        fields: dict[str, Any] = {"model": self.model.removesuffix(LATEST)}
        if self.options is not None:
            fields |= self.options.for_chat()
        if self.format is not None:
            wanted = {"name": "output", "schema": self.format}
            json_schema = {"type": "json_schema", "json_schema": wanted}
            fields["response_format"] = {"type": "json_object"} if self.format == "json" else json_schema
        return fields

    @property
    def most_tokens(self) -> int | None:
        """The client's bound of new tokens; None: the context's."""
        most = None if self.options is None else self.options.num_predict
        return most if most is not None and most > 0 else None

    def chat_of(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the body of a chat completion."""
        chat = {**self.sampling(), "messages": messages, "max_completion_tokens": self.most_tokens}
        if self.think is not None:
            chat["chat_template_kwargs"] = {"enable_thinking": self.think is not False}
            if isinstance(self.think, str):
                chat["reasoning_effort"] = self.think
        if self.logprobs:
            chat |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        return chat


class OllamaChatRequest(OllamaRequest):
    """POST /api/chat."""

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES)] = Field(default_factory=list)
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None

    def for_chat(self) -> dict[str, Any]:
        """Return the body of the chat completion."""
        chat = self.chat_of(chat_messages(self.messages))
        if self.tools:
            chat["tools"] = [tool.model_dump(exclude_none=True) for tool in self.tools]
        return chat


class OllamaGenerateRequest(OllamaRequest):
    """POST /api/generate."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    """The prompt is not put into the chat template."""
    images: Images = None

    @model_validator(mode="after")
    def _raw_is_alone(self) -> Self:
        if self.raw and self.system:
            raise invalid("system: not allowed with `raw` true, whose prompt is all there is")
        if self.raw and self.images:
            raise invalid("images: not allowed with `raw` true; the chat template shows where they stand")
        if self.raw and self.logprobs:
            raise invalid("logprobs: not allowed with `raw` true; use /v1/completions")
        return self

    def for_chat(self) -> dict[str, Any]:
        """Return the body of the chat completion."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self.chat_of([*system, {"role": "user", "content": _content(self.prompt, self.images)}])

    def for_completion(self) -> dict[str, Any]:
        """Return the body of the completion, for a raw prompt."""
        return {**self.sampling(), "prompt": self.prompt, "max_tokens": self.most_tokens}


def chat_messages(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Return a chat's messages. Calls without ids get some, and each result is that of the first call without
    one: the first of its ``tool_name``, if it has one."""
    found, pending, count = list[dict[str, Any]](), list[tuple[str, str]](), 0
    for message in messages:
        chat: dict[str, Any] = {"role": message.role, "content": _content(message.content, message.images)}
        if message.thinking:
            chat["reasoning_content"] = message.thinking
        for call in message.tool_calls or ():
            id, count = call.id or f"call{count:05d}", count + 1
            pending.append((call.function.name, id))
            arguments = json.dumps(call.function.arguments, ensure_ascii=False)
            function = {"name": call.function.name, "arguments": arguments}
            chat.setdefault("tool_calls", []).append({"id": id, "type": "function", "function": function})
        if message.role == "tool":
            chat["tool_call_id"] = message.tool_call_id or _answered(pending, message.tool_name)
            if message.tool_name:
                chat["name"] = message.tool_name
        found.append(chat)
    return found


def _content(text: str | None, images: Images) -> str | list[dict[str, Any]]:
    if not images:
        return text or ""
    shown = [{"type": "image_url", "image_url": f"data:{BASE64}{image}"} for image in images]
    return [*shown, *([{"type": "text", "text": text}] if text else [])]


def _answered(pending: list[tuple[str, str]], name: str | None) -> str:
    """Remove the call that a result is for, and return its id."""
    at = next((i for i, (called, _) in enumerate(pending) if name in (None, "", called)), None)
    return f"call{0:05d}" if at is None else pending.pop(at)[1]
