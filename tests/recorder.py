"""A stand-in for what records CUDA graphs, so that engine/graphs.py runs on a CPU.

A graph repeats launches: it sees new steps only through the tensors that were copied into those of the step that was
recorded. So does the stand-in: it runs the recorded function again, on that step. Whatever else was not copied or
differs between the steps of a key (lengths, pieces, numbers of tokens) is then that of an old step.
"""

from collections import Counter

import torch

from engine.graphs import EAGER_STEPS, Graphs

PAGE = 16
WILD = 1 << 28  # an entry of a table that no cache has


class Recorder:
    """What `engine.graphs.cuda_recorder` gives. fails_after: so many steps; None: it never does."""

    def __init__(self, fails_after=None):
        self.recorded = self.replayed = 0
        self._fails_after = fails_after

    def __call__(self, run):
        if self.recorded == self._fails_after:
            raise torch.OutOfMemoryError("CUDA out of memory, says the test")
        self.recorded += 1
        outputs = run()  # a GPU would compute nothing now; what it gives is not to be used
        for output in outputs:
            output.fill_(torch.nan)

        def replay():
            self.replayed += 1
            for output, new in zip(outputs, self.run_again(run), strict=True):
                output.copy_(new)

        return replay, outputs

    def run_again(self, run):
        return run()


class Spy:
    """`Graphs` that remembers what it was given, with wild numbers in what lies past the ends of tables."""

    def __init__(self, recorder):
        self.graphs = Graphs(recorder)
        self.keys = Counter()
        self.observed = self.recalled = 0  # replayed steps in which attention is measured, and in which copies are read
        self.formats = set()

    def clear(self):
        return self.graphs.clear()

    def __call__(self, compute, tokens, plan, counts, observed):
        spoil(plan)
        formats, recall = tuple(warm.bits for warm in plan.warm), plan.recall
        key = (observed, formats, recall and recall.most, *(tuple(x.shape) for x in plan.tensors()))
        self.keys[key] += 1
        if self.keys[key] > EAGER_STEPS:
            self.observed += observed
            self.recalled += recall is not None
            self.formats |= set(formats)
        return self.graphs(compute, tokens, plan, counts, observed)


def spoil(plan):
    """Entries that are never read, as `AttentionPlan` says. Recall reads the first one of a format of which there is no
    page, for tokens that are of others."""
    tables = [(plan.page_table, (-(-plan.exact_lens // PAGE)).tolist())]
    for warm in plan.warm:
        ends = warm.counts.clamp_min(int(plan.recall is not None)).tolist()
        tables += [(x, ends) for x in (warm.codes, warm.high, warm.records, warm.copies) if x is not None]
    for table, ends in tables:
        for row, end in zip(table, ends, strict=True):
            row[end:] = WILD
