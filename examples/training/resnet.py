"""Trains a ResNet of torchvision's as it is, converted, or compiled by our backend.

    python examples/training/resnet.py --mode convert --amp

The images are random, so the loss only shows that training works; the rate is what to compare.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision import models

sys.path.append(str(Path(__file__).resolve().parents[2]))  # of this checkout, if none is installed

import cutlass_bn
import cutlass_bn.backend  # for a checkout; an installed package is known to torch.compile

MODES = ("eager", "convert", "backend")


def build(name: str, mode: str, device: torch.device) -> nn.Module:
    """In channels_last, in which convolutions and our kernels are fastest."""
    model = models.get_model(name).to(device, memory_format=torch.channels_last)
    if mode == "convert":
        return cutlass_bn.convert(model, trace=True)
    return torch.compile(model, backend="cutlass_bn") if mode == "backend" else model


def train(model: nn.Module, batches: list[tuple[Tensor, Tensor]], amp: bool) -> list[float]:
    """One step of SGD for each batch. Returns the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    losses = []
    for images, labels in batches:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=amp):
            logits = model(images)
        loss = F.cross_entropy(logits.float(), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def random_batches(
    count: int, size: int, pixels: int, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """The same batch again and again: images [size, 3, pixels, pixels] and labels [size]."""
    images = torch.randn(size, 3, pixels, pixels, device=device)
    labels = torch.randint(1000, (size,), device=device)
    return [(images.contiguous(memory_format=torch.channels_last), labels)] * count


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet50", help="of torchvision (%(default)s)")
    parser.add_argument("--mode", choices=MODES, default="convert", help="(%(default)s)")
    parser.add_argument("--amp", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--steps", type=int, default=20, help="that are timed (%(default)s)")
    parser.add_argument("--batch", type=int, default=256, help="(%(default)s)")
    parser.add_argument("--pixels", type=int, default=224, help="(%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--explain", action="store_true", help="say what is fused where")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    device = torch.device(options.device)
    model = build(options.model, options.mode, device)
    if options.explain:
        print(cutlass_bn.explain(model))
    batches = random_batches(options.steps, options.batch, options.pixels, device)
    losses = train(
        model, batches[:3], options.amp
    )  # untimed: what the first steps choose and compile
    wait(device)
    begin = time.perf_counter()
    losses += train(model, batches, options.amp)
    wait(device)
    seconds = (time.perf_counter() - begin) / options.steps
    print(
        f"{options.model}, {options.mode}: loss {losses[0]:.3f} to {losses[-1]:.3f}, "
        f"{seconds * 1e3:.1f} ms a step, {options.batch / seconds:.0f} images/s"
    )
    return losses


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
