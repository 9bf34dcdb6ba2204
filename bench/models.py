"""Whole models: steps of training, the optimizer's included, as a loop issues them in a row.

Times are the wall clock's: the host's are in them where the device waits for it. Of the first
step, the loss and the norm of all gradients are compared with eager's of equal weights.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cutlass_bn
import cutlass_bn.backend

from .cases import Options, matmul_precision
from .errors import fail
from .records import COMPILE, EAGER, OURS, OURS_COMPILED, Row
from .timing import Call, host_times, interleave, peak_bytes, set_time

VARIANTS = {
    EAGER: lambda model: model,
    COMPILE: lambda model: torch.compile(model, dynamic=False),
    OURS: lambda model: cutlass_bn.convert(model, trace=True),
    OURS_COMPILED: lambda model: torch.compile(model, backend="cutlass_bn", dynamic=False),
}
SAMPLES, STEPS = 20, 5  # of a model, at most; of a sample
OFF_EAGER = 0.05  # passes roundings, which many layers amplify, but no wrong gradient


def resnet(*blocks: int) -> nn.Module:
    with contextlib.suppress(ImportError):  # it imports timm too
        import vision  # noqa: F401  torchvision beside a torch that it was not built for
    from torchvision.models.resnet import Bottleneck, ResNet

    return ResNet(Bottleneck, list(blocks))


def mlp(*widths: int) -> nn.Module:
    found: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        found += nn.Linear(inputs, outputs, bias=False), nn.BatchNorm1d(outputs), nn.ReLU()
    return nn.Sequential(*found)


@dataclass(frozen=True)
class Model:
    what: str
    build: Callable[..., nn.Module]
    sizes: tuple[int, ...]  # its arguments: blocks of the stages, or widths
    shape: tuple[int, ...]  # of a batch
    precision: str = "bf16"  # by autocast
    channels_last: bool = False

    @property
    def name(self) -> str:
        size = "x".join(map(str, self.shape)) + " channels_last" * self.channels_last
        return f"{self.what} {size} {self.precision}"

    def reduced(self) -> Model:
        if self.build is resnet:
            return replace(self, sizes=(1, 1, 1, 1), shape=(2, 3, 64, 64))
        widths = tuple(max(8, width // 32) for width in self.sizes)
        return replace(self, sizes=widths, shape=(self.shape[0] // 8, widths[0]))


def models(quick: bool) -> list[Model]:
    resnet50 = Model("ResNet-50", resnet, (3, 4, 6, 3), (256, 3, 224, 224), channels_last=True)
    tf32 = replace(resnet50, shape=(128, 3, 224, 224), precision="tf32", channels_last=False)
    head = Model("Barlow Twins head", mlp, (2048, 8192, 8192, 8192), (256, 2048))
    pointnet = Model("PointNet MLP", mlp, (64, 64, 64, 128, 1024), (32768, 64))
    every = [resnet50, tf32, head, replace(head, shape=(2048, 2048)), pointnet]
    return every[:1] if quick else every


def training(run: nn.Module, x: Tensor, labels: Tensor | None, amp: bool) -> Call:
    """A step with an optimizer of its own. It leaves the gradients and returns the loss."""
    optimizer = torch.optim.SGD(run.parameters(), lr=0.01, momentum=0.9, fused=True)

    def step(_: int) -> Tensor:
        optimizer.zero_grad()
        x.grad = None
        with torch.autocast(x.device.type, torch.bfloat16, enabled=amp):
            y = run(x)
        if labels is None:  # of a head the norm: it takes few passes over y
            loss = torch.linalg.vector_norm(y, dtype=torch.float32)
        else:
            loss = F.cross_entropy(y.float(), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def measure(suite: str, model: Model, options: Options) -> list[Row]:
    """A row for every variant; one that raises says so, and the others still run."""
    device, amp, images = options.device, model.precision == "bf16", model.build is resnet
    order = torch.channels_last if model.channels_last else torch.contiguous_format
    plain = model.build(*model.sizes).to(device, memory_format=order)
    x = torch.randn(model.shape, device=device).contiguous(memory_format=order)
    x.requires_grad_(not images)  # a backbone before the head wants its gradient
    labels = torch.randint(1000, model.shape[:1], device=device) if images else None
    names = VARIANTS if options.compile and options.on_gpu else (EAGER, OURS)
    work = {"work": len(x), "unit": "images/s" if images else "rows/s"}
    rows, steps, eager = {name: Row(suite, model.name, name, **work) for name in names}, {}, {}
    with matmul_precision(model.precision):
        for name, row in rows.items():
            try:
                run = VARIANTS[name](copy.deepcopy(plain))
                step = training(run, x, labels, amp)
                loss = step(0).item()
                norm = nn.utils.get_total_norm([p.grad for p in run.parameters()]).item()
                run.zero_grad()  # so that the peak holds them
                row.peak_bytes = peak_bytes(partial(step, 0), device)
            except Exception as exception:  # whatever it raises is its own row's result
                row.raised(exception)
                continue
            steps[name], found = step, {"loss": loss, "gradient norm": norm}
            eager = found if name == EAGER else eager
            row.off_eager = {what: abs(found[what] / v - 1) for what, v in eager.items()}
            fail(row, [(f"{what} off eager's", v, OFF_EAGER) for what, v in row.off_eager.items()])
        times = partial(host_times, count=STEPS if options.on_gpu else 1, waits=True)
        timings = interleave(steps, device, STEPS * options.timing_seconds, SAMPLES, times)
    for name, timing in timings.items():
        set_time(rows[name], timing)
    return list(rows.values())
