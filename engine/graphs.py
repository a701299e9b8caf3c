"""Steps of decoding as CUDA graphs: one launch instead of hundreds, each of which costs the CPU more than the GPU.

A graph is launches with the arguments that they had when they were recorded, values and addresses. So one serves all
steps of its *key*: the shapes of the step's tensors and what else decides which launches there are, and how large.
What differs between them is in tensors, and is copied into those that the graph reads. `KVCache.plan` rounds the widths
of a decoding step's tables up to powers of two, so that keys are few; what lies past a sequence's end is never read.

Arena, weights and table of rotations stay where they are as long as the engine lives. Graphs take the memory of their
temporaries from one pool, which grows to what the largest needs. docs/kernels.md says more.
"""

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.ops import AttentionPlan

log = logging.getLogger("isotherm")

GRAPH_BYTES = 256 << 20  # that are left free for graphs, where there are any
MOST_GRAPHS = 32
# A key is recorded, which takes the time of about so many steps, when it has come so often among the last that had no
# graph. These compiled what the graph launches.
EAGER_STEPS, RECENT_STEPS = 3, 64

Outputs = tuple[Tensor, ...]
Record = Callable[[Callable[[], Outputs]], tuple[Callable[[], None], Outputs]]


def cuda_recorder(device: torch.device) -> Record:
    """What records the launches of a function: gives what launches them again, and the tensors that this fills."""
    stream, pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def record(run: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        graph = torch.cuda.CUDAGraph()
        # The stream once more on the outside: where recording fails, torch does not leave it. Others' threads go on.
        with torch.cuda.stream(stream), torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
            outputs = run()
        return graph.replay, outputs

    return record


class Graphs:
    """Computes steps of decoding, by a graph where there is one."""

    def __init__(self, record: Record) -> None:
        self._record: Record | None = record  # None once it failed
        self._recent = deque[Any](maxlen=RECENT_STEPS)  # keys that had no graph
        self._graphs: dict[Any, tuple[list[Tensor], Callable[[], None], Outputs]] = {}  # the last used is the last

    def __call__(self, compute: Callable[..., Outputs], tokens: Tensor, plan: AttentionPlan, *others: Any) -> Outputs:
        """compute(tokens, plan, *others) of a step in which every sequence has one token; valid until the next call."""
        inputs, recall = [tokens, *plan.tensors()], plan.recall
        key = (*others, recall and recall.most, *(warm.bits for warm in plan.warm), *(x.shape for x in inputs))
        if key not in self._graphs and not self._add(key, inputs, lambda: compute(tokens, plan, *others)):
            return compute(tokens, plan, *others)
        kept, replay, outputs = self._graphs[key] = self._graphs.pop(key)
        for old, new in zip(kept, inputs, strict=True):
            old.copy_(new)
        replay()
        return outputs

    def clear(self) -> bool:
        """Let go of all graphs, and of the memory that they hold; says whether there were any."""
        held = bool(self._graphs)
        self._graphs.clear()
        self._recent.clear()
        return held

    def _add(self, key: Any, inputs: list[Tensor], run: Callable[[], Outputs]) -> bool:
        """Record the step, if it is time to; says whether there is a graph now."""
        if self._record is None or self._recent.count(key) < EAGER_STEPS:
            self._recent.append(key)
            return False
        try:
            self._graphs[key] = (inputs, *self._record(run))
        except RuntimeError as error:
            log.warning("--cuda-graphs: recording failed, so each step is launched kernel by kernel: %s", error)
            self._record = None
            self.clear()
            return False
        if len(self._graphs) > MOST_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        return True
