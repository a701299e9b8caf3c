"""What `tools.profile_kernels` holds its figures against: rows that are made up, nothing is compiled."""

import importlib.util
import json
import os
from pathlib import Path

import pytest

from engine import ConfigError
from tools import kernel_report, profile_kernels

BASELINE = json.loads(kernel_report.BASELINE.read_text())
IN_CI = ("sm_80", "sm_90")  # the targets of .ci/run


def rows(**changes):
    """The baseline's own, one of them changed."""
    found = [dict(row) for row in BASELINE["rows"] if row["target"] in IN_CI]
    (row,) = [row for row in found if (row["kernel"], row["target"]) == ("decode_attention[llama-2-7b]", "sm_80")]
    row.update(changes)
    return found


def test_the_baseline_is_no_worse_than_itself():
    assert list(kernel_report.complaints(rows(), BASELINE)) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loop_spills": 1, "spills": 1}, "1 spill instructions, 1 of them in the loop"),
        ({"spills": 2}, "2 spill instructions, 0 of them in the loop"),
        ({"shared_bytes": 166_913}, "166913 bytes of shared memory of 166912"),
        ({"instructions_per_token": 13.0}, "instructions_per_token 13.0, the baseline has"),
        ({"instructions_per_token": None}, "instructions_per_token None"),
        ({"traffic_ratio": 1.06}, "traffic_ratio 1.06, the baseline has"),
        ({"l2_ratio": 1.21}, "l2_ratio 1.21, at most 1.2"),
        ({"kernel": "another"}, "another on sm_80: not in the baseline"),
    ],
)
def test_what_is_worse_is_said(changes, words):
    found = list(kernel_report.complaints(rows(**changes), BASELINE))
    assert any(words in line for line in found), found
    assert len(found) == (2 if "kernel" in changes else 1)  # a new one stands in the place of an old one


def test_a_little_more_is_borne():
    little = {"instructions_per_token": 12.5, "traffic_ratio": 1.04, "l2_ratio": 1.19, "shared_bytes": 166_912}
    assert list(kernel_report.complaints(rows(**little), BASELINE)) == []


def test_spills_of_amd_are_only_reported():
    row = {"kernel": "k", "target": "gfx942", **dict.fromkeys(kernel_report.KEPT[2:]), "shared_bytes": 0}
    bad = {**row, "spills": 99, "loop_spills": 9}
    assert list(kernel_report.complaints([bad], {"rows": [{**row, "spills": 0}]})) == []


def test_the_committed_baseline_covers_the_manifest():
    kernels = {f"{name}[{model.name}]" for name, _, model in profile_kernels.manifest()}
    wanted = {(kernel, target) for kernel in kernels for target in profile_kernels.TARGETS.split(",")}
    assert {(row["kernel"], row["target"]) for row in BASELINE["rows"]} == wanted


def test_a_baseline_that_is_written_is_read(tmp_path):
    path = tmp_path / "baseline.json"
    kernel_report.write_baseline(path, rows(), "3.9.0")
    assert list(kernel_report.complaints(rows(), kernel_report.read_baseline(path))) == []
    other = [{**row, "target": "sm_86"} for row in rows() if row["target"] == "sm_80"]
    kernel_report.write_baseline(path, other, "3.9.0")
    targets = {row["target"] for row in kernel_report.read_baseline(path)["rows"]}
    assert targets == {"sm_80", "sm_86", "sm_90"}  # those of other targets stay


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"rows": [{}]}', '{"rows": [1]}'])
def test_no_baseline(tmp_path, content):
    path = tmp_path / "baseline.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match="--write-baseline"):
        kernel_report.read_baseline(path)


def test_peers_stand_beside_ours():
    table = kernel_report.beside_peers(rows())
    for loop in ("decode, exact", "decode, 4 bits", "prefill, exact"):
        whose = [row["whose"] for row in table if row["loop"] == loop]
        assert any("ours" in name for name in whose) and "wanted, at most" in whose and len(whose) >= 5
    assert next(row for row in table if row["whose"].startswith("lmdeploy fp16"))["sm_80"] == 16.1
    ours = next(row for row in table if row["whose"] == "ours: prefill_attention[llama-2-7b]")
    assert ours["sm_80"] < 90 and ours["sm_90"] < 75


def test_what_misses_a_floor_is_said():
    assert not any("decode_attention[" in line for line in kernel_report.missed_floors(rows()))
    found = [row for row in rows() if row["kernel"] == "decode_attention+logits[llama-2-7b]"]
    found[0]["instructions_per_token"] = 18.6
    assert "18.6 instructions per token, wanted 18.5" in " ".join(kernel_report.missed_floors(found))


class TestCommand:
    """The command itself, with rows in the place of those that are compiled."""

    @pytest.fixture(autouse=True)
    def _made_up(self, monkeypatch):
        if importlib.util.find_spec("triton") is None:
            pytest.skip("needs triton")
        full = {"load_bits": 128, "tensor_core": None, "predicted_us": {"A100": 1.5}}
        monkeypatch.setattr(profile_kernels, "compile_all", lambda targets: [row | full for row in rows()])

    def test_no_worse(self, capsys):
        assert profile_kernels.main(["--baseline", str(kernel_report.BASELINE), "--peers"]) == 0
        printed = capsys.readouterr().out
        assert "no worse than the baseline" in printed and "a model, not a measurement" in printed
        assert "published code" in printed and "LightLLM vsm" in printed and "A100=1.5" in printed

    def test_worse(self, tmp_path, capsys):
        tampered = json.loads(kernel_report.BASELINE.read_text())
        for row in tampered["rows"]:
            if row["instructions_per_token"] is not None:
                row["instructions_per_token"] *= 0.9
        path = tmp_path / "tampered.json"
        path.write_text(json.dumps(tampered))
        assert profile_kernels.main(["--baseline", str(path), "--json"]) == 1
        report = json.loads(capsys.readouterr().out)
        assert any("decode_attention[llama-2-7b] on sm_90: instructions" in line for line in report["complaints"])

    def test_written(self, tmp_path, capsys):
        path = tmp_path / "new.json"
        assert profile_kernels.main(["--write-baseline", str(path)]) == 0
        assert profile_kernels.main(["--baseline", str(path)]) == 0

    def test_beside_what_a_gpu_takes(self, monkeypatch):
        import torch

        from tools import gpu_speed

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        monkeypatch.setattr(gpu_speed, "CudaTimer", lambda: None)
        measured = [{"kernel": row["kernel"], "measured_us": 7.0} for row in rows() if row["target"] == "sm_90"]
        monkeypatch.setattr(gpu_speed, "kernel_rows", lambda device, timer: iter(measured))
        found = profile_kernels.measure(rows())
        assert {row["target"] for row in found if row.get("measured_us") == 7.0} == {"sm_90"}

    def test_an_unknown_target(self, capsys):
        with pytest.raises(SystemExit):
            profile_kernels.main(["--targets", "sm_12"])
        assert "unknown targets sm_12" in capsys.readouterr().err


def _die(job: tuple[int, Path, int]) -> int:
    """Ends its process, as a compiler that crashes does, the first `times` times."""
    number, diary, times = job
    if len(diary.read_text()) < times:
        with diary.open("a") as file:
            file.write("x")
        os._exit(1)
    return number


@pytest.mark.parametrize("times", [0, 1])
def test_a_process_that_dies_is_replaced(times: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    diary = tmp_path / "deaths"
    diary.touch()
    work = [(i, diary, times if i == 2 else 0) for i in range(5)]
    assert list(profile_kernels.in_processes(_die, work, patience=5.0)) == list(range(5))
    assert capsys.readouterr().err.count("once more") == times


def test_what_dies_again_is_an_error(tmp_path: Path) -> None:
    diary = tmp_path / "deaths"
    diary.touch()
    results = profile_kernels.in_processes(_die, [(0, diary, 0), (1, diary, 9)], patience=5.0)
    assert next(results) == 0
    with pytest.raises(ConfigError, match=r"no result for \(1, .*twice"):
        next(results)
