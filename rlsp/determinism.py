"""Process-wide switches that decide bits: set once, checked, recorded, and undone again.

This is the one module that touches the process's environment. Torch is imported where it is needed: the
process that composes a run prepares the ranks' environment without it.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from pathlib import Path
from types import TracebackType
from typing import Self

_KERNEL_PREFIXES = (
    "ATEN_",
    "CUBLAS_",
    "CUDNN_",
    "DNNL_",
    "MKL_",
    "NVIDIA_TF32_",
    "ONEDNN_",
    "TORCH_ALLOW_TF32_",
)
_OTHER_PREFIXES = ("CUDA_", "GLOO_", "GOMP_", "KMP_", "NCCL_", "OMP_", "OPENBLAS_", "TORCH_")
_THREAD_COUNTS = frozenset({"MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"})
_RENDEZVOUS = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_CUBLAS_VALUE = ":4096:8"
_SUBNORMAL = 5e-324
# Reduced precision and choice by timing are off. Memory that an operator forgot to write shows as NaN.
_FLAGS: tuple[tuple[str, str, bool], ...] = (
    ("utils.deterministic", "fill_uninitialized_memory", True),
    ("backends.cuda.matmul", "allow_tf32", False),
    ("backends.cuda.matmul", "allow_fp16_accumulation", False),
    ("backends.cuda.matmul", "allow_bf16_reduced_precision_reduction", False),
    ("backends.cuda.matmul", "allow_fp16_reduced_precision_reduction", False),
    ("backends.cudnn", "allow_tf32", False),
    ("backends.cudnn", "benchmark", False),
    ("backends.cudnn", "deterministic", True),
)
_ISA_FLAG = re.compile(r"avx|fma|f16c|sse4|amx|asimd|sve|sme\d*$|bf16|i8mm")


class DeterminismError(RuntimeError):
    """Say that a switch cannot be set any more, or does not hold."""


def environment_switches(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of an environment that can change bits, kernels or communication, as found."""
    prefixes = _KERNEL_PREFIXES + _OTHER_PREFIXES
    return {name: environment[name] for name in sorted(environment) if name.startswith(prefixes)}


def environment_values(names: Iterable[str]) -> dict[str, str | None]:
    """Look environment variables up; None where one is not set."""
    return {name: os.environ.get(name) for name in names}


def rank_environment(threads: int) -> dict[str, str]:
    """Return the environment for a process that hosts ranks on this machine.

    Thread counts are fixed before any library starts its pool. Switches of oneDNN, MKL and ATen stay as
    found: they belong to the kernel identity, and the user may have set them on purpose. What torchrun would
    read is taken out and the tracker is silenced: ranks get their place as an argument and own no W&B run.

    Args:
        threads: Intra-operator threads of one rank.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _RENDEZVOUS and not name.startswith("TORCHELASTIC_")
    }
    environment.update({name: str(threads) for name in _THREAD_COUNTS})
    environment.update(
        MKL_DYNAMIC="FALSE",
        OMP_DYNAMIC="FALSE",
        PYTHONHASHSEED="0",
        PYTHONUNBUFFERED="1",
        WANDB_MODE="disabled",
        WANDB_SILENT="true",
        TOKENIZERS_PARALLELISM="false",
    )
    environment.setdefault(_CUBLAS, _CUBLAS_VALUE)
    if Path("/sys/class/net/lo").exists():  # all ranks are on this machine: stay off its other interfaces
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


class apply:  # noqa: N801  (it is called like a function, and `with apply(...)` undoes it)
    """Switch this process to deterministic arithmetic, at once; `undo` or the end of `with` switches back.

    Nests: each call restores what it found. The inter-operator thread count can be set once and stays.

    Args:
        threads: Intra-operator threads.
        device: "cpu" or "cuda".

    Raises:
        DeterminismError: A switch comes too late or does not hold; everything is as it was before the call.
    """

    def __init__(self, threads: int, device: str = "cpu") -> None:
        self._undo: list[Callable[[], object]] = []
        try:
            _refuse_late_environment()
            self._set_threads(threads)
            if device == "cuda":
                self._prepare_cublas()
            self._set_arithmetic()
            _check(threads)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Switch back to what was found; a second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def _set_threads(self, threads: int) -> None:
        import torch

        if torch.get_num_interop_threads() != 1:
            try:
                torch.set_num_interop_threads(1)
            except RuntimeError as error:
                raise DeterminismError(
                    f"too late: this process already runs {torch.get_num_interop_threads()} inter-operator "
                    "threads, which torch cannot change any more; apply the switches before any parallel work"
                ) from error
        found = torch.get_num_threads()
        self._undo.append(lambda: torch.set_num_threads(found))
        torch.set_num_threads(threads)

    def _prepare_cublas(self) -> None:
        import torch

        if os.environ.get(_CUBLAS) in (_CUBLAS_VALUE, ":16:8"):
            return
        if torch.cuda.is_initialized():
            raise DeterminismError(
                f"too late: CUDA is in use and {_CUBLAS}={os.environ.get(_CUBLAS, '(not set)')}; "
                f"set {_CUBLAS}={_CUBLAS_VALUE} before the process starts"
            )
        if _CUBLAS in os.environ:
            raise DeterminismError(
                f"{_CUBLAS}={os.environ[_CUBLAS]} is not deterministic: legal: {_CUBLAS_VALUE} or :16:8"
            )
        os.environ[_CUBLAS] = _AT_LOAD[_CUBLAS] = _CUBLAS_VALUE
        self._undo.append(lambda: (os.environ.pop(_CUBLAS, None), _AT_LOAD.pop(_CUBLAS, None)))

    def _set_arithmetic(self) -> None:
        import torch

        modes = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        self._undo.append(lambda: torch.use_deterministic_algorithms(modes[0], warn_only=modes[1]))
        torch.use_deterministic_algorithms(True, warn_only=False)
        precision = torch.get_float32_matmul_precision()
        self._undo.append(lambda: torch.set_float32_matmul_precision(precision))
        torch.set_float32_matmul_precision("highest")
        for owner, attribute, wanted in _FLAGS:
            self._assign(_torch(owner), attribute, wanted)
        flushed = flushes_subnormals()
        self._undo.append(lambda: torch.set_flush_denormal(flushed))
        torch.set_flush_denormal(False)

    def _assign(self, owner: object, attribute: str, value: object) -> None:
        found = getattr(owner, attribute)
        self._undo.append(lambda: setattr(owner, attribute, found))
        setattr(owner, attribute, value)


def flushes_subnormals() -> bool:
    """Tell whether this thread's floating-point unit replaces subnormal numbers by zero."""
    return (
        _SUBNORMAL * float(len("1")) == 0.0
    )  # the factor is no literal: the interpreter must not fold the product


def switches() -> dict[str, object]:
    """Read the arithmetic switches of this process as they are now."""
    import torch

    return {
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "flush_subnormals": flushes_subnormals(),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "backends.mkldnn.enabled": bool(torch.backends.mkldnn.enabled),
        **{f"{owner}.{attribute}": getattr(_torch(owner), attribute) for owner, attribute, _ in _FLAGS},
    }


def kernel_identity(device: str = "cpu") -> dict[str, object]:
    """Name everything that chooses kernels and so bits (NUMERICS rule 10); equal identities, comparable bits.

    Args:
        device: "cpu", or "cuda" to name the GPU as well.
    """
    import torch

    build = torch.__config__.show()
    identity: dict[str, object] = {
        "machine": platform.machine(),
        **_processor(),
        "torch": torch.__version__,
        "aten_capability": torch.backends.cpu.get_cpu_capability(),
        "onednn": _found(r"MKL-DNN v(\S+ \(Git Hash \w+)\)", build).replace(" (Git Hash ", "+"),
        "mkl": _found(r"Math Kernel Library Version (\S+)", build),
        "openmp": _found(r"OpenMP (\S+)", build),
        "environment": {
            name: value
            for name, value in environment_switches().items()
            if name.startswith(_KERNEL_PREFIXES)
            and name not in _THREAD_COUNTS
            and not name.endswith("_VERBOSE")
        },
        "switches": switches(),
    }
    if device == "cuda":
        identity["cuda"] = {
            "device": torch.cuda.get_device_name(),
            "capability": list(torch.cuda.get_device_capability()),
            "multiprocessors": torch.cuda.get_device_properties().multi_processor_count,
            "toolkit": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return identity


def describe(device: str = "cpu") -> dict[str, object]:
    """Return what the manifest says about this process: kernel identity and every environment switch."""
    return {"kernel": kernel_identity(device), "environment": environment_switches()}


def _kernel_environment() -> dict[str, str]:
    return {
        name: value for name, value in environment_switches().items() if name.startswith(_KERNEL_PREFIXES)
    }


# What the libraries saw: they read their switches once, and torch is imported after this module or with it.
_AT_LOAD = _kernel_environment()


def _refuse_late_environment() -> None:
    """Refuse kernel switches that were changed after the libraries read them: recorded, but not obeyed."""
    now = _kernel_environment()
    late = sorted(name for name in now.keys() | _AT_LOAD.keys() if now.get(name) != _AT_LOAD.get(name))
    if late and "torch" in sys.modules:
        changes = ", ".join(
            f"{name}: {_AT_LOAD.get(name, '(not set)')} -> {now.get(name, '(not set)')}" for name in late
        )
        raise DeterminismError(
            f"too late: changed in the environment after the libraries were loaded: {changes}"
        )


def _check(threads: int) -> None:
    """Check that the switches hold, in torch and in the libraries below it."""
    import torch

    info = torch.__config__.parallel_info()
    counts = {"torch": str(torch.get_num_threads())}
    for library, function in (("OpenMP", "omp_get_max_threads"), ("MKL", "mkl_get_max_threads")):
        if found := _found(rf"{function}\(\) : (\d+)", info):
            counts[library] = found
    if set(counts.values()) != {str(threads)}:
        listed = ", ".join(f"{library} {count}" for library, count in counts.items())
        raise DeterminismError(f"threads={threads} was asked for, but this process runs {listed}")
    wanted = {f"{owner}.{attribute}": value for owner, attribute, value in _FLAGS}
    wanted |= {"deterministic_algorithms": True, "deterministic_warn_only": False, "flush_subnormals": False}
    now = switches()
    if wrong := sorted(name for name, value in wanted.items() if now[name] != value):
        raise DeterminismError(f"these switches were set and do not hold: {', '.join(wrong)}")


def _torch(path: str) -> object:
    import torch

    return reduce(getattr, path.split("."), torch)


def _processor() -> dict[str, object]:
    """Name the CPU and its vector instructions; Linux."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return {"cpu": platform.processor() or "unknown", "isa": []}
    flags = _found(r"(?m)^(?:flags|Features)\s*:\s*(.*)$", text).split()
    parts = [
        _found(rf"(?m)^{name}\s*:\s*(.*)$", text)
        for name in ("model name", "cpu family", "model", "stepping")
    ]
    return {
        "cpu": parts[0] or platform.processor() or "unknown",
        "cpu_family_model_stepping": "-".join(parts[1:]),
        "isa": sorted(flag for flag in flags if _ISA_FLAG.match(flag)),
    }


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match.group(1) if match else ""
