"""The raw ops: errors, fakes, gradients and opcheck without a GPU, what only a GPU can show."""

import contextlib
import functools

import oracle
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cutlass_bn import library_is_loaded, reference
from cutlass_bn.functional import batch_norm
from cutlass_bn.ops import batch_norm as ops

pytestmark = pytest.mark.skipif(not library_is_loaded(), reason="needs the compiled library")


def cpu_training(
    input, running_mean, running_var, num_batches_tracked, weight, bias, momentum, eps
):
    """batch_norm_training for CPU tensors: what is around the kernels is tested without a GPU."""
    exact = oracle.batch_norm(input)
    y = reference.batch_norm(
        input, running_mean, running_var, num_batches_tracked, weight, bias, True, momentum, eps
    )
    mean = exact.mean.float()
    return y.detach(), torch.stack(
        [mean, (exact.mean - mean).float(), torch.rsqrt(exact.var + eps).float()]
    )


def cpu_inference(input, running_mean, running_var, weight, bias, eps) -> Tensor:
    return reference.batch_norm(
        input, running_mean, running_var, None, weight, bias, False, 0.0, eps
    )


def cpu_gradients(
    grad, input, mean, invstd, weight, of_batch, wanted
) -> tuple[Tensor, Tensor, Tensor]:
    needs_dx, weight_dtype, bias_dtype = wanted
    dims = [dim for dim in range(grad.dim()) if dim != 1]
    dx, dweight, dbias = grad.new_empty(0), grad.new_empty(0), grad.new_empty(0)
    dy = grad.double()
    if bias_dtype is not None:
        dbias = dy.sum(dims).to(bias_dtype)
    if needs_dx or weight_dtype is not None:
        gain = invstd.double() if weight is None else invstd.double() * weight.double()
        wide_dx = dy
        if input is not None:
            normalised = (input.double() - oracle.per_channel(mean, input)) * oracle.per_channel(
                invstd, input
            )
            wide_dweight = (dy * normalised).sum(dims)
            if weight_dtype is not None:
                dweight = wide_dweight.to(weight_dtype)
            if of_batch:
                count = grad.numel() // grad.size(1)
                wide_dx = dy - oracle.per_channel(dy.sum(dims) / count, dy)
                wide_dx -= normalised * oracle.per_channel(wide_dweight / count, dy)
        if needs_dx:
            like = grad if input is None else input
            if not like.is_contiguous() and not like.movedim(1, -1).is_contiguous():
                like = like.contiguous()
            dx = torch.empty_like(like).copy_(wide_dx * oracle.per_channel(gain, dy))
    return dx, dweight, dbias


def cpu_backward(grad, input, stats, weight, *wanted) -> tuple[Tensor, Tensor, Tensor]:
    mean, invstd = (None, None) if stats is None else (stats[0].double() + stats[1], stats[2])
    return cpu_gradients(grad, input, mean, invstd, weight, True, wanted)


def cpu_inference_backward(grad, input, running_mean, running_var, weight, eps, *wanted):
    invstd = None if running_var is None else (running_var.double() + eps).rsqrt()
    mean = None if running_mean is None else running_mean.double()
    return cpu_gradients(grad, input, mean, invstd, weight, False, wanted)


@pytest.fixture
def ops_device(device):
    """`device`, with kernels for the ops there."""
    with contextlib.ExitStack() as stack:
        if device == "cpu":
            library = stack.enter_context(torch.library._scoped_library("cutlass_bn", "IMPL"))
            library.impl("batch_norm_training", cpu_training, "CPU")
            library.impl("batch_norm_inference", cpu_inference, "CPU")
            library.impl("batch_norm_backward", cpu_backward, "CPU")
            library.impl("batch_norm_inference_backward", cpu_inference_backward, "CPU")
        yield device


def arguments(device: str, dtype=torch.float32, channels_last: bool = False) -> dict[str, Tensor]:
    x = torch.randn(4, 3, 6, 5, device=device).to(dtype)
    return {
        "x": x.to(memory_format=torch.channels_last) if channels_last else x,
        "mean": torch.randn(3, device=device),
        "var": torch.rand(3, device=device) + 0.5,
        "counter": torch.tensor(0, device=device),
        "weight": torch.rand(3, device=device) + 0.5,
        "bias": torch.randn(3, device=device),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
def test_opcheck(dtype, channels_last, ops_device):
    a = arguments(ops_device, dtype, channels_last)
    # test_schema objects to the stand-ins for the kernels: they are Python, and it looks inside.
    utils = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    options = {"test_utils": ("test_schema", *utils) if ops_device == "cuda" else utils}
    running = (a["mean"], a["var"], a["counter"])
    for _ in range(2):  # without and with gradients
        x, weight, bias = a["x"], a["weight"], a["bias"]
        torch.library.opcheck(
            ops.batch_norm_training, (x, *running, weight, bias, 0.1, 1e-5), **options
        )
        torch.library.opcheck(
            ops.batch_norm_training, (x, None, None, None, None, None, None, 1e-5), **options
        )
        for tensor in (x, weight, bias):
            tensor.requires_grad_()
    torch.library.opcheck(
        ops.batch_norm_inference, (x, a["mean"], a["var"], weight, bias, 1e-5), **options
    )


def layer_of_ops(x, mean, var, weight, bias, training) -> Tensor:
    """As under torch.compile."""
    if not training:
        return ops.batch_norm_inference(x, mean, var, weight, bias, 1e-5)
    return ops.batch_norm_training(x, mean, var, None, weight, bias, 0.1, 1e-5)[0]


def eager_layer(x, mean, var, weight, bias, training) -> Tensor:
    """As functional.batch_norm calls them."""
    if not training:
        return ops.differentiable_inference(x, mean, var, weight, bias, 1e-5)
    return ops.differentiable_training(x, mean, var, None, weight, bias, 0.1, 1e-5)[0]


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
    y = layer(a["x"], a["mean"], a["var"], a["weight"], a["bias"], training)
    WithoutGradient.apply(y).sum().backward()
    assert all(leaf.grad is None or not leaf.grad.any() for leaf in leaves)


WANTED = {
    # input_grad, weight_grad, bias_grad
    "everything": (True, torch.float32, torch.float32),
    "input": (True, None, None),
    "weight in half precision": (False, torch.float16, None),
    "bias": (False, None, torch.float32),
}
# Which arguments of the two backward ops each of them needs: input and what is known of it.
NEEDED = {
    "everything": (True, True),
    "input": (True, False),
    "weight in half precision": (True, True),
    "bias": (False, False),
}


@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed", "expanded"])
def test_opcheck_of_the_gradients(wanted, layout, ops_device):
    a = arguments(ops_device, channels_last=layout == "channels_last")
    grad = torch.randn_like(a["x"])
    grad = {"transposed": grad.mT.contiguous().mT, "expanded": grad[:, :1, :1].expand_as(grad)}.get(
        layout, grad
    )
    _, stats = ops.batch_norm_training(a["x"], None, None, None, None, None, 0.1, 1e-5)
    utils = ("test_faketensor", "test_aot_dispatch_dynamic")
    options = {"test_utils": ("test_schema", *utils) if ops_device == "cuda" else utils}
    in_training, in_eval = NEEDED[wanted]
    known = (a["x"], stats, a["weight"]) if in_training else (None, None, None)
    torch.library.opcheck(ops.batch_norm_backward, (grad, *known, *WANTED[wanted]), **options)
    running = (a["x"], a["mean"]) if in_eval else (None, None)
    running = (
        *running,
        a["var"] if in_training else None,
        a["weight"] if in_training else None,
        1e-5,
    )
    torch.library.opcheck(
        ops.batch_norm_inference_backward, (grad, *running, *WANTED[wanted]), **options
    )


@LAYERS
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("wanted", [("x", "weight", "bias"), ("x",), ("bias",)], ids=str)
def test_batched_gradients(training, wanted, layer, ops_device):
    """is_grads_batched, over gradients of any layout, and a second time over those."""
    a = arguments(ops_device)
    leaves = [a[name].requires_grad_() for name in wanted]
    y = layer(a["x"], a["mean"], a["var"], a["weight"], a["bias"], training)
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
@pytest.mark.parametrize("double", [False, True], ids=["first", "second"])
def test_gradients_of_the_ops(training, wanted, double, layer, ops_device):
    """CUDA's formulas against automatic differentiation of the definition in float64."""

    def gradients(function, dtype) -> list[Tensor]:
        torch.manual_seed(3)
        a = {name: t.to(dtype) for name, t in arguments(ops_device).items()}
        leaves = [a[name].requires_grad_() for name in wanted]
        y = function(a["x"], a["mean"], a["var"], a["weight"], a["bias"], training)
        if not double:
            return list(torch.autograd.grad(y.pow(3).sum(), leaves))
        first = torch.autograd.grad(y.pow(3).sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(sum(g.pow(2).sum() for g in first), leaves))

    def exact(x, mean, var, weight, bias, training):
        return reference.batch_norm(x, mean, var, None, weight, bias, training, 0.1, 1e-5)

    for actual, truth in zip(
        gradients(layer, torch.float32), gradients(exact, torch.float64), strict=True
    ):
        assert oracle.error(actual, truth) < 1e-4


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_compiles_without_graph_breaks(training, ops_device):
    a = arguments(ops_device)
    leaves = [a[name].requires_grad_() for name in ("x", "weight", "bias")]

    def step(x, mean, var, weight, bias):
        y = layer_of_ops(x, mean, var, weight, bias, training)
        return torch.autograd.grad(y.square().sum(), leaves)

    expected = step(a["x"], a["mean"].clone(), a["var"].clone(), a["weight"], a["bias"])
    compiled = torch.compile(layer_of_ops, fullgraph=True, backend="aot_eager")
    y = compiled(a["x"], a["mean"], a["var"], a["weight"], a["bias"], training)
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
        _, stats = ops.batch_norm_training(x, *vectors[:2], None, None, None, 0.1, 1e-5)
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
    "strided input": ("x", lambda t: t[..., ::2], "input: expected a dense tensor"),
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
    with pytest.raises(RuntimeError, match=message):
        ops.batch_norm_training.redispatch(
            torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA),
            a["x"], a["mean"], a["var"], a["counter"], a["weight"], a["bias"], a["momentum"], 1e-5,
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
    ("x", lambda z: z(4, 3, 6, 10)[..., ::2], "input: expected a dense tensor"),
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
    with pytest.raises(RuntimeError, match=message):
        ops.batch_norm_backward(
            a["grad"], a["x"], a["stats"], a["weight"], True, torch.float32, a["bias_grad"]
        )
