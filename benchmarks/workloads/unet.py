"""A U-Net: every level on the way down is read once more on the way up."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.workloads.layers import Trained
from benchmarks.workloads.workload import Built, Workload

CHANNELS, SIDE, NUM_CLASSES = (64, 128, 256, 512, 1024), 512, 2


def convolutions(num_in: int, num_out: int) -> nn.Sequential:
    """Two 3 x 3 convolutions with ReLU, padded to keep the size."""
    return nn.Sequential(
        nn.Conv2d(num_in, num_out, 3, padding=1), nn.ReLU(), nn.Conv2d(num_out, num_out, 3, padding=1), nn.ReLU()
    )


class UNet(Trained):
    """Grey images `[batch, 1, 512, 512]` to classes of their pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(convolutions(*sizes) for sizes in zip((1, *CHANNELS), CHANNELS, strict=False))
        self.pool = nn.MaxPool2d(2)
        pairs = list(zip(CHANNELS[:0:-1], CHANNELS[-2::-1], strict=True))
        self.widen = nn.ModuleList(nn.ConvTranspose2d(below, above, 2, stride=2) for below, above in pairs)
        self.up = nn.ModuleList(convolutions(below, above) for below, above in pairs)
        self.head = nn.Conv2d(CHANNELS[0], NUM_CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        levels = [x := self.down[0](x)]
        for level in self.down[1:]:
            levels.append(x := level(self.pool(x)))
        for widen, level, skip in zip(self.widen, self.up, levels[-2::-1], strict=True):
            x = level(torch.cat([skip, widen(x)], dim=1))
        return self.head(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        image, classes = batch
        return F.cross_entropy(self(image), classes)


def build(batch_size: int) -> Built:
    classes = torch.empty(batch_size, SIDE, SIDE, dtype=torch.long)
    return UNet(), (torch.empty(batch_size, 1, SIDE, SIDE), classes)


def unet(batch_size: int = 32) -> Workload:
    return Workload(
        name="unet",
        build=partial(build, batch_size),
        batch_size=batch_size,
        source="O. Ronneberger et al. (arXiv 1505.04597), figure 1, on 512 x 512 pixels and with padded convolutions; "
        "mini-batch chosen here",
    )
