"""Features whose code differs between CPUs and GPUs: streams of random numbers, fused kernels, copies, collectives.

Each returns an error: against the undivided model on the same device, or of a number that must be zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from benchmarks.gpu.towers import autocast, gradients_of, layout, model_of, ordinary, pipeline
from benchmarks.gpu.trained import trained
from lightning_gpp import Engine, Options, initialize
from lightning_gpp.training.control import Mirror
from lightning_gpp.training.updates.gradients import LossScale

SAMPLES, TOKENS, WIDTH = 8, 16, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """What is tried, its largest error, whether it needs several processes, and why it cannot be tried here."""

    name: str
    error: Callable[[torch.device], float]
    allowed: float = 1e-12
    together: bool = False
    lacks: Callable[[torch.device], str] = lambda _: ""


# -- the towers, with other options -----------------------------------------------------------------------------------


def against_undivided(
    device: torch.device, *, replicas: bool = False, shared: bool = False, frozen: bool = False, **options: Any
) -> float:
    """The error of the loss, and of the norm of all gradients, in float64.

    Args:
        device: the device of this process.
        replicas: every process is a pipeline.
        shared: all processes but the first share a stage.
        frozen: the device that runs the step trains nothing.
        options: of the library.
    """
    shape = replace(ordinary(device), width=64, samples=32)
    if replicas:
        whole = [{"modules": ["left", "right", "head", "@step"], "devices": [0]}]
        options |= {"stages": whole, "num_pipelines": dist.get_world_size()}
    if shared:
        others = list(range(1, dist.get_world_size())) or [0]
        apart = {"modules": ["left"], "devices": others}, {"modules": ["right", "head", "@step"], "devices": [0]}
        options |= {"stages": list(apart)}
    with pipeline(device, shape, dtype=torch.float64, frozen=("head",) if frozen else (), **options) as job:
        reference = model_of(shape, device, torch.float64)
        reference.head.requires_grad_(not frozen)
        expected = float(gradients_of(reference, job.batch, shape.micro_batches))
        loss, norm = float(job.engine.train_step(job.batch)), float(job.engine.grad_norm())
        wanted = nn.utils.get_total_norm([p.grad for p in reference.parameters() if p.grad is not None])
    return max(abs(loss / expected - 1), abs(norm / float(wanted) - 1))


def scaled(device: torch.device) -> float:
    """The error of the norm of the gradients in half precision with a scaled loss, after they are scaled back."""
    shape, context = (
        replace(ordinary(device), width=64, samples=32),
        partial(torch.autocast, device.type, torch.float16),
    )
    reference, scaler = model_of(shape, device, torch.float32), torch.amp.GradScaler(device.type, init_scale=256.0)
    with pipeline(device, shape, context=context, precision=torch.float16) as job:
        gradients_of(reference, job.batch, shape.micro_batches, context)
        scale = LossScale(scaler, job.engine.control, device)
        scale.attach()
        scaler.scale(torch.zeros((), device=device))
        job.engine.announce(job.batch)
        job.engine.train([job.batch], scale=scale.factor)
        job.engine.sum_gradients()
        scaler.unscale_(job.optimizer)
        norm = float(job.engine.grad_norm())
        scaler.step(job.optimizer)
        scaler.update()
        scale.detach()
    wanted = nn.utils.get_total_norm([p.grad for p in reference.parameters() if p.grad is not None])
    return abs(norm / float(wanted) - 1)


def recorded(device: torch.device, **options: Any) -> float:
    """The largest difference of the losses of training with CUDA graphs from those of training without."""
    losses = []
    for graphs in (False, "auto"):
        shape = replace(ordinary(device), width=64, samples=32)
        with pipeline(device, shape, dtype=torch.float64, rate=0.01, cuda_graphs=graphs, **options) as job:
            losses.append([float(job.step()) for _ in range(6)])
            session = job.engine.current
            if graphs and session is not None and session.latest is not None and not session.latest.recorded:
                raise AssertionError("nothing was recorded")
    return max(abs(one - other) for one, other in zip(*losses, strict=True))


# -- models with more kinds of layers ---------------------------------------------------------------------------------


class Noisy(nn.Module):
    """A diffusion step: the noise of the network's input is that of the loss, which is zero as nothing is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.head = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        for part in (self.left, self.head):
            nn.init.eye_(part.weight)

    def training_step(self, batch: tuple[Tensor]) -> Tensor:
        noise = torch.randn_like(batch[0])
        return (self.head(self.left(batch[0] + noise)) - batch[0] - noise).square().mean()


class Recurrent(nn.Module):
    """Layers that draw masks in fused kernels: attention and a recurrent network; and ordinary dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.TransformerEncoderLayer(WIDTH, 4, WIDTH, dropout=0.3, batch_first=True)
        self.right = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.3, batch_first=True)
        self.head = nn.Sequential(nn.Dropout(0.3), nn.Linear(WIDTH, 1))

    def training_step(self, batch: tuple[Tensor]) -> Tensor:
        return self.head(self.right(self.left(batch[0]))[0]).square().mean()


class Convolutional(nn.Module):
    """Convolutions, whose numbers GPUs round to TF32 unless told otherwise."""

    def __init__(self) -> None:
        super().__init__()
        layer = lambda first: nn.Sequential(nn.Conv2d(first, 64, 3, padding=1), nn.GroupNorm(4, 64), nn.GELU())  # noqa: E731
        self.left, self.right = layer(3), nn.Sequential(*(layer(64) for _ in range(6)))
        self.head = nn.Conv2d(64, 1, 1)

    def training_step(self, batch: tuple[Tensor]) -> Tensor:
        return self.head(self.right(self.left(batch[0]))).square().mean()


class Aware(pl.LightningModule):
    """A step that makes tensors on the module's device."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: tuple[Tensor]) -> Tensor:
        target = torch.ones(len(batch[0]), WIDTH, device=self.device)
        return nn.functional.mse_loss(self.head(self.left(batch[0])), target)


@contextmanager
def divided(
    device: torch.device,
    model: nn.Module,
    batch: tuple[Tensor],
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    precision: torch.dtype | None = None,
) -> Iterator[Engine]:
    """A model in stages over all processes, compared with the undivided one before training."""
    stages = [stage for stage in layout(dist.get_world_size()) if hasattr(model, stage["modules"][0])]
    options = Options(stages=stages, num_micro_batches=2, self_check=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with initialize(
        model, optimizer, batch, options=options, device=device, context=context, precision=precision
    ) as engine:
        yield engine


def checked(
    device: torch.device, kind: type[nn.Module], shape: tuple[int, ...] = (TOKENS, WIDTH), mixed: bool = False
) -> float:
    """The loss of a step; 0 if it need not be zero. The self-check, which may raise, compares loss and gradients."""
    torch.manual_seed(0)
    batch = (torch.randn(SAMPLES, *shape).to(device),)
    context, precision = (autocast(device), torch.bfloat16) if mixed else (nullcontext, None)
    with divided(device, kind(), batch, context, precision) as engine:
        loss = float(engine.train_step(batch))
    return loss if kind is Noisy else 0.0 * loss


def rounded(device: torch.device) -> float:
    """The self-check of convolutions, with TF32 and whatever algorithms cuDNN finds fastest."""
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.benchmark
    cudnn.allow_tf32, cudnn.benchmark = True, True
    try:
        return checked(device, Convolutional, (3, TOKENS, TOKENS))
    finally:
        cudnn.allow_tf32, cudnn.benchmark = before


def mirrored(device: torch.device) -> float:
    """Differences in a mini-batch that all processes get from the first one, of all kinds of numbers."""
    kinds = torch.float64, torch.bfloat16, torch.int16, torch.int64, torch.bool, torch.complex64
    tree = [torch.arange(5).to(kind).to(device) for kind in kinds]
    with pipeline(device, replace(ordinary(device), width=8, samples=8)) as job:
        given = tree if job.engine.runs_step else None
        found = Mirror(job.engine.control, device).tree(given)
    return float(sum(not torch.equal(*pair) for pair in zip(tree, found, strict=True)))


def lacks_graphs(device: torch.device) -> str:
    return "" if device.type == "cuda" else "only GPUs have them"


def lacks_fsdp(_: torch.device) -> str:
    return "" if hasattr(FSDPModule, "set_reduce_scatter_unused_params") else "this torch cannot"


def _lacks_scaler(device: torch.device) -> str:
    return "" if device.type == "cuda" else "Lightning scales losses on GPUs alone"


def _lacks_bf16(device: torch.device) -> str:
    """Recurrent networks in bf16 need instructions that not every CPU has."""
    there = device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return "" if there else "this CPU cannot"


FEATURES = (
    Feature(name="every block recomputed", error=partial(against_undivided, recompute=True)),
    Feature(name="offload to the host", error=partial(against_undivided, offload=True)),
    Feature(name="split backwards", error=partial(against_undivided, schedule="zb_h1")),
    Feature(name="CUDA graphs", error=recorded, lacks=lacks_graphs),
    Feature(name="concurrent stages", error=partial(recorded, concurrent_stages=2), lacks=lacks_graphs),
    Feature(name="CUDA graphs, split", error=partial(recorded, schedule="zb_h1"), lacks=lacks_graphs),
    Feature(name="step as a whole", error=partial(against_undivided, step="whole")),
    Feature(name="a device that trains nothing", error=partial(against_undivided, frozen=True)),
    Feature(name="replicas", error=partial(against_undivided, replicas=True), together=True),
    Feature(name="zero1", error=partial(against_undivided, replicas=True, sharding="zero1"), together=True),
    Feature(
        name="fsdp",
        error=partial(against_undivided, replicas=True, sharding="fsdp"),
        together=True,
        lacks=lacks_fsdp,
    ),
    Feature(
        name="replicas of a stage, fsdp",
        error=partial(against_undivided, shared=True, sharding="fsdp"),
        together=True,
        lacks=lacks_fsdp,
    ),
    Feature(name="mini-batches of all types", error=mirrored, together=True),
    Feature(name="float16 and a scaled loss", error=scaled, allowed=1e-2),
    Feature(name="noise on the device", error=partial(checked, kind=Noisy, shape=(WIDTH,)), allowed=1e-9),
    Feature(name="self-check, fused dropout", error=partial(checked, kind=Recurrent)),
    Feature(
        name="self-check, fused dropout, bf16", error=partial(checked, kind=Recurrent, mixed=True), lacks=_lacks_bf16
    ),
    Feature(name="self-check, convolutions, tf32", error=rounded),
    Feature(name="Trainer, 64-true", error=partial(trained, precision="64-true")),
    Feature(name="Trainer, bf16-mixed", error=partial(trained, precision="bf16-mixed"), allowed=2e-2),
    Feature(name="Trainer, 16-mixed", error=partial(trained, precision="16-mixed"), allowed=2e-2, lacks=_lacks_scaler),
    Feature(name="tensors on self.device", error=partial(checked, kind=Aware, shape=(WIDTH,))),
)
