"""Two vLLMs: one computes long prompts for the other, and writes their KV into its memory.

    tandem serve                                  # a cluster, in one terminal
    python vllm_disagg.py MODEL [ARGUMENTS]       # in a second one, with vLLM's environment
    curl -i localhost:8000/v1/completions -H 'x-tandem-prefill: remote' \
        --json '{"model": "MODEL", "prompt": "Once upon a time", "max_tokens": 16}'

ARGUMENTS are vLLM's own. Prompts above `disagg.max_local_prefill_length` go to the prefill worker:
`tandem config set disagg.max_local_prefill_length 200` takes effect with the next prompt. Stop or
kill the prefill worker in the middle of a prompt, and the other computes it.
"""

import signal
import subprocess
import sys

MODES = ("decode", "prefill")


def main(words: list[str]) -> int:
    """Run both engines until one of them ends, or a signal ends both; return the status."""
    if not words or words[0].startswith("-"):
        print(__doc__)
        return 2
    signals = {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    engines = [
        subprocess.Popen(
            [sys.executable, "-m", "tandem.launch", "engine", "vllm", words[0],
             "--disaggregation-mode", mode, *words[1:]],
            start_new_session=True,  # Ctrl-C would reach vLLM's own processes, too
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, signals),
        )
        for mode in MODES
    ]  # fmt: skip
    # A child that is stopped, and not ended, sends a SIGCHLD, too
    while signal.sigwait(signals) == signal.SIGCHLD and all(
        each.poll() is None for each in engines
    ):
        pass
    for engine in engines:
        engine.terminate()
    return max(engine.wait() for engine in engines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
