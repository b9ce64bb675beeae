"""The coordinator is gone: what it had asked for is freed within the time, and the next one is served at once."""

from __future__ import annotations

import signal
import time

from e2e.cluster import wait_for
from e2e.forked_cluster import ORPHANED_AFTER_S, ForkedCluster
from e2e.test_failure import Streams

from splitserve.transport.channels import RouterChannel
from splitserve.transport.keys import load_key
from splitserve.transport.messages import FROM_WORKER, Hello, Load

STARVED_S = 30.0  # where other programs have the machine's cores
NAMES = {"prefill-0", "prefill-1", "decode-0", "decode-1"}


class SilentCoordinator:
    """Listens where the coordinator did, answers nothing: to the workers as good as a partition."""

    def __init__(self, cluster: ForkedCluster) -> None:
        self._router = RouterChannel.bind(cluster.control_address, load_key(cluster.key_file), FROM_WORKER)
        self.held: dict[str, int] = {}
        """By worker, the most blocks that it had in use."""
        self.gave_up: dict[str, float] = {}
        """When each worker first asked who is there, having freed all."""

    def listen(self) -> bool:
        """Whether every worker has given the old coordinator up."""
        self._router.socket.poll(50)
        for _, message in self._router.receive(1000):
            if isinstance(message, Load):
                self.held[message.worker_id] = max(self.held.get(message.worker_id, 0), message.blocks_used)
            elif isinstance(message, Hello):
                self.gave_up.setdefault(message.worker_id, time.monotonic())
        return set(self.gave_up) == NAMES

    def close(self) -> None:
        self._router.close()


def test_workers_free_what_nobody_owns_and_take_new_work_at_once(forked_cluster: ForkedCluster) -> None:
    cluster = forked_cluster
    cluster.wait_whole(2, 2)
    before = cluster.complete("the answer", 24)
    pids = {w["pid"] for w in cluster.state()["workers"]}
    streams = Streams(cluster, ["one " * 50, "two " * 90, "three " * 9], 3000)
    streams.wait_under_way()
    killed = time.monotonic()
    cluster.process.send_signal(signal.SIGKILL)
    cluster.process.wait(60)
    silent = SilentCoordinator(cluster)
    try:
        wait_for("every worker has given it up", silent.listen, ORPHANED_AFTER_S + STARVED_S)
    finally:
        silent.close()
        cluster.process = cluster.start_coordinator()
    assert max(silent.held.values()) > 0, "they went on with what the dead coordinator had asked for"
    assert all(at - killed >= ORPHANED_AFTER_S / 2 for at in silent.gave_up.values()), "they gave it time to come back"
    wait_for("the next coordinator serves", cluster.ready)
    cluster.wait_whole(2, 2)
    assert cluster.complete("the answer", 24) == before
    cluster.wait_at_rest()
    assert {w["pid"] for w in cluster.state()["workers"]} == pids
    for name in NAMES:
        assert "freeing all it had asked for" in cluster.log_of(name)
