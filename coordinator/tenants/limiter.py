"""Who holds to the limits: nobody where none are configured, all processes of this host together, or all hosts together (Redis)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from .buckets import Room, Shortage
from .limits import Account

ASSUMED_OUTPUT_TOKENS = 512
"""Of an answer that may be longer: what it is taken for until it has ended."""


class Admission(NamedTuple):
    """What was taken for a request, until ``settle``."""

    account: Account
    tokens: int
    room: Room


Answer = Callable[[Admission | Shortage], None]


class Limiter(Protocol):
    """Called on the event loop; never blocks it for long."""

    def admit(self, account: Account, tokens: int, answer: Answer) -> None:
        """Asks for room for one request of about so many tokens. ``answer`` is called once: at once, or from the loop."""

    def correct(self, admission: Admission, tokens: int, answer: Answer) -> None:
        """The request needs so many tokens, as shows now. With a Shortage all is given back but that it was asked."""

    def settle(self, admission: Admission, tokens: int) -> None:
        """It has ended, and used so many."""

    async def start(self) -> None:
        """Before the first request."""

    async def stop(self) -> None:
        """After the last one."""


class NoLimits:
    """A ``Limiter`` that lets everything in."""

    def admit(self, account: Account, tokens: int, answer: Answer) -> None:
        answer(Admission(account, tokens, Room()))

    def correct(self, admission: Admission, tokens: int, answer: Answer) -> None:
        answer(Admission(admission.account, tokens, admission.room))

    def settle(self, admission: Admission, tokens: int) -> None: ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


def estimated_tokens(num_prompt_tokens: int, max_tokens: int, num_choices: int) -> int:
    """What a request is taken to use: its prompts once, and each choice's answer."""
    return num_prompt_tokens + num_choices * min(max_tokens, ASSUMED_OUTPUT_TOKENS)
