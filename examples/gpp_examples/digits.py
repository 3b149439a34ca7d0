"""scikit-learn's handwritten digits, for the examples with images."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor


def digits(seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Images `[n, 1, 8, 8]` between 0 and 1, labels `[n]`: 1,197 for training, 200 for validation, 400 to test."""
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    images = torch.tensor(pixels.reshape(-1, 1, 8, 8) / 16, dtype=torch.float32)
    test, validation, training = np.split(order, [400, 600])
    return [(images[rows], torch.tensor(labels)[rows]) for rows in (training, validation, test)]
