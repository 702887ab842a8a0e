"""Folders in Hugging Face layout: whole ones load tensor for tensor, broken ones say how."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from forerun.errors import ModelFileError, ModelNotFound, UnsupportedModel
from forerun.model.arch import ModelConfig
from forerun.model.loader import ModelFiles, expected_shapes, open_model
from forerun.model.writer import save_model, to_hf

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


def tiny_tokenizer() -> Tokenizer:
    vocab = {"<s>": 0, "</s>": 1, "a": 2, "b": 3}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole tiny llama in one file."""
    return write(tmp_path / "tiny", "llama")


def write(folder: Path, family: str, *, shards: bool = False, **options: Any) -> Path:
    config_class, model_class = CLASSES[family]
    torch.manual_seed(0)
    model = model_class(config_class(**SIZES, **options)).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="20KB" if shards else "1GB")
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    return folder


def read_all(model: ModelFiles) -> dict[str, torch.Tensor]:
    return {name: model.weights.read(name) for name in model.weights.names}


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("shards", [False, True])
def test_a_folder_of_transformers_loads_tensor_for_tensor(tmp_path, family, shards):
    folder = write(tmp_path / "m", family, shards=shards)
    assert len(list(folder.glob("*.safetensors"))) > 1 if shards else True
    reference = CLASSES[family][1].from_pretrained(folder, dtype=torch.bfloat16)
    model = open_model(folder)
    expected = dict(reference.named_parameters())
    tensors = read_all(model)
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, expected[name]), name
    model.weights.close()


@pytest.mark.parametrize("kept", [0, 4, 8, 100, 0.2, 0.9, -1])
def test_a_truncated_file_says_what_was_found_and_expected(folder, kept):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    count = kept + len(data) if kept == -1 else int(kept * len(data)) if kept < 1 else kept
    path.write_bytes(data[:count])
    with pytest.raises(ModelFileError, match=r"model\.safetensors") as caught:
        open_model(folder)
    assert str(count) in str(caught.value)


def test_trailing_bytes_and_garbage_are_refused(folder):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole + b"x")
    with pytest.raises(ModelFileError, match="expected"):
        open_model(folder)
    path.write_bytes(whole.replace(b'"dtype"', b'"dtyqe"', 1))
    with pytest.raises(ModelFileError, match="unreadable safetensors header"):
        open_model(folder)
    path.write_bytes(b"\x05\0\0\0\0\0\0\0nojson")
    with pytest.raises(ModelFileError, match="header"):
        open_model(folder)


def test_shards_missing_or_incomplete(tmp_path):
    folder = write(tmp_path / "m", "llama", shards=True)
    shards = sorted(folder.glob("model-*.safetensors"))
    tensors = load_file(shards[0])
    name = next(iter(tensors))
    kept = {key: value.clone() for key, value in tensors.items() if key != name}
    save_file(kept or {"other": torch.zeros(1)}, shards[0])
    with pytest.raises(ModelFileError, match=r"index\.json names it here") as caught:
        open_model(folder)
    assert name in str(caught.value)
    shards[0].unlink()
    with pytest.raises(ModelFileError, match="1 missing") as caught:
        open_model(folder)
    assert shards[0].name in str(caught.value)


def test_an_index_cannot_point_outside_the_folder(tmp_path):
    folder = write(tmp_path / "m", "llama", shards=True)
    index = folder / "model.safetensors.index.json"
    edit(index, weight_map={"model.norm.weight": "../secret.safetensors"})
    with pytest.raises(ModelFileError, match="expected a file name"):
        open_model(folder)


def test_a_shape_that_contradicts_the_config(folder):
    edit(folder / "config.json", intermediate_size=64)
    with pytest.raises(ModelFileError, match=r"is \[48, 32\], expected \[64, 32\]"):
        open_model(folder)


def test_missing_and_unexpected_tensors(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    bias = {"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}
    idle = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4, dtype=torch.float64)}
    save_file({**tensors, **idle}, path)
    open_model(folder)
    save_file({**tensors, **bias}, path)
    with pytest.raises(UnsupportedModel, match=r"q_proj\.bias"):
        open_model(folder)
    del tensors["model.norm.weight"]
    save_file(tensors, path)
    with pytest.raises(ModelFileError, match=r"1 tensors are missing: model\.norm\.weight"):
        open_model(folder)


def test_names_without_the_prefix_load(folder):
    path = folder / "model.safetensors"
    before = read_all(open_model(folder))
    save_file({key.removeprefix("model."): value for key, value in load_file(path).items()}, path)
    after = read_all(open_model(folder))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_other_dtypes_are_refused(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, path)
    with pytest.raises(UnsupportedModel, match="F8_E4M3; supported: F32"):
        open_model(folder)


def test_pickles_are_never_read(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match=r"pytorch_model\.bin.*convert"):
        open_model(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ModelFileError, match="no weights"):
        open_model(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_or_broken_file_is_named(folder, name):
    (folder / name).write_text("{")
    with pytest.raises(ModelFileError, match=name):
        open_model(folder)
    (folder / name).unlink()
    with pytest.raises(ModelFileError, match=f"{name} is missing"):
        open_model(folder)


def test_nothing_there(tmp_path):
    with pytest.raises(ModelNotFound, match="nothing there"):
        open_model(tmp_path / "absent")
    (tmp_path / "x.txt").write_text("")
    with pytest.raises(ModelNotFound, match="another kind"):
        open_model(tmp_path / "x.txt")


def test_tokenizer_facts(folder):
    spec = open_model(folder).tokenizer
    assert (spec.bos_token, spec.eos_token, spec.add_bos) == ("<s>", "</s>", False)
    assert spec.chat_template is None
    config = folder / "tokenizer_config.json"
    edit(config, bos_token={"content": "<s>", "special": True}, add_bos_token=True)
    assert open_model(folder).tokenizer.add_bos
    edit(config, chat_template=[{"name": "tool_use", "template": "T"}])
    assert open_model(folder).tokenizer.chat_template == "T"
    both = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    edit(config, chat_template=both)
    assert open_model(folder).tokenizer.chat_template == "D"
    (folder / "chat_template.jinja").write_text("J")
    assert open_model(folder).tokenizer.chat_template == "J"
    edit(config, chat_template=7)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ModelFileError, match="chat_template"):
        open_model(folder)


def test_bos_by_post_processor_and_no_truncation(folder):
    tokenizer = tiny_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    spec = open_model(folder).tokenizer
    assert spec.add_bos
    assert spec.tokenizer.encode("abab", add_special_tokens=False).ids == [2, 3, 2, 3]


def test_the_fingerprint_tells_models_apart(tmp_path):
    first = open_model(write(tmp_path / "a", "llama"))
    again = open_model(write(tmp_path / "b", "llama"))
    other = open_model(write(tmp_path / "c", "llama", rope_parameters={"rope_theta": 5.0}))
    assert first.fingerprint() == again.fingerprint()
    assert first.fingerprint() != other.fingerprint()


@pytest.mark.parametrize("family", CLASSES)
def test_a_written_folder_reads_back(tmp_path, family):
    options = {"sliding_window": 8} if family == "mistral" else {}
    theirs = CLASSES[family][0](**SIZES, **options, rope_parameters={"rope_theta": 7.0})
    config = ModelConfig.from_hf(theirs.to_dict())
    tensors = {name: torch.randn(shape) for name, shape in expected_shapes(config).items()}
    tokenizer = tiny_tokenizer().to_str()
    save_model(tmp_path, to_hf(config, torch.float32), tensors, tokenizer, {}, {})
    model = open_model(tmp_path)
    assert model.config == config
    assert all(torch.equal(model.weights.read(name), tensors[name]) for name in tensors)
    loaded = CLASSES[family][1].from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(loaded.model.norm.weight, tensors["model.norm.weight"])
