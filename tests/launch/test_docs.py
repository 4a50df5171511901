from tandem.launch.config import all_keys
from tandem.launch.configuration_docs import DOCUMENT, render


def test_the_configuration_page_is_what_the_models_say() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == render(), (
        "run python -m tandem.launch.configuration_docs"
    )


def test_the_configuration_page_has_every_key() -> None:
    page = render()
    for key in all_keys():
        assert f"`{key}`" in page
        assert f"`--{key}=`" in page
