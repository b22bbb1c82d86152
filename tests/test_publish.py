"""A published suite says what the runs' own sealed files say, and refuses runs that were changed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from test_live_gates import judged

from rlsp.cli.publish import main
from rlsp.report.suite import pair, read_arm, sentences


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory, compose: Any) -> Path:
    """Two arms with two rollouts each, as a sweep leaves them."""
    folder = tmp_path_factory.mktemp("sweep")
    for number, numerics in enumerate(("native", "strict")):
        overrides = (f"name={numerics}", f"numerics={numerics}", "num_rollouts=2", "entropy_coef=0.01")
        judged(folder / str(number), compose, *overrides, "parallel=cp1_tp1_sp1", "rollout.ignore_eos=true")
    return folder


def test_the_table_has_a_row_an_arm_with_the_figures_of_its_own_files(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(sweep), "--out", str(tmp_path / "out"), "--pair", "native,strict"]) == 0
    rows = json.loads((tmp_path / "out" / "table.json").read_text())["arms"]
    assert [row["name"] for row in rows] == ["native", "strict"]
    for number, row in enumerate(rows):
        total = json.loads((sweep / str(number) / "consistency.json").read_text())["total"]
        for key in ("active_tokens", "mismatched_tokens", "mismatched_rows", "max_abs", "kl_k3"):
            assert row[key] == total[key]
    assert rows[0]["mismatched_tokens"] > 0 == rows[1]["mismatched_tokens"]
    page = (tmp_path / "out" / "README.md").read_text()
    assert "strict: 2 of 2 rollouts without any difference (64 tokens, 0 log-probabilities" in page
    assert "strict against native, over 2 common rollouts" in page
    assert page.split("commands:")[1].strip().startswith("rlsp")
    assert "wrote README.md" in capsys.readouterr().out


def test_every_figure_is_a_picture_of_its_own_that_the_page_shows(sweep: Path, tmp_path: Path) -> None:
    main([str(sweep), "--out", str(tmp_path)])
    figures = sorted(tmp_path.glob("*.svg"))
    page = (tmp_path / "README.md").read_text()
    assert len(figures) == 4
    for figure in figures:
        root = ElementTree.parse(figure).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert {"native", "strict"} <= {element.text for element in root}
        assert f"({figure.name})" in page


def test_a_changed_run_is_refused_and_nothing_is_written(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "run"
    for file in (path for path in (sweep / "1").rglob("*") if path.is_file()):
        (copy / file.relative_to(sweep / "1")).parent.mkdir(parents=True, exist_ok=True)
        (copy / file.relative_to(sweep / "1")).write_bytes(file.read_bytes())
    assert main([str(copy), "--out", str(tmp_path / "good")]) == 0
    with (copy / "metrics.jsonl").open("a") as file:
        file.write("\n")
    assert main([str(copy), "--out", str(tmp_path / "bad")]) == 1
    assert "metrics.jsonl was changed after the run was sealed" in capsys.readouterr().err
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize("text", ["native", "native,none", "native,strict,native"])
def test_a_pair_that_names_no_two_arms_is_refused(
    sweep: Path, tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(sweep), "--out", str(tmp_path / "out"), "--pair", text]) == 2
    assert f"--pair {text}: legal: two of native, strict" in capsys.readouterr().err


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    assert main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2


def test_the_sentences_follow_the_figures(sweep: Path) -> None:
    native, strict = (read_arm(sweep / name) for name in ("0", "1"))
    said = "\n".join(sentences([native, replace(strict, clean_rollouts=1, mismatched_tokens=3)], []))
    assert "strict: 1 of 2 rollouts without any difference (64 tokens, 3 log-probabilities" in said
    assert "end with the same weights" not in said
    assert "native and strict end with the same weights" in "\n".join(
        sentences([replace(native, weights_digest=strict.weights_digest), strict], [])
    )


def test_pairs_compare_rollout_by_rollout(sweep: Path) -> None:
    native, strict = (read_arm(sweep / name) for name in ("0", "1"))
    curves = {"reward/mean": ((0, 1.0), (1, 2.0)), "time/total_s": ((0, 2.0), (1, 4.0))}
    other = {"reward/mean": ((0, 1.5), (1, 3.5)), "time/total_s": ((0, 1.0), (1, 3.0))}
    found = pair(replace(native, curves=curves), replace(strict, curves=other))
    assert (found.reward_difference, found.reward_error, found.step_ratio) == (1.0, 0.5, 0.625)
