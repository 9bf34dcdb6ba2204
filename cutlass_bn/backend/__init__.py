"""`torch.compile(model, backend="cutlass_bn")`: Inductor, after our functions took the place of
what they fuse.

Installed, the package registers this backend by an entry point; so does the import of this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo import list_backends, lookup_backend, register_backend

from ._rewrite import rewrite

__all__ = ["cutlass_bn"]


def cutlass_bn(
    graph_module: fx.GraphModule,
    example_inputs: list[Tensor],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Rewrites a graph that Dynamo captured, and compiles it with Inductor.

    Batch normalisation with the activation behind it, with an addition between the two, and with
    the linear layer before it become calls of `cutlass_bn.functional`. Everything else is left as
    it is; where nothing is found, Inductor gets the graph that Dynamo made.

    Args:
        mode, options: as Inductor takes them, and one option more: "inductor", False to run the
            rewritten graph without compiling it.

    Raises:
        ValueError: other options beside "inductor": False.
    """
    of_inductor = dict(options or {})
    with_inductor = of_inductor.pop("inductor", True)
    if of_inductor and not with_inductor:
        unused = ", ".join(of_inductor)
        raise ValueError(f'options: "inductor" is False, which leaves no use for {unused}')
    rewrite(graph_module)
    if not with_inductor:
        return graph_module.forward
    if mode is not None:
        of_inductor = {**torch._inductor.list_mode_options(mode), **of_inductor}
    of_inductor = {name.replace("-", "_"): value for name, value in of_inductor.items()}
    inductor: Callable[..., Any] = lookup_backend("inductor")
    with _compiling():
        return inductor(graph_module, example_inputs, config_patches=of_inductor)


@contextmanager
def _compiling() -> Iterator[None]:
    """Makes `torch.compiler.is_compiling()` true, by which our functions know that they are traced.

    Until torch 2.13 it is so while Dynamo captures, and no more when AOTAutograd traces.
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


if "cutlass_bn" not in list_backends():  # which knows of the entry points, too
    register_backend(cutlass_bn)
