"""What this machine lacks for a run, its device and its data, found without torch."""

from __future__ import annotations

from pathlib import Path

from rlsp.cli.pretrained import weight_lines
from rlsp.config import Config, DeviceKind, Violation
from rlsp.engines import engine_lines
from rlsp.network import interface_towards
from rlsp.task import task_lines

_DEVICES = Path("/dev")
_DRIVERS = ("nvidiactl", "dxg")  # Linux's own driver, and that of a Linux inside Windows


def machine_lines(config: Config) -> list[str]:
    """List why a checked config cannot run on this machine, one line a reason."""
    lines = _device_lines(config) + _cluster_lines(config) + engine_lines(config)
    return lines + weight_lines(config.model) + task_lines(config)


def _device_lines(config: Config) -> list[str]:
    if config.device.kind is not DeviceKind.cuda:
        return []
    if not any((_DEVICES / name).exists() for name in _DRIVERS):
        shown = " nor ".join(f"{_DEVICES / name}" for name in _DRIVERS)
        why = f"cpu (neither {shown} is there: this machine has no NVIDIA driver; nothing overrides this)"
        return [str(Violation("device.kind", config.device.kind, why))]
    cards = [path for path in _DEVICES.glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()]
    if cards and len(config.local_ranks) > len(cards):
        here = f" / {config.cluster.nodes} machines" if config.cluster.nodes > 1 else ""
        layout = f"{len(config.local_ranks)} ranks (dp · cp · tp{here})"
        return [f"parallel: {layout}: legal: at most {len(cards)}, the GPUs here; nothing overrides this"]
    return []


def _cluster_lines(config: Config) -> list[str]:
    cluster = config.cluster
    if cluster.nodes == 1:
        return []
    try:
        interface_towards(cluster)
    except OSError as error:
        legal = f"the name or address of node 0, as it is reached from here ({error.strerror or error})"
        return [str(Violation("cluster.host", cluster.host, legal))]
    return []
