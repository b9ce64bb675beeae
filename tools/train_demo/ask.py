"""Asks the demo model, greedily: `cd tools; python -m train_demo.ask "What is zip?"`, or with no question
measures how well it answers.

What is measured: facts asked in phrasings that training never uses; an answer counts as on topic if its first
sentence is the right fact's, and as exact if all of it is.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import load_file
from tokenizers import Tokenizer
from train_demo.conversations import HELD_OUT_PHRASINGS, load_facts
from train_demo.docstring_prose import first_sentence
from train_demo.llama import Llama, LlamaShape
from train_demo.tokenizer import ASSISTANT, END_OF_TURN, USER

DEMO_MODEL = Path(__file__).parents[2] / "deploy" / "demo_model"
MAX_NEW_TOKENS = 120
BATCH = 16


def main(
    questions: Annotated[
        list[str] | None, typer.Argument(help="What to ask, each on its own; none measures the model.")
    ] = None,
    model_folder: Annotated[
        Path, typer.Option("--model", help="The folder with the weights and the tokenizer.")
    ] = DEMO_MODEL,
    facts: Annotated[int, typer.Option(help="How many facts the measurement asks for.")] = 150,
) -> None:
    """Print the answers to the questions, or how good the answers to held-out phrasings are."""
    model, tokenizer = load(model_folder)
    if not questions:
        measure(model, tokenizer, facts)
    for question in questions or []:
        print(f"**{question}**\n\n> {answers(model, tokenizer, [question])[0]}\n")


def load(folder: Path) -> tuple[Llama, Tokenizer]:
    """The model in float32 and its tokenizer."""
    model = Llama(LlamaShape())
    model.load_state_dict(
        {name: weight.float() for name, weight in load_file(folder / "model.safetensors").items()}
    )
    return model, Tokenizer.from_file(str(folder / "tokenizer.json"))


def measure(model: Llama, tokenizer: Tokenizer, count: int) -> None:
    """Prints the shares of on-topic and exact answers, by how much weight the facts had in training."""
    ranked = sorted(load_facts(), key=lambda fact: -fact.weight)
    third = len(ranked) // 3
    for label, group in (
        ("most", ranked[:third]),
        ("less", ranked[third : 2 * third]),
        ("least", ranked[2 * third :]),
    ):
        picked = group[:: max(1, 3 * len(group) // count)]
        questions = [
            HELD_OUT_PHRASINGS[index % len(HELD_OUT_PHRASINGS)].format(n=fact.names[0])
            for index, fact in enumerate(picked)
        ]
        given = answers(model, tokenizer, questions)
        on_topic = sum(
            first_sentence(text) == first_sentence(fact.answer)
            for text, fact in zip(given, picked, strict=True)
        )
        exact = sum(text == fact.answer for text, fact in zip(given, picked, strict=True))
        print(
            f"{label} trained third, {len(picked)} facts: {on_topic / len(picked):.0%} on topic, "
            f"{exact / len(picked):.0%} exact",
            flush=True,
        )


@torch.no_grad()
def answers(model: Llama, tokenizer: Tokenizer, questions: list[str]) -> list[str]:
    """Greedy answers, decoded without a cache; rows are padded on the right, where causal attention does not
    look."""
    given: list[str] = []
    end = tokenizer.token_to_id(END_OF_TURN)
    for start in range(0, len(questions), BATCH):
        rows = [
            tokenizer.encode(USER + question + END_OF_TURN + ASSISTANT).ids
            for question in questions[start : start + BATCH]
        ]
        prompts = [len(row) for row in rows]
        open_rows = list(range(len(rows)))
        while open_rows:
            longest = max(len(rows[index]) for index in open_rows)
            tokens = torch.tensor([rows[index] + [end] * (longest - len(rows[index])) for index in open_rows])
            last = torch.tensor([len(rows[index]) - 1 for index in open_rows])
            hidden = model.hidden(tokens)[torch.arange(len(open_rows)), last]
            for index, token in zip(open_rows, model.logits(hidden).argmax(-1).tolist(), strict=True):
                rows[index].append(token)
            open_rows = [
                index
                for index in open_rows
                if rows[index][-1] != end and len(rows[index]) - prompts[index] < MAX_NEW_TOKENS
            ]
        given += [tokenizer.decode(row[prompt:]) for row, prompt in zip(rows, prompts, strict=True)]
    return given


if __name__ == "__main__":
    typer.run(main)
