"""Train the demo model from scratch: tokenizer, weights, configuration and a set of held-out questions.

    python scripts/train_demo_model.py

Training takes about 50 minutes on two shared cores with bfloat16 instructions. It needs torch and sentencepiece;
serving the model needs no torch. All random numbers are seeded. An interrupted run continues from its last checkpoint
(`--work-folder`). The phases were tuned during the run that produced the shipped weights, so another run gives similar
weights, but not the same bytes.

Stages (`--stage`): `prepare` trains the tokenizer and writes the configuration; `train` trains the weights; `export`
writes them as bfloat16 with the set of questions, and measures the accuracy in float32 and bfloat16.
"""

import argparse
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

try:
    import torch
    from safetensors.torch import save_file
    from torch import distributed, multiprocessing, nn
    from torch.nn import functional
except ImportError as error:
    sys.exit(f"Training needs torch ({error}). Install it: pip install -e 'llm-serving[train]'")

from demo_training.accuracy import accuracy, held_out_questions
from demo_training.batches import make_batch
from demo_training.configuration import SEED, write_configuration, write_json
from demo_training.network import Llama
from demo_training.tasks import KINDS, LONG_KINDS, SHORT_KINDS, draw_question, question_set
from demo_training.tokenizer import Encoder, Example, train_tokenizer

ROOT = Path(__file__).resolve().parent.parent
PEAK_LEARNING_RATE = 3e-3
WARMUP_STEPS = 200
EVALUATE_EVERY = 250


@dataclass(frozen=True)
class Phase:
    """The training until step `end`.

    Attributes:
        num_short, num_long: Questions of short and of long kinds in a step.
        length_exponent: A token of an answer of n tokens has the weight n**length_exponent in the loss.
        least_share: Kinds are drawn in proportion to their errors plus this.
    """

    end: float
    num_short: int
    num_long: int
    length_exponent: float
    least_share: float


# First the format of all answers; then long answers, with full weight on their few hard tokens (the end of a count);
# last, and longest, many short questions, because computing their answers needs practice, while long answers are
# memorized.
PHASES = (
    Phase(end=1000, num_short=144, num_long=6, length_exponent=-0.5, least_share=0.25),
    Phase(end=1500, num_short=112, num_long=10, length_exponent=0.0, least_share=0.25),
    Phase(end=math.inf, num_short=176, num_long=6, length_exponent=0.0, least_share=0.1),
)


def phase_of(step: int) -> Phase:
    return next(phase for phase in PHASES if step < phase.end)


def learning_rate(step: int, steps: int) -> float:
    """Return the learning rate: linear warm-up, a plateau, then linear decay to zero from the end of the first phase
    on.
    """
    decay = (steps - step) / (steps - PHASES[0].end)
    return PEAK_LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS, decay)


def draw_examples(step: int, encoder: Encoder, shares: dict[str, float]) -> list[Example]:
    """Return the examples of a step, which depend on step and shares alone; a resumed run gets the same."""
    rng, phase = random.Random(f"{SEED} {step}"), phase_of(step)
    kinds = rng.choices(SHORT_KINDS, weights=[shares[kind] for kind in SHORT_KINDS], k=phase.num_short)
    kinds += rng.choices(LONG_KINDS, weights=[shares[kind] for kind in LONG_KINDS], k=phase.num_long)
    return [encoder.encode(draw_question(rng, kind, held_out=False)) for kind in kinds]


def make_optimizers(model: Llama) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers, and AdamW for embeddings, norms and LM head."""
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    vectors = [*model.model.embed_tokens.parameters(), *model.lm_head.parameters()]
    vectors += [weight for weight in model.model.parameters() if weight.ndim == 1]
    return [
        torch.optim.Muon(matrices, lr=PEAK_LEARNING_RATE, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(vectors, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def add_gradients(model: Llama) -> None:
    gradients = [weight.grad for weight in model.parameters()]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    distributed.all_reduce(flat)
    for gradient, summed in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(summed.view_as(gradient))


def train_step(model: Llama, examples: Sequence[Example], step: int) -> float:
    """Compute this process's part of the gradient of the mean loss over `examples`, and add the parts of all processes.

    Returns:
        This process's part of the mean loss.
    """
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    exponent = phase_of(step).length_exponent
    total = sum((len(example.token_ids) - example.answer_start) ** (1 + exponent) for example in examples)
    # Sorted by length, so that the parts take about the same time.
    batch = make_batch(sorted(examples, key=lambda example: len(example.token_ids))[rank::world_size])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(batch)
    each = functional.cross_entropy(logits.float(), batch.targets, reduction="none")
    loss = (each * batch.answer_lens**exponent).sum() / total
    loss.backward()
    add_gradients(model)
    return float(loss.item())


def train(rank: int, folder: Path, work_folder: Path, steps: int, num_processes: int) -> None:
    """Train from the checkpoint, if there is one, up to `steps` steps, and write a checkpoint.

    Uses several processes of one thread each: processes synchronize once per step, threads at every operation.
    """
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    meeting = work_folder / "meeting"
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=num_processes)
    encoder, model = Encoder(folder), Llama()
    optimizers = make_optimizers(model)
    shares = dict.fromkeys(KINDS, 1.0)
    first_step, spent_s = 0, 0.0
    checkpoint = work_folder / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        shares, first_step, spent_s = state["shares"], state["step"], state["spent_s"]
        print(f"from the checkpoint of step {first_step}", flush=True)

    started, losses = time.monotonic() - spent_s, []
    for step in range(first_step, steps):
        losses.append(train_step(model, draw_examples(step, encoder, shares), step))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        if (step + 1) % 50 == 0 and rank == 0:
            mean = num_processes * np.mean(losses[-50:])
            print(f"step {step + 1}/{steps} loss {mean:.4f} {time.monotonic() - started:.0f} s", flush=True)
        if (step + 1) % EVALUATE_EVERY == 0 or step + 1 == steps:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                reached = accuracy(model, encoder, held_out_questions(SEED + 1, 60, 12))
            # Kinds with more errors are drawn more often; every kind keeps a share, so that none is forgotten.
            shares = {kind: phase_of(step + 1).least_share + (1 - reached[kind]) for kind in KINDS}
            if rank == 0:
                print(report("held-out", reached), flush=True)
                state = {
                    "model": model.state_dict(),
                    "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                    "shares": shares,
                    "step": step + 1,
                    "spent_s": time.monotonic() - started,
                }
                torch.save(state, checkpoint)
    distributed.destroy_process_group()


def export(folder: Path, checkpoint: Path) -> None:
    """Write weights and questions, and print the accuracy of the written weights."""
    model = Llama()
    model.load_state_dict(torch.load(checkpoint, weights_only=True)["model"])
    model.bfloat16()
    weights = folder / "model.safetensors"
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, str(weights), metadata={"format": "pt"})
    weights.chmod(0o644)
    print(f"{sum(tensor.numel() for tensor in tensors.values())} parameters, {weights.stat().st_size} bytes")

    questions = question_set()
    write_json(
        folder / "questions.json",
        [{"task": q.kind, "instruction": q.instruction, "input": q.input, "output": q.output} for q in questions],
    )
    encoder, many = Encoder(folder), held_out_questions(SEED + 3, 1000, 200)
    for dtype in (torch.bfloat16, torch.float32):
        model.to(dtype)
        print(report(f"{dtype} questions.json", accuracy(model, encoder, questions)), flush=True)
        print(report(f"{dtype} held-out", accuracy(model, encoder, many)), flush=True)


def report(title: str, reached: dict[str, float]) -> str:
    return f"{title}: " + " ".join(f"{kind} {100 * share:.1f}" for kind, share in reached.items())


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the demo model from nothing.")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--processes", type=int, default=2, help="of one thread each")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "llm-serving" / "llm_serving" / "demo_model", help="output folder"
    )
    parser.add_argument("--work-folder", type=Path, default=ROOT / "build" / "demo_model", help="for the checkpoint")
    parser.add_argument("--stage", choices=["all", "prepare", "train", "export"], default="all")
    arguments = parser.parse_args()
    arguments.work_folder.mkdir(parents=True, exist_ok=True)
    if arguments.stage in ("all", "prepare"):
        train_tokenizer(arguments.folder)
        write_configuration(arguments.folder)
    if arguments.stage in ("all", "train"):
        (arguments.work_folder / "meeting").unlink(missing_ok=True)
        settings = (arguments.folder, arguments.work_folder.resolve(), arguments.steps, arguments.processes)
        multiprocessing.spawn(train, settings, nprocs=arguments.processes)
    if arguments.stage in ("all", "export"):
        export(arguments.folder, arguments.work_folder / "checkpoint.pt")


if __name__ == "__main__":
    main()
