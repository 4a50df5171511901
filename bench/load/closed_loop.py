"""A closed loop of synthetic requests, as the benchmarks of stacks send it."""

from dataclasses import dataclass, replace

from tandem.bench.client.openai import OpenAIClient, PreparedRequest
from tandem.bench.client.wire import BodyBuilder
from tandem.bench.load.load import LoadPlan, LoadResult, LoadRun
from tandem.bench.load.metrics import Summary, summarize
from tandem.bench.load.workload import Seeds, SyntheticWorkload
from tandem.runtime.errors import ServiceError


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`num_requests` requests, `concurrency` at a time, one after another."""

    workload: SyntheticWorkload
    concurrency: int
    num_requests: int
    stream: bool = True

    async def run(self, client: OpenAIClient, content: str) -> tuple[LoadResult, Summary]:
        """Send all to the server's first model; prompts are a function of `content`.

        Raises ServiceError when a request failed.
        """
        model = (await client.served_models())[0].id
        body = BodyBuilder(model, stream=self.stream)
        requests = (
            PreparedRequest(
                body.encode(spec.prompt, spec.num_output_tokens), spec.num_output_tokens
            )
            for spec in self.workload.prompts(Seeds(0, content))
        )
        plan = LoadPlan(concurrency=self.concurrency, num_requests=self.num_requests)
        result = await LoadRun(client, requests, plan).run()
        summary = summarize(result.records, {})
        if summary.errors:
            raise ServiceError(f"requests failed, so there is no figure: {summary.errors}")
        return result, summary

    async def warm_up(self, client: OpenAIClient, content: str) -> None:
        """Send some requests of the same kind with prompts of their own."""
        some = replace(self, num_requests=max(20, 2 * self.concurrency))
        await some.run(client, f"{content}/warm-up")
