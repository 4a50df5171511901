import json
import subprocess
import sys
import threading
import time

import pytest

from tandem.frontend.tokens.template import TemplateTimeError
from tandem.frontend.tokens.tokenizer import ModelText
from tandem.runtime.errors import InvalidRequestError, ModelError
from tests.frontend.frontend_stack import byte_level_tokenizer, model_files, token_ids
from tests.frontend.tokens import hostile_templates

HELLO = [{"role": "user", "content": "Hi"}]


def render(text: ModelText, limit_s: float = 5.0, **extra: object) -> str:
    return text.render(HELLO, extra, 1_000_000, limit_s)


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
    assert render(text, enable_thinking=False) == rendered


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no system message') }}", "{{ messages[7].content.x }}", "{{ 1 / 0 }}",
        "{{ messages.append(1) }}", "{{ ().__class__.__base__.__subclasses__() }}", "{{ none() }}",
    ],
)  # fmt: skip
def test_a_template_that_refuses_is_the_callers_error(template: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template") as refused:
        render(text_with(template))
    assert refused.value.param == "messages"


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(InvalidRequestError, match="/v1/completions"):
        render(text_with(None))


def test_a_template_file_wins_over_the_config() -> None:
    files = model_files().files | {"chat_template.jinja": b"from the file"}
    assert render(ModelText(files)) == "from the file"


@pytest.mark.parametrize(
    ("config", "token"),
    [
        ({"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}, "<|im_start|>"),
        ({"bos_token": None, "eos_token": {"content": "<|im_end|>"}}, "<|im_end|>"),
        ({"bos_token": "not a token"}, None),
    ],
)
def test_a_text_starts_with_the_models_own_token(
    config: dict[str, object], token: str | None
) -> None:
    expected = None if token is None else byte_level_tokenizer().token_to_id(token)
    assert text_with("", **config).start_token_id == expected


def test_broken_files_are_named() -> None:
    files = model_files().files
    for name in ("tokenizer.json", "tokenizer_config.json"):
        with pytest.raises(ModelError, match=name):
            ModelText(files | {name: b"{"})
    with pytest.raises(ModelError, match="chat template"):
        text_with("{% for %}")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        ModelText({})


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(9999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro twice(n) %}{% if n %}{{ twice(n - 1) }}{{ twice(n - 1) }}{% endif %}"
        "{% endmacro %}{{ twice(60) }}",
    ],
)
def test_a_template_that_runs_on_is_ended(template: str) -> None:
    started_s = time.thread_time()
    with pytest.raises(TemplateTimeError) as refused:
        render(text_with(template), 0.05)
    assert refused.value.param == "messages"
    assert time.thread_time() - started_s < 1


def test_a_rendered_text_ends_soon_after_the_length_that_is_too_long() -> None:
    text = text_with("{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}")
    assert 100 < len(text.render([{"role": "user", "content": "x" * 60}], {}, 100, 5)) < 300


@pytest.mark.parametrize("stride", [31, pytest.param(1, marks=pytest.mark.slow)])
def test_no_operation_of_a_template_takes_long_or_much_memory(stride: int) -> None:
    """Every filter, test, operator, method and function of Jinja, with what is hostile to it."""
    command = [sys.executable, "-m", hostile_templates.__name__, str(stride)]
    done = subprocess.run(command, capture_output=True, check=True, timeout=600)
    judged = json.loads(done.stdout)
    assert judged["failed"] == [] and judged["num_rendered"] > 5000 // stride


@pytest.mark.parametrize(
    ("template", "rendered"),
    [
        ("{{ ['a', 'b'] | join('-') ~ (1 + 2) }}", "a-b3"),
        ("{{ '%s has %03d' % ('a', 7) }}{{ '{:>3}'.format('b') }}", "a has 007  b"),
        ("{% set x = [1] + [2] * 2 %}{{ x[1:] | map('string') | list }}", "['2', '2']"),
        ("{{ 'x' * 3 }}{{ 2 ** 10 }}{{ 7 % 4 }}{{ 'ab'.rjust(4).upper() }}", "xxx10243  AB"),
        ("{{ 'a' in 'cab' and messages == messages and 4 is even }}", "True"),
        ("{% set n = namespace(a=1) %}{% set n.a = n.a + 1 %}{{ n.a }}{{ n }}", "2<Namespace>"),
        ("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m('a') ~ m(x='b') }}", "<a><b>"),
    ],
)
def test_the_operations_of_honest_templates_are_there(template: str, rendered: str) -> None:
    assert render(text_with(template)) == rendered


@pytest.mark.parametrize("name", ["translate", "encode", "maketrans"])
def test_a_method_without_a_bound_is_not_there(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        render(text_with(f"{{{{ 'a'.{name}({{}}) }}}}"))


def test_a_template_without_end_in_its_source_is_refused() -> None:
    with pytest.raises(ModelError, match="chat template"):
        text_with("x" * 2**20 + "x")


@pytest.mark.parametrize("length", [1, 10_000])
def test_long_and_short_texts_have_the_same_tokens(length: int) -> None:
    text = "Hello wörld " * length
    ids = ModelText(model_files().files).encode(text, is_chat=False)
    assert ids == token_ids(text)
    assert byte_level_tokenizer().decode(ids) == text


def test_other_threads_run_while_a_long_text_is_tokenized() -> None:
    model_text, text = ModelText(model_files().files), "Hello wörld " * 60_000
    thread = threading.Thread(target=model_text.encode, args=(text,), kwargs={"is_chat": False})
    thread.start()
    num_turns = 0
    while thread.is_alive():
        time.sleep(0.001)
        num_turns += 1
    assert num_turns > 20  # one or two while the lock is held
