"""The command line of `tandem bench report`: documents in, one page out."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.bench.load.runs import Pictured, read_document
from tandem.bench.picture.drawing import require_matplotlib
from tandem.bench.picture.page import write_page
from tandem.bench.report.options import option, parse
from tandem.runtime.errors import ConfigError

MAX_DOCUMENTS = 32


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """Draw the results of earlier runs on one page; two of them are compared."""

    files: tuple[Path, ...] = option(
        (), "JSON of runs: tandem bench --output FILE --records", is_positional=True
    )
    report: Path = option(Path("report.html"), "the HTML page to write")

    def __post_init__(self) -> None:
        if not self.files:
            raise ConfigError("name a file", param="FILES")
        if len(self.files) > MAX_DOCUMENTS:
            raise ConfigError(f"{len(self.files)} files: a page has {MAX_DOCUMENTS} at most")


def write_report(arguments: Sequence[str]) -> int:
    """Run `tandem bench report` and return its exit status. Raises ConfigError and OSError."""
    options = parse(ReportOptions, "tandem.bench.cli", arguments, prog="tandem bench report")
    require_matplotlib("report")
    documents = [(path.stem, read_document(path)) for path in options.files]
    write_page(options.report, Pictured.of(documents))
    print(options.report)
    return 0
