"""The server's certificate: its files, and the context for new connections, which follows them when they
change."""

from __future__ import annotations

import ssl
from pathlib import Path

from ....transport.channels.keys import stamp_of


class TlsFiles:
    """``certificate``: PEM, with the chain behind it; ``key``: PEM; None: it is in the certificate's file.
    Raises ValueError."""

    def __init__(self, certificate: Path, key: Path | None) -> None:
        self._certificate, self._key = certificate, key
        self._seen = self._state()
        self.context = self._load()

    def refresh(self) -> str:
        """Goes by the files where they have changed, and returns the certificate's: connections that begin
        afterwards see them. Raises ValueError where they are no good; what there was stays in force."""
        state = self._state()
        if state == self._seen:
            return ""
        self._seen = state
        # in a context of its own first: files that change one after the other do not fit for a moment
        self._load()
        self.context.load_cert_chain(self._certificate, self._key)
        return str(self._certificate)

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self._certificate, self._key, password=_no_password)
        except ssl.SSLError as error:
            files = f"{self._certificate} and {self._key}" if self._key else str(self._certificate)
            raise ValueError(
                f"{files}: not a certificate in PEM with its private key: {error.reason or error}"
            ) from error
        except OSError as error:
            raise ValueError(f"{error.filename or self._certificate}: {error.strerror or error}") from error
        return context

    def _state(self) -> list[tuple[int, int, int] | None]:
        return [stamp_of(path) for path in (self._certificate, self._key) if path is not None]


def _no_password() -> str:
    """Called for a key that is encrypted; else OpenSSL would ask on the terminal."""
    raise ValueError("an encrypted private key cannot be used: `openssl pkey -in KEY -out NEW` decrypts it")
