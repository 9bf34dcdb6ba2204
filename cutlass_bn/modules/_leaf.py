"""What makes our modules leaves of torch.fx, as torch.nn's are."""

from __future__ import annotations

from typing import Any


class Leaf:
    """A mixin, to stand behind torch's class among the bases: fx tracers don't look inside.

    Tracers that know nothing of us (torch.fx's own, those of torchvision, timm and
    torch.ao.quantization) take for a leaf what says that it was defined in torch.nn. So the
    instance says so, and its class doesn't: pickle, copy, repr and torch.package ask the class.
    Subclasses are leaves, too: to trace our forward would fail at its conditions.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Not in __init__, without which copies, unpickled modules and replicas come about.
        new: Any = super().__new__
        module = new(cls) if new is object.__new__ else new(cls, *args, **kwargs)
        # Not "torch.nn.modules": dynamo leaves state of what is in there unguarded.
        module.__dict__["__module__"] = "torch.nn"
        return module
