"""How the ranks of a run reach each other: files on one machine, node 0's address on several. No torch."""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import AbstractContextManager, nullcontext

from rlsp.config import ClusterConfig, Config
from rlsp.determinism import rank_environment
from rlsp.meeting import meeting_place

_SIOCGIFADDR = 0x8915
_NAME_BYTES = 40
_ADDRESS = slice(20, 24)  # of struct ifreq, filled in by the kernel


def environment_of(config: Config) -> dict[str, str]:
    """Return the environment of this machine's ranks, with the interface by which they reach the others."""
    threads = config.numerics.threads
    if config.cluster.nodes == 1:
        return rank_environment(threads)
    return rank_environment(threads, interface_towards(config.cluster))


def meeting_of(config: Config) -> AbstractContextManager[str]:
    """Open the place where the ranks meet, as torch.distributed takes it.

    Raises:
        OSError: It is a folder on this machine, and the temporary one cannot be written.
    """
    cluster = config.cluster
    return meeting_place() if cluster.nodes == 1 else nullcontext(f"tcp://{cluster.host}:{cluster.port}")


def interface_towards(cluster: ClusterConfig) -> str | None:
    """Find the network interface by which this machine reaches node 0; None where it cannot be told.

    Raises:
        OSError: The name of node 0 is unknown here, or no way leads there.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        cluster.host, cluster.port, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing: the kernel looks up the way
        own = probe.getsockname()[0]
        if family != socket.AF_INET:
            return None
        for _, name in socket.if_nameindex():
            request = struct.pack(f"{_NAME_BYTES}s", name.encode())
            try:
                found = fcntl.ioctl(probe, _SIOCGIFADDR, request)[_ADDRESS]
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(found) == own:
                return name
    return None
