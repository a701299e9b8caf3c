"""What the figures of `tools.profile_kernels` are held against: a committed baseline, the project's floors, and the
published code of others under the same meter."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from models.errors import ConfigError

BASELINE = Path(__file__).with_name("kernel_baseline.json")
PEERS = Path(__file__).with_name("kernel_peers.json")

SHARED_LIMIT = {  # bytes of shared memory that a program may have
    "sm_80": 166_912, "sm_86": 101_376, "sm_87": 166_912, "sm_89": 101_376, "sm_90": 232_448, "sm_100": 232_448,
    "sm_120": 101_376, "gfx90a": 65_536, "gfx942": 65_536,
}  # fmt: skip
GROWTH = 1.05  # of a figure, over the baseline's
MOST_L2 = 1.2  # l2_ratio
KEPT = (  # of a row, in a baseline
    "kernel", "target", "registers", "spills", "loop_spills", "shared_bytes", "instructions_per_token",
    "traffic_ratio", "l2_ratio",
)  # fmt: skip


class Floor(NamedTuple):
    """The most that a kernel at head_dim 128 may take. instructions: per token and KV head, or, of prefill, per token
    and 128 rows, by target; shared: bytes."""

    loop: str
    kernels: tuple[str, ...]
    instructions: dict[str, float]
    shared: int | None


_LLAMA_2, _LLAMA_3 = "[llama-2-7b]", "[llama-3-8b]"
FLOORS = (
    Floor(
        "decode, exact", (f"decode_attention+logits{_LLAMA_2}", f"decode_attention+logits{_LLAMA_3}"),
        dict.fromkeys(("sm_80", "sm_86", "sm_89", "sm_90"), 18.5), 39 * 1024,
    ),
    Floor(
        "decode, 4 bits", (f"decode_attention+logits,4 bits{_LLAMA_3}",),
        {"sm_80": 45.0, "sm_90": 40.0}, 39 * 1024,
    ),
    Floor(
        "prefill, exact", (f"prefill_attention{_LLAMA_2}", f"prefill_attention{_LLAMA_3}"),
        {"sm_80": 90.0, "sm_90": 75.0}, None,
    ),
)  # fmt: skip


def read_baseline(path: Path) -> dict[str, Any]:
    """Raises ConfigError."""
    try:
        baseline: dict[str, Any] = json.loads(path.read_text())
        if all(set(KEPT) <= row.keys() for row in baseline["rows"]):
            return baseline
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; --write-baseline {path} makes one") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise ConfigError(f"{path} is no baseline: --write-baseline {path} makes one")


def write_baseline(path: Path, rows: list[dict[str, Any]], triton: str) -> None:
    """Keep the rows, and those of an older baseline that are of other targets; a line each."""
    targets = {row["target"] for row in rows}
    older = read_baseline(path)["rows"] if path.exists() else []
    kept = [{key: row[key] for key in KEPT} for row in rows]
    kept = sorted(
        [*kept, *(row for row in older if row["target"] not in targets)], key=lambda row: (row["target"], row["kernel"])
    )
    lines = ",\n".join(f"  {json.dumps(row)}" for row in kept)
    path.write_text(f'{{"triton": {json.dumps(triton)}, "rows": [\n{lines}\n]}}\n')


def complaints(rows: list[dict[str, Any]], baseline: dict[str, Any]) -> Iterator[str]:
    """What is worse than it may be, in a line each. Of AMD's targets spills are no reason."""
    before = {(row["kernel"], row["target"]): row for row in baseline["rows"]}
    for row in rows:
        where, old = f"{row['kernel']} on {row['target']}", before.pop((row["kernel"], row["target"]), None)
        if old is None:
            yield f"{where}: not in the baseline"
            continue
        if row["target"].startswith("sm_") and (row["loop_spills"] or row["spills"] > old["spills"]):
            # Around its loops a kernel that has two may park what the other one needs: no more than it did.
            yield f"{where}: {row['spills']} spill instructions, {row['loop_spills']} of them in the loop"
        if row["shared_bytes"] > SHARED_LIMIT[row["target"]]:
            yield f"{where}: {row['shared_bytes']} bytes of shared memory of {SHARED_LIMIT[row['target']]}"
        for name in ("instructions_per_token", "traffic_ratio"):
            if old[name] is not None and (row[name] is None or row[name] > GROWTH * old[name]):
                yield f"{where}: {name} {row[name]}, the baseline has {old[name]}"
        if row["l2_ratio"] is not None and row["l2_ratio"] > MOST_L2:
            yield f"{where}: l2_ratio {row['l2_ratio']}, at most {MOST_L2}"
    measured = {row["target"] for row in rows}
    for kernel, target in before:
        if target in measured:
            yield f"{kernel} on {target}: in the baseline, and not among the kernels"


def beside_peers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Instructions per token of the loops of attention at head_dim 128: ours, what is wanted of them, and peers'."""
    found = {(row["kernel"], row["target"]): row for row in rows}
    peers: list[dict[str, Any]] = json.loads(PEERS.read_text())["rows"]
    table = []
    for floor in FLOORS:
        for kernel in floor.kernels:
            some = {target: found.get((kernel, target), {}) for target in ("sm_80", "sm_90")}
            counts = {target: row.get("instructions_per_token") for target, row in some.items()}
            shared = max((row.get("shared_bytes", 0) for row in some.values()), default=0)
            table.append({"loop": floor.loop, "whose": f"ours: {kernel}", **counts, "shared_kb": shared // 1024})
        wanted = {target: floor.instructions.get(target) for target in ("sm_80", "sm_90")}
        limit = None if floor.shared is None else floor.shared // 1024
        table.append({"loop": floor.loop, "whose": "wanted, at most", **wanted, "shared_kb": limit})
        table += [
            {"loop": floor.loop, "whose": peer["peer"] + (f" (G {peer['groups']})" if peer["groups"] else ""),
             "sm_80": peer["sm_80"], "sm_90": peer["sm_90"], "shared_kb": peer["shared_kb"]}
            for peer in peers if peer["loop"] == floor.loop
        ]  # fmt: skip
    return table


def missed_floors(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Where our kernels take more than is wanted of them, and how much."""
    found = {(row["kernel"], row["target"]): row for row in rows}
    for floor in FLOORS:
        for kernel in floor.kernels:
            for target, most in floor.instructions.items():
                row = found.get((kernel, target))
                if row and row["instructions_per_token"] > most:
                    yield f"{kernel} on {target}: {row['instructions_per_token']} instructions per token, wanted {most}"
                if row and floor.shared is not None and row["shared_bytes"] > floor.shared:
                    yield f"{kernel} on {target}: {row['shared_bytes']} bytes of shared memory, wanted {floor.shared}"


def print_table(rows: list[dict[str, Any]]) -> None:
    def cell(value: Any) -> str:
        if isinstance(value, dict):
            return " ".join(f"{gpu}={us:g}" for gpu, us in value.items()) or "-"
        return "-" if value is None else str(value)

    headers = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[cell(row.get(key)) for key in headers] for row in rows]
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
    for line in [headers, *cells]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
