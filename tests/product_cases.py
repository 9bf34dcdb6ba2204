"""What the tests of the benchmark of fp32 products share: the ops' arithmetic in PyTorch, rows, and what is shown."""

import io

import torch
from split_cases import left_to_exact_kernel, split_reference

from bench import accuracy, report
from bench.records import SGEMM, SPLIT, Row
from cutlass_bn.ops import linear_batch_norm as ops

CPU = torch.device("cpu")


def split_product(a, b):
    """a @ b of the planes, its sums exact; plain float32 where a row can't be held."""
    sides, rows = [], []
    for matrix in (a, b.t()):
        planes, exponents, census = split_reference(matrix)
        hi, lo = planes[..., : matrix.shape[1]].double()
        sides.append((hi, lo, torch.exp2(-exponents.double())[:, None]))
        rows.append(census)
    (a_hi, a_lo, a_scale), (b_hi, b_lo, b_scale) = sides
    u = (a_hi @ b_hi.t() + (a_hi @ b_lo.t() + a_lo @ b_hi.t()) / 4096) * a_scale * b_scale.t()
    return torch.where(left_to_exact_kernel(*rows, a.size(1)), torch.mm(a, b), u.float())


def use_pytorch_ops(monkeypatch):
    monkeypatch.setattr(ops, "split_fp32", split_reference, raising=False)
    monkeypatch.setattr(ops, "split_matmul", split_product, raising=False)


def product_rows(case, sgemm, split, path=SPLIT, suite=accuracy.SUITE, **times):
    """SGEMM's row and the split's, with these errors."""
    rows = []
    for name, error in ((SGEMM, sgemm), (SPLIT, split)):
        ms = times.get("sgemm_ms" if name == SGEMM else "split_ms")
        rows.append(Row(suite, case, name, ms=ms, path=path, relative_error=error, rowwise_error=error))
        rows[-1].componentwise_error = error
    return rows


def text_of(run):
    out = report.Console(width=260, record=True, file=io.StringIO())
    report.show(run, out)
    return out.export_text()
