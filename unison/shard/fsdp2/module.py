"""One FSDP2 module, computing granule by granule."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from unison.errors import BadInput, UnsupportedOperation
from unison.shard.each_granule import call_each_granule
from unison.shard.engine import NO_TASK, backward_task
from unison.shard.flat_group import Use
from unison.shard.fsdp2.parameter import OrderedParameter
from unison.shard.granules import PerGranule, check_not_bypassed, num_granules_of
from unison.shard.watch import granular_pass


class Batch(Protocol):
    """What a module must know of the batch."""

    @property
    def closes(self) -> bool:
        """Whether the running pass is the last of the logical batch."""
        ...

    def granules(self, num_granules: int) -> Sequence[int]:
        """Global numbers of the granules of the running pass."""
        ...


class OrderedModule:
    """A module that FSDP2 gathers and reduces as one, its parameters, and their gradients.

    Args:
        module: The module.
        name: Its name in the model.
        parameters: Those that no FSDP2 module below it holds.
        group: FSDP2's `FSDPParamGroup` of these parameters; None if there are none.
        has_children: Whether there are FSDP2 modules below it.
        batch: The batch that all modules of the model share.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        *,
        parameters: list[OrderedParameter],
        group: Any,
        has_children: bool,
        batch: Batch,
    ) -> None:
        self.name, self.module, self.parameters = name, module, parameters
        self._group, self._has_children, self._batch = group, has_children, batch
        self._forward = module.forward  # the user's own
        self._reduce = group.post_backward if group is not None else None
        self._num_calls = 0  # forward passes whose backward pass has not come
        self._sent: list[OrderedParameter] = []

    # --- forward ---------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, granule by granule."""
        num_granules = num_granules_of((args, kwargs))
        is_training = torch.is_grad_enabled() and backward_task() == NO_TASK
        if num_granules == 0:
            if is_training:
                raise BadInput(
                    f"the ordered reducer of {self.name!r} needs a batch cut into granules; feed "
                    "the model from unison.deal(loader, granule=...), or evaluate under "
                    "torch.no_grad()"
                )
            return self._forward(*args, **kwargs)
        self._num_calls += is_training
        tensors = self._tensors(num_granules)
        with granular_pass(self.name, self.module, (args, kwargs), looks_at_writes=False):
            if self._has_children:
                return self._map_operations(tensors, args, kwargs)
            return self._loop_over_granules(tensors, args, kwargs)

    def _tensors(self, num_granules: int) -> list[list[Tensor]]:
        """What each granule computes with, [granule][parameter]."""
        if not torch.is_grad_enabled():  # an evaluation; any batch will do
            return [[parameter.full for parameter in self.parameters]] * num_granules
        granules = self._batch.granules(num_granules)
        return [[parameter.leaf(granule) for parameter in self.parameters] for granule in granules]

    def _loop_over_granules(
        self, tensors: list[list[Tensor]], args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        def call(index: int, own_args: tuple, own_kwargs: dict[str, Any]) -> Any:
            with self._in_place(tensors[index]):
                return self._forward(*own_args, **own_kwargs)

        return call_each_granule(self.name, self.module, call, len(tensors), args, kwargs)

    def _map_operations(
        self, tensors: list[list[Tensor]], args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """Run a forward that calls other FSDP2 modules: once, each operation granule by granule.

        One forward per granule would gather every module below once per granule.
        """
        with self._in_place([PerGranule.of(each) for each in zip(*tensors, strict=True)]):
            output = self._forward(*args, **kwargs)
        check_not_bypassed(output, self.name)
        return output

    @contextmanager
    def _in_place(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Let the modules' attributes be the given tensors, one per parameter.

        Python finds an instance's own dictionary before `nn.Module.__getattr__` looks into
        `_parameters`, where FSDP2 goes on keeping its own.
        """
        uses = [(use, t) for p, t in zip(self.parameters, tensors, strict=True) for use in p.uses]
        for use, tensor in uses:
            use.module.__dict__[use.attribute] = tensor
        _renew_flat_weights([use for use, _ in uses])
        try:
            yield
        finally:
            for use, _ in uses:
                del use.module.__dict__[use.attribute]
            _renew_flat_weights([use for use, _ in uses])

    # --- backward --------------------------------------------------------------------------------

    def post_backward(self, *unused: Any) -> None:
        """What FSDP2 calls when a backward pass has left the module, in place of its own."""
        for parameter in self.parameters:
            parameter.check_no_other_gradient()
        self._num_calls -= 1
        # A module that was called twice has all its gradients after the second backward pass only.
        if self._num_calls <= 0 and self._batch.closes:
            self._hand_over()
        self._call_reduce()

    def finish_backward(self) -> None:
        """Sum what is left when the whole backward pass is over."""
        if self._batch.closes and self._hand_over():
            self._call_reduce()

    def _call_reduce(self) -> None:
        assert self._reduce is not None
        self._reduce()

    def _hand_over(self) -> bool:
        """Give FSDP2 the gradients of all trainable parameters, if there are any."""
        if not any(parameter.has_gradients for parameter in self.parameters):
            return False
        if not self._group.reduce_grads:
            raise UnsupportedOperation(
                f"gradient sync of {self.name!r} is off; leave set_requires_gradient_sync(True), "
                "the ordered reducer itself waits for the pass that closes the logical batch"
            )
        if self._group.gradient_divide_factor != 1:
            raise UnsupportedOperation(
                f"gradient_divide_factor of {self.name!r} was set to "
                f"{self._group.gradient_divide_factor} after unison.use_ordered_reduction; the "
                "ordered reducer sums, and unison.batch_mean divides"
            )
        self._sent = [parameter for parameter in self.parameters if parameter.is_trainable]
        for parameter in self._sent:
            parameter.hand_over()
        return True

    def take_sent(self) -> list[OrderedParameter]:
        """The parameters that were summed over ranks since the last time this was asked."""
        sent, self._sent = self._sent, []
        return sent

    def begin_pass(self) -> None:
        """Be ready for other granules."""
        self._num_calls = 0
        for parameter in self.parameters:
            parameter.begin_pass()


def _renew_flat_weights(uses: list[Use]) -> None:
    """Let recurrent modules, which keep a second list of their parameters, see the same ones."""
    for module in {use.module for use in uses if isinstance(use.module, nn.RNNBase)}:
        module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]
