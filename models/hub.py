"""Models of the Hugging Face hub, and the progress of their download."""

import os
from pathlib import Path
from typing import Any

from tandem.runtime.process.progress import ProgressBar

# Nothing that could be run: weights as safetensors, the rest as JSON or a template.
_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
_LEFT = ["consolidated*.safetensors"]  # the same weights again, in Mistral's own form
_TIMEOUT_S = 10.0


def download(hub_id: str, endpoint: str | None) -> Path:
    """Return the folder of a model with its files. Raise the errors of huggingface_hub."""
    import huggingface_hub  # an optional dependency

    with ProgressBar(f"download of {hub_id}", total=1.0) as bar:
        folder = huggingface_hub.snapshot_download(
            hub_id,
            allow_patterns=_PATTERNS,
            ignore_patterns=_LEFT,
            endpoint=endpoint,
            etag_timeout=_TIMEOUT_S,
            tqdm_class=_silent_bars(bar),
        )
    return Path(folder)


def _silent_bars(bar: ProgressBar) -> type:
    """Return the class of the library's bars: they write nothing, and `bar` has their bytes."""
    from tqdm.auto import tqdm  # comes with huggingface_hub

    counting: list[tqdm[Any]] = []  # bars of bytes; a file's stays when it is done

    class SilentBar(tqdm):  # type: ignore[misc]
        """A bar of the library."""

        def __init__(self, *args: Any, **fields: Any) -> None:
            fields.pop("name", None)  # of the library's own class
            with open(os.devnull, "w") as nowhere:
                super().__init__(*args, **fields | {"disable": False, "file": nowhere})
            if self.unit == "B":
                counting.append(self)

        def display(self, *_: object, **__: object) -> bool:
            """Write nothing."""
            return True

        def close(self) -> None:
            """Write nothing at the end either."""

        def update(self, amount: float | None = 1) -> bool | None:
            """Count bytes."""
            shown: bool | None = super().update(amount)
            total = sum(each.total or 0 for each in counting)
            if self.unit == "B" and total:
                bar.update(min(sum(each.n for each in counting) / total, 1.0))
            return shown

    return SilentBar
