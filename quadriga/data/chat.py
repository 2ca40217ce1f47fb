"""Text and chats to token ids, in batches, exactly as the tokenizer's own chat template does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from quadriga.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Message = dict[str, Any]
_SHAPE = 'a chat is a list such as [{"role": "user", "content": "2+2?"}]'


def check_messages(value: Any, where: str) -> list[Message]:
    """The chat as a fresh list of dicts, without the empty fields that a columnar file adds to every message.

    Args:
        value: what stands in the file.
        where: file, row and column, for messages.
    """
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: expected a non-empty list of messages, found {_short(value)}", _SHAPE)
    return [_check_message(message, f"{where}, message {number}") for number, message in enumerate(value)]


def _check_message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise DataError(f"{where}: expected an object with role and content, found {_short(message)}", _SHAPE)
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise DataError(f"{where}: 'role' must be a non-empty string, found {_short(message.get('role'))}", _SHAPE)
    content = message.get("content")
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        kind = "images and other media are not supported here; " if isinstance(content, list) else ""
        raise DataError(f"{where}: 'content' must be a string, found {_short(content)}", kind + _SHAPE)
    return {key: field for key, field in message.items() if field is not None or key == "content"}


def _short(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"


Prompt = list[Message] | str
T = TypeVar("T")

# The encoder decides these; a user's value would change what a token is, not how the chat looks.
_RESERVED = {"conversation", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"}
_RESERVED |= {"padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"}


class ChatEncoder:
    """Renders chats and encodes them.

    Args:
        tokenizer: a Hugging Face tokenizer.
        chat_template: a Jinja template or a file with one; None: the tokenizer's own.
        template_kwargs: further variables for the template, e.g. `enable_thinking`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.tokenizer: Any = tokenizer
        self.chat_template = _read_template(chat_template) if chat_template else _own_template(tokenizer)
        self.template_kwargs = dict(template_kwargs or {})
        if clash := _RESERVED & self.template_kwargs.keys():
            raise DataError(
                f"data.apply_chat_template_kwargs may not set {', '.join(sorted(clash))}", "remove it; Quadriga sets it"
            )
        self._prefix: list[int] | None = None

    def render(
        self,
        chats: Sequence[list[Message]],
        where: Callable[[int], str],
        *,
        for_answer: bool,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> list[str]:
        """Each chat as text; with the header of the coming assistant message if `for_answer`.

        `where(i)` names the file and row of chat i. `tools` are the schemas that the template shows to the model.
        """
        if self.chat_template is None:
            raise DataError(
                f"{where(0)} is a chat, but the tokenizer {self.tokenizer.name_or_path!r} has no chat template",
                "set data.chat_template (of a command: --chat-template) to a Jinja template or a file with one, "
                "or make the prompts plain strings",
            )

        def render_all(some: Sequence[list[Message]]) -> list[str]:
            return self.tokenizer.apply_chat_template(
                list(some),
                chat_template=self.chat_template,
                add_generation_prompt=for_answer,
                tokenize=False,
                **self.template_kwargs if tools is None else {**self.template_kwargs, "tools": list(tools)},
            )

        return _naming_the_row(render_all, chats, where, "the chat template fails")

    def encode(self, texts: Sequence[str], where: Callable[[int], str], **options: Any) -> Any:
        """The tokenizer's batch encoding of whole texts, which already hold every special token they need.

        The tokenizer spreads a batch over its own threads.
        """

        def encode_all(some: Sequence[str]) -> Any:
            return self.tokenizer(
                list(some),
                add_special_tokens=False,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
                **options,
            )

        return _naming_the_row(encode_all, texts, where, "the text cannot be tokenised")

    def encode_marked(self, chats: Sequence[list[Message]], where: Callable[[int], str]) -> Any:
        """Batch encoding of whole chats, with `assistant_masks` from the template's `{% generation %}` marks."""

        def encode_all(some: Sequence[list[Message]]) -> Any:
            return self.tokenizer.apply_chat_template(
                list(some),
                chat_template=self.chat_template,
                return_dict=True,
                return_assistant_tokens_mask=True,
                **self.template_kwargs,
            )

        return _naming_the_row(encode_all, chats, where, "the chat cannot be tokenised")

    def encode_prompts(self, prompts: Sequence[Prompt], where: Callable[[int], str]) -> list[list[int]]:
        """Token ids up to the point where the model's answer begins.

        A chat goes through the template. A plain string is taken as it is, after the tokens that this tokenizer
        puts before every text (such as a BOS token).
        """
        chats = [row for row, prompt in enumerate(prompts) if not isinstance(prompt, str)]
        texts = list(prompts)
        if chats:
            rendered = self.render([prompts[row] for row in chats], lambda i: where(chats[i]), for_answer=True)  # type: ignore[misc]
            for row, text in zip(chats, rendered):
                texts[row] = text
        ids = self.encode(texts, where)["input_ids"]  # type: ignore[arg-type]
        if len(chats) < len(prompts):
            prefix = self.plain_prefix()
            ids = [prefix + row if isinstance(prompt, str) else row for row, prompt in zip(ids, prompts)]
        return ids

    def plain_prefix(self) -> list[int]:
        """The special tokens this tokenizer puts before a plain text (those it puts after it would end the answer)."""
        if self._prefix is None:
            bare = self.tokenizer("a", add_special_tokens=False)["input_ids"]
            full = self.tokenizer("a")["input_ids"]
            begins = [start for start in range(len(full)) if full[start : start + len(bare)] == bare]
            self._prefix = full[: begins[0]] if bare and begins else []
        return list(self._prefix)


def _own_template(tokenizer: Any) -> str | None:
    # A tokenizer may have several templates by name; it knows which of them is the default.
    return tokenizer.get_chat_template() if tokenizer.chat_template else None


def _read_template(template: str) -> str:
    if "{" in template:
        return template
    from quadriga.data.files import expand_path  # brings pyarrow, whose thread forbids forking

    path = expand_path(template)
    if not path.is_file():
        raise DataError(
            f"data.chat_template={template!r} is neither a Jinja template nor a file",
            "give the template itself, or the path of a file that holds it",
        )
    return path.read_text(encoding="utf-8")


def _naming_the_row(
    convert: Callable[[Sequence[T]], Any], items: Sequence[T], where: Callable[[int], str], what: str
) -> Any:
    """`convert(items)`; when it fails, converts one by one to name the row that is to blame."""
    try:
        return convert(items)
    except Exception as batch_error:
        for row, item in enumerate(items):
            try:
                convert([item])
            except Exception as error:  # whatever a template or tokenizer raises, the user needs the row
                raise DataError(
                    f"{where(row)}: {what}: {type(error).__name__}: {error}", "correct this row, or data.chat_template"
                ) from error
        raise batch_error
