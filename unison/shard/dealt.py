"""Plain tensors of a dealt batch, which hand its plan on to what is computed of them.

[Note: where the plan goes] A reader may look ahead, so that the batch which was handed out last is
not the one in use. What a batch is (its plan) therefore goes with its tensors: through copies to a
device, casts, slices and stacks, as `Dealt`; into a sharded model, which takes plain tensors, and
out at its outputs; and with everything that needs gradients as a note at its autograd node, where
`batch_mean` finds it again. So the type is met before a model and in losses without gradients only,
and costs some ten microseconds for each operation there. What leaves torch (numpy and back) loses
its plan; then the batch that the model ran last, or that was handed out since, is meant.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map_only

from unison.shard.granules import PLAN, TAKES_GRANULES, PerGranule, plan_of

_BASE_OF = Tensor._base.__get__  # type: ignore[attr-defined]
_MAX_NODES = 1000  # of a loss, between it and the outputs of the model


class Dealt(Tensor):
    """A tensor that knows the plan of its batch; see [Note: where the plan goes]."""

    @staticmethod
    def of(value: Tensor, plan: Any) -> "Dealt":
        """A tensor with the same memory that knows its plan."""
        made = value.as_subclass(Dealt)
        setattr(made, PLAN, plan)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a torch function, and let what it returns know the plan."""
        kwargs = kwargs or {}
        is_compiling = torch.compiler.is_compiling()
        if is_compiling or set(types) == {Dealt} or func in TAKES_GRANULES:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
        else:  # of the other types, each with its own ways
            result = func(*without_plan(args), **without_plan(kwargs))
        if is_compiling or not isinstance(result, Tensor | tuple | list | dict):
            return result
        # As a dealt one a view's base would be a view itself; Dynamo asks on until there is none.
        if type(result) is torch.Size or func == _BASE_OF:
            return result
        # Mostly it is `x.f(...)` or `f(x, ...)`; to look through everything takes longer.
        first = args[0] if args else None
        plan = getattr(first, PLAN, None) if type(first) is Dealt else plan_of((args, kwargs))
        if isinstance(result, Tensor) and any(result is each for each in args):  # written in place
            setattr(result, PLAN, plan)
            return result
        return hand_on(result, plan)

    def __reduce_ex__(self, proto: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(proto)  # a file has no use for the plan

    def __deepcopy__(self, memo: dict[int, Any]) -> "Dealt":
        if id(self) not in memo:
            memo[id(self)] = Dealt.of(self.as_subclass(Tensor).__deepcopy__(memo), plan_of(self))
        return memo[id(self)]


def without_plan(value: Any) -> Any:
    """A nested value with plain tensors in the place of dealt ones."""
    return tree_map_only(Dealt, lambda each: each.as_subclass(Tensor), value)


def hand_on(value: Any, plan: Any) -> Any:
    """Let what was computed of a batch know its plan; returns what to use in its place."""
    if type(value) is Tensor:
        if value.grad_fn is None:
            return value if value.requires_grad else Dealt.of(value, plan)
        _note(value.grad_fn, plan)
        return value
    if type(value) is dict:
        return {key: hand_on(each, plan) for key, each in value.items()}
    is_structseq = type(value).__module__ == "torch.return_types"  # of `x.max(dim=0)`
    if type(value) in (tuple, list) or is_structseq:
        return type(value)([hand_on(each, plan) for each in value])
    for each in tree_iter(value):  # in a class of the user's: left as it is
        if type(each) is Tensor and each.grad_fn is not None:
            _note(each.grad_fn, plan)
        elif type(each) is Tensor:
            setattr(each, PLAN, plan)
    return value


def _note(node: Any, plan: Any) -> None:
    node.metadata[PLAN] = plan


def plan_of_loss(losses: Tensor) -> Any:
    """The plan of the batch that losses were computed of; None if it is not known."""
    plan = plan_of(losses)
    if isinstance(losses, PerGranule):
        return plan
    nodes: deque[Any] = deque([losses.grad_fn])
    seen: set[Any] = set()
    while plan is None and nodes and len(seen) < _MAX_NODES:
        node = nodes.popleft()
        if node is not None and node not in seen:
            seen.add(node)
            plan = node.metadata.get(PLAN)
            nodes.extend(below for below, _ in node.next_functions)
    return plan
