"""Pairs of answers of which one is preferred: for reward models and for direct preference optimisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quadriga.data.chat import Prompt
from quadriga.data.example_dataset import Conversation, ExampleDataset, follow
from quadriga.data.files import Row
from quadriga.data.messages import check_messages
from quadriga.errors import DataError

CHOSEN, REJECTED = 0, 1
_KEYS = "data.prompt_key, data.chosen_key and data.rejected_key"


class PreferenceDataset(ExampleDataset):
    """Item i: `chosen` and `rejected`, each with `input_ids` and `loss_mask` as in `SFTDataset`, and `index`.

    `chosen_key` and `rejected_key` hold either the answers as text, to the prompt in `prompt_key` (text or messages); or
    lists of messages, which follow the prompt's messages where there is a prompt and are whole conversations otherwise.
    The other arguments are those of `ExampleDataset`.
    """

    sides = 2

    def __init__(
        self,
        data_files: Any,
        tokenizer: Any,
        *,
        prompt_key: str = "prompt",
        chosen_key: str = "chosen",
        rejected_key: str = "rejected",
        **options: Any,
    ) -> None:
        self.prompt_key, self.answer_keys = prompt_key, (chosen_key, rejected_key)
        super().__init__(data_files, tokenizer, **options)

    def __getitem__(self, position: int) -> dict[str, Any]:
        chosen, rejected = self.side(position, CHOSEN), self.side(position, REJECTED)
        return {"chosen": chosen, "rejected": rejected, "index": chosen["index"]}

    def conversations(self, row: Row, where: str) -> Sequence[Conversation]:
        prompt: Prompt | None = row.get(self.prompt_key)
        if prompt is not None and not isinstance(prompt, str):
            prompt = check_messages(prompt, f"{where}, column {self.prompt_key!r}")
        pair = [self._conversation(row, prompt, key, where) for key in self.answer_keys]
        if pair[CHOSEN] == pair[REJECTED]:
            raise DataError(
                f"{where}: chosen and rejected are the same, so there is no preference", "remove the row, or mend it"
            )
        return pair

    def _conversation(self, row: Row, prompt: Prompt | None, key: str, where: str) -> Conversation:
        answer = follow(row, [key], where, _KEYS)
        if isinstance(answer, str):
            if prompt is None:
                raise DataError(f"{where}: {key!r} is an answer as text, and there is no prompt", f"set {_KEYS}")
            return prompt, answer
        messages = check_messages(answer, f"{where}, column {key!r}")
        if isinstance(prompt, str):
            return [{"role": "user", "content": prompt}, *messages]
        return [*(prompt or ()), *messages]
