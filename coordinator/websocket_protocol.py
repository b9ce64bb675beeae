"""uvicorn's WebSocket protocol, without a traceback in the log for each client that sends text that is none."""

from __future__ import annotations

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

INVALID_DATA = 1007  # RFC 6455, section 7.4.1


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """One connection after its upgrade."""

    def data_received(self, data: bytes) -> None:
        if self.handshake_initiated and not self.handshake_complete:
            self.transport.close()  # frames before the handshake's answer: no WebSocket client does so, and uvicorn cannot take it
        else:
            super().data_received(data)

    def send_receive_event_to_app(self) -> None:
        """Called with each whole message."""
        if self.curr_msg_data_type == "text" and not self.close_sent and not _is_text(b"".join(self.frames)):
            self.frames = []
            self.conn.send_close(INVALID_DATA)
            self.handle_parser_exception()
        else:
            super().send_receive_event_to_app()


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
