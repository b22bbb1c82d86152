"""How ranks of one group refuse a request together: none goes on while another has turned back."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from rlsp import collectives
from rlsp.groups import Group

TEXT_BYTES = 2048  # of what one rank tells the others: the message is padded to more than that anyway
_FACTS = 32  # at most


class UnavailableError(RuntimeError):
    """Refuse what cannot be honoured; in vime's auto mode the attribute asks for vime's own path."""

    linear_logp_provider_unavailable = True


def agree(facts: Mapping[str, object], refused: list[str], tp: Group, device: torch.device) -> None:
    """Exchange, once, what every rank was asked and whether it can do it.

    Args:
        facts: What must be the same on all ranks, by name; empty where this rank refuses.
        refused: This rank's violations.
        tp: The ranks.
        device: Where the message lies.

    Raises:
        UnavailableError: On every rank alike, where one refuses or two were asked different things.
    """
    if tp.size == 1:
        if refused:
            raise UnavailableError("; ".join(refused))
        return
    text = "; ".join(refused).encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
    names = sorted(facts)
    hashes = [_hash(facts[name]) for name in names] if not refused else []
    said = torch.tensor([*hashes, *[0] * (_FACTS - len(hashes))], dtype=torch.int64, device=device)
    words = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    every_hash, every_text = (x.cpu() for x in collectives.gather_many([said, words], tp))
    texts = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in every_text]
    if any(texts):
        raise UnavailableError(
            "; ".join(f"rank {rank}: {text}" for rank, text in zip(tp.ranks, texts, strict=True) if text)
        )
    rows = every_hash.tolist()
    odd = [
        f"{name} (ranks {[rank for rank, row in zip(tp.ranks, rows, strict=True) if row[i] != rows[0][i]]})"
        for i, name in enumerate(names)
        if any(row[i] != rows[0][i] for row in rows)
    ]
    if odd:
        raise UnavailableError(
            f"ranks of one tensor-parallel group differ from rank {tp.ranks[0]} in: {', '.join(odd)}"
        )


def _hash(value: object) -> int:
    octets = value if isinstance(value, bytes) else repr(value).encode()
    return int.from_bytes(hashlib.sha256(octets).digest()[:8], "little", signed=True)
