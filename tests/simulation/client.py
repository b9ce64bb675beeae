"""One client: what it has seen, and the sink that writes to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from splitserve.coordinator.lifecycle.request import Ended, Request
from splitserve.transport.messages.messages import TokenLogprobs

if TYPE_CHECKING:
    from simulation.clients import Clients
    from simulation.coordinator_process import CoordinatorProcess
    from simulation.worker_process import PeerId


class BrokenSink(Exception):
    """A mistake of ours, where tokens are written to a client."""


class ClientSink:
    """Writes to one client. It may raise at any call, and its client may leave in the middle of one."""

    def __init__(self, clients: Clients, client: Client) -> None:
        self._clients, self._client = clients, client

    def push(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        self._clients.maybe_break(self._client, "push")
        self._clients.pushed(self._client, token_id, logprobs)

    def push_prompt_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None:
        self._clients.maybe_break(self._client, "push")
        self._clients.pushed_prompt_logprobs(self._client, logprobs)

    def flush(self) -> None:
        self._clients.maybe_break(self._client, "flush")
        self._client.flushed = True

    def end(self, ended: Ended) -> None:
        self._clients.maybe_break(self._client, "end")
        self._clients.ended(self._client, ended)


@dataclass(slots=True)
class Client:
    """What one client has seen."""

    request: Request
    coordinator: CoordinatorProcess  # its connection breaks with this process
    expected: list[int]
    reason: str
    num_tokens: int = 0
    has_prompt_logprobs: bool = False
    tries: dict[tuple[int, int], tuple[PeerId, PeerId]] = field(
        default_factory=dict
    )  # workers, by coordinator and dispatch
    ended: Ended | None = None
    cancelled: bool = False
    orphaned: bool = False
    flushed: bool = True
    broken: bool = False  # its sink has raised
