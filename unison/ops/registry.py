"""The table of rules: how each torch function uses a parameter.

A rule is a function `rule(tap, *args, **kwargs)` with the arguments of the torch function. It runs
the operation on plain tensors (`tap.plain` takes the mark off a tracked parameter), and hands the
output to `tap` together with what is needed later and, for each parameter, a *builder*: a pure
function from the gradient of the output to a record.

    @rule(F.linear)
    def linear(tap, x, weight, bias=None):
        y = F.linear(x, tap.plain(weight), tap.plain(bias))
        return tap(y, saved=(x,), uses=[(weight, of_weight), (bias, of_bias)])

Builders are called as `builder(layout, g, *saved, shape=...)`. A rule that does not know a case
returns `NotImplemented`. A rule of something composite hands nothing to `tap`: it calls the torch
functions it is made of on tracked values, and each of them comes to its own rule.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from unison.ops.records import Record

Builder = Callable[..., Record]
"""Makes the record of one use: `builder(layout, g, *saved, shape=...)`."""


class Tap(Protocol):
    """What a rule is given: see the note above."""

    def plain(self, value: Any) -> Any:
        """The value itself without a mark; anything else as it is."""
        ...

    def tracks(self, value: Any) -> bool:
        """Whether a value is a parameter whose uses are recorded."""
        ...

    def align(self, value: Tensor, like: Tensor) -> Tensor:
        """The same values, whose rows are the samples' of `like` if they were made without them.

        As those of a recurrent network's first state, which are zeros.
        """
        ...

    def expand(self, value: Any, shape: Sequence[int], like: Tensor) -> Any:
        """`value.expand(shape)` of a parameter, to meet `like`: its rows are the samples' of it."""
        ...

    def __call__(
        self,
        output: Tensor,
        *,
        saved: Sequence[Tensor],
        uses: Sequence[tuple[Any, Builder]],
        is_fresh: bool = True,
    ) -> Tensor:
        """Record the uses of parameters that made `output`, when its gradient comes.

        Args:
            output: What the operation returned.
            saved: What the builders need of its inputs.
            uses: The parameters, each with the builder of its record.
            is_fresh: Whether the output is the operation's alone: it shares no memory with an
                input, and its backward does not read it.
        """
        ...


Rule = Callable[..., Any]

RULES: dict[Callable[..., Any], Rule] = {}


def rule(*functions: Callable[..., Any]) -> Callable[[Rule], Rule]:
    """Register a rule for torch functions.

    Raises:
        AssertionError: If one of them has a rule already.
    """

    def register(function: Rule) -> Rule:
        for each in functions:
            assert each not in RULES, f"{each} has two rules"
            RULES[each] = function
        return function

    return register


NAMED_RULES: dict[str, Rule] = {}
"""Rules of functions that other packages register with torch, which may not be there yet."""


def rule_by_name(name: str) -> Callable[[Rule], Rule]:
    """Register a rule for a function of `torch.ops` by its name, `namespace::function`."""

    def register(function: Rule) -> Rule:
        assert name not in NAMED_RULES, f"{name} has two rules"
        NAMED_RULES[name] = function
        return function

    return register


def rule_of(func: Callable[..., Any]) -> Rule | None:
    """The rule of a torch function; None if it has none."""
    found = RULES.get(func)
    if found is None and isinstance(func, OpOverload | OpOverloadPacket):
        packet = func.overloadpacket if isinstance(func, OpOverload) else func
        return NAMED_RULES.get(packet._qualified_op_name)
    return found
