"""The policy update on a CPU: Quadriga's engine beside the plain way to do it with Hugging Face, in one run.

    python bench/update_cpu.py [--rows 256] [--rounds 3] [--token-budget 2048]

The job: Qwen2 shape (hidden 256, 6 layers, 4 heads / 2 kv, ffn 1024, vocab 4096, tied, float32, random weights), groups
of 8 rows with the same 32-token prompt and 128 new tokens each, one optimiser step with PPO's clipped loss and the
entropy as a metric. The plain way: padded rows, SDPA, logits as one tensor (of all positions, or, better, of the response
only), log_softmax, AdamW; in micro-batches of `--plain-rows`. Rounds alternate, so that all see the same machine; the best
of each counts. On a busy machine trust the CPU time of `OMP_NUM_THREADS=1`: waiting threads spin.
"""

from __future__ import annotations

import argparse
import copy
import time

import torch
import transformers

from quadriga.algorithms import compute_policy_loss, entropy_bonus
from quadriga.config.schema_models import OptimConfig
from quadriga.engine import BatchCounts, TrainingEngine
from quadriga.models.attention import register_packed_attention
from quadriga.models.token_model import PolicyModel
from quadriga.protocol import DataProto

PROMPT, RESPONSE, GROUP, VOCABULARY = 32, 128, 8, 4096


def make_model() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def make_data(rows: int) -> DataProto:
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(VOCABULARY, (rows // GROUP, PROMPT), generator=generator).repeat_interleave(GROUP, 0)
    responses = torch.randint(VOCABULARY, (rows, RESPONSE), generator=generator)
    ids = torch.cat([prompts, responses], dim=1)
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "responses": responses,
            "response_mask": torch.ones_like(responses),
            "advantages": torch.randn(rows, 1, generator=generator).expand(rows, RESPONSE).contiguous(),
        }
    )


def loss_fn(outputs, micro, counts):
    shared = {"response_mask": micro["response_mask"], "loss_agg": counts.aggregation("token-mean")}
    old = outputs["log_probs"].detach()
    loss, metrics = compute_policy_loss(
        "vanilla", log_prob=outputs["log_probs"], old_log_prob=old, advantages=micro["advantages"], **shared
    )
    return loss, metrics | entropy_bonus(entropy=outputs["entropy"], **shared)[1]


class PlainUpdate:
    """Padded rows through the Hugging Face model, and autograd for the rest."""

    def __init__(self, model, rows_per_micro_batch: int, all_logits: bool) -> None:
        self.model, self.rows, self.all_logits = model.train(), rows_per_micro_batch, all_logits
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.01)

    def step(self, data: DataProto) -> tuple[float, float]:
        self.optimizer.zero_grad()
        counts = BatchCounts(int(data.batch["response_mask"].sum()), len(data), RESPONSE)
        total = 0.0
        for part in data.split(self.rows):
            batch = part.batch
            output = self.model(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                logits_to_keep=0 if self.all_logits else RESPONSE + 1,
                use_cache=False,
            )
            log_p = output.logits[:, -RESPONSE - 1 : -1].log_softmax(-1)
            log_probs = log_p.gather(-1, batch["responses"][..., None])[..., 0]
            with torch.no_grad():
                entropy = -(log_p.exp() * log_p).sum(-1)
            loss, _ = loss_fn({"log_probs": log_probs, "entropy": entropy}, dict(batch.items()), counts)
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return total, norm.item()


class EngineUpdate:
    def __init__(self, model, token_budget: int) -> None:
        model.set_attn_implementation(register_packed_attention())
        self.engine, self.budget = TrainingEngine(PolicyModel(model), optim=OptimConfig(lr=1e-6)), token_budget

    def step(self, data: DataProto) -> tuple[float, float]:
        metrics = self.engine.train_mini_batch(data, loss_fn, self.budget, with_entropy=True)
        return metrics["loss"], metrics["grad_norm"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--token-budget", type=int, default=2048)
    parser.add_argument("--plain-rows", type=int, default=32)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    data, model = make_data(arguments.rows), make_model()
    updates = {
        "plain, all logits": PlainUpdate(copy.deepcopy(model), arguments.plain_rows, all_logits=True),
        "plain, response logits": PlainUpdate(copy.deepcopy(model), arguments.plain_rows, all_logits=False),
        "engine": EngineUpdate(model, arguments.token_budget),
    }
    warm_up = make_data(4 * GROUP)
    for update in updates.values():
        update.step(warm_up)
    wall = {name: float("inf") for name in updates}
    work = dict(wall)
    for number in range(arguments.rounds):
        for name, update in updates.items():
            start, start_work = time.perf_counter(), time.process_time()
            loss, norm = update.step(data)
            seconds, cpu = time.perf_counter() - start, time.process_time() - start_work
            wall[name], work[name] = min(wall[name], seconds), min(work[name], cpu)
            print(
                f"round {number} {name:24} {seconds:6.2f} s, {cpu:6.2f} CPU s  (loss {loss:.6f}, norm {norm:.5f})",
                flush=True,
            )
    tokens = arguments.rows * (PROMPT + RESPONSE)
    for name in updates:
        print(
            f"best  {name:24} {wall[name]:6.2f} s = {tokens / wall[name]:7.0f} tokens/s, {work[name]:6.2f} CPU s; engine is "
            f"{wall[name] / wall['engine']:.2f} x by the clock, {work[name] / work['engine']:.2f} x in CPU time"
        )


if __name__ == "__main__":
    main()
