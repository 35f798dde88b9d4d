"""What the start-up sizing reserves for one request, asked of a release's own spec."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

#: What `MambaSpec.max_memory_usage_bytes` reads of a `VllmConfig`.
_IN_ALIGN_MODE = SimpleNamespace(cache_config=SimpleNamespace(mamba_cache_mode="align"))


def reserved_at_startup(spec: Any) -> Any:
    """Return the blocks that a `MambaSpec` in align mode needs at most for one request.

    Its pages are taken to be of one byte, so that bytes are blocks; sizes may be terms.
    Source: `vllm/v1/kv_cache_interface.py`, `MambaSpec.max_memory_usage_bytes`.
    """
    kind = type(spec)
    sized = type(kind.__name__, (kind,), {"page_size_bytes": 1})
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    return sized(**values).max_memory_usage_bytes(_IN_ALIGN_MODE)
