"""The benchmark of whole models, reduced to what a CPU runs: nothing here asserts a speed."""

from __future__ import annotations

import pytest
import torch

from bench import __main__ as command
from bench import models, plots, report
from bench.cases import Options
from bench.records import COMPILE, EAGER, ERROR, OK, OURS, OURS_COMPILED, Row, Run

OPTIONS = Options(torch.device("cpu"), quick=True, seconds=0.001)
SMALL = [model.reduced() for model in models.models(quick=False)]


def test_models_on_the_command_line(tmp_path, capsys):
    path = tmp_path / "run.json"
    arguments = ["models", "--device", "cpu", "--seconds", "0.1", "--json", str(path)]
    for only in ("channels_last", "PointNet"):
        assert command.main([*arguments, "--only", only]) == 0
        run, out = Run.load(path), capsys.readouterr().out
        assert [row.variant for row in run.rows] == [EAGER, OURS]
        for row in run.rows:
            assert row.status == OK
            assert row.ms > 0
            assert set(row.off_eager) == set(report.OFF_EAGER)
            assert row.work == (2 if only == "channels_last" else 4096)
            assert f"{row.off_eager['loss']:.1e}" in out
        assert "gradient norm off eager's" in out
    assert len({model.name for model in SMALL}) == len(SMALL)


def wrong(model):
    last = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm1d)][-1]
    last.weight.data *= 1.5
    return model


def raising(model):
    raise RuntimeError("no kernel image")


@pytest.mark.parametrize(("change", "why"), [(raising, "no kernel image"), (wrong, "loss off")])
def test_a_variant_without_a_result_is_its_own_row(change, why, monkeypatch):
    monkeypatch.setitem(models.VARIANTS, OURS, change)
    eager, ours = models.measure("models", SMALL[2], OPTIONS)
    assert eager.status == OK
    assert eager.valid_ms
    assert ours.status != OK
    assert why in ours.detail
    assert ours.rate is None


def test_every_variant_may_raise(monkeypatch):
    for name in models.VARIANTS:
        monkeypatch.setitem(models.VARIANTS, name, raising)
    assert {row.status for row in models.measure("models", SMALL[2], OPTIONS)} == {ERROR}


def fake_record():
    rows = []
    for model in models.models(quick=False):
        for variant, ms in ((EAGER, 50.0), (COMPILE, 38.0), (OURS, 34.0), (OURS_COMPILED, 32.0)):
            row = Row("models", model.name, variant, ms=ms, work=256.0, unit="images/s")
            rows.append(row)
    rows[-1] = Row("models", rows[-1].case, OURS_COMPILED, status=ERROR)
    return Run({"device": "a GPU", "device_type": "cuda"}, rows=rows)


def test_models_are_drawn_and_shown(tmp_path, capsys):
    run, path = fake_record(), tmp_path / "run.json"
    assert run.rows[0].rate == 256 / 0.050
    run.save(path)
    assert command.main(["plot", str(path), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "models.png").read_bytes()[:4] == b"\x89PNG"
    assert [image.name for image in tmp_path.glob("*.png")] == ["models.png"]
    rows = next(iter(run.cases("models").values()))
    assert plots._bar(rows, OURS, models=True) == (50 / 34, " 7,529 images/s, 34 ms")
    assert command.main(["show", str(path)]) == 0
    assert "5,120 images/s" in capsys.readouterr().out
