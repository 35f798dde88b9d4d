"""Build vLLM's own scheduler from an `Engine`: no network, no device, no model.

The configuration is vLLM's, of a model of ours without layers; the KV-cache groups are given
instead of being planned from a model's layers. As elsewhere, the arguments that a release takes
are read from its signatures.
"""

from __future__ import annotations

import importlib
import inspect
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conformance.bindings import (
    BindingError,
    Bindings,
    Modules,
    accepted_arguments,
    bind,
    file_of,
    find_class,
    one_line,
    taken,
)
from conformance.group_bindings import GroupBindings, bind_groups
from conformance.workload import Engine
from spec.logic import cdiv
from spec.vocabulary import Geometry

CONNECTOR_MODULE, CONNECTOR_CLASS = "conformance.connector", "StatedPrefixConnector"
#: Blocks that a connector of vLLM's that keeps them in main memory has room for, by one of the GPU.
NUM_CPU_BLOCKS_PER_BLOCK = 4
ARCHITECTURE = "CapproofForCausalLM"

#: What a `config.json` must say for vLLM to make a `ModelConfig` of it.
MODEL_CONFIG = {
    "architectures": [ARCHITECTURE],
    "model_type": "opt",
    "hidden_size": 16,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "ffn_dim": 16,
    "word_embed_proj_dim": 16,
    "vocab_size": 64,
    "torch_dtype": "float32",
}


#: Fields of an `Engine` that a release may lack as long as they have their default.
_OPTIONAL_SIZES = ("long_prefill_token_threshold", "scheduler_reserve_full_isl", "watermark")


class Refused(Exception):
    """VLLM refuses what the engine is to be built with; one line."""


@dataclass(frozen=True)
class SchedulerUnderTest:
    """A scheduler and what it takes to feed it."""

    scheduler: Any
    new_request: Callable[..., Any]
    """Makes a `Request` of an id, a list of token ids and a number of tokens to sample."""
    new_output: Callable[..., Any]
    """Makes a `ModelRunnerOutput` of sampled tokens by request, and what `report` returns."""
    report: Callable[[Any], Any]
    """What a worker says of the loads and stores that a `SchedulerOutput` asks for, all of which
    have ended: a `KVConnectorOutput`, or None."""
    new_drafts: Callable[..., Any]
    """Makes a `DraftTokenIds` of drafts by request."""
    least_num_gpu_blocks: int
    """Blocks, null block included, that vLLM's start-up check demands for one request of
    `max_model_len` tokens."""


class EngineBindings:
    """What of one imported vLLM it takes to build its scheduler."""

    def __init__(self, modules: Modules) -> None:
        self._modules = modules
        self._bindings: Bindings = bind(modules)
        self._groups: GroupBindings = bind_groups(modules)
        self._config = self._module("vllm.config")
        self._scheduler_module = self._module("vllm.v1.core.sched.scheduler")
        self._scheduler_class = find_class(self._scheduler_module, "Scheduler")
        self._request_module = self._module("vllm.v1.request")
        self._outputs = self._module("vllm.v1.outputs")
        self._sampling = self._module("vllm.sampling_params")
        self._utils = self._module("vllm.v1.core.kv_cache_utils")
        self._hashing = self._module("vllm.utils.hashing")
        self._structured_output = self._module("vllm.v1.structured_output")
        self._register_model()

    def new_scheduler(self, engine: Engine) -> SchedulerUnderTest:
        """Return a scheduler of an engine without requests.

        Raises:
            Refused: vLLM refuses the configuration.
            BindingError: The release lacks what the engine needs.
        """
        config = self._refusing(lambda: self._vllm_config(engine))
        kv_cache_config = self._kv_cache_config(engine)
        block_size, hash_block_size = self._refusing(
            lambda: self._utils.resolve_kv_cache_block_sizes(kv_cache_config, config)
        )
        if (block_size, hash_block_size) != (engine.block_size, engine.hash_block_size):
            raise BindingError(
                f"{file_of(self._utils)}: block and hash sizes {engine.block_size} and "
                f"{engine.hash_block_size} became {block_size} and {hash_block_size}"
            )
        values = {
            "vllm_config": config,
            "kv_cache_config": kv_cache_config,
            "structured_output_manager": self._refusing(
                lambda: self._structured_output.StructuredOutputManager(config)
            ),
            "block_size": block_size,
            "hash_block_size": hash_block_size,
            "log_stats": False,
        }
        arguments = self._arguments(self._scheduler_class, values)
        kind = config.scheduler_config.get_scheduler_cls()  # that class, or one made from it
        scheduler = self._refusing(lambda: kind(**arguments))
        hash_function = self._hashing.get_hash_fn_by_name(
            config.cache_config.prefix_caching_hash_algo
        )
        self._utils.init_none_hash(hash_function)
        hasher = self._utils.get_request_block_hasher(hash_block_size, hash_function)
        return SchedulerUnderTest(
            scheduler,
            lambda *values: self._new_request(hasher, *values),
            self._new_output,
            self._report_of(engine, scheduler.connector),
            lambda drafts: self._outputs.DraftTokenIds(list(drafts), list(drafts.values())),
            _least_num_gpu_blocks(config, kv_cache_config),
        )

    # ---- parts ----

    def _vllm_config(self, engine: Engine) -> Any:
        part = self._config
        with tempfile.TemporaryDirectory(prefix="capproof-model-") as folder:
            content = {**MODEL_CONFIG, "max_position_embeddings": engine.max_model_len}
            (Path(folder) / "config.json").write_text(json.dumps(content), encoding="utf-8")
            model = self._call(
                part.ModelConfig,
                {
                    "model": folder,
                    "tokenizer": folder,
                    "skip_tokenizer_init": True,
                    "dtype": "float32",
                    "max_model_len": engine.max_model_len,
                    "enforce_eager": True,
                },
            )
            parallel = part.ParallelConfig()
            config = self._call(
                part.VllmConfig,
                {
                    "model_config": model,
                    "parallel_config": parallel,
                    "device_config": part.DeviceConfig(device="cpu"),
                    "cache_config": self._cache_config(engine),
                    "scheduler_config": self._scheduler_config(engine),
                    "kv_transfer_config": self._kv_transfer_config(engine),
                    "speculative_config": self._speculative_config(engine, model, parallel),
                },
            )
        # vLLM: left on where the platform can do it, and a machine without a device has none.
        config.scheduler_config.disable_hybrid_kv_cache_manager = False
        return config

    def _kv_transfer_config(self, engine: Engine) -> Any:
        if not engine.has_connector:
            return None
        if engine.shipped_connector:
            return self._refusing(
                lambda: self._config.KVTransferConfig(
                    kv_connector=engine.shipped_connector,
                    kv_role="kv_both",
                    kv_connector_extra_config={
                        "cpu_bytes_to_use": NUM_CPU_BLOCKS_PER_BLOCK * self._kv_bytes(engine)
                    },
                )
            )
        return self._config.KVTransferConfig(
            kv_connector=CONNECTOR_CLASS,
            kv_connector_module_path=CONNECTOR_MODULE,
            kv_role="kv_both",
        )

    def _cache_config(self, engine: Engine) -> Any:
        config = self._call(
            self._config.CacheConfig,
            {
                "block_size": engine.block_size,
                "mamba_block_size": engine.block_size,
                "enable_prefix_caching": True,
                "mamba_cache_mode": "align",
                "prefix_match_unit": engine.hash_block_size,
            },
        )
        config.num_gpu_blocks = engine.num_gpu_blocks
        return config

    def _scheduler_config(self, engine: Engine) -> Any:
        return self._call(
            self._config.SchedulerConfig,
            {
                "max_num_batched_tokens": engine.max_num_batched_tokens,
                "max_num_seqs": engine.max_num_seqs,
                "max_model_len": engine.max_model_len,
                "long_prefill_token_threshold": engine.long_prefill_token_threshold,
                "enable_chunked_prefill": True,
                "is_encoder_decoder": False,
                "async_scheduling": engine.num_steps_in_flight > 0,
                "scheduler_reserve_full_isl": engine.scheduler_reserve_full_isl,
                "watermark": engine.watermark,
            },
            needed=[name for name in _OPTIONAL_SIZES if _is_set(engine, name)],
        )

    def _speculative_config(self, engine: Engine, model: Any, parallel: Any) -> Any:
        if not engine.num_speculative_tokens:
            return None
        return self._call(
            self._config.SpeculativeConfig,
            {
                "method": "ngram",
                "num_speculative_tokens": engine.num_speculative_tokens,
                "prompt_lookup_max": 2,
                "prompt_lookup_min": 1,
                "target_model_config": model,
                "target_parallel_config": parallel,
            },
        )

    def _kv_cache_config(self, engine: Engine) -> Any:
        geometry = Geometry(
            block_size=engine.block_size,
            hash_block_size=engine.hash_block_size,
            num_speculative_blocks=engine.num_speculative_tokens,
            num_prefill_checkpoint_blocks=engine.num_prefill_checkpoint_blocks,
            prefill_checkpoint_alignment=engine.prefill_checkpoint_alignment,
            drop_eagle_checkpoint_block=False,
        )
        config = self._groups.new_kv_cache_config(
            geometry,
            self._bindings.new_spec(geometry),
            engine.num_gpu_blocks,
            engine.num_mamba_groups,
        )
        if not engine.shipped_connector:
            return config
        # Its connectors ask where the memory is: a layer for each group, all in the same pages.
        page = _page_size(config)
        place = {
            "size": page * engine.num_gpu_blocks,
            "layer_stride": page * engine.num_gpu_blocks,
            "block_stride": page,
        }
        tensor = self._module("vllm.v1.kv_cache_interface").KVCacheTensor
        tensors = [
            self._call(tensor, {**place, "layers": group.layer_names})
            for group in config.kv_cache_groups
        ]
        return replace(config, kv_cache_tensors=tensors)

    def _kv_bytes(self, engine: Engine) -> int:
        return int(self._kv_cache_config(engine).kv_cache_tensors[0].size)

    def _report_of(self, engine: Engine, connector: Any) -> Callable[[Any], Any]:
        """The worker of a connector, as far as its scheduler hears of it."""
        make = self._outputs.KVConnectorOutput

        def of_ours(scheduled: Any) -> Any:
            loaded = connector.take_loaded()
            return make(finished_recving=loaded) if loaded else None

        def of_cpu_offload(scheduled: Any) -> Any:
            # vLLM: `v1/simple_kv_offload/worker.py`, `SimpleCPUOffloadWorker.get_finished`.
            asked = scheduled.kv_connector_metadata
            loaded = set(asked.load_event_to_reqs.get(asked.load_event, ()))
            stored = {asked.store_event: 1} if asked.store_gpu_blocks else {}
            of_stores = self._module("vllm.v1.simple_kv_offload.metadata")
            meta = of_stores.SimpleCPUOffloadWorkerMetadata(stored)
            return make(finished_recving=loaded, kv_connector_worker_meta=meta)

        if connector is None:
            return lambda scheduled: None
        reports = {
            "": of_ours,
            "DecodeBenchConnector": lambda scheduled: None,  # Loads within the step.
            "SimpleCPUOffloadConnector": of_cpu_offload,
        }
        return reports[engine.shipped_connector]

    def _new_request(self, hasher: Any, name: str, tokens: list[int], max_tokens: int) -> Any:
        parameters = self._sampling.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return self._call(
            self._request_module.Request,
            {
                "request_id": name,
                "prompt_token_ids": tokens,
                "sampling_params": parameters,
                "pooling_params": None,
                "block_hasher": hasher,
            },
        )

    def _new_output(self, sampled: dict[str, list[int]], reported: Any) -> Any:
        names = list(sampled)
        return self._outputs.ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=reported,
        )

    # ---- how ----

    def _register_model(self) -> None:
        """Give vLLM's registry a model without layers, so that it inspects none of its own."""
        torch = importlib.import_module("torch")

        def __init__(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
            raise NotImplementedError  # No model is run.

        def method(self: Any, input_ids: Any, positions: Any = None) -> None:
            raise NotImplementedError

        members = {"forward": method, "embed_input_ids": method, "compute_logits": method}
        model = type(ARCHITECTURE, (torch.nn.Module,), {"__init__": __init__, **members})
        registry = self._module("vllm.model_executor.models.registry")
        try:
            registry.ModelRegistry.register_model(ARCHITECTURE, model)
        except Exception as error:
            raise BindingError(f"{file_of(registry)}: ModelRegistry: {one_line(error)}") from error

    def _module(self, name: str) -> Any:
        try:
            return self._modules.module(name)
        except Exception as error:  # Importing runs the tree's own code, which may raise anything.
            raise BindingError(f"vllm tier: {name}: {one_line(error)}") from error

    def _call(self, function: Any, values: dict[str, Any], needed: Sequence[str] = ()) -> Any:
        """Call a constructor with those of the values that the release takes.

        Raises:
            BindingError: As :meth:`_arguments`.
        """
        return function(**self._arguments(function, values, needed))

    def _arguments(
        self, function: Any, values: dict[str, Any], needed: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Return those of the values that a constructor takes.

        Raises:
            BindingError: It does not take one that is needed, or requires one that is not given.
        """
        name = f"{file_of(inspect.getmodule(function))}: {function.__name__}"
        return taken(values, accepted_arguments(function, values, name, needed))

    def _refusing(self, build: Callable[[], Any]) -> Any:
        """Build a part; what vLLM itself objects to is a refusal, all else does not fit here.

        Raises:
            Refused: A check of vLLM's failed.
            BindingError: Anything else did.
        """
        try:
            return build()
        except BindingError:
            raise
        except (ValueError, AssertionError, NotImplementedError) as error:
            raise Refused(one_line(error)) from error
        except Exception as error:
            raise BindingError(f"{file_of(self._scheduler_module)}: {one_line(error)}") from error


def _page_size(kv_cache_config: Any) -> int:
    return max(
        int(group.kv_cache_spec.page_size_bytes) for group in kv_cache_config.kv_cache_groups
    )


def _is_set(engine: Engine, name: str) -> bool:
    return bool(getattr(engine, name) != Engine.__dataclass_fields__[name].default)


def _least_num_gpu_blocks(config: Any, kv_cache_config: Any) -> int:
    """VLLM: what one request may take of each group, and the null block."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    needed = [cdiv(spec.max_memory_usage_bytes(config), spec.page_size_bytes) for spec in specs]
    return 1 + int(sum(needed))
