"""Prompts: how a text, or a pair of texts, becomes what a language model reads before it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hf_calib._errors import InputTypeError, InputValueError, expected

KEY = "prompt_template"  # of a model's config.json

FIELDS = ("{text}", "{text_pair}")


@dataclass(frozen=True)
class PromptTemplate:
    """A prompt with a place for a text, saved with a model as `config.prompt_template`.

    `label_token_classifier(..., prompt=...)` writes it into the config; `hf-calib` and `hf_calib.pipeline` then take
    plain texts. A plain `transformers.pipeline` has to be given rendered ones, which the model's card says.

    Args:
        template: with `{text}`, and `{text_pair}` for a second text; other braces stay as they are.
        chat: whether the template is a user's message in the tokenizer's chat template, else it is the whole prompt.
        system: the system's message before it, for a chat.
        ends_with: what is written after the chat template, such as "Answer:": the label's token follows it.

    Raises:
        TypeError: if a text is not a str.
        ValueError: if there is no `{text}`, or a system message without a chat.

    >>> prompt = PromptTemplate("Review: {text}\\nIs it positive? Answer:")
    >>> print(prompt.render("Fine {plot}"))
    Review: Fine {plot}
    Is it positive? Answer:
    """

    template: str
    chat: bool = False
    system: str | None = None
    ends_with: str = ""

    def __post_init__(self) -> None:
        for name in ("template", "system", "ends_with"):
            value = getattr(self, name)
            if not isinstance(value, str) and not (name == "system" and value is None):
                raise InputTypeError(expected(name, "be a text", type(value).__name__, "pass a str"))
        if FIELDS[0] not in self.template:
            raise InputValueError(
                expected("template", "have a place for the text", repr(self.template), "write {text} into it")
            )
        if self.system is not None and not self.chat:
            way_out = "write it into the template, or set chat=True"
            raise InputValueError(expected("system", "be given for a chat", repr(self.system), way_out))

    @property
    def reads_pairs(self) -> bool:
        """Whether there is a place for a second text."""
        return FIELDS[1] in self.template

    def render(self, text: str, text_pair: str | None = None, *, tokenizer: Any = None) -> str:
        """The prompt of a text.

        Args:
            text: of the row.
            text_pair: the second text, where the template has a place for one.
            tokenizer: whose chat template is used, for a chat.

        Raises:
            ValueError: if there is a second text and no place for it, or the other way round; or a chat without a
                tokenizer that has a chat template.
        """
        if (text_pair is not None) != self.reads_pairs:
            got = "none" if text_pair is None else "one"
            way_out = "write {text_pair} into the template where rows have one, and pass it"
            raise InputValueError(expected("text_pair", "go with the template", got, way_out))
        # In one pass, so that a text that looks like a place is left as it is.
        filled = self.template
        parts = filled.split(FIELDS[0])
        second = text_pair or ""
        filled = text.join(part.replace(FIELDS[1], second) for part in parts)
        if not self.chat:
            return filled + self.ends_with
        self.check(tokenizer)
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages.append({"role": "user", "content": filled})
        return str(_in_chat(tokenizer, messages)) + self.ends_with

    def fitting(
        self, text: str, text_pair: str | None = None, *, tokenizer: Any, max_length: int | None
    ) -> tuple[str, list[int]]:
        """The prompt of a text, which is cut so that the whole prompt, with its end, has at most so many tokens.

        Returns:
            The prompt, and its token ids.

        Raises:
            ValueError: if the prompt alone is longer.
        """
        prompt = self.render(text, text_pair, tokenizer=tokenizer)
        ids = self.token_ids(prompt, tokenizer)
        if max_length is None or len(ids) <= max_length:
            return prompt, ids
        words = tokenizer(text, add_special_tokens=False)["input_ids"]
        kept = len(words)
        while len(ids) > max_length and kept:
            kept = max(0, kept - (len(ids) - max_length))
            prompt = self.render(tokenizer.decode(words[:kept]), text_pair, tokenizer=tokenizer)
            ids = self.token_ids(prompt, tokenizer)
        if len(ids) > max_length:
            got = f"{len(ids)} tokens without the text"
            way_out = "shorten the template, or raise max_length"
            raise InputValueError(expected("the prompt", f"have at most {max_length} tokens", got, way_out))
        return prompt, ids

    def token_ids(self, prompt: str, tokenizer: Any) -> list[int]:
        """Of a rendered prompt: a chat template has written its special tokens already."""
        return list(tokenizer(prompt, add_special_tokens=not self.chat)["input_ids"])

    def check(self, tokenizer: Any) -> None:
        """Raise unless the tokenizer has what the prompt needs.

        Raises:
            ValueError: if it has no chat template, or one that does not end where the answer begins.
        """
        if not self.chat:
            return
        if not getattr(tokenizer, "chat_template", None):
            got = f"{type(tokenizer).__name__} without one"
            raise InputValueError(
                expected(
                    "tokenizer", "have a chat template", got, "set tokenizer.chat_template, or chat=False"
                )
            )
        message = [{"role": "user", "content": "x"}]
        if _in_chat(tokenizer, message) == _in_chat(tokenizer, message, ends=False):
            way_out = "write its last part into ends_with, if that is where the answer begins"
            if not self.ends_with:
                got = "one that ends with the user's message"
                raise InputValueError(
                    expected("the chat template", "end where the answer begins", got, way_out)
                )

    def to_dict(self) -> dict[str, Any]:
        """Of JSON's own types, as config.json has it."""
        return asdict(self)

    @classmethod
    def of(cls, config: Any) -> PromptTemplate | None:
        """The prompt in a model's config; None where there is none.

        Raises:
            ValueError: if what is there is not a prompt.
        """
        found = config.get(KEY) if isinstance(config, Mapping) else getattr(config, KEY, None)
        if found is None:
            return None
        try:
            return cls(**found)
        except (TypeError, InputValueError) as error:
            got = f"{found!r} ({error})"
            raise InputValueError(
                expected(f"{KEY} of the config", "be a prompt", got, "write it with PromptTemplate.to_dict()")
            ) from error


def _in_chat(tokenizer: Any, messages: list[dict[str, str]], *, ends: bool = True) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ends))
