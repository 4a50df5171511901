from tandem.engine.architecture.architectures import ARCHITECTURES
from tandem.engine.architecture.docs import DOCUMENT, render


def test_the_page_of_models_is_up_to_date() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == render(), (
        "run python -m tandem.engine.architecture.docs"
    )


def test_every_architecture_names_models_and_has_a_row() -> None:
    page = render()
    for architecture in ARCHITECTURES.values():
        assert architecture.models and f"| `{architecture.name}` |" in page
