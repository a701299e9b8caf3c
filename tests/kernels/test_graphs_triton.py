"""Steps of decoding by graphs, on the Triton kernels, with a stand-in for what records them (tests/recorder.py).

The bits are those of the steps launched one by one; and launches of one key differ in nothing but what is in tensors,
which is what a graph that is replayed takes for granted.
"""

import sys
from pathlib import Path

import pytest
import torch
from triton.runtime import interpreter as triton_interpreter

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `recorder`: importlib mode adds no path

from oracle.checkpoint import make_checkpoint
from recorder import PAGE, Recorder, Spy
from torch.utils._python_dispatch import TorchDispatchMode

from engine import LLM, SamplingParams

TIERS = {"kv_budget": 0.3, "recent_tokens": 16, "recall": 0.0, "cold_format": "none"}
RECALL = {**TIERS, "recall": 0.02, "cold_format": "exact"}
OVERLAY = {**RECALL, "overlay_size": 20 * 128}  # rows of 20 tokens


class OnTheDevice(TorchDispatchMode):
    """No operator in it gives the host a value, or makes a tensor whose size is one."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        assert name not in ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal"), name
        return function(*args, **(kwargs or {}))


class Launches(Recorder):
    """Replays whose launches must be those that were recorded: kernels, grids, numbers, shapes and strides of tensors;
    and addresses, of those that outlive the step."""

    def __init__(self, monkeypatch, llm):
        super().__init__()
        self.log, self.of, self.compared = [], {}, 0
        held = [x for layer in llm._cache.layers for x in (*layer[:5], *(layer.overlay or ())) if x is not None]
        self.arena = {x.untyped_storage().data_ptr() for x in held}
        launch = triton_interpreter.GridExecutor.__call__

        def logged(executor, *args, **kwargs):
            self.log.append((executor.fn.__name__, executor.grid, self.described(args), self.described(kwargs)))
            return launch(executor, *args, **kwargs)

        monkeypatch.setattr(triton_interpreter.GridExecutor, "__call__", logged)

    def described(self, value):
        if isinstance(value, dict):
            return {name: self.described(x) for name, x in value.items()}
        if isinstance(value, tuple | list):
            return [self.described(x) for x in value]
        if isinstance(value, torch.Tensor):
            lasting = value.untyped_storage().data_ptr() in self.arena
            return value.dtype, value.shape, value.stride(), value.data_ptr() if lasting else None
        return value

    def run_again(self, run):
        self.log = []
        with OnTheDevice():
            outputs = run()
        launches = self.of.setdefault(run, self.log)
        assert self.log == launches
        self.compared += launches is not self.log
        return outputs


@pytest.mark.parametrize(("settings", "lengths"), [(TIERS, (24, 14)), (RECALL, (16,)), (OVERLAY, (16,))],
                         ids=["tiers", "recall", "overlay"])  # fmt: skip
def test_graphs_give_the_bits_of_steps_launched_one_by_one(tmp_path, device, monkeypatch, settings, lengths):
    if device != "cpu":
        pytest.skip("stands in for a GPU")
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    make_checkpoint(tmp_path, seed=1, eos_token_id=None, **shape)
    fixed = {"dtype": "float32", "backend": "triton", "threads": 1, "page_size": PAGE, "enable_prefix_caching": False}
    params = [SamplingParams(max_tokens=n, temperature=0, logprobs=2) for n in lengths]
    answers = []
    for graphs in (False, True):
        llm = LLM(tmp_path, **fixed, **settings)
        if graphs:
            recorder = Launches(monkeypatch, llm)
            llm._runner.graphs = spy = Spy(recorder)
        for seed, one in enumerate(params):
            llm.add_request(list(range(3 + seed, 73 - 40 * seed)), one)
        done = {}
        while llm.has_unfinished_requests():
            done |= {output.request_id: (output.token_ids, output.logprobs) for output in llm.step()}
        answers.append(done)
    assert answers[0] == answers[1]
    assert recorder.compared > 5 and spy.formats and bool(spy.recalled) == bool(settings["recall"])
