"""The base of every JSON document in a run folder: frozen, closed, and written in one form."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlsp.report.files import EvidenceError, read_regular, shown, write_atomically

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
"""How many there are of something; what no machine can count is no count."""


class Document(BaseModel):
    """A frozen JSON document: unknown keys are errors, non-finite numbers become strings."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    def to_bytes(self) -> bytes:
        """Encode the document; the same document always gives the same bytes."""
        return self.model_dump_json(indent=2).encode() + b"\n"

    def write(self, path: Path) -> None:
        """Write the document to `path`, whole or not at all."""
        write_atomically(path, self.to_bytes())

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a document.

        Raises: EvidenceError: The file is missing, is no JSON, or does not fit the schema; the first fault is
            named.
        """
        try:
            return cls.model_validate_json(read_regular(path))
        except OSError as error:
            raise EvidenceError(f"{path.name} cannot be read: {error.strerror or error}") from error
        except ValidationError as error:
            raise EvidenceError(f"{path.name} is damaged: {first_fault(error)}") from error
        except RecursionError as error:
            raise EvidenceError(f"{path.name} is damaged: it is nested too deeply") from error


def first_fault(error: ValidationError) -> str:
    """Say in one line where a document does not fit its schema, and how."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"]) or "the document"
    return shown(f"{place}: {first['msg']}")
