"""Every format reads its calls, and whatever is written becomes content, a call, or a call with an error."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.agents.tool_formats import register_tool_format, tool_format, tool_format_names
from quadriga.errors import ConfigError

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": ["number", "null"]}, "note": {"type": "string"}},
            },
        },
    }
]
ARGS = {"a": 1, "note": "x"}
WRITTEN = {
    "hermes": 'Ok.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "note": "x"}}\n</tool_call>',
    "qwen": 'Ok.<tool_call>{"name": "add", "arguments": {"a": 1, "note": "x"}}</tool_call>',
    "llama3": 'Ok.<|python_tag|>{"name": "add", "parameters": {"a": 1, "note": "x"}}<|eom_id|>',
    "llama3_json": 'Ok.<|python_tag|>add.call(a=1, note="x")',
    "mistral": 'Ok.[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "note": "x"}}]',
    "kimi": "Ok.<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
    '{"a": 1, "note": "x"}<|tool_call_end|><|tool_calls_section_end|>',
    "gpt-oss": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Ok.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
    '{"a": 1, "note": "x"}<|call|>',
    "qwen3_coder": "Ok.<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=note>\nx\n</parameter>\n"
    "</function>\n</tool_call>",
    "seed": "Ok.<seed:tool_call><function=add><parameter=a>1</parameter><parameter=note>x</parameter></function></seed:tool_call>",
    "minimax": 'Ok.<minimax:tool_call><invoke name="add"><parameter name="a">1</parameter>'
    '<parameter name="note">x</parameter></invoke></minimax:tool_call>',
    "glm": "Ok.<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>note</arg_key>"
    "<arg_value>x</arg_value></tool_call>",
    "pythonic": '[add(a=1, note="x")]',
}


def test_every_format_is_tried_here():
    assert set(tool_format_names()) <= set(WRITTEN) | {"shouting"}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_is_read(name):
    content, (call,) = tool_format(name).parse(WRITTEN[name], TOOLS)
    assert content == ("" if name == "pythonic" else "Ok.")
    assert (call.name, call.arguments, call.error) == ("add", ARGS, None)
    assert call.call_id == ("functions.add:0" if name == "kimi" else "call00000")


@pytest.mark.parametrize("name", WRITTEN)
def test_an_answer_without_a_call_is_content(name):
    assert tool_format(name).parse("It is 4.", TOOLS) == ("It is 4.", [])


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_cut_off_anywhere_raises_nothing(name):
    text = WRITTEN[name]
    for end in range(len(text)):
        _, calls = tool_format(name).parse(text[:end], TOOLS)
        assert all((call.error is None) == (call.arguments is not None) for call in calls)


@pytest.mark.parametrize("name", WRITTEN)
@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                "{",
                "}",
                '"name"',
                ":",
                '"a"',
                "[",
                "]",
                "<|python_tag|>",
                "<function=",
                ">",
                "f(",
                "<parameter=",
                "</parameter>",
                "<arg_key>",
                "<|message|>",
                "<|start|>",
                "to=f",
                "[TOOL_CALLS]",
                "\\",
                "\x00",
                "<|tool_call_begin|>",
                "<invoke name=",
                "1",
                ";",
                "</think>",
                ")",
                "<minimax:tool_call>",
                "<seed:tool_call>",
            ]
        )
    ).map("".join)
)
def test_no_text_makes_a_parser_raise(name, text):
    content, calls = tool_format(name).parse(text, TOOLS)
    assert isinstance(content, str)
    assert all((call.error is None) == (call.arguments is not None) for call in calls)


@pytest.mark.parametrize(
    ("inside", "why"),
    [
        ('{"name": "add", "arguments": {', "no JSON"),
        ("add(1)", "no JSON"),
        ('{"arguments": {}}', 'no object with "name"'),
        ("[1, 2]", 'no object with "name"'),
        ('{"name": "add", "arguments": [1]}', "no JSON object"),
        ('{"name": "add", "arguments": "a"}', "arguments are no JSON"),
        ("[" * 100_000, "no JSON"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(inside, why):
    content, (bad, good) = tool_format("hermes").parse(
        f'Ok.<tool_call>{inside}</tool_call><tool_call>{{"name": "add"}}</tool_call>'
    )
    assert content == "Ok."
    assert why in bad.error
    assert bad.arguments is None
    assert bad.raw == inside
    assert (good.name, good.arguments, good.call_id) == ("add", {}, "call00001")


def test_what_is_only_thought_is_no_call():
    text = '<think>maybe <tool_call>{"name": "add"}</tool_call>?</think>No.'
    assert tool_format("hermes").parse(text) == (text, [])


def test_several_calls_keep_their_order():
    text = '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2}}'
    _, calls = tool_format("llama3").parse(text)
    assert [call.arguments for call in calls] == [{"a": 1}, {"a": 2}]


def test_an_answer_that_is_json_but_no_call_is_content():
    assert tool_format("llama3").parse('{"answer": 4}') == ('{"answer": 4}', [])


def test_values_are_read_as_the_types_of_the_schema():
    text = (
        "<tool_call><function=add><parameter=a>7</parameter><parameter=b>null</parameter><parameter=note>12</parameter>"
    )
    _, (call,) = tool_format("qwen3_coder").parse(text, TOOLS)
    assert call.arguments == {"a": 7, "b": None, "note": "12"}


def test_an_unknown_format_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"Unknown tool format 'hermess'. Did you mean 'hermes'\?"):
        tool_format("hermess")


def test_a_format_of_ones_own_by_file_or_by_name(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from quadriga.agents.policy import ToolCall\n"
        "def parse(text, tools):\n"
        "    return '', [ToolCall(text.split()[1], {}, text)]\n"
    )
    mine = tool_format(f"{file}:parse")
    assert mine.parse("CALL look")[1][0].name == "look"
    assert "cannot be read: list index out of range" in mine.parse("CALL")[1][0].error  # its bug is no crash of the run

    @register_tool_format("shouting")
    def shout(text, tools):
        return text.lower(), []

    assert tool_format("shouting").parse("HO") == ("ho", [])
