"""A rank function that lists what a rank imports after its host has preloaded, as `rlsp.run.run_rank` is."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from rlsp.board import Place
from rlsp.config import Job
from rlsp.preload import preload

_COMPILE = torch.compile
preload()

from rlsp import run  # noqa: E402  (what a host does in this order)

HEAVY = ("torch._inductor.compile_fx", "wandb")
FOUND = {"heavy": [name for name in HEAVY if sys.modules.get(name)], "restored": torch.compile is _COMPILE}


def list_imports(job: Job, place: Place) -> None:
    before = set(sys.modules)
    run.run_rank(job, place)
    late = sorted(name for name in set(sys.modules) - before if name.split(".")[0] in ("torch", "megatron"))
    (Path(job.run_dir) / f"imports-{place.rank}.json").write_text(json.dumps({**FOUND, "late": late}))
