"""The verdict of a run: judged from its files alone, sealed last, and verified later."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlsp.report.documents import Document
from rlsp.report.evidence import RunEvidence, collect
from rlsp.report.files import (
    VERDICT_NAME,
    EvidenceError,
    canonical_json,
    list_contents,
    read_regular,
    remove_partials,
    sha256_bytes,
    sha256_file,
    shown,
)
from rlsp.report.gates import GATES, GateResult, Verdict
from rlsp.report.manifest import MANIFEST_NAME, Manifest, Status
from rlsp.report.page import write_page
from rlsp.report.provenance import source_hash
from rlsp.report.recorder import CONSISTENCY_NAME
from rlsp.report.statuses import CRASHED, FAILED, INCONCLUSIVE, PASSED

_WEIGHT = {Verdict.PASS: 0, Verdict.INCONCLUSIVE: 1, Verdict.FAIL: 2}
EXIT_STATUS = {
    Verdict.PASS: PASSED,
    Verdict.ABORTED: CRASHED,
    Verdict.FAIL: FAILED,
    Verdict.INCONCLUSIVE: INCONCLUSIVE,
}


@dataclass(frozen=True)
class Judgement:
    """What the gates say of a run together.

    Attributes:
        verdict: PASS, FAIL or INCONCLUSIVE; ABORTED if the run was.
        reasons: Why it is not PASS, each led by its gate's name; what an unjudged gate saw.
        gates: Every gate's answer.
    """

    verdict: Verdict
    reasons: tuple[str, ...]
    gates: tuple[GateResult, ...]

    @property
    def exit_status(self) -> int:
        """Return the exit status of a run with this verdict."""
        return EXIT_STATUS[self.verdict]


class VerdictDocument(Document):
    """The file VERDICT.json: `artifacts` maps the path of every sealed file to its SHA-256.

    An empty folder stands there with a slash at its end and the SHA-256 of nothing.
    `self_digest` is the SHA-256 of this document's canonical JSON without that field, so that the seal seals
    itself.
    """

    schema_version: Literal[1] = 1
    run_id: str
    verdict: Verdict
    reasons: tuple[str, ...]
    gates: tuple[GateResult, ...]
    aborted: str | None
    artifacts: dict[str, str]
    self_digest: str

    def digest(self) -> str:
        """Compute what `self_digest` must be."""
        return sha256_bytes(canonical_json(self.model_dump(mode="json", exclude={"self_digest"})))


@dataclass(frozen=True)
class Verification:
    """What a later look at a run folder found.

    Attributes:
        stored: VERDICT.json; None if it is missing or damaged.
        judgement: The verdict that the files give now.
        damage: Every difference between the sealed run and the folder.
        notes: What could not be checked, and why.
        evidence: What was judged.
    """

    stored: VerdictDocument | None
    judgement: Judgement
    damage: tuple[str, ...]
    notes: tuple[str, ...]
    evidence: RunEvidence

    @property
    def exit_status(self) -> int:
        """Return 3 for damaged evidence, else the exit status of the run."""
        return EXIT_STATUS[Verdict.FAIL] if self.damage else self.judgement.exit_status


def is_run_folder(path: Path) -> bool:
    """Tell whether a folder is, or was, a run's."""
    return any(os.path.lexists(path / name) for name in (MANIFEST_NAME, CONSISTENCY_NAME, VERDICT_NAME))


def judge(run_dir: str | Path, aborted: str | None = None) -> Judgement:
    """Judge a run from its files alone, measuring its consistency again.

    Args:
        run_dir: The run folder.
        aborted: Why the run was aborted, if it was; the manifest may say so too.
    """
    return _judgement(collect(Path(run_dir)), aborted)


def seal(run_dir: str | Path, aborted: str | None = None) -> Judgement:
    """Judge a run, draw report.html, and write VERDICT.json, the last file, over the hashes of all others.

    Args:
        run_dir: The run folder; nothing outside logs/ and wandb/ may change afterwards.
        aborted: Why the run was aborted, or None.

    Raises:
        EvidenceError: VERDICT.json could not be written, or a file could not be read.
    """
    folder = Path(run_dir)
    remove_partials(folder)
    run = collect(folder)
    judgement = _judgement(run, aborted)
    write_page(folder, run, judgement.verdict, judgement.reasons, judgement.gates)
    try:
        artifacts = _artifacts(folder)
    except OSError as error:
        raise EvidenceError(f"cannot seal {folder}: {error}") from error
    document = VerdictDocument(
        run_id=run.manifest.run_id if run.manifest else folder.name,
        verdict=judgement.verdict,
        reasons=judgement.reasons,
        gates=judgement.gates,
        aborted=aborted,
        artifacts=artifacts,
        self_digest="",
    )
    document.model_copy(update={"self_digest": document.digest()}).write(folder / VERDICT_NAME)
    return judgement


def verify(run_dir: str | Path) -> Verification:
    """Hash every file of a sealed run again, judge it again, and name each difference."""
    folder = Path(run_dir)
    stored, damage = _stored(folder)
    run = collect(folder)
    judgement = _judgement(run, stored.aborted if stored else None)
    damage += list_contents(folder).faults
    notes: list[str] = []
    if stored:
        damage += _changed_files(folder, stored.artifacts)
        damage += _other_run(stored, run.manifest)
        damage += _other_answers(stored, judgement)
        if run.manifest is None or run.manifest.code.source_hash != source_hash():
            if judgement.reasons or stored.reasons:
                notes.append("other code sealed this run: the words of its reasons were not compared")
        elif not damage:
            # Of damaged files other reasons are to be expected.
            damage += _other_reasons(stored, judgement)
    return Verification(stored, judgement, tuple(map(shown, damage)), tuple(notes), run)


def _judgement(run: RunEvidence, aborted: str | None) -> Judgement:
    gates = tuple(gate(run) for gate in GATES)
    if aborted is None and run.manifest is not None and run.manifest.status is Status.ABORTED:
        aborted = run.manifest.aborted
    worst = max((gate.verdict for gate in gates if gate.judged), key=lambda verdict: _WEIGHT[verdict])
    reasons = [f"aborted: {aborted}"] if aborted is not None else []
    for gate in gates:
        note = "" if gate.judged else " (reported, not judged)"
        reasons += [f"{gate.name}{note}: {reason}" for reason in gate.reasons]
    return Judgement(Verdict.ABORTED if aborted is not None else worst, tuple(reasons), gates)


def _stored(folder: Path) -> tuple[VerdictDocument | None, list[str]]:
    path = folder / VERDICT_NAME
    try:
        stored = VerdictDocument.read(path)
    except EvidenceError as error:
        return None, [str(error)]
    # The form is compared too: a changed blank changes no value, yet the file is not what was sealed.
    if stored.self_digest != stored.digest() or read_regular(path) != stored.to_bytes():
        return stored, [f"{VERDICT_NAME} was changed after it was sealed"]
    return stored, []


def _artifacts(folder: Path) -> dict[str, str]:
    """Hash what a verdict seals."""
    contents = list_contents(folder)
    hashes = {path: sha256_file(folder / path) for path in contents.files}
    return hashes | {f"{path}/": sha256_bytes(b"") for path in contents.empty}


def _changed_files(folder: Path, sealed: dict[str, str]) -> list[str]:
    contents = list_contents(folder)
    present = {*contents.files, *(f"{path}/" for path in contents.empty)}
    damage = [f"{path} is missing" for path in sorted(sealed.keys() - present)]
    damage += [f"{path} was added after the run was sealed" for path in sorted(present - sealed.keys())]
    for path in sorted(present & sealed.keys()):
        try:
            found = sha256_bytes(b"") if path.endswith("/") else sha256_file(folder / path)
        except OSError as error:
            damage.append(f"{path} cannot be read: {error.strerror or error}")
            continue
        if found != sealed[path]:
            damage.append(f"{path} was changed after the run was sealed")
    return damage


def _other_run(stored: VerdictDocument, manifest: Manifest | None) -> list[str]:
    """List what the seal and the manifest say differently of the run and of its end."""
    if manifest is None:
        return []
    damage = []
    if stored.run_id != manifest.run_id:
        damage.append(f"{VERDICT_NAME} is of run {stored.run_id}, {MANIFEST_NAME} of run {manifest.run_id}")
    if manifest.status is Status.RUNNING:
        damage.append(f"{MANIFEST_NAME} says that the run has not ended, but it was sealed")
    elif (manifest.status is Status.ABORTED) != (stored.verdict is Verdict.ABORTED):
        damage.append(f"{VERDICT_NAME} says {stored.verdict.value}, {MANIFEST_NAME} {manifest.status.value}")
    elif None not in (stored.aborted, manifest.aborted) and stored.aborted != manifest.aborted:
        damage.append(f"{VERDICT_NAME} and {MANIFEST_NAME} give other reasons why the run was aborted")
    return damage


def _other_answers(stored: VerdictDocument, judgement: Judgement) -> list[str]:
    damage = []
    if judgement.verdict is not stored.verdict:
        damage.append(f"{VERDICT_NAME} says {stored.verdict.value}, the files give {judgement.verdict.value}")
    said = {gate.name: (gate.verdict, gate.judged) for gate in stored.gates}
    for gate in judgement.gates:
        if said.get(gate.name) != (gate.verdict, gate.judged):
            damage.append(f"{VERDICT_NAME}: gate {gate.name} is now {gate.verdict.value}")
    known = [gate.name for gate in judgement.gates]
    damage += [
        f"{VERDICT_NAME}: there is no gate {gate.name}" for gate in stored.gates if gate.name not in known
    ]
    return damage


def _other_reasons(stored: VerdictDocument, judgement: Judgement) -> list[str]:
    """Compare the reasons word for word, which means something only under the code that worded them."""
    damage = []
    if stored.reasons != judgement.reasons:
        damage.append(f"{VERDICT_NAME}: its reasons are not those that the files give now")
    said = {gate.name: gate.reasons for gate in stored.gates}
    for gate in judgement.gates:
        if said.get(gate.name, gate.reasons) != gate.reasons:
            damage.append(f"{VERDICT_NAME}: gate {gate.name} gives other reasons than the files give now")
    return damage
