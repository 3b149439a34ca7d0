"""Imported by the server of processes alone: the first capture fills caches of torch, which every process then has."""

from __future__ import annotations

import torch

from lightning_gpp.capture import capture_step
from tests.strategy import harness

if torch.cuda.device_count() == 0:  # a server that has used a GPU could not be forked
    capture_step(harness.make_module(), next(iter(harness.loader())))
