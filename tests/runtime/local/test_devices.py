import socket

import pytest

from tandem.runtime.errors import ConfigError
from tandem.runtime.local.devices import device_for, list_gpus
from tandem.runtime.local.ports import is_port_free, require_free_port


@pytest.mark.parametrize("gpu", ["cpu", "auto"])
def test_words_for_devices_pass(gpu: str) -> None:
    assert device_for(gpu) == gpu


def test_a_gpu_beyond_the_last_is_refused_with_what_there_is() -> None:
    gpus = list_gpus()
    if gpus:
        assert device_for("0") == "cuda:0"
    with pytest.raises(ConfigError, match=r"this machine has .*--gpu cpu"):
        device_for(str(len(gpus)))


def test_nonsense_is_no_gpu() -> None:
    with pytest.raises(ConfigError, match="must be an index, cpu or auto"):
        device_for("-1")


def test_a_taken_port_is_refused_with_the_next_free_one() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        assert not is_port_free("127.0.0.1", port)
        with pytest.raises(ConfigError) as caught:
            require_free_port("127.0.0.1", port, "--port")
    assert f"port {port} on 127.0.0.1 is taken" in caught.value.message
    nearest = int(caught.value.message.rpartition(" ")[2])
    assert nearest > port
    assert is_port_free("127.0.0.1", nearest)


def test_a_host_that_is_not_ours_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.7"):
        is_port_free("203.0.113.7", 8000)
