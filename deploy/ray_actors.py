"""A cluster's processes as Ray actors: one actor and one placement group a process, restarted by Ray.

``--steer-command`` runs it: ``python -m splitserve.deploy.ray_actors ADDRESS FOLDER PORT up ROLE``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray._private.state import state  # Ray has no public name for the nodes that it drains
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from .child_process import die_with
from .errors import LaunchError

COORDINATOR = "coordinator"
ON_HEAD = {"node:__internal_head__": 0.001}
RESTART_DELAY_S = 1.0
QUICK_S = 60.0
"""A process that fails sooner, the first time that it runs, is not started again: its settings are wrong."""
ANSWER_S = 60.0
LOOK_EVERY_S = 2.0
"""For a node that is to be given back."""


@dataclass(frozen=True)
class Spec:
    """What an actor runs. ``env``: besides its node's; ``files``: contents by path; ``needs``: of Ray."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    files: Mapping[str, str]
    needs: Mapping[str, float]


class Process:
    """An actor: runs one process on its node. Each ends with the other, and once Ray drains the node.

    Ray then starts both anew, under a new incarnation, unless the process was to end.
    """

    def __init__(self, spec: Spec, control_port: int) -> None:
        for path, content in spec.files.items():
            Path(path).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            new = Path(f"{path}.{os.getpid()}")
            new.touch(mode=0o600)
            new.write_text(content, encoding="utf-8")
            new.replace(path)
        context = ray.get_runtime_context()
        coordinator = f"tcp://{context.gcs_address.rpartition(':')[0]}:{control_port}"
        self._spec, self._port, self._group = spec, control_port, ray.util.get_current_placement_group()
        with warnings.catch_warnings(action="ignore"):  # Ray's own code calls what Ray deprecates
            self._first = not context.was_current_actor_reconstructed
        self._began = time.monotonic()
        self._leaving, self._for_good, self._moves = False, False, False
        self._child = subprocess.Popen(  # by the main thread, which lives as long as the actor
            [sys.executable, *spec.argv[1:]],
            env={**os.environ, "SPLITSERVE_COORDINATOR": coordinator, **spec.env},
            stdin=subprocess.DEVNULL,
            preexec_fn=die_with(os.getpid()),
        )
        signal.signal(signal.SIGTERM, lambda *_: self._terminate())
        self._watch = threading.Thread(target=self._run, daemon=True)
        self._watch.start()
        threading.Thread(target=self._leave_with, args=(context.get_node_id(),), daemon=True).start()

    def __repr__(self) -> str:
        return self._spec.name  # Ray puts it before each line of the log

    def spec(self) -> Spec:
        """Return what it runs."""
        return self._spec

    def leave(self) -> None:
        """End the process in good order, a worker by draining, and the actor for good."""
        self._for_good = True
        self._terminate()
        self._watch.join()

    def _leave_with(self, node: str) -> None:
        """End the process once Ray drains its node; a new actor runs it on another."""
        while node not in state.get_draining_nodes():
            time.sleep(LOOK_EVERY_S)
        self._moves = True
        self._terminate()

    def _terminate(self) -> None:
        if not self._leaving:  # a second signal would end a worker without a drain
            self._leaving = True
            self._child.terminate()

    def _run(self) -> None:
        """Wait for the process's end, then end the actor."""
        status = self._child.wait()
        quick = self._first and status > 0 and time.monotonic() - self._began < QUICK_S
        again = self._leaving or (status != 0 and not quick)
        print(f"ended with status {status}", flush=True)
        if self._moves and not self._for_good:
            self._have_successor()  # the group stays on its node until that ends, and so would this actor
        if self._for_good or self._moves or not again:
            remove_placement_group(self._group)
            ray.kill(ray.get_actor(self._spec.name))  # Ray does not restart it
        else:
            time.sleep(RESTART_DELAY_S)
            os._exit(1)

    def _have_successor(self) -> None:
        successor: Any = ray.remote(Successor)
        made = successor.options(num_cpus=0, lifetime="detached").remote(self._spec, self._port)
        try:
            ray.get(made.__ray_ready__.remote(), timeout=ANSWER_S)
        except RayError as error:
            print(f"waits for its node's end: no successor could be made: {error}", flush=True)
            os._exit(1)


class Successor:
    """An actor that makes a process's new one, once the old one is gone, and ends."""

    def __init__(self, spec: Spec, control_port: int) -> None:
        self._own = ray.get_runtime_context().current_actor
        threading.Thread(target=self._succeed, args=(spec, control_port), daemon=True).start()

    def _succeed(self, spec: Spec, control_port: int) -> None:
        deadline = time.monotonic() + ANSWER_S
        while (there := spec.name in ray.util.list_named_actors()) and time.monotonic() < deadline:
            time.sleep(0.1)
        if not there:
            _create(spec, control_port)
        ray.kill(self._own)


class RayActors:
    """The actors of one cluster, in a namespace of its run folder, whose files they get."""

    def __init__(
        self,
        folder: Path,
        control_port: int,
        *,
        num_cpus: Mapping[str, int] | None = None,
        devices: Mapping[str, str] | None = None,
        ranks: Mapping[str, int] | None = None,
        resources: Mapping[str, Mapping[str, float]] | None = None,
        leave_s: float = ANSWER_S,
        scales: bool = False,
        address: str = "auto",
        ports: Mapping[str, int] | None = None,
    ) -> None:
        """``control_port``: the coordinator's; ``num_cpus``, ``devices``, ``ranks``, further ``resources``,
        and the ``ports`` of those that connect to another: by worker; ``leave_s``: seconds in which a worker
        drains; ``scales``: whether the pool controller adds actors. Raises LaunchError."""
        self._folder, self._port, self._leave_s, self._scales = folder, control_port, leave_s, scales
        self._num_cpus, self._devices, self._resources = num_cpus or {}, devices or {}, resources or {}
        self._ranks, self._ports = ranks or {}, ports or {}
        if not ray.is_initialized():
            try:
                ray.init(address=address, namespace=f"splitserve:{folder}", logging_level="error")
            except (ConnectionError, RuntimeError) as error:
                raise LaunchError(
                    f"no Ray cluster answers here ({str(error).splitlines()[0]}): start one by "
                    "`ray start --head`, or name one by RAY_ADDRESS"
                ) from None
        self._address = ray.get_runtime_context().gcs_address

    def running(self) -> list[str]:
        """Return the names of the processes whose actors run or wait for resources."""
        names: list[str] = ray.util.list_named_actors()
        return names

    def start(self, name: str, role: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Make an actor, which waits for its resources: the coordinator's on the head node."""
        added = {key: value for key, value in env.items() if os.environ.get(key) != value}
        if role == COORDINATOR and self._scales:
            hook = [sys.executable, "-m", __spec__.name, self._address, str(self._folder), str(self._port)]
            added["SPLITSERVE_STEER_COMMAND"] = shlex.join(hook)
        paths = [*self._folder.glob("*.key"), self._folder / f"{name}.yaml"]
        files = {str(path): path.read_text(encoding="utf-8") for path in paths}
        own = {"CPU": self._num_cpus.get(name, 1), **self._gpu(name), **self._resources.get(name, {})}
        needs = ON_HEAD if role == COORDINATOR else own
        _create(Spec(name, argv, added, files, needs), self._ports.get(name, self._port))

    def stop(self, names: Sequence[str]) -> None:
        """End processes together, and give their resources back: workers drain."""
        left = []
        for name in names:
            with contextlib.suppress(ValueError):
                left.append(ray.get_actor(name).leave.remote())
        if left:
            ray.wait(left, num_returns=len(left), timeout=self._leave_s)
        for name in names:
            _remove_group(name)

    def restart(self, name: str, role: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """End a process, a worker by draining, and start it anew."""
        self.stop([name])
        self.start(name, role, argv, env)

    def host(self, deadline: float) -> str:
        """Return the coordinator's host: the head node's."""
        return str(self._address.rpartition(":")[0].strip("[]"))

    def log_of(self, name: str) -> str:
        """Return where a process's log is."""
        return f"above, and `ray list actors --filter name={name}`, then `ray logs actor --id ID`"

    def add(self, role: str) -> str:
        """Make one more worker like the first of ``role``, or like the first flexible one. Return its name.

        Raises LaunchError."""
        names = self.running()
        kind = next((kind for kind in (role, "worker") if f"{kind}-0" in names), None)
        if kind is None:
            raise LaunchError(f"no worker to copy: neither {role}-0 nor worker-0 runs")
        try:
            spec: Spec = ray.get(ray.get_actor(f"{kind}-0").spec.remote(), timeout=ANSWER_S)
        except (RayError, TimeoutError) as error:
            raise LaunchError(f"{kind}-0 does not answer: {error}") from None
        name = next(name for number in itertools.count(1) if (name := f"{kind}-{number}") not in names)
        start_as = ["--start-as", role] if kind == "worker" else []
        _create(replace(spec, name=name, argv=[*spec.argv, "--name", name, *start_as]), self._port)
        return name

    def _gpu(self, name: str) -> dict[str, float]:
        device = self._devices.get(name, "cpu")
        here = device.startswith("cuda") or (device == "auto" and ray.cluster_resources().get("GPU", 0))
        return {"GPU": self._ranks.get(name, 1)} if here else {}


def _create(spec: Spec, control_port: int) -> None:
    _remove_group(spec.name)  # of an actor that someone has killed
    group = placement_group([dict(spec.needs)], name=spec.name, lifetime="detached")
    actor: Any = ray.remote(Process)
    actor.options(
        name=spec.name,
        lifetime="detached",
        max_restarts=-1,
        num_cpus=spec.needs.get("CPU", 0),
        num_gpus=spec.needs.get("GPU", 0),
        scheduling_strategy=PlacementGroupSchedulingStrategy(group),
    ).remote(spec, control_port)


def _remove_group(name: str) -> None:
    with contextlib.suppress(ValueError):  # there is none
        remove_placement_group(ray.util.get_placement_group(name))


def main(address: str, folder: str, port: str, verb: str, what: str) -> None:
    """Add a worker of a role, or remove the actor of a worker that has drained."""
    actors = RayActors(Path(folder), int(port), address=address)
    if verb == "up":
        print(f"{actors.add(what)} waits for its resources")
    else:
        actors.stop([what.partition(":")[0]])


if __name__ == "__main__":
    main(*sys.argv[1:])
