"""Shares of samples, counted in spacings of a grid."""

import torch

from unison.clip.bounds import Grid


def test_weights_count_spacings():
    coefficients = torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64)
    for spacing in (0.25, torch.tensor([0.25], dtype=torch.float64)):
        grid = Grid(spacing)
        assert grid.weights(coefficients).tolist() == [4.0, 2.0, 0.0]
        restored = grid.weights(coefficients) * grid.weight(coefficients.device)
        assert torch.equal(restored, coefficients)
