"""The coordinator is gone: what it had asked for is freed within the time, and the next one is served at
once."""

from __future__ import annotations

import re
import signal

from e2e.cluster import wait_for
from e2e.forked_cluster import ORPHANED_AFTER_S, ForkedCluster
from e2e.test_failure import Streams

from splitserve.transport.channels.channels import RouterChannel
from splitserve.transport.channels.keys import load_key
from splitserve.transport.messages.messages import FROM_WORKER, Hello, Load

STARVED_S = 30.0  # where other programs have the machine's cores
NAMES = {"prefill-0", "prefill-1", "decode-0", "decode-1"}


class SilentCoordinator:
    """Listens where the coordinator did, answers nothing: to the workers as good as a partition."""

    def __init__(self, cluster: ForkedCluster) -> None:
        self._router = RouterChannel.bind(cluster.control_address, load_key(cluster.key_file), FROM_WORKER)
        self.held: dict[str, int] = {}
        """By worker, the most blocks that it had in use."""
        self.gave_up: set[str] = set()
        """Return the workers that have greeted anew, having freed all."""

    def listen(self) -> bool:
        """Whether every worker has given the old coordinator up."""
        self._router.socket.poll(50)
        for _, message in self._router.receive(1000):
            if isinstance(message, Load):
                self.held[message.worker_id] = max(self.held.get(message.worker_id, 0), message.blocks_used)
            elif isinstance(message, Hello):
                self.gave_up.add(message.worker_id)
        return self.gave_up == NAMES

    def close(self) -> None:
        self._router.close()


def lose_the_coordinator(cluster: ForkedCluster) -> SilentCoordinator:
    """Kill it under load, start it again when every worker has given it up. Return the messages between."""
    streams = Streams(cluster, ["one " * 50, "two " * 90, "three " * 9], 3000)
    streams.wait_under_way()
    cluster.process.send_signal(signal.SIGKILL)
    cluster.process.wait(60)
    silent = SilentCoordinator(cluster)
    try:
        wait_for("every worker has given it up", silent.listen, ORPHANED_AFTER_S + STARVED_S)
    finally:
        silent.close()
        cluster.process = cluster.start_coordinator()
    streams.wait_ended()
    return silent


def test_workers_free_what_nobody_owns_and_take_new_work_at_once(forked_cluster: ForkedCluster) -> None:
    cluster = forked_cluster
    cluster.wait_whole(2, 2)
    before = cluster.complete("the answer", 24)
    pids = {w["pid"] for w in cluster.state()["workers"]}

    def went_on_meanwhile() -> bool:
        text = {name: len(cluster.log_of(name)) for name in NAMES}
        silent = lose_the_coordinator(cluster)
        wait_for("the next coordinator serves", cluster.ready)
        cluster.wait_whole(2, 2)
        assert cluster.complete("the answer", 24) == before
        cluster.wait_at_rest()
        assert {w["pid"] for w in cluster.state()["workers"]} == pids
        for name in NAMES:
            gave_up = re.findall(
                r"for (\d+) s: freeing all it had asked for", cluster.log_of(name)[text[name] :]
            )
            assert gave_up, name
            assert all(int(seconds) >= ORPHANED_AFTER_S for seconds in gave_up), (
                "they gave it time to come back"
            )
        return max(silent.held.values(), default=0) > 0

    # Where this test waits long for a core, the streams may have come to their end before.
    wait_for("they went on with what the dead coordinator had asked for", went_on_meanwhile, 200)
