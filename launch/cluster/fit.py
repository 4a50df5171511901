"""Prefill and decode workers of one model that cannot serve one another, and the difference."""

from collections.abc import Iterator, Sequence

from tandem.runtime.membership.instance_report import InstanceReport

# A detail of a worker's status |-> its name in words.
_CONDITIONS = {
    "weights": "weights",
    "kv_form": "form of K/V",
    "kv_layout": "KV layout",
    "transport": "transport",
}


def misfits(reports: Sequence[InstanceReport]) -> list[str]:
    """Return a line for each pair that does not fit, and for decode workers that fit none.

    A model without prefill workers needs no line: its decode workers compute all prompts.
    """
    workers = [each for each in reports if each.worker is not None and each.instance.deployment]
    lines: list[str] = []
    for decode in (each for each in workers if each.role in ("decode", "both")):
        others = [
            each
            for each in workers
            if each.role in ("prefill", "both")
            and each is not decode
            and each.instance.model == decode.instance.model
        ]
        unfit = [each for each in others if each.instance.deployment != decode.instance.deployment]
        lines += [
            f"{_name(each)} does not fit {_name(decode)}: {_why(each, decode)}" for each in unfit
        ]
        if unfit and len(unfit) == len(others):
            lines.append(
                f"{_name(decode)}: no prefill worker fits, so it computes all of its prompts itself"
            )
    return lines


def _name(report: InstanceReport) -> str:
    return f"{report.role} {report.instance.instance_id[:8]}"


def _why(prefill: InstanceReport, decode: InstanceReport) -> str:
    return "; ".join(_differences(prefill, decode)) or "they are of different deployments"


def _differences(prefill: InstanceReport, decode: InstanceReport) -> Iterator[str]:
    assert prefill.worker is not None and decode.worker is not None
    for key, words in _CONDITIONS.items():
        theirs, ours = prefill.worker.details.get(key), decode.worker.details.get(key)
        if theirs != ours:
            yield f"{words} [{theirs}] and [{ours}]"
