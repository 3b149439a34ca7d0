"""A sweep is refused where its processes would start each other, in the parent and in a child."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_gpp.cli.check import refuse_multirun
from lightning_gpp.errors import ConfigError
from tests.cli.commands import command


@pytest.mark.parametrize("environment", [{}, {"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "4"}])
@pytest.mark.parametrize(("devices", "num_nodes"), [(4, 1), (1, 2), ("auto", 1), ([0, 1], 1)])
def test_a_sweep_of_self_launched_processes_is_refused(
    devices: object, num_nodes: int, environment: dict[str, str]
) -> None:
    with pytest.raises(ConfigError, match=r"--multirun with trainer.devices=.*torchrun.*submitit_slurm"):
        refuse_multirun(devices, num_nodes, environment)


def test_what_can_work_is_allowed() -> None:
    refuse_multirun(1, 1, {})
    refuse_multirun(4, 1, {"TORCHELASTIC_RUN_ID": "none"})
    refuse_multirun(4, 2, {"SLURM_PROCID": "0"})


@pytest.mark.parametrize("environment", [{}, {"LOCAL_RANK": "1"}], ids=["parent", "child"])
def test_the_command_refuses_it(environment: dict[str, str], tmp_path: Path) -> None:
    result = command("train", "--multirun", "experiment=feature_towers", "seed=1,2", cwd=tmp_path, **environment)
    assert result.returncode == 1
    assert result.stderr.count("would each start the sweep again") == 1
    assert "Traceback" not in result.stderr
