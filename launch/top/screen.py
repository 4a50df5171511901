"""The screen of `tandem top` as text."""

from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tandem.launch.top.board import Board, Member
from tandem.runtime.printable import one_line

KEYS = "q quit   space pause   up/down select   r role   u undo"
BAR = 12  # characters of a KV pool
MAX_CAUSES = 8
MAX_TEXT_BYTES = 400
SIDE_ROWS = 2  # of a table: its heading, and a line below it
Part = Table | Text
OLD_S = 6.0  # a reading of this age is pointed out


@dataclass(slots=True)
class View:
    """The choices of the person at the keyboard."""

    first: int = 0  # process at the top
    selected: str = ""  # instance id
    is_paused: bool = False

    def move(self, board: Board, by: int) -> None:
        """Select the next process, or the one before."""
        ids = [each.report.instance.instance_id for each in board.in_order()]
        if ids:
            at = ids.index(self.selected) + by if self.selected in ids else 0
            self.selected = ids[min(max(at, 0), len(ids) - 1)]


def draw(board: Board, view: View, now_s: float, height: int, note: str = "") -> RenderableType:
    """Return the screen; `height` is its number of lines. The selected process is on it."""
    if board.report is None:
        waiting = board.problems or ("reading the cluster ...",)
        return Group(Text(KEYS, "dim"), *map(_words, waiting))
    below: list[Part] = [*_figures(board), *_notes(board, now_s)]
    if note:
        below.append(_words(note, "bold"))
    num_below = sum(part.row_count + SIDE_ROWS if isinstance(part, Table) else 1 for part in below)
    num_rows = max(height - num_below - 4, 3)
    members = board.in_order()
    ids = [each.report.instance.instance_id for each in members]
    if view.selected in ids:
        at = ids.index(view.selected)
        view.first = max(min(view.first, at), at - num_rows + 1)
    view.first = min(view.first, max(len(members) - num_rows, 0))
    shown = members[view.first : view.first + num_rows]
    spaced = [line for part in below for line in _spaced(part)]
    return Group(_head(board, view), Text(), _workers(shown, view.selected, now_s), Text(), *spaced)


def _spaced(part: Part) -> list[Part]:
    return [part, Text()] if isinstance(part, Table) else [part]


def _head(board: Board, view: View) -> Text:
    assert board.report is not None
    silent = sum(not member.is_well for member in board.members.values())
    parts: list[str | tuple[str, str]] = [
        (f"tandem {board.report.namespace}", "bold"),
        f"   {len(board.members)} processes",
        (f", {silent} without an answer" if silent else "", "bold red"),
        ("   paused" if view.is_paused else "", "bold yellow"),
        (f"   {KEYS}", "dim"),
    ]
    return Text.assemble(*parts, no_wrap=True)


def _table(*headings: str, num_texts: int) -> Table:
    """Return a table whose first `num_texts` columns are words and the others numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold dim")
    for at, heading in enumerate(headings):
        table.add_column(heading, justify="left" if at < num_texts else "right", no_wrap=True)
    return table


def _workers(members: list[Member], selected: str, now_s: float) -> Table:
    table = _table(
        *("role", "instance", "model", "state", "tp", "kv"),
        *("used", "cached", "running", "waiting", "jobs"),
        num_texts=6,
    )
    for member in members:
        instance = member.report.instance
        style = "" if member.is_well else "bold red"
        role = member.last.load.role if member.last else member.report.role
        mark = "> " if instance.instance_id == selected else ""
        names = (mark + role, instance.instance_id[:8], instance.model, member.state(now_s))
        table.add_row(*map(_words, names), *_load(member), style=style)
    return table


def _load(member: Member) -> list[Text | str]:
    """Return the cells of the last answer."""
    if member.last is None:
        return ["-"] * 7
    load = member.last.load
    pool: list[Text | str] = ["-"] * 3  # of an engine that keeps its own to itself
    if load.num_blocks:
        num_used = load.num_blocks - load.num_free_blocks - load.num_cached_blocks
        used, cached = (n / load.num_blocks for n in (num_used, load.num_cached_blocks))
        pool = [_bar(used, used + cached), f"{used:.0%}", f"{cached:.0%}"]
    return [
        f"{member.last.details.get('tp', '-')}",
        *pool,
        f"{load.num_running}",
        f"{load.num_waiting}",
        f"{member.last.details.get('num_jobs', '-')}",
    ]


def _bar(used: float, until_cached: float) -> Text:
    """Return a KV pool as a bar: used, cached, free."""
    ends = [round(min(max(share, 0.0), 1.0) * BAR) for share in (used, until_cached)]
    style = "red" if used > 0.9 else "green"
    return Text.assemble(
        ("█" * ends[0], style), ("▒" * (ends[1] - ends[0]), "cyan"), ("░" * (BAR - ends[1]), "dim")
    )


def _figures(board: Board) -> list[Table]:
    """Return the tables of the queue, the latencies and the placements."""
    assert board.report is not None
    queues = _table(
        "prefill queue", "deployment", "jobs", "tokens", "in progress", "dead", num_texts=2
    )
    for queue in board.report.queues:
        counts = (queue.num_jobs, queue.num_tokens, queue.num_in_progress, queue.num_dead)
        cells = ["-"] * 4 if queue.error else [f"{count}" for count in counts]
        names = _words(queue.model), _words(queue.deployment)
        queues.add_row(*names, *cells, style="red" if queue.error else "")
    last = f"last {board.window.covered_s:.0f} s"
    latencies = _table(f"{last}, ms", "model", "median", "p95", "target", num_texts=2)
    for found in board.latencies():
        values = (found.median_ms, found.p95_ms, found.target_ms)
        cells = ["-" if value is None else f"{value:.1f}" for value in values]
        style = "bold red" if found.is_missed else ""
        latencies.add_row(found.kind.upper(), _words(found.model), *cells, style=style)
    prompts = _table(f"prompts, {last}", "cause", "number", "share", num_texts=2)
    rows = board.placements()
    total = sum(number for *_, number in rows)
    for place, cause, number in rows[:MAX_CAUSES]:
        words = _words(place), _words(cause.replace("_", " "))
        prompts.add_row(*words, f"{number}", f"{number / total:.0%}")
    return [table for table in (queues, latencies, prompts) if table.row_count]


def _notes(board: Board, now_s: float) -> list[Text]:
    assert board.report is not None
    values = ", ".join(f"{name} {value}" for name, value in board.report.thresholds.items())
    problems = [*board.problems, *(each.sentence for each in board.report.idle_prefill)]
    problems += [
        f"prefill queue of {queue.model}, deployment {queue.deployment}: {queue.error}"
        for queue in board.report.queues
        if queue.error
    ]
    notes = [_words(f"thresholds: {values}"), *(_words(each, "red") for each in problems)]
    age_s = now_s - board.read_s
    return notes + ([Text(f"this is {age_s:.0f} s old", "yellow")] if age_s > OLD_S else [])


def _words(text: str, style: str = "") -> Text:
    """Return a text from the cluster on one line, whatever characters it has."""
    return Text(one_line(text, MAX_TEXT_BYTES), style, no_wrap=True, overflow="ellipsis")
