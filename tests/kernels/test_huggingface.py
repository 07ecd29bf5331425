"""use_kernels against the untouched Transformers model, on tiny random ones."""

import copy

import pytest
import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel

from fasttrain_kernels import huggingface
from fasttrain_kernels.huggingface import use_kernels
from fasttrain_kernels.testing import interpret

SIZES = dict(
    vocab_size=101,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
)


def build(family: str, **options):
    torch.manual_seed(0)
    prefix = huggingface._FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(**SIZES | options)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    for name, parameter in model.named_parameters():  # norms start at one: give every weight something to do
        if "norm" in name or "bias" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def pair(family: str, **options):
    plain = build(family, **options)
    return plain, use_kernels(copy.deepcopy(plain))


def tokens(batch: int = 2, length: int = 17) -> torch.Tensor:
    return torch.randint(101, (batch, length), generator=torch.Generator().manual_seed(1))


def loss_and_gradients(model, **inputs):
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


VARIANTS = [
    ("qwen3", {}),
    ("qwen3", dict(tie_word_embeddings=True)),
    ("qwen3", dict(use_sliding_window=True, sliding_window=5, max_window_layers=1)),
    ("qwen3", dict(attention_bias=True)),
    ("llama", {}),
    ("llama", dict(mlp_bias=True, attention_bias=True, num_key_value_heads=4)),
    ("mistral", {}),
    ("mistral", dict(sliding_window=5)),
    ("qwen2", {}),
    ("qwen2", dict(use_sliding_window=True, sliding_window=5, max_window_layers=1)),
    ("gemma", {}),
]


@pytest.mark.parametrize(("family", "options"), VARIANTS)
def test_logits_loss_and_gradients_are_those_of_the_untouched_model(family, options):
    plain, fused = pair(family, **options)
    ids = tokens()
    labels = ids.clone()
    labels[0, :5] = -100
    torch.testing.assert_close(fused(ids).logits, plain(ids).logits)
    torch.testing.assert_close(
        loss_and_gradients(fused, input_ids=ids, labels=labels), loss_and_gradients(plain, input_ids=ids, labels=labels)
    )


def test_the_kernels_themselves_give_the_same():
    plain, fused = pair("qwen3")
    inputs = dict(input_ids=tokens(), labels=tokens())
    with interpret() as launches:
        got = loss_and_gradients(fused, **inputs)
    torch.testing.assert_close(got, loss_and_gradients(plain, **inputs), rtol=1e-4, atol=1e-5)
    names = {launch.kernel for launch in launches}
    for op in ("rms_norm", "qk_norm_rope", "attention", "swiglu", "cross_entropy"):
        assert any(op in name for name in names), f"{op} not launched: {sorted(names)}"


def test_padding_masks_and_packed_positions_are_respected():
    plain, fused = pair("qwen3")
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    torch.testing.assert_close(fused(ids, attention_mask=mask).logits[1], plain(ids, attention_mask=mask).logits[1])
    torch.testing.assert_close(
        fused(ids, attention_mask=mask).logits[0, 6:], plain(ids, attention_mask=mask).logits[0, 6:]
    )
    positions = torch.stack([torch.arange(17), torch.arange(17) + 9])
    torch.testing.assert_close(fused(ids, position_ids=positions).logits, plain(ids, position_ids=positions).logits)


def test_generation_with_a_cache_gives_the_same_text():
    plain, fused = pair("qwen3")
    options = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(fused.generate(tokens(1, 5), **options), plain.generate(tokens(1, 5), **options))


def test_the_state_dict_and_other_models_stay_as_they_are():
    plain, fused = pair("qwen3")
    assert fused.state_dict().keys() == plain.state_dict().keys()
    assert "forward" not in vars(plain.model.norm)
    assert plain.config._attn_implementation != "fasttrain"


def test_num_items_in_batch_divides_the_sum_as_transformers_trainer_expects():
    plain, fused = pair("llama")
    inputs = dict(input_ids=tokens(), labels=tokens(), num_items_in_batch=torch.tensor(77))
    torch.testing.assert_close(fused(**inputs).loss, plain(**inputs).loss)


def test_gradient_checkpointing_works():
    plain, fused = pair("qwen3")
    expected = loss_and_gradients(plain, input_ids=tokens(), labels=tokens())
    fused.train()
    fused.gradient_checkpointing_enable()
    torch.testing.assert_close(loss_and_gradients(fused, input_ids=tokens(), labels=tokens()), expected)


def test_what_is_not_supported_is_refused_by_name():
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=8))
    with pytest.raises(
        ValueError,
        match="^use_kernels: GPT2LMHeadModel is of type 'gpt2'; supported are qwen3, llama, mistral, qwen2, gemma$",
    ):
        use_kernels(gpt2)
    with pytest.raises(ValueError, match=r"^use_kernels: attention_dropout is 0\.1; "):
        use_kernels(build("llama", attention_dropout=0.1))
    with pytest.raises(ValueError, match="^use_kernels: hidden_act is 'gelu'; "):
        use_kernels(build("llama", hidden_act="gelu"))
