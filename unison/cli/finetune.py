"""`unison finetune`, `generate` and `export`: a model that users have, and have afterwards."""

import json
from dataclasses import fields
from pathlib import Path

import typer

from unison.cli.options import documented, spelling, was_given
from unison.config import Privacy
from unison.errors import BadInput


@documented(
    lora={"min": 0},
    batch_size={"min": 1},
    micro_batch_size={"min": 1},
    max_length={"min": 2},
    checkpoint_every={"min": 0},
    resume={"metavar": "RUN"},
)
def finetune(
    context: typer.Context,
    *,
    model: Path | None = None,
    data: Path | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    out: Path | None = None,
    lora: int = 0,
    epochs: float = 3.0,
    batch_size: int = 64,
    micro_batch_size: int = 8,
    max_length: int = 512,
    lr: float = 2e-4,
    max_grad_norm: float = 1.0,
    accountant: str = "pld",
    bf16: bool = False,
    seed: int = 0,
    checkpoint_every: int = 0,
    resume: Path | None = None,
    as_json: bool = False,
) -> None:
    """Fine-tune a model of transformers' with differential privacy; one record is one line.

    \b
    unison finetune --model llama --lora 16 --data notes.jsonl --epsilon 3 --delta 1e-5 --out run
    unison generate run --prompt "Dear"
    unison export run --to hf --out llama-private
    unison finetune --resume run    after a crash, if there was --checkpoint-every

    Args:
        model: Folder of a model in transformers' format.
        data: JSON lines, one record each: text; text and label; prompt and completion; or messages.
        epsilon: ε that the run may spend; decides the noise.
        delta: δ, below 1 / number of records.
        out: Folder of the run.
        lora: Rank of a LoRA adapter; 0 trains all parameters.
        epochs: Passes over the data.
        batch_size: Records that a step draws.
        micro_batch_size: Most records in one pass.
        max_length: Tokens that records are cut or padded to; public.
        lr: Learning rate of AdamW.
        max_grad_norm: C: the bound on the gradient of each record.
        accountant: pld or rdp: whose bound on ε counts.
        bf16: Compute in bfloat16.
        seed: Of initial values and dropout; never of noise.
        checkpoint_every: Steps between checkpoints; 0 for none.
        resume: Go on with a run that stopped, from its newest checkpoint and with its settings.
        as_json: Print the result as one JSON object.
    """
    from unison import hf

    given = {name for name in context.params if was_given(context, name)}
    if resume is not None:
        for name in sorted(given - {"resume", "as_json"}):
            raise BadInput(
                f"--resume goes on with the settings of the run; leave {spelling(name)} out"
            )
        out, result = resume, hf.resume(resume)
    else:
        if model is None or data is None or out is None or epsilon is None or delta is None:
            needed = ("model", "data", "epsilon", "delta", "out")
            missing = ", ".join(f"--{name}" for name in needed if name not in given)
            raise BadInput(f"a new run needs {missing}; --resume RUN goes on with one")
        values = {each.name: context.params[each.name] for each in fields(hf.FinetuneConfig)}
        values["micro_batch_size"] = min(micro_batch_size, batch_size)
        privacy = Privacy(
            epsilon=epsilon, delta=delta, max_grad_norm=max_grad_norm, accountant=accountant
        )
        result = hf.finetune(hf.FinetuneConfig(**values), privacy)
    spent = f"ε = {result['epsilon']:.4g} at δ = {result['delta']:g} after {result['steps']} steps"
    typer.echo(json.dumps(result) if as_json else f"{spent}; the model is in {out}/model")


@documented(max_new_tokens={"min": 1})
def generate(run: Path, *, prompt: str, max_new_tokens: int = 64) -> None:
    """Let the model of a run go on with a prompt; what it says is covered by the run's ε.

    Args:
        run: The folder of a run of `unison finetune`.
        prompt: What the text begins with, or a question.
        max_new_tokens: Most tokens to add.
    """
    from unison import hf

    typer.echo(hf.generate(run, prompt, max_new_tokens=max_new_tokens))


@documented()
def export(run: Path, *, out: Path, to: str = "hf") -> None:
    """Write the model of a run, an adapter merged into it, where other programs can load it.

    Args:
        run: The folder of a run of `unison finetune`.
        out: A folder that is not there yet.
        to: hf: for from_pretrained. safetensors: the parameters alone.
    """
    if to not in ("hf", "safetensors"):
        raise BadInput(f"--to must be hf or safetensors, found {to!r}")
    from unison import hf

    typer.echo(f"written to {hf.export(run, out, to)}")
