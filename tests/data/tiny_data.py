"""Tiny tokenizers and rows, built here, so that the data suite needs nothing but the repository."""

from __future__ import annotations

from typing import Any

SPECIAL = ["<pad>", "<eos>", "<bos>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(
    chat_template: str | None = CHAT_TEMPLATE, *, merges: tuple[tuple[str, str], ...] = (), bos: bool = False
) -> Any:
    """One token a character (ASCII and a few others), but for the given merges and the special tokens."""
    from tokenizers import Tokenizer, decoders, models, processors
    from transformers import PreTrainedTokenizerFast

    characters = [chr(code) for code in range(32, 127)] + ["\n", "é", "漢"]
    words = SPECIAL + ["<unk>"] + characters + [left + right for left, right in merges]
    vocab = {word: number for number, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=list(merges), unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    if bos:
        template = processors.TemplateProcessing(
            single="<bos> $A <eos>", special_tokens=[("<bos>", vocab["<bos>"]), ("<eos>", vocab["<eos>"])]
        )
        backend.post_processor = template
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=chat_template,
    )


def row(content: Any, index: int = 0, **fields: Any) -> dict[str, Any]:
    """A row in the RL format; `content` is a question, or a whole prompt if it is a list."""
    return {
        "data_source": "arithmetic",
        "prompt": content if isinstance(content, list) else [{"role": "user", "content": content}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1"},
        "extra_info": {"split": "train", "index": index},
    } | fields
