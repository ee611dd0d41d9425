"""A model of transformers that is fine-tuned privately by a command, and its use afterwards.

The folder of a run holds the ledger, what it was asked for (`finetune.json`), checkpoints if there
are any, the fine-tuned model (or its adapter) with its tokenizer in `model/`, and `result.json`.
All of it is covered by ε.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from unison import check
from unison.config import Privacy
from unison.errors import BadInput, UnisonError
from unison.hf.trainer import PrivateTrainer
from unison.models import CONFIG_FILE, LanguageModel, ModelConfig, load
from unison.run_files import COUNTERFACTUAL_FILE
from unison.schema import build, open_regular, parse, read_json

MODEL_FOLDER = "model"
RESULT_FILE = "result.json"
SETTINGS_FILE = "finetune.json"
_ADAPTER_FILE = "adapter_config.json"
_MODELS = {"causal-lm": AutoModelForCausalLM, "classification": AutoModelForSequenceClassification}
_FORMS = (
    ("text", "label"),
    ("prompt", "completion"),
    ("messages",),
    ("text",),
)


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """What `unison finetune` does beside privacy.

    Attributes:
        model: Folder of a model in transformers' format, with its tokenizer.
        data: A file with one JSON object, one record, per line.
        out: Folder of the run.
        lora: Rank of a LoRA adapter on all linear layers; 0 trains all parameters.
        epochs: Passes over the data.
        batch_size: Records that a step draws, as expected.
        micro_batch_size: Most records in one pass.
        max_length: Tokens that every record is cut or padded to: a public number.
        lr: Learning rate of AdamW.
        bf16: Whether passes run in bfloat16.
        seed: Of the adapter's initial values and dropout; of no noise.
        checkpoint_every: Steps between checkpoints, of which the newest is kept; 0 for none.
    """

    model: Path
    data: Path
    out: Path
    lora: int = 0
    epochs: float = 3.0
    batch_size: int = 64
    micro_batch_size: int = 8
    max_length: int = 512
    lr: float = 2e-4
    bf16: bool = False
    seed: int = 0
    checkpoint_every: int = 0

    def __post_init__(self) -> None:
        for name in ("model", "data", "out"):  # or text, from users and from some versions of Typer
            object.__setattr__(self, name, Path(getattr(self, name)))
        check.positive(
            epochs=self.epochs,
            batch_size=self.batch_size,
            micro_batch_size=self.micro_batch_size,
            max_length=self.max_length,
            lr=self.lr,
        )
        check.not_negative(lora=self.lora, seed=self.seed, checkpoint_every=self.checkpoint_every)


def resume(run: Path) -> dict[str, Any]:
    """Go on with a run of `finetune` that stopped, from its newest checkpoint.

    Returns:
        The same as `finetune`. What was spent after the checkpoint stays spent: a run that lost
        steps may end at its budget before its last one.

    Raises:
        BadInput: There is no run, no checkpoint, or nothing left to do.
    """
    run = Path(run)
    path = run / SETTINGS_FILE
    if not path.exists():
        raise BadInput(f"{run} is no run of `unison finetune`: it has no {SETTINGS_FILE}")
    paths = {Path: lambda value: Path(build(str, value, path))}
    saved = build(dict[str, Any], read_json(path), path)
    asked = build(FinetuneConfig, saved.get("config"), path, field="config", made=paths)
    privacy = build(Privacy, saved.get("privacy"), path, field="privacy")
    config = replace(asked, out=run)
    if (run / RESULT_FILE).is_file():
        raise BadInput(f"{run} has ended; its model is in {run / MODEL_FOLDER}")
    if get_last_checkpoint(str(run)) is None:
        raise BadInput(
            f"{run} has no checkpoint to go on from: start another one, with --checkpoint-every"
        )
    return _run(config, privacy, is_resumed=True)


def finetune(config: FinetuneConfig, privacy: Privacy) -> dict[str, Any]:
    """Fine-tune a model privately, and write it to the run's folder.

    Returns:
        What was applied and spent; the same as in `result.json`.

    Raises:
        BadInput: A model, data or settings that cannot be used, before anything is spent.
    """
    if config.out.exists() and any(config.out.iterdir()):
        raise BadInput(
            f"{config.out} is there already, and its ledger counts what its run has spent; choose "
            "another --out, or --resume it"
        )
    return _run(config, privacy, is_resumed=False)


def _run(config: FinetuneConfig, privacy: Privacy, *, is_resumed: bool) -> dict[str, Any]:
    if config.batch_size % config.micro_batch_size:
        raise BadInput(
            "batch_size must be a multiple of micro_batch_size, found "
            f"{config.batch_size} and {config.micro_batch_size}"
        )
    records = read_records(config.data)
    kind = "classification" if "label" in records[0] else "causal-lm"
    torch.manual_seed(config.seed)
    tokenizer, model = _load(config.model, _MODELS[kind])
    rows = [
        _row(record, tokenizer, model, config.max_length, f"{config.data}:{number}")
        for number, record in enumerate(records, 1)
    ]
    if config.lora:
        from peft import LoraConfig, get_peft_model

        task = "SEQ_CLS" if kind == "classification" else "CAUSAL_LM"
        adapter = LoraConfig(
            r=config.lora, lora_alpha=2 * config.lora, target_modules="all-linear", task_type=task
        )
        model = get_peft_model(model, adapter)
    trainer = PrivateTrainer(
        model=model,
        args=TrainingArguments(
            str(config.out),
            num_train_epochs=config.epochs,
            per_device_train_batch_size=config.micro_batch_size,
            gradient_accumulation_steps=config.batch_size // config.micro_batch_size,
            learning_rate=config.lr,
            bf16=config.bf16,
            seed=config.seed,
            save_strategy="steps" if config.checkpoint_every else "no",
            save_steps=config.checkpoint_every or 1,
            save_total_limit=1,
            report_to=[],
            dataloader_pin_memory=torch.cuda.is_available(),
        ),
        train_dataset=rows,  # type: ignore[arg-type]
        processing_class=tokenizer,
        privacy=privacy,
        max_length=config.max_length,
    )
    if not is_resumed:
        paths = {name: str(getattr(config, name).resolve()) for name in ("model", "data", "out")}
        given = {"config": asdict(config) | paths, "privacy": asdict(privacy)}
        config.out.mkdir(parents=True, exist_ok=True)
        (config.out / SETTINGS_FILE).write_text(json.dumps(given, indent=2) + "\n")
    done = trainer.train(resume_from_checkpoint=is_resumed or None)
    folder = config.out / MODEL_FOLDER
    trainer.save_model(str(folder))
    tokenizer.save_pretrained(folder)
    result = {"kind": kind, "steps": done.global_step, "num_records": len(rows), **done.metrics}
    (config.out / RESULT_FILE).write_text(json.dumps(result, indent=2) + "\n")
    return result


def generate(run: Path, prompt: str, *, max_new_tokens: int = 64) -> str:
    """Return what the model of a run says after a prompt, by the most likely token each time."""
    run = Path(run)
    if _kind(run) != "causal-lm":
        raise BadInput(f"{run} is a run of a classifier, which generates no text")
    tokenizer, model = _load(run / MODEL_FOLDER, AutoModelForCausalLM)
    if tokenizer.chat_template:
        prompt = _chat(tokenizer, [{"role": "user", "content": prompt}], is_asked=True)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=not tokenizer.chat_template)
    made = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    return tokenizer.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def export(run: Path, out: Path, to: str) -> Path:
    """Write the model of a run, an adapter merged into it, where others can load it.

    Args:
        run: The folder of the run; one of `unison train` too, whose models have twins.
        out: A folder that is not there yet.
        to: `"hf"`: a folder for `from_pretrained`, with the tokenizer if it is
            transformers' own. `"safetensors"`: the
            parameters alone, as one file.

    Returns:
        The folder, or the file in it.
    """
    run, out = Path(run), Path(out)
    if out.exists():
        raise BadInput(f"{out} is there already; choose another --out")
    if (run / COUNTERFACTUAL_FILE).exists():
        raise BadInput(
            f"{run} is a replay without some rows, and compared with its run gives them away (ε = "
            "∞): it is not exported; export the run itself"
        )
    if (run / CONFIG_FILE).is_file():  # of `unison train`
        tokenizer, model = None, as_transformers(load(run))
    else:
        tokenizer, model = _load(run / MODEL_FOLDER, _MODELS[_kind(run)])
    if to == "hf":
        model.save_pretrained(out)
        if tokenizer is not None:
            tokenizer.save_pretrained(out)
        return out
    from safetensors.torch import save_model

    out.mkdir(parents=True)
    save_model(model, str(out / "model.safetensors"))  # tied parameters once
    return out / "model.safetensors"


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines, all of one form: text, text and label, prompt, or messages.

    Raises:
        BadInput: Naming the line.
    """
    try:
        with open_regular(path) as file:
            lines = list(file)  # of bytes: text has other ends of lines, which JSON may hold
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error
    records: list[dict[str, Any]] = []
    form: tuple[str, ...] | None = None
    for number, line in enumerate(lines, 1):
        record = parse(line, f"{path}:{number}")
        found = next(
            (form for form in _FORMS if isinstance(record, dict) and record.keys() >= set(form)),
            None,
        )
        form = form or found
        if form is None or found != form:
            wanted = " and ".join(form) if form else "text, prompt and completion, or messages"
            raise BadInput(f"{path}:{number} has no {wanted}; all lines must be of one form")
        for name in form:
            kind = {"label": int, "messages": list}.get(name, str)
            if not isinstance(record[name], kind) or isinstance(record[name], bool):
                raise BadInput(f"{path}:{number}: {name} must be of type {kind.__name__}")
        records.append(record)
    if not records:
        raise BadInput(f"{path} has no records")
    return records


def _row(
    record: dict[str, Any], tokenizer: Any, model: nn.Module, max_length: int, where: str
) -> dict[str, Any]:
    """A record as a model takes it; only a completion, or the last answer, has labels."""
    prompt, text = "", record.get("text", "")
    if "messages" in record:
        text, prompt = _conversation(tokenizer, record["messages"], where)
    elif "prompt" in record:
        prompt, text = record["prompt"], record["prompt"] + record["completion"]
        text += tokenizer.eos_token or ""
    settings = {"truncation": True, "max_length": max_length}
    settings["add_special_tokens"] = "messages" not in record  # a template has its own
    ids = tokenizer(text, **settings)["input_ids"]
    row = {"input_ids": torch.tensor(ids), "attention_mask": torch.ones(len(ids), dtype=torch.long)}
    if "label" in record:
        num_labels = model.config.num_labels  # type: ignore[union-attr]
        if not 0 <= record["label"] < num_labels:
            raise BadInput(
                f"{where}: label {record['label']} of a model with {num_labels} labels; set "
                "num_labels in the model's config.json"
            )
        return row | {"labels": record["label"]}
    labels = row["input_ids"].clone()
    if prompt:
        given = tokenizer(prompt, **settings)["input_ids"]
        while given and given != ids[: len(given)]:  # the last token may have grown together
            given.pop()
        labels[: len(given)] = -100
    return row | {"labels": labels}


def _conversation(tokenizer: Any, messages: Sequence[Any], where: str) -> tuple[str, str]:
    """A conversation as text, and its beginning up to the last answer."""
    if not tokenizer.chat_template:
        raise BadInput(f"{where} has messages, and the model's tokenizer has no chat template")
    last = messages[-1] if messages else None
    if not isinstance(last, dict) or last.get("role") != "assistant":
        raise BadInput(f"{where}: the last message must be the assistant's, which is learned")
    try:
        text = _chat(tokenizer, messages, is_asked=False)
        prompt = _chat(tokenizer, messages[:-1], is_asked=True)
    except Exception as error:  # a template may raise anything
        raise BadInput(f"{where}: the chat template refuses these messages: {error}") from error
    return text, prompt


def _chat(tokenizer: Any, messages: Sequence[Any], *, is_asked: bool) -> str:
    return tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=is_asked
    )


def _load(folder: Path, kind: Any) -> tuple[Any, Any]:
    """The tokenizer and the model of a folder, an adapter merged into its base; never a pickle."""
    if not folder.is_dir():
        raise BadInput(f"{folder} is no folder with a model in transformers' format")
    open_model = partial(kind.from_pretrained, local_files_only=True, use_safetensors=True)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if (folder / _ADAPTER_FILE).is_file():
            from peft import PeftModel
            from peft.utils import SAFETENSORS_WEIGHTS_NAME

            if not (folder / SAFETENSORS_WEIGHTS_NAME).is_file():  # peft would take a pickle then
                raise OSError(f"it has no {SAFETENSORS_WEIGHTS_NAME}")
            base = read_json(folder / _ADAPTER_FILE)["base_model_name_or_path"]
            model = open_model(base)
            model = PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
        else:
            model = open_model(folder)
    except (OSError, ValueError, LookupError, TypeError) as error:
        if isinstance(error, UnisonError):
            raise
        raise BadInput(f"{folder} cannot be loaded: {str(error).splitlines()[0]}") from error
    return tokenizer, model


def _kind(run: Path) -> str:
    path = run / RESULT_FILE
    result = read_json(path) if path.exists() else None
    if not isinstance(result, dict) or result.get("kind") not in _MODELS:
        raise BadInput(f"{run} is no run of `unison finetune` that has ended")
    return result["kind"]


# --- unison's language models as transformers' own: a decoder is a Llama, a gpt2 a GPT-2 ----------

_LLAMA_NAMES = {
    "token_embeddings": "model.embed_tokens",
    "layers": "model.layers",
    "ln_final": "model.norm",
    "ln1": "input_layernorm",
    "ln2": "post_attention_layernorm",
    "attn": "self_attn",
    "output_proj": "o_proj",
    "ffn": "mlp",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
}
_GPT2_NAMES = {
    "token_embeddings": "transformer.wte",
    "position_embeddings": "transformer.wpe",
    "layers": "transformer.h",
    "ln_final": "transformer.ln_f",
    "ln1": "ln_1",
    "ln2": "ln_2",
    "qkv_proj": "c_attn",
    "output_proj": "c_proj",
    "ffn": "mlp",
    "w1": "c_fc",
    "w2": "c_proj",
}


@torch.no_grad()
def as_transformers(model: LanguageModel) -> Any:
    """Return a model of transformers with the same parameters, and so the same logits."""
    config = model.config
    is_llama = config.family == "decoder"
    twin: Any = _llama(config) if is_llama else _gpt2(config)
    twin.to(next(model.parameters()).dtype)
    names = _LLAMA_NAMES if is_llama else _GPT2_NAMES
    for name, value in model.named_parameters():
        path = ".".join(names.get(part, part) for part in name.split("."))
        if is_llama and ("q_proj" in name or "k_proj" in name):
            # Llama rotates feature i with i + d/2, we rotate 2i with 2i + 1.
            half = config.d_model // config.num_heads // 2
            pairs = value.view(config.num_heads, half, 2, -1)
            value = pairs.transpose(1, 2).reshape(value.shape)
        elif not is_llama and name.startswith("layers.") and value.ndim == 2:
            value = value.T  # transformers' Conv1D
        twin.get_parameter(path).copy_(value)
    return twin.eval()


def _llama(config: ModelConfig) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            max_position_embeddings=config.context_length,
            hidden_size=config.d_model,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            intermediate_size=config.d_ff,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tie_head,
        )
    )


def _gpt2(config: ModelConfig) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.context_length,
            n_embd=config.d_model,
            n_layer=config.num_layers,
            n_head=config.num_heads,
            n_inner=config.d_ff,
            layer_norm_epsilon=config.norm_eps,
            resid_pdrop=config.dropout,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
            tie_word_embeddings=config.tie_head,
        )
    )
