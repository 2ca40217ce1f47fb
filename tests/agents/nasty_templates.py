"""Chat templates that break naive ways to add a turn, and a tokenizer for them that needs nothing but the repository."""

from __future__ import annotations

from typing import Any

MARKS = (
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|tool|>",
    "<|eom|>",
)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Qwen3: thinking stays in the last answer only, and the last answer gets an empty one where it has none.
STRIPS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% set plain = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% if m.role == 'assistant' and loop.last %}{{ m.content if '</think>' in m.content else '<think>\n\n</think>\n\n' + m.content }}"
    "{% else %}{{ plain }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EOS_AT_THE_END = (
    "<s>{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% else %}</s>{% endif %}"
)
# Llama 2 and Gemma: roles must alternate, content is trimmed, a space before the end token.
ALTERNATES_AND_TRIMS = (
    "<s>{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]{% else %} {{ m.content | trim }} </s>{% endif %}{% endfor %}"
)
# GLM: no end of a turn; the header of the next one is what the model stops at.
HEADER_ENDS_THE_TURN = (
    "{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# Llama 3: a turn that calls a tool ends with another token.
TWO_ENDS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}<|eom|>{% else %}<|im_end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
COUNTS_MESSAGES = "{{ messages | length }} messages\n" + CHATML

NASTY = {
    "chatml": CHATML,
    "strips thinking": STRIPS_THINKING,
    "eos at the end": EOS_AT_THE_END,
    "alternates and trims": ALTERNATES_AND_TRIMS,
    "header ends the turn": HEADER_ENDS_THE_TURN,
    "two ends": TWO_ENDS,
}


def byte_tokenizer(eos: str = "<|im_end|>") -> Any:
    """One token a byte, some merges over words, line ends and spaces (so that what is cut wrongly differs), and marks."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    newline, space = "Ċ", "Ġ"
    merges = [(newline, newline), (space, space), (space, "a"), ("a", "a"), (":", space), ("A", "a"), ("c", "a")]
    vocab = {letter: number for number, letter in enumerate([*letters, *(a + b for a, b in merges)])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos)
    tokenizer.add_special_tokens({"additional_special_tokens": [mark for mark in MARKS if mark != eos]})
    return tokenizer
