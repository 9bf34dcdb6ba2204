"""Writes docs/api.md, the reference of all public names, from their docstrings: `make docs`."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"
BATCH_NORM_ACT = ROOT / "cutlass_bn" / "modules" / "batch_norm_act.py"
TITLE = """# API

Made from the docstrings by `make docs`. Where each call runs is in [support](support.md).
"""
SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Shape):$")
ENTRY = re.compile(r"([\w.]+(?:, [\w.]+)*): (.*)", re.DOTALL)
# Markdown would read a line that begins with one of these as a list or a heading.
BEFORE_OPERATOR = re.compile(r" (?=(?:[-+*=#>]|\d+[.)]) )")


def wrap(text: str, first: str = "", rest: str = "") -> str:
    kept = BEFORE_OPERATOR.sub("\0", " ".join(text.split()))
    wrapper = textwrap.TextWrapper(100, initial_indent=first, subsequent_indent=rest)
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.fill(kept).replace("\0", " ")


def entries(lines: list[str]) -> Iterator[str]:
    """A list, an item for every line that isn't indented."""
    items: list[str] = []
    for line in lines:
        if line.startswith(" "):
            items[-1] += " " + line.strip()
        else:
            items.append(line)
    for item in items:
        found = ENTRY.fullmatch(item)
        names = ", ".join(f"`{name}`" for name in found[1].split(", ")) if found else ""
        yield wrap(f"{names}: {found[2]}" if found else item, "- ", "  ")


def markdown(docstring: str) -> str:
    blocks = []
    for block in re.split(r"\n\s*\n", docstring):
        lines = block.split("\n")
        heading = SECTION.match(lines[0])
        if heading:
            blocks.append(f"**{heading[1]}**")
            lines = textwrap.dedent("\n".join(lines[1:])).split("\n")
        # "name: ...", indented where it goes on.
        hangs = any(line.startswith(" ") for line in lines)
        listed = hangs or (heading is not None and heading[1] in ("Args", "Attributes", "Raises"))
        blocks.append("\n".join(entries(lines) if listed else [wrap(" ".join(lines))]))
    return "\n\n".join(blocks)


def annotation(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return ""
    return value.__name__ if isinstance(value, type) else str(value)


def signature(name: str, function: Any) -> str:
    """On one line, or an argument a line. Without self."""
    parts, keyword_only, found = [], False, inspect.signature(function)
    for parameter in found.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            parts.append("*")
            keyword_only = True
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        typed = annotation(parameter.annotation)
        text = f"{star}{parameter.name}: {typed}" if typed else f"{star}{parameter.name}"
        if parameter.default is not parameter.empty:
            text += f" = {parameter.default!r}" if typed else f"={parameter.default!r}"
        parts.append(text)
    returns = annotation(found.return_annotation)
    end = f" -> {returns}" if returns not in ("", "None") else ""
    line = f"{name}({', '.join(parts)}){end}"
    if len(line) <= 100:
        return line
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){end}"])


def heading(name: str, value: Any) -> str:
    """How the thing is called. A constructor is shown where it is ours."""
    if not inspect.isclass(value):
        return signature(name, value)
    if hasattr(value, "_fields"):
        return f"{name}({', '.join(value._fields)})"
    if "__init__" in vars(value):
        return f"class {signature(name, value.__init__)}"
    bases = [base for base in value.__bases__ if not base.__module__.startswith("cutlass_bn")]
    lines = [f"class {name}({public_name(bases[0])})"]
    if hasattr(value, "activation"):  # beside torch's arguments, which its releases differ in
        lines.append("    __init__(..., *, activation: str | None = None)")
        lines.append(f"    {signature('forward', value.forward)}")
    return "\n".join(lines)


def public_name(cls: type) -> str:
    """Of a class of torch.nn, or one that is built in."""
    package = cls.__module__.removesuffix(f".modules.{cls.__module__.rpartition('.')[2]}")
    return cls.__name__ if package == "builtins" else f"{package}.{cls.__name__}"


def entry(name: str, value: Any, level: int) -> Iterator[str]:
    yield f"{'#' * level} `{name.rpartition('.')[2]}`"
    yield f"```python\n{heading(name, value)}\n```"
    yield markdown(inspect.getdoc(value) or "")
    if inspect.isclass(value):
        for method, function in vars(value).items():
            if inspect.isfunction(function) and function.__doc__ and not method.startswith("_"):
                said = (inspect.getdoc(function) or "").split("\n\n")[0]
                yield wrap(f"`{value.__name__}.{signature(method, function)}`: {said}")


def timms() -> Iterator[str]:
    """The entry of BatchNormAct2d, read from its source: to import it takes timm."""
    [found] = (
        node
        for node in ast.parse(BATCH_NORM_ACT.read_text()).body
        if isinstance(node, ast.ClassDef)
    )
    yield f"### `{found.name}`"
    yield f"```python\nclass cutlass_bn.{found.name}(timm.layers.{found.name})\n```"
    yield markdown(ast.get_docstring(found) or "")


def backend() -> Iterator[str]:
    """Its function as it is called: by torch.compile."""
    from cutlass_bn import backend

    yield f"## `{backend.__name__}`"
    yield '```python\ntorch.compile(model, backend="cutlass_bn", mode=None, options=None)\n```'
    yield markdown(inspect.getdoc(backend) or "")
    yield markdown(inspect.getdoc(backend.cutlass_bn) or "")


def page() -> str:
    import cutlass_bn

    blocks = [TITLE.strip()]
    for module in (cutlass_bn, cutlass_bn.functional):
        blocks.append(f"## `{module.__name__}`")
        blocks.append(markdown(inspect.getdoc(module) or ""))
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value):
                blocks.extend(entry(f"{module.__name__}.{name}", value, 3))
            if name == "BatchNorm3d":
                blocks.extend(timms())
    blocks.extend(backend())
    return "\n\n".join(blocks) + "\n"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(page())
