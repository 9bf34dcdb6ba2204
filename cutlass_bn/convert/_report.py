"""What became of each module of a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..modules import LinearBatchNorm1d
from ..modules._fusible import LEFT_ALONE, NORMS, activation_of, is_fusible, is_identity
from ..modules._group import group_of, synchronised_over
from ._block import plans_of
from ._classes import PLAN, Fusing
from ._modules import is_asked_for, names_of, walk, why_left_alone
from ._sequential import FusingSequential, groups, is_exact
from ._trace import NotTraceable


class Report(dict[str, str]):
    """What became of each BatchNorm, Linear and activation of a model, by its qualified name: how
    it is fused, or why it is left alone. As text, one module a line."""

    def __str__(self) -> str:
        return "\n".join(f"{name or '(the model)'}: {text}" for name, text in self.items())


def report(model: nn.Module) -> Report:
    modules, names = dict(walk(model)), names_of(model)
    fused: dict[str, str] = {}
    for name, module in modules.items():
        prefix = f"{name}." if name else ""
        if "forward" in module.__dict__:
            continue
        if isinstance(module, FusingSequential):
            if is_exact(module):
                _add_groups(fused, module, prefix)
        elif isinstance(module, Fusing):
            _add_fusions(fused, module, prefix)
        elif type(module) in NORMS and is_fusible(module):
            _add_own(fused, module, name, prefix)
    found = Report()
    for name, module in modules.items():
        if isinstance(module, LinearBatchNorm1d):
            found[name] = "fused: LinearBatchNorm1d"
            if module.process_group is not None:
                found[name] += f", {synchronised_over(module.process_group)}"
        elif isinstance(module, torch.jit.ScriptModule):
            found[name] = "left alone: TorchScript"
        elif is_asked_for(module):
            found[name] = fused.get(name) or _alone(name, module, modules, names[module])
            if getattr(module, "is_synchronised", False):
                found[name] += f", {synchronised_over(group_of(module))}"
    return found


def _add_groups(fused: dict[str, str], container: Any, prefix: str) -> None:
    keys = list(container._modules)
    for at, group in groups(container):
        members = keys[at : at + group.width]
        text = " + ".join(type(container._modules[key]).__name__ for key in members)
        for key in members:
            others = ", ".join(prefix + other for other in members if other != key)
            fused[prefix + key] = f"fused: {text}, with {others}"


def _add_fusions(fused: dict[str, str], container: Any, prefix: str) -> None:
    plans = container.__dict__.get(PLAN)
    if not plans:
        return
    plan, children = plans[container.training], container._modules
    users: dict[str, list[str]] = {}  # of the activations
    for fusion in plan.fusions:
        norm = prefix + fusion.norm
        if not plan.is_as_traced(container):
            fused[norm] = f"not fused: {prefix[:-1] or 'the model'} or a child of it has changed"
            continue
        parts = [type(children[fusion.norm]).__name__]
        parts += ["residual"] if fusion.residual else []
        parts += [fusion.activation] if fusion.activation else []
        fused[norm] = f"fused: {' + '.join(parts)}"
        if fusion.layer is not None:
            fused[norm] += f", with {prefix}{fusion.layer}"
            users.setdefault(prefix + fusion.layer, []).append(norm)
    fused.update((layer, f"fused: with {', '.join(norms)}") for layer, norms in users.items())


def _add_own(fused: dict[str, str], norm: Any, name: str, prefix: str) -> None:
    """A norm that has an activation of its own, by name or, in timm's, as a child."""
    cls, activation = type(norm).__name__, getattr(norm, "activation", None)
    if activation is not None:
        fused[name] = f"fused: {cls} + {activation}"
    elif not norm.is_bare():
        activation = activation_of(norm.act) if is_identity(norm.drop) else None
        if activation is None:
            fused[name] = f"{cls} alone: its own layers follow it"
        else:
            fused[name] = f"fused: {cls} + {activation}"
            fused[prefix + "act"] = f"fused: with {name or 'the model'}"


def _alone(name: str, module: Any, modules: dict[str, nn.Module], its_names: list[str]) -> str:
    if LEFT_ALONE in module.__dict__:
        return "left alone: filter_fn"
    cls = type(module).__name__
    if type(module) not in NORMS:
        if not isinstance(module, nn.modules.batchnorm._NormBase):
            return f"left alone: {_why_no_neighbour(module)}"
        reason = why_left_alone(module, its_names)
        return f"left alone: {reason or 'not converted'}"
    return f"{cls} alone: {_why_alone(name, module, modules)}"


def _why_no_neighbour(module: nn.Module) -> str:
    if not is_fusible(module):
        return "it has hooks or a patched forward"
    if isinstance(module, nn.Linear):
        return "no BatchNorm1d of ours follows it in an nn.Sequential"
    if activation_of(module) is None:
        return "no activation that we fuse"
    return "no BatchNorm of ours that may be fused is before it"


def _why_alone(name: str, module: nn.Module, modules: dict[str, nn.Module]) -> str:
    """Why nothing is fused to a norm of ours."""
    if not is_fusible(module):
        return "it has hooks or a patched forward"
    parent_name, _, key = name.rpartition(".")
    parent = modules[parent_name]
    if parent is module:
        return "it is the model"
    if is_exact(parent):
        keys = list(parent._modules)
        if key == keys[-1]:
            return f"nothing follows it in {parent_name or 'the model'}"
        return f"{type(parent._modules[keys[keys.index(key) + 1]]).__name__} follows it"
    try:
        plan = plans_of(parent)[parent.training]
    except NotTraceable as error:
        return f"{type(parent).__name__} is not traced: {error}"
    if any(fusion.norm == key for fusion in plan.fusions):
        return "convert(model, trace=True) fuses more"
    return "no activation or addition alone takes its output"
