"""Prompts: rendered, checked, saved."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from hf_calib._errors import InputTypeError, InputValueError
from hf_calib.language_models import PromptTemplate
from tests.helpers.tiny import tokenizer

CHAT = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def with_chat(template: str = CHAT) -> Any:
    words = tokenizer()
    words.chat_template = template
    return words


def test_a_plain_template_leaves_other_braces_alone() -> None:
    braces = '{"answer": 1} \\boxed{yes} {{yes}} { yes } {}'
    prompt = PromptTemplate(
        f"Is {{text}} like {{text_pair}}? {braces}", ends_with=" Answer:"
    )
    assert (
        prompt.render("a {text_pair}", "b {text}")
        == f"Is a {{text_pair}} like b {{text}}? {braces} Answer:"
    )


@pytest.mark.parametrize("template", ["{text} {other}", "{text}{other}", "{other}"])
def test_a_place_of_another_name_is_refused(template: str) -> None:
    with pytest.raises(InputValueError, match=r"template to have (a )?place"):
        PromptTemplate(template)


def test_a_chat_ends_where_the_answer_begins() -> None:
    prompt = PromptTemplate("Rate: {text}", chat=True, system="Be brief", ends_with="(")
    assert (
        prompt.render("x", tokenizer=with_chat())
        == "<system>Be brief</><user>Rate: x</><assistant>("
    )


@pytest.mark.parametrize("chat", [True, False])
def test_the_special_tokens_of_a_chat_are_those_of_its_template(chat: bool) -> None:
    words = with_chat(
        "{% for message in messages %}[CLS] {{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %} [SEP]{% endif %}"
    )
    words.backend_tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A", special_tokens=[("[CLS]", 2)]
    )
    prompt = PromptTemplate("{text}", chat=chat)
    _, ids = prompt.fitting("w1 w2", tokenizer=words, max_length=None)
    assert ids == ([2, 6, 7, 3] if chat else [2, 6, 7])


def test_through_a_config() -> None:
    prompt = PromptTemplate("{text}", chat=True, system="s")
    assert PromptTemplate.of({"prompt_template": prompt.to_dict()}) == prompt
    assert PromptTemplate.of({}) is None
    with pytest.raises(
        InputValueError,
        match=r"prompt_template of the config to be a prompt, got {'x': 1}",
    ):
        PromptTemplate.of({"prompt_template": {"x": 1}})


def test_bad_input() -> None:
    with pytest.raises(InputValueError, match=r"have a place for the text, got 'none'"):
        PromptTemplate("none")
    with pytest.raises(InputTypeError, match=r"template to be a text, got int"):
        PromptTemplate(3)  # type: ignore[arg-type]
    with pytest.raises(InputValueError, match=r"system to be given for a chat"):
        PromptTemplate("{text}", system="s")
    with pytest.raises(
        InputValueError, match=r"text_pair to match the template, got one"
    ):
        PromptTemplate("{text}").render("a", "b")
    with pytest.raises(
        InputValueError, match=r"text_pair to match the template, got none"
    ):
        PromptTemplate("{text}{text_pair}").render("a")
    with pytest.raises(
        InputValueError, match=r"have a chat template, got .* without one"
    ):
        PromptTemplate("{text}", chat=True).render("a", tokenizer=tokenizer())
    without_end = with_chat(
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    with pytest.raises(InputValueError, match=r"end where the answer begins"):
        PromptTemplate("{text}", chat=True).check(without_end)
    PromptTemplate("{text}", chat=True, ends_with="Answer:").check(without_end)
