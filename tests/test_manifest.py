from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from report_fixtures import ENDED_AT, RUN_ID, STARTED_AT, make_job, make_startup, plain_config

from rlsp.report.files import EvidenceError
from rlsp.report.manifest import Manifest, StartupFacts, Status, add_startup, begin, finish
from rlsp.report.provenance import code_revision, source_hash


def stored(run_dir: Path) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"bare {constant} in JSON")

    return json.loads((run_dir / "manifest.json").read_text(), parse_constant=refuse)


def test_the_manifest_stands_before_anything_else_of_the_run(tmp_path):
    run_dir = tmp_path / "a" / "run"
    begin(make_job(run_dir), {"OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    said = stored(run_dir)
    assert (said["run_id"], said["started_at"], said["status"], said["ended_at"]) == (
        RUN_ID,
        STARTED_AT,
        "running",
        None,
    )
    assert said["config"] == plain_config()
    assert said["config_hash"] == make_job(run_dir).config.config_hash
    assert (said["overrides"], said["command_line"]) == (["seed=7"], ["rlsp", "seed=7"])
    assert (said["seeds"], said["entropy_coef"]) == ({"seed": 7}, 0.01)
    assert said["environment"] == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1"}
    assert said["packages"]["numpy"]
    assert said["hardware"]["cpus_available"] >= 1
    assert said["schema_version"] == 2


def test_the_layout_table_places_every_rank(tmp_path):
    begin(make_job(tmp_path), {})
    said = stored(tmp_path)
    assert {axis: said["layout"][axis] for axis in ("dp", "cp", "tp", "sp")} == {
        "dp": 1,
        "cp": 2,
        "tp": 2,
        "sp": 2,
    }
    assert said["layout"]["table"][3] == {"rank": 3, "dp": 0, "cp": 1, "tp": 1, "sp": 1}
    engines = said["rollout_layout"]
    assert (engines["tp"], engines["engines"]) == (1, 3)
    assert engines["table"][2:] == [
        {"rank": 2, "engine": 2, "tp": 0},
        {"rank": 3, "engine": None, "tp": None},
    ]


def test_the_manifest_names_no_host_and_no_user(tmp_path):
    import getpass
    import platform

    begin(make_job(tmp_path), {})
    said = stored(tmp_path)
    values = json.dumps({"hardware": said["hardware"], "code": said["code"]})
    assert platform.node() not in values.replace(platform.release(), "")
    assert f'"{getpass.getuser()}"' not in values


def test_startup_facts_are_added_and_the_end_too(tmp_path):
    begun = begin(make_job(tmp_path), {})
    facts = make_startup(begun)
    add_startup(tmp_path, facts)
    finish(tmp_path, ENDED_AT, Status.FINISHED)
    said = stored(tmp_path)
    assert said["startup"] == facts
    assert (said["status"], said["ended_at"], said["aborted"]) == ("finished", ENDED_AT, None)
    assert Manifest.read(tmp_path / "manifest.json").begun_hash == begun.begun_hash
    # The witness: another config is another beginning.
    assert begin(make_job(tmp_path / "other", seed=8), {}).begun_hash != begun.begun_hash


def test_startup_facts_may_come_as_a_model(tmp_path):
    facts = StartupFacts.model_validate(make_startup(begin(make_job(tmp_path), {})))
    assert add_startup(tmp_path, facts).startup == facts


def test_malformed_startup_facts_are_refused_and_all_named(tmp_path):
    facts = make_startup(begin(make_job(tmp_path), {}))
    del facts["contract_hash"]
    facts["agreement"][1]["rank"] = "one"
    facts["colour"] = "blue"
    with pytest.raises(EvidenceError) as refusal:
        add_startup(tmp_path, facts)
    for name in ("contract_hash", "agreement.1.rank", "colour"):
        assert name in str(refusal.value)
    assert stored(tmp_path)["startup"] is None


def test_non_finite_numbers_become_strings(tmp_path):
    facts = make_startup(begin(make_job(tmp_path), {}))
    facts["certificate"] = {"worst": float("nan"), "bounds": [float("inf"), -1.0]}
    add_startup(tmp_path, facts)
    assert stored(tmp_path)["startup"]["certificate"] == {"worst": "NaN", "bounds": ["Infinity", -1.0]}


def test_an_aborted_run_says_why(tmp_path):
    begin(make_job(tmp_path), {})
    finish(tmp_path, ENDED_AT, Status.ABORTED, "rank 3 died")
    assert (stored(tmp_path)["status"], stored(tmp_path)["aborted"]) == ("aborted", "rank 3 died")


@pytest.mark.parametrize(
    ("status", "why"), [(Status.RUNNING, None), (Status.FINISHED, "x"), (Status.ABORTED, None)]
)
def test_an_end_that_contradicts_itself_is_refused(tmp_path, status, why):
    begin(make_job(tmp_path), {})
    with pytest.raises(ValueError, match="a run cannot end as"):
        finish(tmp_path, ENDED_AT, status, why)


def test_an_unknown_key_or_a_missing_file_is_an_error_that_names_it(tmp_path):
    with pytest.raises(EvidenceError, match=r"manifest\.json cannot be read"):
        finish(tmp_path, ENDED_AT, Status.FINISHED)
    begin(make_job(tmp_path), {})
    path = tmp_path / "manifest.json"
    path.write_text(path.read_text().replace('"run_id"', '"run_ix"', 1))
    with pytest.raises(EvidenceError, match=r"manifest\.json is damaged: run_i"):
        Manifest.read(path)


# Code revision ----------------------------------------------------------------


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "repository" / "package"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("VALUE = 1\n")
    git(folder.parent, "init", "-q")
    git(folder.parent, "add", ".")
    git(folder.parent, "commit", "-q", "--no-verify", "-m", "first")
    return folder


def test_a_clean_checkout_is_its_commit(package):
    revision = code_revision(package)
    assert revision.revision == git(package, "rev-parse", "HEAD")
    assert (revision.dirty, revision.dirty_diff_hash) == (False, None)


def test_every_kind_of_uncommitted_change_gives_its_own_hash(package):
    seen = {code_revision(package).dirty_diff_hash}
    for path, text in (
        ("package/__init__.py", "VALUE = 2\n"),
        ("package/__init__.py", "VALUE = 3\n"),
        ("new.py", "a"),
        ("new.py", "b"),
    ):
        (package.parent / path).write_text(text)
        revision = code_revision(package)
        assert revision.dirty is True
        assert revision.dirty_diff_hash not in seen
        seen.add(revision.dirty_diff_hash)


def test_links_and_pipes_in_the_work_tree_end_no_run(package):
    """A copy of a run folder beside the code has links: wandb makes them."""
    root = package.parent
    (root / "link").symlink_to("nowhere")
    first = code_revision(package).dirty_diff_hash
    (root / "link").unlink()
    (root / "link").symlink_to("elsewhere")
    second = code_revision(package).dirty_diff_hash
    os.mkfifo(root / "pipe")
    (root / "folder").symlink_to(package)
    assert len({first, second, code_revision(package).dirty_diff_hash}) == 3


def test_a_source_file_that_is_a_link_counts_with_its_content(package, tmp_path):
    (tmp_path / "real.py").write_text("a")
    (package / "linked.py").symlink_to(tmp_path / "real.py")
    before = code_revision(package).source_hash
    (tmp_path / "real.py").write_text("b")
    assert code_revision(package).source_hash != before


def test_a_staged_change_is_dirty_too_and_an_ignored_file_is_not(package):
    (package.parent / ".gitignore").write_text("ignored\n")
    git(package.parent, "add", ".")
    assert code_revision(package).dirty is True
    git(package.parent, "commit", "-q", "--no-verify", "-m", "second")
    (package.parent / "ignored").write_text("x")
    assert code_revision(package).dirty is False


def test_a_package_outside_any_checkout_or_untracked_inside_one_has_no_revision(package, tmp_path):
    wheel = package.parent / ".venv" / "package"
    wheel.mkdir(parents=True)
    (wheel / "__init__.py").write_text("VALUE = 1\n")
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "__init__.py").write_text("VALUE = 1\n")
    for folder in (wheel, alone):
        revision = code_revision(folder)
        assert (revision.revision, revision.dirty, revision.dirty_diff_hash) == ("unknown", None, None)
        assert revision.source_hash == source_hash(package)


def test_the_source_hash_sees_names_and_contents_and_no_caches(package):
    first = source_hash(package)
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "x.pyc").write_bytes(b"cache")
    assert source_hash(package) == first
    (package / "values.yaml").write_text("a: 1\n")
    second = source_hash(package)
    (package / "values.yaml").rename(package / "other.yaml")
    assert len({first, second, source_hash(package)}) == 3


def test_without_git_the_revision_is_unknown(package, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert code_revision(package).revision == "unknown"
