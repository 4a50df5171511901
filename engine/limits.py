"""What an engine takes: how long a sequence may become."""

from tandem.engine.config import EngineConfig
from tandem.engine.schedule.sequence import Sequence
from tandem.runtime.errors import CapacityError, ContextLengthError, InvalidRequestError


def longest_sequence(config: EngineConfig, max_positions: int, num_slots: int) -> int:
    """Tokens of prompt and answer; without a configured limit, what model and KV pool hold."""
    if config.max_model_len is not None:
        return min(config.max_model_len, max_positions)
    return min(max_positions, num_slots)


def check_limits(seq: Sequence, max_model_len: int, num_blocks: int, block_size: int) -> None:
    """Whether `seq` fits an empty engine.

    Raises InvalidRequestError, ContextLengthError or CapacityError, with the numbers.
    """
    if not seq.token_ids:
        raise InvalidRequestError("the prompt is empty", param="prompt")
    num_tokens = seq.max_num_tokens
    max_tokens = num_tokens - seq.num_prompt_tokens
    num_generated = seq.num_given_tokens - seq.num_prompt_tokens
    if not 0 <= num_generated < seq.num_given_tokens:
        raise InvalidRequestError(
            f"num_generated is {num_generated}, of {seq.num_given_tokens} tokens in all",
            param="num_generated",
        )
    if max_tokens < 1:
        raise InvalidRequestError(
            f"max_tokens is {max_tokens}, at least 1 is needed", param="max_tokens"
        )
    if max_tokens <= num_generated:
        raise InvalidRequestError(
            f"the answer has its {max_tokens} tokens already: num_generated is {num_generated}",
            param="num_generated",
        )
    if num_tokens > max_model_len:
        raise ContextLengthError(
            f"the prompt has {seq.num_prompt_tokens} tokens and max_tokens is {max_tokens}: "
            f"{num_tokens} in all, the model takes {max_model_len}",
            param="max_tokens" if seq.num_prompt_tokens < max_model_len else "prompt",
        )
    num_needed = -(-num_tokens // block_size)
    if num_needed > num_blocks:
        raise CapacityError(
            f"{num_tokens} tokens need {num_needed} KV blocks of {block_size}, "
            f"the pool has {num_blocks}"
        )
