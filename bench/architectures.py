"""How many of transformers' architectures train privately, and exactly?

    python -m bench.architectures              # about 20 minutes on 2 cores
    python -m bench.architectures --only llama,mixtral
    python -m bench.architectures --compile    # traced by the backend aot_eager, 40 minutes

Every model that transformers registers for a task is made small from its own configuration and
takes one private step without noise, as a user would take it: `PrivacyEngine`, transformers'
default cache and implementations. The gradient is compared with a loop over samples, one at a time.
A model that needs other sizes than `SIZES` and `OTHERS` give, or a package that is not there, is
counted as not made: it says nothing of unison. Each runs in a process of its own.
"""

import argparse
import contextlib
import logging
import multiprocessing
import queue
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from bench.runner import write_result

VOCAB, TOKENS, ROWS, SECONDS = 32, 8, 4, 300
MAX_NORM, TOLERANCE, MOST_PARAMETERS = 1e-2, 1e-4, 2e7  # in float32, of the largest element
LEAST_NORM = 1e-20  # of a gradient: less has few bits in float32
TASKS = {
    "language models": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked language models": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "classifiers of text": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "encoder-decoders": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "classifiers of images": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "classifiers of sounds": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
}
OF_TOKENS = ("language models", "masked language models", "encoder-decoders")

# Small sizes, by the names that configurations give them.
_SIZES: list[tuple[int, str]] = [
    (VOCAB, "vocab_size text_vocab_size src_vocab_size tgt_vocab_size n_words"),
    (16, "hidden_size d_model n_embd embed_dim dim model_dim width word_embed_proj_dim emb_dim"),
    (16, "embedding_size decoder_hidden_size text_hidden_size pooler_hidden_size image_size"),
    (24, "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner ffn_hidden_size"),
    (24, "d_inner moe_intermediate_size shared_expert_intermediate_size intermediate_dim mlp_dim"),
    (24, "inner_dim moe_shared_expert_intermediate_size shared_intermediate_size"),
    (2, "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers depth"),
    (2, "num_encoder_layers num_decoder_layers num_blocks num_attention_heads n_head n_heads"),
    (2, "num_heads encoder_attention_heads decoder_attention_heads num_experts_per_tok moe_k"),
    (2, "top_k type_vocab_size eos_token_id decoder_start_token_id"),
    (1, "num_key_value_heads n_group topk_group n_groups bos_token_id"),
    (8, "head_dim d_kv qk_nope_head_dim v_head_dim qk_rope_head_dim q_lora_rank kv_lora_rank"),
    (8, "patch_size"),
    (32, "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions"),
    (32, "max_source_positions"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts sliding_window"),
    (4, "window_size attention_window rotary_dim"),
    (3, "num_channels"),
    (0, "pad_token_id"),
]
SIZES = {name: size for size, names in _SIZES for name in names.split()}
# Latent attention has as many keys as queries.
_LATENT = (
    "axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa hy_v4 minicpm3 youtu"
)
_PYRAMID = {
    "hidden_sizes": [8, 8, 16, 16],
    "depths": [1, 1, 1, 1],
    "num_attention_heads": [1, 1, 2, 2],
}
_WINDOWS = {
    "embed_dim": 8,
    "depths": [1, 1],
    "num_heads": [1, 2],
    "window_size": 2,
    "patch_size": 2,
}
_STAGES = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
_SCAN = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4}
OTHERS: dict[str, dict[str, Any]] = {
    **{name: {"num_key_value_heads": 2} for name in (*_LATENT.split(), "diffllama")},
    "codegen": {"n_head": 4},
    "luke": {"entity_vocab_size": 8, "entity_emb_size": 16},
    "esm": {"vocab_size": VOCAB},
    "falcon_h1": {**_SCAN, "mamba_d_ssm": 32, "mamba_chunk_size": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4},
    "mamba2": {"num_heads": 4, "head_dim": 8, "n_groups": 2, "state_size": 4, "chunk_size": 4},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "recurrent_gemma": {"lru_width": 16, "attention_window_size": 4},
    "perceiver": {"d_latents": 16, "num_latents": 4, "qk_channels": 16, "v_channels": 16},
    "mobilebert": {"true_hidden_size": 16, "embedding_size": 16, "use_bottleneck": False},
    "canine": {
        "num_hash_buckets": 8,
        "downsampling_rate": 2,
        "upsampling_kernel_size": 4,
        "local_transformer_stride": 8,
    },
    "t5": {"decoder_start_token_id": 2},
    "cvt": {name: [0.0, 0.0, 0.0] for name in ("drop_rate", "drop_path_rate")},
    "phimoe": {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "switch_transformers": {"router_jitter_noise": 0.0},
    **dict.fromkeys(("swin", "swinv2", "donut-swin"), _WINDOWS),
    **{name: {**_STAGES, "groups_width": 4} for name in ("resnet", "regnet")},
    **dict.fromkeys(("segformer", "pvt_v2", "poolformer"), _PYRAMID),
    "mobilenet_v1": {"depth_multiplier": 0.25, "min_depth": 4},
    "mobilenet_v2": {"depth_multiplier": 0.25, "min_depth": 4},
    "convnext": {**_STAGES, "num_stages": 2},
    "convnextv2": {**_STAGES, "num_stages": 2},
    "pvt": {**_PYRAMID, "image_size": 32},
    "mobilevit": {
        "hidden_sizes": [8, 8, 8],
        "neck_hidden_sizes": [4, 4, 8, 8, 8, 8, 8],
        "image_size": 32,
    },
}


def shrink(config: Any) -> None:
    """Set sizes of a configuration, and of those inside of it, and turn off what is drawn."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "model_type"):
            shrink(value)
            continue
        is_missing = value is None and name in ("pad_token_id", "decoder_start_token_id")
        is_size = isinstance(value, int) and not isinstance(value, bool)
        with contextlib.suppress(AttributeError, TypeError, ValueError):
            if name in SIZES and (is_size or is_missing):
                setattr(config, name, SIZES[name])
            elif isinstance(value, float) and ("drop" in name or name.startswith("mask_")):
                setattr(config, name, 0.0)
            elif name in ("layer_types", "mlp_layer_types") and isinstance(value, list):
                kinds = sorted(set(value), key=value.index)
                setattr(config, name, (kinds * 2)[:2])


class Logits(nn.Module):
    """What a model returns for its main input."""

    def __init__(self, model: nn.Module, task: str) -> None:
        super().__init__()
        self.model, self.task = model, task

    def forward(self, x: Tensor) -> Tensor:
        """Logits of rows."""
        match self.task:
            case "encoder-decoders":
                output = self.model(input_ids=x, decoder_input_ids=x)
            case "classifiers of images":
                output = self.model(pixel_values=x)
            case "classifiers of sounds":
                output = self.model(x)
            case _:
                output = self.model(input_ids=x)
        logits = getattr(output, "logits", None)
        return output[0] if logits is None else logits


def rows_of(task: str, config: Any) -> tuple[Tensor, Tensor]:
    """Rows that a model of a task takes, and their labels."""
    gen = torch.Generator().manual_seed(3)
    classes = torch.randint(0, 2, (ROWS,), generator=gen)
    if task == "classifiers of images":
        size = getattr(config, "image_size", 16)
        size = size if isinstance(size, int) else size[0]
        shape = ROWS, getattr(config, "num_channels", 3), size, size
        return torch.randn(shape, generator=gen), classes
    if task == "classifiers of sounds":
        return torch.randn(ROWS, 2000, generator=gen), classes
    ids = torch.randint(3, VOCAB, (ROWS, TOKENS), generator=gen)
    if task == "classifiers of text":
        ids[:, -1] = SIZES["eos_token_id"]
        return ids, classes
    return ids, torch.randint(3, VOCAB, (ROWS, TOKENS), generator=gen)


def losses(task: str, output: Tensor, labels: Tensor) -> Tensor:  # [rows]
    """One loss for each row."""
    if task in OF_TOKENS:
        output = output[:, -labels.shape[1] :].transpose(1, 2)
        return F.cross_entropy(output, labels, reduction="none").mean(1)
    return F.cross_entropy(output, labels, reduction="none")


def expected_gradient(model: nn.Module, loss: Callable[..., Tensor], batch: Any) -> dict[str, Any]:
    """The mean of clipped gradients, sample by sample, added in float64."""
    params = {name: each for name, each in model.named_parameters() if each.requires_grad}
    total = {name: torch.zeros_like(each, dtype=torch.float64) for name, each in params.items()}
    for i in range(ROWS):
        own = loss(*(each[i : i + 1] for each in batch)).sum()
        found = torch.autograd.grad(own, list(params.values()), allow_unused=True)
        wide = {n: g.double() for n, g in zip(params, found, strict=True) if g is not None}
        norm = sum(float(each.square().sum()) for each in wide.values()) ** 0.5
        for name, each in wide.items():
            total[name] += each * min(1.0, MAX_NORM / max(norm, LEAST_NORM)) / ROWS
    return total


def examine(task: str, kind: str, class_name: str, *, is_compiled: bool) -> tuple[str, str]:
    """Train one model privately for two steps.

    Returns:
        "exact", "wrong", "refused" or "not made", and why or by how much.
    """
    import transformers

    from unison.errors import UnisonError
    from unison.privacy import PrivacyEngine

    torch.manual_seed(0)
    torch.set_num_threads(1)
    try:
        model_class = getattr(transformers, class_name)
        config = model_class.config_class()
        shrink(config)
        for name, value in OTHERS.get(kind, {}).items():
            setattr(config, name, value)
        model = Logits(model_class(config), task).train()
        if sum(each.numel() for each in model.parameters()) > MOST_PARAMETERS:
            return "not made", "too large"
        for each in model.modules():
            if isinstance(each, nn.modules.batchnorm._BatchNorm):
                each.eval()  # statistics of a batch mix samples
        batch = rows_of(task, config)
        expected = expected_gradient(model, lambda x, y: losses(task, model(x), y), batch)
        largest = max(float(each.abs().max()) for each in expected.values() if each.numel())
        if largest < LEAST_NORM:
            return "not made", "it forgets its input on the way"
    except Exception as error:
        return "not made", f"{type(error).__name__}: {error}"[:200]
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    try:
        module, optimizer, loader = PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            data_loader=DataLoader(TensorDataset(*batch), batch_size=ROWS, shuffle=True),
            noise_multiplier=0.0,
            max_grad_norm=MAX_NORM,
            poisson_sampling=False,
            compile={"backend": "aot_eager"} if is_compiled else False,
        )
        for _ in range(2):
            model.load_state_dict(before, strict=False)
            for x, y in loader:
                optimizer.zero_grad()
                losses(task, module(x), y).mean().backward()
                optimizer.step()
    except UnisonError as error:
        return "refused", f"{type(error).__name__}: {error}"[:400]
    error = 0.0
    for name, each in model.named_parameters():
        if name in expected and each.numel():
            found = torch.zeros_like(each) if each.grad is None else each.grad
            error = max(error, float((found.double() - expected[name]).abs().max()) / largest)
    return ("exact" if error <= TOLERANCE else "wrong"), f"{error:.1e} of the largest element"


def _child(answers: Any, is_compiled: bool, *what: str) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.filterwarnings("always", message=".*uncompiled")
            verdict, why = examine(*what, is_compiled=is_compiled)
            if verdict == "wrong":  # or rounded
                torch.set_default_dtype(torch.float64)
                again = examine(*what, is_compiled=is_compiled)
                verdict, why = again if again[0] == "exact" else (verdict, why)
        if told and verdict == "exact":
            verdict, why = "exact, uncompiled", str(told[0].message)[:400]
        answers.put((verdict, why))
    except BaseException as error:
        answers.put(("failed", f"{type(error).__name__}: {error}"[:400]))


def examined(is_compiled: bool, *what: str) -> tuple[str, str]:
    """`examine` in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    answers = context.Queue()
    process = context.Process(target=_child, args=(answers, is_compiled, *what), daemon=True)
    process.start()
    try:
        return answers.get(timeout=SECONDS)
    except queue.Empty:
        return "failed", f"no answer in {SECONDS} s"
    finally:
        process.kill()
        process.join()


def main() -> None:
    """Examine every architecture, and write what came of it."""
    from transformers.models.auto import modeling_auto

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="kinds of models, separated by commas; writes no file")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    only = options.only.split(",") if options.only else None
    wanted: list[tuple[str, str, str]] = []
    for task, table in TASKS.items():
        for kind, names in getattr(modeling_auto, table).items():
            if only is None or kind in only:
                wanted.append((task, kind, names if isinstance(names, str) else names[0]))
    multiprocessing.set_forkserver_preload(["transformers", "unison.privacy"])
    found: dict[str, dict[str, list[str]]] = {task: {} for task in TASKS}
    with ThreadPoolExecutor(options.processes) as pool:
        for (task, kind, _), answer in zip(
            wanted, pool.map(lambda each: examined(options.compile, *each), wanted), strict=True
        ):
            found[task][kind] = list(answer)
            print(f"{task:24} {kind:28} {answer[0]:9} {answer[1]}", flush=True)
    counts = {task: Counter(each[0] for each in kinds.values()) for task, kinds in found.items()}
    total = sum(counts.values(), Counter())
    print(*(f"{count} {verdict}" for verdict, count in total.most_common()), sep=", ")
    if only is None:
        figures = {"counts": {**counts, "all": total}, "verdicts": found}
        name = "architectures-compiled" if options.compile else "architectures"
        print(write_result(name, figures))


if __name__ == "__main__":
    main()
