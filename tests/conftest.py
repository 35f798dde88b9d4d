"""Fixtures that several test modules use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from conformance.targets import resolve


@pytest.fixture(scope="session")
def trees() -> Mapping[str, Path]:
    """Folders holding `vllm/`, by release: the one with vLLM #57050's fault, and its fix."""
    return {release: resolve(f"vllm=={release}").root for release in ("0.30.0", "0.31.0")}
