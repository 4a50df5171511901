"""Programs of the guides and of the examples, imported as modules."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).parent.parent / "docs"


def imported(path: Path) -> ModuleType:
    """Import a file that is in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of_guide(page: str, part: str, folder: Path) -> ModuleType:
    """Import the program of a page of the docs that holds `part`, from a file in `folder`."""
    text = (DOCS / page).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    (found,) = [block for block in blocks if part in block]
    path = folder / "guide_program.py"
    path.write_text(found)
    return imported(path)
