"""Padded arrays and their masks, as the data have them. Legend: B x T their shape, N the tokens that a mask keeps."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class Masked:
    """What a mask (B, T) selects, and the way back."""

    def __init__(self, mask_BT: np.ndarray) -> None:
        self.mask_BT = torch.from_numpy(np.asarray(mask_BT)).bool()
        self.counts = self.mask_BT.sum(-1).tolist()
        self.sample_N = self.mask_BT.nonzero()[:, 0]

    def rows(self, values_BT: Tensor) -> Tensor:
        return values_BT[self.mask_BT]

    def spread(self, values_N: Tensor) -> Tensor:
        """(B, T), 0 where masked."""
        result_BT = values_N.new_zeros(self.mask_BT.shape)
        result_BT[self.mask_BT] = values_N.detach()
        return result_BT
