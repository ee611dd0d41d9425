"""Small private runs."""

from dataclasses import fields, replace
from pathlib import Path

from unison.config import Execution, MechanismConfig, Output, Privacy, TrainConfig

DELTA = 1e-4
TARGET = Privacy(epsilon=8.0, delta=DELTA, accountant="rdp")
GIVEN = Privacy(noise_multiplier=0.7, delta=DELTA, accountant="rdp")
SEEDED = replace(GIVEN, secure_noise=False)
SMALL = {"num_layers": 1, "num_heads": 2, "d_model": 32, "d_ff": 48}


def config_of(folder: Path, data: Path, privacy: Privacy | None = GIVEN, **settings) -> TrainConfig:
    """A small private run; `settings` may be of any of the three groups."""
    names = {
        kind: {each.name for each in fields(kind)} for kind in (MechanismConfig, Execution, Output)
    }

    def of(kind, **defaults):
        return kind(**defaults | {n: v for n, v in settings.items() if n in names[kind]})

    return TrainConfig(
        mechanism=of(
            MechanismConfig,
            data=str(data),
            steps=6,
            batch_size=32,
            row_length=32,
            lr=0.01,
            overrides=SMALL,
            warmup_steps=2,
            privacy=privacy,
        ),
        execution=of(Execution, device="cpu", shard="none"),
        output=of(
            Output, folder=str(folder), eval_rows=8, eval_every=0, log_every=1, tensorboard=False
        ),
    )
