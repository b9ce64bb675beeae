"""Trains the bundled demo model on the pydoc topics and docstrings of CPython: `cd tools; python -m
train_demo.train`."""

import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F
from train_demo.batches import BatchSource, held_out
from train_demo.export import export
from train_demo.llama import Llama, LlamaShape
from train_demo.muon import Muon
from train_demo.tokenizer import TOKENIZER_FILES, train_tokenizer

DEMO_MODEL = Path(__file__).parents[2] / "deploy" / "demo_model"
TOKENS_PER_PROCESS = 2048  # of one step
SHORT, LONG, LONG_EVERY = 256, 1024, 5  # row lengths in tokens; every fifth step has long rows
MUON_RATE, ADAM_RATE = 0.02, 3e-3
WARM_UP, ANNEAL_FROM = 0.02, 0.35  # as fractions of the time given
LOG_EVERY = 20  # steps


@dataclass(frozen=True)
class TrainingPlan:
    """How long, on how many processes, and where the results go."""

    minutes: float
    processes: int
    checkpoint_minutes: float
    output: Path
    rendezvous: Path
    start_from: Path | None  # a model folder with weights to go on from
    start_progress: float
    weight_power: float


def main(
    minutes: Annotated[
        float, typer.Option(help="Wall-clock time of the training; the learning rate is annealed over it.")
    ] = 70.0,
    processes: Annotated[int, typer.Option(help="Data-parallel processes, one core each.")] = 2,
    checkpoint_minutes: Annotated[float, typer.Option(help="Time between two exports of the weights.")] = 5.0,
    output: Annotated[Path, typer.Option(help="The model folder to write.")] = DEMO_MODEL,
    start_from: Annotated[
        Path | None, typer.Option(help="Go on from the weights and the tokenizer of this model folder.")
    ] = None,
    start_progress: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Where in the learning rate's schedule to begin.")
    ] = 0.0,
    weight_power: Annotated[
        float, typer.Option(help="Facts come up by this power of their weight; under 1 evens them out.")
    ] = 1.0,
) -> None:
    """Train the demo model and write it, with its tokenizer, as a Hugging Face folder."""
    output.mkdir(parents=True, exist_ok=True)
    shape = LlamaShape()
    if start_from is None:
        train_tokenizer(shape.vocab_size, shape.max_position_embeddings, output)
    elif start_from.resolve() != output.resolve():
        for name in TOKENIZER_FILES:
            shutil.copy(start_from / name, output / name)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = Path(folder) / "rendezvous"
        plan = TrainingPlan(
            minutes,
            processes,
            checkpoint_minutes,
            output,
            rendezvous,
            start_from,
            start_progress,
            weight_power,
        )
        spawn(train, args=(plan, shape), nprocs=processes)  # type: ignore[no-untyped-call]


def train(rank: int, plan: TrainingPlan, shape: LlamaShape) -> None:
    """One process of the training; all processes hold the same weights and see different conversations."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{plan.rendezvous}", rank=rank, world_size=plan.processes
    )
    torch.manual_seed(0)
    model = Llama(shape)
    if plan.start_from is not None:
        model.load_state_dict(
            {
                name: weight.float()
                for name, weight in load_file(plan.start_from / "model.safetensors").items()
            }
        )
    tokenizer = Tokenizer.from_file(str(plan.output / "tokenizer.json"))
    batches = BatchSource(
        tokenizer, seed=1 + rank + round(1000 * plan.start_progress), weight_power=plan.weight_power
    )
    step_of = TrainingStep(model, plan.processes, rank)
    started = exported = time.monotonic()
    progress, step = plan.start_progress, 0
    while progress < 1.0:
        length = LONG if step % LONG_EVERY == LONG_EVERY - 1 else SHORT
        spent = (time.monotonic() - started) / (60 * plan.minutes)
        here = plan.start_progress + (1 - plan.start_progress) * spent
        loss, progress = step_of(batches.batch(TOKENS_PER_PROCESS // length, length), here)
        step += 1
        if rank == 0 and step % LOG_EVERY == 0:
            tokens = step * TOKENS_PER_PROCESS * plan.processes
            rate = tokens / (time.monotonic() - started)
            print(
                f"step {step}  {progress:.1%}  loss {loss:.3f}  {tokens / 1e6:.2f}M tokens  {rate:.0f} "
                "tokens/s",
                flush=True,
            )
        if rank == 0 and (progress >= 1.0 or time.monotonic() - exported > 60 * plan.checkpoint_minutes):
            exported = time.monotonic()
            export(model, tokenizer, plan.output)
            held_out_loss, accuracy = evaluate(model, held_out(tokenizer, facts=60, length=128))
            print(
                f"step {step}  held-out phrasings: loss {held_out_loss:.3f}  right tokens {accuracy:.1%}",
                flush=True,
            )
    dist.destroy_process_group()


class TrainingStep:
    """Loss, gradients summed over the processes, and the update: Muon for the matrices, AdamW for embedding
    and norms."""

    def __init__(self, model: Llama, processes: int, rank: int) -> None:
        self._model = model
        self._processes, self._rank = processes, rank
        self._parameters = list(model.parameters())
        matrices = [weight for name, weight in model.named_parameters() if name.endswith("proj.weight")]
        others = [weight for name, weight in model.named_parameters() if not name.endswith("proj.weight")]
        self._muon = Muon(matrices)
        self._adam = torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0)

    def __call__(self, batch: tuple[Tensor, Tensor, Tensor], progress: float) -> tuple[float, float]:
        """Takes one step; returns the mean loss and the progress that all processes agree on."""
        loss = answer_loss(self._model, *batch)
        torch.autograd.backward(loss)
        loss_value, progress = self._average_gradients(loss.item(), progress)
        scale = rate_scale(progress)
        for group in self._adam.param_groups:
            group["lr"] = ADAM_RATE * scale
        self._adam.step()
        updates = self._muon.updates(self._rank, self._processes)
        self._muon.apply(self._sum(updates), MUON_RATE * scale)
        self._model.zero_grad()
        return loss_value, progress

    def _average_gradients(self, loss: float, progress: float) -> tuple[float, float]:
        gradients = [weight.grad for weight in self._parameters if weight.grad is not None]
        assert len(gradients) == len(self._parameters)
        summed = self._sum([*gradients, torch.tensor([loss, progress])])
        for gradient, total in zip(gradients, summed, strict=False):
            gradient.copy_(total / self._processes)
        mean_loss, mean_progress = (summed[-1] / self._processes).tolist()
        return mean_loss, mean_progress

    def _sum(self, tensors: list[Tensor]) -> list[Tensor]:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat)
        pieces = torch.split(flat, [tensor.numel() for tensor in tensors])
        return [piece.view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True)]


def rate_scale(progress: float) -> float:
    """A short warm-up, a plateau, then a straight line down to zero at the end of the time."""
    if progress < WARM_UP:
        return progress / WARM_UP
    return max(0.0, min(1.0, (1 - progress) / (1 - ANNEAL_FROM)))


def answer_loss(model: Llama, inputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """The mean cross entropy in nats, each target counted by its weight; targets of weight 0 cost nothing."""
    counted = weights > 0
    logits = model.logits(model.hidden(inputs)[counted])
    losses = F.cross_entropy(logits, targets[counted], reduction="none")
    return (losses * weights[counted]).sum() / weights.sum()


@torch.no_grad()
def evaluate(model: Llama, batch: tuple[Tensor, Tensor, Tensor]) -> tuple[float, float]:
    """The loss on the answers and the share of their tokens that greedy decoding gets right."""
    inputs, targets, weights = batch
    counted = weights > 0
    logits = model.logits(model.hidden(inputs)[counted])
    loss = F.cross_entropy(logits, targets[counted])
    right = (logits.argmax(-1) == targets[counted]).float().mean()
    return loss.item(), right.item()


if __name__ == "__main__":
    typer.run(main)
