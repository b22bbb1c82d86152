"""Writes the evidence of each rollout as it happens; rank 0 owns it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rlsp.report import metrics as registry
from rlsp.report import tensors as tensor_file
from rlsp.report.again import compare_again, set_aside
from rlsp.report.consistency import (
    ConsistencyReport,
    RolloutFacts,
    RolloutRecord,
    TokenEvidence,
    measure,
    total,
)
from rlsp.report.digests import FOLDER as DIGESTS_FOLDER
from rlsp.report.digests import RolloutDigests, digests_path, misplaced
from rlsp.report.files import EvidenceError, json_safe, read_regular, write_atomically
from rlsp.report.mismatch_records import MEASURES
from rlsp.report.records import VERSION_WITHOUT_MISMATCH

CONSISTENCY_NAME = "consistency.json"
METRICS_NAME = "metrics.jsonl"


class Recorder:
    """Appends rollouts to a run folder: tensors, digests, consistency.json, at last one row of metrics.jsonl.

    A row of metrics.jsonl therefore means that its evidence is on disk. Whatever fails, the evidence of
    earlier rollouts stays whole.

    Args: run_dir: The run folder. first: Index of the first rollout to come. Evidence of earlier ones is
        kept; later evidence is set aside, as a resumed run makes it again, and must make the same.

    Raises: EvidenceError: Evidence of a rollout before `first` is missing, or the folder is not fresh
        although `first` is 0.
    """

    def __init__(self, run_dir: str | Path, first: int = 0) -> None:
        self._run_dir = Path(run_dir)
        self._records = self._kept(first)
        for folder in (tensor_file.FOLDER, DIGESTS_FOLDER):
            (self._run_dir / folder).mkdir(parents=True, exist_ok=True)
        if first:
            self._forget_from(first)
        # Unbuffered: one write a row, so that a killed rank leaves whole rows and at most one torn one.
        self._rows = (self._run_dir / METRICS_NAME).open("ab", buffering=0)

    def __enter__(self) -> Self:
        """Return the recorder."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close metrics.jsonl."""
        self.close()

    def close(self) -> None:
        """Close metrics.jsonl; everything is on disk already."""
        self._rows.close()

    def rollout(
        self,
        index: int,
        tensors: Mapping[str, tensor_file.Array],
        facts: RolloutFacts,
        metrics: Mapping[str, float],
        *,
        digests: RolloutDigests,
    ) -> RolloutRecord:
        """Write the evidence of rollout `index` and return it.

        Args:
            index: The rollout's index; rollouts come in order, from `first` on.
            tensors: The nine tensors of rollouts/NNNNN.safetensors.
            facts: What rank 0 knows besides.
            metrics: Registered names and their values; consistency/ is filled in here.
            digests: What digests/NNNNN.json says; rollout 0's has the initial weights.

        Raises: EvidenceError: A tensor, a metric name, the index or where the initial weights stand is wrong
            (nothing was written), the disk refused, or a killed segment had recorded other bits.
        """
        if index != len(self._records):
            raise EvidenceError(
                f"rollout {index} cannot be recorded: rollout {len(self._records)} comes next"
            )
        if fault := misplaced(digests, index):
            raise EvidenceError(f"the digests of rollout {index} cannot be recorded: {fault}")
        registry.refuse_unknown(metrics)
        content = tensor_file.encode(tensors)
        record = _record(index, tensors, facts)
        records = (*self._records, record)
        write_atomically(tensor_file.rollout_path(self._run_dir, index), content)
        digests.write(digests_path(self._run_dir, index))
        compare_again(self._run_dir, index, judged=set(facts.declared_routes.values()) == {"strict"})
        ConsistencyReport(total=total(records), rollouts=records).write(self._run_dir / CONSISTENCY_NAME)
        self._records = records
        # NumPy's scalars are no JSON numbers.
        values = {name: value if isinstance(value, int) else float(value) for name, value in metrics.items()}
        self._append({registry.STEP: index, **values, **consistency_metrics(record)})
        return record

    def _kept(self, first: int) -> tuple[RolloutRecord, ...]:
        """Read the records before `first`."""
        path = self._run_dir / CONSISTENCY_NAME
        if first == 0:
            if path.exists():
                raise EvidenceError(f"{self._run_dir} already holds evidence of another run")
            return ()
        report = ConsistencyReport.read(path)
        if report.schema_version == VERSION_WITHOUT_MISMATCH:
            raise EvidenceError(f"cannot go on at rollout {first}: {path.name} is of an earlier version")
        records = report.rollouts[:first]
        paths = [
            at(self._run_dir, i) for i in range(first) for at in (tensor_file.rollout_path, digests_path)
        ]
        if len(records) < first or not all(path.is_file() for path in paths):
            raise EvidenceError(f"cannot go on at rollout {first}: evidence of an earlier rollout is missing")
        return records

    def _forget_from(self, first: int) -> None:
        """Set the evidence of rollouts from `first` on aside, which will be made again."""
        set_aside(self._run_dir, first)
        ConsistencyReport(total=total(self._records), rollouts=self._records).write(
            self._run_dir / CONSISTENCY_NAME
        )
        rows = whole_rows(self._run_dir / METRICS_NAME)
        kept = [line for line, row in rows if row.get(registry.STEP, first) < first]
        write_atomically(self._run_dir / METRICS_NAME, b"".join(kept))

    def _append(self, row: Mapping[str, Any]) -> None:
        """Append one row to metrics.jsonl; a row that does not fit is taken back."""
        line = json.dumps(json_safe(dict(row)), allow_nan=False).encode() + b"\n"
        size = os.fstat(self._rows.fileno()).st_size
        try:
            written = self._rows.write(line)
            if written != len(line):
                raise OSError(f"only {written} of {len(line)} bytes were written")
        except OSError as error:
            os.ftruncate(self._rows.fileno(), size)
            path = self._run_dir / METRICS_NAME
            raise EvidenceError(f"cannot write {path}: {error.strerror or error}") from error


def whole_rows(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Read the complete lines of metrics.jsonl with their rows; a torn last line is left out.

    Raises:
        EvidenceError: The file is missing, or a complete line is no JSON object.
    """
    try:
        lines = read_regular(path).splitlines(keepends=True)
    except OSError as error:
        raise EvidenceError(f"{path.name} cannot be read: {error.strerror or error}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            break
        rows.append((line, parse_row(line, f"{path.name} line {number}")))
    return rows


def parse_row(line: bytes, place: str) -> dict[str, Any]:
    """Parse one line of metrics.jsonl.

    Raises:
        EvidenceError: It is no JSON object.
    """
    try:
        row = json.loads(line)
    except ValueError as error:
        raise EvidenceError(f"{place} is damaged: {error}") from error
    except RecursionError as error:
        raise EvidenceError(f"{place} is damaged: it is nested too deeply") from error
    if not isinstance(row, dict):
        raise EvidenceError(f"{place} is damaged: not a JSON object")
    return row


def _record(index: int, tensors: Mapping[str, Any], facts: RolloutFacts) -> RolloutRecord:
    evidence = measure(
        tensors["rollout_logprob"],
        tensors["train_logprob"],
        tensors["active_mask"],
        tensors["rollout_row_digest"],
        tensors["train_row_digest"],
    )
    return RolloutRecord(index=index, **dict(evidence), **dict(facts))


def consistency_metrics(evidence: TokenEvidence) -> dict[str, float]:
    """Return what a row of metrics.jsonl says of a rollout's comparison."""
    measures = MEASURES if evidence.mismatch is not None else ()
    mismatch = {f"mismatch/{name}": getattr(evidence.mismatch, name) for name in measures}
    rows = {"consistency/mismatched_rows": evidence.mismatched_rows} if evidence.rows_fed else {}
    return {
        "consistency/active_tokens": evidence.active_tokens,
        "consistency/mismatched_tokens": evidence.mismatched_tokens,
        **rows,
        "consistency/missing_tokens": evidence.missing_rollout + evidence.missing_train,
        "consistency/max_abs": evidence.max_abs,
        "consistency/mean_abs": evidence.mean_abs,
        "consistency/max_ulp": evidence.max_ulp,
        "consistency/kl_k1": evidence.kl_k1,
        "consistency/kl_k3": evidence.kl_k3,
        "consistency/ppl_ratio": evidence.ppl_ratio,
        "consistency/ess": evidence.ess,
        **mismatch,
    }
