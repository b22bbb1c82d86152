"""A model whose weights lie on disk: its shape comes from there, and what was asked besides must agree."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from rlsp.cli.refusal import RefusalError, first_line
from rlsp.config import ModelConfig, Violation
from rlsp.pretrained.architecture import PretrainedError
from rlsp.pretrained.folder import read_shape, tensor_lines

_PATH = "model.path"
_LEGAL = "a folder with config.json and safetensors, or a GGUF file"


def fill_in(cfg: DictConfig) -> None:
    """Give a model the shape that its path decides, where the config leaves it open.

    Raises:
        RefusalError: Nothing usable lies there, or a value that was given contradicts it; all are listed.
    """
    model = cfg.get("model")
    if not isinstance(model, DictConfig):
        return  # what is wrong with that is for the schema to say
    if OmegaConf.is_missing(model, "path"):
        raise RefusalError([str(Violation(_PATH, "(missing)", _LEGAL))])
    path = model.get("path")
    if not isinstance(path, str):
        return
    try:
        fields = read_shape(path)
    except PretrainedError as error:
        raise RefusalError(
            [str(Violation(_PATH, path, f"{_LEGAL}; {line}")) for line in error.lines]
        ) from error
    lines = [line for key, value in fields.items() if (line := _settle(model, key, value)) is not None]
    if lines:
        raise RefusalError(lines)


def weight_lines(model: ModelConfig) -> list[str]:
    """List what is wrong with a model's tensors on disk, one line a reason; only headers are read."""
    if model.path is None:
        return []
    return [str(Violation(_PATH, model.path, f"{_LEGAL}; {line}")) for line in tensor_lines(model)]


def _settle(model: DictConfig, key: str, value: Any) -> str | None:
    """Set a field that is open; say what is wrong with one that was given."""
    try:
        if OmegaConf.is_missing(model, key) or model[key] == {}:  # no YAML leaves a mapping open otherwise
            with flag_override(model, ["struct", "readonly"], [False, False]):
                model[key] = value
            return None
        given = model[key]
    except OmegaConfBaseException as error:
        return f"model.{key}={value}: {first_line(error)} (from {model.path})"
    plain = OmegaConf.to_container(given) if OmegaConf.is_config(given) else given
    if plain == value:
        return None
    return str(Violation(f"model.{key}", plain, f"{value}, as {model.path} has it (left out with model=hf)"))
