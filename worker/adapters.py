"""The folder of adapters: a thread looks at it, reads what is new there, and puts it into slots."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Protocol

from ..engine.adapters.files import CONFIG, AdapterFile, read_adapter, stamp
from ..engine.adapters.slots import AdapterSlots
from ..engine.errors import AdapterError, is_out_of_memory

PERIOD_S = 2.0
FIRST_LOOK_S = 60.0  # that the worker's start waits: a folder may hang
STOP_S = 10.0  # in the midst of torch's work a process ends by SIGABRT
MAX_NAMES = 4096
MAX_NAME_CHARS = 256
_log = logging.getLogger(__name__)


class Resident(Protocol):
    """``ResidentAdapters``, as far as the folder goes."""

    @property
    def num_slots(self) -> int: ...
    def check(self, file: AdapterFile) -> None: ...
    def put(self, slot: int, file: AdapterFile) -> None: ...


def require_folder(folder: Path) -> None:
    """Raises AdapterError where there is no such folder of adapters."""
    if not folder.is_dir():
        raise AdapterError(f"--lora-folder {folder}: there is no such folder")
    if (folder / CONFIG).exists():
        raise AdapterError(
            f"--lora-folder {folder}: it is an adapter itself; name the folder that has the adapters' folders"
        )


class AdapterFolder:
    """Each subfolder has an adapter, whose name is the subfolder's. One that changes is read when it has been
    the same for two looks. No error here ends the worker, once it has looked."""

    def __init__(self, folder: Path, resident: Resident, period_s: float = PERIOD_S) -> None:
        """Returns when all that are there are ready."""
        self._folder, self._resident, self._period_s = folder, resident, period_s
        self.slots = AdapterSlots(resident.num_slots)
        self._names: dict[str, str] = {}  # and their contents
        self._seen: dict[str, object] = {}  # each one's stamp at the last look
        self._read: dict[str, object] = {}  # the stamp that it had when it was read
        self._logged: dict[str, str] = {}
        self._looked, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name="adapters", daemon=True)
        self._thread.start()
        if not self._looked.wait(FIRST_LOOK_S):
            _log.warning("--lora-folder %s: still reading; adapters are served as they are ready", folder)

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(STOP_S)

    # --- on the thread ---------------------------------------------------------------------------

    def _follow(self) -> None:
        while not self._stopping.is_set():
            self._look()
            self._looked.set()
            self._stopping.wait(self._period_s)

    def _look(self) -> None:
        try:
            with os.scandir(self._folder) as entries:
                shown = [entry for entry in entries if entry.name[0] != "."]
            # a link that leads nowhere hides no other entry
            found = sorted(e.name for e in shown if e.is_dir(follow_symlinks=False) or os.path.isdir(e.path))
        except OSError as error:
            self._warn("", f"--lora-folder {self._folder}: {error.strerror}; its adapters stay as they are")
            return
        wrong = [n for n in found if len(n) > MAX_NAME_CHARS or not n.isprintable()]
        present = [name for name in found if name not in wrong][:MAX_NAMES]
        self._warn("", f"no adapter can have the name {wrong[0]!a:.300}; rename its folder" if wrong else "")
        for known in (self._names, self._seen, self._read, self._logged):
            for name in known.keys() - {*present, "", "/"}:
                del known[name]
        self.slots.rename(self._names)
        unread = []  # each would take its time, and memory meanwhile
        for name in present:
            is_new = name not in self._names and name not in self._read
            if is_new and len({*self._names.values()}) >= self._resident.num_slots:
                unread.append(name)
            else:
                self._look_at(name)
        for name, content in list(self._names.items()):
            if content in self.slots.wanted():
                self._take_in(name)
        names = sorted([*self.slots.left_out(), *unread])
        left_out = f"--max-loras leaves {len(names)} adapters out: {', '.join(names):.300}; raise it"
        self._warn("/", left_out if names else "")

    def _look_at(self, name: str) -> None:
        try:
            now: object = stamp(self._folder / name)
        except (AdapterError, OSError) as error:
            now = f"{error}"
        same, self._seen[name] = self._seen.get(name) == now, now
        if now != self._read.get(name) and (same or not self._looked.is_set()):
            self._read[name] = now
            self._take_in(name)

    def _take_in(self, name: str) -> None:
        """Read it, and put it into a slot if there is one."""
        if self._stopping.is_set():
            return
        try:
            file = read_adapter(self._folder / name)
            self._resident.check(file)
        except AdapterError as error:
            self._warn(name, f"the adapter {self._folder / name} is not served: {error}")
            if (cause := error.__cause__) and (isinstance(cause, OSError) or is_out_of_memory(cause)):
                self._read.pop(name, None)  # the next time it may go well
                return
            self._names.pop(name, None)
            self.slots.rename(self._names)
            return
        self._names[name] = file.content
        self.slots.rename(self._names)
        if (slot := self.slots.take(file.content)) is not None:
            self._put(name, slot, file)

    def _put(self, name: str, slot: int, file: AdapterFile) -> None:
        try:
            self._resident.put(slot, file)
        except Exception as error:
            self.slots.filled(file.content, ready=False)
            if not is_out_of_memory(error):
                raise
            self._warn(name, f"no memory for the adapter {name}; lower --max-loras or --max-lora-rank")
        else:
            self.slots.filled(file.content)
            self._logged.pop(name, None)
            _log.info("the adapter %s is ready, of rank %d", name, file.rank)

    def _warn(self, about: str, what: str) -> None:
        """Log it once, until there is another problem."""
        if what and self._logged.get(about) != what:
            _log.warning("%s", what)
        self._logged[about] = what
