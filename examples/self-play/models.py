"""Makes the model of this example: `python models.py` writes models/player.

It first learns for some seconds to make any legal move, each as likely as the others. What a good move is, it
has never seen.
"""

import json
import random
import sys
import time
from pathlib import Path

import torch
from tasks import LARGEST_PILE, MOVES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
STEPS = 200
BATCH = 32
TEMPLATE = (
    "{% for m in messages %}{{ '[A]' if m.role == 'assistant' else '[U]' }}{{ m.content }}[E]{% endfor %}"
    "{% if add_generation_prompt %}[A]{% endif %}"
)


def make_tokenizer() -> Tokenizer:
    """Bytes, and a token for each number of matches: `10 left` is no 1 and a 0."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["[PAD]", "[U]", "[A]", "[E]"])
    tokenizer.add_tokens([f"{number} left" for number in range(1, LARGEST_PILE + 1)])
    return tokenizer


def make_model(tokenizer: Tokenizer) -> PreTrainedModel:
    """About 100,000 parameters."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=128,
            initializer_range=0.3,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.token_to_id("[E]"),
            pad_token_id=tokenizer.token_to_id("[PAD]"),
        )
    )


def learn_the_rules(model: PreTrainedModel, tokenizer: Tokenizer) -> float:
    """Supervised warm-up on random legal moves; returns the mean of the last losses."""
    rng = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    losses: list[float] = []
    for step in range(STEPS):
        for group in optimizer.param_groups:  # up for 10 steps, down to nothing in the last quarter
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 10) * min(1.0, 4 * (1 - step / STEPS))
        texts: list[str] = []
        for _ in range(BATCH):
            pile = rng.randint(1, LARGEST_PILE)
            texts.append(f"[U]{pile} left[E][A]{rng.choice([move for move in MOVES if move <= pile])}[E]")
        ids = torch.tensor([encoding.ids for encoding in tokenizer.encode_batch(texts)])  # all of one length
        loss = torch.nn.functional.cross_entropy(
            model(input_ids=ids[:, :-1]).logits[:, -2:].flatten(0, 1), ids[:, -2:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-20:]) / 20


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    started = time.perf_counter()
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    loss = learn_the_rules(model, tokenizer)
    folder = HERE / "models" / "player"
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": "[E]",
        "pad_token": "[PAD]",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    size = sum(p.numel() for p in model.parameters())
    sys.stdout.write(f"models/player: {size:,} parameters, loss {loss:.2f}, {time.perf_counter() - started:.0f} s\n")


if __name__ == "__main__":
    main()
