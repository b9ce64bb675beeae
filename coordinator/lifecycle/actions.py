"""What the lifecycle asks its shell to do. Each call of the lifecycle returns a list of these, to be
carried out in order."""

from __future__ import annotations

from typing import NamedTuple

from ...transport.messages.messages import Alive, Fenced, Message, OtherVersion, TokenLogprobs
from .request import Ended, Request
from .worker import WorkerId


class Push(NamedTuple):
    """Pass the next output token to the request's sink."""

    request: Request
    token: int
    logprobs: TokenLogprobs | None


class PushPromptLogprobs(NamedTuple):
    """Pass the prompt's logprobs to the request's sink."""

    request: Request
    logprobs: tuple[TokenLogprobs, ...]


class End(NamedTuple):
    """Pass the one terminal event to the request's sink."""

    request: Request
    ended: Ended


class Send(NamedTuple):
    """Send a message to a worker."""

    worker: WorkerId
    message: Message


def is_for_strangers(message: Message) -> bool:
    """Return whether a worker that is not one of the pools' is sent this: it is fenced or refused."""
    return isinstance(message, Fenced | OtherVersion) or (isinstance(message, Alive) and message.misfit != "")


Action = Push | PushPromptLogprobs | End | Send
