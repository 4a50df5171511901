"""Three services without a model; each calls the next.

    cd examples/hello_world
    tandem run hello_world:Frontend -f config.yaml
    python client.py "Hello, Tandem"        # in another terminal

Try `--Backend.ServiceArgs.workers=1`, `--Middle.greeting=Salut`, or kill one of the Backends while
the client runs.
"""

import logging
from collections.abc import AsyncIterator

from pydantic import BaseModel

from tandem.sdk import async_on_start, depends, dynamo_context, endpoint, service

logger = logging.getLogger(__name__)


class Words(BaseModel):
    """The request of every service in this example."""

    text: str


@service(dynamo={"namespace": "hello"}, resources={"cpu": "500m"}, workers=2)
class Backend:
    """A service that yields the words in capitals, one at a time."""

    @endpoint()
    async def generate(self, request: Words) -> AsyncIterator[str]:
        for word in request.text.split():
            yield word.upper()


class MiddleSettings(BaseModel):
    """The settings of config.yaml and `--Middle.key=value`."""

    greeting: str = "Hello"


@service(dynamo={"namespace": "hello"}, settings=MiddleSettings)
class Middle:
    """A service that puts a greeting before the words of the Backend."""

    backend = depends(Backend)

    def __init__(self) -> None:
        self.greeting = dynamo_context["config"].greeting

    @endpoint()
    async def generate(self, request: Words) -> AsyncIterator[str]:
        yield self.greeting
        async for word in self.backend.generate(request):
            yield word


@service(dynamo={"namespace": "hello"})
class Frontend:
    """The entry for clients."""

    middle = depends(Middle)

    @async_on_start
    async def say_where(self) -> None:
        logger.info("instance %s is starting", dynamo_context["instance_id"])

    @endpoint()
    async def generate(self, request: Words) -> AsyncIterator[str]:
        async for word in self.middle.generate(request):
            yield f"{word} "
