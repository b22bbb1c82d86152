"""How bytes travel between ranks, what is checked before they leave and what is compared as they arrive.

Measured on 2 cores (medians in ms on 2, 4 and 8 ranks):
    gather of 4 KiB a rank: by gloo's all_to_all 0.5, 1.3, 3.9; by gloo's own ring 0.3, 4.0, 12.5
    64 bytes take as long as 4 KiB.
    gather of 1 MiB a rank, on 4: by all_to_all 6.9; by gloo's ring 8.3; sent from rank to rank 5.0
    gather of 2 MiB a rank, on 8: 55, 48, 32
So a message of up to CHECKED_BYTES to each rank is exchanged with all, behind a header and padded to
SMALLEST_BYTES: over direct lines between the ranks of one machine (`rlsp.lines`), else by all_to_all. Longer
ones travel bare, and gathers from rank to rank. All small calls are then the same exchange, whatever they are
called: where two different ones meet, every rank sees it in the headers at once. Lines carry messages of any
lengths that far; gloo aborts the process that receives more than it expected, which padding prevents up to
SMALLEST_BYTES, and above it the ledger's writer holds the last signatures. On other devices reading a header
would wait for the device, so only `check_agreement` does.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rlsp import determinism
from rlsp.collectives.agreement import History, compare, listed
from rlsp.groups import CHAIN_BYTES, CollectiveError, Group, Trail, UnlikeCallsError
from rlsp.messages import CHECKED_BYTES, HEADER_BYTES, SMALLEST_BYTES, added_in_place, exchanged, row_bytes

_HEADER = struct.Struct(f"<q{CHAIN_BYTES}s")
_LENGTH = struct.Struct("<q")


@dataclass(frozen=True)
class Call:
    """One recorded call of one rank.

    Attributes:
        group: The ranks it runs over.
        operation: Its name, under which bytes are counted.
        signature: Operation, shape, dtype and arguments: what all ranks must agree on.
        trail: The group's calls, this one included.
    """

    group: Group
    operation: str
    signature: str
    trail: Trail

    def received(self, octets: int) -> None:
        """Count what came in from other ranks, padding and headers included."""
        self.group.ledger.wire[self.group.axis, self.operation] += octets


def fault(operation: str, x: Tensor | None, group: Group, why: str) -> CollectiveError:
    """Make the error of a call that cannot start, naming operation, dtype, shape and group."""
    return CollectiveError(f"{operation} {'' if x is None else describe(x) + ' '}over {group.label}: {why}")


def describe(x: Tensor) -> str:
    """Write dtype and shape: `float32[4,8]`."""
    return f"{str(x.dtype).removeprefix('torch.')}[{','.join(map(str, x.shape))}]"


def check_tensor(operation: str, x: Tensor, group: Group) -> None:
    """Refuse a tensor that the group cannot move, or whose gradient the call would silently drop."""
    if x.layout is not torch.strided:
        raise fault(operation, x, group, f"layout is {x.layout}; only strided tensors travel")
    if group.device_type is not None and x.device.type != group.device_type:
        raise fault(
            operation, x, group, f"device is {x.device.type}; the group's backend moves {group.device_type}"
        )
    if x.requires_grad and torch.is_grad_enabled():
        raise fault(operation, x, group, "would cut its gradient: use an autograd pair, or detach it")


def check_dim(operation: str, x: Tensor, group: Group, dim: int, *, divisible: bool) -> int:
    """Return `dim` counted from the front; refuse one that is not there, or does not divide by the ranks."""
    if not -x.dim() <= dim < x.dim():
        raise fault(operation, x, group, f"there is no dim {dim}")
    if divisible and x.shape[dim] % group.size:
        raise fault(operation, x, group, f"dim {dim} of {x.shape[dim]} does not divide by {group.size} ranks")
    return dim % x.dim()


def enter(operation: str, group: Group, what: str) -> Call:
    """Number, sign and record a call whose arguments passed every local check."""
    signature = f"{operation} {what}".rstrip()
    return Call(group, operation, signature, group.ledger.enter(group, operation, signature))


def as_bytes(x: Tensor) -> Tensor:
    """View the bits of `x`, in row-major order, as uint8 [bytes]; a copy only where `x` is not contiguous."""
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def from_bytes(rows: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """View uint8 [n, bytes] as [n, *shape] of `dtype`: never a copy, as contiguous as the rows are."""
    return rows.view(dtype).view(rows.shape[0], *shape)


def exchange(call: Call, parts: Tensor) -> Tensor:
    """Send part i to rank i of the group.

    Args:
        call: What is being done.
        parts: uint8 [n, bytes]; it may be expanded from one row.

    Returns:
        uint8 [n, bytes], row j from rank j: own memory, rows contiguous and aligned.

    Raises:
        CollectiveError: The ranks made different calls, now or before (on every rank); or the backend failed.
    """
    size, payload = parts.shape
    call.group.ledger.bytes[call.operation] += (size - 1) * payload
    if not _checked(parts):
        call.received(exchanged(payload, size, headers=False))
        received = _room(size, payload, parts)
        with _on_wire(call):
            dist.all_to_all_single(received, parts.contiguous(), group=call.group.handle)
        return received
    return _exchange_checked(call, parts)


def gather_bytes(call: Call, own: Tensor) -> Tensor:
    """Send uint8 [bytes] to every rank; return uint8 [n, bytes] as `exchange` does."""
    size = call.group.size
    if _checked(own):
        return exchange(call, own.expand(size, -1))
    call.group.ledger.bytes[call.operation] += (size - 1) * own.numel()
    call.received(exchanged(own.numel(), size, headers=False))
    received = _room(size, own.numel(), own)
    with _on_wire(call):
        if own.device.type == "cpu":
            _spread(call.group, own, received)
        else:
            dist.all_gather_single(received.view(-1), own, group=call.group.handle)
    return received


def broadcast_bytes(call: Call, own: Tensor, source: int) -> Tensor:
    """Return the uint8 [bytes] of the rank at index `source`, in own memory."""
    if _checked(own) and own.numel() <= SMALLEST_BYTES - HEADER_BYTES:
        return exchange(call, own.expand(call.group.size, -1))[source].clone()
    octets = own.numel() * (call.group.index != source)
    call.group.ledger.bytes[call.operation] += octets
    call.received(octets)
    received = own.clone()
    with _on_wire(call):
        dist.broadcast(received, group=call.group.handle, group_src=source)
    return received


def add_in_place(call: Call, total: Tensor) -> None:
    """Add integers over the ranks by the backend's own all-reduce, into `total`."""
    octets = added_in_place(total.nbytes, call.group.size)
    call.group.ledger.bytes[call.operation] += octets
    call.received(octets)
    with _on_wire(call):
        dist.all_reduce(total, group=call.group.handle)


def check_agreement(group: Group) -> None:
    """Compare all calls so far over `group`, by one small exchange; call it at every step boundary.

    Raises:
        CollectiveError: On every rank of the group, naming the ranks that differ, the first call on which
            they do, and the last calls of each.
    """
    call = enter("check_agreement", group, "")
    if group.size > 1:
        device = "cpu" if group.device_type is None else group.device_type
        _exchange_checked(call, torch.empty((group.size, 0), dtype=torch.uint8, device=device))


def _checked(message: Tensor) -> bool:
    return message.device.type == "cpu" and message.shape[-1] <= CHECKED_BYTES


def _room(rows: int, octets: int, like: Tensor) -> Tensor:
    """Return memory for a message, uint8 [rows, octets]; all of it will be written."""
    if like.device.type != "cpu":
        return like.new_empty((rows, octets))
    return determinism.unmarked(rows, octets, dtype=torch.uint8)


def _rows(x: Tensor) -> list[memoryview]:
    """View the rows of a tensor on the processor, uint8 [n, bytes], as memory."""
    return [memoryview(row) for row in x.numpy()]


def _spread(group: Group, own: Tensor, received: Tensor) -> None:
    """Send every peer the same memory, and put what comes from it into its row."""
    peers = [(group.index + step) % group.size for step in range(1, group.size)]
    work = [dist.irecv(received[peer], group=group.handle, group_src=peer) for peer in peers]
    work += [dist.isend(own, group=group.handle, group_dst=peer) for peer in peers]
    received[group.index] = own
    for each in work:
        assert each is not None  # as for a rank that is not of the group
        each.wait()


def _exchange_checked(call: Call, parts: Tensor) -> Tensor:
    size, payload = parts.shape
    row = row_bytes(payload)
    call.received((size - 1) * row)
    header = _HEADER.pack(call.trail.sequence, call.trail.chain).ljust(HEADER_BYTES, b"\0")
    padding = bytes(row - HEADER_BYTES - payload)
    messages = [(header, memoryview(part), padding) for part in parts.cpu().numpy()]
    received = _room(size, row, parts)
    with _on_wire(call):
        if call.group.lines is not None:
            call.group.lines.exchange(messages, _rows(received))
        else:
            joined = bytearray().join(piece for message in messages for piece in message)
            sent = torch.frombuffer(joined, dtype=torch.uint8).to(parts.device)
            dist.all_to_all_single(received, sent.view(size, row), group=call.group.handle)
    if any(bytes(each) != header for each in received[:, :HEADER_BYTES].cpu().numpy()):
        raise _disagreement(call, received.new_empty((size, SMALLEST_BYTES)))
    return received[:, HEADER_BYTES : HEADER_BYTES + payload]


def _disagreement(call: Call, scratch: Tensor) -> UnlikeCallsError:
    """Tell every rank the last calls of every other: all saw the same headers, so all of them come here."""
    text = json.dumps([call.trail.chain.hex(), *call.trail.recent]).encode()
    message = (_LENGTH.pack(len(text)) + text)[:SMALLEST_BYTES].ljust(SMALLEST_BYTES, b"\0")
    scratch[:] = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(scratch.device)
    received = torch.empty_like(scratch)
    with _on_wire(call):
        dist.all_to_all_single(received, scratch, group=call.group.handle)
    histories = []
    for rank, row in zip(call.group.ranks, received.cpu().tolist(), strict=True):
        (length,) = _LENGTH.unpack_from(bytes(row))
        chain, *recent = json.loads(bytes(row)[_LENGTH.size : _LENGTH.size + length])
        histories.append(History(rank, chain, tuple((number, signature) for number, signature in recent)))
    return UnlikeCallsError(compare(call.group.label, histories))


@contextmanager
def _on_wire(call: Call) -> Iterator[None]:
    started = time.monotonic()
    try:
        yield
    except (RuntimeError, ValueError) as error:
        after_s = time.monotonic() - started
        raise CollectiveError(
            f"rank {call.group.rank}: {call.signature} over {call.group.label},"
            f" call {call.trail.sequence - 1} of this group, failed after {after_s:.1f} s:"
            f" {str(error).strip()}\n  last calls here: {listed(call.trail.recent)}"
        ) from error
