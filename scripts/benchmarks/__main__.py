"""`./scripts/bench`: measure what is asked for, print a table, and write JSON."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Measured = tuple[float, str]
TABLES = "tables"
PEERS = Path(".venv-bench/bin/python")


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        name: Its name in the JSON.
        reach: It is met where the value is not above this.
        measure: Takes the number of repeats; returns the value and how it was measured.
        peer: Whether it needs the environment with TRL and vLLM, which is not the one of everything else.
    """

    name: str
    reach: float
    measure: Callable[[int], Measured]
    peer: bool = False


@dataclass(frozen=True)
class Row:
    """What the JSON says of one figure; value and met are null where `how` says why it was not measured."""

    name: str
    value: float | None
    reach: float
    met: bool | None
    how: str


def figures() -> tuple[Figure, ...]:
    """Return every figure; what measures it is imported when it is."""
    return (
        Figure("step_strict_over_native_cp2_tp4_sp4", 1.00, partial(_step, "cp2_tp4_sp4")),
        Figure("step_strict_over_native_cp1_tp1_sp1", 1.05, partial(_step, "cp1_tp1_sp1")),
        Figure(
            "step_strict_over_native_same_attention", 1.30, partial(_step, "cp1_tp1_sp1", same_attention=True)
        ),
        Figure("reduce_scatter_over_gloo", 0.6, partial(_exchange, "reduce_scatter")),
        Figure("all_reduce_over_gloo", 1.1, partial(_exchange, "all_reduce")),
        Figure("grpo_step_over_trl", 0.95, _trl, peer=True),
        Figure("vllm_over_rollout_tokens_8", 0.83, partial(_vllm, 8), peer=True),
        Figure("vllm_over_rollout_tokens_64", 1.0, partial(_vllm, 64), peer=True),
        Figure("launch_to_first_token_s", 6.0, _first_token),
        Figure("g11_probe_s", 40.0, _probe),
        Figure("evidence_share", 0.03, _evidence),
        Figure("logprob_memory_over_materialised", 0.125, _memory),
    )


def measured(figure: Figure, repeats: int) -> Row:
    """Measure one figure; what goes wrong becomes the reason why there is none."""
    try:
        value, how = figure.measure(repeats)
    except Exception as error:
        traceback.print_exc()
        reason = "; ".join(str(error).splitlines()[:2]) or type(error).__name__
        return Row(figure.name, None, figure.reach, None, f"not measured: {reason}")
    return Row(figure.name, value, figure.reach, value <= figure.reach, how)


def measured_there(figure: Figure, repeats: int) -> Row:
    """Measure a figure in the peers' environment, where this is another one."""
    if Path(sys.executable).parent == PEERS.parent.absolute():
        return measured(figure, repeats)
    if not PEERS.exists():
        why = "not measured: TRL and vLLM are not installed; scripts/bench says why"
        return Row(figure.name, None, figure.reach, None, why)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        what = ["--only", figure.name, "--repeats", str(repeats), "--json", file.name]
        subprocess.run([str(PEERS), "-m", "benchmarks", *what], stdout=subprocess.DEVNULL, check=False)
        text = Path(file.name).read_text()
    if not text:
        return Row(figure.name, None, figure.reach, None, "not measured: its process ended early")
    return Row(**json.loads(text)["figures"][0])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; return 0 where every figure that was asked for has a value, else 1."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    every = figures()
    names = [figure.name for figure in every] + [TABLES]
    parser.add_argument("--json", type=Path, metavar="FILE", help="write {'figures': [...], 'tables': [...]}")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", default=names, help="of --list")
    parser.add_argument("--repeats", type=int, default=9, help="interleaved repeats of a ratio (9)")
    parser.add_argument("--list", action="store_true", help="print the names and what is to be reached")
    parser.add_argument("--needs-peers", action="store_true", help=argparse.SUPPRESS)  # scripts/bench asks
    options = parser.parse_args(arguments)
    if options.list:
        for figure in every:
            print(f"{figure.name:42} at most {figure.reach:g}")
        print(f"{TABLES:42} cost with the sequence length and with the ranks")
        return 0
    wanted = [figure for figure in every if figure.name in options.only]
    if options.needs_peers:
        return int(not any(figure.peer for figure in wanted))
    rows: list[Row] = []
    tables: list[dict[str, Any]] = []
    for figure in wanted:
        print(f"measuring {figure.name}", file=sys.stderr, flush=True)
        rows.append(
            measured_there(figure, options.repeats) if figure.peer else measured(figure, options.repeats)
        )
        _write(options.json, rows, tables)
    if TABLES in options.only:
        tables = _tables(options.repeats)
        _write(options.json, rows, tables)
    _show(rows, tables)
    return int(any(row.value is None for row in rows))


def _write(path: Path | None, rows: list[Row], tables: list[dict[str, Any]]) -> None:
    """Keep the file whole after every figure: the whole bench takes a while."""
    if path is not None:
        text = json.dumps({"figures": [asdict(row) for row in rows], "tables": tables}, indent=2)
        path.write_text(text + "\n")


def _show(rows: list[Row], tables: list[dict[str, Any]]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 200)
    table = Table("figure", "value", "reach", "met", "how", show_lines=True)
    for row in rows:
        value = "—" if row.value is None else f"{row.value:.3g}"
        met = {True: "yes", False: "no", None: "—"}[row.met]
        table.add_row(row.name, value, f"≤ {row.reach:g}", met, row.how)
    if rows:
        console.print(table)
    for found in tables:
        console.print(found["title"])
        console.print("  " + "  ".join(f"{key}: {value:.4g}" for key, value in found["values"].items()))
        if "exponent" in found:
            last = found["last_exponent"]
            console.print(f"  exponent {found['exponent']:.2f}, between the last two {last:.2f}")


def _step(layout: str, repeats: int, *, same_attention: bool = False) -> Measured:
    from benchmarks import step

    return step.ratio(layout, repeats, same_attention=same_attention)


def _exchange(operation: str, repeats: int) -> Measured:
    from benchmarks import exchange

    return exchange.ratio(operation, repeats)


def _trl(repeats: int) -> Measured:
    from benchmarks import peers

    return peers.grpo_over_trl(repeats)


def _vllm(sequences: int, repeats: int) -> Measured:
    from benchmarks import peers

    return peers.vllm_over_tokens(sequences, repeats)


def _first_token(repeats: int) -> Measured:
    from benchmarks import runs

    return runs.first_token_s(_few(repeats))


def _probe(repeats: int) -> Measured:
    from benchmarks import runs

    return runs.probe_s(_few(repeats))


def _evidence(_: int) -> Measured:
    from benchmarks import runs

    return runs.evidence_share()


def _memory(_: int) -> Measured:
    from benchmarks import memory

    return memory.ratio()


def _tables(repeats: int) -> list[dict[str, Any]]:
    from benchmarks import roofline, scaling

    return roofline.tables() + scaling.tables(_few(repeats))


def _few(repeats: int) -> int:
    """Return the repeats of what takes long: no more than 3."""
    return min(repeats, 3)


if __name__ == "__main__":
    sys.exit(main())
