"""Writes docs/models.md from the tables: `python -m tandem.engine.architecture.docs`."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from tandem.engine.architecture.architectures import ARCHITECTURES, WITH_TEXT_CONFIG
from tandem.engine.architecture.config import ACTIVATIONS
from tandem.engine.architecture.quantization import GROUP_SIZES
from tandem.engine.architecture.rope_config import ROPE_KINDS
from tandem.engine.architecture.spec import Architecture, Mixture
from tandem.runtime.wire.dtypes import ELEMENT_BYTES

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "models.md"

_INTRODUCTION = """\
# Models

This page is generated from the tables in `engine/architecture/` by
`python -m tandem.engine.architecture.docs`; a test fails when it is out of date.

`tandem serve MODEL` takes a folder with `config.json`, a tokenizer and `*.safetensors`, or the id
of one on the Hugging Face hub. `config.json` alone decides how a model is computed. A model that
cannot be is refused at the start, with the file, the key, and the layer where there is one.
So is a model whose `lm_head.weight` differs from its embeddings although `tie_word_embeddings` is
true, and one whose first token has no finite logits.

- The weights are the files that `model.safetensors.index.json` names. Without it they are
  `model.safetensors`, or the only `*.safetensors`; of several others none is chosen, and the start
  ends with their names. A download leaves Mistral's `consolidated.safetensors` on the hub.
- An answer ends at the tokens of `eos_token_id` in `config.json` and `generation_config.json`, and
  at the `eos_token` of `tokenizer_config.json`. [Sampling](http-api.md#both-endpoints) is by
  `generation_config.json` where a request says nothing.
- A folder may be anybody's: its files must be regular ones, JSON of up to 16 MiB (`tokenizer.json`
  128, the index 64) and templates of up to 1 MiB. A link may point within the folder, or to the
  files of a model in the hub's cache (`models--OWNER--NAME/blobs`), and nowhere else.
"""

_NATIVE = """\
## Architectures

The engine computes these itself, with its own kernels on GPU and CPU. Tests compare each with the
eager pass of transformers: 64 greedy tokens in ragged batches, prompts in chunks, over a cached
prefix, after preemption and prefilled by another worker, and logits in float32.
"""

_GENERIC = """\
## Other decoders of text

A decoder that is not in the table is computed by the modelling code of transformers, with the
engine's attention, linear layers, norms and experts, with the extra `transformers`
([installing](deployment.md#installing)).
`engine.model_impl` chooses: `auto` takes native code where there is some, `native` and
`transformers` insist. Prefix cache, handoff and migration are the same. Prefill and decode workers
must have the same version of transformers, and do not work together otherwise. Code from a model's
folder is never run.

At the start the calls of a model's modules are traced into a flat program, which serves if its
results are the same; and where heads are normed and rotated as one kernel does it, that kernel
takes the place of the attention module's code. So a dense decoder's step on one CPU core takes 1.04
to 1.07 times as long as native code's, a prompt 1.06 to 1.08 times
(`python -m tandem.bench.engine.cpu --only modules`).

Experts are multiplied on a GPU by torch's grouped product in bfloat16 on sm_90 and sm_100. On other
chips and in float16 torch copies counts to the host, which no CUDA graph can hold: there kernels of
the native code compute them, where gates lie beside ups, are opened by SiLU, and weights are stored
by output. Others, as those without gates, are computed expert after expert, without graphs.

Tests compare more than 30 architectures with the eager pass of transformers, among them mixtures of
experts, gpt-oss, DeepSeek-V3, Llama 4 and GPT-NeoX. A model with latent attention (DeepSeek) keeps
full keys and values for every head, which takes far more memory than its latents would.

Refused at the start, with the layer and the reason: state outside of attention (Qwen3-Next,
Falcon-H1), attention that does not go through transformers' interface (BLOOM), masks that hide or
show other positions than the layer asks attention for (Phi-3.5-MoE with a window below its
context), layers with differing numbers of KV heads, encoders, inputs other than text, quantized
weights. Where angles (longrope, dynamic) or attention in chunks change with the length of a batch,
the model serves sequences up to that length. Whatever the model, a worker computes one token
before it is ready; code that fails with the model's weights ends the start.

`tandem doctor MODEL` names the code that would serve a model, the bytes of its weights and of KV
per token (of a model with sliding windows also in its longest sequences, where it is less), the
tokens that fit this machine, and missing files.
"""

_QUANTIZED = """\
## Quantized weights

Matrices of the architectures in the table may be stored as codes, by `quantization_config`. They
stay codes in memory, and each product expands those that it reads; `tandem doctor MODEL` names the
form and the bytes. Fewer bytes are read in less time: one CPU core decodes 16 layers of hidden size
768 some 1.3 times as fast from FP8, and 1.4 times from 4 bits, as in bfloat16
(`python -m tandem.bench.engine.cpu --only codes`).

{table}

A matrix that the files have in floating point is multiplied as such, which is how those of
`modules_to_not_convert` and `ignore` are stored. Activations are not quantized, unless
`engine.float8_products` is on: then inputs of FP8 matrices are rounded to FP8 on a GPU from sm_89
on, if the files say that they are meant to be as they come (`activation_scheme` or the `dynamic` of
`input_activations`), each 128 of a token with a scale of their own; [FP8 by
FP8](kernels.md#fp8-by-fp8). Those of experts are not, nor where scales belong to blocks of 32 or 64
inputs. The KV cache is never quantized. A scale that is missing, negative, not finite or of
another shape is refused with the tensor's name. Refused as well: inputs that do not belong to
groups in their order (`g_idx`, "act order", also where `desc_act` says so and there is no `g_idx`),
forms that differ by module, 2, 3 and 8 bit integers, and every other method (bitsandbytes, GGUF,
NVFP4, HQQ, ...) at the start, with format and file. A GGUF file is made from a model with
safetensors, which most hubs have beside an AWQ, GPTQ or FP8 form of it: serve one of these.
"""

# Its values of quant_method, the forms, and models that are published in them
_FORMS = (
    (
        "fp8",
        "FP8 (E4M3) with a scale per tensor, or per block of `weight_block_size`",
        "Qwen3-8B-FP8, Qwen3-30B-A3B-FP8",
    ),
    ("fbgemm_fp8", "FP8 with a scale per row", "Llama FP8 by Meta"),
    (
        "compressed-tensors",
        "FP8 with a scale per tensor, row or block; 4 bit integers (`pack-quantized`), in groups "
        "or by row, symmetric or with zeros",
        "Llama 3.1 8B FP8 and w4a16",
    ),
    (
        "awq",
        f"4 bit, version `gemm`, group sizes {', '.join(map(str, GROUP_SIZES))}",
        "Llama 3.1 8B AWQ, Qwen3 AWQ",
    ),
    (
        "gptq",
        "4 bit, the same group sizes or one group, symmetric or with zeros, `gptq` and `gptq_v2`",
        "Qwen2.5-7B-Instruct-GPTQ-Int4",
    ),
    (
        "mxfp4",
        "the experts of gpt-oss: E2M1 in groups of 32 with a power of two",
        "gpt-oss-20b and 120b",
    ),
)

_NOTES = """\
## Limits

- Weights are safetensors in {dtypes}, or quantized as above; one
  device holds a whole model.
- Activations: {activations}. Rotary embeddings:
  {ropes}, of a part of each head with `partial_rotary_factor`.
- Experts may be stored one by one, or stacked as transformers holds them. All of them are in
  memory; a token reads those that it chose.
- A layer with a sliding window computes over its window alone, and keeps only the blocks that later
  tokens read: the others go back to the pool as the window passes, where the prefix cache has them
  until their place is needed, and a handoff sends none of them. A prefix is found again while the
  blocks of its last window are there. A window that is not shorter than
  `max_position_embeddings` is none.
- YaRN gives a model `original_max_position_embeddings` times `factor` positions, where those are
  more than `max_position_embeddings`: model cards say to add it and leave that key as it is.
- LongRoPE has factors for short sequences and for long ones. The short ones are in use when
  `engine.max_model_len`, or else `max_position_embeddings`, is at most
  `original_max_position_embeddings`; otherwise every sequence turns by the long ones. Prefill and
  decode workers must agree on that, and do not work together otherwise.
- Of {wrappers},
  text is served: sizes are read from `text_config`, and other parts are not loaded.
"""


def render() -> str:
    """Return the page."""
    rows = [
        f"| {each.models} | `{each.name}` | {'; '.join(_variations(each)) or 'nothing'} |"
        for each in ARCHITECTURES.values()
    ]
    table = "\n".join(["| models | architecture | varies by |", "|---|---|---|", *rows])
    notes = _NOTES.format(
        dtypes=_listed(ELEMENT_BYTES),
        activations=_listed(ACTIVATIONS),
        ropes=_listed(ROPE_KINDS),
        wrappers=_listed(f"`{name}`" for name in WITH_TEXT_CONFIG),
    )
    forms = [f"| `{method}` | {form} | {models} |" for method, form, models in _FORMS]
    quantized = _QUANTIZED.format(
        table="\n".join(["| `quant_method` | form | published as |", "|---|---|---|", *forms])
    )
    return f"{_INTRODUCTION}\n{_NATIVE}\n{table}\n\n{_GENERIC}\n{quantized}\n{notes}"


def _listed(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}"


def _variations(architecture: Architecture) -> Iterator[str]:
    """Yield the differences from a plain decoder."""
    slots = {spec.slot for spec in architecture.layer_tensors}
    if "attention_out_norm" in slots:
        yield "four norms a layer" if "input_norm" in slots else "norms after both parts of a layer"
    if architecture.norm_offset:
        yield f"norms by {architecture.norm_offset:g} + weight"
    qk_norms = [spec for spec in architecture.layer_tensors if spec.slot == "qk_norm"]
    if qk_norms:
        where = f" where `{qk_norms[0].flag}`" if qk_norms[0].flag else ""
        yield "norms of each query and key head" + where
    if "wide_q_norm" in slots:
        yield "norms of queries and of keys over all heads"
    packed = [
        spec.name.split(".")[1]
        for spec in sorted(architecture.layer_tensors, key=lambda spec: spec.name)
        if "qkv_proj" in spec.name or spec.name == "mlp.gate_up_proj.weight"
    ]
    if packed:
        yield "packed " + " and ".join(f"`{name}`" for name in packed)
    if any(spec.slot == "qkv_bias" and not spec.flag for spec in architecture.layer_tensors):
        yield "query, key and value biases"
    biases = {spec.flag for spec in architecture.layer_tensors if spec.kind == "bias"}
    flags = [flag for flag in architecture.flags if flag in biases]
    if flags:
        yield "biases where " + ", ".join(f"`{flag}`" for flag in flags)
    if "sinks" in slots:
        yield "attention sinks"
    if architecture.mixture is not None:
        yield from _mixture(architecture, architecture.mixture)
    if architecture.windows is not None:
        yield _windows(architecture)
    if architecture.local_rope:
        yield f"layers with a window rotate by `{architecture.local_rope}`, unscaled"
    if architecture.no_rope:
        which = {"no_rope_layers": "`no_rope_layers`", "full_attention": "layers without a window"}
        yield f"no rotation in {which[architecture.no_rope]}"
    if architecture.rope_interleaved:
        yield "neighbors rotate together"
    if architecture.scales_embedding:
        yield "embeddings times the square root of `hidden_size`"
    if architecture.reads:
        yield "scales and caps: " + ", ".join(f"`{key}`" for key in architecture.reads)


def _mixture(architecture: Architecture, mixture: Mixture) -> Iterator[str]:
    tensors = architecture.layer_tensors
    scores = "sigmoids in groups" if mixture.is_sigmoid else "softmax"
    where = "" if mixture.is_renormalized else " where `norm_topk_prob`"
    yield f"experts weighed by {scores}, divided by their sum{where}"
    if mixture.shared_width_key:
        gate = " behind a gate" if any(spec.slot == "shared_gate" for spec in tensors) else ""
        yield f"a shared expert{gate}"
    if any(spec.layers == "dense" for spec in tensors):
        yield "layers without experts"
    if mixture.is_clamped:
        yield "SwiGLU clamped by `swiglu_limit`, experts with biases"


def _ordinal(number: int) -> str:
    return {2: "second", 3: "third"}.get(number, f"{number}th")


def _windows(architecture: Architecture) -> str:
    windows = architecture.windows
    assert windows is not None
    where = "sliding window in all layers"
    if windows.full_every:
        where = f"sliding window in all but each {_ordinal(windows.full_every)} layer"
    elif windows.first_key:
        where = f"sliding window from layer `{windows.first_key}` on"
    elif windows.of_no_rope:
        where = "sliding window in layers without rotation"
    where += " (or `layer_types`)" if windows.by_layer_types else ""
    return f"{where} where `use_sliding_window`" if windows.asked else where


if __name__ == "__main__":
    DOCUMENT.write_text(render(), encoding="utf-8")
