"""The sampling that a model's generation_config.json suggests, for requests that name none."""

import json
import math
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.runtime.errors import ModelError
from tandem.runtime.wire.bounds import LARGEST_INT, LEAST_REPETITION_PENALTY

FILE = "generation_config.json"

Share = Annotated[float, Meta(ge=0, le=1)]


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Values for what a request leaves out; None: the API's own."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=LARGEST_INT)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Meta(ge=LEAST_REPETITION_PENALTY, le=10)] | None = None


NO_DEFAULTS = SamplingDefaults()
_OF_SAMPLING = ("temperature", "top_p", "top_k", "min_p")


def sampling_defaults(files: Mapping[str, bytes]) -> SamplingDefaults:
    """Return the defaults of a model folder. Raise ModelError naming the file and the value.

    With `do_sample: false` the file's values for sampling are of no use to it, nor are they here.
    """
    try:
        found = json.loads(files.get(FILE, b"{}"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{FILE}: not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{FILE}: not a JSON object")
    if found.get("do_sample") is False:
        found = {name: value for name, value in found.items() if name not in _OF_SAMPLING}
    for name in SamplingDefaults.__struct_fields__:
        if isinstance(value := found.get(name), float) and math.isnan(value):
            raise ModelError(f"{FILE}: {name}: is not a number", param=name)
    try:
        return msgspec.convert(found, SamplingDefaults)
    except msgspec.ValidationError as error:
        raise ModelError(f"{FILE}: {error}") from error
