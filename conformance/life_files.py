"""Lives as files: JSON that `capproof replay` accepts, and what a life showed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from conformance.driver import BindingError, Driver, core_driver, vllm_driver
from conformance.life_checks import CHECKS, Check, KnownFault, Violation, known_fault
from conformance.lives import Life, NotPossible, Plan, Rule, Setting, SharedPool
from conformance.replay import PROCESS_TIMEOUT_S, tier_environment
from conformance.scenario import ScenarioError
from spec.vocabulary import Geometry

KIND = "life"
SCHEMA = 1


@dataclass(frozen=True)
class LifeSeen:
    """What a life showed on one target."""

    violations: tuple[Violation, ...]
    known: tuple[KnownFault | None, ...]
    """The known fault that each may be."""
    num_rules: int
    """Rules applied before the life, or the engine, ended."""

    @property
    def unknown(self) -> tuple[Violation, ...]:
        """Violations that no known fault of the target explains."""
        pairs = zip(self.violations, self.known, strict=True)
        return tuple(violation for violation, fault in pairs if fault is None)


def run_life(
    driver: Driver, life: Life, target: str, checks: tuple[Check, ...] = CHECKS
) -> LifeSeen:
    """Apply a life's rules to a pool of the driver's tree; those that do not apply are passed over.

    Raises:
        BindingError: The tree cannot be driven so.
    """
    pool = driver.shared_pool(life.setting, checks)
    done = 0
    for rule in life.rules:
        if pool.is_dead:
            break
        try:
            pool.apply(rule)
        except NotPossible:
            continue
        done += 1
    return seen_of(pool, target, done)


@dataclass(frozen=True)
class LifeReplayed:
    """What a life showed, in lines."""

    num_rules: int
    lines: tuple[str, ...]
    """One per violation, with the known fault that it may be."""
    num_unknown: int


def replay_life(root: Path, tier: str, life: Life, target: str) -> LifeReplayed:
    """Live a life on a tree: here in the core tier, in a process of its own in the vllm tier.

    Raises:
        BindingError: It cannot be driven, or the process failed.
    """
    if tier == "core":
        return _replayed(core_driver(root), life, target)
    command = [sys.executable, "-m", "conformance.life_files", str(root), target]
    done = subprocess.run(
        command,
        input=dumps(life),
        capture_output=True,
        text=True,
        env=tier_environment(root),
        timeout=PROCESS_TIMEOUT_S,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no error shown"])[-1]
        raise BindingError(f"vllm tier: {last}")
    values = json.loads(done.stdout.splitlines()[-1])
    return LifeReplayed(values["num_rules"], tuple(values["lines"]), values["num_unknown"])


def _replayed(driver: Driver, life: Life, target: str) -> LifeReplayed:
    seen = run_life(driver, life, target)
    lines = tuple(
        f"{violation} [{'NOT KNOWN' if fault is None else 'known: ' + fault.name}]"
        for violation, fault in zip(seen.violations, seen.known, strict=True)
    )
    return LifeReplayed(seen.num_rules, lines, len(seen.unknown))


def seen_of(pool: SharedPool, target: str, num_rules: int) -> LifeSeen:
    """Return what a pool has shown so far."""
    violations = tuple(pool.violations)
    known = tuple(known_fault(violation, target) for violation in violations)
    return LifeSeen(violations, known, num_rules)


def dumps(life: Life) -> str:
    """Return the text of a life's file; fields that a rule leaves at their default are left out."""
    setting = asdict(life.setting)
    content = {
        "schema": SCHEMA,
        "kind": KIND,
        "setting": setting,
        "rules": [_rule_to_json(rule) for rule in life.rules],
    }
    return json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n"


def is_life(path: Path) -> bool:
    """Return whether a file says that it holds a life."""
    try:
        content = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.get("kind") == KIND


def load(path: Path) -> Life:
    """Read a life's file.

    Raises:
        ScenarioError: It cannot be read, or is not one; one line naming the file.
    """
    try:
        return loads(Path(path).read_bytes())
    except OSError as error:
        raise ScenarioError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ScenarioError(f"{path}: not a life: {' '.join(str(error).split())}") from None


def loads(data: bytes | str) -> Life:
    """Read the text of a life's file.

    Raises:
        ValueError, TypeError, KeyError: It is not one.
    """
    content = json.loads(data)
    if content["kind"] != KIND or content["schema"] != SCHEMA:
        raise ValueError(f"kind {content['kind']!r}, schema {content['schema']!r}")
    values = dict(content["setting"])
    values["geometry"] = _record(Geometry, values["geometry"])
    values["plans"] = tuple(_record(Plan, plan) for plan in values["plans"])
    setting = _record(Setting, values)
    rules = tuple(_record(Rule, rule) for rule in content["rules"])
    for rule in rules:
        if rule.name not in RULES or not 0 <= rule.request < len(setting.plans):
            raise ValueError(f"no such rule: {rule.name!r} of request {rule.request}")
    return Life(setting, rules)


#: Names of the rules.
RULES = (
    "admit",
    "promote",
    "run",
    "step",
    "arrive",
    "preempt",
    "finish",
    "abort",
    "reset",
    "alone",
)


def _rule_to_json(rule: Rule) -> dict[str, Any]:
    defaults = {field.name: field.default for field in fields(Rule)}
    return {name: value for name, value in asdict(rule).items() if value != defaults[name]}


def _record(kind: Any, values: Mapping[str, Any]) -> Any:
    for name, value in values.items():
        if name not in ("geometry", "plans", "name") and not isinstance(value, int):
            raise TypeError(f"{name}: expected an integer, got {value!r}")
    return kind(**values)


def _main(root: str, target: str) -> None:
    """Live the life on the standard input in the vllm tier."""
    seen = _replayed(vllm_driver(Path(root)), loads(sys.stdin.read()), target)
    print(json.dumps(asdict(seen)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
