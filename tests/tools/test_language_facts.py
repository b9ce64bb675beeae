"""What the demo model is taught about the language: CPython's own sentences, found by their first words."""

import platform
import re
from pydoc_data.topics import topics

import pytest
from train_demo import language_facts
from train_demo.language_facts import REFERENCE, TABLE, joined, paragraphs, sentence

chosen_with_this_python = pytest.mark.skipif(
    platform.python_version() != TABLE["python"],
    reason=f"the sentences were chosen with Python {TABLE['python']}; others word some differently",
)
TOPIC = """
The "spam" statement
********************

   spam_stmt ::= "spam"

The "spam" statement is a *useful*
well-
known statement (see section Eggs).  It is written “spam” — as is
``eggs`` [1]:

* an item that goes on
  in its next line

object.__spam__(self)

   Called for "spam()".  It returns "\"".
"""


@pytest.fixture
def spam(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(topics, "spam", TOPIC)
    paragraphs.cache_clear()


@pytest.mark.usefixtures("spam")
def test_a_topic_becomes_plain_sentences() -> None:
    assert paragraphs("spam") == [
        ["The spam statement"],
        ["spam_stmt ::= spam"],
        ["The spam statement is a useful well-known statement.", 'It is written "spam" - as is eggs:'],
        ["an item that goes on in its next line"],
        ["object.__spam__(self)"],
        ["Called for spam().", 'It returns ".'],
    ]


@pytest.mark.usefixtures("spam")
@pytest.mark.parametrize(("begin", "count"), [("There is", 0), ("The spam statement", 2)])
def test_a_choice_that_is_not_one_sentence_is_refused(begin: str, count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} sentences, not one, of 'spam' begin with '{begin}'"):
        sentence(f"spam > {begin}")


def test_a_docstring_is_a_source_too() -> None:
    assert (
        sentence(f"doc {language_facts.__name__} > The demo model's answers")
        == (language_facts.__doc__ or "").split("\n")[0]
    )


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        (["f(x)", "Called for it."], "f(x): Called for it."),
        (["It has two steps:", "find it;", "bind it"], "It has two steps: find it; bind it."),
        (["It is used so, for example:", "It is more."], "It is used so. It is more."),
        (["It is written so:"], "It is written so."),
    ],
)
def test_joined_sentences_read_as_one_text(parts: list[str], text: str) -> None:
    assert joined(parts) == text


@chosen_with_this_python
def test_every_word_about_the_language_is_cpythons_own() -> None:
    choices = {choice for choices in TABLE["facts"].values() for choice in choices}
    originals = {
        source: _letters(REFERENCE.sub("", " ".join(text.split()))) for source, text in topics.items()
    }
    from_topics = [choice for choice in choices if choice.partition(" > ")[0] in originals]
    assert len(from_topics) > 300
    assert [
        choice
        for choice in from_topics
        if _letters(sentence(choice)) not in originals[choice.partition(" > ")[0]]
    ] == []


def test_no_two_subjects_share_a_name() -> None:
    names = [name for subject in TABLE["facts"] for name in subject.split(" | ")]
    assert len(names) == len(set(names))


def _letters(text: str) -> str:
    return re.sub(r"[\W_]+", "", text)
