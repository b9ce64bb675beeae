"""What the pure cores know of grammars: that a sequence has to wait for one, and what its shell has to
compile. See grammar.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class TokenMatcher(Protocol):
    """One sequence's place in its grammar."""

    def failure(self, num_outputs: int) -> str:
        """Why it could not go on from the first ``num_outputs`` tokens of the output (a limit was hit): from
        then on the mask allows end tokens alone. Empty: all is well. May be called while another thread calls
        ``mask``."""

    def mask(self, output_token_ids: Sequence[int]) -> NDArray[np.int32]:
        """Which tokens may follow this output: bit ``i % 32`` of word ``i // 32`` is set where token ``i``
        may. [ceil(vocab_size / 32)].

        The output grows from call to call; an end token is allowed only where the grammar may end.
        """


@dataclass(frozen=True, slots=True)
class CompileGrammar:
    """Have the grammar compiled, off the loop, and let it read the output that there is. Answered by the
    core's ``grammar_compiled`` or ``grammar_failed`` with the same key; without a key, it is only to lie
    ready for a sequence that will come."""

    key: tuple[int, int] | None
    grammar: bytes
    output_token_ids: Sequence[int] = ()
