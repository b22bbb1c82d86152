"""Process-wide switches that decide bits: set once, checked, recorded, and undone again.

This is the one module that touches the process's environment. Torch is imported where it is needed: the
process that composes a run prepares the ranks' environment without it.
"""

from __future__ import annotations

import math
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import reduce
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import torch

_CPU_PREFIXES = ("ATEN_", "DNNL_", "MKL_", "ONEDNN_")
_CUDA_PREFIXES = ("CUBLAS_", "CUDNN_", "NVIDIA_TF32_", "TORCH_ALLOW_TF32_")
_KERNEL_PREFIXES = _CPU_PREFIXES + _CUDA_PREFIXES
_OTHER_PREFIXES = ("CUDA_", "GLOO_", "GOMP_", "KMP_", "NCCL_", "OMP_", "OPENBLAS_", "TORCH_")
# glibc would give freed tensors back to the kernel, and fault their pages in at the next step (8 % of it).
_KEPT_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(128 << 20),
    "MALLOC_TOP_PAD_": str(16 << 20),
}
_THREAD_COUNTS = ("MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# Switches that change no bit, or whose effect is read back from the libraries themselves.
_NO_IDENTITY = re.compile(r"MKL_NUM_THREADS|MKL_DYNAMIC|.*_VERBOSE")
_RENDEZVOUS = re.compile(r"(LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")
_LOOPBACK = "lo"
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_CUBLAS_VALUES = (":4096:8", ":16:8")
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


def kernel_folder() -> Path | None:
    """Return this user's folder for compiled kernels, where there is a home for it (XDG base directories)."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base, "rlsp", "kernels") if os.path.isabs(base) else None


def rank_environment(threads: int, interface: str | None = _LOOPBACK) -> dict[str, str]:
    """Return the environment for a process that hosts ranks on this machine.

    Thread counts are fixed before any library starts its pool. Switches of oneDNN, MKL and ATen stay as
    found: they belong to the kernel identity, and the user may have set them on purpose. What torchrun would
    read is taken out and the tracker is silenced: ranks get their place as an argument and own no W&B run.

    Args:
        threads: Intra-operator threads of one rank.
        interface: The network interface by which ranks reach each other; None leaves the choice to the
            backend. What the user's own environment says goes before.
    """
    environment = {name: value for name, value in os.environ.items() if not _RENDEZVOUS.fullmatch(name)}
    environment.update(dict.fromkeys(_THREAD_COUNTS, str(threads)))
    environment.update(
        MKL_DYNAMIC="FALSE",
        OMP_DYNAMIC="FALSE",
        PYTHONHASHSEED="0",
        PYTHONUNBUFFERED="1",
        WANDB_MODE="disabled",
        WANDB_SILENT="true",
        TOKENIZERS_PARALLELISM="false",
    )
    environment.setdefault(_CUBLAS, _CUBLAS_VALUES[0])
    for name, value in _KEPT_MEMORY.items():
        environment.setdefault(name, value)
    if interface == _LOOPBACK:  # all ranks are on this machine: stay off its other interfaces
        if Path("/sys/class/net", _LOOPBACK).exists():
            environment.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
    elif interface is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
        environment.setdefault("NCCL_SOCKET_IFNAME", interface)
    return environment


def engine_environment(processes: int) -> dict[str, str]:
    """Return the environment for an external engine on this machine, whose ranks wait while it generates.

    What a rank's environment fixes for the sake of bits is taken back. What a user set for vLLM stays.

    Args:
        processes: Processes of the engine, which share the processor's cores.
    """
    fixed = {*_THREAD_COUNTS, "MKL_DYNAMIC", "OMP_DYNAMIC", "PYTHONHASHSEED"}
    environment = {name: value for name, value in os.environ.items() if name not in fixed}
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    chosen = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # no process more than needed between rank 0 and the model
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(max(cores // processes, 1)),
        "TORCHDYNAMO_DISABLE": "1",  # else vLLM compiles its sampler as it draws first, for half a minute
    }
    return {**chosen, **environment}


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
        self._undo = ExitStack()
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
        self._undo.close()

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
        self._undo.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(threads)

    def _prepare_cublas(self) -> None:
        """See to the work space without which cuBLAS is not deterministic; it is read as CUDA comes up."""
        import torch

        found = os.environ.get(_CUBLAS)
        if found in _CUBLAS_VALUES:
            return
        if found is not None:
            raise DeterminismError(
                f"{_CUBLAS}={found} is not deterministic: legal: {' or '.join(_CUBLAS_VALUES)}"
            )
        if torch.cuda.is_initialized():
            raise DeterminismError(
                f"too late: CUDA is in use; set {_CUBLAS}={_CUBLAS_VALUES[0]} before it is"
            )
        for variables in (os.environ, _AT_LOAD):
            self._undo.callback(variables.pop, _CUBLAS, None)
            variables[_CUBLAS] = _CUBLAS_VALUES[0]

    def _set_arithmetic(self) -> None:
        import torch

        strict = torch.are_deterministic_algorithms_enabled()
        lenient = torch.is_deterministic_algorithms_warn_only_enabled()
        self._undo.callback(torch.use_deterministic_algorithms, strict, warn_only=lenient)
        torch.use_deterministic_algorithms(True, warn_only=False)
        self._undo.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("highest")
        for path, attribute, wanted in _FLAGS:
            owner = _torch(path)
            self._undo.callback(setattr, owner, attribute, getattr(owner, attribute))
            setattr(owner, attribute, wanted)
        self._undo.callback(torch.set_flush_denormal, flushes_subnormals())
        torch.set_flush_denormal(False)


def unmarked(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return memory of the processor that somebody writes at once and whole: not marked as never written."""
    import torch

    storage = torch.UntypedStorage(dtype.itemsize * math.prod(shape))
    return torch.empty(0, dtype=dtype).set_(storage).view(shape)


def flushes_subnormals() -> bool:
    """Tell whether this thread's floating-point unit replaces subnormal numbers by zero."""
    one = float(len("1"))  # no literal: the product must not be folded when this is compiled
    return 5e-324 * one == 0.0


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
        **{f"{path}.{attribute}": getattr(_torch(path), attribute) for path, attribute, _ in _FLAGS},
    }


def kernel_identity(device: str = "cpu") -> dict[str, object]:
    """Name everything that chooses kernels and so bits (NUMERICS rule 10); equal identities, comparable bits.

    Args:
        device: "cpu", or "cuda" to name the GPU as well.
    """
    import torch

    build = torch.__config__.show()
    prefixes = _KERNEL_PREFIXES if device == "cuda" else _CPU_PREFIXES
    found = environment_switches().items()
    identity: dict[str, object] = {
        "machine": platform.machine(),
        **processor(),
        "torch": torch.__version__,
        "aten_capability": torch.backends.cpu.get_cpu_capability(),
        "onednn": _match(r"MKL-DNN v(\S+ \(Git Hash \w+)\)", build).replace(" (Git Hash ", "+"),
        "mkl": _match(r"Math Kernel Library Version (\S+)", build),
        "openmp": _match(r"OpenMP (\S+)", build),
        "environment": {k: v for k, v in found if k.startswith(prefixes) and not _NO_IDENTITY.fullmatch(k)},
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
    return {k: v for k, v in environment_switches().items() if k.startswith(_KERNEL_PREFIXES)}


# What the libraries saw: they read their switches once, and torch is imported after this module or with it.
_AT_LOAD = _kernel_environment()


def _refuse_late_environment() -> None:
    """Refuse kernel switches that were changed after the libraries read them: recorded, but not obeyed."""
    now = _kernel_environment()
    late = sorted(name for name in now.keys() | _AT_LOAD.keys() if now.get(name) != _AT_LOAD.get(name))
    if late and "torch" in sys.modules:
        changes = (
            f"{name}: {_AT_LOAD.get(name, '(not set)')} → {now.get(name, '(not set)')}" for name in late
        )
        raise DeterminismError(f"too late: changed after the libraries were loaded: {', '.join(changes)}")


def _check(threads: int) -> None:
    """Check that the switches hold, in torch and in the libraries below it."""
    import torch

    info = torch.__config__.parallel_info()
    counts = {"torch": str(torch.get_num_threads())}
    for library, function in (("OpenMP", "omp_get_max_threads"), ("MKL", "mkl_get_max_threads")):
        if found := _match(rf"{function}\(\) : (\d+)", info):
            counts[library] = found
    if set(counts.values()) != {str(threads)}:
        listed = ", ".join(f"{library} {count}" for library, count in counts.items())
        raise DeterminismError(f"threads={threads} was asked for, but this process runs {listed}")
    wanted = {f"{path}.{attribute}": value for path, attribute, value in _FLAGS}
    wanted |= {"deterministic_algorithms": True, "deterministic_warn_only": False, "flush_subnormals": False}
    now = switches()
    if wrong := sorted(name for name, value in wanted.items() if now[name] != value):
        raise DeterminismError(f"these switches were set and do not hold: {', '.join(wrong)}")


def _torch(path: str) -> object:
    import torch

    return reduce(getattr, path.split("."), torch)


def processor() -> dict[str, object]:
    """Name the CPU and its vector instructions; Linux."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return {"cpu": platform.processor() or "unknown", "isa": []}
    names = ("model name", "cpu family", "model", "stepping")
    cpu, *numbers = (_match(rf"(?m)^{name}\s*:\s*(.*)$", text) for name in names)
    flags = _match(r"(?m)^(?:flags|Features)\s*:\s*(.*)$", text).split()
    return {
        "cpu": cpu or platform.processor() or "unknown",
        "cpu_family_model_stepping": "-".join(numbers),
        "isa": sorted(flag for flag in flags if _ISA_FLAG.match(flag)),
    }


def _match(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match.group(1) if match else ""
