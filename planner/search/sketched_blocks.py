"""The KV blocks of a sketched worker, by number. Pure."""

from __future__ import annotations


class SketchBlocks:
    """Each running sequence begins a block with every step of one number, modulo the size of a block."""

    def __init__(self, num_blocks: int, size: int) -> None:
        self.num_blocks, self.size = num_blocks, size
        self.num_free = num_blocks  # before the steps that run
        self._begins = [0] * size  # sequences, by that number
        self.num_seqs = 0

    def num_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.size)

    def enter(self, step: int, num_tokens: int) -> int:
        """A sequence of this length has its blocks; this is its first step. Return its number."""
        begins = (step - num_tokens) % self.size
        self._begins[begins] += 1
        self.num_seqs += 1
        return begins

    def leave(self, begins: int, num_tokens: int) -> None:
        """The sequence of this number gives back its blocks."""
        self._begins[begins] -= 1
        self.num_seqs -= 1
        self.num_free += self.num_for(num_tokens)

    def growth(self, step: int, count: int) -> int:
        """Return the blocks that begin in ``count`` steps from this one on."""
        rounds, rest = divmod(count, self.size)
        num, first, begins = rounds * self.num_seqs, step % self.size, self._begins
        num += sum(begins[first : first + rest])
        return num + sum(begins[: first + rest - self.size]) if first + rest > self.size else num

    def steps_that_fit(self, step: int, most: int) -> int:
        """Return how many steps, at most this number, have their blocks."""
        num_free = self.num_free
        if self.num_seqs * (most // self.size + 1) <= num_free or self.growth(step, most) <= num_free:
            return most
        fit = num_free // self.num_seqs * self.size
        while self.growth(step, fit + 1) <= num_free:
            fit += 1
        return fit
