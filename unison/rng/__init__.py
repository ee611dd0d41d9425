"""Random numbers as functions of (key, stream, step, element), never of the rank."""

from unison.kernels.random import Cipher
from unison.rng.clock import NoiseClock
from unison.rng.distributions import (
    bernoulli,
    integers,
    normal,
    truncated_normal,
    uniform,
    words,
)
from unison.rng.draw_mode import draws_by_sample
from unison.rng.draws import BatchDraws
from unison.rng.fill import fill_
from unison.rng.keys import Key
from unison.rng.permutation import Permutation
from unison.rng.sampling import poisson_sample
from unison.rng.secure import (
    add_noise_,
    grid_sensitivity,
    noise_spacing,
    round_to_grid,
    secure_normal,
)
from unison.rng.streams import Box, Stream, words_of_streams

__all__ = [
    "BatchDraws",
    "Box",
    "Cipher",
    "Key",
    "NoiseClock",
    "Permutation",
    "Stream",
    "add_noise_",
    "bernoulli",
    "draws_by_sample",
    "fill_",
    "grid_sensitivity",
    "integers",
    "noise_spacing",
    "normal",
    "poisson_sample",
    "round_to_grid",
    "secure_normal",
    "truncated_normal",
    "uniform",
    "words",
    "words_of_streams",
]
