"""`PrivateSFTTrainer`: TRL's `SFTTrainer`, whose steps are private."""

from typing import Any

from trl import SFTTrainer

from unison.hf.trainer import PrivateTrainer, refuse_settings


class PrivateSFTTrainer(PrivateTrainer, SFTTrainer):
    """TRL's `SFTTrainer` with private steps; see `PrivateTrainer` for what it takes beside.

    The loss is the mean over rows of each row's own mean: padded and completion-only data are what
    they are without privacy. Rows are cut or padded to `SFTConfig(max_length=)`. Packed rows hold
    several documents, so that no row is one record: `packing` and `padding_free` are refused.
    """

    _usual_losses = (*PrivateTrainer._usual_losses, SFTTrainer.compute_loss)

    def __init__(self, *args: Any, **settings: Any) -> None:
        config = settings.get("args") or next((each for each in args[1:2]), None)
        remedies = {
            "packing": "a packed row holds several documents; leave it out",
            "padding_free": "rows that lie in one would mix; leave it out",
            "activation_offloading": "use gradient_checkpointing",
            "loss_type": "leave it at 'nll'",
        }
        refuse_settings(config, remedies)
        super().__init__(*args, **settings)
