"""Compose conf/ and overrides into one checked config, or list everything that is wrong with them."""

from __future__ import annotations

import copy
import secrets
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from hydra import version
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from rlsp.cli.overrides import MAX_JOBS, OPTIONAL_GROUPS, count_values
from rlsp.cli.pretrained import fill_in
from rlsp.cli.refusal import COMPOSITION_ERRORS, RefusalError, first_line
from rlsp.config import (
    Config,
    ConfigError,
    Violation,
    from_plain,
    leaf_kinds,
    legal_text,
    register_schema,
    unknown_key,
    violations,
)

CONFIG_NAME = "config"
VERSION_BASE = "1.3"

_EXTRAS = {
    "joblib": "joblib",
    "slurm": "submitit",
    "submitit_local": "submitit",
    "submitit_slurm": "submitit",
    "ray": "ray",
}
_UNPARSABLE = "{}: legal: key=value, with quotes around a value that has spaces or special characters"


def new_id() -> str:
    """Make a run id, `<UTC yyyymmdd-hhmmss>-<6 hex>`."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


@cache
def process_id() -> str:
    """Return the id of this command: its run's, or that of its sweep."""
    return new_id()


def conf_dir() -> Path:
    """Find conf/: inside the package when it was installed from a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if (inside / f"{CONFIG_NAME}.yaml").is_file() else package.parent / "conf"


def checked(cfg: DictConfig) -> Config:
    """Read a composed config into the frozen object; a model with a path is given its shape in `cfg`.

    Raises:
        RefusalError: A key is missing, a reference leads nowhere or a rule is broken; all are listed.
    """
    fill_in(cfg)
    plain = copy.deepcopy(cfg)
    with flag_override(plain, ["struct", "readonly"], [False, False]):
        plain.pop("hydra", None)
    try:
        container = OmegaConf.to_container(plain, resolve=True, throw_on_missing=True, enum_to_str=True)
        config = from_plain(container)
    except OmegaConfBaseException as error:
        key, reason = error.full_key or "config", str(error).splitlines()[0]
        raise RefusalError([f"{key}: {reason}; legal: {_legal(key)}"]) from error
    except ConfigError as error:
        raise RefusalError([str(violation) for violation in error.violations]) from error
    if found := violations(config):
        raise RefusalError([str(violation) for violation in found])
    return config


class Composer:
    """Compose as one command line says."""

    def __init__(self, hydra: Hydra, config_name: str) -> None:
        self.hydra = hydra
        self.config_name = config_name
        self._parser = OverridesParser.create(config_loader=hydra.config_loader)

    def compose(self, overrides: Sequence[str], mode: RunMode = RunMode.RUN) -> DictConfig:
        """Compose without checking; hydra's own node is included."""
        return self.hydra.compose_config(
            config_name=self.config_name, overrides=list(overrides), run_mode=mode, from_shell=True
        )

    def require_run(self, overrides: Sequence[str]) -> DictConfig:
        """Compose one run.

        Raises:
            RefusalError: Overrides cannot be composed or the values that the others make are illegal.
        """
        usable, lines = self._sift(overrides)
        cfg: DictConfig | None = None
        try:
            cfg = self.compose(usable)
            checked(cfg)
        except RefusalError as refusal:
            lines += refusal.lines
        except COMPOSITION_ERRORS as error:
            lines.append(first_line(error))
        if lines or cfg is None:
            raise RefusalError(lines)
        return cfg

    def require_composable(self, overrides: Sequence[str]) -> None:
        """See whether overrides compose, whatever the values that they make.

        Raises:
            RefusalError: They do not.
        """
        if lines := self._sift(overrides)[1]:
            raise RefusalError(lines)

    def require_sweep(self, overrides: Sequence[str]) -> DictConfig:
        """Compose a sweep's master config; whether each job's values are legal is for the job to find out.

        Raises:
            RefusalError: An override, or one of the values that it sweeps over, cannot be composed.
        """
        fixed, swept, lines = self._expand(overrides)
        usable, bad = self._sift(fixed)
        lines += bad
        for variant in swept:
            if (error := self._composes([*usable, variant])) is not None:
                lines.append(self._explain(variant, error))
        if lines:
            raise RefusalError(lines)
        try:
            return self.compose(overrides, RunMode.MULTIRUN)
        except COMPOSITION_ERRORS as error:
            raise RefusalError([first_line(error)]) from error

    def _sift(self, overrides: Sequence[str]) -> tuple[list[str], list[str]]:
        """Separate the overrides that compose from what is wrong with the others, each tried alone.

        Hydra's own come first and stay: they may bring the folder in which an experiment lies.
        """
        if self._composes(overrides) is None:
            return list(overrides), []
        if (error := self._composes([])) is not None:
            raise RefusalError([first_line(error)]) from error
        base: list[str] = []
        usable: list[str] = []
        lines: list[str] = []
        for override in sorted(overrides, key=lambda text: not text.lstrip("+~").startswith("hydra")):
            if (error := self._composes([*base, override])) is not None:
                lines.append(self._explain(override, error))
            else:
                usable.append(override)
                base += [override] if override.startswith("hydra") else []
        return usable, lines

    def _composes(self, overrides: Sequence[str]) -> Exception | None:
        try:
            self.compose(overrides)
        except COMPOSITION_ERRORS as error:
            return error
        return None

    def _expand(self, overrides: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
        """Separate fixed overrides, the single values of swept ones, and lines about the unparsable."""
        fixed: list[str] = []
        swept: list[str] = []
        lines: list[str] = []
        for text in overrides:
            try:
                override = self._parse(text)
                if not override.is_sweep_override():
                    fixed.append(text)
                elif count_values(override) > MAX_JOBS:
                    lines.append(f"{text}: legal: at most {MAX_JOBS} values")
                else:
                    swept += [job[0] for job in BasicSweeper.split_arguments([override], None)[0]]
            except OverrideParseException:
                lines.append(_UNPARSABLE.format(text))
            except COMPOSITION_ERRORS as error:  # for instance a kind of sweep that the sweeper lacks
                lines.append(f"{text}: {first_line(error)}")
        return fixed, swept, lines

    def parse(self, overrides: Sequence[str]) -> list[Override]:
        """Parse overrides that compose."""
        return self._parser.parse_overrides(list(overrides))

    def _parse(self, text: str) -> Override:
        return self._parser.parse_overrides([text])[0]

    def _explain(self, text: str, error: Exception) -> str:
        """Say what is wrong with one override in the words of the schema, or else in Hydra's."""
        try:
            override = self._parse(text)
        except COMPOSITION_ERRORS:
            return _UNPARSABLE.format(text)
        if override.is_sweep_override():
            return f"{text}: legal: one value; --multirun sweeps over several"
        if override.is_delete() or override.is_hydra_override():
            return f"{text}: {first_line(error)}{_extra_for(override)}"
        return self._explain_value(text, override, error)

    def _explain_value(self, text: str, override: Override, error: Exception) -> str:
        key, value = override.key_or_group, override.get_value_string()
        if not key:
            return _UNPARSABLE.format(text)
        kinds = dict(leaf_kinds(Config))
        options = self.hydra.config_loader.get_group_options(key)
        if override.is_add() and key in kinds:
            return f"{text}: legal: {key}={value} (the key is there already: without the plus sign)"
        if value in options:
            return f"{text}: {first_line(error)}"
        if options:
            none = ["null (alone, not in a sweep)"] if key in OPTIONAL_GROUPS else []
            return str(Violation(key, value, ", ".join([*options, *none])))
        if key in kinds:
            return str(Violation(key, value, legal_text(kinds[key])))
        return str(unknown_key(key, value, list(kinds)))


@contextmanager
def open_composer(args: Namespace) -> Iterator[Composer]:
    """Set Hydra up as `hydra.main` would, for this command line's config folder and name.

    Raises:
        RefusalError: A folder that the command line names is absent.
    """
    version.setbase(VERSION_BASE)
    search_path = create_config_search_path(str(Path(args.config_path or conf_dir()).resolve()))
    if args.config_dir is not None:
        folder = Path(args.config_dir).resolve()
        if not folder.is_dir():
            raise RefusalError([f"--config-dir {args.config_dir}: no such folder"])
        search_path.prepend("command-line", f"file://{folder}", anchor=SearchPathQuery(provider="schema"))
    hydra = Hydra.create_main_hydra2(task_name="rlsp", config_search_path=search_path)
    try:
        yield Composer(hydra, args.config_name or CONFIG_NAME)
    finally:
        GlobalHydra.instance().clear()


def _extra_for(override: Override) -> str:
    """Say which extra brings the launcher that an override asks for."""
    if override.key_or_group != "hydra/launcher" or override.is_delete():
        return ""
    extra = _EXTRAS.get(override.get_value_string())
    return f"; it comes with `pip install 'rlsp[{extra}]'`" if extra else ""


def _legal(key: str) -> str:
    kinds = dict(leaf_kinds(Config))
    return legal_text(kinds[key]) if key in kinds else "a value"


def _sweep_group() -> str | None:
    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return None
    return Path(HydraConfig.get().sweep.dir).name


# At import, so that the worker processes of a sweep's launcher have them too. Hydra copies a sweep's cached
# values to its jobs: they share one sweep id.
register_schema()
OmegaConf.register_new_resolver("run_id", process_id, use_cache=True, replace=True)
OmegaConf.register_new_resolver("sweep_group", _sweep_group, replace=True)
