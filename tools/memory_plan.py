"""What a model takes, without its weights: `python -m tools.memory_plan --model llama2-7b --context 32768`.

Planned, not measured, for a GPU and the memory of its host, or for a CPU (`--device cpu`). The cache is the engine's
own, on torch's meta device, which has no bytes: it is given a sequence of that length chunk by chunk, so that what
stands here of a budget is what the allocator and the policy make of it. Weights follow from the shapes, what a step
holds from formulas (below). `python -m tools.bench memory` measures the same; `--table` prints that of the README.
"""

from __future__ import annotations

import argparse
import json
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING, Any, cast

from engine.cli import run
from engine.config import EngineConfig
from engine.settings import parse_size
from memory.config import WARM_BITS, CacheConfig, ColdConfig, TierConfig
from models.errors import ConfigError, ModelFormatError
from models.files import read_object
from models.llama.config import DEFAULT_GROUP, LlamaConfig, Quantization
from models.resolve import resolve

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.ops import Ops

_LLAMA2 = {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 4096}
SHAPES: dict[str, dict[str, Any]] = {
    "llama2-7b": {**_LLAMA2, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
                  "num_attention_heads": 32},
    "llama2-13b": {**_LLAMA2, "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40,
                   "num_attention_heads": 40},
    "llama2-70b": {**_LLAMA2, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
                   "num_attention_heads": 64, "num_key_value_heads": 8},
}  # fmt: skip

# The engine's and the kernels', whose modules need torch and triton; the tests compare them.
RECALL = 0.05  # of all tokens, where no other fraction is asked for
MAX_SLICES = 128  # of a sequence, that decode splits the tokens of a KV head into
SPREAD = 2  # times the mean of the heads, that one of them recalls at most
TILE_ROWS = {2: 128, 4: 16}  # of queries that recall scores at a time, by the bytes of an element
MOVE_ELEMENTS = 1 << 22  # of exact pages, that are compressed together; one page at least
GRAPH_BYTES = 256 << 20  # that are left free for CUDA graphs
CHUNK_ELEMENTS = 1 << 21  # of K, that torch's operations make float32 at a time

_CPU_COMPRESS = 17.5  # bytes that torch's `compress` allocates for each element, measured with tools.bench_memory
_OVERLAY_READ, _OVERLAY_ROW = 64, 32  # bytes that finding rows there takes for each that is read, and each there is
_MULTIPROCESSORS = 132  # of an H100 or H200; an A100 has 108
_MOST_CONTEXT = 1 << 27  # that a model can be configured for


def shape(name: str) -> LlamaConfig:
    """The shape of a known name, or of a checkpoint's config.json. Raises ConfigError, ModelFormatError."""
    if name in SHAPES:
        return LlamaConfig.from_dict(SHAPES[name])
    try:
        path = resolve(name)
    except ModelFormatError as error:
        raise ConfigError(f"{error}\nShapes that are known without a checkpoint: {', '.join(SHAPES)}") from None
    return LlamaConfig.from_dict(read_object(path / "config.json"))


def cache_config(model: LlamaConfig, settings: EngineConfig) -> CacheConfig:
    """The engine's cache of max_num_seqs sequences that each fill the context. Raises ConfigError."""
    assert settings.max_model_len is not None
    itemsize, size, batch = _itemsize(settings), settings.page_size, settings.max_num_seqs
    token_bytes = model.kv_bytes_per_token(itemsize)
    pool = -(-settings.max_model_len // size) * size * token_bytes * batch
    tiers = cold = None
    if settings.kv_budget is not None:
        # As engine.loading has it: what the budget grants, the chunk in flight, and a page at both of its ends.
        chunk = min(settings.max_num_batched_tokens, settings.max_model_len * batch) + 2 * size * batch
        pool = min(pool, int(settings.kv_budget * pool) + chunk * token_bytes)
        # Without scores pages fall by their age; none ahead of its turn, which is what the budget grants at most. The
        # bound on exact tokens is that of all sequences.
        most = 4 * settings.max_model_len // batch
        tiers = TierConfig(settings.kv_budget, max_moves=0, hot_layer_size=most, importance="none")
        if settings.cold_format != "none":
            recall = RECALL if settings.recall is None else settings.recall
            overlay = settings.overlay_size or 0
            cold = ColdConfig(settings.cold_format, 1 << 62, recall, settings.recall_block, overlay_bytes=overlay)
            tiers = replace(tiers, recalled=recall > 0)
        elif settings.recall:
            raise ConfigError(f"recall {settings.recall} reads copies of what is compressed, and cold_format is none")
    if settings.overlay_size and settings.cold_format != "exact":
        raise ConfigError(f"overlay_size is of exact copies, and cold_format is {settings.cold_format}")
    try:
        config = CacheConfig(
            num_layers=model.num_layers, num_kv_heads=model.num_kv_heads, head_dim=model.head_dim, itemsize=itemsize,
            capacity_bytes=pool, page_size=size, tiers=tiers, cold=cold,
        )  # fmt: skip
    except ValueError as error:
        raise ConfigError(f"kv_budget: {error}") from None
    least = config.page_cost(WARM_BITS[-1]) / config.page_cost(config.exact_bits)
    if settings.kv_budget is not None and settings.kv_budget < least:
        raise ConfigError(
            f"kv_budget {settings.kv_budget} is less than {least:.3f}, which is what pages of {WARM_BITS[-1]} bits and "
            "their scales take: no token is dropped, so nothing smaller holds them"
        )
    return config


def plan(
    model: LlamaConfig, settings: EngineConfig, quantization: str | None = None, device_memory: int | None = None,
    group: int = DEFAULT_GROUP, on_cpu: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The figures for sequences of max_model_len tokens, max_num_seqs of them, on a device of so many bytes."""
    context, batch = settings.max_model_len, settings.max_num_seqs
    assert context is not None
    config = cache_config(model, settings)
    weights = weights_bytes(model, _itemsize(settings), quantization, group)
    kv, pages_by_bits, reads = _settled(config, context, settings.max_num_batched_tokens)
    kv = {tier: count * batch for tier, count in kv.items()}
    overlay, full = _overlay_bytes(config), context * config.token_bytes * batch
    resident = kv["hot"] + kv["warm"] + overlay

    def device_bytes(length: int) -> int:
        return weights + beside_weights(model, replace(settings, max_model_len=length), on_cpu)

    activation, workspace = _step_bytes(model, settings, on_cpu)
    fitting = range(1, _MOST_CONTEXT + 1)
    return {
        "weights_bytes": weights,
        "kv_bytes": kv,
        "overlay_bytes": overlay,
        # The rest of the pool, for the chunk that is computed.
        "kv_in_flight_bytes": _pool_bytes(config) + overlay - resident,
        "kv_full_bytes": full,
        "resident_ratio": resident / full,
        "total_ratio": (resident + kv["cold"]) / full,
        "pages_by_bits": pages_by_bits,  # of one sequence
        "activation_bytes": activation,
        "workspace_bytes": workspace,
        "total_bytes": device_bytes(context),
        "host_bytes": kv["cold"],
        "cold_read_bytes_per_token": reads["read_bytes_per_token"],
        "read_ms_per_token": reads["read_ms_per_token"],
        "max_context": None if device_memory is None else bisect_right(fitting, device_memory, key=device_bytes),
    }


def beside_weights(model: LlamaConfig, settings: EngineConfig, on_cpu: bool = False) -> int:
    """Bytes of the pool, of the overlay, and of a step."""
    config = cache_config(model, settings)
    return _pool_bytes(config) + _overlay_bytes(config) + sum(_step_bytes(model, settings, on_cpu))


def weights_bytes(
    model: LlamaConfig, itemsize: int, quantization: str | None = None, group: int = DEFAULT_GROUP
) -> int:
    """Of all parameters. int8: 16 bits of scale for each output; int4: as many of scale and of zero for each group of a
    row, embedding and head in int8; norms and biases as they are. None: as the checkpoint has them."""
    from models.llama.model import LlamaWeights

    if quantization is not None:
        bits = int(quantization.removeprefix("int"))
        model = replace(model, quantization=Quantization(bits, group if bits == 4 else 0))
    return LlamaWeights(model).nbytes(itemsize)


class _NoBytes:
    """As much of `Ops` as moves pages, on the meta device, where the reference takes a hundred times as long."""

    def compress(self, x: Tensor, bits: int, is_key: bool) -> tuple[Tensor, Tensor]:
        pages, size, head_dim = x.shape
        codes = x.new_empty(pages, bits * size * head_dim // 8).byte()
        return codes, x.new_empty(pages, size + (head_dim if is_key else size)).byte()

    def decompress(self, codes: Tensor, records: Tensor, bits: int, is_key: bool, like: Tensor) -> Tensor:
        return like.new_empty(len(codes), *like.shape[-2:])


def _settled(config: CacheConfig, context: int, chunk: int) -> tuple[dict[str, int], dict[int, int], dict[str, Any]]:
    """(bytes by tier, pages by bits, reads of a token) of one sequence, as the engine reports them."""
    import torch

    from memory.cache import KVCache
    from memory.prefix import CachedSequence
    from memory.recall import Reads

    # A page has the same units in every layer and head, so one of each tells what all do.
    heads = config.num_layers * config.num_kv_heads
    pages = config.pages_for(context)
    one = replace(
        config, num_layers=1, num_kv_heads=1, capacity_bytes=(pages + 1) * config.page_bytes // heads, cold=None
    )
    dtype = torch.float32 if config.itemsize == 4 else torch.float16
    cache = KVCache(one, dtype, torch.device("meta"), cast("Ops", _NoBytes()))
    sequence = CachedSequence()
    for length in [*range(chunk, context, chunk), context]:
        cache.reserve(sequence, length)
        cache.commit(sequence, length - sequence.length)
        cache.settle([sequence])
    report = cache.report(sequence)
    copied = report["warm_tokens"] // config.page_size if config.cold else 0
    kv = {
        "hot": report["hot_bytes"] * heads, "warm": report["warm_bytes"] * heads, "cold": copied * config.copy_bytes
    }  # fmt: skip
    reads, newest = Reads(config), CachedSequence()
    newest.length = context - 1  # before the token whose query is asked
    reads.plan([newest], [1], [report["hot_tokens"]], [copied], True, torch.device("cpu"))
    return kv, report["pages_by_bits"], reads.report(reads.counts)


def _pool_bytes(config: CacheConfig) -> int:
    return config.num_pages * config.page_bytes


def _overlay_bytes(config: CacheConfig) -> int:
    """Rows, and of each KV head a key and a number for how lately each row was read, and for one more; counts."""
    rows = config.overlay_rows
    of_layer = (rows + 1) * 8 * config.num_kv_heads + 16
    return (rows * config.token_bytes + of_layer * config.num_layers) if rows else 0


def _step_bytes(model: LlamaConfig, settings: EngineConfig, on_cpu: bool) -> tuple[int, int]:
    """(activation, workspace): what a step holds at most, as a chunk of a prompt beside the tokens of the others; or
    what moves pages between steps holds, if that is more."""
    config = cache_config(model, settings)
    if config.cold:
        from engine.loading import layer_shares

        shares = layer_shares(settings, model, config.cold.recall)
        config = replace(config, cold=replace(config.cold, shares=shares))
    assert settings.max_model_len is not None
    context, batch = settings.max_model_len, settings.max_num_seqs
    tokens = min(settings.max_num_batched_tokens, context * batch)
    activation = activation_bytes(model, config.itemsize, tokens, batch)
    workspace = workspace_bytes(model, config, context, tokens, batch, on_cpu)
    # While attention works, or pages move, the rest of the layer does not hold its most.
    queries = model.num_heads * model.head_dim
    made = 0 if on_cpu else queries * (2 if config.tiers else 1)  # of a CPU it is among the parts
    others = tokens * ((_attention_elements(model) + made) * config.itemsize + _throughout(model)) + workspace
    moves = _rotations_bytes(model, context) + moves_bytes(config, tokens, on_cpu)
    return activation, max(others - activation, moves - activation, _rotations_bytes(model, context))


def moves_bytes(config: CacheConfig, tokens: int, on_cpu: bool) -> int:
    """Of compressing exact pages, those of a step or as many as are compressed together: what they are, and what one
    plane of them becomes."""
    if config.tiers is None:
        return 0
    elements = config.page_bytes // config.itemsize
    elements *= min(max(1, MOVE_ELEMENTS // elements), config.pages_for(tokens))
    exact, plane = elements * config.itemsize, elements // 2
    if on_cpu:
        return exact + int(plane * (config.itemsize + 1 + _CPU_COMPRESS))
    # With copies: those that are chosen, and once more in the order of the host's. Without: one plane, and its codes.
    return 3 * exact if config.cold else exact + plane * (config.itemsize + 2)


def activation_bytes(model: LlamaConfig, itemsize: int, tokens: int, batch: int) -> int:
    """At most, in `Llama.forward` over so many tokens and `Llama.logits` of a row for each sequence."""
    hidden, inner, queries = model.hidden_size, model.intermediate_size, model.num_heads * model.head_dim
    qkv = queries + 2 * model.num_kv_heads * model.head_dim
    # Elements of a token. What a layer made lives until the next one has made its own: so while qkv is made there are
    # two, and the outputs of gate and up of the layer before. Attention holds its own output beside
    # that, and the queries once more: rotated for compressed pages, or the output that recall replaces.
    attention = _attention_elements(model) + max(qkv, 2 * queries)
    gate_up = hidden + qkv + 4 * inner
    down = 2 * hidden + qkv + 3 * inner
    layers = tokens * (max(attention, gate_up, down) * itemsize + _throughout(model))
    # After them: the logits as they are computed, and in float32.
    logits = tokens * hidden * itemsize + batch * (hidden * itemsize + model.vocab_size * (itemsize + 4))
    return max(layers, logits)


def _attention_elements(model: LlamaConfig) -> int:
    """Of a token, that are held beside what attention makes: its inputs, and what is left of the layer before."""
    queries = model.num_heads * model.head_dim
    return model.hidden_size + queries + 2 * model.num_kv_heads * model.head_dim + 2 * model.intermediate_size


def _throughout(model: LlamaConfig) -> int:
    """Bytes of a token: the residual stream and the rotations in float32, its id and its position in 64 bits."""
    return 4 * model.hidden_size + 4 * model.head_dim + 16


def _rotations_bytes(model: LlamaConfig, context: int) -> int:
    return 4 * context * model.head_dim


def workspace_bytes(
    model: LlamaConfig, config: CacheConfig, context: int, tokens: int, batch: int, on_cpu: bool = False
) -> int:
    """The table of rotations, and the largest of what attention allocates beside its output, one after the other. What
    says where pages are, four bytes each, is left out."""
    heads, kv_heads = model.num_heads, model.num_kv_heads
    columns = config.pages_for(context) * config.page_size
    # Decode: each slice's output [batch, heads, slices, D] and log-sum-exp, float32. Slices fill the device with four
    # programs each multiprocessor; each format of pages has its own, which rounds up.
    slices = min(-(-4 * _MULTIPROCESSORS // (batch * kv_heads)) + len(WARM_BITS), MAX_SLICES)
    parts = [0 if on_cpu else 4 * batch * heads * slices * (model.head_dim + 1)]
    if on_cpu:
        parts.append(_cpu_attention_bytes(model, config, context, tokens))
    if config.tiers:
        from memory.observation import SAMPLES

        # The logits of the queries that are observed, of a chunk and of each other sequence, and their exponentials.
        # Where all decode, tables are as wide as a power of two: at most twice.
        queries = max((batch - 1 + SAMPLES) * (columns + 1), batch * (2 * columns + 1))
        parts.append(parts[0] + 2 * 4 * queries * heads)
    if config.cold and config.cold.recall:
        # The attention that each token got of each block of queries, float32, in tiles that are then summed; and the
        # tokens that are chosen: mass and number.
        blocks = min(tokens, batch + ceil(tokens / config.cold.block))
        rows = min(config.cold.block, tokens) * (heads // kv_heads)
        tiles = ceil(rows / TILE_ROWS[config.itemsize])
        mass = 4 * blocks * kv_heads * columns * (tiles + (tiles > 1))
        most = 1 << (ceil(config.cold.recall * context) - 1).bit_length()
        most = ceil(most * max(config.recall_shares) / 64)  # of any layer
        # Of all heads together, and of each head SPREAD times as many.
        chosen = (4 + 8) * blocks * kv_heads * most * (1 + SPREAD)
        parts.append(mass + chosen)
        if config.overlay_rows:  # of a decoding step: where each row that it reads is, and where those go that are new
            places = kv_heads * (_OVERLAY_READ * batch * most * SPREAD + _OVERLAY_ROW * config.overlay_rows)
            parts.append((mass + chosen) // blocks * batch + places)
    return _rotations_bytes(model, context) + max(parts)


def _cpu_attention_bytes(model: LlamaConfig, config: CacheConfig, context: int, tokens: int) -> int:
    """Of torch's attention of a chunk: an output and a log-sum-exp for each part of the cache, and how they become one.
    What recall holds is more, and not planned."""
    of_page = model.num_kv_heads * config.page_size * model.head_dim
    together = max(1, CHUNK_ELEMENTS // of_page)  # compressed pages of a part
    # A past and a chunk; and of the four formats mostly two are there.
    parts = 2 + (0 if config.tiers is None else ceil(config.pages_for(context) / together) + 1)
    elements = tokens * model.num_heads * model.head_dim
    held = parts * (elements * config.itemsize + 12 * tokens * model.num_heads)
    # K and V of a part, and what of them is not yet joined.
    unpacked = 0 if config.tiers is None else 12 * min(together, config.pages_for(context)) * of_page
    return held + max(unpacked, 3 * 4 * elements)


def _itemsize(settings: EngineConfig) -> int:
    return 4 if settings.dtype == "float32" else 2


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.memory_plan", description=__doc__.split("\n")[0])
    parser.add_argument("-m", "--model", help=f"{', '.join(SHAPES)}, or a directory with a config.json")
    parser.add_argument("--context", type=int, metavar="N", help="tokens of each sequence")
    parser.add_argument("--table", action="store_true", help="7B and 13B in all settings instead, as the README has it")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences (default: %(default)s)")
    parser.add_argument("--quantization", choices=("int8", "int4"), help="of the weights")
    parser.add_argument(
        "--quantization-group",
        type=int,
        choices=(32, 64, 128),
        default=DEFAULT_GROUP,
        help="of int4 (default: %(default)s)",
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="what computes (default: %(default)s)"
    )
    parser.add_argument("--kv-budget", type=float, metavar="FRACTION", help="compress the cache (default: exact)")
    parser.add_argument(
        "--recall", type=float, metavar="FRACTION", help=f"of all tokens, read from the copies (default: {RECALL})"
    )
    parser.add_argument(
        "--cold-format", choices=("exact", "int8", "none"), default="exact",
        help="copies of what is compressed, in the host's memory (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--overlay-size", metavar="SIZE", help="as 512MB: rows of copies that decoding keeps on the device"
    )
    parser.add_argument(
        "--chunk", type=int, default=EngineConfig.max_num_batched_tokens, metavar="N",
        help="tokens computed in one step (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--dtype", default="float16", help="of weights and KV cache; auto: the checkpoint's own")
    parser.add_argument("--device-memory", metavar="SIZE", help="as 24GB: say which context fits it")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.table and (args.model or args.context):
        parser().error("--table has its own models and contexts: leave out --model and --context")
    if args.table:
        from tools.memory_table import show

        show(args.chunk, args.quantization_group)
        return 0
    if args.model is None or args.context is None:
        parser().error("--model and --context are needed, or --table")
    for name in ("context", "batch", "chunk"):
        if getattr(args, name) < 1:
            raise ConfigError(f"{name} must be at least 1, got {getattr(args, name)}")
    memory = None if args.device_memory is None else parse_size(args.device_memory)
    model = shape(args.model)
    settings = EngineConfig(
        model=args.model,
        dtype=model.dtype if args.dtype == "auto" else args.dtype,
        max_model_len=args.context,
        max_num_seqs=args.batch,
        max_num_batched_tokens=args.chunk,
        kv_budget=args.kv_budget,
        recall=args.recall,
        cold_format=args.cold_format,
        overlay_size=args.overlay_size,
    )
    config = cache_config(model, settings)  # refuses what it must before the seconds that torch takes to import
    result = {
        "model": args.model, "context": args.context, "batch": args.batch, "chunk": args.chunk,
        "dtype": settings.dtype, "device": args.device, "quantization": args.quantization, "kv_budget": args.kv_budget,
        "recall": 0.0 if config.cold is None else config.cold.recall,
        "cold_format": config.cold and args.cold_format,
        **plan(model, settings, args.quantization, memory, args.quantization_group, args.device == "cpu"),
    }  # fmt: skip
    result["notes"] = list(_notes(model, result))
    if args.json:
        print(json.dumps(result))
    else:
        _show(result, args.device_memory)
    return 0


def _notes(model: LlamaConfig, result: dict[str, Any]) -> Iterator[str]:
    """What has to be known of the figures."""
    yield "planned, not measured"
    if result["device"] == "cpu":
        yield "a CPU has one memory: what stands under the host comes on top; recall holds more there than is planned"
    else:
        yield f"{GRAPH_BYTES / 1e9:.2f} GB more are left free for CUDA graphs, but with --cuda-graphs off"
    if result["context"] > model.context_length:
        yield f"the model's own context is {model.context_length} tokens: more need --rope-scaling"
    if result["batch"] > 1:
        pool = sum(result["kv_bytes"][tier] for tier in ("hot", "warm")) + result["kv_in_flight_bytes"]
        yield f"so many sequences at once need --kv-cache-memory {pool}: by default the pool is that of one"


def _show(result: dict[str, Any], device_memory: str | None) -> None:
    kv, total = result["kv_bytes"], result["total_bytes"]
    rows = {
        "weights": result["weights_bytes"],
        "KV cache, exact": kv["hot"],
        "KV cache, compressed": kv["warm"],
        "KV cache, overlay": result["overlay_bytes"],
        "KV cache, for the chunk in flight": result["kv_in_flight_bytes"],
        "activations of a chunk": result["activation_bytes"],
        "workspace": result["workspace_bytes"],
        "the device, in all": total,
        "the host: copies of what is compressed": result["host_bytes"],
        "a full KV cache, to compare": result["kv_full_bytes"],
    }
    print(f"{result['model']}, {result['batch']} x {result['context']} tokens, {result['dtype']}\n")
    print("| planned | GB |\n|---|---|")
    for name, count in rows.items():
        print(f"| {name} | {count / 1e9:.3f} |")
    print(f"\nKV cache of the full one: {result['resident_ratio']:.3f} on the device, ", end="")
    print(f"{result['total_ratio']:.3f} with the host's")
    if result["cold_read_bytes_per_token"]:
        times = ", ".join(f"{link} {ms:.1f} ms" for link, ms in result["read_ms_per_token"].items())
        print(f"read of the copies for each token: {result['cold_read_bytes_per_token'] / 1e9:.3f} GB: {times}")
    if device_memory is not None:
        print(f"longest context in {device_memory}: {result['max_context']} tokens")
    print("\n".join(f"note: {note}" for note in result["notes"]))


if __name__ == "__main__":
    run(main)
