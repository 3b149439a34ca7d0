"""`gpp-checkpoint`: shows what is in files and folders, and converts them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_gpp.cli.checkpoint import main


@pytest.fixture
def file(tmp_path: Path) -> Path:
    state = {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(512, 512)}}
    checkpoint = {
        "epoch": 2,
        "global_step": 30,
        "pytorch-lightning_version": "2.6.4",
        "state_dict": {"head.weight": torch.ones(512, 512), "head.bias": torch.ones(512, dtype=torch.bfloat16)},
        "optimizer_states": [{"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}],
        "loops": {},
        "gpp": {
            "seed": 1,
            "step": 30,
            "plan": "| stage | modules |",
            "parameters": [["head.weight", "head.bias"]],
            "torch": "2.13",
            "pipeline": {"policy": "stash", "values": {"29": {"head.weight": torch.zeros(512, 512)}}},
        },
    }
    torch.save(checkpoint, tmp_path / "file.ckpt")
    return tmp_path / "file.ckpt"


@pytest.mark.parametrize("kind", ["file", "folder of 3 files"])
def test_show(kind: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = file
    if kind != "file":
        path = tmp_path / "folder.ckpt"
        main(["convert", str(file), str(path)])
    main(["show", str(path)])
    shown = capsys.readouterr().out
    for line in (
        f"{path}, {kind}, 3.0 MiB, 2 tensors",
        "Lightning 2.6.4, torch 2.13",
        "epoch 2, step 30",
        "weight policy  stash",
        "| stage | modules |",
    ):
        assert line in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "absent.ckpt"], "gpp-checkpoint: absent.ckpt does not exist"),
        (["convert", "file.ckpt", "file.ckpt"], "file.ckpt exists already"),
        (["show", "text.ckpt"], "text.ckpt is not a checkpoint that can be read"),
        (["show", "empty"], "empty is not a whole checkpoint"),
    ],
)
def test_mistakes(
    arguments: list[str],
    message: str,
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.ckpt").write_text("no checkpoint")
    Path("empty").mkdir()
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 1
    assert message in capsys.readouterr().err
