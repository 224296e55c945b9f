"""Which models can be trained: what was tried, and a message for what cannot be loaded at all."""

from __future__ import annotations

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from wingbeat.core.errors import ModelSourceError

TRAINED = (
    *("apertus", "arcee", "bitnet", "bloom", "codegen", "cohere", "cohere2", "ernie4_5", "exaone4", "falcon_h1"),
    *("gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt2", "gpt_neox", "gpt_oss", "gptj", "granite"),
    *("granitemoe", "helium", "hunyuan_v1_dense", "jamba", "lfm2", "llama", "mamba", "ministral", "mistral", "mixtral"),
    *("mpt", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2"),
    *("qwen2_moe", "qwen3", "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3", "stablelm"),
    *("starcoder2", "xglm"),
)
"""``model_type`` of those whose decoder, head and logit transform were proved together on small models of random
weights.  Others may train as well: every model is proved when it is loaded (:class:`.logprobs.LogprobModel`).  Which of
them the embedded engine serves, it says itself; vLLM has a list of its own."""


def check_architecture(model_type: str, *, folder: object) -> None:
    """Raises ModelSourceError where transformers knows no causal language model of this type."""
    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return
    known = "no causal language model" if model_type in CONFIG_MAPPING else "unknown to this release of transformers"
    raise ModelSourceError(
        f"unsupported architecture: model_type {model_type!r} in {folder} is {known}. Expected one that writes text"
        f" left to right; tried and supported: {', '.join(TRAINED)}"
    )
