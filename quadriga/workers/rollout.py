"""Generation in a slot: by a policy that is trained there too, or by an engine that has the slot to itself."""

from __future__ import annotations

from collections import deque
from typing import Any

from quadriga.config.schema import Config
from quadriga.controller.dispatch import Dispatch, register
from quadriga.protocol import DataProto
from quadriga.rollout.interface import Completion, WeightsEcho
from quadriga.workers.base import RunWorker
from quadriga.workers.rollout_rows import FinishedSample, longest, requests_of, rows_of
from quadriga.workers.weight_push import PushedWeights, pulled


class GeneratingWorker(RunWorker):
    """A worker with a rollout engine."""

    rollout: Any

    def __init__(self, config: Config, role: str) -> None:
        super().__init__(config, role)
        self.policy_config = config.actor_rollout_ref
        self._generation = 0
        self._finished: deque[Completion] = deque()

    def load_tokenizer(self) -> Any:
        from quadriga.models.load import load_tokenizer

        model = self.policy_config.model
        return load_tokenizer(model.tokenizer_path or model.path, model.trust_remote_code)

    def load_whole_policy(self) -> Any:
        """The Hugging Face module of the policy, whole and without an adapter, on this worker's device."""
        from dataclasses import replace

        from quadriga.models.load import load_policy

        model = replace(self.policy_config.model, lora_rank=0)
        module = load_policy(model, trainable=False).huggingface
        if self.rollout_dtype is None:
            return module.to(self.device_name)
        from quadriga.models.blank_copy import blank_copy
        from quadriga.rollout.native.weights import copy_weights

        whole = blank_copy(module, self.device_name, self.rollout_dtype)
        copy_weights(whole, module.named_parameters())
        return whole

    @property
    def rollout_dtype(self) -> Any:
        """What the rollout engine computes in; None: as the weights are."""
        import torch

        return None if self.device_name == "cpu" else torch.bfloat16

    def start_rollout(self, module: Any, tokenizer: Any) -> None:
        """Make the engine that generates with `module`."""
        from quadriga.rollout.registry import create_engine

        rollout = self.policy_config.rollout
        self.pad_token_id = int(tokenizer.pad_token_id)
        eos = module.generation_config.eos_token_id if module.generation_config is not None else None
        eos_ids = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}
        on_device: dict[str, Any] = {}
        if self.device_name != "cpu":
            on_device = {"memory_fraction": rollout.gpu_memory_utilization, "enforce_eager": rollout.enforce_eager}
        self.rollout = create_engine(
            rollout.name,
            module=module,
            eos_token_ids=sorted(int(t) for t in eos_ids),
            max_num_seqs=rollout.max_num_seqs,
            max_num_batched_tokens=rollout.max_num_batched_tokens,
            max_model_len=rollout.prompt_length + rollout.response_length,
            **on_device,
        )
        self.frees_cache = bool(on_device) and rollout.free_cache_engine
        if self.frees_cache:
            self.rollout.sleep()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """A response for every row. meta_info: `sampling` (arguments of SamplingParams), `step`, `version` of the weights,
        and `generation`, the number under which `take_finished` tells of samples meanwhile. Samples that are in its
        `finished`, from a worker that has died since, are taken as they are."""
        import torch

        from quadriga.rollout.sampling import SamplingParams

        meta = prompts.meta_info
        params = SamplingParams(**meta["sampling"])
        completions = [sample.as_completion() for sample in meta.get("finished", ())]
        requests = requests_of(prompts, params, meta["step"], {(c.request_id, c.sample_index) for c in completions})
        self._finished.clear()
        self._generation = meta["generation"]
        self.rollout.wake()
        with torch.no_grad():
            for completion in self.rollout.generate(requests, expected_version=meta["version"]):
                completions.append(completion)
                self._finished.append(completion)
        if self.frees_cache:
            self.rollout.sleep()
        truncated = params.top_p < 1 or params.top_k > 0
        return rows_of(prompts, completions, self.width_of_all(longest(completions)), self.pad_token_id, truncated)

    def width_of_all(self, own: int) -> int:
        """To what width this rank pads its responses, the longest of which has `own` tokens."""
        import torch

        from quadriga.engine.sharding import max_over_ranks

        return max_over_ranks(own, torch.device(self.device_name))

    def take_finished(self, generation: int) -> list[FinishedSample]:
        """The samples that have finished since the last time; asked while generating."""
        if generation != self._generation:
            return []  # it has not begun yet
        # Only a worker without collectives can be replaced alone, so that its finished samples are of further use.
        with_log_probs = not self.has_collectives
        return [FinishedSample.of(self._finished.popleft(), with_log_probs) for _ in range(len(self._finished))]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep(self) -> None:
        self.rollout.sleep()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wake(self) -> None:
        self.rollout.wake()


class RolloutWorker(GeneratingWorker):
    """A rollout engine away from the actor, in a pool of its own; its weights are pushed to it.

    Its ranks know nothing of each other, so that one that dies can be replaced while the others go on.
    """

    has_collectives = False

    def width_of_all(self, own: int) -> int:
        """Its own: who puts the rows of several engines together pads them alike."""
        return own

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, total_steps: int | None = None) -> None:
        self.start_rollout(self.load_whole_policy(), self.load_tokenizer())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_weights(self, pushed: PushedWeights) -> WeightsEcho:
        """Load what the actor has pushed; the echo says what the engine holds now."""
        return self.rollout.update_weights(pushed.echo.version, pulled(pushed))
