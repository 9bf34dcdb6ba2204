"""The raw ops: errors, fakes, gradients and opcheck without a GPU, what only a GPU can show."""

import contextlib
import functools

import oracle
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cutlass_bn import cpu, library_is_loaded, reference
from cutlass_bn._activations import CODES
from cutlass_bn.functional import batch_norm
from cutlass_bn.ops import batch_norm as ops

pytestmark = pytest.mark.skipif(not library_is_loaded(), reason="needs the compiled library")


def residual_of_its_input(backward):
    """backward of the CPU with the gradient of the residual laid out like the first that is given,
    as the ops do.
    """

    def function(grad, input, *others):
        dx, dresidual, *vectors = backward(grad, input, *others)
        if dresidual.numel() and input is not None:
            dresidual = torch.empty_like(input).copy_(dresidual)
        return dx, dresidual, *vectors

    return function


CPU_KERNELS = {
    "training": cpu.batch_norm_training,
    "inference": cpu.batch_norm_inference,
    "backward": residual_of_its_input(cpu.batch_norm_backward),
    "inference_backward": residual_of_its_input(cpu.batch_norm_inference_backward),
}


@pytest.fixture
def ops_device(device):
    """`device`, with kernels for the ops there."""
    with contextlib.ExitStack() as stack:
        if device == "cpu":
            library = stack.enter_context(torch.library._scoped_library("cutlass_bn", "IMPL"))
            for name, kernel in CPU_KERNELS.items():
                library.impl(f"batch_norm_{name}", kernel, "CPU")
        yield device


def arguments(device: str, dtype=torch.float32, channels_last: bool = False) -> dict[str, Tensor]:
    x = torch.randn(4, 3, 6, 5, device=device).to(dtype)
    return {
        "x": x.to(memory_format=torch.channels_last) if channels_last else x,
        "residual": torch.randn(4, 3, 6, 5, device=device).to(dtype),
        "mean": torch.randn(3, device=device),
        "var": torch.rand(3, device=device) + 0.5,
        "counter": torch.tensor(0, device=device),
        "weight": torch.rand(3, device=device) + 0.5,
        "bias": torch.randn(3, device=device),
    }


# What follows the normalisation: an activation, and whether there is a residual.
AFTER = [(None, False), (None, True), ("leaky_relu", True), ("silu", False), ("silu", True)]
AFTERS = pytest.mark.parametrize(("activation", "with_residual"), AFTER, ids=str)


@AFTERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
def test_opcheck(dtype, channels_last, activation, with_residual, ops_device):
    a = arguments(ops_device, dtype, channels_last)
    # test_schema objects to the stand-ins for the kernels: they are Python, and it looks inside.
    utils = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    options = {"test_utils": ("test_schema", *utils) if ops_device == "cuda" else utils}
    running, code = (a["mean"], a["var"], a["counter"]), CODES[activation]
    x, weight, bias = a["x"], a["weight"], a["bias"]
    residual = a["residual"] if with_residual else None
    for _ in range(2):  # without and with gradients
        for others in ((*running, weight, bias, 0.1), (None, None, None, None, None, None)):
            torch.library.opcheck(
                ops.batch_norm_training, (x, residual, *others, 1e-5, code), **options
            )
        for tensor in (x, weight, bias, *([residual] if with_residual else [])):
            tensor.requires_grad_()
    torch.library.opcheck(
        ops.batch_norm_inference, (x, residual, *running[:2], weight, bias, 1e-5, code), **options
    )


def layer_of_ops(a, training, activation=None) -> Tensor:
    """As under torch.compile. An activation comes with a residual."""
    code, residual = CODES[activation], None if activation is None else a["residual"]
    statistics, affine = (a["mean"], a["var"]), (a["weight"], a["bias"])
    if not training:
        return ops.batch_norm_inference(a["x"], residual, *statistics, *affine, 1e-5, code)
    arguments = a["x"], residual, *statistics, None, *affine, 0.1, 1e-5, code
    return ops.batch_norm_training(*arguments)[0]


def eager_layer(a, training, activation=None) -> Tensor:
    """As functional.batch_norm calls them."""
    code, residual = CODES[activation], None if activation is None else a["residual"]
    statistics, affine = (a["mean"], a["var"]), (a["weight"], a["bias"])
    if not training:
        arguments = a["x"], residual, *statistics, *affine, 1e-5, code
        return ops.CUDA.inference.differentiable(*arguments)
    arguments = a["x"], residual, *statistics, None, *affine, 0.1, 1e-5, code
    return ops.CUDA.training.differentiable(*arguments)


def with_residual(wanted: tuple[str, ...], activation: str | None) -> tuple[str, ...]:
    return wanted if activation is None else (*wanted, "residual")


LAYERS = pytest.mark.parametrize("layer", [layer_of_ops, eager_layer])


class WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


@LAYERS
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_no_gradient_arrives(training, layer, ops_device):
    a = arguments(ops_device)
    leaves = [a[name].requires_grad_() for name in ("x", "weight", "bias")]
    y = layer(a, training)
    WithoutGradient.apply(y).sum().backward()
    assert all(leaf.grad is None or not leaf.grad.any() for leaf in leaves)


WANTED = {
    # input_grad, residual_grad, weight_grad, bias_grad
    "everything": (True, False, torch.float32, torch.float32),
    "input": (True, False, None, None),
    "weight in half precision": (False, False, torch.float16, None),
    "bias": (False, False, None, torch.float32),
    "everything and the residual": (True, True, torch.float32, torch.float32),
    "residual": (False, True, None, None),
}
# Which arguments of the two backward ops each of them needs: input and what is known of it.
NEEDED = {"input": (True, False), "bias": (False, False), "residual": (False, False)}


@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed", "expanded"])
def test_opcheck_of_the_gradients(wanted, layout, ops_device):
    a = arguments(ops_device, channels_last=layout == "channels_last")
    grad = torch.randn_like(a["x"])
    grad = {"transposed": grad.mT.contiguous().mT, "expanded": grad[:, :1, :1].expand_as(grad)}.get(
        layout, grad
    )
    y, stats = ops.batch_norm_training(a["x"], *(None,) * 7, 1e-5, 0)
    utils = ("test_faketensor", "test_aot_dispatch_dynamic")
    options = {"test_utils": ("test_schema", *utils) if ops_device == "cuda" else utils}
    in_training, in_eval = NEEDED.get(wanted, (True, True))
    after, code = (y, CODES["relu"]) if "residual" in wanted else (None, 0)
    last = None, after, code, *WANTED[wanted]
    known = (a["x"], stats, a["weight"]) if in_training else (None, None, None)
    torch.library.opcheck(ops.batch_norm_backward, (grad, *known, *last), **options)
    known = (a["x"], a["mean"]) if in_eval else (None, None)
    known += (a["var"], a["weight"]) if in_training else (None, None)
    last = None, after, 1e-5, code, *WANTED[wanted]
    torch.library.opcheck(ops.batch_norm_inference_backward, (grad, *known, *last), **options)


@LAYERS
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("wanted", [("x", "weight", "bias"), ("x",), ("bias",)], ids=str)
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
def test_batched_gradients(training, wanted, activation, layer, ops_device):
    """is_grads_batched, over gradients of any layout, and a second time over those."""
    a = arguments(ops_device)
    leaves = [a[name].requires_grad_() for name in with_residual(wanted, activation)]
    y = layer(a, training, activation)
    for directions in (
        torch.randn(2, *y.shape),
        torch.randn(*y.shape, 2).movedim(-1, 0),
        torch.randn(2, 1, 1, 6, 5),
    ):
        directions = directions.to(ops_device).expand(2, *y.shape)
        batched = torch.autograd.grad(
            y, leaves, directions, is_grads_batched=True, retain_graph=True
        )
        for i, direction in enumerate(directions):
            alone = torch.autograd.grad(y, leaves, direction, retain_graph=True)
            for actual, expected in zip(batched, alone, strict=True):
                torch.testing.assert_close(actual[i], expected)

    def gradients(direction):
        return torch.autograd.grad(y, leaves, direction, retain_graph=True)

    grid = torch.randn(2, 3, *y.shape, device=ops_device)
    nested = torch.func.vmap(torch.func.vmap(gradients))(grid)
    for actual, expected in zip(nested, gradients(grid[1, 2]), strict=True):
        torch.testing.assert_close(actual[1, 2], expected)


@LAYERS
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize(
    "wanted", [("x", "weight", "bias"), ("x",), ("weight",), ("bias",)], ids=str
)
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("double", [False, True], ids=["first", "second"])
def test_gradients_of_the_ops(training, wanted, activation, double, layer, ops_device):
    """CUDA's formulas against automatic differentiation of the definition in float64."""

    def gradients(function, dtype) -> list[Tensor]:
        torch.manual_seed(3)
        a = {name: t.to(dtype) for name, t in arguments(ops_device).items()}
        leaves = [a[name].requires_grad_() for name in with_residual(wanted, activation)]
        y = function(a, training, activation)
        if not double:
            return list(torch.autograd.grad(y.pow(3).sum(), leaves))
        first = torch.autograd.grad(y.pow(3).sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(sum(g.pow(2).sum() for g in first), leaves))

    def exact(a, training, activation):
        vectors = a["mean"], a["var"], None, a["weight"], a["bias"]
        residual = None if activation is None else a["residual"]
        how = training, 0.1, 1e-5, activation, residual
        return reference.batch_norm(a["x"], *vectors, *how)

    for actual, truth in zip(
        gradients(layer, torch.float32), gradients(exact, torch.float64), strict=True
    ):
        assert oracle.error(actual, truth) < 1e-4


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_compiles_without_graph_breaks(training, activation, ops_device):
    a = arguments(ops_device)
    names = with_residual(("x", "weight", "bias"), activation)
    leaves = [a[name].requires_grad_() for name in names]

    before = {**a, "mean": a["mean"].clone(), "var": a["var"].clone()}
    y = layer_of_ops(before, training, activation)
    expected = torch.autograd.grad(y.square().sum(), leaves)
    compiled = torch.compile(layer_of_ops, fullgraph=True, backend="aot_eager")
    y = compiled(a, training, activation)
    for actual, wanted in zip(torch.autograd.grad(y.square().sum(), leaves), expected, strict=True):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("shape", [(4, 3, 6, 5), (4, 3), (2, 3, 4, 5, 6), (0, 3, 4, 4)], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_fake_cuda_tensors(shape, training):
    with FakeTensorMode():
        x = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
        if len(shape) == 4:
            x = x.to(memory_format=torch.channels_last)
        vectors = [torch.empty(3, device="cuda") for _ in range(4)]
        _, stats = ops.batch_norm_training(x, None, *vectors[:2], None, None, None, 0.1, 1e-5, 0)
        assert stats.shape == (3, 3)
        assert stats.dtype == torch.float32
        y = batch_norm(x, *vectors, training=training)
        assert (y.shape, y.stride(), y.dtype, y.device) == (x.shape, x.stride(), x.dtype, x.device)


DTYPES = "expected float32, float16 or bfloat16"
NEEDED_FOR_DX = "expected a tensor, as the gradient of input is asked for, got None"
MISTAKES = {  # what is changed, how, and what is said
    "input on the CPU": ("x", Tensor.cpu, "input: expected a CUDA tensor"),
    "one dimension": ("x", Tensor.flatten, r"input: expected shape \[N, C, ...\], got \[360\]"),
    "float64 input": ("x", Tensor.double, f"input: {DTYPES}"),
    "running_mean too short": (
        "mean",
        lambda t: t[:2],
        r"running_mean: expected shape \[3\], got \[2\]",
    ),
    "running_var on the CPU": ("var", Tensor.cpu, "running_var: expected a tensor on cuda:0"),
    "running_mean strided": (
        "mean",
        lambda t: t.repeat(2)[::2],
        "running_mean: expected a contiguous",
    ),
    "running_mean alone": ("var", lambda t: None, "expected both or neither"),
    "counter of int32": ("counter", Tensor.int, "num_batches_tracked: expected one int64"),
    "no counter to average over": (
        "counter momentum",
        lambda t: None,
        "momentum: expected a number",
    ),
    "one value per channel": (
        "x",
        lambda t: t[:1, :, :1, :1].contiguous(),
        "input: expected more than 1 value",
    ),
    "weight too short": ("weight", lambda t: t[:2], r"weight: expected shape \[3\], got \[2\]"),
    "float64 bias": ("bias", Tensor.double, f"bias: {DTYPES}"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("mistake", MISTAKES)
def test_errors_change_nothing(mistake):
    names, spoil, message = MISTAKES[mistake]
    good = arguments("cuda")
    before = [good[name].clone() for name in ("mean", "var", "counter")]
    a = {**good, "momentum": 0.1}
    a.update({name: spoil(a[name]) for name in names.split()})
    vectors = a["mean"], a["var"], a["counter"], a["weight"], a["bias"]
    with pytest.raises(RuntimeError, match=message):
        ops.batch_norm_training.redispatch(
            torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA),
            a["x"], None, *vectors, a["momentum"], 1e-5, 0,
        )  # fmt: skip
    after = [good[name] for name in ("mean", "var", "counter")]
    assert all(map(torch.equal, after, before))


BACKWARD_MISTAKES = [  # of zeros, and what is said
    (
        "grad",
        lambda z: z(4, 3, 6),
        r"grad: expected shape \[4, 3, 6, 5\] like input, got \[4, 3, 6\]",
    ),
    ("grad", lambda z: z(4, 3, 6, 5).half(), "grad: expected float32 like input, got float16"),
    ("grad", lambda z: z(4, 3, 6, 5).double(), f"grad: {DTYPES}"),
    ("grad", lambda z: z(360), r"grad: expected shape \[N, C, ...\], got \[360\]"),
    ("x", lambda z: None, f"input: {NEEDED_FOR_DX}"),
    ("stats", lambda z: None, f"stats: {NEEDED_FOR_DX}"),
    ("stats", lambda z: z(3, 2), r"stats: expected shape \[3, 3\], got \[3, 2\]"),
    ("weight", lambda z: z(2), r"weight: expected shape \[3\], got \[2\]"),
    ("bias_grad", lambda z: torch.int64, f"bias_grad: {DTYPES}"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "make", "message"), BACKWARD_MISTAKES)
def test_backward_errors(name, make, message):
    zeros = functools.partial(torch.zeros, device="cuda")
    a = {
        **arguments("cuda"),
        "stats": zeros(3, 3),
        "grad": zeros(4, 3, 6, 5),
        "bias_grad": torch.float32,
    }
    a[name] = make(zeros)
    known, asked = (a["x"], a["stats"], a["weight"]), (True, False, torch.float32, a["bias_grad"])
    with pytest.raises(RuntimeError, match=message):
        ops.batch_norm_backward(a["grad"], *known, None, None, 0, *asked)


COPIED = {
    "strided": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "transposed": lambda t: t.mT.contiguous().mT,
    "cropped": lambda t: torch.nn.functional.pad(t, (1, 1, 1, 1))[..., 1:-1, 1:-1],
    "expanded": lambda t: t[:1].expand_as(t),
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("layout", COPIED)
def test_what_is_not_dense_is_copied(layout, training, ops_device):
    """Input, and vectors of another stride than 1: in forward and backward."""
    a = arguments(ops_device)
    spread = {**a, "x": COPIED[layout](a["x"])}
    for name in ("weight", "bias"):
        spread[name] = a[name].repeat_interleave(2)[::2]
        assert not spread[name].is_contiguous()
    spread = {name: t.detach() for name, t in spread.items()}
    results = []
    for b in (spread, {name: t.contiguous() for name, t in spread.items()}):
        b = {**b, "mean": a["mean"].clone(), "var": a["var"].clone()}
        leaves = [b[name].requires_grad_() for name in ("x", "weight", "bias", "residual")]
        y = layer_of_ops(b, training, "silu")
        gradients = torch.autograd.grad(y.sin().sum(), leaves)
        results.append((y, *gradients, b["mean"], b["var"]))
    for ours, dense in zip(*results, strict=True):
        torch.testing.assert_close(ours, dense, rtol=1e-6, atol=1e-6)
    assert results[0][0].is_contiguous()
