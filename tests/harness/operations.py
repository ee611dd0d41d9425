"""What we demand of an operation registered with `torch.library`, as functions on its name."""

import copy
import importlib
import pkgutil
import traceback
import warnings
from types import ModuleType
from typing import Any

import torch
from torch._library import custom_ops, simple_registry


def import_all(package: ModuleType) -> dict[str, str]:
    """Import every module of a package, so that its operations exist.

    Modules that need a package which is not installed are left out.

    Returns:
        The tracebacks of modules that failed otherwise, by name: the caller is to complain. An
        error here, while pytest collects, would stop all other tests too.
    """
    broken = {}
    with warnings.catch_warnings():
        # A third-party package that warns at import is no concern of the tests of operations.
        warnings.simplefilter("ignore")
        modules = pkgutil.walk_packages(
            package.__path__, f"{package.__name__}.", onerror=lambda name: None
        )
        for info in modules:
            if info.name.endswith("__main__"):
                continue
            try:
                importlib.import_module(info.name)
            except Exception as error:
                needs = error.name if isinstance(error, ModuleNotFoundError) else package.__name__
                if (needs or package.__name__).split(".")[0] == package.__name__:
                    broken[info.name] = traceback.format_exc()
    return broken


def registered(namespace: str) -> list[str]:
    """Return the names, such as `unison::fill`, of all operations in a namespace."""
    names = torch._C._dispatch_get_all_op_names()
    return sorted(name for name in names if name.startswith(f"{namespace}::"))


def overload(name: str) -> torch._ops.OpOverload:
    """Return the operation of a name such as `unison::fill` or `unison::fill.out`."""
    namespace, _, rest = name.partition("::")
    base, _, variant = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), variant or "default")


def has_fake(name: str) -> bool:
    """Say whether an operation can run on fake tensors (without data, as on `meta`)."""
    defined = custom_ops.OPDEFS.get(name)
    if defined is not None:
        # `custom_op` registers a fake that raises until there is a real one. An operation that
        # returns nothing needs none.
        return defined._abstract_fn is not None or not overload(name)._schema.returns
    keys = ("Meta", "CompositeImplicitAutograd", "CompositeExplicitAutograd")
    return simple_registry.singleton.find(name).fake_impl.kernel is not None or any(
        torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys
    )


def problems(name: str, samples: dict[str, list[tuple[Any, ...]]]) -> list[str]:
    """Return what is wrong with one operation, each in a sentence with its remedy.

    Args:
        name: the operation, `namespace::name`.
        samples: argument tuples by operation name; a dict in the last place holds keywords.
    """
    found = []
    if not has_fake(name):
        found.append(f"{name} has no fake implementation: add @torch.library.register_fake")
    if not samples.get(name):
        found.append(
            f"{name} has no sample inputs: add some to SAMPLES in tests/harness/samples.py"
        )
    if found:
        return found
    for number, sample in enumerate(samples[name]):
        args, kwargs = copy.deepcopy(sample), {}
        if args and isinstance(args[-1], dict):
            args, kwargs = args[:-1], args[-1]
        results = torch.library.opcheck(overload(name), args, kwargs, raise_exception=False)
        found += [
            f"{name} fails {test} of torch.library.opcheck on sample {number}: {result}"
            for test, result in results.items()
            if result != "SUCCESS"
        ]
    return found
