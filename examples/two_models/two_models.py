"""Two models in one process, and as many processes as you like. No model is needed for it.

    tandem serve                       # a cluster, in one terminal
    python two_models.py               # in a second one, and in a third
    curl localhost:8000/v1/models
    curl localhost:8000/v1/completions -d '{"model": "slow", "prompt": "a b c", "max_tokens": 8}'

Requests go round the processes. Kill one in the middle of an answer and the other goes on with it,
without a token missing; stop the last one and both models are gone.
"""

import asyncio

from tandem.sdk import DistributedRuntime, ModelInput, ModelType, register_llm, worker
from tandem.sdk.sample_engine import SampleEngine, SampleOptions

MODELS = [
    SampleOptions(model_name="quick", token_interval_s=0.001),
    SampleOptions(model_name="slow", token_interval_s=0.05, ttft_s=0.2),
]


async def serve(runtime: DistributedRuntime, options: SampleOptions) -> None:
    """Any `async def handler(request, context)` that yields chunks may stand for `generate`."""
    endpoint = runtime.namespace("two-models").component(options.model_name).endpoint("generate")
    await register_llm(
        ModelInput.Tokens,
        ModelType.Chat | ModelType.Completions,
        endpoint,
        options.model_path,  # whose tokenizer it is
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
