"""The process in which vLLM generates: `python -m rlsp.vllm_engine`, told what to build on its stdin.

It is started by rank 0 alone, knows nothing of the other ranks, and dies with the rank. What it prints goes
to logs/engine.log. The other end is `rlsp.rl.rollout.external`.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsp.config import Config, from_plain
from rlsp.host import die_with_parent
from rlsp.rl.apart import answering

if TYPE_CHECKING:
    from torch import Tensor

_GIB = 1 << 30
_TRACE_LINES = 12


class Loader:
    """What rlsp adds to vLLM's workers: weights from a folder, and what can be proved of them."""

    def rlsp_load(self, folder: str, plain: dict[str, Any]) -> tuple[str, int, int]:
        """Load a folder's weights and say which they are.

        Args:
            folder: Holds safetensors files.
            plain: The run's config.

        Returns:
            The digest of the tensors that vLLM's loader took, in the trainer's terms; how many of their
            elements were found again in vLLM's model, with the same bits; how many there are.

        Raises:
            RuntimeError: An element that can be found again has other bits.
        """
        from rlsp.model.assemble import contract_of
        from rlsp.model.hf import logical_weights
        from rlsp.model.weights import digest_of

        config = from_plain(plain)
        state = _tensors(Path(folder))
        worker: Any = self
        waiting = iter(state.items())
        worker.reload_weights(weights_iterator=waiting)
        if (left := next(waiting, None)) is not None:
            raise RuntimeError(f"vLLM did not take {left[0]}")
        found = _found_again(state, worker.model_runner.get_model().named_parameters())
        digest = digest_of(logical_weights(state, config.model, contract_of(config)))
        return digest, found, sum(x.numel() for x in state.values())


class Engine:
    """vLLM's interface, reduced to what a run asks of it."""

    def __init__(self, config: Config, folder: str) -> None:
        """Build the model of a folder with a config.json; its weights mean nothing yet."""
        from vllm import LLM

        rollout = config.rollout
        assert rollout.kv_cache_gib is not None
        self._version: int | None = None
        options: dict[str, Any] = {"max_model_len": -1, **rollout.options}  # -1: what the cache can hold
        self._llm = LLM(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype=config.model.dtype.value,
            tensor_parallel_size=rollout.tp,
            kv_cache_memory_bytes=int(rollout.kv_cache_gib * _GIB),
            enable_prefix_caching=False,  # it would outlive the weights that made it
            logprobs_mode="processed_logprobs",  # after the temperature, as training computes them
            generation_config="vllm",
            seed=0,
            disable_log_stats=True,
            worker_extension_cls=f"rlsp.vllm_engine.{Loader.__qualname__}",
            **options,
        )

    @property
    def max_tokens(self) -> int:
        """Return the longest sequence, prompt and response, that the cache can hold."""
        return int(self._llm.llm_engine.vllm_config.model_config.max_model_len)

    def load(self, version: int, folder: str, plain: dict[str, Any]) -> dict[str, Any]:
        """Take the weights of a folder under a version."""
        self._version = None  # nothing can be drawn if this fails half-way
        said = self._llm.collective_rpc("rlsp_load", args=(folder, plain))
        (digest, _, elements), digests = said[0], {one[0] for one in said}
        if len(digests) > 1:
            raise RuntimeError(f"the engine's processes took different weights: {', '.join(sorted(digests))}")
        self._version = version
        return {"version": version, "digest": digest, "found": said[0][1], "elements": elements}

    def draw(self, version: int, temperature: float, stop: list[int], requests: list[Any]) -> dict[str, Any]:
        """Draw a response for every (prompt, limit, seed), and record each token's log-probability."""
        from vllm import SamplingParams

        if version != self._version:
            raise RuntimeError(f"version {version} was to be drawn with, the engine holds {self._version}")
        sampling = [
            SamplingParams(
                temperature=temperature,
                max_tokens=limit,
                seed=seed,
                stop_token_ids=stop,
                ignore_eos=True,  # the list above says what ends a response
                logprobs=0,  # of the drawn token alone
                detokenize=False,
            )
            for _, limit, seed in requests
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt, _, _ in requests]
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
        drawn = [(list(one.outputs[0].token_ids), one.outputs[0].logprobs) for one in outputs]
        return {
            "version": self._version,
            "tokens": [tokens for tokens, _ in drawn],
            "logp": [
                [place[token].logprob for token, place in zip(tokens, places, strict=True)]
                for tokens, places in drawn
            ],
        }


def main() -> int:
    """Build the engine and answer until stdin ends."""
    reply = answering()
    opening = json.loads(sys.stdin.readline())
    die_with_parent(opening["parent"])
    plain = opening["config"]
    try:
        engine = Engine(from_plain(plain), opening["folder"])
    except Exception as error:
        reply(json.dumps(_fault(error)))
        return 1
    reply(json.dumps({"ready": True, "max_tokens": engine.max_tokens}))
    for line in sys.stdin:
        request = json.loads(line)
        what = request.pop("do")
        try:
            answer = engine.load(**request, plain=plain) if what == "load" else engine.draw(**request)
        except Exception as error:
            answer = _fault(error)
        reply(json.dumps(answer))
    return 0


def _tensors(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: x for path in sorted(folder.glob("*.safetensors")) for name, x in load_file(path).items()}


def _found_again(state: Mapping[str, Tensor], parameters: Iterable[tuple[str, Tensor]]) -> int:
    """Count the elements that vLLM's model has under their own name, whole, with the same bits.

    On a processor vLLM packs the matrices of its linear layers and drops what it was given; it joins others.
    """
    from rlsp import bits

    found = 0
    for name, held in parameters:
        given = state.get(name)
        if given is None or held.shape[1:] != given.shape[1:] or held.shape[0] < given.shape[0]:
            continue
        if not bits.same_bits(held[: given.shape[0]].cpu(), given):  # a vocabulary is padded
            raise RuntimeError(f"{name} in the engine's model is not what was handed to it")
        found += given.numel()
    return found


def _fault(error: Exception) -> dict[str, Any]:
    traceback.print_exception(error)
    lines = "".join(traceback.format_exception(error)).splitlines()
    return {"fault": f"{type(error).__name__}: {error}", "details": lines[-_TRACE_LINES:]}


if __name__ == "__main__":
    sys.exit(main())
