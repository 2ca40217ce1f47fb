"""Examples for supervised fine-tuning: whole conversations with a mask over the tokens that are targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quadriga.data.example_dataset import Conversation, ExampleDataset, follow
from quadriga.data.files import Row
from quadriga.data.messages import check_messages
from quadriga.errors import DataError

_KEYS = "data.messages_key, or data.prompt_key and data.response_key and their dict keys,"


class SFTDataset(ExampleDataset):
    """Item i: `input_ids` [length] int32, `loss_mask` [length] uint8 (1: this token is a target), `index`.

    Two layouts, chosen by `messages_key`:

    * set: the column holds a whole conversation; every assistant message is a target.
    * None: `prompt_key` and `response_key`, and `prompt_dict_keys`, `response_dict_keys` to follow inside those columns,
      e.g. `["answer"]` in `extra_info`.

    The other arguments are those of `ExampleDataset`.
    """

    def __init__(
        self,
        data_files: Any,
        tokenizer: Any,
        *,
        prompt_key: str = "prompt",
        response_key: str = "response",
        prompt_dict_keys: Sequence[str] | None = None,
        response_dict_keys: Sequence[str] | None = None,
        messages_key: str | None = None,
        **options: Any,
    ) -> None:
        self.prompt_path = [prompt_key, *(prompt_dict_keys or ())]
        self.response_path = [response_key, *(response_dict_keys or ())]
        self.messages_key = messages_key
        super().__init__(data_files, tokenizer, **options)

    def __getitem__(self, position: int) -> dict[str, Any]:
        return self.side(position, 0)

    def conversations(self, row: Row, where: str) -> Sequence[Conversation]:
        if self.messages_key is not None:
            chat = follow(row, [self.messages_key], where, _KEYS)
            return [check_messages(chat, f"{where}, column {self.messages_key!r}")]
        prompt = follow(row, self.prompt_path, where, _KEYS)
        response = follow(row, self.response_path, where, _KEYS)
        if not isinstance(response, str):
            raise DataError(
                f"{where}: the response {'.'.join(self.response_path)} must be a string, found {response!r}",
                "correct the row",
            )
        if not isinstance(prompt, str):
            prompt = check_messages(prompt, f"{where}, {'.'.join(self.prompt_path)}")
        return [(prompt, response)]
