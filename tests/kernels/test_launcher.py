"""Launches that are known: what they hand to the driver, and when they do not."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from unison.kernels import launcher as module
from unison.kernels.launcher import Launcher


class Tensorlike:
    """As much of a CUDA tensor as a launcher asks for."""

    is_cuda = True

    def __init__(self, address: int, dtype: torch.dtype = torch.float32) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address

    def get_device(self) -> int:
        return 0


class Kernel:
    """As much of a compiled function as a launcher asks for; it counts launches of either kind."""

    arg_names = ("x", "n", "eps", "SIZE")

    def __init__(self) -> None:
        self.ordinary, self.quick = [], []
        self.compiled = SimpleNamespace(run=self._run, function="function", packed_metadata="meta")

    def _run(self, *args) -> None:
        self.quick.append(args)

    def __getitem__(self, grid):
        def launch(*args, **constants):
            self.ordinary.append((grid, args, constants))
            return self.compiled

        return launch


@pytest.fixture
def kernel(monkeypatch) -> Kernel:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 7, raising=False)
    hooks = SimpleNamespace(calls=[])
    runtime = SimpleNamespace(launch_enter_hook=hooks, launch_exit_hook=SimpleNamespace(calls=[]))
    monkeypatch.setattr(module, "_RUNTIME", runtime)
    return Kernel()


def launch(launcher: Launcher, address: int = 256, n: int = 32, dtype=torch.float32, size=64):
    launcher((3, 2), (Tensorlike(address, dtype),), (n, 1e-5), SIZE=size, num_warps=4)  # type: ignore[arg-type]


def test_the_second_launch_goes_to_the_driver(kernel):
    launcher = Launcher(kernel)
    launch(launcher)
    launch(launcher, address=512)
    assert len(kernel.ordinary) == 1
    nothing = (None, None, None)
    assert kernel.quick == [(3, 2, 1, 7, "function", "meta", *nothing, 512, 32, 1e-5, 64)]


@pytest.mark.parametrize(
    "other",
    [{"address": 260}, {"n": 1}, {"n": 33}, {"dtype": torch.bfloat16}, {"size": 128}],
    ids=str,
)
def test_what_triton_specialises_on_is_compiled_by_it(kernel, other):
    launcher = Launcher(kernel)
    launch(launcher)
    launch(launcher, **other)
    assert len(kernel.ordinary) == 2
    assert not kernel.quick


def test_a_profiler_hears_of_every_launch(kernel):
    launcher = Launcher(kernel)
    module._RUNTIME.launch_enter_hook.calls.append(print)
    for _ in range(3):
        launch(launcher)
    assert len(kernel.ordinary) == 3


def test_a_driver_that_refuses_gets_ordinary_launches(kernel):
    launcher = Launcher(kernel)
    launch(launcher)

    def refuse(*_):
        raise TypeError("another number of arguments")

    kernel.compiled.run = refuse
    launcher._known = {key: (refuse, *rest) for key, (_, *rest) in launcher._known.items()}
    launch(launcher)
    launch(launcher)
    assert len(kernel.ordinary) == 3


def test_what_was_compiled_may_be_unlike_what_is_expected(kernel):
    kernel.compiled = None  # as Triton's interpreter returns
    launcher = Launcher(kernel)
    launch(launcher)
    launch(launcher)
    assert len(kernel.ordinary) == 2


def test_shapes_that_never_come_again_do_not_pile_up(kernel, monkeypatch):
    monkeypatch.setattr(module, "_MOST_KNOWN", 4)
    launcher = Launcher(kernel)
    for n in range(20):
        launch(launcher, n=n)
    assert len(launcher._known) <= 4


def prepared(launcher: Launcher):
    return launcher.prepared((3, 2), (32, 1e-5), SIZE=64, num_warps=4)


def run(prepared, address: int = 256, dtype=torch.float32) -> None:
    prepared(Tensorlike(address, dtype))


def test_a_prepared_launch_hands_the_same_to_the_driver(kernel):
    launcher = Launcher(kernel)
    again = prepared(launcher)
    for address in (256, 512, 1024):
        run(again, address)
    launch(launcher, address=1024)  # it knows of those that were prepared
    assert len(kernel.ordinary) == 1
    assert [each[9] for each in kernel.quick] == [512, 1024, 1024]
    assert kernel.quick[-2] == kernel.quick[-1]


@pytest.mark.parametrize("other", [{"address": 260}, {"dtype": torch.bfloat16}], ids=str)
def test_a_prepared_launch_asks_what_its_tensors_are(kernel, other):
    again = prepared(Launcher(kernel))
    run(again)
    run(again, **other)
    assert len(kernel.ordinary) == 2
    assert not kernel.quick
    run(again)
    run(again, **other)
    assert len(kernel.quick) == 2


def test_a_prepared_launch_on_another_device_changes_to_it(kernel, monkeypatch):
    entered = []

    class Device:
        def __init__(self, device) -> None:
            self.device = device

        def __enter__(self) -> None:
            entered.append(self.device)

        def __exit__(self, *_) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "device", Device)
    again = prepared(Launcher(kernel))
    run(again)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    run(again)
    assert entered == [0]
    assert len(kernel.quick) == 1


def test_a_profiler_hears_of_prepared_launches(kernel):
    again = prepared(Launcher(kernel))
    run(again)
    module._RUNTIME.launch_enter_hook.calls.append(print)
    run(again)
    run(again)
    assert len(kernel.ordinary) == 3


def test_a_driver_that_refuses_a_prepared_launch_gets_ordinary_ones(kernel):
    def refuse(*_):
        raise TypeError("another number of arguments")

    kernel.compiled.run = refuse
    again = prepared(Launcher(kernel))
    for _ in range(3):
        run(again)
    assert len(kernel.ordinary) == 3


def test_a_prepared_launch_may_find_nothing_compiled(kernel):
    kernel.compiled = None
    again = prepared(Launcher(kernel))
    for _ in range(3):
        run(again)
    assert len(kernel.ordinary) == 3
