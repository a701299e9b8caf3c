"""Train the scorer of importance: `python -m tools.train_scorer --model M --text FILE... --out scorer.safetensors`.

    text --> windows --> the model, attention recorded (evaluate_attention.py) --> samples: what was known, what came
    samples --> scores --> soft choice of the best 5 % --> the attention that it misses --> gradients

The loss is the attention of the next `--horizon` queries that goes to what is not kept, over all that goes to what
could be; with `--errors` the squares of it. The choice is soft: sigmoid((score - threshold) / temperature), where the
threshold is such that so many are kept, and moves with the scores; the temperature falls. Training stops where the
choice on held-out text no longer gets better, and what was best there is kept. With `--resume` it goes on from the
checkpoint beside `--out`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli import run
from models.errors import ConfigError
from models.files import read_object
from models.llama.config import LlamaConfig
from models.resolve import resolve
from tools import evaluate_texts
from tools.bench import provenance

if TYPE_CHECKING:
    from torch import Tensor

    from memory.importance import Scorer
    from tools.evaluate_attention import Sample

HELD_OUT = "held-out"
_PAGES_KEPT = 0.25  # of pages, which are few and alike
_PARTS = ("features", "ages", "mass", "squares")  # of a sample, as it is written


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.train_scorer", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="name or directory (default: %(default)s)")
    parser.add_argument("--text", nargs="+", required=True, metavar="FILE", help="to train on; `stdlib` too")
    parser.add_argument("--held-out", nargs="+", required=True, metavar="FILE", help="other text, to judge by and stop")
    parser.add_argument("--out", required=True, metavar="FILE", help="the scorer, safetensors")
    parser.add_argument("--context", type=int, default=2048, metavar="N", help="of a window (default: %(default)s)")
    parser.add_argument("--windows", type=int, default=2, metavar="N", help="of each text (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=6, metavar="N", help="sampled evenly (default: %(default)s)")
    parser.add_argument("--horizon", type=int, default=512, metavar="N", help="steps that count (default: %(default)s)")
    parser.add_argument("--keep", type=float, default=0.05, metavar="FRACTION", help="(default: %(default)s)")
    parser.add_argument(
        "--pages", action="store_true", help="of the samples those of pages alone, which the engine ranks"
    )
    weigh = parser.add_mutually_exclusive_group()
    weigh.add_argument("--squared", action="store_true", help="weigh the attention that is missed by its square")
    weigh.add_argument(
        "--errors",
        action="store_true",
        help="miss squares of the shares in each head, which errors of tokens add up by",
    )
    parser.add_argument(
        "--decay-share", type=float, metavar="FRACTION",
        help="that beta has of the weights in the end: what was attended to says little of new pages",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=600, metavar="N", help="at most (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the order of samples")
    parser.add_argument("--resume", action="store_true", help="go on from OUT.checkpoint")
    parser.add_argument("--check-gradients", action="store_true", help="print what flows at the start and stop there")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported
    _check(args)
    import torch

    from engine import LLM
    from engine.loading import shape_of
    from engine.progress import Progress
    from memory.importance import Scorer

    samples: dict[str, list[Sample]] = {"train": [], HELD_OUT: []}
    recorded = Path(f"{args.out}.samples")
    if args.resume and recorded.exists():
        samples = _read_samples(recorded)
    else:
        llm = LLM(args.model, threads=1, max_model_len=args.context, progress=True)
        chosen = [(name, kind) for kind, names in (("train", args.text), (HELD_OUT, args.held_out)) for name in names]
        for name, kind in Progress(chosen, desc="Recording", unit="text", shown=True):
            samples[kind] += _samples(args, llm, name, args.windows if kind == "train" else 1)
        _write_samples(samples, recorded)
    if args.pages:
        samples = {kind: [x for x in group if x.layer is None] for kind, group in samples.items()}
    if args.squared:
        samples = {kind: [replace(x, mass=x.mass.square()) for x in group] for kind, group in samples.items()}
    if args.errors:
        samples = {kind: [replace(x, mass=x.squares) for x in group] for kind, group in samples.items()}
    scorer = Scorer()
    _standardise(scorer, samples["train"])
    gradients = check_gradients(scorer, samples["train"], args.keep)
    dead = [name for name, norm in gradients.items() if not norm > 0]
    report: dict[str, Any] = {"gradients": gradients, "dead": dead, "dead_gradients": len(dead)}
    if args.check_gradients or dead:
        _print(args, report, "\n".join(f"{name:12} {norm:.3g}" for name, norm in gradients.items()))
        if dead:
            print(f"error: no gradient flows to {', '.join(dead)}", file=sys.stderr)
        return int(bool(dead))
    report |= train(scorer, samples, args)
    if args.decay_share is not None:
        with torch.no_grad():
            others = (scorer.alpha.abs() + scorer.gamma.abs()) / (1 - args.decay_share)
            for weight in (scorer.alpha, scorer.gamma):
                weight.copy_(weight.abs() / others)
            scorer.beta.fill_(args.decay_share)
    words = list(sys.argv[1:] if argv is None else argv)
    about = {
        "model": shape_of(LlamaConfig.from_dict(read_object(resolve(args.model) / "config.json"))),
        "command": " ".join(["python -m tools.train_scorer", *words]),
        "torch": torch.__version__,
    }
    save(scorer, Path(args.out), about)
    report |= {
        "out": args.out,
        **{name: round(float(getattr(scorer, name).detach().abs()), 4) for name in ("alpha", "beta", "gamma")},
    }
    lines = [
        f"{kind:9} {name:12} missed {row[0]:.4f}, avoidable {row[1]:.4f}"
        for kind, rows in report["missed"].items()
        for name, row in rows.items()
    ]
    _print(args, report, "\n".join([*lines, f"{args.out}: trained for {report['steps']} steps"]))
    return 0


def _check(args: argparse.Namespace) -> None:
    context = LlamaConfig.from_dict(read_object(resolve(args.model) / "config.json")).context_length
    if not args.horizon + 256 <= args.context <= context:
        raise ConfigError(f"need --context from --horizon + 256 to the model's {context}, got {args.context}")
    if args.horizon % 64 or args.horizon < 64 or args.context % 256:
        raise ConfigError(f"need --horizon in whole 64 tokens and --context in 256, got {args.horizon}, {args.context}")
    check_out(args.out)
    if args.decay_share is not None and not 0 <= args.decay_share < 1:
        raise ConfigError(f"--decay-share must be a number from 0 to less than 1, got {args.decay_share}")
    for name in (*args.text, *args.held_out):
        evaluate_texts.read_text(name)


def _samples(args: argparse.Namespace, llm: Any, name: str, count: int) -> list[Sample]:
    """Of the first windows of a text: every other one as if generated (each 16th query observed), the others as if read
    in chunks of 256, of which two are."""
    from tools.evaluate_attention import layers_of, record

    windows = evaluate_texts.first_windows(name, llm.tokenizer, args.context, count)
    layers = layers_of(llm, args.layers)
    step = max(256, (args.context - args.horizon) // 4 // 256 * 256)
    starts = range(2 * step if args.context > 4 * step else step, args.context - args.horizon + 1, step)
    return [
        sample
        for i, window in enumerate(windows[:count])
        for sample in record(llm, window, layers, starts, args.horizon, (16, 128)[i % 2])
    ]


def _write_samples(samples: dict[str, list[Sample]], path: Path) -> None:
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for kind, rows in samples.items():
        for i, x in enumerate(rows):
            name = f"{kind} {i} {-1 if x.layer is None else x.layer} {x.start}"
            tensors |= {f"{name} {part}": getattr(x, part).contiguous() for part in _PARTS}
    save_file(tensors, path)


def _read_samples(path: Path) -> dict[str, list[Sample]]:
    from safetensors.torch import load_file

    from tools.evaluate_attention import Sample

    found: dict[str, dict[int, Sample]] = {"train": {}, HELD_OUT: {}}
    tensors = load_file(path)
    for name in tensors:
        kind, number, layer, start, part = name.split()
        if part == "mass":
            if (lacks := f"{kind} {number} {layer} {start} squares") not in tensors:
                raise ConfigError(f"{path}: {lacks} is missing: of an older version; record anew, without --resume")
            parts = {x: tensors[f"{kind} {number} {layer} {start} {x}"] for x in _PARTS}
            of = None if layer == "-1" else int(layer)
            found[kind][int(number)] = Sample(of, int(start), **parts, signals={})
    return {kind: [rows[i] for i in sorted(rows)] for kind, rows in found.items()}


def _standardise(scorer: Scorer, samples: list[Sample]) -> None:
    """Have the network begin with inputs of mean 0 and deviation 1, by folding both into its first layer; and with a
    last layer that is not 0, behind which no gradient would flow."""
    import torch

    with torch.no_grad():
        seen = [x.features.flatten(0, 1)[::17].log1p() for x in samples]
        ages = torch.cat([x.ages.repeat(len(x.features))[::17] for x in samples])
        decays = [torch.exp(-ages * torch.exp(-scorer.log_tau) / slower) for slower in (1, 8)]
        inputs = torch.cat([torch.cat(seen), torch.stack(decays, 1)], 1)
        first, last = (layer for layer in scorer.relevance if isinstance(layer, torch.nn.Linear))
        first.weight.div_(inputs.std(0).clamp_min(1e-3))
        first.bias.sub_(first.weight @ inputs.mean(0))
        last.weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(0))
        scorer.gamma.fill_(0.6)


def soft_missed(scores: Tensor, mass: Tensor, fraction: float, temperature: float) -> Tensor:
    """The share of the mass [heads, n] that a soft choice of the `fraction` with the highest scores of each head leaves
    out, of all heads together: what is lost adds up. The temperature is in standard deviations of the scores."""
    import torch

    count = max(1.0, fraction * scores.shape[1])
    logits = scores / (temperature * scores.std(1, keepdim=True).clamp_min(1e-6))
    with torch.no_grad():  # the threshold that keeps `count`, by bisection
        low, high = logits.amin(1, keepdim=True) - 20, logits.amax(1, keepdim=True) + 20
        for _ in range(30):
            middle = (low + high) / 2
            over = torch.sigmoid(logits - middle).sum(1, keepdim=True) > count
            low, high = torch.where(over, middle, low), torch.where(over, high, middle)
        kept = torch.sigmoid(logits - middle)
        slope = kept * (1 - kept)
        slope /= slope.sum(1, keepdim=True).clamp_min(1e-12)
    moving = (slope * logits).sum(1, keepdim=True)  # the threshold's own derivative: so many stay kept
    kept = torch.sigmoid(logits - middle - moving + moving.detach())
    return 1 - (kept * mass).sum() / mass.sum().clamp_min(1e-12)


def loss_of(scorer: Scorer, sample: Sample, fraction: float, temperature: float) -> Tensor:
    n = sample.features.shape[1]
    scores = scorer(sample.features.flatten(0, 1), sample.ages.repeat(len(sample.features))).view(-1, n)
    missed = soft_missed(scores, sample.mass, fraction if sample.layer is not None else _PAGES_KEPT, temperature)
    # Thresholds are scores: these are to use the middle of [0, 1].
    loss: Tensor = missed + 0.05 * (scores.mean() - 0.5).square() + 0.05 * (scores.std() - 0.15).square()
    return loss


def check_gradients(scorer: Scorer, samples: list[Sample], fraction: float) -> dict[str, float]:
    """The norm of the gradient that reaches each group of parameters, of some samples together."""
    import torch

    scorer.zero_grad()
    some = samples[:: max(1, len(samples) // 8)]
    torch.stack([loss_of(scorer, sample, fraction, 1.0) for sample in some]).mean().backward()
    groups = {
        "alpha": [scorer.alpha],
        "beta": [scorer.beta],
        "gamma": [scorer.gamma],
        "tau": [scorer.log_tau],
        "MLP": list(scorer.relevance.parameters()),
    }
    return {
        name: sum(float(p.grad.square().sum()) for p in group if p.grad is not None) ** 0.5
        for name, group in groups.items()
    }


def judge(scorer: Scorer, samples: list[Sample], fraction: float) -> tuple[float, float]:
    """(missed, of that avoidable) of the tokens, or of pages where there are no others: the second is what the truth
    would not have missed."""
    import torch

    from tools.evaluate_attention import missed

    pairs = []
    tokens = [x for x in samples if x.layer is not None]
    with torch.no_grad():
        for x in tokens or samples:
            kept = fraction if tokens else _PAGES_KEPT
            scores = scorer(x.features.flatten(0, 1), x.ages.repeat(len(x.features))).view_as(x.mass)
            pairs.append((missed(scores, x.mass, kept), missed(x.mass, x.mass, kept)))
    found, least = (sum(values) / len(values) for values in zip(*pairs, strict=True))
    return found, found - least


def train(scorer: Scorer, samples: dict[str, list[Sample]], args: argparse.Namespace) -> dict[str, Any]:
    """Trains in place; what was best on held-out text stays."""
    import torch

    from engine.progress import Progress

    optimizer = torch.optim.Adam(scorer.parameters(), lr=0.02)
    checkpoint = Path(f"{args.out}.checkpoint")
    before = {kind: judge(scorer, group, args.keep) for kind, group in samples.items()}
    begun, since, least, best = 0, 0, before[HELD_OUT][0], _copy(scorer)
    if args.resume and checkpoint.exists():
        begun, since, least, best = _read_checkpoint(checkpoint, scorer, optimizer, _objective(args))
    step = begun
    bar = Progress(range(begun, args.steps), desc="Training", unit="step", shown=True)
    for step in bar:
        temperature = max(0.1, 1 - 1.2 * step / args.steps)
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * max(0.05, 1 - step / args.steps)
        chosen = torch.randint(
            len(samples["train"]), (4,), generator=torch.Generator().manual_seed(args.seed * 100_003 + step)
        )
        optimizer.zero_grad()
        torch.stack(
            [loss_of(scorer, samples["train"][i], args.keep, temperature) for i in chosen.tolist()]
        ).mean().backward()
        optimizer.step()
        if (step + 1) % 25 == 0:
            found = judge(scorer, samples[HELD_OUT], args.keep)[0]
            since += 1
            if found < least:
                since, least, best = 0, found, _copy(scorer)
            at = {"step": step + 1, "since": since, "least": least, "objective": _objective(args)}
            _write_checkpoint(checkpoint, scorer, optimizer, best, at)
            if since >= 8:
                break
    scorer.load_state_dict(best)
    checkpoint.unlink(missing_ok=True)
    Path(f"{args.out}.samples").unlink()
    after = {kind: judge(scorer, group, args.keep) for kind, group in samples.items()}
    return {"steps": step + 1, "missed": {"before": before, "after": after}}


def _copy(scorer: Scorer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in scorer.state_dict().items()}


def _write_checkpoint(path: Path, scorer: Scorer, optimizer: Any, best: dict[str, Tensor], at: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    moments = optimizer.state_dict()["state"]
    tensors = {f"scorer {name}": value for name, value in scorer.state_dict().items()}
    tensors |= {f"best {name}": value for name, value in best.items()}
    tensors |= {f"adam {i} {name}": value for i, state in moments.items() for name, value in state.items()}
    save_file(tensors, path, {"at": json.dumps(at)})


def _objective(args: argparse.Namespace) -> dict[str, Any]:
    """What decides what is lost."""
    return {name: getattr(args, name) for name in ("pages", "squared", "errors", "keep")}


def _read_checkpoint(
    path: Path, scorer: Scorer, optimizer: Any, objective: dict[str, Any]
) -> tuple[int, int, float, dict[str, Tensor]]:
    """-> step, evaluations since the best, what that missed, and its parameters. Raises ConfigError for another
    objective."""
    from safetensors import safe_open

    groups: dict[str, dict[str, Tensor]] = {"scorer": {}, "best": {}, "adam": {}}
    with safe_open(path, "pt") as file:
        at = json.loads(file.metadata()["at"])
        if (found := at.get("objective")) != objective:
            raise ConfigError(f"{path}: was trained with {found}, and now {objective} is asked for: leave out --resume")
        for name in file.keys():  # noqa: SIM118
            group, _, rest = name.partition(" ")
            groups[group][rest] = file.get_tensor(name)
    scorer.load_state_dict(groups["scorer"])
    moments: dict[int, dict[str, Tensor]] = {}
    for name, value in groups["adam"].items():
        number, _, part = name.partition(" ")
        moments.setdefault(int(number), {})[part] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
    return at["step"], at["since"], at["least"], groups["best"]


def check_out(out: str) -> None:
    """Raises ConfigError for what no file can be written to."""
    path = Path(out).absolute()
    if not path.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no such directory")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"--out {out}: a directory, or not to be written")


def save(scorer: Scorer, path: Path, about: dict[str, str]) -> None:
    from safetensors.torch import save as encoded

    from memory.importance import FEATURE_VERSION

    tensors = {name: value.contiguous() for name, value in scorer.state_dict().items()}
    try:
        path.write_bytes(encoded(tensors, {"feature_version": FEATURE_VERSION, **about}))
    except OSError as error:
        raise ConfigError(f"--out {path}: {error.strerror}") from None


def _print(args: argparse.Namespace, report: dict[str, Any], text: str) -> None:
    print(json.dumps({**provenance(), **report}) if args.json else text)


if __name__ == "__main__":
    run(main)
