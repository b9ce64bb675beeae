"""Reads large bodies in a process of its own: parsing them holds Python's lock for up to seconds, and the
coordinator has streams to serve.

It has one connection to the coordinator, a socket pair whose both ends are ours, and ends when the
coordinator's end does. Memory that a large body took is given back to the system before the next one.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ...errors import ApiError, ImagesWanted, InvalidRequest
from ...http.limits import HttpLimits
from ...lifecycle.adapters import AdapterNames
from ...lifecycle.request import PriorityClass
from ...text.served_model import ServedModel, ServedModels
from ...validation import validated
from ..bodies.chat import ChatCompletionRequest
from ..bodies.fields import Body
from ..conversation import decide, page_model
from ..image_prompts import put_in
from ..plan import Planner, RequestPlan, parse, timeout_of
from ..token_pages import DetokenizeRequest, TokenizeRequest, detokenized, tokenized
from .allocator import give_memory_back, trimmer
from .body_reader import Present, receive, send
from .websocket_message import parsed_message, with_stream

if TYPE_CHECKING:  # it imports the HTTP server, which the reader's process starts without
    from ...http.call import Endpoint


NICENESS = 5
"""Streams come first: they write with every token, and large bodies arrive now and then."""
MAX_VALUES = 1 << 20
"""JSON values in one body: bounds the memory that parsing takes, some 100 bytes each. A prompt as ids has one
for each token."""
MEMBER_VALUES = 3
"""Extra values that a member of an object counts as, for its memory."""
SCAN_BYTES = 1 << 20
Asked = TypeVar("Asked", bound=Body)


class Work:
    """What the process can be asked for, by name. All methods raise ApiError."""

    def __init__(self, models: Sequence[ServedModel], limits: HttpLimits) -> None:
        self._present = Present([(0, AdapterNames())] * len(models), {}, [])
        names = [model.name for model in models]
        self._models = ServedModels(
            map(self._followed, models, range(len(models))),
            lambda model: self._present.refusals[names.index(model.name)],
        )
        self._longest_s = limits.request_timeout_s
        self._planners = {model.name: Planner(model, limits) for model in self._models.all}

    def _followed(self, model: ServedModel, number: int) -> ServedModel:
        return replace(
            model,
            workers_hold=lambda: self._present.of_workers[number][0],
            adapters=lambda: self._present.of_workers[number][1],
        )

    def follow(self, present: Present) -> None:
        """Go by this from now on."""
        self._present, self._models.routes = present, present.routes

    def plan(
        self,
        endpoint: Endpoint,
        headers: Mapping[bytes, bytes],
        own_class: PriorityClass,
        prefers: str,
        fetched: Mapping[str, bytes],
        body: bytearray,
    ) -> RequestPlan:
        """Plan a request for tokens. See ``Planner.plan`` and ``decide``. ``fetched``: its images, by
        address."""
        check_size(body)
        request = parse(endpoint, body)
        route = decide(self._models, request, headers, prefers)
        if isinstance(request, ChatCompletionRequest):
            put_in(request.messages, fetched)
        planner = self._planners[self._models.of(request.model).name]
        try:
            return planner.plan(request, headers, own_class)._replace(route=route)
        except ImagesWanted as error:
            error.timeout_s = timeout_of(request.timeout, headers, self._longest_s)
            raise

    def validate(self, kind: type[Asked], body: bytearray) -> Asked:
        """A body as another API's ``kind``."""
        check_size(body)
        return validated(kind, body)

    def tokenize(self, body: bytearray) -> bytes:
        """The answer of /tokenize."""
        asked = self.validate(TokenizeRequest, body)
        return tokenized(asked, page_model(self._models, asked))

    def detokenize(self, body: bytearray) -> bytes:
        """The answer of /detokenize."""
        asked = self.validate(DetokenizeRequest, body)
        return detokenized(asked, page_model(self._models, asked))

    def envelope(self, message: bytearray) -> tuple[dict[str, Any], bytes]:
        """A WebSocket message without its body, and the body, for ``generate``."""
        check_size(message)
        found = parsed_message(message)
        body = found.pop("body", None)
        return found, with_stream(body)


def check_size(body: bytes | bytearray) -> None:
    """Raises InvalidRequest where it holds more values than any request needs."""
    if (count := num_values(body)) > MAX_VALUES:
        raise InvalidRequest(
            f"The body holds {count} JSON values (members of objects count {1 + MEMBER_VALUES} times); at "
            f"most {MAX_VALUES} are allowed. Send fewer prompts or entries in one request.",
            code="request_too_large",
        )


def num_values(body: bytes | bytearray) -> int:
    """One for each comma and opening bracket outside of strings, and MEMBER_VALUES for each member of an
    object. Piece by piece."""
    inside, count = False, 1
    plain = body.replace(b"\\\\", b"__").replace(b'\\"', b"__")  # now a quote begins or ends a string
    for at in range(0, len(plain), SCAN_BYTES):
        piece = np.frombuffer(plain, np.uint8, min(SCAN_BYTES, len(plain) - at), at)
        in_string = np.logical_xor.accumulate(np.concatenate(([inside], piece == ord('"'))))
        found = (piece == ord(",")) | (piece == ord("[")) | (piece == ord("{"))
        count += int(np.count_nonzero(found & ~in_string[1:]))
        count += MEMBER_VALUES * int(np.count_nonzero((piece == ord(":")) & ~in_string[1:]))
        inside = bool(in_string[-1])
    return count


def serve(connection: socket.socket) -> None:
    """Answers until the other end closes."""
    with contextlib.suppress(EOFError, ConnectionError):  # the other end has closed
        work = Work(*pickle.loads(receive(connection)[0]))
        trim = trimmer()
        while True:
            head, body = receive(connection)
            name, (present, *arguments) = pickle.loads(head)
            work.follow(present)
            try:
                answer: Any = getattr(work, name)(*arguments, body)
            except ApiError as error:
                answer = error
            except (MemoryError, RecursionError) as error:
                answer = InvalidRequest(
                    "The body cannot be read: it takes too much memory or is too deep "
                    f"({type(error).__name__})."
                )
            del body
            send(connection, pickle.dumps(answer))
            del answer, head
            gc.collect()
            trim()


def main(fd: int) -> None:
    """The process. ``fd``: its end of the socket pair."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the terminal is the coordinator's to see
    os.nice(NICENESS)
    give_memory_back()
    serve(socket.socket(fileno=fd))
