"""Language models whose parameters describe their own initial values."""

from unison.models.language_models import (
    CONFIG_FILE,
    FAMILIES,
    PRESETS,
    LanguageModel,
    ModelConfig,
    build,
    count_parameters,
    initialize,
    load,
    named_inits,
    per_sample_loss,
    preset,
    save,
    token_loss_sums,
)
