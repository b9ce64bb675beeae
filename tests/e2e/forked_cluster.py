"""A cluster whose processes are forked, and started again, in a fraction of a second: for tests that kill
many."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from e2e.cluster import DEAD_AFTER_S, MODEL_NAME, START_S, Cluster, answers, free_port, wait_for
from e2e.nursery import Forked, Nursery

from splitserve.transport.channels.keys import generate_key

LOOK_S = 0.03
PROGRESS_TIMEOUT_S = 3.0  # the coordinator's patience with a worker whose steps do not end
ORPHANED_AFTER_S = 2.0  # the workers' patience with a silent coordinator
HEARTBEAT_S = 0.05  # how soon the state of the workers is known


class ForkedCluster(Cluster):
    """A coordinator or several, and prefill and decode workers; whichever worker ends is started again, until
    ``close``. ``process``, ``url`` and ``control_address`` are those of the first coordinator."""

    def __init__(
        self,
        nursery: Nursery,
        model: Path,
        folder: Path,
        *options: str,
        num_prefill: int = 2,
        num_decode: int = 2,
        num_coordinators: int = 1,
    ) -> None:
        self._folder, self._options = folder, options
        self.key_file = folder / "key"
        generate_key(self.key_file)
        self._common = ["--model", str(model), "--key-file", str(self.key_file)]
        self._control_addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(num_coordinators)]
        self.urls = [f"http://127.0.0.1:{free_port()}" for _ in range(num_coordinators)]
        self.control_address = self._control_addresses[0]
        self._nursery, self._workers = nursery, dict[str, Forked]()
        super().__init__(self.urls[0], self.start_coordinator(), folder / "coordinator.log")
        self._others = [self.start_coordinator(number) for number in range(1, num_coordinators)]
        self.num_started = 0
        for name in [
            *(f"prefill-{i}" for i in range(num_prefill)),
            *(f"decode-{i}" for i in range(num_decode)),
        ]:
            self._start(name)
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep)
        self._keeper.start()

    def start_coordinator(self, number: int = 0) -> Forked:
        """Start a coordinator, also after it was killed."""
        argv = ["coordinator", *self._common, "--served-model-name", MODEL_NAME]
        argv += ["--port", self.urls[number].rpartition(":")[2]]
        argv += ["--control-address", self._control_addresses[number], "--heartbeat-s", str(HEARTBEAT_S)]
        argv += ["--progress-timeout-s", str(PROGRESS_TIMEOUT_S), "--dead-after-s", str(DEAD_AFTER_S)]
        argv += ["--shutdown-timeout-s", "0"]
        return self._nursery.start(argv, self._folder / "coordinator.log")

    def log_of(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()

    def close(self) -> None:
        self._closing.set()
        self._keeper.join()
        self.client.close()
        for process in (*self._workers.values(), self.process, *self._others):
            process.end()

    def _start(self, name: str) -> None:
        role = name.partition("-")[0]
        argv = [role, *self._common, "--name", name, "--coordinator", ",".join(self._control_addresses)]
        argv += self._options
        argv += ["--orphaned-after-s", str(ORPHANED_AFTER_S)]
        self._workers[name] = self._nursery.start(argv, self._folder / f"{name}.log")
        self.num_started += 1

    def _keep(self) -> None:
        while not self._closing.wait(LOOK_S):
            for name, worker in list(self._workers.items()):
                if worker.poll() is not None:
                    self._start(name)


@contextmanager
def forked(
    nursery: Nursery,
    model: Path,
    folder: Path,
    *options: str,
    num_prefill: int = 2,
    num_decode: int = 2,
    num_coordinators: int = 1,
) -> Iterator[ForkedCluster]:
    """The cluster, ready, until the block ends."""
    cluster = ForkedCluster(
        nursery,
        model,
        folder,
        *options,
        num_prefill=num_prefill,
        num_decode=num_decode,
        num_coordinators=num_coordinators,
    )
    try:
        for url in cluster.urls:
            wait_for(f"{url} is ready (logs: {folder})", partial(answers, f"{url}/ready"), START_S)
        cluster.wait_whole(num_prefill, num_decode)
        yield cluster
    finally:
        cluster.close()
