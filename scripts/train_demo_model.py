"""Makes the demo model from nothing: tokenizer, weights, configuration and a set of held-out questions.

    python scripts/train_demo_model.py

takes about 35 minutes on two cores with bfloat16 instructions. Needs torch and sentencepiece; serving the model needs
no torch. Everything is seeded. An interrupted run goes on from its last checkpoint (`--work-folder`).

Stages (`--stage`): `prepare` trains the tokenizer and writes the configuration; `train` trains the weights; `export`
writes them as bfloat16 with the set of questions, and measures them in float32 and bfloat16.
"""

import argparse
import random
import sys
import time
from pathlib import Path

import numpy as np

try:
    import torch
    from safetensors.torch import save_file
    from torch import nn
    from torch.nn import functional
except ImportError as error:
    sys.exit(f"Training needs torch ({error}). Install it: pip install -e 'llm-serving[train]'")

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "llm-serving"), str(ROOT / "scripts")]

from demo_training.accuracy import accuracy, held_out_questions  # noqa: E402
from demo_training.batches import Batch, make_batch  # noqa: E402
from demo_training.configuration import SEED, write_configuration, write_json  # noqa: E402
from demo_training.network import Llama  # noqa: E402
from demo_training.tokenizer import Encoder, train_tokenizer  # noqa: E402

from llm_serving.demo_model.tasks import (  # noqa: E402
    KINDS,
    LONG_KINDS,
    SHORT_KINDS,
    draw_question,
    question_set,
)

SHORT_PER_STEP = 144
LONG_PER_STEP = 6
PEAK_LEARNING_RATE = 3e-3
WARMUP_STEPS = 200
EVALUATE_EVERY = 500


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, a plateau, then linear decay to zero over the second half."""
    return PEAK_LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS, 2 * (1 - step / steps))


def draw_batch(step: int, encoder: Encoder, shares: dict[str, float]) -> Batch:
    """The batch of one step; it depends on the step and the shares alone, so a resumed run sees the same batches."""
    rng = random.Random(f"{SEED} {step}")
    kinds = rng.choices(SHORT_KINDS, weights=[shares[kind] for kind in SHORT_KINDS], k=SHORT_PER_STEP)
    kinds += rng.choices(LONG_KINDS, weights=[shares[kind] for kind in LONG_KINDS], k=LONG_PER_STEP)
    return make_batch([encoder.encode(draw_question(rng, kind, held_out=False)) for kind in kinds])


def make_optimizers(model: Llama) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers (it needs about half the steps of AdamW here), AdamW for the rest."""
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    others = [*model.model.embed_tokens.parameters(), *model.lm_head.parameters()]
    others += [weight for weight in model.model.parameters() if weight.ndim == 1]
    return [
        torch.optim.Muon(matrices, lr=PEAK_LEARNING_RATE, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def train(folder: Path, checkpoint: Path, steps: int) -> Llama:
    """Trains up to `steps` steps, from the checkpoint where there is one."""
    torch.manual_seed(SEED)
    encoder, model = Encoder(folder), Llama()
    optimizers = make_optimizers(model)
    shares = dict.fromkeys(KINDS, 1.0)
    first_step, spent_s = 0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        shares, first_step, spent_s = state["shares"], state["step"], state["spent"]
        print(f"from the checkpoint of step {first_step}", flush=True)

    started, losses = time.monotonic() - spent_s, []
    for step in range(first_step, steps):
        batch = draw_batch(step, encoder, shares)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(batch)
        each = functional.cross_entropy(logits.float(), batch.targets, reduction="none")
        loss = (each * batch.weights).sum() / batch.weights.sum()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())

        if (step + 1) % 50 == 0:
            seconds = time.monotonic() - started
            print(f"step {step + 1}/{steps} loss {np.mean(losses[-50:]):.4f} {seconds:.0f} s", flush=True)
        if (step + 1) % EVALUATE_EVERY == 0 or step + 1 == steps:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                reached = accuracy(model, encoder, held_out_questions(SEED + 1, 60, 12))
            print(report("held-out", reached), flush=True)
            # Weak kinds come more often; every kind keeps a share, so that none is forgotten.
            shares = {kind: 0.25 + (1 - reached[kind]) for kind in KINDS}
            state = {
                "model": model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                "shares": shares,
                "step": step + 1,
                "spent": time.monotonic() - started,
            }
            torch.save(state, checkpoint)
    return model


def export(folder: Path, model: Llama) -> None:
    """Writes weights and questions, and prints the accuracy of the weights as written."""
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
    for name, casted in [("bfloat16", model), ("float32", model.float())]:
        print(report(f"{name} questions.json", accuracy(casted, encoder, questions)), flush=True)
        print(report(f"{name} held-out", accuracy(casted, encoder, many)), flush=True)


def report(title: str, reached: dict[str, float]) -> str:
    return f"{title}: " + " ".join(f"{kind} {100 * share:.1f}" for kind, share in reached.items())


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the demo model from nothing.")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "llm-serving" / "llm_serving" / "demo_model", help="where the model goes"
    )
    parser.add_argument("--work-folder", type=Path, default=ROOT / "build" / "demo_model", help="for the checkpoint")
    parser.add_argument("--stage", choices=["all", "prepare", "train", "export"], default="all")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.work_folder.mkdir(parents=True, exist_ok=True)
    if arguments.stage in ("all", "prepare"):
        train_tokenizer(arguments.folder)
        write_configuration(arguments.folder)
    if arguments.stage == "prepare":
        return
    # No steps: the last checkpoint as it is.
    steps = 0 if arguments.stage == "export" else arguments.steps
    model = train(arguments.folder, arguments.work_folder / "checkpoint.pt", steps)
    if arguments.stage != "train":
        export(arguments.folder, model)


if __name__ == "__main__":
    main()
