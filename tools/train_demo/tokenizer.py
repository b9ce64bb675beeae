"""The demo model's tokenizer: byte-level BPE over the training text, with one token for each chat role and
for the end of a turn."""

import json
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from train_demo.conversations import ConversationSampler
from train_demo.language_facts import paragraphs

END_OF_TEXT, SYSTEM, USER, ASSISTANT, END_OF_TURN = (
    "<|endoftext|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
)
SPECIAL_TOKENS = (END_OF_TEXT, SYSTEM, USER, ASSISTANT, END_OF_TURN)  # ids 0 to 4
WORDS = r"'s|[^\S\r\n]?[A-Za-z]+|\d|[^\S\r\n]?[^\sA-Za-z\d]|\s+"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SAMPLE_TURNS = 60_000
TOPIC_REPEATS = 16  # of all pydoc topics, beside the sampled turns: about a third of the words
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def train_tokenizer(vocab_size: int, max_length: int, folder: Path) -> Tokenizer:
    """Trains on sampled turns and writes tokenizer.json and tokenizer_config.json into folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sampled_text(), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "bos_token": None,
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return tokenizer


def _sampled_text() -> Iterator[str]:
    sampler = ConversationSampler(seed=0)
    for _ in range(SAMPLE_TURNS):
        turn = sampler.turn()
        yield turn.question
        yield turn.answer
    for _ in range(TOPIC_REPEATS):
        for topic in topics:
            yield from (" ".join(sentences) for sentences in paragraphs(topic))
