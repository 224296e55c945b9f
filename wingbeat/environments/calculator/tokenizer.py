"""Builds the demo model's tokenizer in place: a byte-level BPE and a ChatML-like template.

The demo needs no download, and its episodes must be short, because every sampled token is a decode
step on a CPU. So the merges are trained on exactly the phrases that an episode repeats (each
becomes one token), digits stay single (copying them is the skill to learn), and every other byte
is a token of its own: nothing is unknown.

A newline ends its pre-token, so `assistant\\n` is always the same token, whatever follows it.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

PAD_TOKEN = "<|endoftext|>"
START_TOKEN = "<|im_start|>"
END_TOKEN = "<|im_end|>"
CONTROL_TOKENS = (PAD_TOKEN, START_TOKEN, END_TOKEN)
"""Special: dropped when a completion is decoded."""

TOOL_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Never split, but not special (as in Qwen): a tool parser must see them in decoded text."""

PHRASES = (
    "system\n",
    "user\n",
    "assistant\n",
    "tool\n",
    "tools: calc",
    "what is ",
    " plus ",
    " minus ",
    " times ",
    " ?",
    '{"name": "calc", "arguments": {"expression": "',
    '"}}',
    "error: ",
)
"""What an episode repeats; each becomes one token."""

MAX_MODEL_TOKENS = 256

CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content -%}{%- for part in content -%}{{ part.text }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set system = text(messages[0].content) if messages and messages[0].role == 'system' else '' -%}
{%- if system or tools -%}
{{ '<|im_start|>system\n' + system }}
{%- if tools -%}
{{ ('\n' if system else '') + 'tools:' }}
{%- for tool in tools -%}{{ ' ' + (tool.function or tool).name }}{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\n' }}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{ '<|im_start|>tool\n<tool_response>' + text(message.content) + '</tool_response><|im_end|>\n' }}
{%- elif message.role == 'assistant' -%}
{{ '<|im_start|>assistant\n' + text(message.content) }}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{{ '<tool_call>{"name": "' + function.name + '", "arguments": ' }}
{%- if function.arguments is string -%}{{ function.arguments }}
{%- else -%}{{ function.arguments | tojson }}
{%- endif -%}
{{ '}</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- elif not (message.role == 'system' and loop.first) -%}
{{ '<|im_start|>' + message.role + '\n' + text(message.content) + '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""
"""Renders tools by name only, to keep prompts short.

Extension property: a conversation that ends with an assistant turn renders, up to that turn's
`<|im_end|>`, to a string prefix of every longer conversation. So a turn's tokens can be reused.
"""


def build_tokenizer() -> Tokenizer:
    """Train the BPE; the same vocabulary every time."""
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
        vocab_size=1024,  # not reached: training ends when every phrase is one token
        min_frequency=1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=list(CONTROL_TOKENS),
        show_progress=False,
    )
    tokenizer.train_from_iterator(PHRASES, trainer=trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TOOL_TOKENS])
    return tokenizer


def write_tokenizer(folder: Path) -> None:
    """Write what `transformers.AutoTokenizer.from_pretrained(folder)` needs."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"eos_token": END_TOKEN, "pad_token": PAD_TOKEN}
    _write_json(folder / "special_tokens_map.json", special)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_MODEL_TOKENS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
        **special,
    }
    _write_json(folder / "tokenizer_config.json", config)


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
