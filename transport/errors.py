"""The errors of this folder.

TransportError
├── BadMessage     bytes that are no message we accept, or a message too large to send
├── KeyFileError   a cluster key file that is missing, unsafe or not one of ours
├── AddressError   an address that cannot be listened on or connected to
├── TracingUnavailable   traces were asked for, and OpenTelemetry is not installed
└── MoverError     a KV mover that cannot be set up, or that fails
    └── PeerEnded  no fault of the mover: the peer's process has ended
"""


class TransportError(Exception):
    """Base of all errors raised by ``transport``."""


class BadMessage(TransportError):
    """Bytes that are no message we accept, or a message too large to send."""


class KeyFileError(TransportError):
    """A cluster key file that is missing, unsafe or not one of ours."""


class AddressError(TransportError):
    """An address that cannot be listened on or connected to."""


class TracingUnavailable(TransportError):
    """Traces were asked for, and OpenTelemetry is not installed."""


class MoverError(TransportError):
    """A KV mover that cannot be set up, or that fails."""


class PeerEnded(MoverError):
    """The peer's process has ended: another mover would not reach it either."""
