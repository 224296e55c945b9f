"""What all tiny models are made of: a small Qwen3, and the loss by which it learns to talk like somebody."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM


def tiny_qwen3(
    *, vocab_size: int, hidden_size: int, layers: int, max_tokens: int, eos: int, pad: int, seed: int
) -> Qwen3ForCausalLM:
    """A randomly initialised model; the caller's random state is left alone."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=hidden_size // 4,
        max_position_embeddings=max_tokens,
        initializer_range=0.15,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        tie_word_embeddings=True,
        use_cache=True,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=pad, do_sample=True, temperature=1.0)
    return model.float()


def imitation_loss(model: Qwen3ForCausalLM, batch: Sequence[tuple[list[int], list[bool]]], *, pad: int) -> torch.Tensor:
    """Mean cross-entropy of the tokens that the assistant wrote; the rest is only context.

    ``batch``: of each episode its tokens [T], and which of them [T] those are.
    """
    width = max(len(ids) for ids, _ in batch)
    # Padding is on the right and attention is causal, so no attention mask is needed.
    ids_BT = torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in batch])
    imitated_BT = torch.tensor([mask + [False] * (width - len(mask)) for _, mask in batch])[:, 1:]
    hidden_BTD = model.model(input_ids=ids_BT[:, :-1], use_cache=False).last_hidden_state
    logits_AV = model.lm_head(hidden_BTD[imitated_BT])
    return torch.nn.functional.cross_entropy(logits_AV, ids_BT[:, 1:][imitated_BT])


def written_by_assistant(ids: Sequence[int], *, start: int, assistant: int, end: int) -> list[bool]:
    """Which tokens [T] are replies, their ends included; turns begin with ``start`` and the role."""
    written: list[bool] = []
    writing = False
    for index, token in enumerate(ids):
        written.append(writing)
        if index and ids[index - 1] == start:
            writing = token == assistant
        elif token == end:
            writing = False
    return written
