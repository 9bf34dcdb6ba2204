"""torch.compile(model, backend="cutlass_bn"): whole models, its options, how it is found."""

from __future__ import annotations

import copy
import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import assert_no_worse
from test_backend_patterns import Recorder
from torch import Tensor, nn

import cutlass_bn
from cutlass_bn import backend

EAGER = {"inductor": False}
needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this build of torch has no gloo"
)


class Block(nn.Module):
    """ResNet's: of two convolutions, or a bottleneck of three."""

    def __init__(self, channels: int, out: int, stride: int = 1, bottleneck: bool = False) -> None:
        super().__init__()
        kernels = [1, 3, 1] if bottleneck else [3, 3]
        sizes = [channels, *[out // 2 if bottleneck else out] * (len(kernels) - 1), out]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(sizes[i], sizes[i + 1], kernel, stride if i == 1 else 1, kernel // 2)
            for i, kernel in enumerate(kernels)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(size) for size in sizes[1:])
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or channels != out:
            shortcut = nn.Conv2d(channels, out, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for convolution, norm in zip(self.convolutions[:-1], self.norms[:-1], strict=True):
            y = self.relu(norm(convolution(y)))
        y = self.norms[-1](self.convolutions[-1](y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


class Network(nn.Module):
    def __init__(self, *blocks: nn.Module, channels: int = 8) -> None:
        super().__init__()
        first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.stem = nn.Sequential(first, nn.BatchNorm2d(8), nn.ReLU(True), nn.MaxPool2d(2))
        self.blocks = nn.Sequential(*blocks)
        hidden, last = nn.Linear(channels, 16), nn.Linear(16, 16, bias=False)
        norms = nn.BatchNorm1d(16), nn.BatchNorm1d(16, affine=False)
        self.head = nn.Sequential(hidden, norms[0], nn.GELU(), last, norms[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def basic() -> Network:
    return Network(Block(8, 8), Block(8, 16, 2), channels=16)


def bottleneck() -> Network:
    return Network(Block(8, 16, 2, True), Block(16, 16, 1, True), channels=16)


_TWO, _SHORTCUT = ["bn relu", "bn relu"], ["bn", "bn add relu"]
CALLS = {  # of ours, in order
    basic: [*_TWO, "bn add relu", "bn relu", *_SHORTCUT],
    bottleneck: [*_TWO, "bn relu", *_SHORTCUT, *_TWO, "bn add relu"],
}
HEAD = ["linear bn gelu", "linear bn"]


def images(batch: int = 6, device: str = "cpu") -> Tensor:
    return torch.randn(batch, 3, 12, 12).to(device)


def results(model: nn.Module, call: Any, batches: Sequence[Tensor]) -> list[Tensor]:
    """Outputs, gradients and state of a few steps of training, and the outputs of eval."""
    model.train()
    outputs = [call(x) for x in batches]
    sum(
        (y * torch.arange(y.numel(), device=y.device).view_as(y).cos()).sum() for y in outputs
    ).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    buffers = [buffer.clone() for buffer in model.buffers()]
    outputs += [call(x) for x in batches] if model.eval() else []
    return [y.detach() for y in (*outputs, *gradients, *buffers)]


def check(
    model: nn.Module, batches: Sequence[Tensor], compiled: Any, twin: nn.Module, peer: Any = None
) -> None:
    """Compares what was compiled of the model's twin with the model, or its peer, in exactness."""
    peer = model if peer is None else peer
    wide = copy.deepcopy(model).double()
    exact = results(wide, wide, [x.double() for x in batches])
    actual, peer = results(twin, compiled, batches), results(model, peer, batches)
    for tensors in zip(actual, exact, peer, strict=True):
        if tensors[0].is_floating_point():
            assert_no_worse(*tensors, factor=3.0, scale=1.0)
        else:
            assert torch.equal(tensors[0], tensors[2])


@pytest.fixture(autouse=True)
def _reset(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture
def without_inductor(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """AOTAutograd alone in the place of Inductor, which is slow. Holds the options of each call."""
    options: list[dict[str, Any]] = []

    def inductor(graph_module: Any, inputs: Any, config_patches: dict[str, Any]) -> Any:
        options.append(config_patches)
        assert torch.compiler.is_compiling()
        return aot_eager(graph_module, inputs)

    aot_eager = backend.lookup_backend("aot_eager")
    monkeypatch.setattr(backend, "lookup_backend", {"inductor": inductor}.__getitem__)
    return options


@pytest.mark.parametrize("make", CALLS, ids=lambda make: make.__name__)
def test_calls(make):
    recorder = Recorder()
    torch.compile(make(), backend=recorder, fullgraph=True)(images())
    assert recorder.calls == CALLS[make] + HEAD


@pytest.mark.parametrize(
    ("make", "channels_last", "options", "dynamic"),
    [
        (basic, False, EAGER, None),
        (basic, True, None, True),
        (bottleneck, True, EAGER, True),
        (bottleneck, False, None, None),
    ],
)
@pytest.mark.usefixtures("without_inductor")
def test_models(make, channels_last, options, dynamic, device):
    """With a batch that changes."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = make().to(device, memory_format=layout)
    twin = copy.deepcopy(model)
    compiled = torch.compile(
        twin, backend="cutlass_bn", fullgraph=True, options=options, dynamic=dynamic
    )
    batches = [images(batch, device).contiguous(memory_format=layout) for batch in (6, 5, 7)]
    check(model, batches, compiled, twin)
    assert not torch.compiler.is_compiling()


@pytest.mark.slow
def test_with_inductor(device):
    """As exact as what Inductor makes of the graph as it was."""
    model = Network(Block(8, 8)).to(device)
    twin = copy.deepcopy(model)
    ours = torch.compile(twin, backend="cutlass_bn", fullgraph=True, dynamic=False)
    theirs = torch.compile(model, fullgraph=True, dynamic=False)
    check(model, [images(device=device)] * 2, ours, twin, theirs)


@pytest.mark.gpu
@pytest.mark.usefixtures("without_inductor")
def test_graph_holds_our_ops(monkeypatch):
    """And no batch norm of torch's, which a graph may have under many names."""
    targets: list[str] = []

    def compiler(graph_module: Any, _: Any) -> Any:
        for node in graph_module.graph.nodes:
            targets.extend(map(str, (node.target, *node.args[:1])))
        return graph_module.forward

    from torch._dynamo.backends.common import aot_autograd

    traced = aot_autograd(fw_compiler=compiler)
    monkeypatch.setattr(backend, "lookup_backend", lambda _: lambda gm, x, **_: traced(gm, x))
    model = basic().cuda()
    torch.compile(model, backend="cutlass_bn", fullgraph=True)(
        images(device="cuda")
    ).sum().backward()
    assert "cutlass_bn.batch_norm_training.default" in targets
    assert not [target for target in targets if "aten" in target and "batch_norm" in target]


@pytest.mark.parametrize("options", [EAGER, None], ids=["eager", "traced"])
@pytest.mark.usefixtures("without_inductor")
def test_two_views(options):
    """One network for two batches: each of its norms is called twice."""

    class TwoViews(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = basic()

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.network(x), self.network(x.flip(3))])

    model = TwoViews()
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, backend="cutlass_bn", fullgraph=True, options=options)
    check(model, [images()] * 2, compiled, twin)


@needs_gloo
@pytest.mark.parametrize("options", [EAGER, None], ids=["eager", "traced"])
@pytest.mark.usefixtures("without_inductor", "process_group")
def test_distributed_data_parallel(options, monkeypatch):
    """Whose graph is compiled in pieces, one for each bucket of gradients."""
    rewritten: list[int] = []
    rewrite = backend.rewrite
    monkeypatch.setattr(backend, "rewrite", lambda graph: rewritten.append(rewrite(graph)))
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1000)
    model = basic()
    twin = nn.parallel.DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=0.005)
    compiled = torch.compile(twin, backend="cutlass_bn", options=options)
    check(model, [images()] * 2, compiled, twin)
    assert len(rewritten) > 2
    assert sum(map(bool, rewritten)) > 2


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_graph_without_match_is_inductors(monkeypatch):
    """The module that Dynamo made, as it was."""
    graphs: list[Any] = []

    def inductor(graph_module: Any, inputs: Any, config_patches: dict[str, Any]) -> Any:
        graphs.append((graph_module, graph_module.code, config_patches))
        return graph_module.forward

    def spy(graph_module: Any, inputs: Any) -> Any:
        code = graph_module.code
        compiled = backend.cutlass_bn(graph_module, inputs)
        assert graphs == [(graph_module, code, {})]
        return compiled

    monkeypatch.setattr(backend, "lookup_backend", lambda name: inductor)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Hardswish())
    torch.compile(model, backend=spy, fullgraph=True)(images())
    assert len(graphs) == 1


def test_options(without_inductor):
    def compile(**how: Any) -> Any:
        torch.compiler.reset()
        model = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU())
        return torch.compile(model, backend="cutlass_bn", **how)(images())

    compile(options={"inductor": True, "max-autotune": True})
    compile(mode="max-autotune-no-cudagraphs")
    assert [given["max_autotune"] for given in without_inductor] == [True, True]
    assert not [given for given in without_inductor if "inductor" in given]
    with pytest.raises(
        Exception, match='"inductor" is False, which leaves no use for max_autotune'
    ):
        compile(options={**EAGER, "max_autotune": True})


class TestRegistration:
    def test_by_import(self):
        assert "cutlass_bn" in torch.compiler.list_backends()
        assert torch._dynamo.lookup_backend("cutlass_bn") is backend.cutlass_bn

    def test_by_entry_point(self):
        try:
            distribution = importlib.metadata.distribution("cutlass_bn")
        except importlib.metadata.PackageNotFoundError:
            pytest.skip("the package is not installed")
        found = distribution.entry_points.select(group="torch_dynamo_backends")
        if not found or distribution.version != cutlass_bn.__version__:
            pytest.skip("the package was installed before it had this entry point")
        assert [point.value for point in found] == ["cutlass_bn.backend:cutlass_bn"]
        assert next(iter(found)).load() is backend.cutlass_bn

    @pytest.mark.parametrize("installed", [True, False])
    def test_in_a_fresh_process(self, installed):
        """In either order: the name looked up before the module is imported, or after."""
        lines = [
            "import sys, cutlass_bn",
            "from torch._dynamo.backends import registry",
            "assert 'cutlass_bn.backend' not in sys.modules",
        ]
        if installed:
            value = "'cutlass_bn', 'cutlass_bn.backend:cutlass_bn', 'torch_dynamo_backends'"
            lines += [
                "from importlib.metadata import EntryPoint",
                "registry.list_backends()",
                f"registry._BACKENDS['cutlass_bn'] = EntryPoint({value})",
            ]
        else:
            lines += ["import cutlass_bn.backend"]
        lines += ["assert callable(registry.lookup_backend('cutlass_bn'))"]
        lines += ["import cutlass_bn.backend as b", "assert b.cutlass_bn.__name__ == 'cutlass_bn'"]
        subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)
