"""`rlsp-plan OVERRIDES…`: what a run would need and move; composes and checks, starts nothing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rlsp.cli.compose import checked, open_composer
from rlsp.cli.output import UNUSABLE, answer, complain
from rlsp.cli.overrides import spelt_out
from rlsp.cli.refusal import RefusalError
from rlsp.config import Config
from rlsp.layout import layout_word
from rlsp.report.plan import Plan, layouts, plan
from rlsp.report.plan_shapes import Work

_PROMPT_TOKENS = 8  # about what the built-in task asks, where the task states no limit
_UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}
_EPILOG = """memory is what strict routes need: weights, optimizer, sums and cache exactly, activations within
a few per cent, logits and workspace as upper estimates. Bytes are what a rank receives in one rollout with
its updates, every response at its longest, counted as comm/*_bytes in metrics.jsonl are (docs/plan.md).

exit status:
  0  planned
  2  refused (configuration, usage), or the answer cannot be written
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan what the command line composes; return the exit status."""
    return answer("rlsp-plan", partial(_answer, arguments))


def _answer(arguments: Sequence[str] | None, console: Console) -> int:
    chosen = _parser().parse_args(arguments)
    for name in ("ranks", "prompt_tokens"):
        if (value := getattr(chosen, name)) is not None and value < 1:
            complain(f"rlsp-plan: --{name.replace('_', '-')}={value}: legal: an integer of at least 1")
            return UNUSABLE
    try:
        config = _composed(chosen)
    except RefusalError as refusal:
        complain("\n".join(["rlsp-plan: refused:", *(f"  {line}" for line in refusal.lines)]))
        return UNUSABLE
    work = Work.full(config, chosen.prompt_tokens or config.task.max_prompt_tokens or _PROMPT_TOKENS)
    if chosen.ranks is None:
        plans, refused = [plan(config, work)], []
        _show(plans[0], console)
    else:
        tried = list(layouts(config, chosen.ranks))
        plans = [plan(at, work) for at, why in tried if not why]
        refused = [(_word(at), why) for at, why in tried if why]
        _show_layouts(plans, refused, console)
    if not config.numerics.routes.strict:
        console.print("numerics: what native routes send through Megatron-Core's own layers is not planned")
    return 0 if chosen.json is None else _write(chosen.json, plans)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlsp-plan",
        description="Predict memory and bytes moved, by rank, from the overrides that `rlsp` takes.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for rlsp")
    parser.add_argument("--ranks", type=int, metavar="N", help="a table of all training layouts of N ranks")
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        metavar="N",
        help=f"length of every prompt (task.max_prompt_tokens, or {_PROMPT_TOKENS})",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every rank's figures there, too")
    parser.add_argument("--config-dir", metavar="FOLDER", help="a folder of one's own options, as for rlsp")
    return parser


def _composed(chosen: argparse.Namespace) -> Config:
    where = argparse.Namespace(config_path=None, config_name=None, config_dir=chosen.config_dir)
    with open_composer(where) as composer:
        # Any layout of so many ranks will do to compose: each is checked by itself afterwards.
        sizes = {"dp": 1, "cp": chosen.ranks, "tp": 1, "sp": 1} if chosen.ranks is not None else {}
        layout = [f"parallel.{axis}={size}" for axis, size in sizes.items()]
        return checked(composer.require_run([*spelt_out(chosen.overrides), *layout, "hydra.mode=RUN"]))


def _unit(largest: int) -> tuple[str, int]:
    """Choose the largest unit of which there is one."""
    return next(((name, size) for name, size in _UNITS.items() if largest >= size), ("KiB", _UNITS["KiB"]))


def _show(of: Plan, console: Console) -> None:
    config, layout = of.config, of.config.rollout_layout
    console.print(
        f"{config.model.name}, {of.word}, {layout.engines} engines of tp {layout.tp}, "
        f"{config.device.kind.name}; {len(of.work.prompts)} sequences of {max(of.work.lengths)} tokens"
    )
    need = of.largest
    unit, size = _unit(need.memory.peak)
    table = _table(f"memory of rank {need.rank}, the largest of {len(of.needs)}", "", unit)
    for name, octets in need.plain()["memory_bytes"].items():
        table.add_row(name, f"{octets / size:.2f}")
    console.print(table)
    need = of.busiest
    title = f"received by rank {need.rank}, the most of all, in one rollout with its updates"
    unit, size = _unit(need.received)
    table = _table(title, "phase", "axis", "operation", unit)
    for row in need.plain()["received_bytes"]:
        table.add_row(row["phase"], row["axis"], row["operation"], f"{row['bytes'] / size:.2f}")
    table.add_row("all", "", "", f"{need.received / size:.2f}")
    console.print(table)


def _show_layouts(plans: list[Plan], refused: list[tuple[str, tuple[str, ...]]], console: Console) -> None:
    """Show a row a layout: memory of its largest rank, and what its busiest rank receives."""
    held_in, held_size = _unit(max((of.largest.memory.peak for of in plans), default=0))
    moved_in, moved_size = _unit(max((of.busiest.received for of in plans), default=0))
    table = _table(
        f"{held_in} of the largest rank; {moved_in} that the busiest receives in a rollout with its updates",
        *("layout", "weights", "optimizer", "sums", "activations", "logits", "cache", "peak"),
        *("hand-over", "generating", "train tp", "train cp", "train sums", "all"),
    )
    for of in sorted(plans, key=lambda of: of.largest.memory.peak):
        memory, need = of.largest.memory, of.busiest
        train = need.by_axis("train", "old_logprob")
        held = (memory.weights + memory.reference + memory.engine, memory.optimizer, memory.sums)
        sizes = (*held, memory.activations, memory.logits, memory.cache, memory.peak)
        moved = (
            need.by_axis("sync").total(),
            need.by_axis("rollout").total(),
            *(train["tp"], train["cp"], train["token"] + train["world"] + train["dp"]),
            need.received,
        )
        cells = [f"{n / held_size:.2f}" for n in sizes] + [f"{n / moved_size:.2f}" for n in moved]
        table.add_row(of.word, *cells)
    console.print(table)
    for word, why in refused:
        console.print(f"{word}: refused: {'; '.join(why)}")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", min_width=len(title))
    for column in columns:
        numeric = column not in ("", "phase", "axis", "operation", "layout")
        table.add_column(column, justify="right" if numeric else "left")
    return table


def _write(path: Path, plans: list[Plan]) -> int:
    text = json.dumps({"plans": [of.plain() for of in plans]}, indent=2, allow_nan=False)
    try:
        path.write_text(text + "\n")
    except OSError as error:
        complain(f"rlsp-plan: cannot write {path}: {error.strerror or error}")
        return UNUSABLE
    return 0


def _word(config: Config) -> str:
    at = config.parallel
    return layout_word(cp=at.cp, tp=at.tp, sp=at.sp, dp=at.dp)
