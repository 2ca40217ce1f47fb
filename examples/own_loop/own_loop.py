"""A training loop of your own: GRPO with the embedded model, in one process, from public parts. `python own_loop.py [steps]`."""

import sys

import torch

from quadriga import DataProto
from quadriga.algorithms import compute_advantage, compute_policy_loss
from quadriga.config import ModelConfig, OptimConfig
from quadriga.data import RLDataset
from quadriga.engine import TrainingEngine
from quadriga.models import end_token_ids, load_policy, load_tokenizer
from quadriga.rewards import RewardPool, RewardSample
from quadriga.rollout import Request, SamplingParams, create_engine

MODEL, PROMPTS, SAMPLES, TOKENS = "builtin:arithmetic", 16, 8, 12


def rows_of(completions, prompts, pad: int) -> DataProto:
    """One row a sample: prompt padded on the left, response on the right."""
    width = max(len(prompts[c.uid[1]]) for c in completions)
    long = max(len(c.token_ids) for c in completions)
    ids = torch.full((len(completions), width + long), pad)
    mask = torch.zeros_like(ids)
    for row, done in enumerate(completions):
        prompt = torch.as_tensor(prompts[done.uid[1]], dtype=torch.long)
        begin, end = width - len(prompt), width + len(done.token_ids)
        ids[row, begin:width], ids[row, width:end] = prompt, torch.tensor(done.token_ids)
        mask[row, begin:end] = 1
    return DataProto.from_dict({"input_ids": ids, "attention_mask": mask, "response_mask": mask[:, width:]})


def grpo_loss(outputs, micro, counts):
    """Strictly on-policy: the old policy is this very one."""
    log_prob = outputs["log_probs"]
    return compute_policy_loss(
        "vanilla",
        log_prob=log_prob,
        old_log_prob=log_prob.detach(),
        advantages=micro["advantages"],
        response_mask=micro["response_mask"],
        loss_agg=counts.aggregation("token-mean"),
        clip_ratio=0.2,
    )


def main(steps: int) -> list[float]:
    tokenizer = load_tokenizer(MODEL)
    dataset = RLDataset("builtin:arithmetic/train", tokenizer, max_prompt_length=16)
    training = TrainingEngine(load_policy(ModelConfig(path=MODEL), tokenizer), optim=OptimConfig(lr=1e-3))
    module = training.model.huggingface  # generation runs the very module that is trained
    rollout = create_engine("native", module=module, eos_token_ids=end_token_ids(module, tokenizer))
    params = SamplingParams(max_new_tokens=TOKENS)
    history = []
    with RewardPool() as pool:
        for step in range(1, steps + 1):
            items = [dataset[(step * PROMPTS + k) % len(dataset)] for k in range(PROMPTS)]
            prompts = [item["input_ids"].tolist() for item in items]
            requests = [
                Request(str(k), prompt, params, (0, k), tuple(range(SAMPLES)), step) for k, prompt in enumerate(prompts)
            ]
            with torch.no_grad():
                done = list(rollout.generate(requests))
            samples = [
                RewardSample(
                    items[c.uid[1]]["data_source"],
                    tokenizer.decode(c.token_ids, skip_special_tokens=True),
                    items[c.uid[1]]["reward_model"]["ground_truth"],
                )
                for c in done
            ]
            scores = torch.tensor([result.score for result in pool.score_all(samples)])
            rows = rows_of(done, prompts, tokenizer.pad_token_id)
            mask = rows.batch["response_mask"]
            rewards = torch.zeros(mask.shape)
            rewards[torch.arange(len(done)), mask.sum(1) - 1] = scores  # the score is paid at the last token
            rows.batch["advantages"], _ = compute_advantage(
                "grpo", token_level_rewards=rewards, response_mask=mask, group_ids=[c.uid for c in done]
            )
            metrics = training.train_mini_batch(rows, grpo_loss, max_tokens=16384)
            training.end_step()
            rollout.update_weights(version=step)  # they changed in place: what was derived from them is made anew
            history.append(float(scores.mean()))
            print(f"step {step}: reward {history[-1]:.3f}, gradient {metrics['grad_norm']:.2f}")
    return history


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
