"""The partitioner in the guide works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lightning_gpp.cluster import preset_cluster
from lightning_gpp.planning import Request, best_plan
from lightning_gpp.planning.problem.partitioner import PARTITIONERS
from tests.planning import graphs

GUIDE = Path(__file__).parents[2] / "docs/howto/planning.md"


def test_a_partitioner_of_ones_own() -> None:
    code = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)[-1]
    assert code.count("\n") < 40
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    try:
        found = best_plan("halves", graphs.chain(8), Request(cluster=preset_cluster("summit"), batch_size=32))
    finally:
        del PARTITIONERS.entries["halves"]
    assert found.fits
    assert {stage.devices for stage in found.plan.stages} >= {(2, 3), (0, 1)}
