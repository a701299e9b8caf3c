"""How important a cached page is: alpha * attention + beta * position decay + gamma * semantic relevance, in [0, 1].

What is measured of a page is its *lift*: the attention it got from a query, over the share it would have if the query
attended to all tokens alike. So one scorer serves any model, depth, number of heads and length of context, and an old
page has no advantage over a young one (plain sums of attention favour what has been there long). The formula stands in
`kernels.ops`; docs/importance.md says how it is trained, and what it earns.
"""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from kernels.ops import NUM_FEATURES, SCORE_HIDDEN, Ops
from kernels.reference import score

FEATURE_VERSION = "2"  # of what a scorer reads: one that was trained on others is refused
DEFAULT = Path(__file__).with_name("scorer.safetensors")  # made by tools.train_scorer
# What a profile multiplies alpha, beta and gamma by.
PROFILES = {"default": (1, 1, 1), "chat": (1, 1.5, 1), "document": (1, 1, 1.1), "code": (1.25, 1, 1)}
SHARED = 0.05  # of the tokens, where tools.recall_shares measures what more of them spare in each layer
# What is averaged, and over how many of the setting's windows: the newest lift; lift / (1 + lift), which says how often
# a page gets more than its share, and of which no single query decides, three times; the lift itself, twice.
_WINDOWS = np.array([1e-9, 1, 4, np.inf, 1, np.inf])


class AttentionRecord:
    """What the pages of one sequence were attended to, [pages, len(_WINDOWS)] float32, in the order of its pages; or
    the tokens of several heads, [heads, tokens, ...]."""

    __slots__ = ("averages", "factors", "length", "seen")

    def __init__(self) -> None:
        self.averages = np.zeros((0, len(_WINDOWS)), dtype=np.float32)
        self.seen = np.zeros(0)  # [pages] tokens over which each was observed, since it is no longer new
        self.factors = np.ones(3, dtype=np.float32)  # of alpha, beta, gamma, from 1/2 to 2: see `adapt`
        self.length = 0  # of the sequence when it was observed last

    def observe(self, lifts: np.ndarray, ages: np.ndarray, length: int, window: int) -> None:
        """lifts [..., pages]: in the attention of the newest queries, with the sequence `length` tokens long and its
        pages of such ages. What is attended to for being new says nothing of later: averages begin with the first query
        that a page is `window` tokens away from, as the mean of all since, until these are as many as their own window.
        """
        lifts = np.nan_to_num(lifts, posinf=1e6)
        new = np.stack([lifts, *[lifts / (1 + lifts)] * 3, lifts, lifts], axis=-1, dtype=np.float32, casting="unsafe")
        known, since = len(self.seen), max(length - self.length, 1)
        self.seen = np.where(ages >= window, np.pad(self.seen, (0, len(ages) - known)) + since, 0)
        share = 1 - since / np.maximum(self.seen[:known, None], since)
        keep = np.minimum(np.exp(-since / (window * _WINDOWS)), share).astype(np.float32)
        new[..., :known, :] += keep * (self.averages - new[..., :known, :])
        self.averages, self.length = new, length

    def features(self, count: int) -> np.ndarray:
        """[..., count, NUM_FEATURES] of the first pages: the averages, and the neighbours' over the window. What no
        step has observed yet has zeros."""
        rest = [(0, 0)] * (self.averages.ndim - 2)
        lacking = max(count - self.averages.shape[-2], 0)
        averages = np.pad(self.averages[..., :count, :], (*rest, (0, lacking), (0, 0)))
        around = np.pad(averages[..., 1], (*rest, (1, 1)))
        return np.concatenate([averages, around[..., :-2, None], around[..., 2:, None]], axis=-1)


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
            first, second = nn.Linear(NUM_FEATURES + 2, SCORE_HIDDEN), nn.Linear(SCORE_HIDDEN, 1)
            self.relevance = nn.Sequential(first, nn.SiLU(), second)
            for parameter in second.parameters():
                nn.init.zeros_(parameter)

    def packed(self, factors: tuple[float, ...] = (1, 1, 1)) -> Tensor:
        """The parameters as `Ops.score` reads them; factors: of alpha, beta and gamma."""
        weights = torch.stack([self.alpha, self.beta, self.gamma]).abs() * self.alpha.new_tensor(factors)
        parts = [weights / weights.sum().clamp_min(1e-6), torch.exp(-self.log_tau)[None]]
        return torch.cat([*parts, *(parameter.flatten() for parameter in self.relevance.parameters())])

    def forward(self, features: Tensor, ages: Tensor) -> Tensor:
        """Scores [pages] in [0, 1] of features [pages, NUM_FEATURES] and ages [pages], in tokens."""
        return score(features, ages, self.packed())


def load_scorer(path: Path) -> tuple[Scorer, dict[str, str]]:
    """The scorer that tools.train_scorer wrote, and what it says of it. Raises ValueError naming file, got, wanted."""
    scorer = Scorer()
    wanted = {name: tuple(value.shape) for name, value in scorer.state_dict().items()}
    try:
        with safe_open(path, "pt") as file:
            about: dict[str, str] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: no scorer: {error}") from None
    if (version := about.get("feature_version")) != FEATURE_VERSION:
        raise ValueError(f"{path}: a scorer of feature version {version}, {FEATURE_VERSION} is wanted: train it again")
    if (found := {name: tuple(value.shape) for name, value in tensors.items()}) != wanted:
        raise ValueError(f"{path}: wanted the tensors {wanted}, got {found}")
    if odd := [name for name, value in tensors.items() if not torch.isfinite(value.float()).all()]:
        raise ValueError(f"{path}: NaN or infinity in {', '.join(odd)}")
    scorer.load_state_dict(tensors)
    return scorer, about


def recall_shares(about: dict[str, str], recall: float, num_layers: int) -> tuple[int, ...]:
    """What each layer recalls where it is `recall` of the tokens in the mean, in 64ths of that, by what `load_scorer`
    gave; () if the scorer does not say. Odds, so that with `recall` near 1 it is everything in every layer. They are
    what errors cost where SHARED is recalled, and errors small; the less is, the more alike layers are. Raises
    ValueError."""
    if "recall_odds" not in about:
        return ()
    try:
        odds = np.array(json.loads(about["recall_odds"]), dtype=np.float64)
    except (TypeError, ValueError, OverflowError, RecursionError):
        odds = np.zeros(0)
    if odds.shape != (num_layers,) or not ((odds > 1e-6) & (odds < 1e6)).all():
        raise ValueError(f"wanted recall_odds of {num_layers} layers, 1e-6 to 1e6, got {about['recall_odds']:.60}")
    odds **= min(recall / SHARED, 1)
    parts = recall * odds / (1 - recall + recall * odds)
    return tuple(np.maximum(64 * parts / parts.mean(), 1).round().astype(int).tolist())


def page_ages(num_pages: int, page_size: int, length: int) -> np.ndarray:
    """Tokens between each page's last token and the newest one, [num_pages] int64."""
    return np.maximum(length - (np.arange(num_pages) + 1) * page_size, 0)


def score_pages(weights: Tensor, record: AttentionRecord, ages: np.ndarray, importance: str, ops: Ops) -> np.ndarray:
    """Scores [pages] float64 by the setting: score, random (the same for a page whenever it is asked), none. weights:
    `Scorer.packed`, where `ops` computes."""
    if importance == "none":
        return np.zeros(len(ages))
    if importance == "random":
        return np.random.default_rng(0).random(len(ages))
    features, away = (torch.from_numpy(x).to(weights) for x in (record.features(len(ages)), ages))
    terms = weights[:3] * torch.from_numpy(record.factors).to(weights)
    scores = ops.score(features, away, torch.cat([terms / terms.sum().clamp_min(1e-6), weights[3:]]))
    return scores.double().cpu().numpy()


def adapt(weights: Tensor, record: AttentionRecord, ages: np.ndarray, lifts: np.ndarray, ops: Ops) -> None:
    """Let the sequence's own alpha, beta and gamma follow its text: one small step towards scores that would have told
    the newest lifts [pages] apart, from what the record has before it observes them."""
    known = len(record.seen)
    features, away = (torch.from_numpy(x).to(weights) for x in (record.features(known), ages[:known]))
    alone = [torch.cat([row, weights[3:]]) for row in torch.eye(3).to(weights)]
    wanted = lifts[:known] / (1 + lifts[:known])
    terms = np.stack([*(ops.score(features, away, one).cpu().numpy() for one in alone), wanted])
    terms -= terms.mean(1, keepdims=True)
    shares = weights[:3].cpu().numpy() * record.factors
    shares /= max(shares.sum(), 1e-6)
    gradient = terms[:3] @ (shares @ terms[:3] - terms[3]) / known
    record.factors = np.clip(record.factors * np.exp(-np.nan_to_num(gradient - shares @ gradient)), 0.5, 2)
