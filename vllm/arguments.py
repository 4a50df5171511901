"""The command line of `tandem engine vllm`: MODEL, Tandem's flags, and vLLM's own arguments."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from vllm import AsyncEngineArgs
from vllm.config import KVTransferConfig
from vllm.lora.request import LoRARequest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tandem.runtime.errors import ConfigError
from tandem.sdk.engine.disaggregation import DisaggregationMode
from tandem.sdk.engine.worker_config import WorkerConfig

CONNECTOR = "tandem.vllm.connector"
USAGE = (
    "tandem engine vllm MODEL [--namespace NAME] [--disaggregation-mode agg|decode|prefill] "
    "[--lora-modules NAME=PATH ...] [vLLM's own arguments]"
)
_KV_ROLES = {
    DisaggregationMode.DECODE: "kv_consumer",
    DisaggregationMode.PREFILL: "kv_producer",
}


def parse_arguments(
    words: Sequence[str],
) -> tuple[AsyncEngineArgs, dict[str, LoRARequest], WorkerConfig]:
    """Return vLLM's arguments, the LoRA adapters by name, and the worker's configuration.

    `--help` lists Tandem's flags and vLLM's. Raise ConfigError that names what cannot be served.
    """
    own = argparse.ArgumentParser(usage=USAGE, add_help=False, allow_abbrev=False)
    own.add_argument("--namespace", default="vllm", help="of Tandem's cluster")
    own.add_argument(
        "--disaggregation-mode",
        choices=["agg", *(mode.value for mode in _KV_ROLES)],
        default="agg",
        help="decode: prompts may go to prefill workers, which serve nothing else",
    )
    own.add_argument(
        "--lora-modules",
        nargs="+",
        default=[],
        type=_name_and_path,
        metavar="NAME=PATH",
        help="LoRA adapters, each of which is served under its name",
    )
    theirs = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(usage=USAGE, parents=[own]))
    if "--help" in words or "-h" in words:
        theirs.parse_args(["--help"])
    if not words or words[0].startswith("-"):
        raise ConfigError(f"the model comes first: {USAGE}", param="MODEL")
    parsed = theirs.parse_args(["--model", *words])
    arguments = AsyncEngineArgs.from_cli_args(parsed)
    if parsed.lora_modules:
        arguments.enable_lora = True
    mode = DisaggregationMode(parsed.disaggregation_mode)
    _settle(arguments, mode)
    config = WorkerConfig(
        parsed.namespace,
        model_name=arguments.model,
        served_model_name=arguments.served_model_name[0],
        # The connector has the decode role: prompts are placed where vLLM schedules them
        disaggregation_mode=DisaggregationMode.AGGREGATED
        if mode is DisaggregationMode.DECODE
        else mode,
    )
    adapters = enumerate(dict(parsed.lora_modules).items(), 1)
    return arguments, {name: LoRARequest(name, i, path) for i, (name, path) in adapters}, config


def _name_and_path(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if not name or not path:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH")
    return name, path


def _settle(arguments: AsyncEngineArgs, mode: DisaggregationMode) -> None:
    """Set what Tandem needs. Raise ConfigError naming an argument that a worker cannot serve."""
    if arguments.data_parallel_size != 1:
        raise ConfigError(
            "--data-parallel-size: a worker has one rank; start one worker per rank",
            param="data_parallel_size",
        )
    if mode in _KV_ROLES:
        if arguments.kv_transfer_config is not None:
            raise ConfigError(
                "--kv-transfer-config: --disaggregation-mode sets it; give one of the two",
                param="kv_transfer_config",
            )
        arguments.kv_transfer_config = KVTransferConfig(
            kv_connector="TandemConnector",
            kv_connector_module_path=CONNECTOR,
            kv_role=_KV_ROLES[mode],
            kv_load_failure_policy="recompute",
        )
    structured = arguments.structured_outputs_config
    if structured.backend == "auto":  # the frontend writes grammars of tool calls for llguidance
        structured.backend = "guidance"
    folder = Path(arguments.model).expanduser()
    if folder.is_dir():
        arguments.model = str(folder.resolve())
    names = arguments.served_model_name or arguments.model
    arguments.served_model_name = [names] if isinstance(names, str) else names
