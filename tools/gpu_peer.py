"""Transformers with its DynamicCache beside `tools.gpu_check`, on random weights: run by path, in a process of its own.

    PYTHON tools/gpu_peer.py '{"config": {...}, "dtype": ..., "device": ..., "prefills": [...], "decodes": [...], ...}'

Prints a JSON row a line.
"""

import json
import statistics
import sys
import time
from typing import Any

sys.modules["kernels"] = None  # type: ignore[assignment]  # Transformers imports one of that name where it finds it

import torch  # noqa: E402
import transformers  # noqa: E402

CHUNK = 4096  # tokens of a prompt that are computed together: the peer's activations grow with it


def main() -> None:
    asked = json.loads(sys.argv[1])
    torch.set_default_dtype(getattr(torch, asked["dtype"]))
    with torch.device(asked["device"]), torch.inference_mode():
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**asked["config"]))
        model.eval()
        for length in sorted({*asked["prefills"], *asked["decodes"]}):
            ids = torch.randint(0, asked["config"]["vocab_size"], (1, length))
            for _ in range(1 + (length == min(asked["prefills"]))):  # the first prompt warms up
                cache = transformers.DynamicCache(config=model.config)
                begin = time.perf_counter()
                for part in ids.split(CHUNK, dim=1):
                    token = _next(model, part, cache)
                seconds = time.perf_counter() - begin
            if length in asked["prefills"]:
                _say("prefill", length, length / seconds)
            if length in asked["decodes"]:
                times = []
                for _ in range(asked["tokens"]):
                    begin = time.perf_counter()
                    token = _next(model, token, cache)
                    times.append(time.perf_counter() - begin)
                _say("decode", length, 1 / statistics.median(times))


def _next(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    token: torch.Tensor = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)
    token.tolist()  # waits for it
    return token


def _say(what: str, context: int, speed: float) -> None:
    row = {"what": what, "context": context, "tok_s": speed, "version": f"transformers {transformers.__version__}"}
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
