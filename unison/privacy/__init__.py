"""Differential privacy: sampling, clipping, noise, and a ledger of what was applied."""

from unison.privacy.accounting import epsilon_if_secret, epsilon_of
from unison.privacy.arguments import refuse_training_rows, resized
from unison.privacy.calibration import (
    Budget,
    BudgetGuard,
    BudgetSpent,
    calibrate,
    epsilon_for,
    noise_multiplier_for,
    steps_for,
)
from unison.privacy.engine import Diagnostics, PrivacyEngine, attach
from unison.privacy.ledger import Ledger, commit_to_data
from unison.privacy.ledger_file import LEDGER_FILE, LedgerFile, Session, read_ledger
from unison.privacy.loader import PrivateLoader
from unison.privacy.loss_tape import is_public, public
from unison.privacy.mechanism import (
    AdaptiveClipping,
    Cosine,
    Exponential,
    Linear,
    Mechanism,
    Release,
    Schedule,
    Stairs,
)
from unison.privacy.sampling import (
    Poisson,
    Sampling,
    Shuffled,
    TruncatedPoisson,
    sampling_for,
    steps_per_epoch,
)
