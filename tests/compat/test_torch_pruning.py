"""Every private name of torch.nn.utils.prune does what the library needs of it."""

from __future__ import annotations

from torch import nn
from torch.nn.utils import prune

from lightning_gpp._compat.torch_pruning import pruning_hooks, remove_hook, without_memory


def pruned(times: int) -> nn.Linear:
    module = nn.Linear(4, 4)
    for _ in range(times):
        prune.global_unstructured([(module, "weight")], pruning_method=prune.L1Unstructured, amount=2)
    return module


def test_pruning_hooks() -> None:
    module = pruned(2)
    prune.l1_unstructured(module, "bias", amount=1)
    module.register_forward_pre_hook(lambda *_: None)
    hooks = pruning_hooks(module)
    assert {name: type(hook) for name, hook in hooks.items()} == {
        "weight": prune.PruningContainer,
        "bias": prune.L1Unstructured,
    }


def test_remove_hook() -> None:
    module = pruned(1)
    other = module.register_forward_pre_hook(lambda *_: None)
    remove_hook(module, pruning_hooks(module)["weight"])
    assert list(module._forward_pre_hooks) == [other.id]


def test_without_memory() -> None:
    module, reference = pruned(2), pruned(2)
    reference.load_state_dict(module.state_dict())
    reference.weight = module.weight
    hook = pruning_hooks(module)["weight"]
    without_memory(hook)
    assert all(method.mask.is_meta for method in hook)
    for each in (module, reference):
        prune.global_unstructured([(each, "weight")], pruning_method=prune.L1Unstructured, amount=2)
    assert module.weight_mask.equal(reference.weight_mask)
    assert int((module.weight_mask == 0).sum()) == 6
