"""Data parallelism inside a stage: the division of its parameters, gradients and optimizer state among its replicas.

| kind  | parameters                          | gradients        | optimizer state | by                                |
|-------|-------------------------------------|------------------|-----------------|-----------------------------------|
| none  | unsharded                           | all-reduced      | unsharded       | `GradientSync`                    |
| zero1 | unsharded, sent by their owner      | all-reduced      | at the owner    | `GradientSync`, `OwnedParameters` |
| fsdp  | 1/n, unsharded for a stage's work   | reduce-scattered | 1/n             | `ShardedStages`                   |

ZeRO: Rajbhandari et al. 2020, stages 1 and 3. The schedule decides when to unshard and to reduce: Lamy-Poirier,
"Breadth-First Pipeline Parallelism", MLSys 2023, section 4.
"""

from lightning_gpp.runtime.sharding.owners import OwnedParameters, assign_owners
from lightning_gpp.runtime.sharding.sharded import ShardedStages
from lightning_gpp.runtime.stage import StageSync

__all__ = ["OwnedParameters", "ShardedStages", "StageSync", "assign_owners"]
