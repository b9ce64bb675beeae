"""``splitserve doctor --peer``: whether workers of this host and of another one could serve together, and how
fast.

port     TCP, control and KV            key      CURVE handshake
version  wire, splitserve               clock    offset at the shortest of a few round trips
movers   those that both hosts offer    rate     64 MiB through the tcp mover, sealed and in the clear,
                                                 checked by checksum
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import TypeVar

import msgspec
import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from ... import __version__
from ...transport.channels.keys import ClusterKey, load_key
from ...transport.errors import KeyFileError, MoverError
from ...transport.messages.fields import WIRE_VERSION, is_neighbour
from ...transport.process.host import host_identity
from ..checks import Finding
from ..extras import missing_for
from ..settings import DoctorSettings
from .peer_listener import (
    ARRIVAL_S,
    LAYER_BYTES,
    MAX_MESSAGE_BYTES,
    NUM_BLOCKS,
    NUM_LAYERS,
    TOTAL_BYTES,
    Address,
    Came,
    Opened,
    Question,
    Who,
    checksum_of,
    movers,
)  # fmt: skip

CONNECT_S = 3.0
ANSWER_S = 5.0
MOST_OFF_S = 1.0  # beyond it logs, usage records and the expiry of keys of the two hosts do not fit together
ROUND_TRIPS, ROUNDS = 8, 3
CHAT_BYTES = 128 << 10  # KV cache of one token of Llama-3.1-8B in bfloat16
Answer = TypeVar("Answer")


class NoAnswer(Exception):
    """The peer is a member of the cluster and does not answer the doctor."""


def check_peer(settings: DoctorSettings) -> Iterator[Finding]:
    """Yield findings up to the first problem: later ones could be its consequences."""
    assert settings.key_file is not None, "checked with the settings"
    address = Address.of(settings.peer)
    try:
        key = load_key(settings.key_file)
    except KeyFileError as error:
        yield Finding("problem", str(error))
        return
    if problem := _unreachable(address.host, address.port):
        yield problem
        return
    yield Finding("ok", f"control port {address.host}:{address.port} can be reached")
    with closing(PeerSocket(address, key)) as peer:
        if not peer.handshake():
            advice = (
                "copy the key of one host to the other; see also that splitserve is what listens "
                f"there ({settings.key_file} is ours)"
            )
            yield Finding(
                "problem", f"{address.host}:{address.port} does not accept this cluster key", advice
            )
            return
        yield Finding("ok", "the cluster key is the same on both hosts")
        try:
            yield from _with(peer, address)
        except NoAnswer:
            yield Finding(
                "note",
                (
                    "what listens there is a worker or a coordinator, which answers no doctor: clock, "
                    "movers and bandwidth were not checked"
                ),
                (
                    "stop it for a moment and run there `splitserve doctor --listen "
                    f"0.0.0.0:{address.port} --key-file ...`"
                ),
            )


def _with(peer: PeerSocket, address: Address) -> Iterator[Finding]:
    """Raises NoAnswer."""
    who, offset, round_trip = _clock(peer)
    if not is_neighbour(who.wire):
        text = (
            f"it speaks wire version {who.wire} (splitserve {who.version}), this host {WIRE_VERSION} "
            f"({__version__})"
        )
        yield Finding("problem", text, "upgrade the older one: only neighbouring wire versions work together")
    else:
        yield Finding(
            "ok",
            f"wire version {WIRE_VERSION} here, {who.wire} there (splitserve {__version__}, {who.version})",
        )
    way = "ahead of" if offset > 0 else "behind"
    text = f"its clock is {abs(offset):.3f} s {way} this one's; a round trip takes {1e3 * round_trip:.2f} ms"
    off = abs(offset) > max(MOST_OFF_S, round_trip)
    advice = (
        "set both by NTP: logs, usage records and the expiry of keys go by them (serving itself does not)"
    )
    yield Finding("note", text, advice) if off else Finding("ok", text)
    if not who.data_address or missing_for("worker"):
        which = "that host" if not who.data_address else "this host"
        yield Finding(
            "note",
            f"{which} can run no worker: no KV blocks were sent",
            "pip install 'splitserve[worker]' there",
        )
        return
    same = who.host == host_identity()
    shared = [
        mover for mover in movers() if mover in who.movers and (same or mover not in ("shm", "cuda_ipc"))
    ]
    yield (
        Finding("ok", f"movers of both: {', '.join(shared)}; auto takes {shared[0]}")
        if shared
        else Finding(
            "problem",
            f"no mover is common: {', '.join(movers())} here, {', '.join(who.movers)} there",
            "choose one by --mover on both",
        )
    )
    yield from _bandwidth(peer, who, address)


def _clock(peer: PeerSocket) -> tuple[Who, float, float]:
    """Return the peer's description, by how many seconds its clock is ahead, and the shortest round trip,
    which measured that. Raise NoAnswer."""
    trips = []
    for _ in range(ROUND_TRIPS):
        began, asked = time.monotonic(), time.time()
        who = peer.ask(Question("who"), Who)
        took = time.monotonic() - began
        trips.append((took, who.now - (asked + took / 2), who))
    took, offset, who = min(trips, key=lambda trip: trip[0])
    return who, offset, took


def _bandwidth(peer: PeerSocket, who: Who, address: Address) -> Iterator[Finding]:
    """Raises NoAnswer."""
    from ...transport.movers.tcp.wire import DataAddress

    data = replace(DataAddress.parse(who.data_address), host=address.host.strip("[]"))
    if problem := _unreachable(data.host, data.port):
        yield problem
        return
    yield Finding("ok", f"KV port {data.host}:{data.port} can be reached")
    pool = np.random.default_rng(0).integers(0, 256, (NUM_BLOCKS, NUM_LAYERS, LAYER_BYTES), dtype=np.uint8)
    for plain in (False, True):
        how = "in the clear (--plaintext-kv)" if plain else "sealed, the default"
        try:
            rate = _rate(peer, str(data), pool, plain)
        except MoverError as error:
            yield Finding(
                "problem",
                f"KV blocks did not arrive, {how}: {error}",
                f"open port {data.port} of {data.host} for this host",
            )
            return
        prompt_ms = 1000 * CHAT_BYTES / rate * 1e3
        yield Finding(
            "ok",
            (
                f"KV blocks by tcp, {how}: {rate / 1e9:.2f} GB/s; 1,000 tokens of Llama-3.1-8B take "
                f"{prompt_ms:,.0f} ms"
            ),
        )


def _rate(
    peer: PeerSocket, data_address: str, pool: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], plain: bool
) -> float:
    """Bytes per second, the best of some rounds. Raises MoverError where blocks are lost or changed,
    NoAnswer."""
    from ...transport.movers.tcp.source import TcpSource

    best, expected = 0.0, checksum_of(pool)
    source = TcpSource(data_address, pool, plain)
    try:
        for _ in range(ROUNDS):
            opened = peer.ask(Question("open"), Opened)
            began = time.monotonic()
            source.put(opened.lease, opened.secret, [(block, block, block) for block in range(NUM_BLOCKS)])
            came = peer.ask(Question("wait", opened.lease), Came, ARRIVAL_S + ANSWER_S)
            took = time.monotonic() - began
            source.poll()
            if came.num_blocks < NUM_BLOCKS:
                raise MoverError(f"{came.num_blocks} of {NUM_BLOCKS} came within {ARRIVAL_S:.0f} s")
            if came.checksum != expected:
                raise MoverError("what came is not what was sent")
            best = max(best, TOTAL_BYTES / took)
    finally:
        source.close()
    return best


class PeerSocket:
    """Questions and answers over CURVE. The CURVE handshake alone shows whether both have the same key."""

    def __init__(self, address: Address, key: ClusterKey) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.REQ)
        self._socket.linger, self._socket.maxmsgsize = 0, MAX_MESSAGE_BYTES
        self._socket.ipv6 = "[" in address.host
        self._socket.curve_serverkey = self._socket.curve_publickey = key.public
        self._socket.curve_secretkey = key.secret
        self._socket.reconnect_ivl = 50
        self._events = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._socket.connect(address.zmq())

    def handshake(self) -> bool:
        """A coordinator whose key is being changed turns some attempts away, so it tries for a while."""
        return bool(self._events.poll(int(1000 * CONNECT_S))) and bool(recv_monitor_message(self._events))

    def ask(self, question: Question, kind: type[Answer], patience_s: float = ANSWER_S) -> Answer:
        """Raises NoAnswer."""
        self._socket.send(msgspec.msgpack.encode(question))
        if not self._socket.poll(int(1000 * patience_s)):
            raise NoAnswer
        try:
            return msgspec.msgpack.decode(self._socket.recv(), type=kind)
        except msgspec.MsgspecError as error:
            raise NoAnswer from error

    def close(self) -> None:
        self._socket.disable_monitor()
        self._events.close(0)
        self._socket.close(0)
        self._context.term()


def _unreachable(host: str, port: int) -> Finding | None:
    """Why no connection can be made, with what to do."""
    try:
        with socket.create_connection((host.strip("[]"), port), timeout=CONNECT_S):
            return None
    except socket.gaierror as error:
        return Finding(
            "problem",
            f"the name {host} has no address here ({error.strerror})",
            "give an address, or mend DNS or /etc/hosts",
        )
    except ConnectionRefusedError:
        advice = (
            f"run there `splitserve doctor --listen 0.0.0.0:{port} --key-file ...`; if it runs, it "
            "listens on another address or port"
        )
        return Finding("problem", f"{host} is there, but nothing listens on port {port}", advice)
    except TimeoutError:
        advice = f"a firewall may drop it: allow TCP to port {port} of {host} from this host"
        return Finding("problem", f"no answer from {host}:{port} within {CONNECT_S:.0f} s", advice)
    except OSError as error:
        return Finding(
            "problem",
            f"{host}:{port} cannot be reached ({error.strerror})",
            "look at the address, and at `ip route get`",
        )
