"""Our modules where tools take models apart: tracers, fusers, counters, replicas, sharding."""

from __future__ import annotations

import copy
import importlib
import inspect
import io
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from linear_cases import fp32_precision
from torch import Tensor, fx, nn
from torch.fx.experimental.optimization import fuse
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import cutlass_bn
from cutlass_bn import BatchNorm2d, LinearBatchNorm1d, explain

no_library = not cutlass_bn.library_is_loaded()
needs_library = pytest.mark.skipif(no_library, reason="the compiled library is not there")
needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this build of torch has no gloo"
)


class Norm(BatchNorm2d):
    """A user's subclass."""

    def __init__(self, channels: int, factor: float) -> None:
        super().__init__(channels)
        self.factor = factor

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.factor


class Model(nn.Module):
    """Both modules, or torch's instead of BatchNorm2d."""

    def __init__(self, ours: bool = True, device: str | None = None) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 6, 3, device=device)
        self.norm = (BatchNorm2d if ours else nn.BatchNorm2d)(6, device=device)
        self.head = LinearBatchNorm1d(6, 5, scale=True, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.convolution(x))).mean((2, 3)))


def images(device: str = "cpu", channels: int = 3) -> Tensor:
    return torch.randn(8, channels, 6, 6, generator=torch.Generator().manual_seed(1)).to(device)


def trained(model: nn.Module, device: str = "cpu") -> nn.Module:
    """With running statistics and parameters that are not those of construction."""
    model = model.to(device)
    for _ in range(3):
        model(images(device))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    return model.eval()


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "BatchNorm2d": (lambda: BatchNorm2d(3), images),
    "LinearBatchNorm1d": (lambda: LinearBatchNorm1d(3, 4, scale=True), lambda: torch.randn(5, 3)),
    "subclass": (lambda: Norm(3, 2.0), images),
}


def saved_and_loaded(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def from_an_older_pickle(module: nn.Module) -> nn.Module:
    state = {k: v for k, v in module.__dict__.items() if k != "__module__"}
    other = type(module).__new__(type(module))
    other.__setstate__(state)
    return other


def packaged(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    with torch.package.PackageExporter(file) as exporter:
        exporter.extern("**")
        exporter.save_pickle("model", "model.pkl", module)
    file.seek(0)
    return torch.package.PackageImporter(file).load_pickle("model", "model.pkl")


WAYS = {
    "constructed": lambda m: m,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "torch.save": saved_and_loaded,
    "older pickle": from_an_older_pickle,
    "torch.package": packaged,
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
class TestLeaves:
    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("name", MODULES)
    def test_symbolic_trace(self, name, way):
        make, make_input = MODULES[name]
        module, x = WAYS[way](make()), make_input()
        plain = copy.deepcopy(module)
        traced = fx.symbolic_trace(nn.Sequential(module))
        assert [node.op for node in traced.graph.nodes] == ["placeholder", "call_module", "output"]
        for training in (True, False):
            assert torch.equal(traced.train(training)(x), plain.train(training)(x))
        buffers = zip(traced.buffers(), plain.buffers(), strict=True)
        assert all(torch.equal(mine, other) for mine, other in buffers)

    @pytest.mark.parametrize("name", MODULES)
    def test_only_the_instance_says_torch(self, name):
        module = MODULES[name][0]()
        assert not type(module).__module__.startswith("torch")
        assert pickle.loads(pickle.dumps(type(module))) is type(module)
        assert repr(module).startswith(type(module).__name__)
        if name == "BatchNorm2d":  # torch's signature, and ours at its end
            *parameters, activation = inspect.signature(BatchNorm2d).parameters.values()
            assert parameters == list(inspect.signature(nn.BatchNorm2d).parameters.values())
            assert activation.name == "activation"

    @pytest.mark.parametrize("name", MODULES)
    def test_compiles_in_one_graph(self, name):
        make, make_input = MODULES[name]
        module, x = make(), make_input()
        traced = fx.symbolic_trace(nn.Sequential(copy.deepcopy(module)))
        expected = copy.deepcopy(module)(x)
        for other in (module, traced):
            compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
            torch.testing.assert_close(compiled(x), expected)

    def test_state_is_guarded_when_compiled(self):
        module, x = BatchNorm2d(3), images()
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        compiled(x)
        module.eps, module.momentum = 0.5, 1.0
        module.training = False
        torch.testing.assert_close(compiled(x), copy.deepcopy(module)(x))

    def test_prepare_fx(self):
        """Ours stay in float between the quantised rest."""
        from torch.ao.quantization import get_default_qconfig_mapping
        from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

        model, x = trained(Model()), images()
        prepared = prepare_fx(copy.deepcopy(model), get_default_qconfig_mapping(), (x,))
        assert (type(prepared.norm), type(prepared.head)) == (BatchNorm2d, LinearBatchNorm1d)
        torch.testing.assert_close(prepared(x), model(x))
        assert type(convert_fx(prepared).norm) is BatchNorm2d

    def test_fuse_leaves_ours_in_place(self):
        model, x = trained(Model()), images()
        fused = fuse(model)
        assert type(fused.norm) is BatchNorm2d
        assert torch.equal(fused(x), model(x))

    def test_fuse_after_a_class_swap(self):
        """The way round of docs/integration.md."""
        model, x = trained(Model()), images()
        expected = model(x)
        for module in model.modules():
            if type(module) is BatchNorm2d:
                module.__class__ = nn.BatchNorm2d
        fused = fuse(model)
        assert "norm" not in [node.target for node in fused.graph.nodes]
        torch.testing.assert_close(fused(x), expected)

    def test_fuse_modules_with_a_mapping(self):
        from torch.ao.quantization import fuse_modules
        from torch.ao.quantization.fuser_method_mappings import fuse_conv_bn

        model, x = trained(Model()), images()
        custom = {"additional_fuser_method_mapping": {(nn.Conv2d, BatchNorm2d): fuse_conv_bn}}
        fused = fuse_modules(model, [["convolution", "norm"]], fuse_custom_config_dict=custom)
        assert type(fused.norm) is nn.Identity
        torch.testing.assert_close(fused(x), model(x))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_jit(device):
    """Traced, in eval; scripted, they can't be: the error is torch's."""
    model = trained(Model(), device)
    traced = torch.jit.trace(model, images(device))
    torch.testing.assert_close(traced(images(device) + 1), model(images(device) + 1))
    for module in (model.norm, model.head):
        with pytest.raises(Exception, match=r"cutlass_bn/modules"):
            torch.jit.script(module)


def test_averaged_model(device):
    model = trained(Model(), device)
    averaged = AveragedModel(model)
    for _ in range(2):
        averaged.update_parameters(model)
    update_bn([images(device), images(device) + 1], averaged)
    assert averaged.module.norm.num_batches_tracked == 2
    norm = nn.BatchNorm2d(6, momentum=None, device=device)
    for x in (images(device), images(device) + 1):
        norm(model.convolution(x))
    torch.testing.assert_close(averaged.module.norm.running_var, norm.running_var)
    torch.testing.assert_close(averaged.module.norm.running_mean, norm.running_mean)


def flops(call: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


class TestFlops:
    """What F.linear counts, in either direction, however the products are made."""

    @staticmethod
    def check(sizes: tuple[int, ...], training: bool, needs_dx: bool, device: str, dtype) -> None:
        m, n, k = sizes
        options = {"scale": True, "activation": "silu", "device": device, "dtype": dtype}
        module = LinearBatchNorm1d(k, n, **options).train(training)
        linear = nn.Linear(k, n, device=device, dtype=dtype)
        x = torch.randn(m, k, device=device, dtype=dtype, requires_grad=needs_dx)
        with torch.no_grad():
            assert flops(lambda: module(x)) == flops(lambda: linear(x)) == 2 * m * n * k
        y, z = module(x), linear(x)
        assert flops(lambda: module(x)) == 2 * m * n * k
        counts = [flops(lambda out=out: out.sum().backward()) for out in (y, z)]
        assert counts == [2 * m * n * k * (1 + needs_dx)] * 2

    @pytest.mark.parametrize("needs_dx", [True, False], ids=["dx", "no dx"])
    @pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("sizes", [(64, 48, 32), (63, 35, 25)], ids=str)
    def test_counts_what_linear_counts(self, device, sizes, dtype, training, needs_dx):
        self.check(sizes, training, needs_dx, device, dtype)

    @pytest.mark.gpu
    @pytest.mark.parametrize("tf32", [True, False], ids=["tf32", "split"])
    @pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
    def test_large_products(self, training, tf32):
        """Of three fp16 products each, or with a transpose."""
        with fp32_precision(tf32):
            self.check((2048, 1024, 1024), training, True, "cuda", torch.float32)

    def test_batch_norm_counts_nothing(self, device):
        module, x = BatchNorm2d(3, device=device), images(device).requires_grad_()
        assert flops(lambda: module(x).sum().backward()) == 0

    @needs_library
    def test_formulas(self):
        ops = torch.ops.cutlass_bn
        x, weight = torch.empty(5, 7, device="meta"), torch.empty(3, 7, device="meta")
        for op in (ops.linear_batch_norm_training, ops.linear_batch_norm_inference):
            assert flop_registry[op](x, weight, None, out_val=None) == 2 * 5 * 7 * 3
        u, stats = torch.empty(5, 3, device="meta"), torch.empty(3, 3, device="meta")
        for asked in ((True, True), (True, False), (False, True), (False, False)):
            rest = (None, None, None, 1e-5, 0, 0, *asked, None, None, None, None)
            count = flops(lambda r=rest: ops.linear_batch_norm_backward(u, x, weight, u, stats, *r))
            assert count == sum(asked) * 2 * 5 * 7 * 3
        a, b = x, weight.t()
        assert flops(lambda: ops.fp32_matmul(a, b, 2)) == flops(lambda: a @ b) == 2 * 5 * 7 * 3


def replica_of(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """What DataParallel runs on a second device, on the same: torch's code but for the copies."""
    module = importlib.import_module("torch.nn.parallel.replicate")

    def copies(tensors: list[Tensor], devices: list[int], detach: bool) -> list[list[Tensor]]:
        return [[tensor.clone() for tensor in tensors] for _ in devices]

    monkeypatch.setattr(module, "_broadcast_coalesced_reshape", copies)
    monkeypatch.setattr(module, "_get_device_index", lambda device, _: device)
    return module.replicate(model, [0])[0]


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_data_parallel_replicas(training, device, monkeypatch):
    model = trained(Model(), device).train(training)
    plain, x = copy.deepcopy(model), images(device)
    replica = replica_of(model, monkeypatch)
    features = torch.randn(4, 6, device=device)
    plan = explain(replica.head, features)
    assert plan.path == "unfused modules"
    assert "DataParallel" in plan.reason
    z = model.convolution(x)
    assert explain(replica.norm, z) == explain(model.norm, z)
    torch.testing.assert_close(replica(x), plain(x), rtol=1e-4, atol=1e-5)
    for mine, other in zip(replica.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    replica(x).square().sum().backward()
    plain(x).square().sum().backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=1e-3)


class TestSubclasses:
    """Wrapper subclasses, of which DTensor is one: two plain tensors in one here."""

    def test_input(self, device):
        model, x, other = trained(Model(), device), images(device, 6), images(device, 6) + 1
        y = model.norm(TwoTensor(x, other))
        assert explain(model.norm, TwoTensor(x, other)).path == "torch"
        assert "input is a tensor subclass (TwoTensor)" in str(explain(model.norm, TwoTensor(x, x)))
        assert type(y) is TwoTensor
        torch.testing.assert_close(y.a, model.norm(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(y.b, model.norm(other), rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("name", ["weight", "bias", "running_mean", "running_var"])
    def test_state(self, device, name):
        norm, x = trained(Model(), device).norm, images(device, 6)
        expected, tensor = norm(x).detach(), getattr(norm, name)
        double = TwoTensor(tensor.detach(), tensor.detach())
        setattr(norm, name, nn.Parameter(double) if isinstance(tensor, nn.Parameter) else double)
        assert str(explain(norm, x)) == f"torch: {name} is a tensor subclass (TwoTensor)"
        y = norm(x)
        torch.testing.assert_close(y.a.detach(), expected, rtol=1e-4, atol=1e-5)

    def test_linear(self, device):
        head, x = trained(Model(), device).head, torch.randn(4, 6, device=device)
        expected = head(x).detach()
        assert "TwoTensor" in explain(head, TwoTensor(x, x)).reason
        head.scale = nn.Parameter(TwoTensor(head.scale.detach(), head.scale.detach()))
        assert explain(head, x).reason == "scale is a tensor subclass (TwoTensor)"
        torch.testing.assert_close(head(x).a.detach(), expected, rtol=1e-4, atol=1e-5)


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@needs_gloo
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
class TestShardedParameters:
    @pytest.mark.parametrize("use_orig_params", [True, False])
    def test_fsdp1(self, process_group, use_orig_params):
        from torch.distributed.fsdp import FullyShardedDataParallel

        model, plain = Model(), Model()
        plain.load_state_dict(model.state_dict())
        cpu = torch.device("cpu")
        sharded = FullyShardedDataParallel(model, use_orig_params=use_orig_params, device_id=cpu)
        plans = []
        model.head.register_forward_pre_hook(lambda head, args: plans.append(explain(head, *args)))
        torch.testing.assert_close(sharded(images()), plain(images()), rtol=1e-4, atol=1e-5)
        [plan] = plans
        assert (plan.path == "unfused modules") == (not use_orig_params)
        assert use_orig_params or "FSDP1" in plan.reason

    @pytest.mark.parametrize("version", [1, 2])
    def test_initialises_everything(self, process_group, version):
        """FSDP1 calls reset_parameters itself, FSDP2 leaves it to its user."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
        from torch.distributed.tensor import DTensor

        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
        try:
            model = Model(device="meta")
            if version == 1:
                cpu = torch.device("cpu")
                model = FullyShardedDataParallel(model, use_orig_params=True, device_id=cpu)
            else:
                fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
                model.to_empty(device="cpu")
                for module in model.modules():
                    if hasattr(module, "reset_parameters"):
                        module.reset_parameters()
        finally:
            torch.use_deterministic_algorithms(False)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if isinstance(tensor, DTensor):
                tensor = tensor.full_tensor()
            assert torch.isfinite(tensor).all(), name
            if name.endswith("scale"):
                assert tensor.std() > 0.1
