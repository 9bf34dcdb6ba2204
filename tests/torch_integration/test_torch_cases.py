"""torch.testing._internal's cases of batch norm: module inputs, error inputs, OpInfo samples.

Expected is torch's module or function in float64, of the same values, within the tolerances that
assert_close has for the dtype. Where a case is run otherwise than torch does, DEVIATIONS says how
and why.
"""

from __future__ import annotations

import copy
import inspect
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from linear_cases import BF16, FP16, TRAINING
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

import cutlass_bn
from cutlass_bn.functional import batch_norm

F32, F64 = torch.float32, torch.float64
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16, FP16], ids=["fp32", "bf16", "fp16"])

# torch's descriptions of its cases. The first of BatchNorm2d has none.
CASES = {
    "BatchNorm1d": [
        "affine", "3d_input", "affine_simple_average", "not_affine", "not_tracking_stats",
        "3d_input_not_affine", "zero_batch", "affine_not_bias",
    ],
    "BatchNorm2d": [
        "", "2d_simple_average", "momentum", "not_affine", "not_tracking_stats", "zero_batch",
        "affine_not_bias",
    ],
}  # fmt: skip
NOT_IN_EVERY_TORCH = {"affine_not_bias"}  # came with BatchNorm's argument bias, after 2.11
# Input and training of each sample of nn.functional.batch_norm, in torch's order.
SAMPLES = [
    ((5, 5, 5), True), ((3, 2, 4), False), ((3, 1), True), ((0,), True), ((0,), False),
    ((3, 2, 3, 4), True), ((3, 2, 3, 4), False), ((2, 1), False), ((2, 1), True), ((2, 1), False),
    ((2, 1), False), ((1, 2, 3), True),
]  # fmt: skip

THREE_DIMENSIONS = (
    "The Linear makes out_features of L, and bn has out_features channels: an L that is not C fits"
    " no constructor call. gemm is replaced by a Linear of L to L. As for every 3-D input the"
    " children run, so that in halves the result is torch's own, which rounds the statistics on the"
    " CPU, and is compared with that."
)
ONE_DIMENSION = (
    "torch takes one dimension where it has no element. Here it has no channels to go by: an error."
)
DEVIATIONS = {
    "BatchNorm1d": "A LinearBatchNorm1d whose Linear, the identity, comes before torch's case.",
    "BatchNorm1d 3d_input": THREE_DIMENSIONS,
    "BatchNorm1d 3d_input_not_affine": THREE_DIMENSIONS,
    "BatchNorm1d zero_batch": THREE_DIMENSIONS,
    "BatchNorm1d affine_not_bias": "Its bias is Linear's. bn becomes an nn.BatchNorm1d without.",
    "batch_norm sample 3": ONE_DIMENSION,
    "batch_norm sample 4": ONE_DIMENSION,
    "batch_norm without_cudnn": "Another dispatch of torch's, the same samples. No cuDNN here.",
}


@pytest.fixture(scope="module")
def torchs() -> SimpleNamespace:
    """ModuleInfo by name and the OpInfo, when needed: it takes seconds and may initialise CUDA."""
    pytest.importorskip("expecttest", reason="torch.testing._internal needs it")
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

    # The import freezes torch.backends' switches, for which other tests in this process have use.
    vars(torch.backends)["__allow_nonbracketed_mutation_flag"] = True
    modules = {
        info.module_cls.__name__: info for info in module_db if info.module_cls.__name__ in CASES
    }
    return SimpleNamespace(
        modules=modules, ops=[op for op in op_db if op.name == "nn.functional.batch_norm"]
    )


def module_inputs(
    info, device: str, dtype: torch.dtype, training: bool = True, requires_grad: bool = True
) -> list:
    return info.module_inputs_func(
        info, device=device, dtype=dtype, requires_grad=requires_grad, training=training
    )


def find_case(torchs, kind: str, name: str, device: str, dtype: torch.dtype, training: bool):
    for case in module_inputs(torchs.modules[kind], device, dtype, training):
        if case.desc == name:
            return case
    assert name in NOT_IN_EVERY_TORCH
    return pytest.skip(f"torch {torch.__version__} has no case {name}")


def theirs_and_ours(
    kind: str, case, device: str, dtype: torch.dtype, training: bool = True
) -> tuple[nn.Module, nn.Module]:
    """torch's module with random parameters, and ours with the same."""
    arguments = case.constructor_input
    theirs = getattr(nn, kind)(*arguments.args, **arguments.kwargs, device=device, dtype=dtype)
    for parameter in theirs.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    for name, buffer in theirs.named_buffers():
        if buffer.is_floating_point():
            nn.init.uniform_(buffer, *((0.5, 1.5) if name == "running_var" else (-1.0, 1.0)))
    if kind == "BatchNorm2d":
        ours = cutlass_bn.BatchNorm2d(
            *arguments.args, **arguments.kwargs, device=device, dtype=dtype
        )
        norm = ours
    else:
        ours = linear_batch_norm(case, device, dtype)
        norm = ours.bn
    norm.load_state_dict(theirs.state_dict())
    return theirs.train(training), ours.train(training)


def linear_batch_norm(case, device: str, dtype: torch.dtype) -> cutlass_bn.LinearBatchNorm1d:
    """For a case of BatchNorm1d, with the identity as its Linear."""
    arguments, shape = case.constructor_input, case.forward_input.args[0].shape
    options = inspect.signature(nn.BatchNorm1d).bind(*arguments.args, **arguments.kwargs).arguments
    channels, without_bias = options.pop("num_features"), "bias" in options
    options.pop("bias", None)
    ours = cutlass_bn.LinearBatchNorm1d(channels, channels, device=device, dtype=dtype, **options)
    if len(shape) == 3:
        assert f"BatchNorm1d {case.desc}" in DEVIATIONS
        ours.gemm = nn.Linear(shape[2], shape[2], device=device, dtype=dtype)
    if without_bias:
        assert f"BatchNorm1d {case.desc}" in DEVIATIONS
        ours.bn = nn.BatchNorm1d(*arguments.args, **arguments.kwargs, device=device, dtype=dtype)
    nn.init.eye_(ours.gemm.weight)
    nn.init.zeros_(ours.gemm.bias)
    return ours.requires_grad_()


def norm_of(module: nn.Module) -> nn.Module:
    return module.bn if isinstance(module, cutlass_bn.LinearBatchNorm1d) else module


def step(module: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """y, the gradients, and the buffers thereafter."""
    x = x.detach().requires_grad_()
    y = module(x)
    norm = norm_of(module)
    names = [name for name, _ in norm.named_parameters()]
    found = torch.autograd.grad(y, [x, *norm.parameters()], dy.to(y.dtype))
    gradients = dict(zip(["dx", *(f"d{name}" for name in names)], found, strict=True))
    return {"y": y.detach(), **gradients, **dict(norm.named_buffers())}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Within assert_close's tolerances for the dtype of ours."""
    assert ours.keys() == theirs.keys()
    for name, actual in ours.items():
        expected = theirs[name].to(actual.dtype)
        assert_close(actual, expected, msg=lambda text, name=name: f"{name}: {text}")


MODULE_CASES = pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, names in CASES.items() for name in names],
    ids=lambda text: text or "plain",
)


def test_every_case_is_listed(torchs):
    """A case that a later torch adds is to be looked at, and added above."""
    for kind, names in CASES.items():
        present = [case.desc for case in module_inputs(torchs.modules[kind], "cpu", F32)]
        assert [
            name for name in names if name in present or name not in NOT_IN_EVERY_TORCH
        ] == present
    for op in torchs.ops:
        samples = list(op.sample_inputs("cpu", F32))
        assert [(tuple(s.input.shape), s.kwargs.get("training", False)) for s in samples] == SAMPLES
    assert [op.variant_test_name for op in torchs.ops] == ["", "without_cudnn"]


@MODULE_CASES
@TRAINING
@DTYPES
def test_module_inputs(torchs, kind, name, training, dtype, device):
    """Two steps: output, gradients and state are torch's module's in float64 (3-D: same dtype)."""
    case = find_case(torchs, kind, name, device, dtype, training)
    (x,) = case.forward_input.args
    theirs, ours = theirs_and_ours(kind, case, device, dtype, training)
    wide = dtype if x.dim() == 3 else F64
    theirs = theirs.to(wide)
    for _ in range(2):
        dy = torch.randn_like(x)
        actual, expected = step(ours, x, dy), step(theirs, x.to(wide), dy.to(wide))
        assert_same(actual, expected)
        assert actual["y"].dtype == dtype
        # Else the next step starts from other values.
        for buffer in ("running_mean", "running_var"):
            if buffer in actual:
                expected[buffer].copy_(actual[buffer])


@MODULE_CASES
@TRAINING
def test_module_inputs_in_torchs_float32(torchs, kind, name, training, device):
    """Output and state beside torch's own float32, on the same device."""
    case = find_case(torchs, kind, name, device, F32, training)
    (x,) = case.forward_input.args
    theirs, ours = theirs_and_ours(kind, case, device, F32, training)
    for _ in range(3):
        assert_close(ours(x), theirs(x))
    for module in (theirs, ours):
        module.train(not training)
    if norm_of(ours).track_running_stats:
        assert_close(ours(x), theirs(x))
    assert_same(dict(norm_of(ours).named_buffers()), dict(theirs.named_buffers()))


@MODULE_CASES
@TRAINING
def test_module_gradients(torchs, kind, name, training, device):
    """gradcheck, also forward-mode and batched, and gradgradcheck: of input and every parameter."""
    case = find_case(torchs, kind, name, device, F64, training)
    (x,) = case.forward_input.args
    _, ours = theirs_and_ours(kind, case, device, F64, training)
    names, parameters = (
        zip(*ours.named_parameters(), strict=True) if list(ours.parameters()) else ((), ())
    )

    def function(x, *parameters):
        return torch.func.functional_call(ours, dict(zip(names, parameters, strict=True)), (x,))

    assert gradcheck(function, (x, *parameters), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(function, (x, *parameters))


@MODULE_CASES
@TRAINING
def test_module_layouts_copies_and_state(torchs, kind, name, training, device):
    """torch's test_non_contiguous_tensors, _memory_format, _pickle, _save_load and _to."""
    from torch.testing._internal.common_utils import noncontiguous_like

    case = find_case(torchs, kind, name, device, F32, training)
    (x,) = case.forward_input.args
    _, ours = theirs_and_ours(kind, case, device, F32, training)
    dy = torch.randn_like(x)
    expected = step(copy.deepcopy(ours), x, dy)
    layouts = [
        (noncontiguous_like(x), dy),
        (x, noncontiguous_like(dy)),
        (noncontiguous_like(x), noncontiguous_like(dy)),
    ]
    if x.dim() == 4:
        in_format = torch.channels_last
        layouts += [
            (x.contiguous(memory_format=in_format), dy),
            (x, dy.contiguous(memory_format=in_format)),
        ]
    for other_x, other_dy in layouts:
        assert_same(step(copy.deepcopy(ours), other_x, other_dy), expected)
    if x.dim() == 4:
        y = copy.deepcopy(ours)(x.contiguous(memory_format=in_format))
        assert y.is_contiguous(memory_format=in_format)

    loaded = copy.deepcopy(ours)
    for parameter in loaded.parameters():
        nn.init.zeros_(parameter)
    loaded.load_state_dict(ours.state_dict())
    there_and_back = copy.deepcopy(ours).to("cpu").double().to(device, F32)
    for other in (pickle.loads(pickle.dumps(ours)), loaded, there_and_back):
        assert_same(step(other, x, dy), expected)


@pytest.mark.parametrize("kind", list(CASES))
@TRAINING
@DTYPES
def test_module_errors(torchs, kind, training, dtype, device):
    """An eps of 0 or less in training. In eval torch has no case: refused below 0, as in 2.13."""
    info = torchs.modules[kind]
    arguments = {"device": device, "dtype": dtype, "requires_grad": False, "training": training}
    error_inputs = info.module_error_inputs_func(info, **arguments)
    assert len(error_inputs) == 2
    for error in error_inputs:
        case = error.module_error_input
        (x,) = case.forward_input.args
        _, ours = theirs_and_ours(kind, case, device, dtype, training)
        before = copy.deepcopy(ours.state_dict())
        if training:
            with pytest.raises(error.error_type, match=error.error_regex):
                ours(x)
            assert_same(ours.state_dict(), before)
        elif case.constructor_input.kwargs["eps"] < 0:
            with pytest.raises(ValueError, match="eps must be"):
                ours(x)
        else:
            assert ours(x).isfinite().all()


def find_sample(torchs, index: int, device: str, dtype: torch.dtype, requires_grad: bool = True):
    return list(torchs.ops[0].sample_inputs(device, dtype, requires_grad=requires_grad))[index]


def call(function, sample, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Output, gradients and statistics of function on copies of the sample, in dtype."""
    tensors = [
        None
        if t is None
        else t.detach().clone(memory_format=torch.preserve_format).to(dtype or t.dtype)
        for t in (sample.input, *sample.args)
    ]
    mean, var = tensors[1:3]
    leaves = {
        n: t.requires_grad_()
        for n, t in zip("x__wb", tensors, strict=True)
        if n != "_" and t is not None
    }
    y = function(*tensors, **sample.kwargs)
    torch.manual_seed(3)
    dy = torch.randn(y.shape, device=y.device).to(sample.input.dtype).to(y.dtype)
    found = torch.autograd.grad(y, list(leaves.values()), dy)
    results = {"y": y.detach(), **{f"d{n}": g for n, g in zip(leaves, found, strict=True)}}
    return results if mean is None else {**results, "mean": mean, "var": var}


TWO_DIMENSIONS = [index for index, (shape, _) in enumerate(SAMPLES) if len(shape) > 1]
SAMPLE_INDICES = pytest.mark.parametrize("index", TWO_DIMENSIONS)


@SAMPLE_INDICES
@DTYPES
@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "strided"])
def test_samples(torchs, index, dtype, contiguous, device):
    """Output, gradients and statistics are those of torch's function in float64."""
    sample = find_sample(torchs, index, device, dtype)
    sample = sample if contiguous else sample.noncontiguous()
    assert_same(call(batch_norm, sample), call(F.batch_norm, sample, F64))


@SAMPLE_INDICES
def test_samples_in_torchs_float32(torchs, index, device):
    sample = find_sample(torchs, index, device, F32)
    ours, theirs = call(batch_norm, sample), call(F.batch_norm, sample)
    for name in ours.keys() & {"y", "mean", "var"}:
        assert_close(ours[name], theirs[name])


@SAMPLE_INDICES
def test_sample_gradients(torchs, index, device):
    """All that the OpInfo claims for torch's: forward mode, and forward over reverse."""
    sample = find_sample(torchs, index, device, F64)
    mean, var, *parameters = sample.args

    def function(*leaves):
        buffers = (None if t is None else t.clone() for t in (mean, var))
        x, *rest = leaves
        return batch_norm(x, *buffers, *(rest or (None, None)), **sample.kwargs)

    leaves = (sample.input, *(p for p in parameters if p is not None))
    assert gradcheck(function, leaves, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(function, leaves, check_fwd_over_rev=True, check_batched_grad=True)


@pytest.mark.parametrize("index", [i for i in range(len(SAMPLES)) if i not in TWO_DIMENSIONS])
def test_samples_that_are_refused(torchs, index, device):
    assert f"batch_norm sample {index}" in DEVIATIONS
    sample = find_sample(torchs, index, device, F32)
    assert F.batch_norm(sample.input, *sample.args, **sample.kwargs).shape == (0,)
    with pytest.raises(
        RuntimeError, match=r"expected an input of shape \[N, C, \.\.\.\], got \(0,\)"
    ):
        batch_norm(sample.input, *sample.args, **sample.kwargs)
