import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {normal(name): version for name, version in pairs}


def test_every_dependency_has_one_exact_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    optional = [requirement for extra in extras.values() for requirement in extra]
    wanted = [*project["dependencies"], *optional]
    names = {normal(re.split(r"[\s<>=;\[]", requirement, maxsplit=1)[0]) for requirement in wanted}
    assert names <= set(pinned())
    assert all(re.fullmatch(r"(\d+!)?[\w.]+", version) for version in pinned().values())
