"""What the policy wrote stays as it wrote it, and what stands between is what the template puts there."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nasty_templates import (
    ALTERNATES_AND_TRIMS,
    CHATML,
    COUNTS_MESSAGES,
    EOS_AT_THE_END,
    NASTY,
    STRIPS_THINKING,
    byte_tokenizer,
)

import quadriga
from quadriga.agents.conversation import ChatTemplate, Conversation, same_message, template_message
from quadriga.data.chat import ChatEncoder
from quadriga.errors import DataError

EMBEDDED = Path(quadriga.__file__).parent / "assets" / "arithmetic"
SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "tokenizers"
DIGITS = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% else %}={% endif %}{% endfor %}"
USER = {"role": "user", "content": "hi"}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
    }
]


def nasty(template: str, **options: Any) -> ChatTemplate:
    eos = "</s>" if "</s>" in template else "<|im_end|>"
    return ChatTemplate(ChatEncoder(byte_tokenizer(eos), template), **options)


@cache
def template_named(name: str) -> ChatTemplate:
    if name in NASTY:
        extra = {"header ends the turn": ["<|user|>", "<|observation|>"], "two ends": ["<|im_end|>", "<|eom|>"]}
        tokenizer = byte_tokenizer("</s>" if "</s>" in NASTY[name] else "<|im_end|>")
        ends = [tokenizer.convert_tokens_to_ids(text) for text in extra.get(name, [tokenizer.eos_token])]
        return ChatTemplate(ChatEncoder(tokenizer, NASTY[name]), end_token_ids=ends)
    from transformers import AutoTokenizer

    if name == "embedded":
        return ChatTemplate(ChatEncoder(AutoTokenizer.from_pretrained(EMBEDDED), DIGITS))
    if not (SHARED / name).is_dir():
        pytest.skip(f"the tokenizer {name} is not on this machine")
    return ChatTemplate(ChatEncoder(AutoTokenizer.from_pretrained(SHARED / name)))


def end_of(template: ChatTemplate) -> int:
    return template._end[0] if template._end else min(template.end_token_ids)


def write(conversation: Conversation, text: str, end: bool = True) -> list[int]:
    template = conversation.template
    ids = template.encode(text) if text else []
    ids = [*ids, end_of(template)] if end else ids
    conversation.add_answer(ids)
    return ids


TEXTS = st.text(alphabet="a1 \n:é", max_size=12)
ANSWERS = st.one_of(
    TEXTS,
    TEXTS.map(lambda text: f"<think>\n{text}\n</think>\n\nSo: 4"),
    st.just('<tool_call>\n{"name": "look", "arguments": {"a":1}}\n</tool_call>'),
    st.just('Let me.\n<tool_call>{"name": "look", "arg'),
)
TURNS = st.lists(
    st.tuples(ANSWERS, st.booleans(), st.sampled_from(["user", "tool", "system"]), TEXTS), min_size=1, max_size=4
)


@pytest.mark.parametrize("name", ["embedded", "qwen2_5", "smollm2", *NASTY])
@settings(max_examples=60, deadline=None)
@given(turns=TURNS)
def test_a_stream_is_what_was_read_and_written_and_nothing_is_lost(name, turns):
    template = template_named(name)
    conversation = Conversation(template, [USER])
    first, written, read = list(conversation.ids), [], []
    for text, ended, role, observation in turns:
        role = "user" if role in template.refused else role
        if role == "tool" and not name.startswith(("qwen", "header")):
            role = "user"  # a template may ask for the call that a tool's message answers
        written.append(write(conversation, text, ended))
        read.append(conversation.add([{"role": role, "content": observation}]))
    pieces = list(itertools.chain(first, *itertools.chain(*zip(written, read))))
    assert conversation.ids == pieces
    assert len(conversation.mask) == len(pieces)
    assert [conversation.ids[start:end] for start, end in conversation.answers] == written
    assert sum(conversation.mask) == sum(map(len, written))
    assert all(all(conversation.mask[start:end]) for start, end in conversation.answers)
    for ids, (text, _, _, _) in zip(written, turns):
        assert template.tokenizer.decode(ids).startswith(
            template.tokenizer.decode(template.encode(text) if text else [])
        )


PLAIN = st.text(alphabet="a1b é", min_size=1, max_size=12).map(lambda text: f"x{text}x")


@pytest.mark.parametrize("name", ["embedded", "qwen2_5", "smollm2", *NASTY])
@settings(max_examples=60, deadline=None)
@given(turns=st.lists(st.tuples(PLAIN, PLAIN), min_size=1, max_size=4))
def test_a_stream_is_the_whole_conversation_rendered_at_once(name, turns):
    template = template_named(name)
    if name == "eos at the end":
        pytest.skip("this template has no end between turns, so the policy's own end token is not in its rendering")
    if name == "embedded":
        turns = [("12", "3+4")] * len(turns)
    conversation = Conversation(template, [USER])
    for answer, question in turns:
        text = answer if name != "alternates and trims" else f" {answer} "  # as this template renders it
        write(conversation, text)
        conversation.add([{"role": "user", "content": question}])
    plain = [dict(m, content=m["content"].strip()) for m in conversation.messages]
    assert conversation.ids == template.encode(template.render(plain))


@pytest.mark.parametrize("name", ["qwen2_5", "chatml", "two ends"])
def test_a_stream_with_tool_calls_is_the_whole_conversation(name):
    template = template_named(name)
    conversation = Conversation(template, [USER], TOOLS)
    call = {"type": "function", "id": "call00000", "function": {"name": "look", "arguments": {"what": "a"}}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    header = template.render([USER], TOOLS)
    rendered = template.render([USER, message], TOOLS, for_answer=False)
    if not rendered.startswith(header):  # Qwen ends the header before a call without a line end
        header = header.removesuffix("\n")
    written = rendered.removeprefix(header).lstrip("\n" if name == "qwen2_5" else "").removesuffix("\n")
    conversation.add_answer(template.encode(written))
    results = [{"role": "tool", "content": "42"}, {"role": "tool", "content": "43"}]
    conversation.add(results)
    assert conversation.ids == template.encode(template.render([USER, message, *results], TOOLS))
    if name == "qwen2_5":
        assert same_message(conversation.messages[1], message)


def test_the_line_end_after_the_end_token_is_read_in_every_turn():
    template = nasty(CHATML)
    conversation = Conversation(template, [USER])
    for _ in range(3):
        write(conversation, "a")
        new = conversation.add([USER])
        assert template.tokenizer.decode(new) == "\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("template", [CHATML, ALTERNATES_AND_TRIMS])
def test_an_answer_that_was_cut_off_gets_its_end_from_the_template_as_something_read(template):
    cut, whole = Conversation(nasty(template), [USER]), Conversation(nasty(template), [USER])
    write(cut, " a ", end=False)
    write(whole, " a ")
    cut.add([USER])
    whole.add([USER])
    lead = cut.template.encode(" ") if template is ALTERNATES_AND_TRIMS else []
    end = cut.answers[0][1]
    assert cut.ids == [*whole.ids[:end], *lead, *whole.ids[end:]]
    assert sum(cut.mask) == sum(whole.mask) - 1


def test_nothing_written_is_an_answer_too():
    conversation = Conversation(nasty(CHATML), [USER])
    assert conversation.add_answer([]) == {"role": "assistant", "content": ""}
    conversation.add([USER])
    assert "<|im_start|>assistant\n<|im_end|>\n" in conversation.template.tokenizer.decode(conversation.ids)


def test_thinking_that_the_template_would_strip_stays_as_it_was_written():
    template = nasty(STRIPS_THINKING)
    conversation = Conversation(template, [USER])
    written = write(conversation, "<think>\nhm\n</think>\n\nfour")
    conversation.add([USER])
    start, end = conversation.answers[0]
    assert conversation.ids[start:end] == written
    assert template.tokenizer.decode(conversation.ids).count("<think>") == 1
    assert "user" in template.offending
    assert not template.refused


def test_an_end_token_that_only_closes_the_whole_is_not_lost_in_the_middle():
    conversation = Conversation(nasty(EOS_AT_THE_END), [USER])
    write(conversation, " a")
    new = conversation.add([USER])
    assert conversation.template.tokenizer.decode(new) == "\nuser: hi\nassistant:"


def test_a_header_at_which_the_policy_stopped_is_not_read_twice():
    template = template_named("header ends the turn")
    conversation = Conversation(template, [USER])
    user = template.tokenizer.convert_tokens_to_ids("<|user|>")
    conversation.add_answer([*template.encode("a"), user])
    assert template.tokenizer.decode(conversation.add([USER])) == "\nhi<|assistant|>\n"
    conversation.add_answer([*template.encode("a"), user])
    text = template.tokenizer.decode(conversation.add([{"role": "tool", "content": "4"}]))
    assert text == "<|observation|>\n4<|assistant|>\n"


def test_another_end_token_stands_for_the_templates():
    template = template_named("two ends")
    conversation = Conversation(template, [USER])
    eom = template.tokenizer.convert_tokens_to_ids("<|eom|>")
    conversation.add_answer([*template.encode("a"), eom])
    assert template.tokenizer.decode(conversation.add([USER])) == "<|user|>hi<|im_end|><|assistant|>"


def test_a_template_that_rewrites_the_past_is_refused_by_role():
    template = nasty(COUNTS_MESSAGES)
    assert set(template.refused) == {"user", "tool", "system", "assistant"}
    with pytest.raises(DataError, match=r"role 'tool'.*changes what stands before"):
        template.require("tool")
    conversation = Conversation(template, [USER])
    write(conversation, "a")
    before = list(conversation.ids)
    with pytest.raises(DataError, match=r"role user: .*'1 messages.*has become '3 messages"):
        conversation.add([USER])
    assert conversation.ids == before
    assert len(conversation.messages) == 2


def test_a_template_that_forbids_a_role_names_it_and_its_own_reason():
    template = nasty(ALTERNATES_AND_TRIMS)
    assert "tool" in template.refused
    assert "user" not in template.refused
    with pytest.raises(DataError, match="roles must alternate"):
        template.require("user", "tool")
    conversation = Conversation(template, [USER])
    write(conversation, "a")
    with pytest.raises(DataError, match=r"role user: .*roles must alternate"):
        conversation.add([USER, USER])


def test_turns_come_one_after_the_other():
    conversation = Conversation(nasty(CHATML), [USER])
    with pytest.raises(DataError, match="after an answer"):
        conversation.add([USER])
    write(conversation, "a")
    with pytest.raises(DataError, match="has an answer already"):
        conversation.add_answer([1])
    with pytest.raises(DataError, match="at least one"):
        conversation.add([])


def test_a_tokenizer_without_a_template_is_told_what_to_set():
    with pytest.raises(DataError, match="has no chat template"):
        ChatTemplate(ChatEncoder(byte_tokenizer()))


def test_whether_a_template_shows_tools_is_known():
    shows = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML
    assert nasty(shows).shows_tools
    assert not nasty(CHATML).shows_tools


def test_a_conversation_goes_on_with_messages_that_begin_with_it():
    conversation = Conversation(nasty(CHATML), [USER], TOOLS)
    write(conversation, 'Ok.<tool_call>{"name": "look", "arguments": {"a": 1}}</tool_call>')
    answer = conversation.messages[-1]
    (call,) = answer["tool_calls"]
    as_api = {
        "role": "assistant",
        "content": "Ok.",
        "tool_calls": [{**call, "function": {"name": "look", "arguments": '{"a":1}'}}],
    }
    result = {"role": "tool", "content": "4", "tool_call_id": call["id"]}
    assert conversation.continues([USER, answer, result], TOOLS) == [result]
    assert conversation.continues([USER, as_api, result], TOOLS) == [result]
    assert conversation.continues([USER, {**as_api, "content": "No."}, result], TOOLS) is None
    assert conversation.continues([USER, as_api, result]) is None
    assert conversation.continues([USER, as_api], TOOLS) is None


def test_calls_are_numbered_over_the_whole_conversation():
    conversation = Conversation(nasty(CHATML), [USER], TOOLS)
    for number in range(2):
        write(conversation, '<tool_call>{"name": "look", "arguments": {}}</tool_call>')
        assert conversation.messages[-1]["tool_calls"][0]["id"] == f"call0000{number}"
        conversation.add([{"role": "tool", "content": "4"}])


def test_messages_of_the_chat_api_become_those_of_templates():
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert template_message(parts) == {"role": "user", "content": "ab"}
    with pytest.raises(DataError, match="something else than text"):
        template_message({"role": "user", "content": [{"type": "image_url", "image_url": {}}]})
    for broken in ("hi", {"content": "a"}, {"role": "assistant", "tool_calls": ["a"]}, {"role": "user", "content": 3}):
        with pytest.raises(DataError):
            template_message(broken)  # type: ignore[arg-type]
