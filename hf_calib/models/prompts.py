"""Prompts that contain a text, or a pair of texts, which a language model reads before its answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hf_calib._errors import (
    InputError,
    InputTypeError,
    InputValueError,
    check,
    expected,
    few,
)
from hf_calib.metrics.checks import check_flag

KEY = "prompt_template"  # In a model's config.json.
_TEXT, _PAIR = "{text}", "{text_pair}"
# A name in single braces; those after a word are LaTeX's, as in \boxed{answer}.
_OTHER_PLACE = re.compile(r"(?<![\w{}])\{[A-Za-z_]\w*\}(?!\})")


@dataclass(frozen=True)
class PromptTemplate:
    """A prompt with a place for a text, saved with a model as `config.prompt_template`.

    `label_token_classifier(..., prompt=...)` writes it to the config; `hf-calib` and `hf_calib.pipeline` then accept
    plain texts. A plain `transformers.pipeline` needs rendered prompts, as the model's card explains.

    Args:
        template: text with `{text}`, and `{text_pair}` for a second text; braces around other things than a name do not
            change.
        chat: if True, the template is a user's message in the tokenizer's chat template; otherwise the whole prompt.
        system: the system message of a chat.
        ends_with: text after the chat template, such as "Answer:", which the label's token follows.

    Raises:
        TypeError: if a text is not a str.
        ValueError: if there is no `{text}`, or a place of another name; for a system message without a chat.

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
                raise InputTypeError(
                    expected(name, "be a text", type(value).__name__, "pass a str")
                )
        check_flag("chat", self.chat)
        got, way_out = repr(self.template), "write {text} into it"
        check(
            _TEXT in self.template,
            "template to have a place for the text",
            got,
            way_out,
        )
        places = self.template.replace(_TEXT, " ").replace(_PAIR, " ")
        others = _OTHER_PLACE.findall(places)
        check(
            not others,
            "template to have places for text and text_pair only",
            few(others),
            "name them so, or write blanks inside braces that are no place",
        )
        way_out = "write it into the template, or set chat=True"
        check(
            self.chat or self.system is None,
            "system to be given for a chat",
            repr(self.system),
            way_out,
        )

    def render(
        self, text: str, text_pair: str | None = None, *, tokenizer: Any = None
    ) -> str:
        """Return the prompt of a text.

        Args:
            text: the text of the row.
            text_pair: the second text, if the template has a place for it.
            tokenizer: tokenizer with the chat template of a chat.

        Raises:
            ValueError: if there is a second text without a place for it, or a place without a text; for a chat, if
                there is no tokenizer with a chat template.
        """
        got = "none" if text_pair is None else "one"
        way_out = "write {text_pair} into the template where rows have one, and pass it"
        fits = (text_pair is not None) == (_PAIR in self.template)
        check(fits, "text_pair to match the template", got, way_out)
        # It is split first, so that a text that contains a placeholder does not change.
        parts = self.template.split(_TEXT)
        filled = text.join(part.replace(_PAIR, text_pair or "") for part in parts)
        if not self.chat:
            return filled + self.ends_with
        self.check(tokenizer)
        system = (
            [] if self.system is None else [{"role": "system", "content": self.system}]
        )
        return (
            _in_chat(tokenizer, [*system, {"role": "user", "content": filled}])
            + self.ends_with
        )

    def fitting(
        self,
        text: str,
        text_pair: str | None = None,
        *,
        tokenizer: Any,
        max_length: int | None,
    ) -> tuple[str, list[int]]:
        """Return the prompt and its token ids, with the text cut so that the prompt has at most `max_length` tokens."""

        def made(text: str) -> tuple[str, list[int]]:
            prompt = self.render(text, text_pair, tokenizer=tokenizer)
            # The chat template has already added its special tokens.
            return prompt, list(
                tokenizer(prompt, add_special_tokens=not self.chat)["input_ids"]
            )

        prompt, ids = made(text)
        if max_length is None or len(ids) <= max_length:
            return prompt, ids
        words = tokenizer(text, add_special_tokens=False)["input_ids"]
        while len(ids) > max_length and words:
            words = words[: max(0, len(words) - (len(ids) - max_length))]
            prompt, ids = made(tokenizer.decode(words))
        got, way_out = (
            f"{len(ids)} tokens without the text",
            "shorten the template, or raise max_length",
        )
        check(
            len(ids) <= max_length,
            f"the prompt to have at most {max_length} tokens",
            got,
            way_out,
        )
        return prompt, ids

    def check(self, tokenizer: Any) -> None:
        """Raise unless the tokenizer has what the prompt needs.

        Raises:
            ValueError: if it has no chat template, or its chat template does not end where the answer begins.
        """
        if not self.chat:
            return
        got, way_out = (
            f"{type(tokenizer).__name__} without one",
            "set tokenizer.chat_template, or chat=False",
        )
        has_one = bool(getattr(tokenizer, "chat_template", None))
        check(has_one, "tokenizer to have a chat template", got, way_out)
        message = [{"role": "user", "content": "x"}]
        ends = _in_chat(tokenizer, message) != _in_chat(tokenizer, message, ends=False)
        requirement = "the chat template to end where the answer begins"
        way_out = (
            "write its last part into ends_with, if that is where the answer begins"
        )
        check(
            ends or bool(self.ends_with),
            requirement,
            "one that ends with the user's message",
            way_out,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the prompt in JSON types, as in config.json."""
        return asdict(self)

    @classmethod
    def of(cls, config: Any) -> PromptTemplate | None:
        """Return the prompt in a model's config, or None if there is none.

        Raises:
            ValueError: if the entry is not a prompt.
        """
        found = (
            config.get(KEY)
            if isinstance(config, Mapping)
            else getattr(config, KEY, None)
        )
        if found is None:
            return None
        try:
            return cls(**found)
        except (TypeError, InputError) as error:
            got, way_out = (
                f"{found!r} ({error})",
                "write it with PromptTemplate.to_dict()",
            )
            raise InputValueError(
                expected(f"{KEY} of the config", "be a prompt", got, way_out)
            ) from error


def _in_chat(
    tokenizer: Any, messages: list[dict[str, str]], *, ends: bool = True
) -> str:
    return str(
        tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=ends
        )
    )
