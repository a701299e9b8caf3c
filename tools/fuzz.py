"""Damaged model files against the public entries: `python -m tools.fuzz TARGET --inputs N --seed S [--json]`.

    TARGET      damaged                                    entry
    config      config.json                                read_object, LlamaConfig.from_dict, check_fit
    header      model.safetensors (header; data's end)     open_checkpoint, load_weights
    index       model.safetensors.index.json               open_checkpoint, load_weights
    tokenizer   tokenizer.model, tokenizer.json (with      load_tokenizer, encode, decode
                `hf`), tokenizer_config.json, added_tokens.json
    gguf        a GGUF file (header; data's end)           tools.gguf.GGUF, read

Inputs run in worker processes, so that a crash is an outcome. Input i of a seed is always the same. Outcomes:

    equal        loaded, and what was loaded is what the undamaged files hold
    different    loaded, and the damaged files really say so (see below)
    XError       refused by a typed error of ours
    and, each of which makes the exit code 1: untyped X (any other exception), crash, hang (over 10 s), slow (over 1 s,
    twice), silent (a wrong load without a word)

An input is loaded wrongly without a word if what was loaded is not what the undamaged files hold and
    header, index: one of the tensors is not, to the bit, what the `safetensors` library reads under its name from the
                   shard that the index names (an index read by Python's json), or the library refuses that shard;
    config:        a field is neither the value of its key in the damaged file (read by Python's json) nor, where that
                   is missing or null, the default; or a shape differs from the checkpoint's and check_fit is content;
    tokenizer:     it makes ids outside its vocabulary, or two encodings of the same text;
    gguf:          a tensor whose name, type, shape, offset and bytes are the undamaged file's has other values.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

SLOW_S = 1.0
HANG_S = 10.0
START_S = 60.0  # more for the first input of a process, which imports torch
_BAD = ("untyped", "crash", "hang", "slow", "silent")
TARGETS = ("config", "header", "index", "tokenizer", "gguf")


def fuzz(target: str, inputs: int, seed: int, workers: int = 1) -> dict[str, Any]:
    """Run inputs [0, inputs) of a seed; counts by outcome, the slowest, and the numbers of the bad ones."""
    counts: Counter[str] = Counter()
    bad: dict[str, list[int]] = {}
    slowest = 0.0
    begin = time.perf_counter()
    share = -(-inputs // workers)
    running = [_Worker(target, seed, i * share, min(inputs, (i + 1) * share)) for i in range(workers)]
    while running:
        for worker in list(running):
            outcome = worker.next()
            if outcome is None:
                running.remove(worker)
                continue
            number, name, seconds = outcome
            counts[name] += 1
            slowest = max(slowest, seconds)
            if name.startswith(_BAD):
                bad.setdefault(name, []).append(number)
    return {
        "target": target, "seed": seed, "inputs": sum(counts.values()), "outcomes": dict(counts.most_common()),
        "bad": {name: numbers[:20] for name, numbers in bad.items()}, "slowest_s": slowest,
        "seconds": time.perf_counter() - begin,
    }  # fmt: skip


class _Worker:
    """A process that runs inputs [at, end); a new one goes on behind an input that ended it."""

    def __init__(self, target: str, seed: int, at: int, end: int) -> None:
        self.target, self.seed, self.at, self.end = target, seed, at, end
        self.process: subprocess.Popen[bytes] | None = None
        self.lines: list[bytes] = []
        self.failed_at = -2

    def next(self) -> tuple[int, str, float] | None:
        """The outcome of the next input; None behind the last."""
        if self.at >= self.end:
            self._stop()
            return None
        number = self.at
        self.at += 1
        line = self._line()
        if line.endswith(b"\n"):
            found, name, seconds = line.decode().rstrip("\n").split("\t")
            assert int(found) == number, (found, number)
            return number, name, float(seconds)
        code = self._stop()
        if self.failed_at == number - 1 and code == 1:
            raise RuntimeError(f"the worker of {self.target} cannot run, see above")
        self.failed_at = number
        return number, "hang" if line else f"crash {code}", HANG_S if line else 0.0

    def _line(self) -> bytes:
        """A line of the process; b"" if it died, b"?" if it hangs."""
        first = self.process is None
        if self.process is None:
            arguments = [self.target, "--seed", str(self.seed), "--worker", str(self.at - 1), str(self.end)]
            self.process = subprocess.Popen([sys.executable, "-m", "tools.fuzz", *arguments], stdout=subprocess.PIPE)
        stdout = self.process.stdout
        assert stdout is not None
        while not self.lines or not self.lines[0].endswith(b"\n"):
            if not select.select([stdout], [], [], HANG_S + START_S * first)[0]:
                return b"?"
            more = os.read(stdout.fileno(), 1 << 16)
            if not more:
                return b""
            self.lines = (b"".join(self.lines) + more).splitlines(keepends=True)
        return self.lines.pop(0)

    def _stop(self) -> int:
        code = 0
        if self.process is not None:
            if self.at < self.end or self.process.poll() is None:
                self.process.kill()
            code = self.process.wait()
            if self.process.stdout is not None:
                self.process.stdout.close()
        self.process, self.lines = None, []
        return code


def _work(target: str, seed: int, begin: int, end: int) -> None:
    """In a worker: a line of number, outcome and seconds for every input."""
    import torch

    from engine.errors import TokenizerError
    from models.errors import ConfigError, ModelFormatError
    from tools.fuzz_targets import make

    torch.set_num_threads(1)
    errors = (ConfigError, ModelFormatError, TokenizerError)
    with tempfile.TemporaryDirectory(prefix="isotherm-fuzz-") as directory:
        one = make(target, Path(directory))
        for number in range(begin, end):
            times = []
            for _ in range(2):
                one.damage(random.Random(f"{seed}/{target}/{number}"))
                start = time.perf_counter()
                try:
                    loaded = one.load()
                except errors as error:
                    outcome = type(error).__name__
                except Exception as error:
                    outcome = f"untyped {type(error).__name__}"
                else:
                    outcome = "loaded"
                times.append(time.perf_counter() - start)
                if times[-1] <= SLOW_S:
                    break
            if min(times) > SLOW_S:
                outcome = "slow"
            elif outcome == "loaded":
                outcome = one.judge(loaded)
            sys.stdout.write(f"{number}\t{outcome}\t{min(times):.6f}\n")
            sys.stdout.flush()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.fuzz", description=__doc__.split("\n", 1)[0] if __doc__ else ""
    )
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--inputs", type=int, default=1000, metavar="N", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--worker", nargs=2, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        _work(args.target, args.seed, *args.worker)
        return 0
    report = fuzz(args.target, args.inputs, args.seed, args.workers)
    if args.json:
        print(json.dumps(report))
    else:
        print(f"{report['target']}: {report['inputs']} inputs of seed {report['seed']} in {report['seconds']:.0f} s, "
              f"the slowest {report['slowest_s'] * 1e3:.0f} ms")  # fmt: skip
        for name, count in report["outcomes"].items():
            print(f"  {count:8} {name}{'  ' + str(report['bad'][name]) if name in report['bad'] else ''}")
    return int(bool(report["bad"]))


if __name__ == "__main__":
    sys.exit(main())
