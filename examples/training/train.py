"""Trains an MLP and a small ResNet on scikit-learn's digits: cutlass_bn's modules beside torch's.

The two of a pair start from the same weights and see the same batches in the same order, so their
loss curves should be one curve. Prints accuracies and times, and draws all four curves into one
plot.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
# The second: cutlass_bn of this checkout, where none is installed.
for folder in (HERE, HERE.parent.parent):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

from models import MODELS, build  # noqa: E402

AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LABELS = {True: "cutlass_bn", False: "torch.nn"}


@dataclass(frozen=True)
class Data:
    """Images [N, 1, 8, 8] and the digits on them [N]."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Settings:
    epochs: int = 20
    batch: int = 64
    lr: float = 0.05
    seed: int = 0
    amp: torch.dtype | None = None  # the dtype of autocast, or None for float32 throughout

    def lr_at(self, progress: float) -> float:
        """A cosine from lr to 0, after a linear rise over the first tenth."""
        return self.lr * min(progress / 0.1, 0.5 + 0.5 * math.cos(math.pi * progress))


@dataclass(frozen=True)
class Run:
    """What came out of one training."""

    losses: list[float]  # of every step
    train_accuracy: float
    test_accuracy: float
    seconds: float  # of the training loop alone


def load_data(device: torch.device, dtype: torch.dtype = torch.float32) -> Data:
    """A fixed stratified split of the 1797 digits: 1437 to train on, 360 to test with."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = torch.from_numpy(digits.images).to(device, dtype).unsqueeze(1) / 8 - 1  # from 0 .. 16
    targets = torch.from_numpy(digits.target).to(device)
    parts = train_test_split(
        range(len(targets)), test_size=0.2, stratify=digits.target, random_state=0
    )
    train, test = (torch.tensor(part, device=device) for part in parts)
    return Data((images[train], targets[train]), (images[test], targets[test]))


def build_seeded(name: str, ours: bool, seed: int) -> nn.Module:
    """On the CPU, so that the weights don't depend on the device."""
    torch.manual_seed(seed)
    return build(name, ours)


def same_weights(ours: nn.Module, theirs: nn.Module) -> bool:
    """Whether parameters and buffers are equal, bit by bit, in the order of the modules."""
    pairs = zip(
        [*ours.parameters(), *ours.buffers()],
        [*theirs.parameters(), *theirs.buffers()],
        strict=True,
    )
    return all(torch.equal(mine, yours) for mine, yours in pairs)


def fit(model: nn.Module, data: Data, settings: Settings) -> Run:
    """Trains in place by SGD with momentum, the backward outside autocast. fp16 scales the loss."""
    images, targets = data.train
    device = images.device
    optimizer = torch.optim.SGD(
        model.parameters(), lr=settings.lr, momentum=0.9, weight_decay=1e-4, nesterov=True
    )
    scaler = torch.amp.GradScaler(device.type, enabled=settings.amp == torch.float16)
    order = torch.Generator().manual_seed(settings.seed)
    # The rest, at most one batch, has its turn in other epochs.
    steps_per_epoch = len(targets) // settings.batch
    losses: list[Tensor] = []

    def loss_of(module: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=settings.amp, enabled=settings.amp is not None):
            logits = module(images[batch])
        return F.cross_entropy(logits if settings.amp is None else logits.float(), targets[batch])

    # Untimed: what the first step loads and chooses. On a copy, so that the model is as it was.
    loss_of(copy.deepcopy(model), torch.arange(settings.batch, device=device)).backward()
    synchronize(device)
    begin = time.perf_counter()
    for epoch in range(settings.epochs):
        model.train()
        shuffled = torch.randperm(len(targets), generator=order).to(device)
        for step in range(steps_per_epoch):
            progress = (epoch + step / steps_per_epoch) / settings.epochs
            for group in optimizer.param_groups:
                group["lr"] = settings.lr_at(progress)
            loss = loss_of(model, shuffled[step * settings.batch : (step + 1) * settings.batch])
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.detach())
    synchronize(device)
    seconds = time.perf_counter() - begin
    return Run(
        torch.stack(losses).tolist(),
        accuracy(model, *data.train),
        accuracy(model, *data.test),
        seconds,
    )


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, targets: Tensor) -> float:
    return (model.eval()(images).argmax(1) == targets).double().mean().item()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def train_pair(name: str, data: Data, settings: Settings) -> dict[bool, Run]:
    """The run with our modules (True) and torch's (False). ValueError if they don't start alike."""
    models = {ours: build_seeded(name, ours, settings.seed) for ours in (True, False)}
    if not same_weights(models[True], models[False]):
        raise ValueError(f"{name}: the two models were not initialised with the same weights")
    device = data.train[0].device
    return {ours: fit(model.to(device), data, settings) for ours, model in models.items()}


def largest_difference(ours: Run, theirs: Run) -> float:
    """Between the two loss curves, at any step."""
    return max(abs(mine - yours) for mine, yours in zip(ours.losses, theirs.losses, strict=True))


def print_table(runs: dict[str, dict[bool, Run]], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("model", "modules", title=title)
    for heading in ("final loss", "train accuracy", "test accuracy", "seconds"):
        table.add_column(heading, justify="right")
    for name, pair in runs.items():
        for ours, run in pair.items():
            loss = sum(run.losses[-10:]) / len(run.losses[-10:])
            figures = (
                f"{loss:.4f}",
                f"{run.train_accuracy:.2%}",
                f"{run.test_accuracy:.2%}",
                f"{run.seconds:.1f}",
            )
            table.add_row(name, LABELS[ours], *figures)
        table.add_section()
    Console().print(table)


def draw(runs: dict[str, dict[bool, Run]], path: Path, title: str) -> None:
    """All curves in one plot: torch's broad and pale, ours a thin line on top of it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for colour, (name, pair) in zip(("tab:blue", "tab:orange"), runs.items(), strict=False):
        for ours in (False, True):
            style = {"linewidth": 0.9} if ours else {"linewidth": 4, "alpha": 0.35}
            axes.plot(pair[ours].losses, color=colour, label=f"{name}, {LABELS[ours]}", **style)
    axes.set(xlabel="step", ylabel="training loss of the batch", yscale="log", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    defaults = Settings()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)} (all)")
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, ... (auto: cuda if there is a GPU)"
    )
    parser.add_argument(
        "--amp", choices=list(AMP_DTYPES), help="train under autocast; fp16 with a GradScaler"
    )
    parser.add_argument("--epochs", type=int, default=defaults.epochs)
    parser.add_argument("--batch", type=int, default=defaults.batch)
    parser.add_argument("--lr", type=float, default=defaults.lr, help="the largest learning rate")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="on the CPU; more help little at this size (%(default)s)",
    )
    parser.add_argument(
        "--plot", type=Path, default=Path("loss.png"), help="where the loss curves go"
    )
    args = parser.parse_args(arguments)
    for name in args.models:
        if name not in MODELS:
            parser.error(f"no model {name}")
    device = torch.device(
        args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    )
    torch.set_num_threads(args.threads)
    settings = Settings(args.epochs, args.batch, args.lr, args.seed, AMP_DTYPES.get(args.amp))
    where = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {args.threads} thread(s)"
    )
    title = f"digits, {args.epochs} epochs, {args.amp or 'fp32'}, {where}"

    data = load_data(device)
    runs = {name: train_pair(name, data, settings) for name in args.models or MODELS}
    print_table(runs, title)
    for name, pair in runs.items():
        difference = largest_difference(pair[True], pair[False])
        print(f"{name}: same initial weights; the loss curves differ by at most {difference:.1e}")
    draw(runs, args.plot, title)
    print(f"loss curves: {args.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
