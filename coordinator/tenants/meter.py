"""Metering: each request's record into the journal at once, and from a thread into the database, within a
second.

The hot path writes two lines of a file, at the end of the turn of the event loop. The thread takes what has
come together into the database in one transaction, and keeps at it while the database is away. What a killed
process has left behind, the next one finds in its journal: requests that had ended are kept, requests that
were running are kept as "lost", and the log names them.

A full disk takes no journal lines: records wait in memory, at most MAX_WAITING, and the log repeats it every
minute.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from datetime import UTC, datetime
from pathlib import Path

from ..listeners import ListenerFailures
from .usage_database import UsageDatabase, open_database
from .usage_journal import Soon, UsageJournal, at_once, journal_path, left_behind
from .usage_record import UsageRecord

WRITE_EVERY_S = 0.5
PRUNE_EVERY_S = 3600.0
MAX_JOURNAL_BYTES = 32 << 20
MAX_WAITING = 200_000
"""Records in memory that the database does not have, about 150 MB; beyond it the oldest are dropped."""
COMPLAIN_EVERY_S = 60.0
NAMED_IDS = 20
_log = logging.getLogger(__name__)


class UsageDropped(OSError):
    def __str__(self) -> str:
        return (
            f"more than {MAX_WAITING} records wait for the usage database, the oldest are dropped: those "
            "that the journal holds are metered at the next start, the others are NOT BILLED"
        )


class Meter:
    """``began`` and ``ended`` are called on the event loop and do not block."""

    def __init__(
        self,
        url: str,
        folder: Path,
        stem: str,
        write_every_s: float = WRITE_EVERY_S,
        soon: Soon = at_once,
        keep_s: float | None = None,
        failures: ListenerFailures | None = None,
    ) -> None:
        """``folder`` and ``stem``: where journals lie, and how their names begin. ``soon``: how journal lines
        are put off to the end of a turn of the loop. ``keep_s``: age at which records are deleted; None:
        never. Raises TenantsFileError."""
        self._keep_s, self._prune_at = keep_s, 0.0
        self.failures = failures or ListenerFailures()
        """Failures of the journal, and records that are dropped."""
        self._soon: Soon = lambda write: soon(lambda: self.failures.call("usage journal", write))
        self._database: UsageDatabase = open_database(url)
        self._folder, self._stem, self._every_s = folder, stem, write_every_s
        self._running: dict[str, UsageRecord] = {}
        self._pending: deque[UsageRecord] = deque()  # appended to by the loop, emptied by the thread
        self._num_journals = 0
        self._journal = self._new_journal()
        self._full: deque[tuple[UsageJournal, int]] = deque()  # and how many records had ended by then
        self._num_ended = self._num_kept = self._num_dropped = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="meter", daemon=True)

    @property
    def num_waiting(self) -> int:
        """Records that the database does not have yet."""
        return self._num_ended - self._num_kept - self._num_dropped

    def began(self, record: UsageRecord) -> None:
        """A request is taken in; what is not known yet is 0."""
        self._running[record.id] = record
        self._journal.began(record)

    def ended(self, record: UsageRecord) -> None:
        """It is over. Once for each that began."""
        self._running.pop(record.id, None)
        self._pending.append(record)
        self._num_ended += 1
        self._journal.ended(record)
        if len(self._pending) > MAX_WAITING:
            self._pending.popleft()
            self._num_dropped += 1
            self.failures.note("usage records", UsageDropped())
        if self._journal.num_bytes > MAX_JOURNAL_BYTES:
            # its file may be closed before the turn ends
            self.failures.call("usage journal", self._journal.flush)
            self._full.append((self._journal, self._num_ended))
            self._journal = self._new_journal()
            for running in self._running.values():
                self._journal.began(running)

    def start(self) -> None:
        """Before the first request. What killed processes left behind is taken in first."""
        self._thread.start()

    def stop(self) -> None:
        """After the last request: everything is in the database, or stays in a journal for the next
        process."""
        self._stopping.set()
        self._thread.join(30)
        if not self._pending and not self._running and not self._num_dropped and not self._thread.is_alive():
            self._journal.remove()
        self._database.close()

    def _new_journal(self) -> UsageJournal:
        self._num_journals += 1
        return UsageJournal(journal_path(self._folder, self._stem, self._num_journals), self._soon)

    # --- on the thread ---------------------------------------------------------------------------

    def _keep(self) -> None:
        complain_at = 0.0
        recovered = False
        while True:
            stopping = self._stopping.wait(self._every_s)
            try:
                if not recovered:
                    self._recover()
                    recovered = True
                self._write()
                self._prune(time.time())
                complain_at = 0.0
            except Exception as error:  # whatever a driver raises
                if time.monotonic() >= complain_at or stopping:
                    message = (
                        "the usage database cannot be written, %d records wait in memory and in the "
                        "journal %s: %s"
                    )
                    _log.error(message, self.num_waiting, self._journal.path, error)
                    complain_at = time.monotonic() + COMPLAIN_EVERY_S
            if stopping:
                return

    def _write(self) -> None:
        if self._pending:
            self._write_pending()
        # it may have become full after its last record was kept
        while self._full and self._full[0][1] <= self._num_kept:
            self._full.popleft()[0].remove()

    def _write_pending(self) -> None:
        journal = self._journal
        batch = [self._pending.popleft() for _ in range(len(self._pending))]
        try:
            self.failures.call("usage journal", journal.sync, time.time())
            self._database.insert(batch)
        except BaseException:
            self._pending.extendleft(reversed(batch))
            raise
        self._num_kept += len(batch)

    def _prune(self, now: float) -> None:
        """What is older than it is to be kept, once an hour."""
        if self._keep_s is None or now < self._prune_at:
            return
        self._prune_at = now + PRUNE_EVERY_S
        if number := self._database.prune(now - self._keep_s):
            _log.info("%d usage records were older than they are to be kept, and are deleted", number)

    def _recover(self) -> None:
        with left_behind(self._folder, self._stem) as left:
            if not left.paths:
                return
            self._database.insert([*left.ended, *left.lost])
            left.remove()
            whole = datetime.fromtimestamp(left.ended_at, UTC).isoformat(" ", "milliseconds")
            _log.warning(
                "a coordinator process was killed at about %s: %d requests of its journal had ended and are "
                "metered; %d were running and are metered as lost: %s%s",
                whole,
                len(left.ended),
                len(left.lost),
                ", ".join(record.id for record in left.lost[:NAMED_IDS]) or "none",
                ", ..." if len(left.lost) > NAMED_IDS else "",
            )
