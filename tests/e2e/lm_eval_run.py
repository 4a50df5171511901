"""A run of lm-evaluation-harness against a served model: prints the scores of its samples as JSON.

python lm_eval_run.py MODEL_FOLDER COMPLETIONS_URL FOLDER; a task of that folder is evaluated.
"""

import json
import sys
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager


def main(model: str, url: str, folder: str) -> None:
    results: dict[str, Any] = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": "tandem-tiny", "base_url": url, "tokenizer": model,
            "tokenizer_backend": "huggingface", "tokenized_requests": True, "num_concurrent": 4,
        },
        tasks=["capitals"],
        task_manager=TaskManager(include_path=folder, include_defaults=False),
        batch_size=3,
        log_samples=True,
        bootstrap_iters=0,
    )  # fmt: skip
    samples = results["samples"]["capitals"]
    scores = {sample["doc_id"]: sample["filtered_resps"] for sample in samples}
    print(json.dumps({"acc": results["results"]["capitals"]["acc,none"], "scores": scores}))


if __name__ == "__main__":
    main(*sys.argv[1:])
