"""A cluster whose workers are forked, and started again, in a fraction of a second: for tests that kill
many."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from e2e.cluster import DEAD_AFTER_S, MODEL_NAME, START_S, Cluster, answers, free_port, wait_for

from splitserve.transport.channels.keys import generate_key

TESTS = Path(__file__).parent.parent
LOOK_S = 0.03
PROGRESS_TIMEOUT_S = 3.0  # the coordinator's patience with a worker whose steps do not end
ORPHANED_AFTER_S = 2.0  # the workers' patience with a silent coordinator
HEARTBEAT_S = 0.05  # how soon the state of the workers is known
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1"}


class ForkedCluster(Cluster):
    """A coordinator or several, and prefill and decode workers; whichever worker ends is started again, until
    ``close``. ``process``, ``url`` and ``control_address`` are those of the first coordinator."""

    def __init__(
        self,
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
        environ = {**ENVIRON, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, "-m", "support.worker_nursery"]
        self._nursery = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
        )
        self._pidfds: dict[str, int] = {}
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
        assert self._nursery.stdin is not None
        self._nursery.stdin.close()
        self._nursery.wait(60)
        for process in (self.process, *self._others):
            process.kill()
            process.wait(60)
        for fd in self._pidfds.values():
            os.close(fd)
        assert self._nursery.stdout is not None
        self._nursery.stdout.close()

    def _start(self, name: str) -> None:
        role = name.partition("-")[0]
        argv = [*self._common, "--name", name, "--coordinator", ",".join(self._control_addresses)]
        argv += self._options
        argv += ["--orphaned-after-s", str(ORPHANED_AFTER_S)]
        nursery = self._nursery
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        nursery.stdin.write(
            json.dumps({"role": role, "argv": argv, "log": str(self._folder / f"{name}.log")}) + "\n"
        )
        nursery.stdin.flush()
        pid = int(nursery.stdout.readline())
        self.num_started += 1
        try:
            self._pidfds[name] = os.pidfd_open(pid)
        except ProcessLookupError as error:
            raise AssertionError(
                f"{name} could not start: {(self._folder / f'{name}.log').read_text()[-2000:]}"
            ) from error

    def _keep(self) -> None:
        while not self._closing.wait(LOOK_S):
            ended = set(select.select(list(self._pidfds.values()), [], [], 0)[0])
            for name, fd in list(self._pidfds.items()):
                if fd in ended:
                    os.close(fd)
                    self._start(name)


@contextmanager
def forked(
    model: Path,
    folder: Path,
    *options: str,
    num_prefill: int = 2,
    num_decode: int = 2,
    num_coordinators: int = 1,
) -> Iterator[ForkedCluster]:
    """The cluster, ready, until the block ends."""
    cluster = ForkedCluster(
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
