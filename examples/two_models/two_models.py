"""Two models in one process, and any number of processes. The models have no weights.

    tandem serve                       # a cluster, in one terminal
    python two_models.py               # in a second one, and in a third
    curl localhost:8000/v1/models
    curl localhost:8000/v1/completions --json '{"model": "slow", "prompt": "a b c"}'

Requests go to the processes in turn. Kill one in the middle of an answer, and the other resumes it
without a missing token. Stop the last one, and both models are gone.
"""

import asyncio

from tandem.sdk import DistributedRuntime, ModelInput, ModelType, register_llm, worker
from tandem.sdk.sample_engine import SampleEngine, SampleOptions

MODELS = [
    SampleOptions(model_name="quick", token_interval_s=0.001),
    SampleOptions(model_name="slow", token_interval_s=0.05, ttft_s=0.2),
]


async def serve(runtime: DistributedRuntime, options: SampleOptions) -> None:
    """Serve one model. Any `async def handler(request, context)` that yields chunks would do."""
    endpoint = runtime.namespace("two-models").component(options.model_name).endpoint("generate")
    await register_llm(
        ModelInput.Tokens,
        ModelType.Chat | ModelType.Completions,
        endpoint,
        options.model_path,  # the model with the tokenizer
        model_name=options.model_name,
        context_length=8192,
        user_data={"token_interval_s": options.token_interval_s},
    )
    await endpoint.serve_endpoint(SampleEngine(options).generate)


@worker
async def main(runtime: DistributedRuntime) -> None:
    await asyncio.gather(*(serve(runtime, options) for options in MODELS))


if __name__ == "__main__":
    asyncio.run(main())
