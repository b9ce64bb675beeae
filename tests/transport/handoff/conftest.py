"""Fixtures of this folder."""

from __future__ import annotations

import pytest
from support.sending_end import MODEL, PEER, Channel, SlowMover, end_of

from splitserve.transport.handoff.sender import HandoffSender
from splitserve.transport.handoff.sending_end import SendingEnd
from splitserve.transport.messages.messages import Meet


@pytest.fixture
def end() -> SendingEnd:
    meet = Meet(worker_id="p", incarnation=1, host="h", pid=1, model=MODEL, movers=("nixl",))
    end = end_of(HandoffSender(meet))
    end._channels[PEER] = Channel()  # type: ignore[assignment]
    end._movers[PEER] = SlowMover()
    return end
