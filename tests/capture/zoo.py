"""Models of transformers and peft, very small, as their users build them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

from tests.capture.common import Case, floats

VOCAB, TOKENS, WIDTH, HEADS, LAYERS = 33, 6, 16, 2, 2

# ---- losses: one per sample ----------------------------------------------------------------------


def ids(size: int, tokens: int = TOKENS) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, VOCAB, (size, tokens), generator=generator)


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of each sample's tokens: [batch]."""
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return losses.mean(dim=1)


def lm_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Every token predicts the next."""
    logits = model(input_ids=batch, use_cache=False).logits
    return token_losses(logits[:, :-1], batch[:, 1:])


def state_space_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return token_losses(model(input_ids=batch).logits[:, :-1], batch[:, 1:])


def masked_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """The last token of each sample is padding."""
    mask = torch.ones_like(batch)
    mask[:, -1] = 0
    return token_losses(model(input_ids=batch, attention_mask=mask).logits[:, :-1], batch[:, :-1])


def class_loss(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(batch).logits
    return F.cross_entropy(logits, batch.flatten(1).sum(1).long() % 3, reduction="none")


def translation_loss(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(input_ids=batch, decoder_input_ids=batch.flip(1)[:, :-1], use_cache=False).logits
    return token_losses(logits, batch[:, 1:])


def pair_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """How far the embedding of each image is from that of its text."""
    images = model.get_image_features(batch["image"]).pooler_output
    texts = model.get_text_features(batch["text"]).pooler_output
    return (images - texts).square().sum(1)


def speech_loss(model: nn.Module, batch: Tensor) -> Tensor:
    spans = torch.zeros(len(batch), 9, dtype=torch.bool)
    spans[:, 2:4] = True
    hidden = model(batch, mask_time_indices=spans).last_hidden_state
    return hidden.pow(3).sum(dim=(1, 2))


def transcription_loss(model: nn.Module, batch: Tensor) -> Tensor:
    written = (batch[:, 0, :5] * 10).long().abs() % VOCAB  # made of the sample itself
    logits = model(input_features=batch, decoder_input_ids=written, use_cache=False).logits
    return token_losses(logits[:, :-1], written[:, 1:])


def prompt_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """The same after three learned tokens."""
    logits = model(input_ids=batch, attention_mask=torch.ones_like(batch)).logits
    return token_losses(logits[:, 3:-1], batch[:, 1:])


def image_and_text(size: int) -> dict[str, Tensor]:
    return {"image": floats(3, 8, 8)(size), "text": ids(size)}


# ---- makers --------------------------------------------------------------------------------------

_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZES = {
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}
_DECODER = {**_SIZES, **_TOKENS, "vocab_size": VOCAB, "max_position_embeddings": 16}
_GROUPED = {**_DECODER, "num_key_value_heads": 1}
_HEADED = {**_GROUPED, "head_dim": 8}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_ENCODER = {**_DECODER, **_NO_DROPOUT, "num_labels": 3}
_VISION = {**_SIZES, "image_size": 8, "patch_size": 4}
_CLASSES = {**_VISION, **_NO_DROPOUT, "num_labels": 3}
_TRANSLATOR = {
    **_TOKENS,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 24),
    "vocab_size": VOCAB,
    "d_model": WIDTH,
    "max_position_embeddings": 16,
    "dropout": 0.0,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}
_GPT = {
    "vocab_size": VOCAB,
    "n_positions": 16,
    "n_embd": WIDTH,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_T5 = {
    "vocab_size": VOCAB,
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "dropout_rate": 0.0,
    "relative_attention_num_buckets": 8,
    "pad_token_id": 0,
}


def build(kind: str, head: str, **options: Any) -> Callable[[], nn.Module]:
    """Make a model by its names: `kind` as transformers spells its classes, then the head."""

    def make() -> nn.Module:
        config = getattr(hf, f"{kind}Config")(**options)
        return getattr(hf, kind + head)(config)

    return make


def llama(**options: Any) -> nn.Module:
    return build("Llama", "ForCausalLM", **_HEADED, **options)()


def llama_lora(**options: Any) -> nn.Module:
    """LoRA with factors that are not zero, as after some steps."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=3,
        lora_alpha=6,
        lora_dropout=0.0,
        target_modules=["q_proj", "v_proj", "down_proj"],
        task_type="CAUSAL_LM",
        **options,
    )
    model = get_peft_model(llama(tie_word_embeddings=True), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.2)
    return model


def prompt_tuned() -> nn.Module:
    from peft import PromptTuningConfig, get_peft_model

    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return get_peft_model(llama(), config)


def clip() -> nn.Module:
    config = hf.CLIPConfig(text_config=_DECODER, vision_config=_VISION, projection_dim=8)
    return hf.CLIPModel(config)


def _lm(kind: str, **options: Any) -> Case:
    return Case(build(kind, "ForCausalLM", **options), ids, lm_loss)


def _classifier(kind: str, **options: Any) -> Case:
    return Case(build(kind, "ForSequenceClassification", **options), ids, class_loss)


def _masked(kind: str, **options: Any) -> Case:
    return Case(build(kind, "ForMaskedLM", **options), ids, masked_loss)


def _translator(kind: str, **options: Any) -> Case:
    return Case(build(kind, "ForConditionalGeneration", **options), ids, translation_loss)


def _image(kind: str, size: int = 8, **options: Any) -> Case:
    return Case(build(kind, "ForImageClassification", **options), floats(3, size, size), class_loss)


def _gpt2(**options: Any) -> Case:
    return Case(build("GPT2", "LMHeadModel", **_GPT, **options), ids, lm_loss)


DECODERS: dict[str, Case] = {
    "gpt2": _gpt2(),
    "gpt2 eager": _gpt2(attn_implementation="eager"),
    "gpt2 untied": _gpt2(tie_word_embeddings=False),
    "llama tied": _lm("Llama", **_HEADED, tie_word_embeddings=True),
    "llama untied": _lm("Llama", **_HEADED, tie_word_embeddings=False),
    "llama eager": _lm("Llama", **_HEADED, attn_implementation="eager"),
    "llama biased": _lm("Llama", **_HEADED, attention_bias=True, mlp_bias=True),
    "llama+lora": Case(llama_lora, ids, lm_loss),
    "llama+dora": Case(lambda: llama_lora(use_dora=True), ids, lm_loss),
    "llama+lora biased": Case(lambda: llama_lora(bias="lora_only"), ids, lm_loss),
    "llama+prompt": Case(prompt_tuned, ids, prompt_loss),
    "qwen2": _lm("Qwen2", **_GROUPED),
    "qwen3": _lm("Qwen3", **_HEADED),
    "mistral": _lm("Mistral", **_HEADED, sliding_window=4),
    "gemma": _lm("Gemma", **_HEADED),
    "gemma2": _lm("Gemma2", **_HEADED, sliding_window=4, query_pre_attn_scalar=8),
    "gemma3": Case(
        lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**_HEADED, sliding_window=4)), ids, lm_loss
    ),
    "phi": _lm("Phi", **_DECODER),
    "phi3": _lm("Phi3", **_GROUPED),
    "opt": _lm("OPT", **_DECODER, ffn_dim=24, word_embed_proj_dim=12, dropout=0.0),
    "gpt-neox": _lm("GPTNeoX", **_DECODER),
    "gpt-neo": _lm("GPTNeo", **_DECODER, attention_types=[[["global", "local"], 1]], window_size=3),
    "gpt-j": _lm("GPTJ", **_GPT, rotary_dim=4),
    "bloom": _lm("Bloom", **_DECODER, hidden_dropout=0.0),
    "falcon": _lm("Falcon", **_DECODER),
    "mpt": _lm("Mpt", vocab_size=VOCAB, d_model=WIDTH, n_layers=LAYERS, n_heads=HEADS),
    "olmo2": _lm("Olmo2", **_GROUPED),
    "stablelm": _lm("StableLm", **_GROUPED),
    "cohere": _lm("Cohere", **_GROUPED),
    "granite": _lm("Granite", **_GROUPED),
    "smollm3": _lm("SmolLM3", **_GROUPED),
    "glm": _lm("Glm", **_HEADED),
    "mamba": Case(
        build(
            "Mamba",
            "ForCausalLM",
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            num_hidden_layers=LAYERS,
            state_size=4,
            time_step_rank=3,
        ),
        ids,
        state_space_loss,
    ),
    "mamba2": Case(
        build(
            "Mamba2",
            "ForCausalLM",
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            num_hidden_layers=LAYERS,
            state_size=4,
            num_heads=4,
            head_dim=8,
            n_groups=1,
            chunk_size=4,
        ),
        ids,
        state_space_loss,
    ),
    "rwkv": Case(build("Rwkv", "ForCausalLM", **_DECODER), ids, state_space_loss),
}

OTHERS: dict[str, Case] = {
    "bert": _classifier("Bert", **_ENCODER),
    "bert masked": _masked("Bert", **_ENCODER),
    "roberta": _classifier("Roberta", **_ENCODER),
    "electra": _classifier("Electra", **_ENCODER, embedding_size=8),
    "distilbert": _classifier(
        "DistilBert",
        **_TOKENS,
        vocab_size=VOCAB,
        dim=WIDTH,
        hidden_dim=24,
        n_layers=LAYERS,
        n_heads=HEADS,
        dropout=0.0,
        attention_dropout=0.0,
        seq_classif_dropout=0.0,
        num_labels=3,
        max_position_embeddings=16,
    ),
    "albert": _masked("Albert", **_ENCODER, embedding_size=8),
    "modernbert": _masked(
        "ModernBert", **_DECODER, cls_token_id=1, sep_token_id=2, local_attention=4
    ),
    "deberta": _masked(
        "DebertaV2",
        **_ENCODER,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_biased_input=False,
    ),
    "perceiver": _classifier(
        "Perceiver",
        vocab_size=VOCAB,
        d_model=8,
        d_latents=8,
        num_latents=4,
        num_self_attends_per_block=1,
        num_self_attention_heads=2,
        num_cross_attention_heads=2,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=TOKENS,
        num_labels=3,
    ),
    "t5": _translator("T5", **_T5),
    "long t5": _translator("LongT5", **_T5, local_radius=2),
    "bart": _translator("Bart", **_TRANSLATOR),
    "whisper": Case(
        build(
            "Whisper",
            "ForConditionalGeneration",
            **_TRANSLATOR,
            num_mel_bins=8,
            max_source_positions=5,
            max_target_positions=16,
        ),
        floats(8, 10),
        transcription_loss,
    ),
    "wav2vec2": Case(
        build(
            "Wav2Vec2",
            "Model",
            **_SIZES,
            **dict.fromkeys(
                (
                    *("hidden_dropout", "activation_dropout", "attention_dropout"),
                    *("feat_proj_dropout", "layerdrop"),
                ),
                0.0,
            ),
            conv_dim=(8, 8),
            conv_kernel=(4, 4),
            conv_stride=(3, 3),
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            feat_extract_norm="layer",
            do_stable_layer_norm=True,
        ),
        floats(90),
        speech_loss,
    ),
    "vit": _image("ViT", **_CLASSES),
    "deit": _image("DeiT", **_CLASSES),
    "dinov2": _image("Dinov2", **_CLASSES),
    "beit": _image("Beit", **_CLASSES, drop_path_rate=0.0, use_relative_position_bias=True),
    "swin": _image(
        "Swin",
        size=16,
        image_size=16,
        patch_size=2,
        embed_dim=8,
        depths=[2, 2],
        num_heads=[2, 2],
        window_size=4,
        num_labels=3,
        drop_path_rate=0.0,
    ),
    "convnext": _image(
        "ConvNext",
        hidden_sizes=[8, 12],
        depths=[1, 1],
        num_stages=2,
        patch_size=2,
        num_labels=3,
        layer_scale_init_value=0.5,
    ),
    "clip": Case(clip, image_and_text, pair_loss),
}

ZOO: dict[str, Case] = {**DECODERS, **OTHERS}

# Of one layer, for a compiler that takes a second per kernel; some of their kernels are the same.
_ONE = {"num_hidden_layers": 1}
SMALL: dict[str, Case] = {
    "gpt2": Case(build("GPT2", "LMHeadModel", **{**_GPT, "n_layer": 1}), ids, lm_loss),
    "llama": _lm("Llama", **{**_HEADED, **_ONE}),
    "qwen3": _lm("Qwen3", **{**_HEADED, **_ONE}),
    "gemma": _lm("Gemma", **{**_HEADED, **_ONE}),
    "bert": _classifier("Bert", **{**_ENCODER, **_ONE}),
}

# Tokens of all samples go to experts in one tensor.
EXPERTS: dict[str, Case] = {
    "mixtral": _lm("Mixtral", **_HEADED, num_local_experts=4, experts_implementation="eager"),
    "gpt-oss": _lm("GptOss", **_HEADED, num_local_experts=4, experts_implementation="eager"),
}
