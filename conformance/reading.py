"""Read plain data from outside: every value knows its path, and every objection is one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

#: Integers beyond this are refused: JSON readers elsewhere hold numbers as doubles.
MAX_INT = 2**53

_SLUG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
MAX_SLUG_LENGTH = 120

_T = TypeVar("_T")


class Malformed(Exception):
    """One line naming the field; the caller adds the file."""


@dataclass(frozen=True)
class Field:
    """A JSON value and the path that leads to it."""

    value: Any
    path: str = ""

    def refuse(self, reason: str) -> Malformed:
        """Return the objection to this value, with its path."""
        return Malformed(f"{self.path}: {reason}" if self.path else reason)

    def object(self, allowed: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Field]:
        """The fields of an object that has exactly `allowed`, of which `optional` may be absent."""
        value = self.mapping()
        for key in value:
            if key not in allowed:
                raise self.refuse(f"unknown field {shown(key)}")
        for key in allowed:
            if key not in value and key not in optional:
                raise self.refuse(f"field {shown(key)} is missing")
        return value

    def mapping(self) -> dict[str, Field]:
        """The fields of an object, whatever their names."""
        if not isinstance(self.value, dict):
            raise self.refuse(f"expected an object, got {kind(self.value)}")
        prefix = f"{self.path}." if self.path else ""
        return {key: Field(item, prefix + bare(key)) for key, item in self.value.items()}

    def items(self) -> list[Field]:
        """The values of a list."""
        if not isinstance(self.value, list):
            raise self.refuse(f"expected a list, got {kind(self.value)}")
        return [Field(item, f"{self.path}[{i}]") for i, item in enumerate(self.value)]

    def integer(self, least: int | None = 0) -> int:
        """An integer, at least `least`; None sets no bound below."""
        if not isinstance(self.value, int) or isinstance(self.value, bool):
            raise self.refuse(f"expected an integer, got {kind(self.value)}")
        if abs(self.value) > MAX_INT:
            raise self.refuse("beyond 2**53")
        if least is not None and self.value < least:
            raise self.refuse(f"{self.value} is below {least}")
        return self.value

    def boolean(self) -> bool:
        """True or false."""
        if not isinstance(self.value, bool):
            raise self.refuse(f"expected true or false, got {kind(self.value)}")
        return self.value

    def text(self) -> str:
        """A string on one line."""
        if not isinstance(self.value, str):
            raise self.refuse(f"expected a string, got {kind(self.value)}")
        # A phrase ends up in comments of rendered tests, so it must stay on its line.
        if not self.value.isprintable():
            raise self.refuse("holds a line break or another unprintable character")
        return self.value

    def slug(self) -> str:
        """A short name: a-z, 0-9 and single hyphens."""
        value = self.text()
        if not _SLUG.fullmatch(value) or len(value) > MAX_SLUG_LENGTH:
            raise self.refuse(f"{shown(value)} is not a slug (a-z, 0-9, single hyphens)")
        return value

    def slugs(self) -> tuple[str, ...]:
        """A list of slugs, each named once."""
        values = tuple(item.slug() for item in self.items())
        if len(set(values)) != len(values):
            raise self.refuse("names one slug twice")
        return values

    def or_none(self, read: Callable[[], _T]) -> _T | None:
        """None, or what `read` makes of the value."""
        return None if self.value is None else read()


def read_bytes(path: Path) -> bytes:
    """Return the content of a file.

    Raises:
        Malformed: It cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise Malformed(f"cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise Malformed(f"cannot be read: {error}") from None


def parse_json(data: bytes | str) -> Field:
    """Return the value that a JSON text holds.

    Raises:
        Malformed: It is no JSON, gives a field twice or is nested too deeply.
    """
    try:
        content = json.loads(
            data, object_pairs_hook=without_duplicates, parse_constant=refuse_constant
        )
    except RecursionError:
        raise Malformed("nested too deeply") from None
    except ValueError as error:
        raise Malformed(f"not JSON: {one_line(str(error))}") from None
    return Field(content)


def headed(data: bytes | str, kind: str, schema: int) -> Field:
    """Return the object that a JSON text holds, less `kind` and `schema`, which must be these.

    Raises:
        Malformed: They are not, or it is no JSON object.
    """
    content = parse_json(data).mapping()
    for key, value in (("schema", schema), ("kind", kind)):
        if content.pop(key, Field(None)).value != value:
            raise Malformed(f"{key}: expected {value!r}")
    return Field({key: item.value for key, item in content.items()})


def kind_of(data: bytes | str) -> str | None:
    """Return the kind that a JSON text says of itself; None where it says none, or is no JSON."""
    try:
        content = parse_json(data).value
    except Malformed:
        return None
    said = content.get("kind") if isinstance(content, dict) else None
    return said if isinstance(said, str) else None


def record(cls: type[_T], item: Field, **read: Callable[[Field], Any]) -> _T:
    """Read a dataclass; fields with a default may be left out.

    Args:
        cls: What to make.
        item: An object.
        read: How to read the fields that are no plain numbers, words or truth values.

    Raises:
        Malformed: A field is missing, unknown or of another type.
    """
    parts = {part.name: part for part in fields(cls)}  # type: ignore[arg-type]
    optional = [name for name, part in parts.items() if part.default is not MISSING]
    content = item.object(list(parts), optional=optional)
    return cls(
        **{
            name: read[name](value) if name in read else _plain(value, str(parts[name].type))
            for name, value in content.items()
        }
    )


def _plain(value: Field, kind: str) -> Any:
    if kind == "int":
        return value.integer()
    if kind == "bool":
        return value.boolean()
    if kind == "str":
        return value.text()
    if isinstance(value.value, bool) or not isinstance(value.value, int | float):
        raise value.refuse("expected a number")
    return float(value.value)


# ---- words for errors ----------------------------------------------------------------------------


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of a JSON text, unless it gives a field twice."""
    content = dict(pairs)
    if len(content) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise Malformed(f"{bare(twice)}: the field is given twice")
    return content


def refuse_constant(constant: str) -> Any:
    """Refuse NaN and the infinities."""
    raise Malformed(f"{constant} is not a number here")


def kind(value: object) -> str:
    """Return what a value is, for an objection."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names: dict[type, str] = {dict: "an object", list: "a list", str: "a string", float: "a float"}
    return names.get(type(value), "an integer")


def shown(text: str) -> str:
    """Return a text in quotes, on one line."""
    return one_line(json.dumps(text))


def bare(key: str) -> str:
    """Return the name of a field as it stands in a path."""
    return key if key.isidentifier() else shown(key)


def one_line(text: str) -> str:
    """Return a text on one line, cut where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= 80 else line[:77] + "..."
