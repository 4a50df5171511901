from tandem.launch.config.docs import DOCUMENT, render
from tandem.launch.config.model import all_keys


def test_the_configuration_page_is_what_the_models_say() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == render(), (
        "run python -m tandem.launch.config.docs"
    )


def test_the_configuration_page_has_every_key() -> None:
    page = render()
    for key in all_keys():
        assert f"`{key}`" in page
        assert f"`--{key}=`" in page
