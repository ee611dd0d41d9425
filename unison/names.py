"""Canonical parameter names: what wrappers add to a name is not part of it."""

_WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def canonical_name(name: str) -> str:
    """Strip what DDP, torch.compile and checkpoint wrappers put into a parameter's name.

    Streams of noise and initial values hang on names, so a wrapper must not change them.

    >>> canonical_name("module.layers.0._checkpoint_wrapped_module.weight")
    'layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
