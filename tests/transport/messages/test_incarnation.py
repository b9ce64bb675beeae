"""Numbers that distinguish the lives of a worker, whatever its host's clock does."""

from __future__ import annotations

import subprocess
import sys

import pytest

from splitserve.transport.channels.coordinator_link import identity_of, worker_of
from splitserve.transport.handoff.receiving_end import _age
from splitserve.transport.messages.codec import decode, encode
from splitserve.transport.messages.fields import has_ended, incarnations, is_earlier, same_process
from splitserve.transport.messages.messages import Goodbye


def test_numbers_of_a_process_grow_and_those_of_another_are_no_earlier_or_later() -> None:
    one, other = incarnations(), incarnations()
    first, second, foreign = one(), one(), other()
    assert is_earlier(first, second)
    assert not is_earlier(second, first)
    assert has_ended(first, second)
    assert has_ended(second, second)
    assert not has_ended(second, first)
    assert not same_process(first, foreign)
    assert not any(is_earlier(a, b) or has_ended(a, b) for a in (first, second) for b in (foreign,))
    assert not any(is_earlier(b, a) or has_ended(b, a) for a in (first, second) for b in (foreign,))


@pytest.mark.parametrize("bits", [0, (1 << 41) - 2])
def test_every_number_fits_where_it_travels(bits: int) -> None:
    number = incarnations(lambda _: bits)()
    message = Goodbye(worker_id="w", incarnation=number)
    assert decode(encode(message), (Goodbye,)) == message
    assert worker_of(identity_of("w", number)) == ("w", number)


FORKS = """
import os
from splitserve.transport.messages.fields import incarnations
for _ in range(4):
    if os.fork() == 0:
        print(incarnations()(), flush=True)
        os._exit(0)
    os.wait()
"""


def test_forked_processes_have_numbers_of_their_own() -> None:
    """They are forked by a process without threads: the child of one with threads may never end."""
    ended = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=200, check=True
    )
    assert len(set(ended.stdout.split())) == 4


def test_the_way_back_to_a_peer_is_the_channel_that_it_opened_to_this_process() -> None:
    """A decode worker that had been started anew on the same port, after its clock was set back, went on
    answering on the channel that had been opened to the process before it."""

    class Core:
        worker = ("d", (5 << 22) + 2)

    before, fenced, now = (
        identity_of("p", 1, number) for number in ((9 << 22) + 1, (5 << 22) + 1, (5 << 22) + 2)
    )
    ages = [_age(identity, Core()) for identity in (b"", before, fenced, now)]  # type: ignore[arg-type]
    assert ages == sorted(ages)
    assert ages[1] == 0 < ages[2] < ages[3]
