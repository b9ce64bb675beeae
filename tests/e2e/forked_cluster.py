"""A cluster whose workers are forked, and started again, in a fraction of a second: for tests that kill
many."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from e2e.cluster import DEAD_AFTER_S, MODEL_NAME, PATIENCE_S, START_S, Cluster, answers, free_port, wait_for

from splitserve.transport.channels.keys import generate_key

TESTS = Path(__file__).parent.parent
LOOK_S = 0.03
PROGRESS_TIMEOUT_S = 3.0  # the coordinator's patience with a worker whose steps do not end
ORPHANED_AFTER_S = 2.0  # the workers' patience with a silent coordinator
HEARTBEAT_S = 0.05  # how soon the state of the workers is known
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Forked:
    """A worker's process, not a child of this one."""

    pid: int
    fd: int

    def has_ended(self, within_s: float = 0.0) -> bool:
        return bool(select.select([self.fd], [], [], within_s)[0])

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send this signal, and wait for the end. Not twice."""
        if not self.has_ended():
            signal.pidfd_send_signal(self.fd, number)
        assert self.has_ended(PATIENCE_S), f"process {self.pid} has not ended by {number.name}"
        os.close(self.fd)


class Nursery:
    """Starts workers: ``support/worker_nursery.py``, which imports torch once for all of them."""

    def __init__(self) -> None:
        environ = {**ENVIRON, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.worker_nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )

    def start(self, role: str, argv: list[str], log: Path) -> Forked:
        """`splitserve ROLE ARGV`, with its output added to ``log``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"role": role, "argv": argv, "log": str(log)}) + "\n")
        self._process.stdin.flush()
        pid = int(self._process.stdout.readline())
        try:
            return Forked(pid, os.pidfd_open(pid))
        except ProcessLookupError as error:
            raise AssertionError(f"a {role} worker could not start: {log.read_text()[-2000:]}") from error

    def close(self) -> None:
        """Ends what it has started, too."""
        self._process.communicate(timeout=PATIENCE_S)


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
        super().__init__(self.urls[0], self.start_coordinator(), folder / "coordinator.log")
        self._others = [self.start_coordinator(number) for number in range(1, num_coordinators)]
        self._nursery, self._workers = nursery, dict[str, Forked]()
        self.num_started = 0
        for name in [
            *(f"prefill-{i}" for i in range(num_prefill)),
            *(f"decode-{i}" for i in range(num_decode)),
        ]:
            self._start(name)
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep)
        self._keeper.start()

    def start_coordinator(self, number: int = 0) -> subprocess.Popen[bytes]:
        """Start a coordinator, also after it was killed."""
        command = [
            sys.executable,
            "-m",
            "splitserve.cli.main",
            "coordinator",
            *self._common,
            "--served-model-name",
            MODEL_NAME,
        ]
        command += [
            "--port",
            self.urls[number].rpartition(":")[2],
            "--control-address",
            self._control_addresses[number],
            "--heartbeat-s",
            str(HEARTBEAT_S),
        ]
        command += ["--progress-timeout-s", str(PROGRESS_TIMEOUT_S), "--dead-after-s", str(DEAD_AFTER_S)]
        command += ["--shutdown-timeout-s", "0"]
        with (self._folder / "coordinator.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=ENVIRON)

    def log_of(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()

    def close(self) -> None:
        self._closing.set()
        self._keeper.join()
        self.client.close()
        for worker in self._workers.values():
            worker.end()
        for process in (self.process, *self._others):
            process.kill()
            process.wait(60)

    def _start(self, name: str) -> None:
        role = name.partition("-")[0]
        argv = [*self._common, "--name", name, "--coordinator", ",".join(self._control_addresses)]
        argv += self._options
        argv += ["--orphaned-after-s", str(ORPHANED_AFTER_S)]
        self._workers[name] = self._nursery.start(role, argv, self._folder / f"{name}.log")
        self.num_started += 1

    def _keep(self) -> None:
        while not self._closing.wait(LOOK_S):
            for name, worker in list(self._workers.items()):
                if worker.has_ended():
                    os.close(worker.fd)
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
