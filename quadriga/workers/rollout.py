"""Generation in a slot: by a policy that is trained there too, or by an engine that has the slot to itself."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from quadriga.config.schema import Config
from quadriga.controller.call_record import CallMeter
from quadriga.controller.device_gate import DEVICE_GATE
from quadriga.controller.dispatch import Dispatch, register
from quadriga.rollout.interface import Request, WeightsEcho, create_engine
from quadriga.rollout.rank_set import RankSet, SetOpening
from quadriga.rollout.service import Delivery, GenerationService
from quadriga.rollout.set_service import FollowingService, LeadingService
from quadriga.workers.base import RunWorker
from quadriga.workers.weight_push import PushedWeights, pulled


class GeneratingWorker(RunWorker):
    """A worker with a generation service. What the service does is asked for beside the worker's calls."""

    service: GenerationService

    def __init__(self, config: Config, role: str) -> None:
        super().__init__(config, role)
        self.policy_config = config.actor_rollout_ref
        self.set_size = self.policy_config.rollout.tensor_model_parallel_size
        self._opening: Any = None
        self._ranks: Any = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def open_set(self) -> Any:
        """By the first of each tensor parallel set: where its members meet; the others have nothing to say."""
        if self.rank % self.set_size:
            return None
        self._opening = SetOpening(self.policy_config.nccl_timeout)
        return self._opening.meeting

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def join_set(self, meeting: Any) -> None:
        """Meet the other members."""
        timeout_s = self.policy_config.nccl_timeout
        self.use_own_device()
        self._ranks = RankSet(self.rank % self.set_size, self.set_size, meeting, timeout_s, self.device_name)

    def sharded_policy(self, whole: Any, buffers: Any = None) -> Any:
        """This member's part of the policy, still without weights; `whole` is its outline."""
        from quadriga.rollout.native.sharded import ShardedModel

        dtype = self.rollout_dtype or torch.float32
        return ShardedModel(whole, self._ranks, self.device_name, dtype, buffers).module

    def load_tokenizer(self) -> Any:
        from quadriga.models.load import load_tokenizer

        model = self.policy_config.model
        return load_tokenizer(model.tokenizer_path or model.path, model.trust_remote_code)

    def blank_policy(self, like: Any = None) -> Any:
        """A whole module of the policy, without an adapter, on this worker's device; its weights come with the first hand-over. For
        an engine with a model of its own, names and settings without memory.

        Args:
            like: a module of the policy that is here already; None: the folder says what it is.
        """
        from quadriga.models.load import outline_policy
        from quadriga.models.outline import blank_copy

        module = outline_policy(self.policy_config.model) if like is None else like
        if not self.generates_with_module:
            return module
        return blank_copy(module, self.device_name, self.rollout_dtype or torch.float32)

    @property
    def rollout_dtype(self) -> Any:
        """What the rollout engine computes in; None: as the weights are."""
        return None if self.device_name == "cpu" else torch.bfloat16

    @property
    def generates_with_module(self) -> bool:
        """Whether the engine computes with a module of ours, or has a model of its own."""
        return self.policy_config.rollout.name == "native"

    def start_service(self, module: Any, tokenizer: Any) -> None:
        """Make the engine that generates with `module`, or with a model of its own like it, and the service around it."""
        from quadriga.models.load import end_token_ids

        rollout = self.policy_config.rollout
        engine = create_engine(
            rollout.name,
            module=module,
            eos_token_ids=end_token_ids(module, tokenizer),
            tokenizer=tokenizer,  # an agent may ask for stop texts
            max_num_seqs=rollout.max_num_seqs,
            max_num_batched_tokens=rollout.max_num_batched_tokens,
            max_model_len=rollout.max_model_len or rollout.prompt_length + rollout.response_length,
            recompute_on_update=self.config.async_training.partial_rollout_recompute,
            **self._engine_options(),
        )
        options: dict[str, Any] = {
            "frees_cache": self.device_name != "cpu" and rollout.free_cache_engine,
            "threaded": self.config.trainer.executor != "local",
            "meter": partial(CallMeter, self.role, "generate"),
            "choose_device": self.use_own_device,
        }
        if self.set_size == 1:
            self.service = GenerationService(engine, DEVICE_GATE, **options)
        else:
            kind = LeadingService if self._ranks.leads else FollowingService
            self.service = kind(engine, self._ranks, DEVICE_GATE, **options)

    def _engine_options(self) -> dict[str, Any]:
        """What only this engine, or only a GPU, wants to know."""
        rollout = self.policy_config.rollout
        if rollout.name == "vllm":
            return {
                "device": self.device_name,
                "memory_fraction": rollout.gpu_memory_utilization,
                "enforce_eager": rollout.enforce_eager,
                "enable_chunked_prefill": rollout.enable_chunked_prefill,
                "trust_remote_code": self.policy_config.model.trust_remote_code,
                "engine_kwargs": rollout.engine_kwargs.vllm,
            }
        own: dict[str, Any] = {"reuses_prefixes": rollout.enable_prefix_caching}
        if self.device_name != "cpu":
            own |= {"memory_fraction": rollout.gpu_memory_utilization, "enforce_eager": rollout.enforce_eager}
        return own

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_weights(self, pushed: PushedWeights) -> WeightsEcho:
        """Load what the actor has pushed; the echo says what the engine holds now."""
        return self.service.take_weights(pushed.echo.version, pulled(pushed))

    # ---- asked beside the calls ----

    def submit_requests(self, requests: list[Request]) -> None:
        self.service.submit(requests)

    def abort_requests(self, request_ids: list[str]) -> None:
        self.service.abort(request_ids)

    def take_finished(self) -> Delivery:
        """The samples that have finished since the last time; waits a while for the first."""
        return self.service.take()

    def generate_here(self) -> Delivery:
        """The same in the thread that asks, where the service has none of its own."""
        while self.service.advance():
            delivery = self.service.take(0)
            if delivery.samples:
                return delivery
        return self.service.take(0)


class RolloutWorker(GeneratingWorker):
    """A rollout engine away from the actor, in a pool of its own; its weights are pushed to it.

    Its ranks, or with tensor parallel its sets of them, know nothing of each other, so that one that dies can be replaced while
    the others go on.
    """

    has_collectives = False

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, total_steps: int | None = None) -> None:
        if self.set_size == 1:
            module = self.blank_policy()
        else:
            from quadriga.models.load import outline_policy

            module = self.sharded_policy(outline_policy(self.policy_config.model))
        self.start_service(module, self.load_tokenizer())
