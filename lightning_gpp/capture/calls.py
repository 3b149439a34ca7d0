"""The network calls of a step, each by itself: for steps that run once, on the undivided mini-batch, on all ranks.

Such a step may do anything between its calls: read values, run backwards, step optimizers. So it is recorded only to
find which modules it calls, and with arguments of which form; each call is captured by itself, as a function of its
arguments. The batch of that function has the arguments of one call or of several, and a tensor that counts samples:

    {"count": <b samples>, "calls": {"generator": {"args": {0: z}, "kwargs": {}}, "critic": ...}}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import networkx as nx
import torch
from torch import Tensor, nn

from lightning_gpp._compat.torch import FakeTensor, pytree
from lightning_gpp.capture.batch import resized, samples_in
from lightning_gpp.capture.captured import Capture, capture_step
from lightning_gpp.capture.items import are_plain
from lightning_gpp.capture.network import refuse_cut_graphs, without_graph
from lightning_gpp.capture.record import RunTime, StepFunction, Subject, record
from lightning_gpp.capture.recorder import Recorder
from lightning_gpp.capture.recording import CallArguments, Event, ModuleCall, ModuleRef, Recording, Ref, StateRef
from lightning_gpp.capture.refusal import Changes, attempted, escaped, no_network, refusal
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.runtime.named_tensors import tensor_named
from lightning_gpp.wording import named

Entered = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class StepCalls:
    """The calls of a step: arguments without memory by path, for the first call of each module.

    `states`: the parameters and buffers that the step combines with other values itself, outside of modules. `coupled`:
    groups of those that it combines only with each other (a mean of weights), which the ranks that have them can do.
    """

    arguments: Mapping[str, CallArguments]
    states: frozenset[str]
    coupled: tuple[frozenset[str], ...] = ()


def find_calls(
    module: nn.Module,
    batch: Any,
    *,
    context: Entered,
    device: torch.device,
    stand_ins: Callable[[nn.Module], Mapping[str, Any]],
    step: str = "training_step",
    divided: bool = True,
) -> StepCalls:
    """Run the step on fake tensors to find its network calls.

    Args:
        module: the user's module.
        batch: an example mini-batch, perhaps without memory.
        context: entered around the step, for example autocast.
        device: the device that the step believes it runs on.
        stand_ins: returns attributes of a copy of the module that are replaced, such as methods that step optimizers.
        step: the name of the method.
        divided: whether there are several devices.

    Raises:
        CaptureError: the step calls no module with parameters, or something that cannot work.
    """

    def prepare(replica: nn.Module, recorder: Recorder) -> None:
        recorder.reads_between_calls, recorder.runs_rest = True, False
        for name, value in stand_ins(replica).items():
            object.__setattr__(replica, name, value)

    subject = Subject(module=module, batch=batch, step=step, context=context, device=device)

    def attempt(changes: Changes) -> Recording:
        return record(subject, changes, num_samples=samples_in(batch), run_time=RunTime(), prepare=prepare)[0]

    recording = attempted(module, attempt, opens=False)
    if not recording.network_calls():
        raise no_network()
    if divided:
        _check_gradients(recording)
        _check_left(recording, trains=step == "training_step")
    return _found(module, recording)


def _check_gradients(recording: Recording) -> None:
    refuse_cut_graphs(recording, within=False)
    for call in recording.calls:
        if call.scope == -1 and call.target == "grad" and call.kwargs.get("create_graph"):
            raise without_graph(call.line, "the step differentiates a gradient of network calls")


def _check_left(recording: Recording, trains: bool) -> None:
    """Refuse what network calls leave to the step or to later ones, besides results: each is captured by itself, on the
    ranks that compute it, and runs on micro-batches.

    Statistics of layers that normalise change in training alone.
    """
    network, answers = recording.network, recording.results()
    changes = () if trains else (each for each in recording.noted(Event.CHANGES_STATE) if each.scope != -1)
    changed = {each.subject: network(each.scope) for each in changes}
    for call in recording.calls:
        own = network(call.scope)
        makers = [recording.calls[ref.call] for ref in call.refs() if ref not in answers]
        left = [maker for maker in makers if network(maker.scope) not in (-1, own)]
        if left and own == -1:
            raise escaped(left[0].line)
        if left or (own != -1 and any(changed.get(name, own) != own for name in call.states())):
            raise refusal(
                call.line,
                f"{named(recording.modules[own].path)} reads a tensor that an earlier network call of the step has "
                "kept, in an attribute or a buffer",
                "return it from the forward, and pass it to the next call",
            )


def _found(module: nn.Module, recording: Recording) -> StepCalls:
    arguments: dict[str, CallArguments] = {}
    for call in recording.network_calls():
        if call.path not in arguments:
            arguments[call.path] = _outlined(module, recording, call)
    states, coupled = _states_of_step(recording)
    return StepCalls(arguments, frozenset(states), tuple(coupled))


def _states_of_step(recording: Recording) -> tuple[set[str], list[frozenset[str]]]:
    """See `StepCalls`."""
    origins: dict[Ref, frozenset[str]] = {}
    mixed, coupled = set[str](), list[frozenset[str]]()
    for call in recording.calls:
        refs, own = call.refs(), call.states() if call.scope == -1 else []
        used = frozenset(own).union(*(origins.get(ref, frozenset()) for ref in refs))
        if not used:
            continue
        if call.scope == -1 and all(ref in origins for ref in refs):
            coupled.append(used)
            origins |= {Ref(call.index, output): used for output in range(len(call.outputs))}
        else:
            mixed |= used
    return mixed, coupled


def tied(graph: OperatorGraph, groups: Sequence[frozenset[str]]) -> OperatorGraph:
    """The graph with all operators that use parameters and buffers of a group in one cluster, so in one stage."""
    ties = nx.Graph()
    for group in groups:
        nx.add_path(ties, sorted(group))
    for operator in graph if groups else ():
        users = [name for name in (*operator.parameters, *operator.buffers) if name in ties]
        if users:
            nx.add_path(ties, [*users, operator, *([f"@{operator.cluster}"] if operator.cluster else [])])
        elif operator.cluster:
            ties.add_edge(f"@{operator.cluster}", operator)
    return graph.with_operators(
        replace(operator, cluster=f"coupled{number}")
        for number, members in enumerate(nx.connected_components(ties))
        for operator in members
        if not isinstance(operator, str)
    )


def _outlined(module: nn.Module, recording: Recording, call: ModuleCall) -> CallArguments:
    """The arguments of a call, as tensors without memory, except for those of the example batch."""

    def outline(leaf: Any) -> Any:
        if isinstance(leaf, Ref) and leaf.call in recording.examples:
            return recording.examples[leaf.call]
        if isinstance(leaf, Ref):
            shape, dtype, grad = recording.calls[leaf.call].outputs[leaf.output]
            return torch.empty(shape, dtype=getattr(torch, dtype), device="meta", requires_grad=grad)
        if isinstance(leaf, StateRef):
            leaf = tensor_named(module, leaf.name)
        if isinstance(leaf, ModuleRef):
            raise refusal(call.line, "a network call gets a module as an argument", "pass tensors")
        return leaf.detach().to("meta").requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf

    args, kwargs = pytree.tree_map(outline, (call.args, call.kwargs))
    return args, kwargs


def samples_of_call(arguments: CallArguments) -> int:
    """Number of samples in the arguments of a call; 1 if nothing counts them."""
    return samples_in(_entry(arguments))


def call_batch(arguments: Mapping[str, CallArguments], num_samples: int) -> dict[str, Any]:
    """The batch of captured calls."""
    return _batch({path: _entry(given) for path, given in arguments.items()}, num_samples)


def _entry(arguments: CallArguments) -> dict[str, Any]:
    """CallArguments of a call as a part of a batch. They are no list, which could be one of samples."""
    args, kwargs = arguments
    return {"args": dict(enumerate(args)), "kwargs": dict(kwargs)}


def _batch(calls: Mapping[str, Any], num_samples: int) -> dict[str, Any]:
    return {"count": torch.empty(num_samples, device="meta"), "calls": dict(calls)}


def call_networks(module: nn.Module, batch: Mapping[str, Any]) -> list[Any]:
    """Call the modules whose arguments are in the batch; returns their answers."""
    num_samples = len(batch["count"])
    return [_called(module, path, entry, num_samples) for path, entry in batch["calls"].items()]


def _called(module: nn.Module, path: str, entry: Mapping[str, Any], num_samples: int) -> Any:
    def is_leaf(value: Any) -> bool:
        return are_plain(value) and len(value) == num_samples

    given = tuple(entry["args"].values()), dict(entry["kwargs"])
    # in new containers, which the forward may change, except for items of samples, which it does not even read
    arguments = pytree.tree_map(lambda leaf: leaf, given, is_leaf=is_leaf)
    return module.get_submodule(path)(*arguments[0], **arguments[1])


def capture_calls(
    module: nn.Module,
    batch: Mapping[str, Any],
    *,
    context: Entered,
    device: torch.device,
    function: StepFunction = call_networks,
    divided: bool = True,
) -> Capture:
    """Capture calls of modules.

    Args:
        batch: a `call_batch`; a `joint_batch` for all calls of a step, whose function is `joint_loss`.
        divided: for any number of samples, otherwise for these shapes.

    Raises:
        CaptureError: a module cannot be captured.
    """
    dims = {"count": 0} if divided else {"count": 0, "calls": None}
    return capture_step(module, batch, context=context, device=device, function=function, dims=dims)


def joint_loss(module: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """A loss of all results, a mean over samples, for comparisons: nobody trains by it.

    No sum of squares, which is the same for all results of a normalisation.
    """
    leaves = pytree.tree_leaves(call_networks(module, pytree.tree_map_only(Tensor, _changeable, batch)))
    numbers = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    loss = torch.stack([(number.square() * number.abs()).mean() for number in numbers]).sum()
    return loss if loss.requires_grad else loss.detach().requires_grad_()  # of a frozen network


def _changeable(tensor: Tensor) -> Tensor:
    """A tensor that a module may change in place, unlike a leaf that needs a gradient, or a view of it."""
    return tensor if isinstance(tensor, FakeTensor) or not tensor.requires_grad else tensor.clone()


def joint_batch(arguments: Mapping[str, CallArguments], num_samples: int) -> dict[str, Any]:
    """The batch of all calls of a step, each with the same number of samples, of which some come again."""

    return _batch({path: resized(_entry(given), num_samples) for path, given in arguments.items()}, num_samples)
