"""``doctor --peer`` finds what keeps two hosts apart, and measures how fast KV blocks go between them."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import zmq
from e2e.cluster import free_port
from rich.console import Console

from splitserve.cli.config import ConfigError, Sources, Value, load
from splitserve.cli.doctor import peer_check, peer_listener
from splitserve.cli.doctor.doctor import main
from splitserve.cli.doctor.peer_listener import Address, PeerListener
from splitserve.cli.settings import DoctorSettings
from splitserve.transport.channels.channels import RouterChannel
from splitserve.transport.channels.keys import generate_key, load_key
from splitserve.transport.errors import AddressError
from splitserve.transport.messages.fields import WIRE_VERSION
from splitserve.transport.messages.messages import Hello


@pytest.fixture
def key(tmp_path: Path) -> Path:
    generate_key(tmp_path / "cluster.key")
    return tmp_path / "cluster.key"


@contextmanager
def running(key: Path) -> Iterator[tuple[PeerListener, str]]:
    port = free_port(2)
    with closing(PeerListener(Address("127.0.0.1", port), load_key(key))) as listener:
        thread = threading.Thread(target=listener.run)
        thread.start()
        try:
            yield listener, f"127.0.0.1:{port}"
        finally:
            listener.stop()
            thread.join(30)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_check, "ROUNDS", 1)
    monkeypatch.setattr(peer_check, "ANSWER_S", 30.0)  # the machine may have other work
    monkeypatch.setattr(peer_check, "CONNECT_S", 30.0)


def check(peer: str, key: Path) -> tuple[int, str]:
    output = io.StringIO()
    return main(DoctorSettings(peer=peer, key_file=key), Console(file=output, width=200)), output.getvalue()


def test_two_hosts_that_fit(key: Path) -> None:
    with running(key) as (_, peer):
        for _ in range(2):  # the listener goes on
            status, message = check(peer, key)
            assert status == 0
    assert "the cluster key is the same on both hosts" in message
    assert f"wire version {WIRE_VERSION} here, {WIRE_VERSION} there" in message
    assert "movers of both: shm" in message  # it is this host
    assert "sealed, the default" in message
    assert message.count("GB/s; 1,000 tokens of Llama-3.1-8B take") == 2
    assert "the two hosts can serve together" in message


def test_another_key_is_told(key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_check, "CONNECT_S", 0.7)
    generate_key(tmp_path / "other.key")
    with running(key) as (_, peer):
        status, message = check(peer, tmp_path / "other.key")
    assert status == 1
    assert "does not accept this cluster key" in message
    assert "-> copy the key" in message


def test_what_keeps_the_hosts_apart_is_named(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    status, message = check(f"127.0.0.1:{port}", key)
    assert status == 1
    assert f"nothing listens on port {port}" in message
    assert "run there `splitserve doctor --listen" in message
    assert "has no address here" in check("no-such-host.invalid", key)[1]

    def dropped(*_: object, **__: object) -> socket.socket:
        raise TimeoutError

    monkeypatch.setattr(peer_check.socket, "create_connection", dropped)
    assert "a firewall may drop it: allow TCP to port 7710 of 192.0.2.1" in check("192.0.2.1", key)[1]


def test_a_clock_that_is_off_is_a_note(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        peer_listener,
        "time",
        type("Off", (), {"time": lambda: time.time() - 90, "monotonic": time.monotonic, "sleep": time.sleep}),
    )
    monkeypatch.setattr(peer_listener, "WIRE_VERSION", 99)
    with running(key) as (_, peer):
        status, message = check(peer, key)
    assert status == 1
    off = re.search(r"its clock is ([\d.]+) s behind this one's", " ".join(message.split()))
    assert off is not None, message
    assert float(off[1]) == pytest.approx(90, abs=10)  # as exact as the shortest round trip
    assert "it speaks wire version 99" in message


def test_blocks_that_are_changed_on_the_way_are_told(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_listener, "checksum_of", lambda _: "0")
    with running(key) as (_, peer):
        status, message = check(peer, key)
    assert status == 1
    assert "what came is not what was sent" in message


def test_a_running_worker_shows_port_and_key(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_check, "ANSWER_S", 0.3)
    channel = RouterChannel.bind("tcp://127.0.0.1:*", load_key(key), [Hello])
    try:
        status, message = check(channel.address.removeprefix("tcp://"), key)
    finally:
        channel.close()
    assert status == 0
    assert "the cluster key is the same" in message
    assert "a worker or a coordinator, which answers no doctor" in message


def test_a_stranger_gets_no_answer(key: Path) -> None:
    with running(key) as (_, peer), zmq.Context() as context, context.socket(zmq.REQ) as plain:
        plain.linger = 0
        plain.connect(f"tcp://{peer}")
        plain.send(b"\x81\xa4kind\xa3who")
        assert not plain.poll(500)


def test_a_port_in_use_and_a_missing_key_are_refused(key: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(AddressError, match="is a worker running there"),
    ):
        PeerListener(Address("127.0.0.1", taken.getsockname()[1]), load_key(key))
    with pytest.raises(ConfigError, match="--listen and --peer need --key-file"):
        load("doctor", {"peer": Value("beta", "--peer")}, Sources.read(None, {}))
    assert Address.of("beta") == Address("beta", 7710)
    assert Address.of("tcp://[::1]:5") == Address("[::1]", 5)
    assert Address.of("[fe80::1]") == Address("[fe80::1]", 7710)


@pytest.fixture
def two_hosts() -> Iterator[str]:
    """Two network namespaces with a cable between them; 10.99.0.2 is the other one's address."""
    names = [f"ss-{os.getpid()}-{end}" for end in "ab"]
    a, b = (f"ss{os.getpid() % 100_000}{end}" for end in "ab")

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)

    if os.getuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    try:
        ip("netns", "add", names[0])
    except subprocess.CalledProcessError:
        pytest.skip("this machine makes no network namespaces")
    try:
        ip("netns", "add", names[1])
        ip("link", "add", a, "netns", names[0], "type", "veth", "peer", "name", b, "netns", names[1])
        for namespace, link, address in zip(names, (a, b), ("10.99.0.1", "10.99.0.2"), strict=True):
            ip("-n", namespace, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", namespace, "link", "set", link, "up")
            ip("-n", namespace, "link", "set", "lo", "up")
        yield "|".join(names)
    finally:
        for namespace in names:
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True, timeout=20)


def test_the_commands_of_the_docs_on_two_hosts(two_hosts: str, key: Path) -> None:
    alpha, beta = two_hosts.split("|")
    doctor = [sys.executable, "-m", "splitserve.cli.main", "doctor", "--key-file", str(key)]
    listen = ["ip", "netns", "exec", beta, *doctor, "--listen", "0.0.0.0"]
    with subprocess.Popen(
        listen, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    ) as listener:
        assert listener.stdout is not None
        assert "listening on 0.0.0.0, ports 7710 and 7711" in listener.stdout.readline()
        argv = ["ip", "netns", "exec", alpha, *doctor, "--peer", "10.99.0.2"]
        ran = subprocess.run(argv, capture_output=True, text=True, timeout=100, check=False)
        listener.send_signal(signal.SIGINT)
        assert listener.wait(60) == 0
    assert ran.returncode == 0, ran.stdout
    assert "KV port 10.99.0.2:7711 can be reached" in ran.stdout
    assert "GB/s" in ran.stdout
