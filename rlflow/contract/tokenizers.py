"""What rlflow asks of a tokenizer; those of Hugging Face answer. Nothing here imports one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, overload

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Callable[..., Any] | Mapping[str, Any]] | None


class Tokenizer(Protocol):
    """Texts to tokens and back, and a chat as the text that a model was trained on."""

    @property
    def eos_token_id(self) -> int:
        """The token that ends a response."""

    @property
    def eos_token(self) -> str:
        """That token as text."""

    @property
    def chat_template(self) -> str | None:
        """The template of chats that it brings along."""

    def __call__(
        self,
        texts: list[str],
        *,
        add_special_tokens: bool,
        verbose: bool = True,
        return_attention_mask: bool | None = None,
        return_token_type_ids: bool | None = None,
    ) -> Mapping[Literal["input_ids"], list[list[int]]]:
        """The tokens of each text; `verbose` warns of texts beyond the model's context.

        What else it returns follows from its family where nothing says.
        """

    def batch_decode(self, rows: list[list[int]], *, skip_special_tokens: bool) -> list[str]:
        """The text of each row of tokens."""

    @overload
    def apply_chat_template(
        self,
        messages: Messages,
        *,
        tools: Tools,
        chat_template: str | None,
        add_generation_prompt: bool,
        return_dict: Literal[True],
    ) -> Mapping[Literal["input_ids"], list[int]]: ...
    @overload
    def apply_chat_template(
        self,
        messages: Messages,
        *,
        tools: Tools,
        chat_template: str | None,
        add_generation_prompt: bool,
        tokenize: Literal[False],
    ) -> str: ...
