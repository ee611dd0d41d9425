"""Random numbers as functions of (key, stream, step, element), never of the rank."""

from unison.kernels.random import Cipher
from unison.rng.draw_mode import draws_by_sample
from unison.rng.draws import BatchDraws
from unison.rng.inits import fill_
from unison.rng.keys import Key, NoiseClock
from unison.rng.secure import (
    add_noise_,
    grid_sensitivity,
    noise_spacing,
    round_to_grid,
    secure_normal,
)
from unison.rng.streams import (
    Box,
    Permutation,
    Stream,
    bernoulli,
    integers,
    normal,
    poisson_sample,
    truncated_normal,
    uniform,
    words,
    words_of_streams,
)

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
