"""Every test runs on one thread, so that several fit on a small machine; processes that tests start inherit it."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import torch  # noqa: E402  reads OMP_NUM_THREADS when it is imported

torch.set_num_threads(1)
