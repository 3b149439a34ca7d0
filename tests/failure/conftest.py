"""A cluster of SLURM for faults of jobs that srun starts."""

from tests.slurm.conftest import large_cluster

__all__ = ["large_cluster"]
