"""Turns facts into questions and answers in many phrasings, and packs them into conversations."""

import random
import tomllib
from dataclasses import dataclass
from pathlib import Path

from train_demo.language_facts import language_facts
from train_demo.stdlib_facts import Fact, stdlib_facts

HERE = Path(__file__).parent
PHRASINGS = tomllib.loads((HERE / "phrasings.toml").read_text(encoding="utf-8"))
WHAT, USAGE, MEMBERS = PHRASINGS["what"], PHRASINGS["more"]["usage"], PHRASINGS["more"]["members"]
SYSTEM_PROMPTS, LEAD_INS = PHRASINGS["around"]["system_prompts"], PHRASINGS["around"]["lead_ins"]
HELD_OUT_PHRASINGS = PHRASINGS["held_out"]["what"]
CONCEPT_WEIGHT = 9.0
SMALL_TALK_SHARE, HOW_TO_SHARE = (
    0.04,
    0.06,
)  # of the turns; small talk has the questions that lie outside what the model knows
USAGE_SHARE = 0.3  # of the questions on something that can be called


@dataclass(frozen=True)
class Turn:
    """One question with its answer."""

    question: str
    answer: str


class ConversationSampler:
    """Draws training conversations; each fact comes up in proportion to a power of its weight (0: all
    alike)."""

    def __init__(self, seed: int, weight_power: float = 1.0) -> None:
        self._random = random.Random(seed)
        self.facts = load_facts()
        self._weights = [fact.weight**weight_power for fact in self.facts]
        self._chat = _read_pairs(HERE / "small_talk.txt")
        self._how_to = _read_pairs(HERE / "how_to.txt")
        by_name = {name: fact for fact in self.facts for name in fact.names}
        self._how_to_turns = [
            Turn(question, _how_to_answer(by_name[name]))
            for name, questions in self._how_to
            for question in questions
        ]

    def conversation(self) -> tuple[str | None, list[Turn]]:
        """A system prompt (mostly none) and enough turns to fill any sequence."""
        system = self._random.choice(SYSTEM_PROMPTS) if self._random.random() < 0.08 else None
        return system, [self.turn() for _ in range(24)]

    def turn(self) -> Turn:
        draw = self._random.random()
        if draw < SMALL_TALK_SHARE:
            answer, questions = self._random.choice(self._chat)
            return Turn(self._varied(self._random.choice(questions)), answer)
        if draw < SMALL_TALK_SHARE + HOW_TO_SHARE:
            turn = self._random.choice(self._how_to_turns)
            return Turn(self._varied(turn.question), turn.answer)
        return self._ask(self._random.choices(self.facts, self._weights)[0])

    def _ask(self, fact: Fact) -> Turn:
        name = fact.names[0] if self._random.random() < 0.5 else self._random.choice(fact.names)
        draw = self._random.random()
        if fact.usage and draw < USAGE_SHARE:
            return Turn(self._varied(self._random.choice(USAGE).format(n=name)), fact.usage)
        if fact.members and draw < USAGE_SHARE:
            return Turn(self._varied(self._random.choice(MEMBERS).format(n=name)), fact.members)
        phrasings = WHAT.get(fact.kind, WHAT["callable"])
        return Turn(self._varied(self._random.choice(phrasings).format(n=name)), fact.answer)

    def _varied(self, question: str) -> str:
        """The same question as a hurried person would type it."""
        if self._random.random() < 0.15:
            question = question.rstrip("?.") or question  # one fact is named "..."
        if self._random.random() < 0.15:
            question = question[0].lower() + question[1:]
        if self._random.random() < 0.06:
            question = self._random.choice(LEAD_INS) + question
        return question


def load_facts() -> list[Fact]:
    """The language's facts, then the library's; where both know a name, the language's text is kept."""
    concepts = [Fact(names, "concept", text, weight=CONCEPT_WEIGHT) for names, text in language_facts()]
    known = {name for fact in concepts for name in fact.names}
    return concepts + [fact for fact in stdlib_facts() if fact.names[0] not in known]


def _read_pairs(path: Path) -> list[tuple[str, list[str]]]:
    """Paragraphs whose first line is the answer (or a fact's name) and whose other lines are questions."""
    paragraphs = path.read_text(encoding="utf-8").strip().split("\n\n")[1:]
    return [(lines[0], lines[1:]) for lines in (paragraph.split("\n") for paragraph in paragraphs)]


def _how_to_answer(fact: Fact) -> str:
    if fact.usage:
        return fact.usage.replace("Call it as", "Use", 1)
    return fact.answer
