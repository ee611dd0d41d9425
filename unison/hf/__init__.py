"""Private training where users already are: transformers' `Trainer` and TRL's `SFTTrainer`.

```python
trainer = unison.hf.PrivateTrainer(
    model=model,
    args=TrainingArguments("run", per_device_train_batch_size=8, gradient_accumulation_steps=32),
    train_dataset=rows,
    privacy=unison.Privacy(epsilon=3, delta=1e-5, max_grad_norm=1.0),
)
trainer.train()
```

docs/transformers.md has the whole way, from the install to a model that can be published.
"""

from typing import TYPE_CHECKING, Any

from unison.errors import BadInput

if TYPE_CHECKING:
    from unison.hf.command import FinetuneConfig, export, finetune, generate, resume
    from unison.hf.sft import PrivateSFTTrainer
    from unison.hf.trainer import PrivateTrainer

__all__ = [
    "FinetuneConfig",
    "PrivateSFTTrainer",
    "PrivateTrainer",
    "export",
    "finetune",
    "generate",
    "resume",
]

# Where they are, unless in command.py; and the extra that it needs.
_HOMES = {"PrivateSFTTrainer": ("sft", "trl"), "PrivateTrainer": ("trainer", "hf")}


def __getattr__(name: str) -> Any:
    """Import a trainer when it is asked for: the package that it extends is an optional one."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, extra = _HOMES.get(name, ("command", "hf"))
    from importlib import import_module

    try:
        return getattr(import_module(f"unison.hf.{module}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("unison"):
            raise
        raise BadInput(
            f"unison.hf.{name} needs {error.name}, which is not installed: "
            f"pip install 'unison[{extra}]'"
        ) from error
