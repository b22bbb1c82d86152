"""TRL's GRPOTrainer, one step a turn: `python -m benchmarks.peer_trl OPTIONS`."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.peer_model import characters, qwen3
from benchmarks.peers import GRPO, PROMPT, SHAPE
from benchmarks.turns import Turn

THREADS = 2


class InTurn(TrainerCallback):
    """Let every step, rollout and update, be one turn."""

    def __init__(self, turn: Turn) -> None:
        self._turn, self._started = turn, 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Wait for the turn."""
        self._turn.wait()
        self._started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Pass it on."""
        self._turn.done(time.perf_counter() - self._started)


def main() -> None:
    """Train for as many steps as there are turns."""
    options = json.loads(sys.argv[1])
    torch.set_num_threads(THREADS)
    turn = Turn(options["folder"], "peer", "rlsp")
    model = qwen3(*SHAPE)
    tokenizer = characters(model.config.vocab_size)
    prompt = "".join(chr(32 + i) for i in PROMPT)
    arguments = GRPOConfig(
        output_dir=f"{options['folder']}/trl",
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=options["sequences"],
        num_generations=options["samples"],
        max_completion_length=options["tokens"],
        generation_kwargs={"min_new_tokens": options["tokens"]},
        max_steps=options["turns"],
        learning_rate=1e-3,
        beta=0.0,
        temperature=1.0,
        save_strategy="no",
        report_to=[],
        logging_strategy="no",
        disable_tqdm=True,
        gradient_checkpointing=False,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": prompt}] * (GRPO["prompts"] * (options["turns"] + 1))),
        processing_class=tokenizer,
        callbacks=[InTurn(turn)],
    )
    try:
        trainer.train()
    finally:
        turn.end()


if __name__ == "__main__":
    main()
