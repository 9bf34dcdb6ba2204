"""Strides of batch_norm's output and gradient: those of torch, for inputs of any layout."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from linear_cases import TRAINING, max_error
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cutlass_bn import BatchNorm2d, functional, library_is_loaded

SIZES = {2: (4, 6), 3: (4, 6, 5), 4: (4, 6, 3, 5), 5: (2, 4, 3, 5, 2)}
LAYOUTS = [
    *(
        order
        for rank in SIZES
        for order in itertools.permutations(range(rank))
        if rank < 5 or order[0] < 2
    ),
    *("sliced", "expanded", "channels_last, sliced", "one channel", "one place"),
]


def laid_out(layout, device: str) -> Tensor:
    """Sizes of SIZES in the memory order given, or what else its name says."""
    if not isinstance(layout, str):
        inverse = [layout.index(dim) for dim in range(len(layout))]
        return torch.randn([SIZES[len(layout)][dim] for dim in layout], device=device).permute(
            inverse
        )
    shape = {"one channel": (4, 1, 3, 5), "one place": (4, 6, 1, 1)}.get(layout, (4, 6, 3, 10))
    x = torch.randn(shape, device=device)
    if layout == "expanded":
        return x[:, :, :1].expand(-1, -1, 3, -1)
    if layout == "sliced":
        return x[..., ::2]
    x = x.to(memory_format=torch.channels_last)
    return x[:, 1:] if "sliced" in layout else x


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@TRAINING
def test_strides_are_torchs(training, layout, device):
    """Of y and of x's gradient, where sizes of 1 have none to speak of. Torch's CPU says which."""

    def strides(t: Tensor) -> list[int]:
        return [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1]

    x = laid_out(layout, device)
    dy = torch.randn_like(x.contiguous())
    results = []
    for function, where in ((functional.batch_norm, device), (F.batch_norm, "cpu")):
        leaf = laid_out(layout, where).copy_(x) if layout != "expanded" else laid_out(layout, where)
        vectors = [torch.zeros(x.size(1), device=where), torch.ones(x.size(1), device=where)]
        leaf.requires_grad_()
        y = function(leaf, *vectors, training=training)
        (dx,) = torch.autograd.grad(y, leaf, dy.to(where))
        results.append((y, dx))
    (y, dx), (expected_y, expected_dx) = results
    assert strides(y) == strides(expected_y)
    assert strides(dx) == strides(expected_dx)
    if layout != "expanded":
        assert max_error(y.cpu(), expected_y) < 1e-5
        assert max_error(dx.cpu(), expected_dx) < 1e-4
    if library_is_loaded() and torch.version.cuda:
        with FakeTensorMode():
            fake = torch.empty_strided(x.shape, x.stride(), device="cuda")
            vectors = [torch.empty(x.size(1), device="cuda") for _ in range(2)]
            assert strides(functional.batch_norm(fake, *vectors, training=training)) == strides(y)


def test_a_permuted_input_can_be_viewed(device):
    y = BatchNorm2d(3).to(device)(torch.randn(4, 6, 3, 5, device=device).permute(0, 2, 1, 3))
    assert y.view(4, -1).shape == (4, 90)
