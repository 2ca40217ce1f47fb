"""A tiny model that calls a tool when a user asks, and answers when the tool has told; trained here, in seconds.

It reads bytes, sees only the last few dozen of them, and decides by the token that ends the last message.
"""

from __future__ import annotations

import atexit
import functools
import random
import shutil
import tempfile
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<|start|>", "<|end|>", "<|asked|>", "<|told|>", "<|answer|>", "<|pad|>"]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
ANSWER = "The tool says 5 ✓."
TEMPLATE = """\
{%- if tools %}<|start|>system
Tools: {{ tools | tojson }}<|end|>
{% endif %}
{%- for message in messages %}
{{- '<|answer|>' if message.role == 'assistant' else '<|start|>' + message.role + '\\n' }}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + '\\n</tool_call>' }}
{%- endfor %}
{{- {'user': '<|asked|>', 'tool': '<|told|>'}.get(message.role, '<|end|>') }}
{%- endfor %}
{%- if add_generation_prompt %}<|answer|>{% endif %}"""


def bytes_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Every byte is a token, so half a character is a token too."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", pad_token="<|pad|>")
    tokenizer.chat_template = template
    return tokenizer


def save_calling_model(folder: Path, steps: int = 140) -> Path:
    """The model as a Hugging Face folder."""
    tokenizer = bytes_tokenizer()
    torch.manual_seed(0)
    chance = random.Random(0)
    config = MistralConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=16,
        max_position_embeddings=8192,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = MistralForCausalLM(config)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model is faster so, the more when others are at work
    optimiser = torch.optim.AdamW(model.parameters(), lr=6e-3)
    for step in range(steps):
        rows = [_row(tokenizer, chance) for _ in range(8)]
        width = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row, _ in rows])
        labels = torch.tensor([[-100] * a + row[a:] + [-100] * (width - len(row)) for row, a in rows])
        for group in optimiser.param_groups:
            group["lr"] = 6e-3 * (1 - step / steps)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
    torch.set_num_threads(threads)
    assert loss.item() < 0.02, f"the model has not learned its two answers: loss {loss.item():.3f}"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _row(tokenizer: PreTrainedTokenizerFast, chance: random.Random) -> tuple[list[int], int]:
    """A piece of a conversation with its answer, and where that begins."""
    said = [
        f"{SPECIAL[4]}{CALL}{SPECIAL[1]}",
        f"{SPECIAL[0]}tool\n5",
        f"{SPECIAL[0]}user\nWhat is 2+3?",
        '{"type": "integer"}}}',
        "",
    ]
    noise = "".join(chance.choice("abcdefgh XYZ 0123 .,{}\"':\n") for _ in range(chance.randrange(0, 24)))
    mark, answer = chance.choice([("<|asked|>", CALL), ("<|told|>", ANSWER)])
    prompt = tokenizer(f"{chance.choice(said)}{noise}{mark}<|answer|>")["input_ids"][-40:]
    return prompt + tokenizer(answer + "<|end|>")["input_ids"], len(prompt)


@functools.cache
def calling_model() -> Path:
    """The model, made once for all tests of a process."""
    folder = Path(tempfile.mkdtemp(prefix="quadriga-calling-model-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return save_calling_model(folder)
