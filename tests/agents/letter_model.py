"""A model folder small enough to train in seconds, with a chat template: `<u>` begins a user's turn, `<a>` the policy's."""

from __future__ import annotations

from pathlib import Path

LETTERS = 'abcdefghijklmnopqrstuvwxyz0123456789+-=#.?{}":,_ '
MARKS = ["<u>", "<a>", "<tool>", "<tool_call>", "</tool_call>"]
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}<a>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<eos>"
    "{% elif m.role == 'tool' %}<tool>{{ m.content }}"
    "{% else %}<u>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def write_model(folder: Path, seed: int = 0, positions: int = 128) -> Path:
    import torch
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocab = {name: i for i, name in enumerate(["<eos>", "<pad>", *MARKS, *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True) for name in ("<eos>", "<pad>", "<u>", "<a>", "<tool>")]
    )
    tokenizer.add_tokens([AddedToken(name, special=False) for name in ("<tool_call>", "</tool_call>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=positions,
        eos_token_id=0,
        pad_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
