"""Commands that pass their words on to a parser of another room."""

from collections.abc import Sequence

import typer

app = typer.Typer()

NAMES = ("bench", "conformance", "engine")
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
ENGINE_USAGE = (
    "usage: tandem engine {module:Engine | vllm} [the engine's arguments; --help shows them]"
)
NAMED_ENGINES = {"vllm": "tandem.vllm.engine:VllmEngine"}


@app.command(context_settings=PASS_ON, epilog="Example: tandem bench --help")
def bench(ctx: typer.Context) -> None:
    """Measure latency, throughput and goodput of any server with the OpenAI API."""
    from tandem.bench.cli import main as run_bench

    raise typer.Exit(run_bench(ctx.args))


@app.command(
    context_settings=PASS_ON,
    epilog="Example: tandem engine my_engine:MyEngine --model-name my-model",
)
def engine(ctx: typer.Context) -> None:
    """Serve models with your own engine: module:Engine, then the engine's arguments."""
    run_engine(ctx.args)


@app.command(
    context_settings=PASS_ON,
    epilog="Example: tandem conformance tandem.sdk.sample_engine:SampleEngine",
)
def conformance(ctx: typer.Context) -> None:
    """Check your own engine against the engine contract: module:Engine, then its arguments."""
    from tandem.sdk.conformance.kit import main as check

    raise typer.Exit(check(ctx.args))


def run_engine(words: Sequence[str]) -> None:
    """Block until a signal ends the engine. Raise ConfigError when there is no such engine."""
    if not words or words[0] in ("-h", "--help"):
        print(ENGINE_USAGE)
        raise SystemExit(0 if words else 2)
    from tandem.sdk.engine_worker.run import load_engine, run

    run(load_engine(NAMED_ENGINES.get(words[0], words[0])), list(words[1:]))
