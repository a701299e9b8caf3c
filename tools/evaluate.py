"""The compressed cache beside the full one: `python -m tools.evaluate NAME`.

Each subcommand loads the model once, runs it with a full cache and with compressed ones, and prints a table, or one
JSON object with --json. It imports what is heavy itself, after parsing, so that --help is quick.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli import run
from engine.config import EngineConfig
from engine.errors import RequestError
from engine.settings import parse_json_object
from models.errors import ConfigError
from models.files import read_object
from models.llama.config import LlamaConfig
from models.resolve import resolve
from tools import evaluate_texts
from tools.bench import print_table, provenance

if TYPE_CHECKING:
    from engine import LLM

# What the tables for people show; --json has all.
_COLUMNS = (
    "setting", "resident_ratio", "kl_nats", "kl_se", "noise_kl_nats", "dppl_percent", "dppl_se_percent",
    "top1_agreement", "weights_bytes", "total_ratio", "kl_above_score", "its_se", "read_bytes_per_token",
    "cold_hit_rate", "moves",
    "completions", "failures", "rate", "se", "empty", "cut",
)  # fmt: skip
_QUANTIZED = (
    "setting", "scored_tokens", "ppl_full", "ppl", "dppl_percent", "dppl_se_percent", "kl_nats", "kl_se",
    "top1_agreement", "weights_bytes",
)  # fmt: skip
_LONG = ("answers", "full_text", "tiered_text", "failed", "texts")  # what they leave out


def quality(args: argparse.Namespace) -> dict[str, Any]:
    """Loss of prediction at each budget, and at the preset if one is given."""
    if args.plot:
        _need("matplotlib", "plot")
        if not Path(args.plot).absolute().parent.is_dir():
            raise ConfigError(f"--plot {args.plot}: there is no such directory")
    passed = _below(args) | ({} if args.importance is None else {"importance": args.importance})
    settings: list[dict[str, Any]] = [{"kv_budget": budget, **passed} for budget in args.kv_budget or []]
    if args.preset:
        settings.append({"preset": args.preset, **passed})
    settings = [{**changes, **by} for changes in settings for by in [{"scorer": name} for name in args.scorer] or [{}]]
    if not settings:
        raise ConfigError("nothing to measure: give --kv-budget FRACTION[,FRACTION...] or --preset proposal")
    _check(args, settings)
    base, windows, about = _read(args)
    from tools import evaluate_quality as measure

    comparison = measure.compare(base, settings, windows, args.score_from)
    rows = [{**measure.row(comparison, i, changes), "chunk": args.chunk} for i, changes in enumerate(settings)]
    if args.plot:
        measure.plot(rows, f"{args.model}, {rows[0]['scored_tokens']} tokens, chunks of {args.chunk}", args.plot)
    return about | (rows[0] if len(rows) == 1 else {"rows": rows})


def importance(args: argparse.Namespace) -> dict[str, Any]:
    """What each signal of importance chooses, misses and costs; with --kv-budget: the engine's pages, ranked."""
    if args.kv_budget:
        return _ranked(args)
    _check(args, [{"scorer": args.scorer}])
    if args.context % 256 or args.context < 512 + 64 * (args.blocks + 4):
        raise ConfigError(f"need --context in whole 256 tokens, {512 + 64 * (args.blocks + 4)} at least")
    args.score_from, args.tokens = 0, 1
    from engine.loading import read_scorer
    from tools import evaluate_importance

    predicted = args.signals or evaluate_importance.COMPARED
    if unknown := set(predicted) - set(evaluate_importance.COMPARED):
        raise ConfigError(f"--signals: no {', '.join(unknown)}; there are {', '.join(evaluate_importance.COMPARED)}")
    base, _, about = _read(args)

    def cut(name: str, count: int) -> list[list[int]]:
        assert base.tokenizer is not None
        return evaluate_texts.first_windows(name, base.tokenizer, args.context, count)

    calibration = [] if args.no_kl else [cut(name, 1)[0] for name in args.calibrate]
    texts = {name: cut(name, args.windows) for name in args.text}
    scorer = read_scorer(args.scorer)[0]
    measured = evaluate_importance.rows(base, scorer, texts, calibration, args.blocks, args.layers, predicted)
    return about | {
        "text": args.text,
        "calibrate": args.calibrate,
        "windows": args.windows,
        "blocks": args.blocks,
        **measured,
    }


def bits(args: argparse.Namespace) -> dict[str, Any]:
    """Calibrated codes with bits by importance, and uniform ones at equal bytes."""
    _check(args, [{"scorer": args.scorer}])
    if args.dtype != "float32":
        raise ConfigError(f"what errors cost is measured by gradients, which need --dtype float32, got {args.dtype}")
    if args.context % 256 or args.context < 512 + 64 * args.blocks:
        raise ConfigError(f"need --context in whole 256 tokens, {512 + 64 * args.blocks} at least")
    args.score_from, args.tokens = 0, 1
    from engine.loading import read_scorer
    from tools import evaluate_bits

    scorer = read_scorer(args.scorer)[0]
    base, _, about = _read(args)
    assert base.tokenizer is not None
    encoder, context = base.tokenizer, args.context

    def cut(names: Sequence[str], tokens: int) -> list[list[int]]:
        return evaluate_texts.windows(names, encoder, context, context, 0, tokens)

    # The last window of the first and of the last file is to choose on, the first ones in turn are to fit.
    fitted = cut(args.calibrate, (context - 1) * args.windows)
    choosing = [cut([name], sys.maxsize)[-1] for name in dict.fromkeys((args.calibrate[0], args.calibrate[-1]))]
    if len(fitted) < args.windows or any(window in fitted for window in choosing):
        raise RequestError(f"the texts to calibrate on have no {args.windows} windows and others to choose on")
    texts = {name: cut([name], 1)[0] for name in args.text}
    measured = evaluate_bits.rows(base, scorer, texts, fitted, choosing, args.bytes, args.blocks)
    return about | {"calibrate": args.calibrate, "windows": args.windows, "blocks": args.blocks, **measured}


def _ranked(args: argparse.Namespace) -> dict[str, Any]:
    """The same budget with pages ranked by score, as the profiles and --adapt change it, at random, and by age."""
    changes: list[dict[str, Any]] = [{"importance": by} for by in ("score", "random", "none")]
    changes += [{"adapt": True}, *({"profile": name} for name in ("chat", "document", "code"))]
    always = {"kv_budget": args.kv_budget, **({"scorer": args.scorer} if args.scorer else {}), **_below(args)}
    settings = [{**always, **change} for change in changes]
    _check(args, settings)
    base, windows, about = _read(args)
    from tools import evaluate_quality as measure

    comparison = measure.compare(base, settings, windows, args.score_from)
    rows = []
    for i in range(len(settings)):
        pairs = zip(comparison.tallies[i].kl, comparison.tallies[0].kl, strict=True)
        paired = [a - b for a, b in pairs]
        above = {"kl_above_score": measure.mean(paired), "its_se": measure.block_error(paired)}
        rows.append({**measure.row(comparison, i, settings[i]), **above, "chunk": args.chunk})
    return about | {"rows": rows}


def knobs(args: argparse.Namespace) -> dict[str, Any]:
    """What each setting of the tiers does."""
    from tools import evaluate_knobs

    settings = [{"kv_budget": args.kv_budget, **_below(args)}, *evaluate_knobs.settings(args.kv_budget)]
    _check(args, settings)
    base, windows, about = _read(args)
    return about | {"rows": evaluate_knobs.rows(base, windows, args.score_from, settings)}


def needle(args: argparse.Namespace) -> dict[str, Any]:
    """Facts far back in the context, asked for at its end."""
    settings = [{"kv_budget": budget, **_below(args)} for budget in args.kv_budget]
    _check(args, settings)
    longest = max(args.context)
    base = _load(args, evaluate_texts.check_context(longest, _model_context(args.model)))
    from tools import evaluate_needle

    filler = evaluate_texts.read_text(args.text)
    rows = evaluate_needle.rows(base, settings, filler, args.context, args.depth, args.kind, args.seed)
    return {"model": args.model, "chunk": args.chunk, "rows": rows}


def rouge(args: argparse.Namespace) -> dict[str, Any]:
    """Summaries of long documents."""
    _need("rouge_score", "eval")
    settings = _below(args) | ({"preset": args.preset} if args.preset else {"kv_budget": args.kv_budget})
    _check(args, [settings])
    from tools import evaluate_rouge

    documents = evaluate_rouge.read_documents(args.data, args.documents)
    base = _load(args, evaluate_texts.check_context(args.context, _model_context(args.model)))
    return {"model": args.model} | evaluate_rouge.report(base, settings, documents, args.context, args.max_tokens)


def context(args: argparse.Namespace) -> dict[str, Any]:
    """Texts beyond the trained length, with each RoPE scaling."""
    for scaling in args.rope_scaling:
        EngineConfig(model=args.model, dtype=args.dtype, rope_scaling=scaling)
    from tools import evaluate_context

    settings = {"dtype": args.dtype, "threads": args.threads, "max_num_batched_tokens": args.chunk}
    rows = evaluate_context.rows(args.model, args.text, args.context, args.rope_scaling, settings)
    return {"model": args.model, "rows": rows}


def quantization(args: argparse.Namespace) -> dict[str, Any]:
    """Loss of prediction of quantised weights, each in an LLM of its own, beside the checkpoint's."""
    settings: list[dict[str, Any]] = []
    for name in args.quantization:
        groups = args.group_size if name == "int4" else [None]
        settings += [{"quantization": name} | ({"quantization_group": group} if group else {}) for group in groups]
    _check(args, settings)
    for path in args.checkpoint:
        resolve(path)
    base, windows, about = _read(args)
    from tools import evaluate_quality as measure

    names = [measure.describe(changes) for changes in settings] + args.checkpoint
    models = [_load(args, base.max_model_len, **changes) for changes in settings]
    models += [_load(args, base.max_model_len, model=path) for path in args.checkpoint]
    readers = [measure.Reader(llm, name, args.score_from) for llm, name in zip(models, names, strict=True)]
    full = measure.read(base, readers, windows, args.score_from)
    comparison = measure.Comparison(full, [reader.tally for reader in readers], None)
    rows = []
    for i, (llm, name) in enumerate(zip(models, names, strict=True)):
        row = measure.row(comparison, i, {}) | {"setting": name, "weights_bytes": llm.stats()["weights_bytes"]}
        rows.append({column: row[column] for column in _QUANTIZED})
    return about | {"weights_bytes_full": base.stats()["weights_bytes"], "rows": rows}


def wellformed(args: argparse.Namespace) -> dict[str, Any]:
    """Completions of code that do not parse, at equal bytes."""
    settings = [{"kv_budget": args.kv_budget, "importance": by, **_below(args)} for by in ("score", "random", "none")]
    _check(args, settings)
    from tools import evaluate_wellformed as measure

    tasks = measure.read_tasks(args.data, args.samples)
    base = _load(args, _model_context(args.model))
    rows = measure.rows(base, settings, tasks, args.samples, args.header, args.max_tokens)
    about = {"model": args.model, "kv_budget": args.kv_budget, "header": args.header, "max_tokens": args.max_tokens}
    return about | {"chunk": args.chunk, "rows": rows}


def _below(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of what is kept below the cache, where they are given."""
    names = ("recall", "recall_block", "cold_format", "host_cache_size")
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def _check(args: argparse.Namespace, settings: Sequence[dict[str, Any]]) -> None:
    """Raises ConfigError for what the engine does not accept, before anything heavy is loaded."""
    for changes in settings:
        EngineConfig(model=args.model, dtype=args.dtype, max_num_batched_tokens=args.chunk, seed=args.seed, **changes)
    resolve(args.model)


def _need(module: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"{module} is not installed: pip install 'isotherm[{extra}]'")


def _model_context(model: str) -> int:
    return LlamaConfig.from_dict(read_object(resolve(model) / "config.json")).context_length


def _load(args: argparse.Namespace, max_model_len: int, model: str | None = None, **changes: Any) -> LLM:
    from engine import LLM

    return LLM(
        model or args.model,
        **changes,
        dtype=args.dtype,
        threads=args.threads,
        seed=args.seed,
        max_num_batched_tokens=args.chunk,
        max_model_len=max_model_len,
        progress=True,
    )


def _read(args: argparse.Namespace) -> tuple[LLM, list[list[int]], dict[str, Any]]:
    """The model with its full cache, the windows of the texts, and what is reported of both."""
    longest = evaluate_texts.check_context(args.context, _model_context(args.model))
    for name in args.text:
        evaluate_texts.read_text(name)  # an error of these need not wait for the model
    base = _load(args, longest)
    assert base.tokenizer is not None
    windows = evaluate_texts.windows(args.text, base.tokenizer, args.context, longest, args.score_from, args.tokens)
    scored = evaluate_texts.scored(windows, args.score_from)
    if scored < args.tokens:
        print(f"the texts have {scored} tokens to score, {args.tokens} were asked for", file=sys.stderr)
    about = {
        "model": args.model,
        "dtype": str(base._model.dtype).removeprefix("torch."),
        "text": list(args.text),
        "context": args.context,
        "score_from": args.score_from,
        "windows": len(windows),
    }
    return base, windows, about


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"need fractions above 0, up to 1, got {text}")
    return value


def _fractions(text: str) -> list[float]:
    return [_fraction(part) for part in text.split(",")]


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"need a number >= 1, got {value}")
    return value


def _integers(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--model", default="smollm2-135m", help="name or directory (default: %(default)s)")
    common.add_argument("--dtype", default="auto", help="of weights and the exact cache (default: %(default)s)")
    common.add_argument("--chunk", type=_positive, default=256, metavar="N", help="tokens a step (default: 256)")
    common.add_argument("--threads", type=_positive, default=1, metavar="N", help="threads for torch (default: 1)")
    common.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all random input (default: 0)")
    common.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    below = common.add_argument_group("copies below the compressed cache")
    below.add_argument("--recall", type=float, metavar="FRACTION", help="tokens that a query reads of them")
    below.add_argument("--recall-block", type=_positive, metavar="N", help="queries of a chunk that share these (16)")
    below.add_argument("--cold-format", metavar="NAME", help="exact, int8 or none")
    below.add_argument("--host-cache-size", metavar="SIZE", help="bytes of copies, at most")
    parser = argparse.ArgumentParser(
        prog="python -m tools.evaluate", description="Measure what compressing the cache costs.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="NAME")

    def add(function: Any, help: str) -> argparse.ArgumentParser:
        command = commands.add_parser(function.__name__, parents=[common], help=help, allow_abbrev=False)
        command.set_defaults(run=function)
        return command

    def add_text(command: argparse.ArgumentParser, tokens: int) -> None:
        command.add_argument(
            "--text", nargs="+", required=True, metavar="FILE",
            help=f"UTF-8 files; `stdlib`: the sources of {', '.join(evaluate_texts.STDLIB)} of this Python",
        )  # fmt: skip
        command.add_argument("--context", type=_positive, default=4096, metavar="N", help="of a window (default: 4096)")
        command.add_argument(
            "--score-from", type=int, default=1024, metavar="N", help="first scored position (default: 1024)"
        )
        command.add_argument(
            "--tokens", type=_positive, default=tokens, metavar="N",
            help="scored positions at least, in whole windows (default: %(default)s)",
        )  # fmt: skip

    def add_budget(command: argparse.ArgumentParser, many: bool, default: str | None) -> None:
        command.add_argument(
            "--kv-budget", type=_fractions if many else _fraction, default=default,
            metavar="FRACTION[,...]" if many else "FRACTION", help="of the exact bytes (default: %(default)s)",
        )  # fmt: skip

    command = add(quality, "perplexity, KL and agreement of budgets, beside the full cache on the same tokens")
    add_text(command, 20_000)
    add_budget(command, True, None)
    command.add_argument("--preset", metavar="NAME", help="proposal: a row for the original proposal's tiers")
    command.add_argument("--importance", metavar="NAME", help="score, random or none (default: score)")
    command.add_argument("--scorer", type=_names, default=[], metavar="FILE[,FILE]", help="rows with these scorers")
    command.add_argument("--plot", metavar="FILE.png", help="draw KL over resident bytes (needs matplotlib)")

    command = add(needle, "facts in a long context, asked for at its end")
    add_budget(command, True, "0.31")
    command.add_argument("--text", default="../shared/data/wikitext2/wiki.test.raw", metavar="FILE", help="around them")
    command.add_argument("--context", type=_integers, default="1024,2048,4096", metavar="N,N", help="(%(default)s)")
    command.add_argument("--depth", type=_fractions, default="0.1,0.3,0.5,0.7,0.9", metavar="F,F", help="(%(default)s)")
    command.add_argument("--kind", choices=("sentence", "lines", "both"), default="both", help="(default: both)")

    command = add(rouge, "summaries of long documents: ROUGE-L of the tiered output (needs rouge-score)")
    add_budget(command, False, "0.31")
    command.add_argument("--preset", metavar="NAME", help="proposal, instead of a budget")
    command.add_argument(
        "--data", default="../shared/data/summ-qmsum", metavar="PATH",
        help="JSON lines of {transcript, queries: [{query, answer}]}, or a directory of them (default: %(default)s)",
    )  # fmt: skip
    command.add_argument("--documents", type=_positive, default=7, metavar="N", help="(default: %(default)s)")
    command.add_argument("--max-tokens", type=_positive, default=128, metavar="N", help="of a summary (default: 128)")
    command.add_argument("--context", type=_positive, default=4096, metavar="N", help="with the summary (4096)")

    command = add(quantization, "perplexity and KL of quantised weights, beside the checkpoint's own")
    add_text(command, 20_000)
    command.add_argument(
        "--quantization", type=_names, default="int8,int4", metavar="NAME[,NAME]", help="(default: %(default)s)"
    )
    command.add_argument(
        "--group-size", type=_integers, default=[None], metavar="N[,N]", help="of int4 (default: the engine's)"
    )
    command.add_argument(
        "--checkpoint", nargs="+", default=[], metavar="DIR", help="rows for what tools.quantize wrote, too"
    )

    command = add(wellformed, "completions of code that do not parse, under a tight cache and with a full one")
    add_budget(command, False, "0.22")
    command.add_argument(
        "--data", default="../shared/data/code-humaneval", metavar="PATH",
        help="HumanEval.jsonl.gz, or its directory (default: %(default)s)",
    )  # fmt: skip
    command.add_argument("--samples", type=_positive, default=20, metavar="N", help="tasks (default: %(default)s)")
    command.add_argument("--header", type=_positive, default=1100, metavar="N", help="tokens before a task (1100)")
    command.add_argument("--max-tokens", type=_positive, default=96, metavar="N", help="of a completion (default: 96)")

    command = add(knobs, "what each setting of the tiers does to moves, bytes and KL")
    add_text(command, 6_000)
    add_budget(command, False, "0.31")

    command = add(importance, "signals of importance: what they find, miss and cost; --kv-budget: ranked pages")
    add_text(command, 6_000)
    command.set_defaults(context=2048)
    add_budget(command, False, None)
    command.add_argument("--scorer", metavar="FILE", help="instead of the one that ships")
    command.add_argument("--no-kl", action="store_true", help="recall and missed mass only, in a third of the time")
    command.add_argument("--layers", type=int, default=10, metavar="N", help="with tiers; the others are exact (10)")
    command.add_argument("--signals", type=_names, metavar="NAME[,NAME]", help="to predict with (default: all)")
    command.add_argument("--windows", type=_positive, default=1, metavar="N", help="of each text (1)")
    command.add_argument("--blocks", type=_positive, default=8, metavar="N", help="of 64 predicted tokens (8)")
    command.add_argument(
        "--calibrate", nargs="+", default=["../shared/data/wikitext2/wiki.valid.tokens.txt", "module:subprocess"],
        metavar="FILE", help="a window of each makes the split over layers and the drift (default: %(default)s)",
    )  # fmt: skip

    command = add(bits, "calibrated codes: more bits for tokens that matter, and as many for all, at equal bytes")
    add_text(command, 6_000)
    command.set_defaults(dtype="float32")
    command.add_argument(
        "--bytes", type=_fractions, default="0.18", metavar="FRACTION[,...]",
        help="of the exact bytes, with the exact window and the map of tiers (default: %(default)s)",
    )  # fmt: skip
    command.add_argument("--scorer", metavar="FILE", help="instead of the one that ships")
    command.add_argument("--blocks", type=_positive, default=8, metavar="N", help="of 64 predicted tokens (8)")
    command.add_argument("--windows", type=_positive, default=6, metavar="N", help="to make codes of (6)")
    command.add_argument(
        "--calibrate", nargs="+", metavar="FILE", help="to make codes of, and to choose on (default: %(default)s)",
        default=[
            "../shared/data/wikitext2/wiki.valid.tokens.txt", "module:subprocess", "module:zipfile", "module:turtle",
        ],
    )  # fmt: skip

    command = add(context, "perplexity beyond the trained length, by RoPE scaling")
    command.add_argument(
        "--text", required=True, metavar="FILE", help="UTF-8; stdlib; own: what the model itself tells"
    )
    command.add_argument("--context", type=_positive, required=True, metavar="N", help="tokens, beyond the model's own")
    command.add_argument(
        "--rope-scaling", type=parse_json_object, nargs="+", default=["auto"], metavar="JSON",
        help="auto, or objects as in config.json (default: auto)",
    )  # fmt: skip
    return parser


def _shown(value: Any) -> str:
    """A value in a table for people."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return " / ".join(map(_shown, value.values()))
    return "-" if value is None else str(value)


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    # Read by OpenMP and MKL when torch is imported, so it has to be said before a subcommand does that.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(args.threads)
    try:
        result = args.run(args)
    except FloatingPointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    words = list(sys.argv[1:] if argv is None else argv)
    result = {**provenance(), "command": " ".join(["python -m tools.evaluate", *words]), **result}
    if args.json:
        print(json.dumps(result))
        return 0
    for key, value in result.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            known = [name for name in _COLUMNS if name in value[0]] if key == "rows" and "setting" in value[0] else []
            names = known or [name for name in value[0] if name not in _LONG]
            print_table([{name: _shown(row[name]) for name in names} for row in value])
        else:
            print(f"{key}: {_shown(value)}")
    return 0


if __name__ == "__main__":
    run(main)
