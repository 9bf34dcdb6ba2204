"""Graphs that leave the process: torch.export, ONNX, torch.jit.trace, make_fx, functionalize.

And models that come from elsewhere: counters of other dtypes and devices. Expected is torch.nn's
module, in float64 where it can be.
"""

from __future__ import annotations

import copy
import io
import itertools
import warnings

import pytest
import torch
from linear_cases import ACTIVATIONS, BF16, FP16, TRAINING, max_error
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from cutlass_bn import BatchNorm2d, LinearBatchNorm1d

KINDS = pytest.mark.parametrize("kind", ["conv", "linear"])
STRICT = pytest.mark.parametrize("strict", [True, False], ids=["strict", "lenient"])


class Separate(nn.Module):
    """torch.nn's modules under the names that LinearBatchNorm1d has for them."""

    def __init__(self, like: LinearBatchNorm1d) -> None:
        super().__init__()
        self.gemm, self.bn = nn.Linear(6, 5), nn.BatchNorm1d(5, momentum=like.bn.momentum)
        self.scale = None if like.scale is None else nn.Parameter(torch.empty(5))
        self.activation = like.activation

    def forward(self, x: Tensor) -> Tensor:
        z = self.gemm(x)
        return ACTIVATIONS[self.activation](self.bn(z if self.scale is None else z * self.scale))


def make(
    kind: str,
    device: str,
    training: bool,
    momentum: float | None = 0.1,
    scale: bool = True,
    activation: str | None = "silu",
) -> tuple[nn.Module, nn.Module, Tensor]:
    """(ours, torch's with the same state, an input)."""
    torch.manual_seed(0)
    if kind == "conv":
        ours: nn.Module = BatchNorm2d(3, momentum=momentum)
        theirs: nn.Module = nn.BatchNorm2d(3, momentum=momentum)
    else:
        ours = LinearBatchNorm1d(6, 5, scale=scale, activation=activation, momentum=momentum)
        theirs = Separate(ours)
    for name, tensor in ours.state_dict().items():
        if tensor.is_floating_point():
            nn.init.uniform_(tensor, 0.5 if name.endswith("running_var") else -1.0, 1.5)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn((4, 3, 5, 5) if kind == "conv" else (9, 6))
    return ours.to(device).train(training), theirs.to(device).train(training), x.to(device)


def norm_of(module: nn.Module) -> nn.Module:
    return getattr(module, "bn", module)


def through_a_file(save, load, what):
    file = io.BytesIO()
    save(what, file)
    file.seek(0)
    return load(file)


def assert_same_state(module: nn.Module, theirs: nn.Module) -> None:
    """What the module still has of their buffers: a graph of eval may have dropped the counter."""
    for name, buffer in module.named_buffers():
        assert max_error(buffer, theirs.get_buffer(name)) < 1e-5, name


def assert_trains_alike(module: nn.Module, theirs: nn.Module, x: Tensor) -> None:
    """Steps of other batch sizes than the graph was made with: outputs, statistics, parameters."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (module, theirs)]
    for batch in (x, torch.cat([x, 2 * x + 1]), x[:3]):
        outputs = [m(batch.to(next(m.parameters()).dtype)) for m in (module, theirs)]
        assert max_error(*outputs) < 1e-5
        assert_same_state(module, theirs)
        for y, optimizer in zip(outputs, optimizers, strict=True):
            optimizer.zero_grad()
            (y**3).sum().backward()
            optimizer.step()
    for name, parameter in module.named_parameters():
        assert max_error(parameter, theirs.get_parameter(name)) < 1e-4, name


@TRAINING
@KINDS
@STRICT
@pytest.mark.parametrize("momentum", [0.1, None])
def test_exported_saved_and_loaded(momentum, strict, kind, training, device):
    module, theirs, x = make(kind, device, training, momentum)
    dynamic = ({0: torch.export.Dim("batch", min=2, max=4096)},)
    program = torch.export.export(module, (x,), dynamic_shapes=dynamic, strict=strict)
    loaded = through_a_file(torch.export.save, torch.export.load, program)
    assert_trains_alike(loaded.module(), theirs.double(), x)


@TRAINING
@KINDS
def test_decomposed_programs(kind, training, device):
    """Core ATen, as other runtimes take it: the mutations have become outputs."""
    module, theirs, x = make(kind, device, training)
    program = torch.export.export(module, (x,)).run_decompositions()
    loaded = through_a_file(torch.export.save, torch.export.load, program).module()
    with torch.no_grad():
        assert max_error(loaded(x), theirs.double()(x.double())) < 1e-5
    assert_same_state(loaded, theirs)


@TRAINING
@KINDS
@STRICT
def test_float32_stays_float32(strict, kind, training, device):
    module, _, x = make(kind, device, training)
    program = torch.export.export(module, (x,), strict=strict)
    values = [node.meta["val"] for node in program.graph.nodes if "val" in node.meta]
    tensors = [
        t for value in values for t in (value if isinstance(value, tuple | list) else [value])
    ]
    dtypes = {t.dtype for t in tensors if isinstance(t, Tensor) and t.is_floating_point()}
    assert dtypes == {torch.float32}


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize(
    ("kind", "scale", "activation"),
    [("conv", False, None), *itertools.product(["linear"], [False, True], ACTIVATIONS)],
)
def test_onnx(kind, scale, activation, exporter, device):
    """A BatchNormalization, or a Gemm that took it in, of the model's dtype, and our values."""
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    module, _, x = make(kind, device, False, scale=scale, activation=activation)
    graph = to_onnx(module, x, exporter)
    kinds = {node.op_type for node in graph.graph.node}
    folded = exporter == "dynamo" and kind == "linear" and not scale
    assert ("Gemm" if folded else "BatchNormalization") in kinds
    assert len(graph.graph.node) <= 9, "GELU in the older opset takes five"
    assert types_of(onnx, graph) <= {onnx.TensorProto.FLOAT, onnx.TensorProto.INT64}
    session = runtime.InferenceSession(
        graph.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    for batch in (x, x[:1], torch.cat([x, x + 1])):
        (y,) = session.run(None, {session.get_inputs()[0].name: batch.cpu().numpy()})
        assert max_error(torch.from_numpy(y), module(batch).detach().cpu()) < 1e-5


@KINDS
def test_onnx_of_half_precision(kind, device):
    onnx = pytest.importorskip("onnx")
    module, _, x = make(kind, device, False)
    graph = to_onnx(module.half(), x.half(), "dynamo")
    assert types_of(onnx, graph) <= {onnx.TensorProto.FLOAT16, onnx.TensorProto.INT64}


def to_onnx(module: nn.Module, x: Tensor, exporter: str):
    onnx = pytest.importorskip("onnx")
    if exporter == "dynamo":
        pytest.importorskip("onnxscript")
        program = torch.onnx.export(
            module,
            (x,),
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            verbose=False,
        )
        return program.model_proto
    file = io.BytesIO()
    axes = {"x": {0: "batch"}, "y": {0: "batch"}}
    torch.onnx.export(
        module, (x,), file, dynamo=False, input_names=["x"], output_names=["y"], dynamic_axes=axes
    )
    return onnx.load_from_string(file.getvalue())


def types_of(onnx, model) -> set[int]:
    """The element types of all in the graph: inputs, weights, values between and constants."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    values = (*graph.input, *graph.output, *graph.value_info)
    constants = [
        a.t.data_type
        for node in graph.node
        for a in node.attribute
        if a.type == onnx.AttributeProto.TENSOR
    ]
    casts = [
        a.i
        for node in graph.node
        if node.op_type == "Cast"
        for a in node.attribute
        if a.name == "to"
    ]
    return {
        *(value.type.tensor_type.elem_type for value in values),
        *(tensor.data_type for tensor in graph.initializer),
        *constants,
        *casts,
    }


@TRAINING
@KINDS
@STRICT
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_exported_inside_autocast_and_run_anywhere(dtype, strict, kind, training, device):
    module, theirs, x = make(kind, device, training)
    with torch.autocast(device, dtype=dtype):
        program = torch.export.export(module, (x,), strict=strict)
    theirs.double()
    for inside in (False, True):
        with torch.autocast(device, dtype=dtype, enabled=inside):
            y = program.module()(x)
        assert max_error(y, theirs(x.double())) < 3e-2
        y.float().square().sum().backward()


@TRAINING
@KINDS
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_traced_saved_and_loaded(autocast, kind, training, device):
    """With gradients: an autograd.Function would be traced as Python, which can't be saved."""
    module, theirs, x = make(kind, device, training)
    with (
        warnings.catch_warnings(),
        torch.autocast(device, dtype=BF16, enabled=autocast, cache_enabled=False),
    ):
        # The warnings: torch.jit is deprecated, and sizes are looked at.
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(copy.deepcopy(module), (x,), check_trace=False)
    loaded = through_a_file(torch.jit.save, torch.jit.load, traced)
    if autocast:
        assert max_error(loaded(x), theirs.double()(x.double())) < 3e-2
        return
    for name, buffer in loaded.named_buffers():  # tracing has run the module once
        buffer.copy_(module.get_buffer(name))
    assert_trains_alike(loaded, theirs.double(), x)


@TRAINING
@KINDS
def test_functionalize(kind, training, device):
    module, theirs, x = make(kind, device, training)
    theirs.double()
    for _ in range(2):
        assert max_error(torch.func.functionalize(module)(x), theirs(x.double())) < 1e-5
    assert_same_state(module, theirs)


@TRAINING
@KINDS
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("through", ["plain", "functionalized", "before dispatch"])
def test_make_fx(through, mode, kind, training, device):
    module, theirs, x = make(kind, device, training)
    function = torch.func.functionalize(module) if through == "functionalized" else module
    options = {
        "tracing_mode": mode,
        "_allow_non_fake_inputs": True,
        "pre_dispatch": through == "before dispatch",
    }
    before = copy.deepcopy(module.state_dict())
    with torch.no_grad():
        graph = make_fx(function, **options)(x)
        module.load_state_dict(before)  # with real tensors tracing has run it
        assert max_error(graph(x), theirs.double()(x.double())) < 1e-5
    assert_same_state(module, theirs)


@TRAINING
@KINDS
@pytest.mark.parametrize("transform", ["grad", "jvp"])
def test_transforms_inside_compiled_code(transform, kind, training, device):
    torch.compiler.reset()
    module, theirs, x = make(kind, device, training)
    for norm in (norm_of(module), norm_of(theirs)):
        norm.track_running_stats = not training  # torch.func refuses updates of what it isn't given

    def call(function, x):
        if transform == "jvp":
            return torch.func.jvp(function, (x,), (x.cos(),))[1]
        return torch.func.grad(lambda x: (function(x) ** 3).sum())(x)

    compiled = torch.compile(lambda x: call(module, x), backend="aot_eager", fullgraph=True)
    assert max_error(compiled(x), call(theirs.double(), x.double())) < 1e-5


@TRAINING
@KINDS
@pytest.mark.parametrize("where", ["meta", "fake", "fake outside of its mode"])
def test_tensors_without_values(where, kind, training, device):
    module, _, x = make(kind, device, training)
    expected = module(x)
    mode = FakeTensorMode()
    if where == "meta":
        y = module.to("meta")(x.to("meta"))
    else:
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            owner = module.get_submodule(name.rpartition(".")[0])
            slot = owner._parameters if isinstance(tensor, nn.Parameter) else owner._buffers
            slot[name.rpartition(".")[2]] = mode.from_tensor(tensor)
        x = mode.from_tensor(x)
        with mode if where == "fake" else warnings.catch_warnings():
            y = module(x)
    assert (y.shape, y.stride(), y.dtype) == (expected.shape, expected.stride(), expected.dtype)
    assert y.requires_grad


@KINDS
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.uint8, torch.float32, torch.float64, FP16, BF16], ids=str
)
def test_counters_of_any_dtype(dtype, momentum, kind, device):
    check_counter(*make(kind, device, True, momentum), lambda counter: counter.to(dtype))


@pytest.mark.gpu
@KINDS
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32], ids=str)
def test_counters_on_the_cpu(dtype, momentum, kind):
    """What assign=True leaves of a state dict that was saved before there were counters."""
    check_counter(*make(kind, "cuda", True, momentum), lambda counter: counter.to("cpu", dtype))


def check_counter(module: nn.Module, theirs: nn.Module, x: Tensor, change) -> None:
    for norm in (norm_of(module), norm_of(theirs)):
        norm.num_batches_tracked = change(norm.num_batches_tracked)
    kept = norm_of(module).num_batches_tracked
    for step in range(1, 4):
        assert max_error(module(x + step), theirs(x + step)) < 1e-5
        assert norm_of(module).num_batches_tracked is kept
        assert kept == step
        assert_same_state(module, theirs)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(ValueError, match="more than 1 value"):
        module(x[:1, :, :1, :1] if x.dim() == 4 else x[:1])
    assert all(torch.equal(now, before[name]) for name, now in module.state_dict().items())


def test_the_counter_does_not_synchronise(device):
    module, x = BatchNorm2d(3).to(device), torch.ones(2, 3, 2, 2, device=device)
    module.num_batches_tracked = module.num_batches_tracked.int()
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        module(x)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert module.num_batches_tracked == 1
