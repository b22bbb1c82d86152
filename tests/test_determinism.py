"""Switches that decide bits are set, hold, nest, and are undone; what comes too late is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlsp import determinism
from rlsp.determinism import DeterminismError, apply, kernel_identity, rank_environment, switches

ROOT = Path(__file__).resolve().parents[1]


def without_interop(found: dict[str, object]) -> dict[str, object]:
    """Leave out the one switch that torch lets nobody take back."""
    return {name: value for name, value in found.items() if name != "interop_threads"}


def plant_nondeterministic_operator() -> None:
    torch.zeros(4).put_(torch.tensor([0]), torch.ones(1))


def test_a_planted_nondeterministic_operator_raises_inside_and_only_inside() -> None:
    with apply(1), pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
        plant_nondeterministic_operator()
    plant_nondeterministic_operator()


def test_every_switch_is_as_it_was_after_an_exception() -> None:
    before = without_interop(switches())
    seen = []

    def fail() -> None:
        with apply(1):
            seen.append(without_interop(switches()))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert seen != [before]
    assert without_interop(switches()) == before


def test_switches_nest_and_each_level_restores_what_it_found() -> None:
    found = torch.get_num_threads()
    with apply(1):
        with apply(2) as inner:
            assert torch.get_num_threads() == 2
            inner.undo()
            inner.undo()
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
        assert torch.are_deterministic_algorithms_enabled()
    assert torch.get_num_threads() == found


def test_flushing_of_subnormals_is_switched_off_and_comes_back() -> None:
    torch.set_flush_denormal(True)
    try:
        assert determinism.flushes_subnormals()
        with apply(1):
            assert not determinism.flushes_subnormals()
            tiny = torch.full((64,), 1e-40)
            assert (tiny * 0.5 != 0).all()
        assert determinism.flushes_subnormals()
    finally:
        torch.set_flush_denormal(False)


def test_reduced_precision_is_off_inside() -> None:
    torch.set_float32_matmul_precision("medium")
    try:
        with apply(1):
            assert torch.get_float32_matmul_precision() == "highest"
            assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction is False
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_kernel_switch_that_is_set_after_torch_was_loaded_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = without_interop(switches())
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    with pytest.raises(DeterminismError, match=r"too late: .*ONEDNN_MAX_CPU_ISA: \(not set\) → AVX2"):
        apply(1)
    assert without_interop(switches()) == before


def test_a_thread_count_that_does_not_hold_is_refused_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = without_interop(switches())
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    asked = torch.get_num_threads() + 1
    with pytest.raises(DeterminismError, match=f"threads={asked} was asked for, but this process runs torch"):
        apply(asked)
    assert without_interop(switches()) == before


def test_inter_operator_threads_that_run_already_are_refused() -> None:
    code = (
        "import torch; from rlsp.determinism import apply, DeterminismError\n"
        "torch.set_num_interop_threads(2)\n"
        "try: apply(1)\n"
        "except DeterminismError as error: print(error); print(torch.are_deterministic_algorithms_enabled())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    message, strict = done.stdout.splitlines()
    assert message.startswith("too late: this process already runs 2 inter-operator threads")
    assert strict == "False"


def test_a_work_space_of_cublas_is_set_for_cuda_only_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "CUBLAS_WORKSPACE_CONFIG"
    monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(determinism, "_AT_LOAD", dict(determinism._kernel_environment()))
    with apply(1, "cpu"):
        assert determinism.environment_values([name]) == {name: None}
    with apply(1, "cuda"):
        assert determinism.environment_values([name]) == {name: ":4096:8"}
        with apply(1, "cuda"):
            pass
        assert determinism.environment_values([name]) == {name: ":4096:8"}
    assert determinism.environment_values([name]) == {name: None}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(DeterminismError, match="too late: CUDA is in use"):
        apply(1, "cuda")


def test_ranks_get_thread_counts_and_no_place_and_keep_kernel_switches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {
        "RANK": "3",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "x",
        "MKL_CBWR": "AVX2",
    }.items():
        monkeypatch.setenv(name, value)
    environment = rank_environment(1)
    assert {environment[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")} == {
        "1"
    }
    assert environment["PYTHONHASHSEED"] == "0"
    assert environment["WANDB_MODE"] == "disabled"
    assert environment["MALLOC_TRIM_THRESHOLD_"] == str(128 << 20)
    assert environment["MKL_CBWR"] == "AVX2"
    assert environment.keys().isdisjoint({"RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"})
    assert determinism.environment_switches(environment)["MKL_CBWR"] == "AVX2"


def test_ranks_of_several_machines_are_told_their_interface_unless_the_user_says_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert "NCCL_SOCKET_IFNAME" not in rank_environment(1)
    assert [rank_environment(1, "eth7")[name] for name in names] == ["eth7", "eth7"]
    assert rank_environment(1, None).keys().isdisjoint(names)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert [rank_environment(1, "eth7")[name] for name in names] == ["ib0", "eth7"]


def test_the_kernel_identity_names_processor_libraries_and_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    with apply(1):
        identity = kernel_identity()
    assert identity["cpu"]
    assert identity["isa"]
    assert identity["torch"] == torch.__version__
    assert identity["aten_capability"] == torch.backends.cpu.get_cpu_capability()
    assert identity["onednn"] or not torch.backends.mkldnn.is_available()
    assert identity["mkl"] or not torch.backends.mkl.is_available()
    assert identity["switches"]["threads"] == 1
    assert identity["switches"]["deterministic_algorithms"] is True
    monkeypatch.setenv("MKL_NUM_THREADS", "1")
    monkeypatch.setenv("DNNL_VERBOSE", "1")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    assert kernel_identity()["environment"].keys() - identity["environment"].keys() == {"ATEN_CPU_CAPABILITY"}
