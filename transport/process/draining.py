"""A role that accepts nothing new and ends once nothing is left. Pure."""

from __future__ import annotations


class Draining:
    """Whether draining has begun, and the deadline for its end."""

    def __init__(self, timeout_s: float) -> None:
        """``timeout_s``: how long to drain by default, in seconds."""
        self._timeout_s = timeout_s
        self._leave_by: float | None = None

    @property
    def has_begun(self) -> bool:
        return self._leave_by is not None

    def begin(self, now: float, timeout_s: float | None = None) -> bool:
        """Begin draining. Return whether it had not begun. A second call may bring the deadline forward,
        never back."""
        leave_by = now + (self._timeout_s if timeout_s is None else timeout_s)
        first = self._leave_by is None
        self._leave_by = leave_by if self._leave_by is None else min(leave_by, self._leave_by)
        return first

    def is_overdue(self, now: float) -> bool:
        """Return whether what is left must be given back now."""
        return self._leave_by is not None and now >= self._leave_by
