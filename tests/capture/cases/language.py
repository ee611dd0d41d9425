"""Models of transformers and peft that were exact once; `tests.capture.zoo` has the others."""

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from tests.capture.common import Case, floats
from tests.capture.zoo import (
    HEADS,
    LAYERS,
    VOCAB,
    WIDTH,
    ZOO,
    build,
    class_loss,
    ids,
    llama,
    lm_loss,
    prompt_loss,
    state_space_loss,
    token_losses,
)

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 1}
HEADED = {**GROUPED, "head_dim": 8}


def text_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(input_ids=batch).last_hidden_state.pow(3).sum(dim=(1, 2))


def hidden_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).last_hidden_state.pow(3).sum(dim=(1, 2))


def permuted_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return token_losses(model(input_ids=batch, use_mems=False).logits[:, :-1], batch[:, 1:])


def whisper_encoder() -> nn.Module:
    config = hf.WhisperConfig(
        vocab_size=VOCAB,
        d_model=WIDTH,
        encoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        encoder_ffn_dim=24,
        num_mel_bins=8,
        max_source_positions=5,
        dropout=0.0,
        decoder_layers=1,
        decoder_attention_heads=HEADS,
        decoder_ffn_dim=24,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return hf.WhisperModel(config).encoder


def clip_text() -> nn.Module:
    return hf.CLIPTextModel(hf.CLIPTextConfig(**SIZES))


TRANSFORMERS: dict[str, Case] = {
    "OPT": ZOO["opt"],
    "GPTNeoX": ZOO["gpt-neox"],
    "GPTNeo": ZOO["gpt-neo"],
    "GPTJ": ZOO["gpt-j"],
    "Bloom": ZOO["bloom"],
    "Falcon": ZOO["falcon"],
    "Mistral sliding": ZOO["mistral"],
    "Gemma": ZOO["gemma"],
    "Gemma2": ZOO["gemma2"],
    "Gemma3": ZOO["gemma3"],
    "Phi": ZOO["phi"],
    "Phi3": ZOO["phi3"],
    "Qwen2": ZOO["qwen2"],
    "Qwen3": ZOO["qwen3"],
    "StableLm": ZOO["stablelm"],
    "Olmo2": ZOO["olmo2"],
    "Cohere": ZOO["cohere"],
    "Granite": ZOO["granite"],
    "Starcoder2": Case(
        build(
            "Starcoder2",
            "ForCausalLM",
            **GROUPED,
            residual_dropout=0.0,
            embedding_dropout=0.0,
            attention_dropout=0.0,
        ),
        ids,
        lm_loss,
    ),
    "MPT": ZOO["mpt"],
    "Mixtral batched_mm": Case(
        build(
            "Mixtral",
            "ForCausalLM",
            **HEADED,
            num_local_experts=4,
            experts_implementation="batched_mm",
        ),
        ids,
        lm_loss,
    ),
    "Mamba": ZOO["mamba"],
    "Mamba2": ZOO["mamba2"],
    "RWKV": ZOO["rwkv"],
    "RecurrentGemma": Case(
        build(
            "RecurrentGemma",
            "ForCausalLM",
            **{**HEADED, "num_hidden_layers": 3},
            lru_width=WIDTH,
            attention_window_size=4,
        ),
        ids,
        state_space_loss,
    ),
    "T5": ZOO["t5"],
    "BART": ZOO["bart"],
    "BERT": ZOO["bert"],
    "DistilBERT": ZOO["distilbert"],
    "RoBERTa": ZOO["roberta"],
    "ALBERT (shared)": ZOO["albert"],
    "ELECTRA": ZOO["electra"],
    "DeBERTaV2": ZOO["deberta"],
    "ModernBERT": ZOO["modernbert"],
    "XLNet": Case(
        build(
            "XLNet",
            "LMHeadModel",
            vocab_size=VOCAB,
            d_model=WIDTH,
            n_layer=LAYERS,
            n_head=HEADS,
            d_inner=24,
            dropout=0.0,
        ),
        ids,
        permuted_loss,
    ),
    "ViT": ZOO["vit"],
    "DINOv2": ZOO["dinov2"],
    "Swin": ZOO["swin"],
    "ConvNext": ZOO["convnext"],
    "ConvNextV2": Case(
        build(
            "ConvNextV2",
            "ForImageClassification",
            hidden_sizes=[8, 12],
            depths=[1, 1],
            num_stages=2,
            patch_size=2,
            num_labels=3,
        ),
        floats(3, 8, 8),
        class_loss,
    ),
    "CLIP text": Case(clip_text, ids, text_loss),
    "Whisper enc": Case(whisper_encoder, floats(8, 10), hidden_loss),
    "Wav2Vec2": ZOO["wav2vec2"],
}

# ---- peft ----------------------------------------------------------------------------------------


def adapted(kind: str, **options: Any) -> Callable[[], nn.Module]:
    """A Llama with an adapter whose numbers are not those it begins with, zeros for the most."""

    def make() -> nn.Module:
        import peft

        config = getattr(peft, kind)(task_type="CAUSAL_LM", **options)
        model = peft.get_peft_model(llama(tie_word_embeddings=False), config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        return model

    return make


def checkpointed() -> nn.Module:
    model: Any = llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def prefix_loss(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(input_ids=batch, attention_mask=torch.ones_like(batch)).logits
    return token_losses(logits[:, :-1], batch[:, 1:])


PROJECTIONS = ["q_proj", "v_proj"]

PEFT: dict[str, Case] = {
    "PEFT LoRA": ZOO["llama+lora"],
    "PEFT rsLoRA all-linear+emb": Case(
        adapted(
            "LoraConfig",
            r=2,
            use_rslora=True,
            target_modules=[
                *("q_proj", "k_proj", "v_proj", "o_proj"),
                *("gate_proj", "up_proj", "down_proj", "embed_tokens"),
            ],
        ),
        ids,
        lm_loss,
    ),
    "PEFT DoRA": ZOO["llama+dora"],
    "PEFT IA3": Case(
        adapted(
            "IA3Config",
            target_modules=["k_proj", "v_proj", "down_proj"],
            feedforward_modules=["down_proj"],
        ),
        ids,
        lm_loss,
    ),
    "PEFT PromptTuning": ZOO["llama+prompt"],
    "PEFT PrefixTuning": Case(
        adapted("PrefixTuningConfig", num_virtual_tokens=3), ids, prefix_loss
    ),
    "PEFT P-tuning": Case(
        adapted("PromptEncoderConfig", num_virtual_tokens=3, encoder_hidden_size=8),
        ids,
        prompt_loss,
    ),
    "PEFT LoKr": Case(adapted("LoKrConfig", r=2, target_modules=PROJECTIONS), ids, lm_loss),
    "PEFT AdaLoRA": Case(  # its penalty is not part of the loss here
        adapted("AdaLoraConfig", init_r=3, target_modules=PROJECTIONS, total_step=10), ids, lm_loss
    ),
    "PEFT VeRA": Case(adapted("VeraConfig", r=3, target_modules=["q_proj"]), ids, lm_loss),
    # Rotations and spectra, written element by element into zeros; the others on the way.
    "PEFT OFT": Case(
        adapted("OFTConfig", r=0, oft_block_size=4, target_modules=PROJECTIONS), ids, lm_loss
    ),
    "PEFT FourierFT": Case(
        adapted("FourierFTConfig", n_frequency=9, target_modules=PROJECTIONS), ids, lm_loss
    ),
    "PEFT WaveFT": Case(
        adapted("WaveFTConfig", n_frequency=9, target_modules=["q_proj"]), ids, lm_loss
    ),
    "PEFT HRA": Case(adapted("HRAConfig", r=2, target_modules=PROJECTIONS), ids, lm_loss),
    "PEFT LoHa": Case(adapted("LoHaConfig", r=2, target_modules=PROJECTIONS), ids, lm_loss),
    "PEFT LN tuning": Case(
        adapted("LNTuningConfig", target_modules=["input_layernorm", "norm"]), ids, lm_loss
    ),
    "PEFT modules_to_save": Case(
        adapted("LoraConfig", r=2, target_modules=PROJECTIONS, modules_to_save=["lm_head"]),
        ids,
        lm_loss,
    ),
    "Llama ckpt reentrant=False": Case(checkpointed, ids, lm_loss),
}

# In a narrow dtype; the loop over samples runs in it, too.
NARROW: dict[str, torch.dtype] = {
    "Llama pure torch.bfloat16": torch.bfloat16,
    "Llama pure torch.float16": torch.float16,
}
