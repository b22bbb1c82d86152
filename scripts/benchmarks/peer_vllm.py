"""vLLM's CPU build, one rollout a turn: `python -m benchmarks.peer_vllm OPTIONS`."""

from __future__ import annotations

import json
import sys

from vllm import LLM, SamplingParams

from benchmarks.peer_model import qwen3
from benchmarks.peers import PROMPT, SHAPE, take_turns
from benchmarks.turns import Turn


def main() -> None:
    """Generate once a turn."""
    options = json.loads(sys.argv[1])
    folder = f"{options['folder']}/model"
    turn = Turn(options["folder"], "peer", "rlsp")
    try:
        qwen3(*SHAPE).save_pretrained(folder)
        engine = LLM(
            model=folder,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,
            enable_prefix_caching=False,
            max_model_len=1024,
            max_num_seqs=options["sequences"],
        )
    except BaseException:
        turn.end()
        raise
    tokens = options["tokens"]
    sampling = SamplingParams(
        temperature=1.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False
    )
    prompts = [{"prompt_token_ids": list(PROMPT)}] * options["sequences"]

    def rollout() -> None:
        answers = engine.generate(prompts, sampling, use_tqdm=False)
        assert all(len(answer.outputs[0].token_ids) == tokens for answer in answers)

    take_turns(turn, options["turns"], rollout)


if __name__ == "__main__":
    main()
