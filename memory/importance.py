"""How important a cached page is: alpha * attention + beta * position decay + gamma * semantic relevance, in [0, 1].

What is measured of a page is its *lift*: the attention it got from a query, over the share it would have if the query
attended to all tokens alike. So one scorer serves any model, depth, number of heads and length of context, and an old
page has no advantage over a young one (plain sums of attention favour what has been there long).
"""

import numpy as np
import torch
from torch import Tensor, nn

NUM_FEATURES = 3  # of a page: mean lift over the window, share of the window with a lift above 1, newest lift


class AttentionRecord:
    """What the pages of one sequence were attended to, [pages, NUM_FEATURES] float32, in the order of its pages."""

    __slots__ = ("features", "length")

    def __init__(self) -> None:
        self.features = np.zeros((0, NUM_FEATURES), dtype=np.float32)
        self.length = 0  # of the sequence when it was observed last

    def observe(self, lifts: np.ndarray, length: int, window: int) -> None:
        """lifts [pages]: in the attention of the newest queries, with the sequence `length` tokens long. A page that
        was not seen before counts as if it had always been so."""
        known = len(self.features)
        new = np.stack([lifts, lifts > 1, lifts], axis=1).astype(np.float32)
        keep = np.exp((self.length - length) / window)
        new[:known, :2] = keep * self.features[:, :2] + (1 - keep) * new[:known, :2]
        self.features, self.length = new, length


class Scorer(nn.Module):
    """The score of pages; all parameters are trained by backpropagation. The relevance network starts neutral: it gives
    every page the same until it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(0.6))
        self.beta = nn.Parameter(torch.tensor(0.3))
        self.gamma = nn.Parameter(torch.tensor(0.1))
        self.log_tau = nn.Parameter(torch.tensor(np.log(512.0), dtype=torch.float32))  # of the decay, in tokens
        with torch.random.fork_rng(devices=[]):  # not the caller's stream
            torch.default_generator.manual_seed(0)  # `torch.manual_seed` would seed the GPUs too
            self.relevance = nn.Sequential(nn.Linear(NUM_FEATURES + 1, 8), nn.SiLU(), nn.Linear(8, 1))
            for parameter in self.relevance[2].parameters():
                nn.init.zeros_(parameter)

    def forward(self, features: Tensor, ages: Tensor) -> Tensor:
        """Scores [pages] in [0, 1] of features [pages, NUM_FEATURES] and ages [pages], in tokens."""
        lift, often, newest = features.unbind(-1)
        decay = torch.exp(-ages * torch.exp(-self.log_tau))
        attention = (lift / (1 + lift) + often) / 2
        inputs = torch.stack([lift.log1p(), often, newest.log1p(), decay], dim=-1)
        relevance = torch.sigmoid(self.relevance(inputs))[..., 0]
        weights = torch.stack([self.alpha, self.beta, self.gamma]).abs()
        return (torch.stack([attention, decay, relevance], dim=-1) @ weights) / weights.sum().clamp_min(1e-6)


def page_ages(num_pages: int, page_size: int, length: int) -> np.ndarray:
    """Tokens between each page's last token and the newest one, [num_pages] int64."""
    return np.maximum(length - (np.arange(num_pages) + 1) * page_size, 0)


def score_pages(scorer: Scorer, record: AttentionRecord, ages: np.ndarray, importance: str) -> np.ndarray:
    """Scores [pages] float64 by the setting: score, random (the same for a page whenever it is asked), none."""
    if importance == "none":
        return np.zeros(len(ages))
    if importance == "random":
        return np.random.default_rng(0).random(len(ages))
    new = max(len(ages) - len(record.features), 0)  # pages that no step has observed yet
    features = np.pad(record.features[: len(ages)], ((0, new), (0, 0)))
    with torch.inference_mode():
        scores: Tensor = scorer(torch.from_numpy(features), torch.from_numpy(ages).float())
        return scores.double().numpy()
