"""What `@service` and its fellows write down, and which services make a graph."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from pydantic import BaseModel

from tandem.runtime.errors import ConfigError
from tandem.sdk import (
    async_on_start,
    depends,
    dynamo_context,
    dynamo_endpoint,
    endpoint,
    link,
    liveness,
    on_shutdown,
    service,
)
from tandem.sdk.service.config import ServiceConfig
from tandem.sdk.service.dependencies import graph_of, known_services
from tandem.sdk.service.spec import Resources, settings_of, spec_of


class Settings(BaseModel):
    block_size: int = 16


@service(dynamo={"namespace": "shop", "component_type": "worker"}, settings=Settings)
class Worker:
    @endpoint()
    async def generate(self, request: str) -> AsyncIterator[str]:
        yield request


@service
class Router:
    worker = depends(Worker)

    @dynamo_endpoint(name="chat/completions")
    async def choose(self, request: str) -> str:
        return request

    @endpoint
    async def bare(self, request: str) -> str:
        return request


@service(resources={"cpu": "500m", "memory": "20Gi", "gpu": "1"}, workers=3)
class Front:
    router = depends(Router)
    worker = depends(Worker)

    @async_on_start
    async def first(self) -> None: ...

    @async_on_start
    def second(self) -> None: ...

    @on_shutdown
    @liveness
    def last(self) -> bool:
        return True


def names(entry: type) -> list[str]:
    return [spec.name for spec in graph_of(entry)]


def test_the_address_is_namespace_class_and_method() -> None:
    spec = spec_of(Worker)
    assert str(spec.address("generate", "tandem")) == "shop.Worker.generate"
    assert str(spec_of(Router).address("bare", "tandem")) == "tandem.Router.bare"


def test_endpoints_have_their_methods_name_or_one_of_their_own() -> None:
    assert spec_of(Router).endpoints == {"chat/completions": "choose", "bare": "bare"}


def test_hooks_are_kept_in_the_order_of_their_definition() -> None:
    assert spec_of(Front).hooks == {
        "on_start": ("first", "second"),
        "liveness": ("last",),
        "on_shutdown": ("last",),
    }


def test_resources_are_read_as_kubernetes_writes_them() -> None:
    assert spec_of(Front).resources == Resources(0.5, 20 << 30, 1)
    assert spec_of(Front).num_workers == 3
    assert spec_of(Worker).resources == Resources(None, None, 0)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"dynamo": {"namepsace": "x"}}, "dynamo: unknown key 'namepsace'; did you mean namespace"),
        ({"dynamo": {"namespace": "a b"}}, "namespace 'a b' is not a name"),
        ({"resources": {"gpus": 1}}, "resources: unknown key 'gpus'; did you mean gpu"),
        ({"resources": {"gpu": "half"}}, r"resources.gpu = 'half': must be a whole number"),
        ({"resources": {"gpu": 0.5}}, r"resources.gpu = 0.5: must be a whole number"),
        ({"resources": {"cpu": "ten"}}, r"resources.cpu = 'ten': must be a number of cores"),
        ({"resources": {"cpu": 0}}, r"resources.cpu = 0: must be more than 0"),
        ({"resources": {"memory": "20GB"}}, r"resources.memory = '20GB': must be bytes"),
        ({"workers": 0}, "workers = 0: must be a whole number of at least 1"),
        ({"workers": "2"}, "workers = '2': must be a whole number"),
    ],
)
def test_what_cannot_be_is_refused_with_the_class_and_the_key(
    arguments: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"^@service of Wrong: .*{reason}|^{reason}"):

        @service(**arguments)
        class Wrong: ...


def test_two_methods_cannot_be_one_endpoint() -> None:
    with pytest.raises(ConfigError, match="one and other are both endpoint 'same'"):

        @service
        class Twice:
            @endpoint("same")
            async def one(self, request: str) -> None: ...

            @endpoint("same")
            async def other(self, request: str) -> None: ...


def test_a_subclass_needs_a_decorator_of_its_own() -> None:
    class Plain(Worker): ...

    with pytest.raises(ConfigError, match="Plain is not a service: decorate it with @service"):
        depends(Plain)
    assert spec_of(service(Plain)).endpoints == {"generate": "generate"}


def test_a_graph_is_what_its_entry_depends_on_with_the_called_ones_first() -> None:
    assert names(Front) == ["Worker", "Router", "Front"]
    assert names(Worker) == ["Worker"]


def test_links_choose_among_the_dependencies() -> None:
    @service
    class Linked:
        router = depends(Router)
        worker = depends(Worker)

    assert Linked.link(Worker) is Worker  # type: ignore[attr-defined]
    assert names(Linked) == ["Worker", "Linked"]
    assert [spec.name for spec in known_services(Linked)] == ["Worker", "Router", "Linked"]


def test_a_link_without_a_dependency_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"Worker.link\(Router\): Worker has no depends\(\) on it"
    ):
        link(Worker, Router)


def test_two_services_of_one_name_cannot_be_in_one_graph() -> None:
    def another() -> type:
        @service
        class Worker: ...

        return Worker

    @service
    class Both:
        one = depends(Worker)
        other = depends(another())

    with pytest.raises(ConfigError, match="two services of this graph are named Worker"):
        graph_of(Both)


def test_settings_are_a_dict_or_the_model_of_the_class() -> None:
    config = ServiceConfig({"Worker": {"block-size": 64}, "Router": {"any": [1]}})
    assert settings_of(spec_of(Worker), config) == Settings(block_size=64)
    assert settings_of(spec_of(Router), config) == {"any": [1]}


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("blok_size", 1, "Worker: unknown key 'blok_size'; did you mean block_size?"),
        ("block_size", "many", "Worker.block_size: Input should be a valid integer"),
    ],
)
def test_a_setting_that_the_model_does_not_take_is_named(
    key: str, value: object, reason: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_of(spec_of(Worker), ServiceConfig({"Worker": {key: value}}))
    assert caught.value.message.startswith(reason)


def test_without_a_service_the_context_says_that_there_is_none() -> None:
    dynamo_context.fill({})
    with pytest.raises(
        ConfigError, match="no service is running in this process, so there is no 'run"
    ):
        dynamo_context["runtime"]
    assert dynamo_context.get("runtime") is None
