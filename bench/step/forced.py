"""Forced acceptance."""

import torch
from random_pair import BLOCK
from torch import Tensor


class Forced:
    """Overwrites the target's choices so that every step emits the same number of tokens.

    Choice j becomes draft j + 1, which is then accepted. The last choice to be emitted becomes its draft with the
    lowest bit flipped, which is not. The replaced choices stay an operand, or a compiler could drop what computes them.
    """

    def __init__(self, device: torch.device) -> None:
        self.flip = torch.zeros(2 * BLOCK, dtype=torch.int64, device=device)
        self.off = torch.zeros(1, dtype=torch.bool, device=device)

    def set_(self, accepted: int) -> None:
        """Let every step emit ``accepted`` tokens from now on."""
        self.flip.zero_()
        self.flip[accepted - 1] = 1

    def __call__(self, block: Tensor, posterior: Tensor) -> Tensor:
        """Return the choices to use, ``[batch, rows]``.

        Args:
            block: ``[batch, rows]``, the anchor and the drafts.
            posterior: ``[batch, rows]``, the target's choice for the token after each row.
        """
        return torch.where(self.off, posterior, block.roll(-1, 1) ^ self.flip[: block.shape[1]])
