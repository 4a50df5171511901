"""The names of a `WorkerConfig` for the formats of answers, and for the grammar of calls.

Other servers have names of their own for a format; each is known here beside Tandem's.
"""

from typing import Literal

_TOOL_FORMATS = (
    "hermes", "qwen3_coder", "llama3_json", "llama_pythonic", "mistral", "deepseek_v3",
    "deepseek_v31", "glm45", "kimi_k2", "phi4", "gemma3", "gemma4", "function_gemma", "harmony",
    "none",
)  # fmt: skip
_REASONING_FORMATS = ("think", "mistral", "seed", "gemma4", "harmony", "none")

# parser |-> format of the frontend
TOOL_PARSERS = {name: name for name in _TOOL_FORMATS} | {
    "qwen25": "hermes", "qwen2_5": "hermes", "nemotron_nano": "qwen3_coder",
    "qwen3_xml": "qwen3_coder", "pythonic": "llama_pythonic", "llama4_pythonic": "llama_pythonic",
    "llama4_json": "llama3_json", "deepseekv3": "deepseek_v3", "deepseek_v3_1": "deepseek_v31",
    "glm47": "glm45", "phi4_mini_json": "phi4", "gemma-4": "gemma4", "openai": "harmony",
    "functiongemma": "function_gemma", "granite4": "hermes", "mimo": "qwen3_coder",
}  # fmt: skip
REASONING_PARSERS = {name: name for name in _REASONING_FORMATS} | {
    "basic": "think", "qwen3": "think", "glm45": "think", "nemotron_deci": "think",
    "deepseek_r1": "think", "kimi_k25": "think", "nemotron3": "think", "nemotron_nano": "think",
    "step3": "think", "minimax_append_think": "think", "gpt_oss": "harmony", "seed_oss": "seed",
    "gemma-4": "gemma4", "glm47": "think", "mimo": "think", "holo2": "think", "kimi_k2": "think",
    "deepseek_v3": "think", "nemotron_v3": "think", "minimax_m2": "think",
    "minimax_m2_append_think": "think", "openai_gptoss": "harmony",
}  # fmt: skip
# Parsers of models whose answers begin with reasoning, also where no mark opens it
REASONS_FIRST = frozenset(
    {
        "deepseek_r1", "kimi_k25", "minimax_append_think", "minimax_m2",
        "minimax_m2_append_think", "nemotron3", "nemotron_nano", "nemotron_v3", "step3",
    }
)  # fmt: skip

STRUCTURAL_TAG_MODES: dict[str | bool | None, bool] = {
    None: False, False: False, True: True, "off": False, "on": True, "auto": True,
}  # fmt: skip
SCOPES: dict[str | None, Literal["auto", "always"]] = {
    None: "auto", "auto": "auto", "always": "always",
}  # fmt: skip
SCHEMAS: dict[str | None, bool] = {None: False, "auto": False, "strict": True}
