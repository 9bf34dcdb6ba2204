"""LinearBatchNorm1d: drop-in for the separate modules in state, errors, flags; its children."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from linear_cases import BF16, max_error
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from cutlass_bn import BatchNorm2d, LinearBatchNorm1d, explain


class Separate(nn.Module):
    """KernelBench level 2 no. 39, the model that LinearBatchNorm1d stands for."""

    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def forward(self, x):
        return self.bn(self.gemm(x) * self.scale)


def pair(device="cpu", **options) -> tuple[LinearBatchNorm1d, Separate]:
    module = LinearBatchNorm1d(12, 20, scale=True, **options).to(device)
    separate = Separate(12, 20, (20,)).to(device)
    separate.load_state_dict(module.state_dict(), strict=True)
    return module, separate


def inputs(device="cpu", m=30):
    return torch.rand(m, 12, generator=torch.Generator().manual_seed(0)).to(device)


def assert_same_state(module, separate):
    for (name, ours), (_, theirs) in zip(
        sorted(module.state_dict().items()), sorted(separate.state_dict().items()), strict=True
    ):
        assert ours.dtype == theirs.dtype, name
        assert max_error(ours, theirs) < 1e-5, name


def test_same_seed_same_parameters():
    torch.manual_seed(3)
    module = LinearBatchNorm1d(12, 20, scale=True)
    torch.manual_seed(3)
    separate = Separate(12, 20, (20,))
    for name, tensor in separate.state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor), name


def test_state_dicts_load_into_each_other():
    module, separate = pair()
    module.load_state_dict(separate.state_dict(), strict=True)
    bare = LinearBatchNorm1d(2, 3, bias=False, affine=False, track_running_stats=False)
    assert set(bare.state_dict()) == {"gemm.weight"}


def test_loads_a_state_dict_from_before_the_counter():
    module, _ = pair()
    state = module.state_dict()
    del state["bn.num_batches_tracked"]
    state._metadata["bn"]["version"] = 1
    module.load_state_dict(state, strict=True)
    assert module.bn.num_batches_tracked == 0


def test_steps_like_the_separate_modules(device):
    module, separate = pair(device)
    for step in range(3):
        x = inputs(device) + step
        assert max_error(module(x), separate(x)) < 1e-5
    assert_same_state(module, separate)
    module.eval(), separate.eval()
    assert max_error(module(inputs(device)), separate(inputs(device))) < 1e-5
    assert_same_state(module, separate)


FLAGS = {
    "training flipped on the child": lambda m: m.bn.eval(),
    "eval outside, training inside": lambda m: (m.eval(), m.bn.train()),
    "momentum None": lambda m: setattr(m.bn, "momentum", None),
    "momentum 0.5": lambda m: setattr(m.bn, "momentum", 0.5),
    "eps": lambda m: setattr(m.bn, "eps", 0.5),
    "tracking switched off": lambda m: setattr(m.bn, "track_running_stats", False),
    "tracking switched off, eval": lambda m: (
        setattr(m.bn, "track_running_stats", False),
        m.eval(),
    ),
    "frozen": lambda m: m.requires_grad_(False),
    "scale removed": lambda m: setattr(m, "scale", None),
    "bias removed": lambda m: setattr(m.gemm, "bias", None),
    "affine removed": lambda m: (setattr(m.bn, "weight", None), setattr(m.bn, "bias", None)),
    "buffers removed": lambda m: (
        setattr(m.bn, "running_mean", None),
        setattr(m.bn, "running_var", None),
        m.eval(),
    ),
}


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_changed_after_construction(flag, device):
    module, _ = pair(device)
    FLAGS[flag](module)
    separate = copy.deepcopy(module)
    x = inputs(device)
    for _ in range(2):
        z = separate.gemm(x)
        z = z if separate.scale is None else z * separate.scale
        assert max_error(module(x), separate.bn(z)) < 1e-5
    assert_same_state(module, separate)


def test_activation_changed_after_construction():
    module, separate = pair()
    module.activation = "silu"
    assert max_error(module(inputs()), F.silu(separate(inputs()))) < 1e-5


def _patched(module):
    module.gemm.forward = lambda x: F.linear(x, module.gemm.weight, module.gemm.bias) + 1


class LoRA(nn.Linear):
    def forward(self, x):
        return super().forward(x) + x.sum(1, keepdim=True)


def _lora(module):
    child = LoRA(12, 20)
    child.load_state_dict(module.gemm.state_dict())
    module.gemm = child


class Doubled(nn.Module):
    def forward(self, w):
        return 2 * w


CHILDREN = {
    "forward hook": lambda m: m.gemm.register_forward_hook(lambda _, __, y: y + 1),
    "forward pre-hook": lambda m: m.bn.register_forward_pre_hook(lambda _, args: (args[0] + 1,)),
    "backward hook": lambda m: m.bn.register_full_backward_hook(lambda _, dx, __: (dx[0] * 2,)),
    "parametrisation": lambda m: parametrize.register_parametrization(m.gemm, "weight", Doubled()),
    "weight norm": lambda m: parametrizations.weight_norm(m.gemm),
    "spectral norm": lambda m: parametrizations.spectral_norm(m.gemm),
    "old weight norm": lambda m: torch.nn.utils.weight_norm(m.gemm),
    "pruning": lambda m: prune.l1_unstructured(m.gemm, "weight", 0.5),
    "patched forward": _patched,
    "replaced by a subclass": _lora,
    "instance norm instead": lambda m: setattr(m, "bn", nn.Identity()),
    "other linear": lambda m: setattr(m, "gemm", nn.Sequential(nn.Linear(12, 20), nn.Tanh())),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("change", CHILDREN)
def test_changed_children_are_honoured(change):
    module, _ = pair(activation="relu")
    CHILDREN[change](module)
    assert explain(module, inputs()).path == "unfused modules"
    module.eval()
    x = inputs().requires_grad_()
    expected = F.relu(module.bn(module.gemm(x) * module.scale))
    y = module(x)
    assert torch.equal(y, expected)
    assert torch.equal(*(torch.autograd.grad(out.sum(), x)[0] for out in (y, expected)))


def test_global_hooks_see_the_children():
    module, _ = pair()
    seen = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda child, *_: seen.append(type(child))
    )
    try:
        module(inputs())
    finally:
        handle.remove()
    assert seen == [nn.Linear, nn.BatchNorm1d, LinearBatchNorm1d]


def test_hooks_on_the_module_itself_keep_it_fused():
    module, _ = pair()
    module.register_forward_hook(lambda _, __, y: y + 1)
    assert explain(module, inputs()).path != "unfused modules"


def test_sync_batch_norm_conversion():
    module = nn.SyncBatchNorm.convert_sync_batchnorm(pair()[0])
    assert type(module.bn) is nn.SyncBatchNorm
    assert explain(module, inputs()).path != "unfused modules"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantised_linear():
    module, separate = (m.eval() for m in pair())
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("no quantised kernels on this machine")
    quantised = torch.ao.quantization.quantize_dynamic(module, {nn.Linear}, dtype=torch.qint8)
    assert explain(quantised, inputs()).path == "unfused modules"
    assert 0 < max_error(quantised(inputs()), separate(inputs())) < 0.1


def test_three_dimensions_follow_batch_norm_1d():
    """[N, C, L]: dim 1 is the channel dim, whatever the Linear's features are."""
    module = LinearBatchNorm1d(12, 20, scale=True)
    separate = copy.deepcopy(module)
    x = torch.rand(4, 20, 12)
    expected = separate.bn(separate.gemm(x) * separate.scale)
    assert torch.equal(module(x), expected)
    assert_same_state(module, separate)


def test_one_row(device):
    module, separate = pair(device)
    state = copy.deepcopy(module.state_dict())
    message = "Expected more than 1 value per channel when training, got input size"
    with pytest.raises(ValueError, match=message):
        module(inputs(device)[:1])
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    module.eval(), separate.eval()
    assert max_error(module(inputs(device)[:1]), separate(inputs(device)[:1])) < 1e-5


def test_input_by_its_name():
    module, separate = pair()
    assert max_error(module(input=inputs()), separate(inputs())) < 1e-5


def test_unknown_activation():
    with pytest.raises(ValueError, match="activation"):
        LinearBatchNorm1d(2, 3, activation="tanh")


def test_copies(device):
    module, _ = pair(device, activation="gelu")
    module(inputs(device))
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    copies = [
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(file, weights_only=False),
    ]
    expected = module(inputs(device))
    for other in copies:
        assert torch.equal(other(inputs(device)), expected)
        assert_same_state(other, module)


@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
def test_half_modules(dtype, device):
    module, separate = (m.to(dtype) for m in pair(device))
    assert module.bn.num_batches_tracked.dtype == torch.int64
    y, expected = module(inputs(device).to(dtype)), separate(inputs(device).to(dtype))
    assert y.dtype == expected.dtype == dtype
    assert max_error(y, expected) < 2e-2


def test_empty_batch(device):
    module, separate = pair(device)
    assert module(inputs(device, 0)).shape == (0, 20)
    assert module.bn.num_batches_tracked == 1
    assert torch.equal(module.bn.running_mean, separate.bn.running_mean)


def test_device_and_dtype():
    module = LinearBatchNorm1d(2, 3, scale=True, device="meta", dtype=BF16)
    assert all(p.is_meta and p.dtype == BF16 for p in module.parameters())


def test_repr():
    text = repr(LinearBatchNorm1d(2, 3, scale=True, activation="relu"))
    assert "scale=True, activation='relu'\n" in text
    assert "activation=None, ieee_fp32=True\n" in repr(LinearBatchNorm1d(2, 3, ieee_fp32=True))


def test_ieee_fp32_is_kept():
    module = LinearBatchNorm1d(2, 3, ieee_fp32=True)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other.ieee_fp32
        assert other.arguments()["ieee_fp32"]
    assert not LinearBatchNorm1d(2, 3).ieee_fp32
    del module.ieee_fp32  # pickled before there was a choice
    assert not pickle.loads(pickle.dumps(module)).arguments()["ieee_fp32"]


OPTIONS = [
    {"scale": True},
    {"scale": False, "bias": False},
    {"affine": False, "track_running_stats": False},
]


def spoil(module):
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.fill_(7)


def assert_equal_state(module, other):
    for name, tensor in other.state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor), name


class TestResetParameters:
    """Everything that a module owns, from the random numbers that construction draws."""

    @pytest.mark.parametrize("options", OPTIONS, ids=str)
    def test_draws_what_construction_draws(self, device, options):
        torch.manual_seed(3)
        fresh = LinearBatchNorm1d(12, 20, device=device, **options)
        module = LinearBatchNorm1d(12, 20, device=device, **options)
        spoil(module)
        torch.manual_seed(3)
        module.reset_parameters()
        assert_equal_state(module, fresh)

    def test_from_the_meta_device(self, device):
        module = LinearBatchNorm1d(12, 20, scale=True, device="meta").to_empty(device=device)
        spoil(module)
        torch.manual_seed(3)
        module.reset_parameters()
        torch.manual_seed(3)
        assert_equal_state(module, LinearBatchNorm1d(12, 20, scale=True, device=device))

    @pytest.mark.parametrize("walk", ["apply", "modules", "children"])
    def test_walks_over_a_model(self, walk):
        model = nn.Sequential(LinearBatchNorm1d(12, 20, scale=True), BatchNorm2d(3))
        spoil(model)

        def reset(module):
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()

        if walk == "apply":
            model.apply(reset)
        else:
            for module in getattr(model, walk)():
                reset(module)
        for name, tensor in model.state_dict().items():
            assert not (tensor == 7).any(), name
        assert model[0].scale.std() > 0.3
        fresh = nn.BatchNorm2d(3).state_dict()
        assert all(torch.equal(model[1].state_dict()[name], fresh[name]) for name in fresh)

    @pytest.mark.filterwarnings("ignore::FutureWarning")
    @pytest.mark.parametrize("change", CHILDREN)
    def test_changed_children(self, change):
        """They may have nothing to reset, or reset in their own way: the rest is reset anyway."""
        module, _ = pair()
        CHILDREN[change](module)
        with torch.no_grad():
            module.scale.fill_(7)
        module.reset_parameters()
        assert not (module.scale == 7).any()
