"""Uses that are known: what one pass has found out of a use of parameters serves those after it.

[Note: known uses] Which rule an operation has, where the samples lie in it, which records it makes
and what becomes of them: all of that is the same in the next pass, as long as the operation gets
the same parameters and an input like the one before. To find it out again takes Python longer than
a GPU takes for the operation. So a pass leaves a `Site` of every use whose rule does no more than
run the function (`DIRECT`), and a pass of the same kind asks the site whether all is as it was.
What is not goes the general way, through the rule.

A site knows how the records of its use were taken, too: whoever takes them may hand it a `Maker`,
which makes of the gradient what is kept of it, and nothing in between.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from unison.capture.tap import refuse_changed, refuse_second
from unison.capture.tracked import Tracked, find_tracked
from unison.capture.use import Taker, Use
from unison.ops import DIRECT, Builder, Layout

Maker = Callable[[Any, Tensor, Tensor], bool]
"""(keeper, gradient of the output, input) -> whether it was taken: only if all is as it was."""


class PlainUse(NamedTuple):
    """The use of a parameter as it is."""

    name: str
    shape: tuple[int, ...]
    builder: Builder


class Keeper(Protocol):
    """Who takes the records of a pass."""

    def maker_of(
        self, uses: Sequence[PlainUse], layout: Layout, g: Tensor, x: Tensor
    ) -> Maker | None:
        """Return what takes such a use from now on; None if records should be made of it.

        Called when the records of the use have been taken.
        """
        ...


class Alike(NamedTuple):
    """What makes a pass one of many that are alike.

    Attributes:
        kind: The same for passes that plan alike for as many samples.
        keeper: Returns who takes the records of the pass under way.
    """

    kind: Hashable
    keeper: Callable[[], Keeper]


_SIMPLE = (int, float, bool, str)
_SEQUENCES = (list, tuple, torch.Size)
_COMPARED = (*_SIMPLE, *_SEQUENCES)


class Site:
    """One use of parameters by a function that has a rule of its own; see [Note: known uses].

    Args:
        func: The torch function.
        given: Its arguments, and those by name after them.
        keywords: Names of the latter.
        use: What the rule made of it.

    Attributes:
        layout: Where samples lie in what comes out.
        uses: The parameters, each with the builder of its record.
        names: The parameters' names.
        maker: What makes of the gradient what is kept of it, once it is known.
    """

    def __init__(
        self, func: Callable[..., Any], given: Sequence[Any], keywords: tuple[str, ...], use: Use
    ) -> None:
        given = [list(each) if type(each) is list else each for each in given]  # theirs may change
        plain = [each.value if type(each) is Tracked else each for each in given]
        place = next(i for i, each in enumerate(given) if type(each) is Tensor)
        x = given[place]
        self._place, self._shape, self._dtype, self._device = place, x.shape, x.dtype, x.device
        self._num_given = len(given)
        self._others = [(i, each) for i, each in enumerate(given) if i != place]
        num_placed = len(given) - len(keywords)
        self._before, self._after = plain[:place], plain[place + 1 : num_placed]
        self._keywords = keywords
        self._named = dict(zip(keywords, plain[num_placed:], strict=True))
        assert use.layout is not None  # only where samples are followed it may not be known
        self._run, self.layout, self.uses = DIRECT[func], use.layout, use.uses
        self.names = [tracked.of_parameters[0] for tracked, _ in use.uses]
        self.maker: Maker | None = None
        self._is_tried = False

    def input_of(self, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
        """Return the input of a call, if the call is like the one that is known."""
        given = args
        if kwargs or self._keywords:
            if tuple(kwargs) != self._keywords:
                return None
            given = (*args, *kwargs.values())
        if len(given) != self._num_given:
            return None
        x = given[self._place]
        if type(x) is not Tensor or x.dtype is not self._dtype or x.shape != self._shape:
            return None
        if x.device != self._device or not x.requires_grad:
            return None
        for i, fact in self._others:
            value = given[i]
            if value is fact:
                continue
            kind = type(value)
            if kind not in _COMPARED or kind is not type(fact) or value != fact:
                return None
        return x

    def run(self, x: Tensor) -> Tensor:
        """Run the function on plain tensors."""
        return self._run(*self._before, x, *self._after, **self._named)

    def wait(self, output: Tensor, x: Tensor, capture: Taker, keeper: Callable[[], Keeper]) -> None:
        """Wait for the gradient of the output; as `unison.capture.tap.hook` does.

        Args:
            output: What came out.
            x: What went in.
            capture: Who takes records of this pass.
            keeper: Returns who takes gradients as a maker makes them.
        """
        waiting: Any = _Waiting(self, x, capture, keeper)
        # As `Tensor.register_hook`, but for a handle that nobody would hold.
        hooks: Any = output._backward_hooks
        if hooks is None:
            output._backward_hooks = _Hooks({waiting: waiting})
            output.grad_fn._register_hook_dict(output)  # type: ignore[union-attr]
        else:
            hooks[waiting] = waiting

    def record(self, g: Tensor, x: Tensor, capture: Taker, keeper: Callable[[], Keeper]) -> None:
        """Make records of the use, and ask once how it may be taken without them."""
        Use(capture, self.layout, self.uses).record(g, (x.detach(),))
        if not self._is_tried:
            self._is_tried = True
            uses = [
                PlainUse(tracked.of_parameters[0], tuple(tracked.value.shape), builder)
                for tracked, builder in self.uses
            ]
            self.maker = keeper().maker_of(uses, self.layout, g, x)


class _Hooks(dict):
    """Hooks of a tensor: a dictionary that handles of other hooks can refer to weakly."""

    __slots__ = ("__weakref__",)


class _Waiting:
    """The hook of an output, with what went in.

    An object and no closure: those of hundreds of uses wait for the backward pass, and Python's
    garbage collector counts every cell of theirs.
    """

    __slots__ = ("_capture", "_keeper", "_saved", "_site", "_version")

    def __init__(self, site: Site, x: Tensor, capture: Taker, keeper: Callable[[], Keeper]) -> None:
        self._site: Any = site
        self._capture: Any = capture
        self._keeper: Any = keeper
        self._saved: Tensor | None = x
        self._version = x._version

    def __call__(self, g: Tensor | None) -> None:
        if g is None:  # none came, through a function that was given the output
            return
        x = self._saved
        if x is None:
            refuse_second()
        if x._version != self._version:
            refuse_changed()
        # Autograd keeps a hook until the whole graph goes: what is saved must go as it is used, and
        # so must the way to the module and its parameters.
        self._saved = None
        site, capture, keeper = self._site, self._capture, self._keeper
        self._site = self._capture = self._keeper = None
        maker = site.maker
        if maker is None or _is_recorded() or not maker(keeper(), g, x):
            site.record(g, x, capture, keeper)


_is_recorded = torch.is_grad_enabled
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks  # type: ignore[attr-defined]
_backward_pass = torch._C._current_graph_task_id
_has_functorch = torch._C._are_functorch_transforms_active
_has_autocast = torch._C._is_any_autocast_enabled  # type: ignore[attr-defined]


def is_usual(outer: int) -> bool:
    """Whether nothing but its arguments decides what a function does; asked for every use.

    Gradients are recorded, autograd keeps what is saved, neither autocast nor torch.func changes
    anything, and this is no backward pass that runs a forward pass again.

    Args:
        outer: Number of the backward pass in which all of this happens, -1 if there is none.
    """
    is_recorded = _is_recorded() and _top_hooks(True) is None
    is_plain = not _has_autocast() and not _has_functorch()
    return is_recorded and is_plain and _backward_pass() == outer


_MOST_KINDS = 8  # of passes; each knows all uses of a model


def sites_of(kind: Hashable, known: "dict[Hashable, Sites | None]") -> "Sites | None":
    """Return what is known of passes of a kind; None if this is the first of them.

    Where each batch has another size, nothing comes again, and nothing is worth remembering.
    """
    is_second = kind in known
    found = known.pop(kind, None)
    while len(known) >= _MOST_KINDS:
        known.pop(next(iter(known)))  # the one that was not asked for the longest time
    known[kind] = Sites() if found is None and is_second else found
    return known[kind]


class Sites:
    """The known uses of one kind of pass, by function and parameter."""

    def __init__(self) -> None:
        self._sites: dict[tuple[Callable[..., Any], int], Site] = {}
        # With a function and the id of the first mark among its arguments: the site, or None.
        self.find = self._sites.get

    def learn(
        self,
        func: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        use: Use,
        saved: Sequence[Tensor],
    ) -> None:
        """Remember a use, if all that it depends on can be compared.

        Args:
            func: The torch function.
            args: What it was given.
            kwargs: What it was given by name.
            use: What its rule made of it.
            saved: What the rule keeps for the records.
        """
        given = (*args, *kwargs.values())
        first = find_tracked(args, kwargs)
        inputs = [each for each in given if type(each) is Tensor]
        can_be_known = (
            func in DIRECT
            and (func, id(first)) not in self._sites
            and len(inputs) == len(saved) == 1
            and saved[0] is inputs[0]
            and any(each is inputs[0] for each in args)
            and all(map(_can_compare, given))
            # A mark that is made anew in every pass would pile up here.
            and all(tracked.memory is not None for tracked, _ in use.uses)
        )
        if can_be_known:
            self._sites[func, id(first)] = Site(func, given, tuple(kwargs), use)


def _can_compare(value: Any) -> bool:
    kind = type(value)
    if value is None or kind in (Tensor, Tracked, nn.Parameter, *_SIMPLE):
        return True  # parameters, tracked or not, are compared by who they are
    return kind in _SEQUENCES and all(type(each) in _SIMPLE for each in value)
