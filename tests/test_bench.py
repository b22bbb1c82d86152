"""scripts/bench: its names, what it writes where nothing could be measured, and its fits."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
NAMES = {
    "step_strict_over_native_cp2_tp4_sp4": 1.0,
    "step_strict_over_native_cp1_tp1_sp1": 1.05,
    "step_strict_over_native_same_attention": 1.3,
    "reduce_scatter_over_gloo": 0.6,
    "all_reduce_over_gloo": 1.1,
    "grpo_step_over_trl": 0.95,
    "vllm_over_rollout_tokens_8": 0.83,
    "vllm_over_rollout_tokens_64": 1.0,
    "launch_to_first_token_s": 6.0,
    "g11_probe_s": 40.0,
    "evidence_share": 0.03,
    "logprob_memory_over_materialised": 0.125,
}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import benchmarks.__main__ as main

    return main


def test_the_list_names_every_figure_with_its_reach(
    bench: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {figure.name: figure.reach for figure in bench.figures()} == NAMES
    assert bench.main(["--list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == [*NAMES, "tables"]


def run(
    bench: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    path: Path,
    measure: Callable[[int], tuple[float, str]],
) -> tuple[int, dict[str, object]]:
    first = replace(bench.figures()[0], measure=measure)
    monkeypatch.setattr(bench, "figures", lambda: (first,))
    status = bench.main(["--json", str(path), "--only", first.name, "--repeats", "2"])
    (row,) = json.loads(path.read_text())["figures"]
    return status, row


@pytest.mark.parametrize(("value", "met"), [(0.9, True), (1.0, True), (1.1, False)])
def test_a_figure_is_met_up_to_its_reach(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: float, met: bool
) -> None:
    status, row = run(
        bench, monkeypatch, tmp_path / "out.json", lambda repeats: (value, f"{repeats} repeats")
    )
    assert status == 0
    assert row == {
        "name": "step_strict_over_native_cp2_tp4_sp4",
        "value": value,
        "reach": 1.0,
        "met": met,
        "how": "2 repeats",
    }


def test_what_cannot_be_measured_is_null_with_the_reason(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(_: int) -> tuple[float, str]:
        raise RuntimeError("no peer here")

    status, row = run(bench, monkeypatch, tmp_path / "out.json", broken)
    assert status == 1
    assert (row["value"], row["met"], row["how"]) == (None, None, "not measured: no peer here")


def test_a_power_law_is_fitted_on_logarithms(bench: ModuleType) -> None:
    from benchmarks.scaling import exponent

    assert exponent({n: 3.0 * n**1.7 for n in (256, 512, 1024, 4096)}) == pytest.approx(1.7)


def test_two_sides_work_in_turn_and_an_end_is_noticed(bench: ModuleType, tmp_path: Path) -> None:
    from benchmarks.turns import Turn

    order: list[str] = []
    one, two = Turn(tmp_path, "one", "two"), Turn(tmp_path, "two", "one")

    def second() -> None:
        for _ in range(2):
            two.timed(lambda: order.append("two"))
        two.end()

    thread = threading.Thread(target=second)
    thread.start()
    one.begin()
    for _ in range(2):
        one.timed(lambda: order.append("one"))
    thread.join()
    one.end()
    with pytest.raises(RuntimeError, match="which has ended"):
        two.wait()
    assert order == ["one", "two", "one", "two"]
    assert len(json.loads((tmp_path / "two.json").read_text())) == 2
