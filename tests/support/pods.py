"""Processes that stand in for the pods of rendered manifests, with their commands, probes and hooks.

A pod is a process of its own PID namespace, as its first process, with an address of 127.0.1.0/24 and an
/etc/hosts of its cluster in place of DNS. Paths of volumes become folders; every image is this Python.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from e2e.cluster import PATIENCE_S, START_S, free_port, wait_for

UNSHARE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


def can_stand_in() -> bool:
    """Whether this user may make PID and mount namespaces."""
    try:
        return subprocess.run([*UNSHARE, "true"], capture_output=True, timeout=60).returncode == 0
    except FileNotFoundError:
        return False


class Pod:
    """One pod's main container, from its start to its end."""

    def __init__(
        self, name: str, address: str, spec: Mapping[str, Any], hosts: Path, paths: dict[str, str]
    ) -> None:
        """``paths``: folder of this machine by mount path."""
        self.name, self.address, self._spec = name, address, spec
        [self._container] = spec["containers"]
        state = hosts.parent / f"{name}-{address}"
        state.mkdir()
        self.log = state / "log"
        self._paths = {**paths, "/var/lib/splitserve": str(state)}
        self._ports = {port["name"]: port["containerPort"] for port in self._container["ports"]}
        self._own_health_port = free_port()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **dict(self._environment(name, address))}
        command = [sys.executable, "-m", "splitserve.cli.main", self._container["command"][1]]
        command += [self._here(argument, environment) for argument in self._container["args"]]
        script = 'mount --bind "$0" /etc/hosts && exec "$@"'
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*UNSHARE, "sh", "-c", script, str(hosts), *command],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    def _environment(self, name: str, address: str) -> Iterator[tuple[str, str]]:
        fields = {"metadata.name": name, "status.podIP": address}
        for entry in self._container["env"]:
            if "valueFrom" in entry:
                yield entry["name"], fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
            elif entry["name"] != "TMPDIR":
                yield entry["name"], self._local(entry["value"])

    def _here(self, argument: str, environment: Mapping[str, str]) -> str:
        argument = re.sub(r"\$\((\w+)\)", lambda match: environment[match[1]], argument)
        if argument.startswith("--health-port="):  # which is listened on at all addresses
            return f"--health-port={self._own_health_port}"
        return self._local(argument).replace("0.0.0.0", self.address)

    def _local(self, text: str) -> str:
        for path, folder in self._paths.items():
            text = text.replace(path, folder)
        return text

    @property
    def init(self) -> int:
        """The process id, outside its namespace, of the container's first process."""
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children")
        wait_for(f"{self.name} has a process", lambda: bool(children.read_text()))
        return int(children.read_text())

    def passes(self, probe: str) -> bool:
        """Whether its ``startupProbe``, ``readinessProbe`` or ``livenessProbe`` succeeds."""
        get = self._container[probe]["httpGet"]
        port = self._own_health_port if get["port"] == "health" else self._ports[get["port"]]
        try:
            return httpx.get(f"http://{self.address}:{port}{get['path']}", timeout=10).status_code == 200
        except httpx.TransportError:
            return False

    def wait_ready(self) -> None:
        """Wait for the start-up probe, then for readiness, like a kubelet."""
        for probe in ("startupProbe", "readinessProbe"):
            wait_for(f"{probe} of {self.name}", partial(self._settled, probe), START_S)
            assert self._process.poll() is None, self.log.read_text()[-4000:]

    def _settled(self, probe: str) -> bool:
        return self.passes(probe) or self._process.poll() is not None

    def begin_delete(self) -> subprocess.Popen[bytes] | None:
        """Run the preStop hook; return its process, if it is one."""
        hook = self._container["lifecycle"]["preStop"]
        if "sleep" in hook:
            time.sleep(hook["sleep"]["seconds"])
            return None
        enter = ["nsenter", "--target", str(self.init), "--pid", "--mount"]
        return subprocess.Popen([*enter, *hook["exec"]["command"]], stderr=subprocess.DEVNULL)

    def delete(self) -> int:
        """Hook, SIGTERM if the process is still there, the grace period; return the exit status. Raises
        TimeoutExpired where a kubelet would kill it."""
        deadline = time.monotonic() + self._spec["terminationGracePeriodSeconds"] + PATIENCE_S
        hook = self.begin_delete()
        if hook is not None:
            hook.wait(deadline - time.monotonic())
        elif self._process.poll() is None:
            os.kill(self.init, signal.SIGTERM)
        return self._process.wait(deadline - time.monotonic())

    def kill(self) -> None:
        """End it at once, with all in its namespace."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(PATIENCE_S)


class Pods:
    """All pods of a release."""

    def __init__(self, objects: list[dict[str, Any]], folder: Path, paths: dict[str, str]) -> None:
        self._folder, self._paths = folder, paths
        self._hosts = folder / "hosts"
        self._sets: dict[str, dict[str, Any]] = {}
        self._services: dict[str, dict[str, Any]] = {}
        self._addresses = iter(range(1, 250))
        self.num_started = 0
        self.running: dict[str, Pod] = {}
        self.know(objects)

    def know(self, objects: list[dict[str, Any]]) -> None:
        """Learn these workloads and Services, and publish the Services' names."""
        self._sets |= {
            o["metadata"]["name"]: o for o in objects if o["kind"] in ("Deployment", "StatefulSet")
        }
        self._services |= {o["metadata"]["name"]: o["spec"] for o in objects if o["kind"] == "Service"}
        self._publish()

    def start(self, name: str, number: int) -> Pod:
        """Start pod ``number`` of a Deployment or StatefulSet, under a new address."""
        pod, address = f"{name}-{number}", f"127.0.1.{next(self._addresses)}"
        self._publish(**{pod: address})
        self.num_started += 1
        self.running[pod] = Pod(
            pod, address, self._sets[name]["spec"]["template"]["spec"], self._hosts, self._paths
        )
        return self.running[pod]

    def start_all(self) -> None:
        """Start all replicas at once, and wait until they are ready."""
        for name, found in self._sets.items():
            for number in range(found["spec"]["replicas"]):
                self.start(name, number)
        for pod in self.running.values():
            pod.wait_ready()

    def replace(self, name: str, number: int) -> tuple[int, Pod]:
        """Delete a pod and start its successor; return the exit status and the successor, which is ready."""
        status = self.running[f"{name}-{number}"].delete()
        pod = self.start(name, number)
        pod.wait_ready()
        return status, pod

    def forget(self, name: str) -> None:
        """Take a pod that has ended off its Services."""
        del self.running[name]
        self._publish()

    def kill_all(self) -> None:
        """End all of them."""
        for pod in self.running.values():
            pod.kill()

    def _publish(self, **more: str) -> None:
        """Write the headless Services' names, in place: pods have mounted the file."""
        addresses = {pod: running.address for pod, running in self.running.items()} | more
        lines = ["127.0.0.1 localhost"]
        for service, spec in self._services.items():
            if spec.get("clusterIP") == "None":
                selected = [
                    address
                    for pod, address in addresses.items()
                    if spec["selector"].items()
                    <= self._sets[pod.rpartition("-")[0]]["spec"]["template"]["metadata"]["labels"].items()
                ]
                lines += [f"{address} {service}" for address in selected]
        self._hosts.write_text("\n".join(lines) + "\n")
