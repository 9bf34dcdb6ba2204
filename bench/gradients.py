"""The gradients of a training step in float64, and how far the variants' are from them.

With z what is normalised, xhat = (z - mean) * invstd and G = dz^T x, where dz and x are z's gradient and the input:
dgamma = sum dy xhat, dbeta = sum dy, dz = gamma invstd (dy - mean(dy) - xhat mean(dy xhat)). Of gemm_scale_bn, where
z = scale * (x W^T + bias): dx = (scale dz) W, dW = scale G, dscale = sum dz (x W^T), and dbias = 0, as the mean takes
the bias away. dscale cancels to eps / (var + eps) of its terms. So the errors of dscale and dbias are measured by the
sums of their terms' magnitudes, those of the others by the gradients themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from . import errors
from .cases import BN2D, Case

INPUT = "dx"
# By the parameter's name in the model.
OF_PARAMETERS = {
    "weight": "dgamma",
    "bias": "dbeta",
    "gemm.weight": "dW",
    "gemm.bias": "dbias",
    "scale": "dscale",
    "bn.weight": "dgamma",
    "bn.bias": "dbeta",
}
NAMES = (INPUT, *dict.fromkeys(OF_PARAMETERS.values()))

Gradients = dict[str, Tensor]  # by NAMES


def gradients_of(model: nn.Module, x: Tensor) -> Gradients:
    """What a backward has left there."""
    return {INPUT: x.grad, **{OF_PARAMETERS[name]: p.grad for name, p in model.named_parameters()}}


class Piece(NamedTuple):
    """A part of a gradient in float64."""

    name: str
    part: tuple[slice, ...]
    value: Tensor
    size: Tensor  # what its error is measured by


def exact(case: Case, model: nn.Module, x: Tensor, dy: Tensor) -> Iterator[Piece]:
    """Every gradient, in slices of channels but for dx of gemm_scale_bn."""
    bn = model if case.kind == BN2D else model.bn
    channels = bn.num_features
    step = max(1, min(channels, errors.SLICE_VALUES // (dy.numel() // channels)))
    x64 = None if case.kind == BN2D else x.double()
    dx = None if x64 is None else torch.zeros_like(x64)
    for begin in range(0, channels, step):
        part = slice(begin, min(begin + step, channels))
        if x64 is None:
            z = x[:, part].double()
        else:
            weight, scale = model.gemm.weight[part].double(), model.scale[part].double()
            u = x64 @ weight.t()
            u -= u.mean(0)
            z = u * scale
        dz, dgamma, dbeta = _of_batch_norm(z, dy[:, part].double(), bn.weight[part].double(), bn.eps)
        yield Piece("dgamma", (part,), dgamma, dgamma)
        yield Piece("dbeta", (part,), dbeta, dbeta)
        if x64 is None:
            yield Piece(INPUT, (slice(None), part), dz, dz)
            continue
        terms = dz * u
        yield Piece("dscale", (part,), terms.sum(0), terms.abs_().sum(0))
        dz *= scale
        yield Piece("dbias", (part,), torch.zeros_like(dbeta), dz.abs().sum(0))
        dw = dz.t() @ x64
        yield Piece("dW", (part,), dw, dw)
        dx.addmm_(dz, weight)
    if dx is not None:
        yield Piece(INPUT, (slice(None),), dx, dx)


def _of_batch_norm(z: Tensor, dy: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(dz, dgamma, dbeta)."""
    shape = [1, -1] + [1] * (z.dim() - 2)
    dims = [d for d in range(z.dim()) if d != 1]
    count = z.numel() // z.shape[1]
    var, mean = torch.var_mean(z, dims, correction=0)
    invstd = torch.rsqrt(var + eps)
    xhat = (z - mean.view(shape)) * invstd.view(shape)
    dbeta, dgamma = dy.sum(dims), (dy * xhat).sum(dims)
    dz = dy - (dbeta / count).view(shape) - xhat * (dgamma / count).view(shape)
    return dz * (gamma * invstd).view(shape), dgamma, dbeta


@torch.no_grad()
def gradient_errors(
    results: Mapping[str, Gradients], case: Case, model: nn.Module, x: Tensor, dy: Tensor
) -> dict[str, dict[str, float]]:
    """Relative error (Frobenius) of every result's gradients, by their names."""
    zero = torch.zeros((), dtype=torch.float64, device=x.device)
    squared: dict[str, dict[str, Tensor]] = {result: {} for result in results}
    norms: dict[str, Tensor] = {}
    for name, part, piece, size in exact(case, model, x, dy):
        norms[name] = norms.get(name, zero) + size.square().sum()
        for result, gradients in results.items():
            difference = gradients[name][part].double().sub_(piece)
            squared[result][name] = squared[result].get(name, zero) + difference.square_().sum()
    return {
        result: {name: errors.relative(sums[name].item(), norms[name].item()) for name in NAMES if name in sums}
        for result, sums in squared.items()
    }


def broken_contracts(found: Mapping[str, float], eager: Mapping[str, float]) -> list[str]:
    """Which gradients are further off than the contract allows beside eager's, in words. A NaN is."""
    bounds = {name: errors.EAGER_FACTOR * eager[name] + errors.SLACK for name in found}
    return [
        f"error of {name} {value:.1e}, allowed {bounds[name]:.1e}"
        for name, value in found.items()
        if not value <= bounds[name]
    ]
