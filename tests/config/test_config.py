from pathlib import Path

import pytest

from tandem.config.flags import Flag
from tandem.config.model import all_keys, load_config, section_model
from tandem.config.sources import Setting
from tandem.runtime.errors import ConfigError
from tests.config.configs import config_of

KEY = "disagg.max_local_prefill_length"


def write(folder: Path, text: str) -> Path:
    path = folder / "tandem.yaml"
    path.write_text(text)
    return path


def test_defaults_have_the_origin_default() -> None:
    loaded = load_config()
    assert loaded.config.disagg.max_local_prefill_length == 1000
    assert {loaded.origin(key) for key in all_keys()} == {"default"}


def test_each_source_wins_over_the_weaker_ones(tmp_path: Path) -> None:
    file = write(tmp_path, "# thresholds\ndisagg:\n  max_local_prefill_length: 2\n")
    environment = {"TANDEM_DISAGG__MAX_LOCAL_PREFILL_LENGTH": "3", "HOME": "/root"}
    flags = [Flag(f"--{KEY}", "4")]
    sources = [
        (load_config(), 1000, "default"),
        (load_config(file=file), 2, f"{file}:3"),
        (
            load_config(file=file, environment=environment),
            3,
            "TANDEM_DISAGG__MAX_LOCAL_PREFILL_LENGTH",
        ),
        (load_config(file=file, environment=environment, flags=flags), 4, f"flag --{KEY}"),
    ]
    for loaded, value, origin in sources:
        assert loaded.value(KEY) == value
        assert loaded.origin(KEY) == origin


def test_addresses_and_level_are_read_from_the_shared_variables_too(tmp_path: Path) -> None:
    file = write(tmp_path, "runtime:\n  nats_url: nats://file:1\n")
    shared = {"NATS_SERVER": "n:1", "ETCD_ENDPOINTS": "a:1, http://b:1", "DYN_LOG": "warn,x=trace"}
    loaded = load_config(file=file, environment=shared)
    runtime = loaded.config.runtime
    assert (runtime.nats_url, runtime.etcd_endpoints) == ("nats://n:1", "http://a:1,http://b:1")
    assert (runtime.log_level, loaded.origin("runtime.nats_url")) == ("warning", "NATS_SERVER")
    longer = shared | {"TANDEM_RUNTIME__NATS_URL": "nats://n:2", "ETCD_ENDPOINTS": ""}
    assert load_config(environment=longer).config.runtime.nats_url == "nats://n:2"
    assert load_config(environment=longer).origin("runtime.etcd_endpoints") == "default"


def test_defaults_given_later_do_not_override_given_values() -> None:
    loaded = config_of(f"--{KEY}=4")
    mixed = loaded.with_defaults(
        [Setting(KEY, 9, "topology"), Setting("engine.max_num_seqs", 7, "topology")]
    )
    assert mixed.value(KEY) == 4
    assert mixed.value("engine.max_num_seqs") == 7
    assert mixed.origin("engine.max_num_seqs") == "topology"
    assert mixed.with_settings([Setting(KEY, 5, "--option")]).value(KEY) == 5


@pytest.mark.parametrize(
    ("flag", "nearest"),
    [
        ("--disagg.max_local_prefil_length=5", KEY),
        ("--disag.policy=threshold", "disagg.policy"),
        ("--engine.blocksize=5", "engine.block_size"),
        ("--decode.max_local_prefill_length=5", KEY),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(flag: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean {nearest}") as caught:
        config_of(flag)
    assert flag.partition("=")[0] in caught.value.message


def test_an_unknown_key_like_no_other_lists_the_sections(tmp_path: Path) -> None:
    file = write(tmp_path, "zzz:\n  qqqqqqq: 1\n")
    with pytest.raises(ConfigError, match=r"tandem.yaml:2.*sections are runtime, engine"):
        load_config(file=file)


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--engine.num_blocks=many", ["engine.num_blocks", "'many'", "valid integer"]),
        ("--disagg.max_prefill_queue_size=0", ["'0'", "greater than or equal to 1"]),
        ("--disagg.policy=sometimes", ["'sometimes'", "'always_local'"]),
        ("--frontend.port=70000", ["frontend.port", "65535"]),
    ],
)
def test_a_bad_value_names_key_value_and_reason(flag: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(flag)
    for word in words:
        assert word in caught.value.message


def test_a_bad_value_in_a_file_names_its_line(tmp_path: Path) -> None:
    file = write(tmp_path, "engine:\n  max_num_seqs: 4\n  block_size: -16\n")
    with pytest.raises(ConfigError, match=r"engine.block_size = -16 \(.*tandem.yaml:3\)"):
        load_config(file=file)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("engine: [1, 2]\n", r":1: engine must be a mapping"),
        ("engine:\n  block_size: 16\n  block_size: 32\n", r":3: block_size stands twice"),
        ("engine:\n  - : {\n", r"tandem.yaml:\d"),
        ("engine:\n  block_size: !!python/object/apply:os.getpid []\n", r"tandem.yaml:2"),
    ],
)
def test_a_broken_file_is_an_error_with_its_line(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config(file=write(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*absent.yaml: No such file"):
        load_config(file=tmp_path / "absent.yaml")


def test_an_empty_file_and_empty_sections_change_nothing(tmp_path: Path) -> None:
    assert load_config(file=write(tmp_path, "")).settings == {}
    assert load_config(file=write(tmp_path, "engine:\n")).settings == {}


def test_a_variable_with_one_underscore_too_few_is_not_ignored() -> None:
    with pytest.raises(ConfigError, match="did you mean TANDEM_DISAGG__POLICY"):
        load_config(environment={"TANDEM_DISAGG_POLICY": "threshold"})


def test_variables_of_others_are_left_alone() -> None:
    assert load_config(environment={"TANDEM": "1", "TANDEM_HOME": "/x"}).settings == {}


def test_null_as_text_clears_what_may_be_empty() -> None:
    loaded = load_config(environment={"TANDEM_ENGINE__NUM_BLOCKS": "null"})
    assert loaded.config.engine.num_blocks is None
    with pytest.raises(ConfigError, match=r"runtime\.namespace"):
        config_of("--runtime.namespace=")


def test_a_secret_is_not_in_the_error_that_refuses_it(tmp_path: Path) -> None:
    file = write(tmp_path, "runtime:\n  cluster_token: [hush]\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file=file)
    assert "hush" not in caught.value.message
    assert "runtime.cluster_token = ***" in caught.value.message


def test_every_live_number_has_bounds_on_both_sides() -> None:
    fields = section_model("disagg").model_fields
    for name, field in fields.items():
        if field.annotation in (int, float):
            kinds = {type(bound).__name__ for bound in field.metadata}
            assert kinds >= {"Ge", "Le"}, name
