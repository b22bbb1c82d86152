"""The page's pictures of the layout: where each rank stands, what it holds, which engine it is in."""

from __future__ import annotations

from xml.etree.ElementTree import Element

from rlsp.layout import virtual_shards, zigzag_chunks
from rlsp.report.manifest import EngineLayout, Manifest, RankPlace, TrainingLayout
from rlsp.report.page_elements import NOTHING, Content, node, table
from rlsp.report.page_source import Source

_STRIP_CELL, _STRIP_HEIGHT = 22, 18
# A wider strip would not fit a phone; the words beside it say the same.
_STRIP_CHUNKS = 16
_ENGINE_COLOURS = 6


def layout(source: Source) -> Element:
    """Draw the training ranks as a grid and the engines over the same ranks."""
    manifest = source.run.manifest
    if manifest is None:
        return node("p", "No manifest says what the layout was.", class_="none")
    training, rollout = manifest.layout, manifest.rollout_layout
    words = (
        f"{_count(len(training.table), 'rank')}: dp={training.dp} × cp={training.cp} × tp={training.tp}, "
        f"sequence parallelism {'over tp' if training.sp > 1 else 'off'}. Rollout: "
        f"{_count(rollout.engines, 'engine')} of tp={rollout.tp}."
    )
    return node("div", node("p", words), _grid(source, manifest), *_rules(training), _engines(rollout))


def _grid(source: Source, manifest: Manifest) -> Element:
    """Draw dp × cp as rows and tp as columns."""
    training = manifest.layout
    engines = {place.rank: place.engine for place in manifest.rollout_layout.table}
    places: dict[tuple[int, int], dict[int, RankPlace]] = {}
    for place in training.table:
        places.setdefault((place.dp, place.cp), {})[place.tp] = place
    columns = sorted({place.tp for place in training.table})
    head: list[Content] = ["tokens", *(_column(source, training.tp, tp) for tp in columns)]
    rows: list[list[Content]] = [
        [
            _sequence(training, *at),
            *(_rank(row[tp], training, engines) if tp in row else NOTHING for tp in columns),
        ]
        for at, row in sorted(places.items())
    ]
    return table("Training: data (dp) and context (cp) by tensor axis (tp)", head, rows, kind="grid")


def _sequence(training: TrainingLayout, dp: int, cp: int) -> Element:
    """Show which chunks of a sequence a row of ranks holds."""
    name = node("div", f"dp {dp} · cp {cp}")
    if training.cp == 1:
        return node("div", name, node("small", "whole sequences"))
    held, chunks = zigzag_chunks(training.cp, cp), 2 * training.cp
    words = node("small", f"chunks {held[0]} and {held[1]} of 0–{chunks - 1}")
    if chunks > _STRIP_CHUNKS:
        return node("div", name, words)
    size = {"viewBox": f"0 0 {chunks * _STRIP_CELL} {_STRIP_HEIGHT}", "width": chunks * _STRIP_CELL}
    strip = node("svg", **size, height=_STRIP_HEIGHT, aria_hidden="true", class_="strip")
    for chunk in range(chunks):
        left, kind = chunk * _STRIP_CELL, "held" if chunk in held else "free"
        shape = {"x": left + 1, "y": 1, "width": _STRIP_CELL - 2, "height": _STRIP_HEIGHT - 2}
        strip.append(node("rect", **shape, class_=kind))
        middle = {"x": left + _STRIP_CELL / 2, "y": _STRIP_HEIGHT / 2}
        strip.append(node("text", str(chunk), **middle, dy="0.35em", class_=f"middle {kind}"))
    return node("div", name, strip, words)


def _rank(place: RankPlace, training: TrainingLayout, engines: dict[int, int | None]) -> Element:
    engine = engines.get(place.rank)
    said = "idle in rollouts" if engine is None else f"engine {engine}"
    colour = "idle" if engine is None else f"e{engine % _ENGINE_COLOURS}"
    shard = node("small", f"SP shard {place.sp}") if training.sp > 1 else None
    return node(
        "div", node("strong", f"rank {place.rank}"), shard, node("small", said), class_=f"rank {colour}"
    )


def _column(source: Source, width: int, tp: int) -> Element:
    """Say which virtual shards of every sharded weight a column of ranks owns."""
    virtual = source.setting("numerics", "virtual_tp")
    words = None
    if isinstance(virtual, int) and virtual % width == 0:
        owned = virtual_shards(width, tp, virtual)
        words = f"shard {owned[0]}" if len(owned) == 1 else f"shards {owned[0]}–{owned[-1]}"
    return node("div", f"tp {tp}", node("small", words))


def _rules(training: TrainingLayout) -> list[Element]:
    """Say what the picture means."""
    said = ["Shards are the virtual shards of every weight that tensor parallelism cuts."]
    if training.cp > 1:
        said.append("Zigzag: each context-parallel rank holds one early and one late chunk, as in Megatron.")
    if training.sp > 1:
        said.append("SP shard: the part of those tokens whose residual stream the rank keeps.")
    return [node("p", " ".join(said), class_="hint")]


def _engines(rollout: EngineLayout) -> Element:
    """Lay the engines out side by side, each with its ranks."""
    members: dict[int | None, list[str]] = {}
    for place in rollout.table:
        members.setdefault(place.engine, []).append(f"rank {place.rank}")
    items = []
    for engine in sorted(members, key=lambda number: (number is None, number or 0)):
        name = "idle" if engine is None else f"engine {engine}"
        colour = "idle" if engine is None else f"e{engine % _ENGINE_COLOURS}"
        items.append(
            node(
                "li", node("strong", name), node("small", ", ".join(members[engine])), class_=f"rank {colour}"
            )
        )
    title = node("h3", "Rollout: engines over the same ranks")
    return node("div", title, node("ul", *items, class_="engines"))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
