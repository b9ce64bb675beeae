"""A network of several hosts on one machine: network namespaces joined by TUN devices; every packet passes
through one process that can drop, delay or change it. Needs no root: a user namespace gives the rights. Needs
`unshare`, `nsenter`, `ip` and /dev/net/tun.

Host 0 is this process's own end, 10.77.0.1; the others are 10.77.0.2 and up. Loopback inside a host is its
own and always well.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU = 16_000
BULK_BYTES = 6_000
"""A TCP payload of this size is taken for KV blocks."""
INSIDE = "PACKET_NETWORK_INSIDE"
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Weather:
    """What happens to packets between two hosts other than host 0."""

    loss: float = 0.0  # share of packets
    delay_s: float = 0.0
    jitter_s: float = 0.0
    corrupt: float = 0.0  # share of bulk packets of which a byte changes, with a checksum to match
    cut: tuple[int, ...] = ()  # hosts that nobody reaches


def address(host: int) -> str:
    """Address of a host."""
    return f"10.77.0.{host + 1}"


def missing() -> str:
    """What this machine lacks, as a sentence; empty where a network can be made."""
    for program in ("unshare", "nsenter", "ip"):
        if shutil.which(program) is None:
            return f"there is no program {program!r} (packages util-linux and iproute2)"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "/dev/net/tun cannot be opened"
    tried = subprocess.run(
        ["unshare", "-Urn", "ip", "tuntap", "add", "dev", "t0", "mode", "tun"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"no user and network namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


def enter() -> None:
    """Starts this program again inside user, network and mount namespaces of its own, where it may make
    others and mount."""
    if INSIDE not in os.environ:
        command = ["unshare", "-Urnm", "--kill-child", sys.executable, *sys.orig_argv[1:]]
        os.execvpe("unshare", command, {**os.environ, INSIDE: "1"})


class PacketNetwork:
    """``num_hosts`` hosts beside this one. Only after ``enter``."""

    def __init__(self, num_hosts: int, seed: int) -> None:
        self._holders = [_hold(host) for host in range(1, num_hosts + 1)]
        pids = [None, *(holder.pid for holder in self._holders)]
        devices = [_tun(host, pid) for host, pid in enumerate(pids)]
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = ours
        self._forwarder = os.fork()
        if self._forwarder == 0:
            ours.close()
            die_with_parent()
            with contextlib.suppress(KeyboardInterrupt):
                _Forwarder(devices, theirs, seed).run()
            os._exit(0)
        theirs.close()
        for device in devices:
            os.close(device)

    def prefix(self, host: int) -> list[str]:
        """What to put before a command to run it on a host."""
        if host == 0:
            return []
        pid = self._holders[host - 1].pid
        return ["nsenter", f"--net=/proc/{pid}/ns/net", f"--uts=/proc/{pid}/ns/uts"]

    def entering(self, host: int) -> Callable[[], None]:
        """What a process (of one thread) calls to be on a host from then on."""
        pid = self._holders[host - 1].pid
        return partial(_enter_namespaces, f"/proc/{pid}/ns/net", f"/proc/{pid}/ns/uts")

    def set(self, weather: Weather) -> dict[str, int]:
        """Set the weather at once. Return the counts of packets' fates so far."""
        self._control.send(json.dumps(asdict(weather)).encode())
        counts: dict[str, int] = json.loads(self._control.recv(1 << 16))
        return counts

    def close(self) -> None:
        """All hosts are gone."""
        self._control.close()
        os.kill(self._forwarder, signal.SIGKILL)
        os.waitpid(self._forwarder, 0)
        for holder in self._holders:
            holder.kill()
            holder.wait()


class _Forwarder:
    """Reads packets from every host's device and writes each to the one that it is for, as the weather is."""

    def __init__(self, devices: list[int], control: socket.socket, seed: int) -> None:
        self._devices, self._control = devices, control
        self._random = random.Random(seed)
        self._weather = Weather()
        self._delayed: list[tuple[float, int, int, bytes]] = []
        self._counts = {"packets": 0, "lost": 0, "delayed": 0, "corrupted": 0, "cut": 0}

    def run(self) -> None:
        poller = select.epoll()
        for fd in (*self._devices, self._control.fileno()):
            poller.register(fd, select.EPOLLIN)
        hosts = {fd: host for host, fd in enumerate(self._devices)}
        while True:
            for fd, _ in poller.poll(self._until_next()):
                if fd in hosts:
                    self._take(hosts[fd], fd)
                elif not self._obey():
                    return
            while self._delayed and self._delayed[0][0] <= time.monotonic():
                _, _, target, packet = heapq.heappop(self._delayed)
                self._write(target, packet)

    def _until_next(self) -> float:
        return max(0.0, self._delayed[0][0] - time.monotonic()) if self._delayed else -1

    def _obey(self) -> bool:
        order = self._control.recv(1 << 16)
        if order:
            fields = json.loads(order)
            self._weather = Weather(**{**fields, "cut": tuple(fields["cut"])})
            self._control.send(json.dumps(self._counts).encode())
        return bool(order)

    def _take(self, source: int, fd: int) -> None:
        for _ in range(64):
            try:
                packet = os.read(fd, MTU + 64)
            except BlockingIOError:
                return
            target = packet[19] - 1 if packet[0] >> 4 == 4 else -1
            if 0 <= target < len(self._devices):
                self._counts["packets"] += 1
                self._forward(source, target, packet)

    def _forward(self, source: int, target: int, packet: bytes) -> None:
        weather, count = self._weather, self._counts
        if source == 0 or target == 0:
            self._write(target, packet)
        elif source in weather.cut or target in weather.cut:
            count["cut"] += 1
        elif weather.loss and self._random.random() < weather.loss:
            count["lost"] += 1
        else:
            if (
                weather.corrupt
                and self._random.random() < weather.corrupt
                and (changed := _corrupted(packet, self._random))
            ):
                count["corrupted"] += 1
                packet = changed
            if weather.delay_s:
                count["delayed"] += 1
                at = time.monotonic() + max(
                    0.0, weather.delay_s + self._random.uniform(-1, 1) * weather.jitter_s
                )
                heapq.heappush(self._delayed, (at, count["packets"], target, packet))
            else:
                self._write(target, packet)

    def _write(self, target: int, packet: bytes) -> None:
        with contextlib.suppress(BlockingIOError):  # a full queue drops, as networks do
            os.write(self._devices[target], packet)


def _corrupted(packet: bytes, draw: random.Random) -> bytes:
    """One byte in the middle of a bulk TCP payload changed, and the checksum with it (RFC 1624); empty where
    it is none."""
    header = (packet[0] & 15) * 4
    if packet[9] != socket.IPPROTO_TCP or len(packet) - header < BULK_BYTES:
        return b""
    data = bytearray(packet)
    # the first byte of a 16-bit word, counted from an even header
    at = draw.randrange(header + 2_000, len(data) - 1) & ~1
    before = struct.unpack_from("!H", data, at)[0]
    data[at] ^= 1 << draw.randrange(8)
    after = struct.unpack_from("!H", data, at)[0]
    checksum = struct.unpack_from("!H", data, header + 16)[0]
    total = (~checksum & 0xFFFF) + (~before & 0xFFFF) + after
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    struct.pack_into("!H", data, header + 16, ~total & 0xFFFF)
    return bytes(data)


def die_with_parent() -> None:
    """For ``preexec_fn``: this process is killed when the one that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _enter_namespaces(*paths: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    for path in paths:
        with open(path) as namespace:
            if libc.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"cannot enter {path}")


def _hold(host: int) -> subprocess.Popen[bytes]:
    """A process that keeps a host's namespaces, and signals when they exist."""
    script = f"hostname chaos-{host} && ip link set lo up && echo && exec sleep infinity"
    holder = subprocess.Popen(
        ["unshare", "--net", "--uts", "sh", "-c", script], stdout=subprocess.PIPE, preexec_fn=die_with_parent
    )
    assert holder.stdout is not None
    if not holder.stdout.readline():
        raise OSError(f"cannot make host {host}: see above")
    return holder


def _tun(host: int, pid: int | None) -> int:
    """A host's TUN device, configured; its descriptor, non-blocking."""
    ours, theirs = socket.socketpair()
    enter_host = ["nsenter", f"--net=/proc/{pid}/ns/net"] if pid is not None else []
    command = [*enter_host, sys.executable, __file__, str(theirs.fileno()), str(host)]
    subprocess.run(command, pass_fds=[theirs.fileno()], check=True)
    _, (device, *_), _, _ = socket.recv_fds(ours, 1, 1)
    ours.close()
    theirs.close()
    os.set_blocking(device, False)
    return device


def _make_tun(channel: int, host: int) -> None:
    """Inside the host's namespace: makes the device and hands its descriptor over."""
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", b"tun0", IFF_TUN | IFF_NO_PI))
    for arguments in (
        ["link", "set", "lo", "up"],
        ["addr", "add", f"{address(host)}/24", "dev", "tun0"],
        ["link", "set", "tun0", "mtu", str(MTU), "txqueuelen", "10000", "up"],
    ):
        subprocess.run(["ip", *arguments], check=True)
    with socket.socket(fileno=channel) as handed:
        socket.send_fds(handed, [b"."], [device])


if __name__ == "__main__":
    _make_tun(int(sys.argv[1]), int(sys.argv[2]))
