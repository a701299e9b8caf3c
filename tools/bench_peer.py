"""The peer of `tools.bench decode` and `prefill`: Transformers with its DynamicCache, in its own environment.

Run by path from another directory, because Transformers imports a package named `kernels` when it finds one:
    PEER_PYTHON tools/bench_peer.py MODEL DTYPE THREADS
Reads one JSON request a line from stdin and answers with one line: {"prefill": [ids]} starts anew and gives seconds,
{"decode": n} goes on for n greedy tokens and gives seconds.
"""

import json
import sys
import time
from typing import Any

import torch
import transformers


def main() -> None:
    model_path, dtype, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, dtype)).eval()
    cache, token = None, torch.empty(0)
    print(json.dumps({"version": f"transformers {transformers.__version__}, torch {torch.__version__}"}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        with torch.inference_mode():
            begin = time.perf_counter()
            if "prefill" in request:
                cache = transformers.DynamicCache(config=model.config)
                token = _next(model, torch.tensor([request["prefill"]]), cache)
            else:
                for _ in range(request["decode"]):
                    token = _next(model, token, cache)
            seconds = time.perf_counter() - begin
        print(json.dumps({"seconds": seconds}), flush=True)


def _next(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    token: torch.Tensor = logits[:, -1:].argmax(-1)
    return token


if __name__ == "__main__":
    main()
