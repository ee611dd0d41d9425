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

from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload, OpOverloadPacket

from unison.ops.records import Record

Builder = Callable[..., Record]
"""Makes the record of one use: `builder(layout, g, *saved, shape=...)`."""


Tap = Any
"""What a rule is given: the `Capture` of the pass, whose `plain`, `tracks`, `align`, `expand` and
call are there for rules."""

Rule = Callable[..., Any]

RULES: dict[Callable[..., Any], Rule] = {}


NAMED_RULES: dict[str, Rule] = {}
"""Rules of functions that other packages register with torch, which may not be there yet."""


def rule(*functions: Callable[..., Any] | str) -> Callable[[Rule], Rule]:
    """Register a rule for torch functions, or for some of `torch.ops` by `namespace::function`.

    Raises:
        AssertionError: If one of them has a rule already.
    """

    def register(function: Rule) -> Rule:
        for each in functions:
            table: dict[Any, Rule] = NAMED_RULES if isinstance(each, str) else RULES
            assert each not in table, f"{each} has two rules"
            table[each] = function
        return function

    return register


def rule_of(func: Callable[..., Any]) -> Rule | None:
    """The rule of a torch function; None if it has none."""
    found = RULES.get(func)
    if found is None and isinstance(func, OpOverload | OpOverloadPacket):
        packet = func.overloadpacket if isinstance(func, OpOverload) else func
        return NAMED_RULES.get(packet._qualified_op_name)
    return found
