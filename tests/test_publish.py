"""A published suite says what the runs' own sealed files say, and refuses runs that were changed."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from command import raising
from launch_owner import environment
from test_live_gates import judged

from rlsp.cli.publish import main
from rlsp.config import ConfigError, Violation
from rlsp.report import suite_arms
from rlsp.report.suite import sentences
from rlsp.report.suite_arms import read_arm
from rlsp.report.suite_page import _figures
from rlsp.report.suite_pairs import UnlikePairError, pair
from rlsp.report.sweep import JobOutcome, summarise


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
    assert len(figures) == 7
    for figure in figures:
        root = ElementTree.parse(figure).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert {"native", "strict"} <= {element.text for element in root}
        assert f"({figure.name})" in page


def test_a_changed_run_is_refused_and_nothing_is_written(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(sweep / "1", tmp_path / "run")
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


def test_every_folder_without_runs_is_refused_by_name(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    arguments = [str(sweep), str(empty), str(tmp_path / "none"), "--out", str(tmp_path / "out")]
    assert main(arguments) == 2
    assert f"no run folder there: {empty}, {tmp_path / 'none'}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_jobs_of_a_sweep_that_left_no_run_are_named(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(sweep, tmp_path / "swept")
    shutil.move(copy / "1", copy / "deep" / "1")
    places = {0: copy / "0", 1: copy / "deep" / "1"}
    outcomes = [JobOutcome(number, (), 0, places[number]) for number in places]
    absent = ((2, 2, "seed=-1"), (3, 1, "seed=3"), (4, None, "seed=4"))
    outcomes += [JobOutcome(at, (text,), status, copy / str(at)) for at, status, text in absent]
    summarise(copy, outcomes)
    assert main([str(copy), "--out", str(tmp_path / "out")]) == 0
    lines = [
        f"swept, job {at}, {how}: seed={seed}"
        for at, how, seed in ((2, "refused", -1), (3, "crashed", 3), (4, "not started", 4))
    ]
    out, page = capsys.readouterr().out, (tmp_path / "out" / "README.md").read_text()
    for line in lines:
        assert f"left out: {line}\n" in out
        assert f"- Left out: {line}.\n" in page
    said = json.loads((tmp_path / "out" / "table.json").read_text())
    assert said["left_out"] == lines
    assert [row["name"] for row in said["arms"]] == ["native", "strict"]


def test_arms_of_one_name_are_refused(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(sweep / "1", tmp_path / "again")
    assert main([str(sweep), str(copy), "--out", str(tmp_path / "out")]) == 2
    assert "several arms are named strict: legal: one run a name" in capsys.readouterr().err


def test_a_pair_of_different_workloads_is_refused_with_what_differs(
    sweep: Path, tmp_path: Path, compose: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    judged(tmp_path / "other", compose, "name=other", "seed=3", "numerics=native", "rollout.ignore_eos=true")
    arguments = [str(sweep), str(tmp_path / "other"), "--out", str(tmp_path / "out")]
    assert main([*arguments, "--pair", "strict,other"]) == 2
    said = capsys.readouterr().err
    assert "strict and other are no pair: " in said
    for line in (
        "seed is 0 against 3",
        "entropy_coef is 0.01 against 0.0",
        "layout is cp1_tp1_sp1 against cp1_tp2_sp2",
    ):
        assert line in said
    assert "num_rollouts" not in said
    assert "numerics.routes" not in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"source_hash": "other"}, "code is "),
        ({"data_hash": "other"}, "data is "),
        ({"processor": "other"}, "processor is "),
        ({"packages": {"torch": "0", "megatron-core": "0"}}, "torch is "),
        ({"placement": {"layout": "cp9_tp1_sp1"}}, "layout is "),
    ],
)
def test_a_pair_needs_the_same_code_data_machine_and_placement(
    sweep: Path, change: dict[str, Any], said: str
) -> None:
    native, strict = (read_arm(sweep / name) for name in ("0", "1"))
    with pytest.raises(UnlikePairError, match=f"native and strict are no pair: .*{said}"):
        pair(native, replace(strict, **change))


def test_the_page_says_which_code_ran_on_what(sweep: Path, tmp_path: Path) -> None:
    assert main([str(sweep), "--out", str(tmp_path)]) == 0
    stored = json.loads((sweep / "0" / "manifest.json").read_text())
    (said,) = [line for line in (tmp_path / "README.md").read_text().splitlines() if "megatron-core" in line]
    assert said.startswith(f"- native, strict: source {stored['code']['source_hash'][:8]}, revision ")
    for text in (stored["code"]["revision"][:12], stored["hardware"]["cpu"], stored["packages"]["torch"]):
        assert text in said


def test_what_cannot_be_written_or_read_is_one_line_and_no_traceback(
    sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main([str(sweep), "--out", str(tmp_path / "file" / "out")]) == 1
    assert capsys.readouterr().err.startswith("rlsp-publish: cannot write ")
    other_version = ConfigError([Violation("seed", 0, "a key of this version")])
    monkeypatch.setattr(suite_arms, "from_plain", raising(other_version))
    assert main([str(sweep), "--out", str(tmp_path / "out")]) == 1
    assert "manifest.json has no config of this version: " in capsys.readouterr().err


def test_captions_speak_of_means_only_where_lines_are_means(sweep: Path) -> None:
    arm = read_arm(sweep / "1")
    points = tuple((at, 1.0) for at in range(21))
    long = replace(arm, rollouts=21, curves=dict.fromkeys(arm.curves, points))
    for name in ("reward.svg", "seconds.svg"):
        assert "means" not in _figures([arm])[name][0]
        assert ", means of ten rollouts: strict" in _figures([long])[name][0]


def test_a_value_that_is_not_finite_stays_in_curve_and_figures(sweep: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(sweep / "1", tmp_path / "run")
    path = copy / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1].update({"reward/mean": "NaN", "time/total_s": "Infinity"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    curves = suite_arms._curves(copy)
    assert math.isnan(curves["reward/mean"][1][1])
    assert curves["time/total_s"][1] == (1, math.inf)
    arm = replace(read_arm(sweep / "1"), curves=curves)
    assert "×".encode() in _figures([arm])["reward.svg"][1]
    found = pair(arm, arm)
    assert math.isnan(found.reward_difference)
    assert math.isnan(found.reward_error)
    assert math.isnan(found.step_ratio)


def test_the_answer_goes_to_a_reader_that_leaves_and_to_a_screen_without_unicode(
    sweep: Path, tmp_path: Path
) -> None:
    line = f"{sys.executable} -m rlsp.cli.publish {sweep} --title Größe --out {tmp_path / 'out'}"
    for pipe, more in ((" | true", {}), ("", {"PYTHONIOENCODING": "ascii"})):
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", line + pipe],
            check=False,
            env={**environment(), **more},
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (0, "")


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
