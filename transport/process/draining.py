"""A worker that takes nothing new and is to leave. Pure."""

from __future__ import annotations


class Draining:
    """From when on it drains, and by when it is to have left."""

    def __init__(self, timeout_s: float) -> None:
        """``timeout_s``: for what it holds, where nobody names another."""
        self._timeout_s = timeout_s
        self._leave_by: float | None = None

    @property
    def has_begun(self) -> bool:
        return self._leave_by is not None

    def begin(self, now: float, timeout_s: float | None = None) -> bool:
        """Whether it had not begun. Said again, it may be to leave earlier, and never later."""
        leave_by = now + (self._timeout_s if timeout_s is None else timeout_s)
        first = self._leave_by is None
        self._leave_by = leave_by if self._leave_by is None else min(leave_by, self._leave_by)
        return first

    def is_overdue(self, now: float) -> bool:
        """Whether what is left here is to be given back."""
        return self._leave_by is not None and now >= self._leave_by
