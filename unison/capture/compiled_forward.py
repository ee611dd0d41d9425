"""A module's forward, compiled with slots for its records.

It stands in the place of the forward of a model, or of one of its blocks, and runs compiled code in
private passes. Around it an eager capture goes on: the parameters that it has marked are shown to
compiled code as they are, and the records that come out of the slots are the capture's.
"""

import copy
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter

from unison.capture import Capture
from unison.capture.compiled import CompiledCapture
from unison.capture.torch_compile import unit_draws_known, unwrapped
from unison.capture.tracked import Tracked, find_params
from unison.errors import UnsupportedOperation
from unison.rng.draw_mode import draws_of_granule, unwatched
from unison.shard.api import find_blocks
from unison.shard.each_granule import CALLED_BY_GRANULE, call_each_granule
from unison.shard.granules import PerGranule, num_granules_of
from unison.shard.sharded_tensor import fsdp2_modules
from unison.shard.unit import unit_of, units_of
from unison.torch_internals import DynamoBackend, canonical_name, pinned

T = TypeVar("T")


class CompiledForward:
    """What the forward of a module is while its private passes are compiled.

    Args:
        name: The module's name.
        module: The module.
        passes: Knows of the pass under way.

    Attributes:
        refusal: Why the module runs uncompiled; None if it does not.
    """

    def __init__(self, name: str, module: nn.Module, passes: "CapturedPasses") -> None:
        self.name, self._module, self._passes = name, module, passes
        self._places = [(each.module, each.attribute) for each in find_params(module)[1]]
        self._compiled: dict[CompiledCapture, Callable[..., Any]] = {}
        self._worked: set[CompiledCapture] = set()
        self.refusal: str | None = None
        self._has_unit_draws = False  # is compiled only with `unit_draws_known`
        # While it is attached: in whose attribute, and the module's own forward, which was there.
        self._where: tuple[Any, str] = module, "forward"
        self._eager: Any = None
        self._is_attached = False

    def attach(self) -> None:
        """Take the place of the module's own forward."""
        module, before = self._module, self._eager
        own = vars(module).get("forward")
        self._had_own, unit = own is not None, unit_of(module)
        self._where = module, "forward"
        if unit is not None:
            self._where = unit, "inner"
        elif hasattr(own, CALLED_BY_GRANULE):
            self._where = own, CALLED_BY_GRANULE
        self._eager = getattr(*self._where)
        if self._eager != before:  # the user has put another one there
            self._compiled, self._worked = {}, set()
        setattr(*self._where, self)
        self._is_attached = True

    def detach(self) -> None:
        """Give the module its own forward back."""
        self._is_attached = False
        if self._where[0] is self._module and not self._had_own:
            del vars(self._module)["forward"]
        else:
            setattr(*self._where, self._eager)

    # A copy of the module runs what the user wrote ([Note: copies are plain] in inputs.py): the
    # class's forward, or one that the user had put on the instance.

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        if self._had_own:
            return copy.deepcopy(self._eager, memo)
        return type(self._module).forward.__get__(memo[id(self._module)])

    def __reduce__(self) -> tuple[Any, ...]:
        return (partial, (self._eager,)) if self._had_own else (getattr, (self._module, "forward"))

    # --- passes ----------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        if not self._is_attached:  # a call that had begun found it while it was
            return self._eager(*args, **kwargs)
        if not torch.is_grad_enabled() and self._is_plain(args, kwargs):
            with _disable_current_modes():
                return self._passes.evaluated(self._eager)(*args, **kwargs)
        if self.refusal is not None or not self._passes.captures or not torch.is_grad_enabled():
            return self._eager(*args, **kwargs)
        num_granules = num_granules_of((args, kwargs))
        with self._in_places([None] * len(self._places)) as marks:
            if num_granules == 0:
                return self._run(marks, 0, args, kwargs)
            call = partial(self._run, marks)
            return call_each_granule(self.name, self._module, call, num_granules, args, kwargs)

    def _is_plain(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether it is a pass that nobody captures, of a batch in one piece."""
        if self._passes.is_aside or num_granules_of((args, kwargs)):
            return False
        return not any(
            isinstance(vars(module).get(attribute), Tracked | PerGranule)
            for module, attribute in self._places
        )

    def _run(self, found: list[Any], granule: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run the module for one granule.

        Args:
            found: What was in the parameters' places.
            granule: Its number on this rank; 0 if the batch is not cut.
            args: The module's arguments.
            kwargs: Its keyword arguments.
        """
        marks = [each.parts[granule] if isinstance(each, PerGranule) else each for each in found]
        if self.refusal is None:
            if any(isinstance(each, Tracked) for each in tree_iter((args, kwargs))):
                self.refusal = "it is given something that is made of parameters alone"
            else:
                output, self.refusal = self._run_compiled(marks, args, kwargs)
                if self.refusal is None:
                    return output
            if not self._passes.is_aside:  # or it is told when all are known
                warnings.warn(
                    f"{self.name} runs uncompiled from now on: {self.refusal}", stacklevel=2
                )
        with self._in_places(marks):
            return self._eager(*args, **kwargs)

    @contextmanager
    def _in_places(self, values: Sequence[Any]) -> Iterator[list[Any]]:
        """Put values in the parameters' places for this block, or None for the parameters.

        Yields:
            What was there: a capture's marks.
        """
        before = self._exchange(values)
        try:
            yield before
        finally:
            self._exchange(before)

    def _exchange(self, values: Sequence[Any]) -> list[Any]:
        before = []
        for (module, attribute), value in zip(self._places, values, strict=True):
            before.append(vars(module).pop(attribute, None))
            if value is not None:
                vars(module)[attribute] = value
        return before

    def _run_compiled(
        self, marks: list[Any], args: tuple, kwargs: dict[str, Any]
    ) -> tuple[Any, str | None]:
        """Run compiled code, which finds the parameters without their marks.

        Returns:
            What came out, and why it does not count, if it does not.
        """
        names: dict[int, str] = {}
        shown: list[Tensor | None] = []
        for (module, attribute), mark in zip(self._places, marks, strict=True):
            if not isinstance(mark, Tracked):
                shown.append(mark)
                continue
            own = module._parameters[attribute]
            # To compilers, parameters are more than tensors; but they may be gathered for the pass.
            is_own = type(own) is nn.Parameter and own.data_ptr() == mark.value.data_ptr()
            shown.append(None if is_own else mark.value)
            names[id(own if is_own else mark.value)] = mark.of_parameters[0]
        listeners = (each.listener for each in marks if isinstance(each, Tracked))
        capture = next(listeners, None) or self._passes.captures[0]
        kinds = tuple(_kind(each, capture.factored) for each in marks)
        backend = self._passes.backend(capture, kinds)
        with (
            self._in_places(shown),
            backend.running(capture, names),
            unwatched(),
            _disable_current_modes(),
        ):
            output, refusal = self._call(backend, args, kwargs)
            if refusal is not None and not self._has_unit_draws:
                # A number that is drawn, and decides nothing, may be all that was in the way.
                self._has_unit_draws = True
                output, found = self._call(backend, args, kwargs)
                self._has_unit_draws = found is None
                refusal = refusal if found is not None else None
            return output, refusal

    def _call(
        self, backend: CompiledCapture, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[Any, str | None]:
        if backend not in self._compiled:
            self._compiled[backend] = torch.compile(
                self._eager, backend=backend, dynamic=False, fullgraph=True
            )
        num_runs = backend.num_runs
        draws = unit_draws_known() if self._has_unit_draws else nullcontext()
        try:
            # Each kind has its own backend.
            with draws, nullcontext() if backend in self._worked else _compiling():
                output = self._compiled[backend](*args, **kwargs)
        except _before_running() as error:
            return None, reason_of(error)
        except Exception as error:  # backends raise anything
            if backend in self._worked:
                raise
            return None, reason_of(error)
        self._worked.add(backend)
        return (output, None) if backend.num_runs > num_runs else (None, _SKIPPED)


class CapturedPasses:
    """A module's passes under a capture, compiled: whole, or block by block.

    See [Note: whole, or by blocks] in privacy/compiled.py.

    Args:
        module: The module.
        inner: The backend that compiles it.
        is_granular: Whether passes are cut into granules.
        agree: Whether something is so on any rank, where ranks run the module together.

    Attributes:
        forwards: What is compiled.
        is_trying: Whether the module runs to be tried out.
        refusal: Why the module runs uncompiled; None if it does not.
    """

    what = "captured passes"  # as warnings call them
    max_kinds = 16  # of batches, each with kernels of its own

    def __init__(
        self,
        module: nn.Module,
        inner: DynamoBackend,
        *,
        is_granular: bool,
        agree: Callable[[bool], bool],
    ) -> None:
        self._module, self._inner = module, pinned(inner) if is_granular else inner
        self._agree, self._is_granular = agree, is_granular
        self._backends: dict[Any, CompiledCapture] = {}
        self._axes: list[Any] = []  # keeps them, and so their ids
        self._captures: list[Capture] = []
        self._evaluated: dict[Callable[..., Any], Callable[..., Any]] = {}
        self.is_trying = False
        self._num_told = 0  # of the modules that run uncompiled
        self.refusal: str | None = None
        self._cuts = cuts_of(module, is_granular=is_granular)  # those that were not tried in vain
        self.forwards = self._of_first_cut()

    def _of_first_cut(self) -> list[CompiledForward]:
        cut = self._cuts[0] if self._cuts else {}
        return [CompiledForward(*each, self) for each in cut.items()]

    def attach(self) -> None:
        """Put compiled forwards in the place of the modules' own."""
        for each in self.forwards:
            each.attach()

    def detach(self) -> None:
        """Give the modules their own forwards back."""
        for each in self.forwards:
            each.detach()

    def backend(self, capture: Capture, kinds: tuple[str, ...]) -> CompiledCapture:
        """What compiles modules for passes like a capture's.

        Args:
            capture: Of the pass.
            kinds: How the module's parameters are trained, one by one.
        """
        draws = draws_of_granule() is not None
        key = id(self._inner), id(capture.axes), capture.batch, kinds, draws
        if key not in self._backends:
            self._axes.append(capture.axes)
            self._backends[key] = CompiledCapture(self._inner)
        return self._backends[key]

    @property
    def num_graphs(self) -> int:
        """How many graphs the user's backend has compiled."""
        found = self._backends.items()
        return sum(len(each.graphs) for key, each in found if key[0] == id(self._inner))

    def evaluated(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """What the user's backend makes of a forward, for passes without gradients."""
        if forward not in self._evaluated:
            self._evaluated[forward] = torch.compile(forward, backend=self._inner)
        return self._evaluated[forward]

    @property
    def is_aside(self) -> bool:
        """Whether the module runs for another reason than to be trained or evaluated."""
        return self.is_trying

    @property
    def captures(self) -> Sequence[Capture]:
        """Those that take the records of compiled code; none if the module runs as it is."""
        return self._captures

    @contextmanager
    def running(self, captures: Sequence[Capture]) -> Iterator[None]:
        """Around a pass that is compiled, forward and backward; none lets it run as it is."""
        before, self._captures = self._captures, list(captures)
        try:
            yield
        finally:
            self._captures = before

    def _try_out(self, difference: Callable[[], str | None]) -> None:
        """Find a cut that compiles, and by which passes come out as they should.

        Args:
            difference: Runs the module, and says why a pass is not what it should be, on all ranks
                or on none; None if it is.
        """
        first: str | None = None
        self.is_trying = True
        try:
            while self._cuts:
                reason = difference()
                refused = [each for each in self.forwards if each.refusal is not None]
                is_refused = reason is not None or len(refused) == len(self.forwards)
                if not self._agree(is_refused):
                    self._tell(refused, first)
                    return
                first = first or reason or (refused[0].refusal if refused else _ELSEWHERE)
                self._cuts.pop(0)
                self.detach()
                self.forwards = self._of_first_cut()
                self.attach()
        finally:
            self.is_trying = False
        self._refuse(first or _NO_BLOCKS)

    def _compare(
        self,
        run: Callable[[], T],
        difference: Callable[[T], str | None],
        *,
        skips_inner: bool = False,
    ) -> str | None:
        """Why compiled passes are not what they should be, on all ranks or on none.

        What the user's backend makes may round differently, by more than is right to ask, or draw
        other masks of dropout: then the same graphs are compared in the kernels of an eager pass.

        Args:
            run: Runs a compiled pass, and returns what came out of it.
            difference: Says why that is not what it should be; None if it is.
            skips_inner: Whether the kernels of an eager pass are all that is compared.
        """
        eager = torch._dynamo.lookup_backend("aot_eager")
        reason: str | None = None
        for backend in [eager] if skips_inner else [self._inner, eager]:
            has_failed, before, self._inner = False, self._inner, backend
            try:
                reason = difference(run())
            except Exception as error:  # of compiled code, or of a checkpoint around it
                reason, has_failed = reason_of(error), True
            finally:
                self._inner = before
            # All ranks run the module again, or none does: its passes may be collectives.
            if not self._agree(reason is not None):
                return None
            if self._agree(has_failed):
                break
        return reason or "it is not the same on another rank"

    @property
    def _too_many_kinds(self) -> str:
        return (
            f"batches come in more than {self.max_kinds} shapes, and each would be compiled; pad "
            "them to a few lengths"
        )

    def _refuse(self, reason: str) -> None:
        """Let the module run as it is from now on, and say why."""
        self.refusal = reason
        self.detach()
        self.forwards = []
        warnings.warn(
            f"{self.what} of {type(self._module).__name__} run uncompiled: {reason}", stacklevel=2
        )

    def _tell(self, refused: Sequence[CompiledForward], why_not_first: str | None) -> None:
        """Warn of what runs uncompiled, each once."""
        if why_not_first is not None:
            ways = ["block by block", "as a whole"]
            way, not_so = reversed(ways) if self._is_granular else ways
            warnings.warn(
                f"{self.what} of {type(self._module).__name__} are compiled {way}, not {not_so}: "
                f"{why_not_first}",
                stacklevel=2,
            )
        told, self._num_told = self._num_told, len(refused)
        if len(refused) > told:
            others = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
            warnings.warn(
                f"{refused[0].name}{others} run uncompiled: {refused[0].refusal}", stacklevel=2
            )


_ELSEWHERE = "it cannot be compiled on another rank"
_NO_BLOCKS = "it has no repeated blocks that are sharded as a whole, each by one fully_shard"


def _kind(mark: Any, factored: Collection[str]) -> str:
    """How a parameter is trained; blocks that differ in it are not compiled alike."""
    if not isinstance(mark, Tracked):
        return "frozen"
    return "factored" if mark.of_parameters[0] in factored else "multiplied out"


_SKIPPED = (
    "torch.compile has left it to Python, as it does under torch.compiler.set_stance, with "
    "TORCH_COMPILE_DISABLE and inside of some hooks for saved tensors"
)


def _before_running() -> tuple[type[BaseException], ...]:
    """What Dynamo raises before any of a module's code has run."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return TorchDynamoException, FailOnRecompileLimitHit


@contextmanager
def _compiling() -> Iterator[None]:
    """Set Dynamo to compile whatever comes, and not to stop at what was logged already.

    The module has run before it is compiled. What transformers logs once it has logged then.
    """
    own = [getattr(logging.Logger, name, None) for name in ("info_once", "warning_once")]
    settings = {
        "recompile_limit": 10_000,
        "accumulated_recompile_limit": 10_000,
        "ignore_logger_methods": {*torch._dynamo.config.ignore_logger_methods, *filter(None, own)},
    }
    # torch 2.11 cannot write such a set into its metrics, and logs that it cannot.
    metrics = logging.getLogger("torch._dynamo.metrics_context")
    before, metrics.disabled = metrics.disabled, True
    try:
        with torch._dynamo.config.patch(settings):
            yield
    finally:
        metrics.disabled = before


def reason_of(error: BaseException) -> str:
    """What a compiler's error says, in a line."""
    error = getattr(error, "inner_exception", error)  # of Dynamo's BackendCompilerFailed
    if isinstance(error, UnsupportedOperation):
        return str(error)
    if type(error).__name__ == "FailOnRecompileLimitHit":
        return (
            "it was compiled too often: something that Python reads in forward, such as a number "
            "that a module keeps, is another one in every pass"
        )
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    source = next((line for line in reversed(lines) if line.startswith("File ")), "")
    return " ".join([f"{type(error).__name__}: {lines[0] if lines else ''}", source]).strip()


def cuts_of(module: nn.Module, *, is_granular: bool) -> list[dict[str, nn.Module]]:
    """How a model may be cut into modules that are compiled, the best first.

    See [Note: whole, or by blocks] in compiled.py.

    Args:
        module: The model.
        is_granular: Whether it trains in granules.

    Returns:
        The modules that are compiled, by name, for each way.
    """
    names = {id(each): canonical_name(name) for name, each in module.named_modules()}
    root = unwrapped(module.module if isinstance(module, DistributedDataParallel) else module)
    blocks = [unwrapped(each) for each in find_blocks(root)]
    blocks = [each for each in blocks if not _has_shards_below(each)]
    cuts = [{names[id(each)]: each for each in blocks}] if blocks else []
    if _has_shards_below(root):
        return cuts
    whole = {names[id(root)] or type(root).__name__: root}
    return [*cuts, whole] if is_granular else [whole, *cuts]


def _has_shards_below(module: nn.Module) -> bool:
    """Whether parts of a module gather their parameters themselves, which cannot be traced."""
    if any(each is not unit_of(module) for each in units_of(module)):
        return True
    return any(child is not module for _, child in fsdp2_modules(module))
