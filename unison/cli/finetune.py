"""`unison finetune`, `generate` and `export`: a model that users have, and have afterwards."""

import json
from pathlib import Path
from typing import Annotated

import typer

from unison.cli.train import was_given
from unison.config import Privacy
from unison.errors import BadInput

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
Run = Annotated[Path, typer.Argument(help="The folder of a run of `unison finetune`.")]


def finetune(
    context: typer.Context,
    model: Annotated[
        Path | None, typer.Option(help="Folder of a model in transformers' format.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines, one record each: text; text and label; prompt and completion; or "
            "messages."
        ),
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="ε that the run may spend; decides the noise.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="δ, below 1 / number of records.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run.")] = None,
    lora: Annotated[
        int, typer.Option(min=0, help="Rank of a LoRA adapter; 0 trains all parameters.")
    ] = 0,
    epochs: Annotated[float, typer.Option(help="Passes over the data.")] = 3.0,
    batch_size: Annotated[int, typer.Option(min=1, help="Records that a step draws.")] = 64,
    micro_batch_size: Annotated[int, typer.Option(min=1, help="Most records in one pass.")] = 8,
    max_length: Annotated[
        int, typer.Option(min=2, help="Tokens that records are cut or padded to; public.")
    ] = 512,
    lr: Annotated[float, typer.Option(help="Learning rate of AdamW.")] = 2e-4,
    max_grad_norm: Annotated[
        float, typer.Option(help="C: the bound on the gradient of each record.")
    ] = 1.0,
    accountant: Annotated[str, typer.Option(help="pld or rdp: whose bound on ε counts.")] = "pld",
    bf16: Annotated[bool, typer.Option("--bf16", help="Compute in bfloat16.")] = False,
    seed: Annotated[int, typer.Option(help="Of initial values and dropout; never of noise.")] = 0,
    checkpoint_every: Annotated[
        int, typer.Option(min=0, help="Steps between checkpoints; 0 for none.")
    ] = 0,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Go on with a run that stopped, from its newest checkpoint and with its settings.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fine-tune a model of transformers' with differential privacy; one record is one line.

    \b
    unison finetune --model llama --lora 16 --data notes.jsonl --epsilon 3 --delta 1e-5 --out run
    unison generate run --prompt "Dear"
    unison export run --to hf --out llama-private
    unison finetune --resume run    after a crash, if there was --checkpoint-every
    """
    from unison import hf

    given = {name for name in context.params if was_given(context, name)}
    if resume is not None:
        for name in sorted(given - {"resume", "as_json"}):
            raise BadInput(
                f"--resume goes on with the settings of the run; leave --{name.replace('_', '-')} "
                "out"
            )
        out, result = resume, hf.resume(resume)
    else:
        if model is None or data is None or out is None or epsilon is None or delta is None:
            needed = ("model", "data", "epsilon", "delta", "out")
            missing = ", ".join(f"--{name}" for name in needed if name not in given)
            raise BadInput(f"a new run needs {missing}; --resume RUN goes on with one")
        result = hf.finetune(
            hf.FinetuneConfig(
                model=model,
                data=data,
                out=out,
                lora=lora,
                epochs=epochs,
                batch_size=batch_size,
                micro_batch_size=min(micro_batch_size, batch_size),
                max_length=max_length,
                lr=lr,
                bf16=bf16,
                seed=seed,
                checkpoint_every=checkpoint_every,
            ),
            Privacy(
                epsilon=epsilon, delta=delta, max_grad_norm=max_grad_norm, accountant=accountant
            ),
        )
    spent = f"ε = {result['epsilon']:.4g} at δ = {result['delta']:g} after {result['steps']} steps"
    typer.echo(json.dumps(result) if as_json else f"{spent}; the model is in {out}/model")


def generate(
    run: Run,
    prompt: Annotated[str, typer.Option(help="What the text begins with, or a question.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to add.")] = 64,
) -> None:
    """Let the model of a run go on with a prompt; what it says is covered by the run's ε."""
    from unison.hf import generate as say

    typer.echo(say(run, prompt, max_new_tokens=max_new_tokens))


def export(
    run: Run,
    out: Annotated[Path, typer.Option(help="A folder that is not there yet.")],
    to: Annotated[
        str, typer.Option(help="hf: for from_pretrained. safetensors: the parameters alone.")
    ] = "hf",
) -> None:
    """Write the model of a run, an adapter merged into it, where other programs can load it."""
    if to not in ("hf", "safetensors"):
        raise BadInput(f"--to must be hf or safetensors, found {to!r}")
    from unison.hf import export as write

    typer.echo(f"written to {write(run, out, to)}")
