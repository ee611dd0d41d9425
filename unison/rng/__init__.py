"""Random numbers as functions of (key, stream, step, element), never of the rank."""

from unison.kernels.random import Cipher
from unison.rng.draw_mode import draws_by_sample
from unison.rng.draws import BatchDraws
from unison.rng.inits import fill_
from unison.rng.seal import PASSPHRASE, open_sealed_key, read_passphrase, seal_key
from unison.rng.streams import (
    Box,
    Key,
    NoiseClock,
    Permutation,
    Stream,
    add_noise_,
    bernoulli,
    grid_sensitivity,
    integers,
    noise_spacing,
    normal,
    poisson_sample,
    round_to_grid,
    secure_normal,
    truncated_normal,
    uniform,
    words,
    words_of_streams,
)
