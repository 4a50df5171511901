from tandem.config.docs import DOCUMENT, render
from tandem.config.model import section_model, section_names


def test_the_configuration_page_is_what_the_models_say() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == render(), "run python -m tandem.config.docs"


def test_every_key_has_a_description() -> None:
    for section in section_names():
        for name, field in section_model(section).model_fields.items():
            assert field.description, f"{section}.{name}"
