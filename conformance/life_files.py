"""Lives as files: JSON that `capproof replay` accepts, and what a life showed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from conformance.driver import Driver, SharedPool
from conformance.life_checks import CHECKS, Check, KnownFault, Violation, known_fault
from conformance.lives import Life, NotPossible, Plan, Rule, Setting
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
