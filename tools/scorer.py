"""The score of pages as a module of torch, whose parameters are trained by backpropagation."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from kernels.ops import NUM_FEATURES, SCORE_HIDDEN
from kernels.reference import score
from memory.importance import HAND_WEIGHTS, load_scorer, packed


class Scorer(nn.Module):
    """Starts with the hand weights, and a relevance network that gives every page the same until it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.beta, self.gamma = (nn.Parameter(term.clone()) for term in HAND_WEIGHTS[:3])
        self.log_tau = nn.Parameter(-HAND_WEIGHTS[3].log())  # of the decay, in tokens
        with torch.random.fork_rng(devices=[]):  # not the caller's stream
            torch.default_generator.manual_seed(0)  # `torch.manual_seed` would seed the GPUs too
            first, second = nn.Linear(NUM_FEATURES + 2, SCORE_HIDDEN), nn.Linear(SCORE_HIDDEN, 1)
            self.relevance = nn.Sequential(first, nn.SiLU(), second)
            for parameter in second.parameters():
                nn.init.zeros_(parameter)

    @classmethod
    def load(cls, path: Path) -> Scorer:
        """The one in a file. Raises ValueError, as `load_scorer` does."""
        scorer = cls()
        scorer.load_state_dict(load_scorer(path)[0])
        return scorer

    def packed(self, factors: tuple[float, ...] = (1, 1, 1)) -> Tensor:
        """The parameters as `Ops.score` reads them; factors: of alpha, beta and gamma."""
        return packed(dict(self.named_parameters()), factors)

    def forward(self, features: Tensor, ages: Tensor) -> Tensor:
        """Scores [pages] in [0, 1] of features [pages, NUM_FEATURES] and ages [pages], in tokens."""
        return score(features, ages, self.packed())
