"""Data parallelism inside a stage: what the replicas of a stage share, and what each of them keeps for itself.

| kind  | parameters                       | gradients        | optimizer state | by                                |
|-------|----------------------------------|------------------|-----------------|-----------------------------------|
| none  | whole                            | all-reduced      | whole           | `GradientSync`                    |
| zero1 | whole, sent by the one who steps | all-reduced      | of one's own    | `GradientSync`, `OwnedParameters` |
| fsdp  | 1/n, gathered for a stage's work | reduce-scattered | 1/n             | `ShardedStages`                   |

ZeRO: Rajbhandari et al. 2020, stages 1 and 3. When to gather and to reduce is the schedule's: Lamy-Poirier,
"Breadth-First Pipeline Parallelism", MLSys 2023, section 4.
"""

from lightning_gpp.runtime.sharding.interface import StageSync
from lightning_gpp.runtime.sharding.owners import OwnedParameters, assign_owners
from lightning_gpp.runtime.sharding.sharded import ShardedStages

__all__ = ["OwnedParameters", "ShardedStages", "StageSync", "assign_owners"]
