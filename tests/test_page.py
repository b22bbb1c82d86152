from __future__ import annotations

import json
import math
import os
import re
import shutil
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from xml.etree.ElementTree import tostring

import numpy as np
import pytest
from report_fixtures import RUN_ID, make_digests, make_facts, make_metrics, make_tensors, write_run

from rlsp.report import page
from rlsp.report.evidence import collect
from rlsp.report.files import EvidenceError
from rlsp.report.follow import Follower
from rlsp.report.gates import Verdict
from rlsp.report.metrics import METRICS
from rlsp.report.page import PAGE_NAME
from rlsp.report.page_charts import CHARTS
from rlsp.report.page_elements import node
from rlsp.report.verdict import judge, seal, verify

STYLE = Path(page.__file__).with_name("page.css")
HOSTILE = "</title></style><script>alert(1)</script><img src=x onerror='alert(2)'>\" onload=\"alert(3)&lt;"


class Outline(HTMLParser):
    """What a browser would make of a page: its elements, and its text by section."""

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self._place = "head"
        self.feed(content.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("header", "style", "footer"):
            self._place = tag
        elif tag == "section":
            self._place = str(dict(attrs)["aria-labelledby"])

    def handle_data(self, data: str) -> None:
        self.text[self._place] = self.text.get(self._place, "") + data + " "

    def attributes(self, name: str) -> list[str]:
        return [str(attributes[name]) for _, attributes in self.elements if name in attributes]


def outline(run_dir: Path) -> Outline:
    return Outline((run_dir / PAGE_NAME).read_bytes())


def add_metrics(run_dir: Path, **changes: float | str) -> Path:
    """Give every row all metrics; `changes` set some in every row, by name with __ for the slash."""
    path = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        tensors = make_tensors(row["rollout"])
        facts = make_facts(row["rollout"], tensors)
        row.update(make_metrics(tensors, facts, make_digests(row["rollout"], facts)))
        for number, name in enumerate(METRICS):
            row.setdefault(name, 0.1 + abs(math.sin(number + row["rollout"])))
        row |= {name.replace("__", "/"): value for name, value in changes.items()}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_dir


@pytest.fixture(scope="module")
def passed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = add_metrics(write_run(tmp_path_factory.mktemp("passed") / "run"))
    assert seal(run_dir).verdict is Verdict.PASS
    return run_dir


# What it says -----------------------------------------------------------------


def test_the_verdict_comes_first_with_the_run_and_what_was_compared(passed):
    text = outline(passed).text["header"]
    assert text.split()[:3] == ["✓", "PASS", "synthetic"]
    assert RUN_ID in text
    assert "155 tokens compared" in text
    assert "0 log-probabilities and 0 rows of logits differ in a bit" in text
    assert "3 of 3" in text


def test_a_failed_run_shows_its_reasons_and_every_gate(tmp_path):
    def change(index, tensors):
        if index == 1:
            other = np.nextafter(tensors["train_logprob"], np.float32(0))
            tensors["train_logprob"] = np.where(tensors["active_mask"], other, np.float32(0))

    judgement = seal(write_run(tmp_path / "run", tensors=change))
    found = outline(tmp_path / "run")
    assert "✗ FAIL" in found.text["header"]
    for reason in judgement.reasons:
        assert reason in found.text["header"]
    for gate in judgement.gates:
        assert re.search(rf"{gate.name}\s+. {gate.verdict.value}\s+judged", found.text["gates"])
    assert "mismatched tokens: first 0, last 0, smallest 0, largest 62." in " ".join(
        found.attributes("aria-label")
    )


def test_a_gate_that_does_not_count_says_so(passed, tmp_path):
    judged = judge(passed)
    gates = tuple(gate.model_copy(update={"judged": gate.name != "rows"}) for gate in judged.gates)
    page.write_page(tmp_path, collect(passed), judged.verdict, judged.reasons, gates)
    assert "Reported without being judged: rows." in outline(tmp_path).text["header"]
    text = outline(tmp_path).text["gates"]
    assert re.search(r"rows\s+✓ PASS\s+reported only", text)
    assert re.search(r"bits\s+✓ PASS\s+judged", text)


def test_every_chart_has_a_title_a_unit_an_alternative_and_a_table(passed):
    found = outline(passed)
    figures = [tag for tag, _ in found.elements if tag == "figure"]
    images = [attributes for _, attributes in found.elements if attributes.get("role") == "img"]
    assert len(figures) == len(images) == len(CHARTS)
    assert all("by rollout. " in str(attributes["aria-label"]) for attributes in images)
    for chart in CHARTS:
        assert f"{chart.title}, {chart.unit} ({chart.source})" in found.text["charts"]


def test_a_chart_of_what_a_run_need_not_have_is_left_out(tmp_path):
    seal(write_run(tmp_path / "run"))
    text = outline(tmp_path / "run").text["charts"]
    assert "Importance weights" not in text
    assert "No values: train/gradient_norm." in text


def test_what_the_parts_of_the_time_leave_of_the_total_is_shown(tmp_path):
    times = {"sync": 1.0, "rollout": 2.0, "train": 4.0, "total": 7.5}
    run_dir = write_run(tmp_path / "run")
    path = run_dir / "metrics.jsonl"
    rows = [
        json.loads(line) | {f"time/{k}_s": v for k, v in times.items()}
        for line in path.read_text().splitlines()
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    seal(run_dir)
    told = " ".join(outline(run_dir).attributes("aria-label"))
    assert "sync: 1 throughout. rollout: 2 throughout. train: 4 throughout. other: 0.5 throughout." in told


def test_headings_descend_one_level_at_a_time_and_tables_have_captions(passed):
    tags = [tag for tag, _ in outline(passed).elements]
    levels = [int(tag[1]) for tag in tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert tags.count("table") == tags.count("caption") > 10


def test_the_layout_shows_ranks_chunks_shards_and_engines(passed):
    text = " ".join(outline(passed).text["layout"].split())
    assert "4 ranks: dp=1 × cp=2 × tp=2, sequence parallelism over tp. Rollout: 3 engines of tp=1." in text
    assert "tp 0 shards 0–3 tp 1 shards 4–7" in text
    assert "dp 0 · cp 0 0 1 2 3 chunks 0 and 3 of 0–3 rank 0 SP shard 0 engine 0" in text
    assert "dp 0 · cp 1 0 1 2 3 chunks 1 and 2 of 0–3 rank 2 SP shard 0 engine 2" in text
    assert "rank 3 SP shard 1 idle in rollouts" in text


def test_routes_are_summed_over_rollouts_and_a_fallback_shows(tmp_path):
    def change(index, facts):
        if index == 2:
            facts["routes"]["train.attention"] = {"strict": 5, "native": 7}

    seal(write_run(tmp_path / "run", facts=change))
    text = " ".join(outline(tmp_path / "run").text["routes"].split())
    assert "train.attention strict 29 native: 7" in text
    assert "rollout.attention strict 120 none" in text


def test_the_manifest_and_the_digests_are_told_whole(passed):
    found = outline(passed)
    manifest = json.loads((passed / "manifest.json").read_text())
    said = found.text["provenance"]
    for value in (
        manifest["config_hash"],
        manifest["startup"]["contract_hash"],
        manifest["code"]["revision"],
        manifest["started_at"],
        manifest["hardware"]["cpu"],
        "rlsp seed=7",
    ):
        assert value in said
    records = json.loads((passed / "consistency.json").read_text())["rollouts"]
    for record in records:
        for key in ("weights_digest", "optimizer_digest", "gradient_digest", "gradient_norm_bits"):
            assert record[key] in found.text["digests"]


# What it may do ---------------------------------------------------------------


def test_the_page_is_one_file_whose_policy_allows_its_own_style_alone(passed):
    found = outline(passed)
    (policy,) = [a["content"] for _, a in found.elements if a.get("http-equiv") == "Content-Security-Policy"]
    allowed = b64encode(sha256(STYLE.read_bytes()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{allowed}'; base-uri 'none'; form-action 'none'"
    assert not {"script", "link", "img", "iframe", "object", "base", "form"} & {t for t, _ in found.elements}
    for name in ("src", "href", "style", "srcset", "xlink:href"):
        assert found.attributes(name) == []
    assert "url(" not in STYLE.read_text()
    assert "@import" not in STYLE.read_text()


def test_hostile_names_overrides_and_reasons_stay_text(tmp_path):
    def facts(index, facts):
        facts["routes"][HOSTILE] = {HOSTILE: 1}

    config = {"name": HOSTILE, "tracker__tags": [HOSTILE]}
    run_dir = write_run(tmp_path / "run", facts=facts, config=config, aborted=HOSTILE)
    path = run_dir / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["run_id"] = HOSTILE
    manifest["command_line"] = manifest["overrides"] = [HOSTILE]
    for part in ("packages", "environment"):
        manifest[part][HOSTILE] = HOSTILE
    path.write_text(json.dumps(manifest))
    (run_dir / "rollouts" / "<b>x").write_bytes(b"")
    assert seal(run_dir, HOSTILE).verdict is Verdict.ABORTED
    found = outline(run_dir)
    assert not {"script", "img", "b"} & {tag for tag, _ in found.elements}
    assert not [name for _, attributes in found.elements for name in attributes if name.startswith("on")]
    assert HOSTILE in found.text["head"]
    assert f"aborted: {HOSTILE}" in found.text["header"]
    assert HOSTILE in found.text["routes"]
    assert HOSTILE in found.text["provenance"]
    assert "rollouts/<b>x belongs to no rollout" in found.text["damage"]


def test_characters_that_hide_or_reorder_others_are_written_out():
    made = tostring(node("p", "a\x00b\u202ec\ud800d\n", title="\u2066"), encoding="unicode", method="html")
    assert made == '<p title="\\u2066">a\\u0000b\\u202ec\\ud800d\n</p>'


def test_the_same_evidence_gives_the_same_bytes_wherever_the_folder_lies(passed, tmp_path):
    copy = Path(shutil.copytree(passed, tmp_path / "elsewhere"))
    seal(copy)
    assert (copy / PAGE_NAME).read_bytes() == (passed / PAGE_NAME).read_bytes()


# What it survives -------------------------------------------------------------


def test_a_run_that_never_began_a_rollout_has_a_page(tmp_path):
    run_dir = write_run(tmp_path / "run", rollouts=0, aborted="rank 1 was killed by SIGKILL")
    assert seal(run_dir, "rank 1 was killed by SIGKILL").verdict is Verdict.ABORTED
    found = outline(run_dir)
    assert "■ ABORTED" in found.text["header"]
    assert "aborted: rank 1 was killed by SIGKILL" in found.text["header"]
    assert "0 of 3" in found.text["header"]
    assert "No values: train/gradient_norm." in found.text["charts"]
    assert "could not be drawn" not in " ".join(found.text.values())


def test_an_aborted_run_shows_how_its_ranks_ended(tmp_path):
    run_dir = write_run(tmp_path / "run", rollouts=1, aborted="rank 1 was killed")
    (run_dir / "logs" / "abort.txt").write_bytes(
        b"rank 1 was killed\nrank  end\n0     Error \xff<b>\n1     killed\n"
    )
    seal(run_dir, "rank 1 was killed")
    assert "rank  end\n0     Error \ufffd<b>\n1     killed" in outline(run_dir).text["ranks"]


def test_a_log_that_is_a_pipe_is_not_waited_for(tmp_path):
    run_dir = write_run(tmp_path / "run", rollouts=1, aborted="rank 1 was killed")
    os.mkfifo(run_dir / "logs" / "abort.txt")
    assert seal(run_dir, "rank 1 was killed").verdict is Verdict.ABORTED
    assert "ranks" not in outline(run_dir).text
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(EvidenceError, match="it is a named pipe"):
        Follower(tmp_path).new_rows()


@pytest.mark.parametrize("damage", ["missing", "empty", "torn", "other"])
@pytest.mark.parametrize(
    "name",
    [
        "manifest.json",
        "consistency.json",
        "metrics.jsonl",
        "rollouts/00001.safetensors",
        "digests/00001.json",
    ],
)
def test_a_damaged_file_is_named_and_the_rest_is_shown(passed, tmp_path, name, damage):
    run_dir = Path(shutil.copytree(passed, tmp_path / "run"))
    path = run_dir / name
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "torn": whole[: len(whole) // 2], "other": b"[1]\n"}[damage])
    judgement = seal(run_dir)
    found = outline(run_dir)
    assert judgement.verdict is Verdict.FAIL
    assert "✗ FAIL" in found.text["header"]
    assert all(reason in found.text["header"] for reason in judgement.reasons)
    assert "could not be drawn" not in " ".join(found.text.values())
    assert {"gates", "charts", "layout", "routes", "provenance", "digests"} <= found.text.keys()


def test_values_that_are_not_finite_are_marked_and_named(tmp_path):
    run_dir = add_metrics(write_run(tmp_path / "run"), train__loss="NaN", reward__mean="-Infinity")
    seal(run_dir)
    said = outline(run_dir).text["charts"]
    assert "× loss: NaN in rollout 0, NaN in rollout 1, NaN in rollout 2" in said
    assert "× mean: -Infinity in rollout 0" in said


def test_rows_that_make_no_sense_are_left_out_of_the_charts(tmp_path):
    run_dir = write_run(tmp_path / "run")
    with (run_dir / "metrics.jsonl").open("a") as file:
        for row in ({}, {"rollout": "x"}, {"rollout": -1}, {"rollout": 10**400}, {"rollout": 1.5}):
            file.write(json.dumps({**row, "train/loss": 1, "reward/mean": [HOSTILE]}) + "\n")
        file.write(json.dumps({"rollout": 7, "train/loss": 10**400, "reward/mean": None}) + "\n")
    seal(run_dir)
    said = outline(run_dir).text["charts"]
    assert "could not be drawn" not in said
    assert "× loss: Infinity in rollout 7" in said


def test_a_page_of_two_hundred_rollouts_stays_below_a_megabyte(tmp_path):
    run_dir = write_run(tmp_path / "run", rollouts=200, config={"num_rollouts": 200})
    seal(add_metrics(run_dir))
    content = (run_dir / PAGE_NAME).read_bytes()
    assert len(content) < 1_000_000
    assert "199" in Outline(content).text["charts"]


def test_a_page_that_cannot_be_drawn_does_not_lose_the_verdict(passed, tmp_path, monkeypatch, caplog):
    run_dir = Path(shutil.copytree(passed, tmp_path / "run"))

    def broken(source):
        raise RuntimeError("<b>no</b>")

    monkeypatch.setattr(page, "render", broken)
    assert seal(run_dir).verdict is Verdict.PASS
    text = " ".join(outline(run_dir).text.values())
    assert "✓ PASS" in text
    assert "This page could not be drawn: RuntimeError: <b>no</b>" in text
    assert "report.html could not be drawn: RuntimeError" in caplog.text
    assert verify(run_dir).damage == ()


def test_a_section_that_cannot_be_drawn_leaves_the_others(passed, tmp_path, monkeypatch, caplog):
    run_dir = Path(shutil.copytree(passed, tmp_path / "run"))

    def broken(source):
        raise OverflowError("too large")

    monkeypatch.setattr(page, "charts", broken)
    assert seal(run_dir).verdict is Verdict.PASS
    found = outline(run_dir)
    assert "This section could not be drawn: OverflowError: too large" in found.text["charts"]
    assert "rank 3" in found.text["layout"]
    assert "report.html, Rollouts: could not be drawn" in caplog.text


def test_a_page_that_cannot_be_written_does_not_lose_the_verdict(passed, tmp_path, caplog):
    run_dir = Path(shutil.copytree(passed, tmp_path / "run"))
    (run_dir / PAGE_NAME).unlink()
    (run_dir / PAGE_NAME).mkdir()
    assert seal(run_dir).verdict is Verdict.PASS
    assert "report.html is missing: cannot write" in caplog.text
    assert verify(run_dir).damage == ()


def test_the_seal_covers_the_page(passed, tmp_path):
    run_dir = Path(shutil.copytree(passed, tmp_path / "run"))
    path = run_dir / PAGE_NAME
    path.write_bytes(path.read_bytes().replace(b"0 log-prob", b"9 log-prob"))
    assert verify(run_dir).damage == ("report.html was changed after the run was sealed",)
