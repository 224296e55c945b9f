"""Makes the two models of this example: `python models.py` writes models/solver and models/verifier.

They differ in everything that two policies may differ in: architecture (Qwen3, Llama), size and tokenizer.
Each first imitates careless demonstrations for some seconds, because a model with random weights never earns a
reward. The demonstrations are wrong often, independently of the question, so what the models learn beyond
them is learnt by reinforcement.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tasks import all_tasks
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
SOLVER_RIGHT = 0.4
"""How often the solver's demonstrations name the largest number, rather than any other digit."""
VERIFIER_RIGHT = 0.7
"""How often the verifier's demonstrations judge an answer rightly."""
TASKS = all_tasks()
STEPS = 500
BATCH = 48

SOLVER_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VERIFIER_TEMPLATE = (
    "{% for m in messages %}{{ '[A]' if m.role == 'assistant' else '[Q]' }}{{ m.content }}[E]{% endfor %}"
    "{% if add_generation_prompt %}[A]{% endif %}"
)


def solver_tokenizer() -> Tokenizer:
    """Byte-level BPE: digits are single tokens, the words of the template and the question are one token each."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("\n"), behavior="merged_with_previous"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        min_frequency=1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["user\n", "assistant\n", "largest of "], trainer=trainer)
    return tokenizer


def verifier_tokenizer() -> Tokenizer:
    """Every byte is a token of its own, but for the marks of the template and the two verdicts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["[PAD]", "[Q]", "[A]", "[E]"])
    tokenizer.add_tokens(["yes", "no"])
    return tokenizer


def solver_model(tokenizer: Tokenizer) -> PreTrainedModel:
    """130,000 parameters."""
    end, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=16,
            max_position_embeddings=128,
            initializer_range=0.15,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=end,
            pad_token_id=pad,
        )
    )


def verifier_model(tokenizer: Tokenizer) -> PreTrainedModel:
    """280,000 parameters."""
    end, pad = tokenizer.token_to_id("[E]"), tokenizer.token_to_id("[PAD]")
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=3,
            max_position_embeddings=128,
            initializer_range=0.12,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=end,
            pad_token_id=pad,
        )
    )


def solver_demonstration(rng: random.Random) -> tuple[str, str]:
    """A prompt and a careless reply, as the template writes them."""
    task = rng.choice(TASKS)
    answer = task["answer"] if rng.random() < SOLVER_RIGHT else rng.choice("0123456789")
    question = f"<|im_start|>user\n{task['question']}<|im_end|>\n<|im_start|>assistant\n"
    return question, f"{answer}<|im_end|>"


def verifier_demonstration(rng: random.Random) -> tuple[str, str]:
    """An answer, right or wrong, and a careless verdict."""
    task = rng.choice(TASKS)
    right = rng.random() < 0.5
    answer = task["answer"] if right else rng.choice(task["wrong"])
    verdict = right if rng.random() < VERIFIER_RIGHT else not right
    return f"[Q]{task['numbers']}:{answer}[E][A]", f"{'yes' if verdict else 'no'}[E]"


def imitate(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    demonstrate: Callable[[random.Random], tuple[str, str]],
    *,
    num_steps: int,
) -> float:
    """Supervised warm-up on the replies' tokens; returns the mean of the last losses."""
    rng = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0)
    head = model.get_output_embeddings()
    assert head is not None
    losses: list[float] = []
    for step in range(num_steps):
        for group in optimizer.param_groups:  # up for 10 steps, down to nothing in the last quarter
            group["lr"] = 4e-3 * min(1.0, (step + 1) / 10) * min(1.0, 4 * (1 - step / num_steps))
        prompts, replies = zip(*(demonstrate(rng) for _ in range(BATCH)), strict=True)
        prompt_ids = [encoding.ids for encoding in tokenizer.encode_batch(list(prompts), add_special_tokens=False)]
        reply_ids = [encoding.ids for encoding in tokenizer.encode_batch(list(replies), add_special_tokens=False)]
        width = max(len(p) + len(r) for p, r in zip(prompt_ids, reply_ids, strict=True))
        ids = torch.zeros(BATCH, width, dtype=torch.long)
        is_reply = torch.zeros(BATCH, width, dtype=torch.bool)
        for row, (prompt, reply) in enumerate(zip(prompt_ids, reply_ids, strict=True)):
            ids[row, : len(prompt) + len(reply)] = torch.tensor(prompt + reply)
            is_reply[row, len(prompt) : len(prompt) + len(reply)] = True
        # padding is on the right and attention is causal, so no attention mask is needed
        hidden = model.base_model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        logits = head(hidden[is_reply[:, 1:]])
        loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:][is_reply[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-20:]) / 20


def write_folder(
    folder: Path, model: PreTrainedModel, tokenizer: Tokenizer, *, template: str, end: str, pad: str
) -> None:
    """A complete Hugging Face folder."""
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": end,
        "pad_token": pad,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the solver's and the verifier's model.")
    parser.add_argument("--steps", type=int, default=STEPS, help="of imitation, for each")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    parts = {
        "solver": (
            solver_tokenizer,
            solver_model,
            solver_demonstration,
            SOLVER_TEMPLATE,
            "<|im_end|>",
            "<|endoftext|>",
        ),
        "verifier": (verifier_tokenizer, verifier_model, verifier_demonstration, VERIFIER_TEMPLATE, "[E]", "[PAD]"),
    }
    for name, (make_tokenizer, make_model, demonstrate, template, end, pad) in parts.items():
        torch.manual_seed(0)
        started = time.perf_counter()
        tokenizer = make_tokenizer()
        model = make_model(tokenizer)
        loss = imitate(model, tokenizer, demonstrate, num_steps=arguments.steps)
        write_folder(HERE / "models" / name, model, tokenizer, template=template, end=end, pad=pad)
        size = sum(p.numel() for p in model.parameters())
        seconds = time.perf_counter() - started
        sys.stdout.write(f"models/{name}: {size:,} parameters, loss {loss:.2f}, {seconds:.0f} s\n")


if __name__ == "__main__":
    main()
