"""Time and memory of a loss over a language model's vocabulary, head included, against `F.cross_entropy`.

    python benchmarks/language_models.py --threads 1
    python benchmarks/language_models.py --device cuda --tokens 4096 --hidden 4096 --dtype bfloat16

A step is the head's product, the loss and the gradients of both. Memory is the peak in addition to
the hidden states and the head's weight. Each round times every step once; the table gives medians
over the rounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from losses import peak_memory, synchronize, timed  # next to this file
from torch import Tensor

from hf_calib.losses import CalibrationLoss, linear_calibration_loss, make_loss

BASELINE = "F.cross_entropy"
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    hidden = (
        torch.randn(args.tokens, args.hidden, device=args.device)
        .to(dtype)
        .requires_grad_()
    )
    weight = (
        torch.randn(args.vocabulary, args.hidden, device=args.device) / args.hidden**0.5
    ).to(dtype)
    weight.requires_grad_()
    labels = torch.randint(args.vocabulary, (args.tokens,), device=args.device)
    shape = (
        f"{args.tokens} tokens x {args.hidden} -> {args.vocabulary} words, {args.dtype}"
    )
    print(
        f"torch {torch.__version__}, {args.device}, {args.threads} threads, {args.rounds} rounds: {shape}"
    )

    def step(loss: Loss) -> None:
        loss(hidden, weight, labels).backward()
        hidden.grad = weight.grad = None

    runs = {name: partial(step, loss) for name, loss in steps(args.losses).items()}
    memory = {name: peak_memory(run, args.device) for name, run in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.rounds):
        for name, run in runs.items():
            synchronize(args.device)
            seconds[name].append(timed(run, 1, args.device))
    print(f"{'':32}  time / {BASELINE}  peak MiB  / {BASELINE}")
    for name in runs:
        ratio = median(
            own / base
            for own, base in zip(seconds[name], seconds[BASELINE], strict=True)
        )
        print(
            f"{name:32}  {ratio:22.2f}  {memory[name] / 2**20:8.0f}  {memory[name] / memory[BASELINE]:17.2f}"
        )
    print(f"{BASELINE} takes {median(seconds[BASELINE]):.2f} s")


def steps(names: list[str]) -> dict[str, Loss]:
    """The ways from hidden states to a loss."""

    def on_logits(
        loss: Callable[[Tensor, Tensor], Tensor],
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
    ) -> Tensor:
        return loss(hidden @ weight.T, labels)

    made: dict[str, Loss] = {BASELINE: partial(on_logits, F.cross_entropy)}
    made |= {
        f"{name}, on logits": partial(on_logits, make_loss(name)) for name in names
    }
    made |= {f"{name}, linear": partial(linear_loss, make_loss(name)) for name in names}
    if hasattr(F, "linear_cross_entropy"):
        made["F.linear_cross_entropy"] = F.linear_cross_entropy
    return made | of_others()


def of_others() -> dict[str, Loss]:
    """Fused linear cross entropies of other packages, where they are installed; they need a GPU."""
    found: dict[str, Loss] = {}
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        liger = LigerFusedLinearCrossEntropyLoss()
        found["Liger, linear"] = lambda hidden, weight, labels: liger(
            weight, hidden, labels
        )
    except ImportError:
        pass
    try:
        from cut_cross_entropy import linear_cross_entropy

        found["cut cross entropy"] = linear_cross_entropy
    except ImportError:
        pass
    return found


def linear_loss(
    loss: CalibrationLoss, hidden: Tensor, weight: Tensor, labels: Tensor
) -> Tensor:
    return linear_calibration_loss(hidden, weight, labels, loss)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--losses", nargs="+", default=["cross_entropy", "focal"])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
