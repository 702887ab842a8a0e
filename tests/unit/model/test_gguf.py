"""GGUF files: quantised types, names, the undone permutation, and every way of being broken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from tokenizers.pre_tokenizers import ByteLevel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from forerun.errors import ModelFileError, UnsupportedModel
from forerun.model.arch import LinearScaling, ModelConfig, expected_shapes, rope_frequencies
from forerun.model.gguf import unpermute
from forerun.model.loader import open_model

HEADS, KV_HEADS, HIDDEN, FFN, LAYERS = 4, 2, 256, 512, 2
TOKENS = ["<s>", "</s>", *sorted(ByteLevel.alphabet()), "ab"]
CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def llama_cpp_permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """Order rows as llama.cpp's converter writes them (its formula)."""
    rows = weights.shape[0] // num_heads // 2
    split = weights.reshape(num_heads, 2, rows, *weights.shape[1:])
    return split.swapaxes(1, 2).reshape(weights.shape)


def gguf_name(name: str) -> str:
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


def tiny_model(family: str, **options: Any) -> Any:
    config_class, model_class = CLASSES[family]
    if family == "qwen3":
        options["head_dim"] = HIDDEN // HEADS
    torch.manual_seed(0)
    config = config_class(
        vocab_size=len(TOKENS),
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        eos_token_id=1,
        bos_token_id=0,
        **options,
    )
    model = model_class(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def write(
    path: Path,
    model: Any,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    architecture: str | None = None,
    skip: tuple[str, ...] = (),
    extra: dict[str, np.ndarray] | None = None,
    keys: dict[str, Any] | None = None,
) -> Path:
    """Write a transformers model as llama.cpp's converter would; matrices of one `kind`."""
    family = model.config.model_type
    writer = gguf.GGUFWriter(path, architecture or family)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(model.config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for key, value in (keys or {}).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
        add[type(value)](key, value)
    for name, parameter in model.named_parameters():
        array = parameter.detach().numpy()
        if family == "llama" and ".q_proj." in name:
            array = llama_cpp_permute(array, HEADS)
        elif family == "llama" and ".k_proj." in name:
            array = llama_cpp_permute(array, KV_HEADS)
        if gguf_name(name) not in skip:
            used = kind if array.ndim > 1 else GGMLQuantizationType.F32
            quantised = gguf.quants.quantize(np.ascontiguousarray(array), used)
            writer.add_tensor(gguf_name(name), quantised, raw_dtype=used)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("tied", [False, True])
def test_the_tensors_are_those_of_transformers(tmp_path, family, tied):
    theirs = tiny_model(family, tie_word_embeddings=tied)
    model = open_model(write(tmp_path / "m.gguf", theirs))
    expected = dict(theirs.named_parameters())
    assert model.weights.names == expected.keys()
    for name in model.weights.names:
        assert torch.equal(model.weights.read(name), expected[name]), name
    from_hf = ModelConfig.from_hf(theirs.config.to_dict())
    assert model.config == from_hf
    assert {name: model.weights.shape(name) for name in expected} == expected_shapes(from_hf)
    model.weights.close()


def test_biases_of_a_llama_are_unpermuted_too(tmp_path):
    theirs = tiny_model("llama", attention_bias=True)
    model = open_model(write(tmp_path / "m.gguf", theirs))
    assert model.config.qkv_bias
    assert model.config.o_bias
    for name, expected in theirs.named_parameters():
        assert torch.equal(model.weights.read(name), expected), name


def test_unpermute_on_a_worked_example():
    stored = torch.tensor([0, 2, 1, 3, 10, 12, 11, 13])
    assert unpermute(stored, 2).tolist() == [0, 1, 2, 3, 10, 11, 12, 13]


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_quantised_tensors_are_what_the_library_says(tmp_path, kind):
    theirs = tiny_model("qwen2")
    number = GGMLQuantizationType[kind]
    model = open_model(write(tmp_path / "m.gguf", theirs, kind=number))
    dtypes = {"F16": torch.float16, "BF16": torch.bfloat16}
    for name, parameter in theirs.named_parameters():
        if parameter.ndim == 1:
            continue
        array = parameter.detach().numpy()
        expected = gguf.quants.dequantize(gguf.quants.quantize(array, number), number)
        tensor = model.weights.read(name)
        assert model.weights.dtype(name) == kind
        assert tensor.dtype == dtypes.get(kind, torch.float32)
        assert torch.equal(tensor.float(), torch.from_numpy(expected)), name
        assert (tensor.float() - parameter).abs().max() < 0.1


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K", "Q5_0", "Q2_K"])
def test_k_types_by_raw_blocks(tmp_path, kind):
    number = GGMLQuantizationType[kind]
    block, block_bytes = GGML_QUANT_SIZES[number]
    rng = np.random.default_rng(1)
    # The two top bits clear keep every half-precision scale finite.
    raw = rng.integers(0, 64, (FFN, HIDDEN // block * block_bytes), dtype=np.uint8)
    theirs = tiny_model("qwen2")
    path = tmp_path / "m.gguf"
    writer_add = gguf.GGUFWriter.add_tensor

    def add(self: Any, name: str, array: np.ndarray, **options: Any) -> None:
        if name == "blk.1.ffn_up.weight":
            return writer_add(self, name, raw, raw_dtype=number)
        return writer_add(self, name, array, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_tensor", add)
        write(path, theirs)
    if kind in ("Q5_0", "Q2_K"):
        with pytest.raises(UnsupportedModel, match=f"'blk.1.ffn_up.weight' is of type {kind}"):
            open_model(path)
        return
    tensor = open_model(path).weights.read("model.layers.1.mlp.up_proj.weight")
    assert torch.equal(tensor, torch.from_numpy(gguf.quants.dequantize(raw, number)))
    assert tensor.shape == (FFN, HIDDEN)
    assert tensor.isfinite().all()


def test_llama3_scaling_as_explicit_factors(tmp_path):
    parameters = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    theirs = tiny_model("llama", rope_parameters=dict(parameters))
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs.config, None)
    plain = 10_000.0 ** (-torch.arange(0, 64, 2) / 64)
    factors = (plain / expected).numpy()
    path = write(tmp_path / "m.gguf", theirs, extra={"rope_freqs.weight": factors})
    model = open_model(path)
    assert model.config.rope.freq_factors is not None
    torch.testing.assert_close(rope_frequencies(model.config), expected, rtol=1e-6, atol=0)
    assert "rope_freqs.weight" not in model.weights.names


def test_options_of_the_rotation(tmp_path):
    theirs = tiny_model("llama")
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    model = open_model(write(tmp_path / "a.gguf", theirs, keys=linear))
    assert model.config.rope.scaling == LinearScaling(4.0)
    with pytest.raises(UnsupportedModel, match="'yarn'; supported: none, linear"):
        open_model(write(tmp_path / "b.gguf", theirs, keys={"llama.rope.scaling.type": "yarn"}))
    with pytest.raises(UnsupportedModel, match="dimension_count=32"):
        open_model(write(tmp_path / "c.gguf", theirs, keys={"llama.rope.dimension_count": 32}))
    with pytest.raises(UnsupportedModel, match="expert_count"):
        open_model(write(tmp_path / "d.gguf", theirs, keys={"llama.expert_count": 8}))
    windowed = write(tmp_path / "e.gguf", theirs, keys={"llama.attention.sliding_window": 8})
    assert open_model(windowed).config.sliding_windows == (8, 8)


def test_missing_unknown_and_foreign(tmp_path):
    theirs = tiny_model("llama", tie_word_embeddings=False)
    path = write(tmp_path / "a.gguf", theirs, skip=("blk.1.ffn_up.weight",))
    with pytest.raises(ModelFileError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        open_model(path)
    path = write(tmp_path / "b.gguf", theirs, extra={"blk.0.ffn_gate_inp.weight": np.ones((2, 2))})
    with pytest.raises(UnsupportedModel, match="ffn_gate_inp"):
        open_model(path)
    with pytest.raises(UnsupportedModel, match="'falcon'; supported: llama"):
        open_model(write(tmp_path / "c.gguf", theirs, architecture="falcon"))
    with pytest.raises(ModelFileError, match="token_embd"):
        open_model(write(tmp_path / "d.gguf", theirs, skip=("token_embd.weight",)))


def test_every_truncation_is_a_typed_error(tmp_path):
    whole = write(tmp_path / "m.gguf", tiny_model("llama")).read_bytes()
    path = tmp_path / "cut.gguf"
    header = whole.index(b"blk.1.ffn_up.weight")
    for count in [0, 3, 4, 8, 20, 24, 50, 300, 3000, header, header + 25, len(whole) - 1]:
        path.write_bytes(whole[:count])
        with pytest.raises(ModelFileError, match=r"cut\.gguf") as caught:
            open_model(path)
        assert count < 4 or str(count) in str(caught.value)


def test_wrong_magic_version_and_lengths(tmp_path):
    whole = bytearray(write(tmp_path / "m.gguf", tiny_model("llama")).read_bytes())
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGML" + whole[4:])
    with pytest.raises(ModelFileError, match="starts with b'GGML'; expected b'GGUF'"):
        open_model(path)
    path.write_bytes(whole[:4] + b"\x09" + whole[5:])
    with pytest.raises(UnsupportedModel, match="version 9; supported: 2, 3"):
        open_model(path)
    # An array that claims 2^40 elements must not be walked.
    at = whole.index(b"tokenizer.ggml.token_type") + len(b"tokenizer.ggml.token_type") + 8
    path.write_bytes(whole[:at] + (1 << 40).to_bytes(8, "little") + whole[at + 8 :])
    with pytest.raises(ModelFileError, match="cut short inside tokenizer"):
        open_model(path)


def test_corrupt_metadata_is_a_typed_error(tmp_path):
    whole = write(tmp_path / "m.gguf", tiny_model("llama")).read_bytes()
    path = tmp_path / "bad.gguf"
    path.write_bytes(whole.replace(b"gpt-2", b"gp\xff-2"))
    with pytest.raises(ModelFileError, match=r"tokenizer\.ggml\.pre is unreadable"):
        open_model(path)
    theirs = tiny_model("llama")
    theirs.config.rope_parameters["rope_theta"] = 5.0
    wrong = write(path, theirs, keys={"llama.rope.scaling.type": 7})
    with pytest.raises(ModelFileError, match="type=7 has the wrong type"):
        open_model(wrong)
