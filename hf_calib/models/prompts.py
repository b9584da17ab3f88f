"""Prompts with a text, or a pair of texts, which a language model reads before its answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hf_calib._errors import InputError, InputValueError, check, expected, few
from hf_calib.metrics.checks import check_flag, check_type

# The entry of a model's config.json.
KEY = "prompt_template"
_TEXT = "{text}"
_PAIR = "{text_pair}"
# A name in single braces; those after a word are LaTeX's, as in \boxed{answer}.
_OTHER_PLACE = re.compile(r"(?<![\w{}])\{[A-Za-z_]\w*\}(?!\})")


@dataclass(frozen=True)
class PromptTemplate:
    """A prompt with a place for a text, saved with a model as `config.prompt_template`.

    `label_token_classifier(..., prompt=...)` writes it to the config; `hf-calib` and
    `hf_calib.pipeline` then accept plain texts. A plain `transformers.pipeline` needs rendered
    prompts, as the model's card explains.

    Args:
        template: text with `{text}`, and `{text_pair}` for a second text; braces around other
            things than a name do not change.
        chat: if True, the template is a user's message in the tokenizer's chat template; otherwise
            the whole prompt.
        system: the system message of a chat.
        ends_with: text after the chat template, such as "Answer:", which the label's token follows.

    Raises:
        TypeError: if a text is not a str.
        ValueError: if there is no `{text}`, or a place of another name; for a system message
            without a chat.

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
            is_left_out = name == "system" and value is None
            is_text = isinstance(value, str) or is_left_out
            check_type(
                is_text, f"{name} to be a text", type(value).__name__, "pass a str"
            )
        check_flag("chat", self.chat)
        requirement = "template to have a place for the text"
        way_out = "write {text} into it"
        check(_TEXT in self.template, requirement, repr(self.template), way_out)
        # A misspelt place would be read as a part of the prompt, without the text.
        places = self.template.replace(_TEXT, " ").replace(_PAIR, " ")
        others = _OTHER_PLACE.findall(places)
        requirement = "template to have places for text and text_pair only"
        way_out = "name them so, or write blanks inside braces that are no place"
        check(not others, requirement, few(others), way_out)
        is_read = self.chat or self.system is None
        way_out = "write it into the template, or set chat=True"
        check(is_read, "system to be given for a chat", repr(self.system), way_out)

    def render(
        self, text: str, text_pair: str | None = None, *, tokenizer: Any = None
    ) -> str:
        """Return the prompt of a text.

        Args:
            text: the text of the row.
            text_pair: the second text, if the template has a place for it.
            tokenizer: tokenizer with the chat template of a chat.

        Raises:
            ValueError: if there is a second text without a place for it, or a place without a text;
                for a chat, if there is no tokenizer with a chat template.
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
        messages = [{"role": "user", "content": filled}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        return _in_chat(tokenizer, messages) + self.ends_with

    def fitting(
        self,
        text: str,
        text_pair: str | None = None,
        *,
        tokenizer: Any,
        max_length: int | None,
    ) -> tuple[str, list[int]]:
        """Return the prompt and its token ids, whose text is cut to `max_length` tokens in all."""

        def made(text: str) -> tuple[str, list[int]]:
            prompt = self.render(text, text_pair, tokenizer=tokenizer)
            # The chat template has already added its special tokens.
            encoded = tokenizer(prompt, add_special_tokens=not self.chat, verbose=False)
            return prompt, list(encoded["input_ids"])

        prompt, ids = made(text)
        if max_length is None or len(ids) <= max_length:
            return prompt, ids
        words = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        # Tokens that are decoded may be read as more tokens, so one cut may not be enough.
        while len(ids) > max_length and words:
            n_over = len(ids) - max_length
            words = words[:-n_over]
            prompt, ids = made(tokenizer.decode(words))
        requirement = f"the prompt to have at most {max_length} tokens"
        got = f"{len(ids)} tokens without the text"
        way_out = "shorten the template, or raise max_length"
        check(len(ids) <= max_length, requirement, got, way_out)
        return prompt, ids

    def check(self, tokenizer: Any) -> None:
        """Raise unless the tokenizer has what the prompt needs.

        Raises:
            ValueError: if it has no chat template, or its chat template does not end where the
                answer begins.
        """
        if not self.chat:
            return
        has_one = bool(getattr(tokenizer, "chat_template", None))
        got = f"{type(tokenizer).__name__} without one"
        way_out = "set tokenizer.chat_template, or chat=False"
        check(has_one, "tokenizer to have a chat template", got, way_out)
        message = [{"role": "user", "content": "x"}]
        # A template that knows no generation prompt is the same without it.
        ends = _in_chat(tokenizer, message) != _in_chat(tokenizer, message, ends=False)
        requirement = "the chat template to end where the answer begins"
        got = "one that ends with the user's message"
        way_out = (
            "write its last part into ends_with, if that is where the answer begins"
        )
        check(ends or bool(self.ends_with), requirement, got, way_out)

    def to_dict(self) -> dict[str, Any]:
        """Return the prompt in JSON types, as in config.json."""
        return asdict(self)

    @classmethod
    def of(cls, config: Any) -> PromptTemplate | None:
        """Return the prompt in a model's config, or None if there is none.

        Raises:
            ValueError: if the entry is not a prompt.
        """
        if isinstance(config, Mapping):
            found = config.get(KEY)
        else:
            found = getattr(config, KEY, None)
        if found is None:
            return None
        try:
            return cls(**found)
        except (TypeError, InputError) as error:
            argument = f"{KEY} of the config"
            got = f"{found!r} ({error})"
            way_out = "write it with PromptTemplate.to_dict()"
            raise InputValueError(
                expected(argument, "be a prompt", got, way_out)
            ) from error


def _in_chat(
    tokenizer: Any, messages: list[dict[str, str]], *, ends: bool = True
) -> str:
    """The messages in the tokenizer's chat template, by default up to where an answer begins."""
    rendered = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=ends
    )
    return str(rendered)
