"""The sentence that names the log of this process."""

from __future__ import annotations

from hydra.core.hydra_config import HydraConfig


def place_of_traceback() -> str:
    """A sentence that names the file of Hydra's log, to which the traceback was written."""
    hydra = HydraConfig.get()
    return f"The traceback is in {hydra.runtime.output_dir}/{hydra.job.name}.log."
