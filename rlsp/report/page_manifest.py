"""The page's account of what ran: the manifest in words, and the digests that runs are compared by."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from shlex import join
from xml.etree.ElementTree import Element

from rlsp.report.manifest import Manifest
from rlsp.report.page_elements import Content, folded, node, table
from rlsp.report.page_source import Source

_MAIN_PACKAGES = ("rlsp", "torch", "megatron-core", "numpy", "safetensors", "hydra-core")
_GIB = 2**30
_DIGEST_ROWS = 250


def provenance(source: Source) -> Element:
    """Show what ran, where, by which command and under which contract."""
    manifest = source.run.manifest
    if manifest is None:
        return node("p", "No manifest says what ran.", class_="none")
    return node(
        "div",
        node("h3", "Command line"),
        _shell(join(manifest.command_line)),
        node(
            "div",
            _facts("The run", _run(manifest)),
            _facts("Code and machine", _machine(manifest)),
            _facts("Packages", {name: manifest.packages.get(name, "not there") for name in _MAIN_PACKAGES}),
            _facts("Switches of the environment", manifest.environment),
            class_="columns",
        ),
        folded(f"All {len(manifest.packages)} packages", _facts("All packages", manifest.packages)),
        _startup(manifest),
        folded("Composed configuration", _json(manifest.config)),
    )


def digests(source: Source) -> Element:
    """Show the digests that another run must have, too, if its bits are the same."""
    manifest, records = source.run.manifest, sorted(source.run.records.items())
    startup = manifest.startup if manifest else None
    known: dict[str, str] = {"initial weights": startup.initial_weights_digest} if startup else {}
    if records:
        last = records[-1][1]
        known["weights at the end"] = last.weights_digest
        known["optimizer at the end"] = last.optimizer_digest
        known["last gradient"] = last.gradient_digest
        known["last gradient norm, bits"] = last.gradient_norm_bits
    if not known:
        return node("p", "No digest was recorded.", class_="none")
    every = max(1, -(-len(records) // _DIGEST_ROWS))
    rows: list[list[Content]] = [
        [
            str(at),
            node("code", record.gradient_norm_bits),
            *(node("code", text) for text in (record.gradient_digest, record.optimizer_digest)),
            node("code", record.weights_digest),
        ]
        for at, record in records[::every]
    ]
    caption = "After each rollout's last update" + (f", one rollout in {every}" if every > 1 else "")
    head = ("rollout", "gradient norm, bits", "gradient", "optimizer", "weights")
    more = folded("Of every rollout", table(caption, head, rows, kind="hashes")) if rows else None
    return node("div", _facts("Where the run began and ended", known, code=True), more)


def elapsed(manifest: Manifest) -> str:
    """Say how long a run took."""
    if manifest.ended_at is None:
        return "never ended"
    try:
        took = datetime.fromisoformat(manifest.ended_at) - datetime.fromisoformat(manifest.started_at)
    except (ValueError, TypeError):
        return "unknown"
    return f"{took.total_seconds():.1f} s"


def _run(manifest: Manifest) -> dict[str, str]:
    startup = manifest.startup
    return {
        "run id": manifest.run_id,
        "status": manifest.status.value,
        "started": manifest.started_at,
        "ended": manifest.ended_at or "–",
        "overrides": join(manifest.overrides) or "none",
        **{name: str(seed) for name, seed in manifest.seeds.items()},
        "entropy coefficient": f"{manifest.entropy_coef:g}",
        "contract hash": startup.contract_hash if startup else "the run never got there",
        "config hash": manifest.config_hash,
        "task hash": startup.data_hash if startup else "–",
        "tokenizer": startup.tokenizer if startup else "–",
        "tokenizer hash": startup.tokenizer_hash if startup else "–",
        "chat template hash": (startup.chat_template_hash if startup else None) or "–",
    }


def _machine(manifest: Manifest) -> dict[str, str]:
    code, machine = manifest.code, manifest.hardware
    state = {None: "unknown", False: "clean", True: f"changed, difference {code.dirty_diff_hash}"}
    return {
        "code revision": code.revision,
        "work tree": state[code.dirty],
        "source hash": code.source_hash,
        "system": f"{machine.system} {machine.kernel}, {machine.machine}",
        "processor": f"{machine.cpu}, {machine.cpus_available} cores",
        "vector units": ", ".join(machine.cpu_flags) or "none listed",
        "memory": f"{machine.memory_bytes / _GIB:.1f} GiB",
    }


_STARTUP = ("contract", "weight_source", "paths", "certificate", "kernels", "agreement")


def _startup(manifest: Manifest) -> Content:
    """Show what the ranks agreed on, as it stands in the manifest."""
    if manifest.startup is None:
        return node("p", "The ranks never agreed on a start: there are no start-up facts.", class_="warning")
    startup = manifest.startup.model_dump(mode="json")
    shown = {name: startup[name] for name in _STARTUP if startup[name] is not None}
    return folded("Contract, kernel paths, certificate and agreement of the ranks", _json(shown))


def _facts(caption: str, facts: Mapping[str, str], *, code: bool = False) -> Element:
    rows = [(name, node("code", value) if code else value) for name, value in facts.items()]
    return table(caption, (), rows, kind="facts")


def _json(value: object) -> Element:
    return _shell(json.dumps(value, indent=2, ensure_ascii=False))


def _shell(text: str) -> Element:
    return node("pre", node("code", text), tabindex=0)
