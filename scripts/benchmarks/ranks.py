"""Run a measurement on the ranks of a config, as a run's ranks live: forked, one thread each, over gloo."""

from __future__ import annotations

import json
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from rlsp.board import Place
from rlsp.cli.compose import checked, open_composer
from rlsp.config import Config, Job
from rlsp.launch import compute

Options = Mapping[str, Any]
Body = Callable[[Config, Place, Options], Any]
Times = dict[str, dict[str, list[float]]]
_NO_FLAGS = Namespace(config_path=None, config_name=None, config_dir=None)


def compose(*overrides: str) -> Config:
    """Compose conf/ with overrides, as the command line does."""
    with open_composer(_NO_FLAGS) as composer:
        return checked(composer.compose(overrides))


def on_ranks(config: Config, entry: str, options: Options | None = None) -> list[Any]:
    """Run `entry` (module:function, made by `rank_function`) on every rank; return what each returned.

    Raises:
        RuntimeError: A rank failed; the message says why.
    """
    with tempfile.TemporaryDirectory(prefix="rlsp-bench-") as folder:
        job = Job(config, "bench", folder, (), (), "")
        (Path(folder) / "options.json").write_text(json.dumps(options or {}))
        if abort := compute(job, entry):
            raise RuntimeError("\n".join((abort.reason, *abort.lines)))
        return [json.loads(_result(job, rank).read_text()) for rank in range(config.world_size)]


def rank_function(body: Body) -> Callable[[Job, Place], None]:
    """Let a measurement live as a rank: deterministic switches, a process group, a result that is JSON."""

    def live(job: Job, place: Place) -> None:
        from rlsp import determinism
        from rlsp.model.assemble import exact_compiled
        from rlsp.numerics.compiled import using
        from rlsp.run import join

        options = json.loads((Path(job.run_dir) / "options.json").read_text())
        with determinism.apply(job.config.numerics.threads, job.config.device.kind.value):
            join(job, place)
            with using(exact_compiled(job.config.numerics.compiled, job.config.device.kind)):
                result = body(job.config, place, options)
        _result(job, place.rank).write_text(json.dumps(result))

    return live


def alternate(sides: Mapping[str, Callable[[], object]], repeats: int) -> Times:
    """Time every side in turn, A B A B …, after one call each that does not count.

    Returns:
        For each side its wall and CPU seconds on this rank, one a repeat. Ranks start each call together.
    """
    import torch.distributed as dist

    times: Times = {name: {"wall": [], "cpu": []} for name in sides}
    for turn in range(repeats + 1):
        for name, call in sides.items():
            if dist.is_initialized():
                dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            call()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if turn:
                times[name]["wall"].append(wall)
                times[name]["cpu"].append(cpu)
    return times


def slowest(every: list[Times], side: str) -> float:
    """Return the median over repeats of a side's wall seconds, each repeat as long as its slowest rank."""
    return float(median(max(walls) for walls in zip(*(times[side]["wall"] for times in every), strict=True)))


def cpu_total(every: list[Times], side: str) -> float:
    """Return the median over repeats of a side's CPU seconds, summed over the ranks."""
    return float(median(sum(cpus) for cpus in zip(*(times[side]["cpu"] for times in every), strict=True)))


def ratio_text(every: list[Times], top: str, bottom: str) -> str:
    """Say what a ratio of two sides is made of."""
    a, b = slowest(every, top), slowest(every, bottom)
    cpu_a, cpu_b = cpu_total(every, top), cpu_total(every, bottom)
    repeats = len(every[0][top]["wall"])
    return (
        f"{top} {1e3 * a:.3g} ms, {bottom} {1e3 * b:.3g} ms, medians of {repeats} interleaved repeats; "
        f"CPU time {1e3 * cpu_a:.3g} and {1e3 * cpu_b:.3g} ms, ratio {cpu_a / cpu_b:.2f}"
    )


def forget_peak() -> float:
    """Let the kernel (Linux) forget this process's largest resident size; return the present one, MiB."""
    Path("/proc/self/clear_refs").write_text("5")
    return _resident_mib("VmRSS")


def peak_mib() -> float:
    """Return the largest resident size of this process since it was forgotten, MiB."""
    return _resident_mib("VmHWM")


def _resident_mib(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024


def _result(job: Job, rank: int) -> Path:
    return Path(job.run_dir) / f"result-{rank:02d}.json"
