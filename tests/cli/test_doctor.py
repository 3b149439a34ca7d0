"""`gpp-doctor` on the processes that it starts and on those of torchrun."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_gpp.cli.doctor import main
from lightning_gpp.cluster import load_cluster
from lightning_gpp.explained import sections
from lightning_gpp.measure import links
from tests.cli.commands import command
from tests.distributed import PATIENCE
from tests.interpreter import run_ranks


@pytest.mark.acceptance
def test_it_examines_the_processes_that_it_starts(tmp_path: Path) -> None:
    result = command("doctor", "--processes=2", "--output=lab.yaml", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "ranks 0-1 on" in result.stdout
    assert re.search(r"Links +inside \S+ [\d.e+]+ us, [\d.e+]+ GB/s; between machines none", result.stdout)
    cluster = load_cluster(tmp_path / "lab.yaml")
    assert cluster.num_devices == 2
    assert 0 < cluster.link(0, 1).latency < 1
    assert cluster.devices[0].source.startswith("measured")


def test_machines_of_one_process_each(tmp_path: Path) -> None:
    result = run_ranks(2, "-m", "tests.cli.apart", f"--output={tmp_path}/lab.yaml", cwd=tmp_path, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr
    assert "Processes  ranks 0-0 on node0, ranks 1-1 on node1" in result.stdout
    assert re.search(r"inside node1 none; between machines [\d.e+]+ us", result.stdout)
    assert [load_cluster(tmp_path / "lab.yaml").node_of(device) for device in (0, 1)] == [0, 1]


def test_it_explains_messages(capsys: pytest.CaptureFixture[str]) -> None:
    main(["explain", "foreign"])
    assert capsys.readouterr().out == f"{sections()['foreign']}\n"
    with pytest.raises(SystemExit, match="1"):
        main(["explain", "foriegn"])
    assert "explain foriegn: no message has this short name. Did you mean foreign" in capsys.readouterr().err


def test_a_wrong_number_of_processes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="1"):
        main(["--processes=0"])
    assert "--processes=0 must be 1 or more." in capsys.readouterr().err


@pytest.mark.parametrize(("together", "shared"), [(3.0, "node"), (1.0, "pair")])
def test_links_between_machines_are_shared_if_messages_at_once_are_slower(
    together: float, shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(pairs: Any, num_bytes: int, device: Any) -> float:
        alone = 1e-5 + (num_bytes - 1) / 1e9
        return alone * (together if len(pairs) > 1 else 1)

    monkeypatch.setattr(links, "_seconds", seconds)
    link = links.measure_link([0, 2], torch.device("cpu"), [(0, 2), (1, 3)])
    assert link is not None
    assert (link.latency, link.bytes_per_second) == pytest.approx((1e-5, 1e9))
    assert link.shared == shared
    assert links.measure_link([0], torch.device("cpu")) is None
