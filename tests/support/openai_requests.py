"""Requests that tests of OpenAI's client share."""

from __future__ import annotations

from typing import Any

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi!"}]
GREEDY: Any = {"model": "tiny", "temperature": 0}
