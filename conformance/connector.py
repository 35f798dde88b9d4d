"""A KV connector that brings as many tokens as a workload states; vLLM imports it by this name.

Only a process of the vllm tier may import this module, since the base class is vLLM's own. What is
served is asked for and reported as any connector does; no data is moved.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


class StatedPrefixConnector(KVConnectorBase_V1, SupportsHMA):
    """Holds the first tokens of each request that `serve` names, and of no other."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._served: dict[str, tuple[int, bool]] = {}
        self._loading: list[str] = []

    def serve(self, request_id: str, num_tokens: int, *, asynchronously: bool) -> None:
        """Hold the first `num_tokens` tokens of a request.

        Args:
            request_id: The request, which is not known to the scheduler yet.
            num_tokens: Tokens of the prefix; those that the engine has itself are not loaded.
            asynchronously: Whether the request is parked while they arrive.
        """
        self._served[request_id] = (num_tokens, asynchronously)

    def take_loaded(self) -> set[str]:
        """Return the parked requests whose tokens have arrived since the last call."""
        loaded, self._loading = set(self._loading), []
        return loaded

    # ---- what the scheduler asks ----

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens lie behind those computed, and whether loading parks."""
        num_tokens, asynchronously = self._served.get(request.request_id, (0, False))
        num_new = max(num_tokens - num_computed_tokens, 0)
        return num_new, asynchronously and num_new > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Begin to load into the blocks, if the request is to be parked."""
        if num_external_tokens and self._served[request.request_id][1]:
            self._loading.append(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return nothing for a worker to do."""
        return KVConnectorMetadata()

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Let the blocks be freed at once."""
        return False, None

    # ---- what a worker would be asked; there is none ----

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""
