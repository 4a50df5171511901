import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tandem.frontend.tokens.tokenizer import ModelText
from tandem.runtime.errors import InvalidRequestError, ModelError
from tests.frontend.frontend_stack import byte_level_tokenizer, model_files, token_ids

HELLO = [{"role": "user", "content": "Hi"}]


def text_with(template: object, **config: object) -> ModelText:
    fields = {"chat_template": template, **config}
    return ModelText(model_files().files | {"tokenizer_config.json": json.dumps(fields).encode()})


@pytest.mark.parametrize(
    ("template", "rendered"),
    [
        ("{{ messages[0]['content'] | tojson }}", '"Hi"'),
        ("{{ {'a': '<é>'} | tojson(indent=1) }}", '{\n "a": "<é>"\n}'),
        ("{% for m in messages %}\n    {{ m.role }}\n{% endfor %}", "    user\n"),
        ("{% for i in [1,2,3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("a{% generation %}b{% endgeneration %}c", "abc"),
        ("{{ bos_token }}|{{ eos_token }}|{{ add_generation_prompt }}", "<s>|</s>|True"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ 'yes' if enable_thinking else 'no' }}", "no"),
        ([{"name": "tool_use", "template": "x"}, {"name": "default", "template": "d"}], "d"),
    ],
)
def test_templates_render_as_at_hugging_face(template: object, rendered: str) -> None:
    text = text_with(template, bos_token="<s>", eos_token={"content": "</s>"})
    assert text.render(HELLO, {"enable_thinking": False}) == rendered


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no system message') }}",
        "{{ messages[7].content.x }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ().__class__.__base__.__subclasses__() }}",
        "{{ none() }}",
    ],
)
def test_a_template_that_refuses_is_the_callers_error(template: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template") as refused:
        text_with(template).render(HELLO, {})
    assert refused.value.param == "messages"


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(InvalidRequestError, match="/v1/completions"):
        text_with(None).render(HELLO, {})


def test_a_template_file_wins_over_the_config() -> None:
    files = model_files().files | {"chat_template.jinja": b"from the file"}
    assert ModelText(files).render(HELLO, {}) == "from the file"


def test_broken_files_are_named() -> None:
    files = model_files().files
    for name in ("tokenizer.json", "tokenizer_config.json"):
        with pytest.raises(ModelError, match=name):
            ModelText(files | {name: b"{"})
    with pytest.raises(ModelError, match="chat template"):
        text_with("{% for %}")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        ModelText({})


@pytest.mark.parametrize("length", [1, 10_000])
async def test_long_and_short_texts_have_the_same_tokens(length: int) -> None:
    text = "Hello wörld " * length
    with ThreadPoolExecutor(1) as executor:
        ids = await ModelText(model_files().files).encode(text, is_chat=False, executor=executor)
    assert ids == token_ids(text)
    assert byte_level_tokenizer().decode(ids) == text
