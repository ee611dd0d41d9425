"""`unison plan`: what a step takes and what a private run costs, before a GPU is rented."""

import inspect
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from torch import nn

from unison.cli.account import plain_table
from unison.cli.options import documented
from unison.errors import BadInput, UnisonError
from unison.models import build, preset
from unison.plan import (
    CATEGORIES,
    GPUS,
    Estimate,
    Gpu,
    Scenario,
    Usage,
    assumptions,
    budget,
    check_forward,
    count_trained,
    estimate,
    find_gpu,
    first_line,
    is_inside,
    simulate,
)
from unison.verify import imported

GIB = 2**30
MOST_SIMULATED = 2  # passes of a step: each one after the first is like the second


@documented(preset_name={"names": ("--preset",)}, compiled={"names": ("--compile",)})
def plan(
    model: str | None = None,
    *,
    preset_name: str | None = None,
    num_layers: int | None = None,
    gpus: int = 1,
    gpu: str = "h100",
    batch: int = 1,
    seq: int | None = None,
    logical_batch: int | None = None,
    shard: str = "full",
    replicas: int = 2,
    precision: str = "fp32",
    checkpoint_activations: bool = False,
    compiled: bool = False,
    offload: str = "",
    private: bool = False,
    clipping: str = "auto",
    kfac: bool = False,
    lora: int = 0,
    rows: int | None = None,
    epochs: float = 1.0,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    delta: float = 1e-6,
    fit: bool = False,
    sweep: str | None = None,
    picture: Path = Path("plan-sweep.png"),
    as_json: bool = False,
) -> None:
    """Say what a training step takes: memory by category, traffic, arithmetic, time, and ε.

    The real engine runs, for one rank of as many as you ask for, on tensors that have no memory.
    Bytes are those of real ranks; time is an estimate, whose assumptions are printed.

    \b
    unison plan --preset 13b --gpus 8 --gpu h200 --precision bf16 --checkpoint-activations
    unison plan --preset gpt2-large --gpus 8 --private --rows 1000000 --logical-batch 4096 \\
        --epochs 3 --epsilon 8 --delta 1e-7
    unison plan mymodule:build_model --gpus 4 --batch 8 --seq 512

    Args:
        model: Your own model, as MODULE:FUNCTION, where FUNCTION() builds it, or the path of a
            transformers config.json; --preset otherwise.
        preset_name: Which model (see `unison presets`).
        num_layers: Replace the preset's number of blocks.
        gpus: Number of GPUs, one rank each.
        gpu: h200, h100, a100-80, or a YAML file that describes one.
        batch: Rows of a pass on each GPU.
        seq: Tokens of a row; the preset's context by default.
        logical_batch: Rows of a step over all GPUs; one pass by default.
        shard: full (ZeRO-3), zero2 or hybrid.
        replicas: Copies of the model with --shard hybrid.
        precision: fp32 or bf16.
        checkpoint_activations: Blocks keep only their inputs.
        compiled: Blocks go through torch.compile.
        offload: What the host holds: optimizer, params, grads, with commas.
        private: Train with DP-SGD.
        clipping: How --private computes the clipping.
        kfac: Precondition with K-FAC.
        lora: Train adapters of this rank in the blocks' linear layers alone.
        rows: Rows of the data set, each a record.
        epochs: How often each row is drawn, on average.
        epsilon: ε to spend: decides the noise.
        noise_multiplier: σ, instead of --epsilon: decides ε.
        delta: δ, below 1 / --rows.
        fit: Find the fastest of --shard, --checkpoint-activations and --offload that fits.
        sweep: gpus=8,16,32: one line for each number of GPUs, and a picture.
        picture: Where --sweep draws memory and time, a PNG.
        as_json: Print one JSON object instead of tables.
    """
    card = find_gpu(gpu)
    make, vocab_size, longest = find_model(model, preset_name, num_layers)
    is_budget = noise_multiplier is not None or epsilon is not None or rows is not None
    private |= is_budget
    worlds = [gpus] if sweep is None else swept(sweep)
    counts = {"--gpus": gpus, "--batch": batch, "--logical-batch": logical_batch, "--seq": seq}
    for name, value in counts.items():
        if value is not None and value < 1:
            raise BadInput(f"{name} must be above 0, found {value}")
    if seq is not None and longest is not None and seq > longest:
        raise BadInput(f"--seq {seq} is longer than the model's context, {longest}")
    if seq is None and longest is None:
        raise BadInput("--seq is needed for a model of your own: tokens of a row")
    if is_budget and (rows is None or logical_batch is None):
        raise BadInput("a private budget needs --rows and --logical-batch")
    if not is_budget and (epochs, delta) != (1.0, 1e-6):
        raise BadInput("--epochs and --delta are of a private budget, which needs --rows")
    if clipping != "auto" and not private:
        raise BadInput(f"--clipping {clipping} is for private training; add --private")
    if sweep is not None and not picture.parent.is_dir():
        raise BadInput(f"--picture {picture} is in no folder that exists")
    if sweep is not None and (picture.suffix.lower() != ".png" or picture.is_dir()):
        raise BadInput(f"--picture must be a file whose name ends in .png, found {picture}")
    scenario = Scenario(
        world_size=worlds[0],
        rows=batch,
        row_length=seq if seq is not None else longest or 1,
        vocab_size=vocab_size,
        shard=shard,
        replicas=replicas,
        precision=precision,
        clipping=clipping if private else None,
        kfac=kfac,
        lora=lora,
        checkpoint_activations=checkpoint_activations,
        compiled=compiled,
        offload=frozenset(each.strip() for each in offload.split(",") if each.strip()),
    )
    wanted = [
        replace(scenario, world_size=world, passes=-(-(logical_batch or 1) // (world * batch)))
        for world in worlds
    ]
    num_parameters = count_trained(make, lora)
    if preset_name is None:
        check_forward(make, scenario)
    spending = None
    if rows is not None:
        spending = budget(
            num_rows=rows,
            batch_size=logical_batch or 1,
            epochs=epochs,
            delta=delta,
            scenario=scenario,
            num_parameters=num_parameters,
            epsilon=epsilon,
            noise_multiplier=noise_multiplier,
        )
    if fit and sweep is not None:
        raise BadInput("--fit is for one number of GPUs; leave --sweep out")

    def planned(each: Scenario) -> Plan:
        try:
            # Two passes of a step are run, and the others are like them.
            num_run = min(each.passes, MOST_SIMULATED)
            memory = int(card.memory_gib * GIB)
            usage = simulate(make, replace(each, passes=num_run), memory=memory)
        except UnisonError:
            raise
        except Exception as error:
            if model is None:  # a preset's is our own affair
                raise
            told = first_line(error)
            raise BadInput(f"a step of {model} cannot be planned, it failed with {told}") from error
        usage.repeats = each.passes - num_run
        for key in usage.bytes_sent:
            usage.bytes_sent[key] = usage.bytes_sent[key] * each.passes // num_run
        return each, usage, estimate(usage, each, card, num_parameters)

    plans = [fastest(planned, wanted[0], card)] if fit else [planned(each) for each in wanted]
    if sweep is not None:
        draw_sweep(plans, card, picture)
    if as_json:
        told = [figures(each, card, spending, num_parameters) for each in plans]
        typer.echo(json.dumps(told[0] if sweep is None else told))
    elif sweep is not None:
        show_sweep(plain_screen(), plans, card)
        typer.echo(f"drawn in {picture}")
    else:
        show(plain_screen(), plans[0], card, spending, num_parameters)
        if fit:
            typer.echo("\nto run it:\n" + code_of(plans[0][0]))


Plan = tuple[Scenario, Usage, Estimate]


def fastest(planned: Callable[[Scenario], Plan], wanted: Scenario, card: Gpu) -> Plan:
    """Plan ways to hold a model until one fits, and return the fastest of those that do.

    Offloading is slower than all else, so that it is tried only where nothing else fits.

    Raises:
        BadInput: If none fits.
    """
    replicas = [] if wanted.shard != "hybrid" else ["hybrid"]
    on_gpu = [
        replace(wanted, shard=shard, checkpoint_activations=again, offload=frozenset())
        for shard in ("zero2", "full", *replicas)
        for again in (False, True)
    ]
    found = [plan for plan in map(planned, on_gpu) if plan[2].fits]
    least = 0
    for hosted in ({"optimizer"}, {"optimizer", "params"}) if not found else ():
        each = planned(
            replace(wanted, shard="full", checkpoint_activations=True, offload=frozenset(hosted))
        )
        if each[2].fits:
            return each
        least = each[2].needed_bytes
    if not found:
        raise BadInput(
            f"nothing fits the {card.memory_gib:g} GiB of {card.name}: offloaded and with "
            f"activations computed again a step still needs {least / GIB:,.1f} GiB; lower --batch "
            "or --seq, or take more --gpus"
        )
    return min(found, key=lambda plan: plan[2].step_seconds)


def code_of(scenario: Scenario) -> str:
    """Python that trains a `model` as a scenario says, on rows of a `loader` where it is private.

    `unison train` does not have all of it.
    """
    lines = ["import functools, torch, unison"]
    if scenario.lora:
        lines += ["import unison.plan", f"unison.plan.add_lora(model, {scenario.lora})"]
    options = [f"reshard_after_forward={scenario.shard != 'zero2'}", "gradient_divisor=1"]
    if scenario.shard == "hybrid":
        shape = scenario.replicas, scenario.world_size // scenario.replicas
        names = '("replicate", "shard")'
        mesh = f'torch.distributed.init_device_mesh("cuda", {shape}, mesh_dim_names={names})'
        options.append(f"mesh={mesh}")
    if scenario.precision == "bf16":
        options.append("mp_policy=unison.MixedPrecision(param=torch.bfloat16)")
    if scenario.offload:
        hosted = f"parameters={'params' in scenario.offload}"
        hosted += f", gradients={'grads' in scenario.offload}"
        options.append(f"offload_policy=unison.CPUOffload({hosted})")
    if scenario.checkpoint_activations:
        lines += [
            "for block in unison.shard.find_blocks(model):",
            "    block.forward = functools.partial(",
            "        torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False",
            "    )",
        ]
    lines.append(f"model = unison.auto_shard(model, {', '.join(options)})")
    if scenario.compiled:
        lines += ["for block in unison.shard.find_blocks(model):", "    block.compile()"]
    kind = "SGD" if scenario.kfac else "AdamW"
    lines += [
        "trained = [each for each in model.parameters() if each.requires_grad]",
        f"optimizer = torch.optim.{kind}(trained, lr=1e-3)",
    ]
    if scenario.kfac:
        lines.append("kfac = unison.KFAC(model, unison.KFACConfig(), optimizer)")
    if scenario.clipping is not None:
        lines += [
            "model, optimizer, loader = unison.PrivacyEngine().make_private(",
            "    module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0,",
            f"    max_grad_norm=1.0, clipping={scenario.clipping!r}, "
            f"max_physical_batch_size={scenario.rows},",
            ")",
        ]
    return "\n".join(lines)


def swept(text: str) -> list[int]:
    """Read the numbers of GPUs of --sweep.

    Raises:
        BadInput: If it is not `gpus=` and numbers above 0.
    """
    name, _, numbers = text.partition("=")
    parts = [each.strip() for each in numbers.split(",")]
    if name != "gpus" or not all(each.isdecimal() and int(each) > 0 for each in parts):
        raise BadInput(f"--sweep takes gpus=8,16,32 with numbers above 0, found {text!r}")
    return [int(each) for each in parts]


def show_sweep(screen: Console, plans: list[Plan], card: Gpu) -> None:
    """Print one line for each number of GPUs."""
    titles = ("GPUs", "tensors, GiB", "with margin", "step, s", card.name)
    table = plain_table(*titles, numbers=titles)
    for scenario, _, found in plans:
        table.add_row(
            str(scenario.world_size),
            f"{found.peak_bytes / GIB:,.2f}",
            f"{found.needed_bytes / GIB:,.2f}",
            f"{found.step_seconds:,.3f}",
            "fits" if found.fits else "does not fit",
        )
    screen.print(table)
    for line in assumptions(plans[0][0], card):
        screen.print(f"  {line}", style="dim")


def draw_sweep(plans: list[Plan], card: Gpu, path: Path) -> None:
    """Draw memory and step time against the number of GPUs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), layout="constrained")
    memory, seconds = figure.subplots(2, sharex=True)
    worlds = [scenario.world_size for scenario, _, _ in plans]
    memory.plot(worlds, [each.peak_bytes / GIB for _, _, each in plans], "o-", label="tensors")
    memory.plot(
        worlds, [each.needed_bytes / GIB for _, _, each in plans], "o-", label="with margin"
    )
    name = card.name.replace("$", r"\$")  # between two of them would be a formula
    memory.axhline(card.memory_gib, linestyle="--", color="grey", label=f" {name}")
    memory.set(ylabel="GiB on each GPU", ylim=(0, None))
    slowest = max(each.step_seconds for _, _, each in plans)
    memory.legend()
    seconds.plot(worlds, [each.step_seconds for _, _, each in plans], "o-")
    seconds.set(ylabel="seconds a step (estimate)", xlabel="GPUs", xscale="log")
    seconds.set_ylim(0, 1.1 * slowest)
    seconds.set_xticks([], minor=True)
    seconds.set_xticks(worlds, [str(each) for each in worlds])
    figure.savefig(path, dpi=120)


def find_model(
    name: str | None, preset_name: str | None, num_layers: int | None
) -> tuple[Callable[[], nn.Module], int, int | None]:
    """Return what builds the model, its vocabulary, and its longest row if that is known.

    Raises:
        BadInput: If there is no such model.
    """
    if (name is None) == (preset_name is None):
        raise BadInput("name one model: --preset, MODULE:FUNCTION or a config.json")
    if preset_name is not None:
        shape = {} if num_layers is None else {"num_layers": num_layers}
        config = preset(preset_name, **shape)
        return (lambda: build(config, device="meta")), config.vocab_size, config.context_length
    if num_layers is not None:
        raise BadInput("--num-layers is for a --preset; build your own model with as many")
    assert name is not None
    if name.endswith(".json"):
        return from_transformers(Path(name))
    if not all(name.partition(":")):
        raise BadInput(f"expected MODULE:FUNCTION or a config.json, found {name!r}")
    # `count_trained` looks whether it makes a model. Ids of 0 and 1 are in every vocabulary.
    return partial(built, name, imported(name)), 2, None


def built(name: str, make: Callable[[], nn.Module]) -> nn.Module:
    """Call what builds a user's model.

    Raises:
        BadInput: If it raises.
    """
    try:
        return make()
    except UnisonError:
        raise
    except (Exception, SystemExit) as error:
        raise BadInput(f"{name} cannot be built: {first_line(error)}") from error


def from_transformers(path: Path) -> tuple[Callable[[], nn.Module], int, int | None]:
    """Return what builds the model of a transformers config.

    That is the one of its `architectures`, or else the language model of its kind.

    Raises:
        BadInput: If there is none, or it takes something else than token ids.
    """
    try:
        import transformers
        from transformers.models.auto import modeling_auto
    except ImportError as error:
        raise BadInput("a config.json needs transformers: pip install transformers") from error
    if not path.is_file():
        raise BadInput(f"there is no file {path}")
    try:
        config = transformers.AutoConfig.from_pretrained(path)
    except Exception as error:
        told = first_line(error)
        raise BadInput(f"{path} is not the config of a transformers model: {told}") from error
    config.use_cache = False
    tables = ["CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM"]
    if not getattr(config, "is_decoder", False):  # BERT and its like may be used as either
        tables.reverse()
    names = [getattr(modeling_auto, f"MODEL_FOR_{each}_MAPPING_NAMES") for each in tables]
    names = [*(config.architectures or []), *(each.get(config.model_type) for each in names)]
    found = next((getattr(transformers, each) for each in names if each in dir(transformers)), None)
    has_decoder = found and "decoder_input_ids" in inspect.signature(found.forward).parameters
    if config.is_encoder_decoder and not has_decoder:  # a half of it would be planned
        found = None
    if not found or found.main_input_name != "input_ids":
        fed = f"its {found.__name__} takes {found.main_input_name}" if found else "it has none"
        raise BadInput(
            f"{path} is the config of {config.model_type!r}, and plans are of models that take "
            f"token ids and give logits: {fed}; build it in a function of yours, whose module "
            "makes such inputs itself, and give MODULE:FUNCTION"
        )

    def make() -> nn.Module:
        model = found._from_config(config)
        if has_decoder:
            own = model.forward
            model.forward = lambda ids: own(input_ids=ids, decoder_input_ids=ids)
        return model

    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None) or 0
    longest = longest if longest > 0 else None  # XLNet says -1
    return partial(built, str(path), make), getattr(text, "vocab_size", 2), longest


# ---- what is shown -------------------------------------------------------------------------------


def fits_on(found: Estimate) -> dict[str, bool]:
    """Whether the same step fits each of the GPUs that have names."""
    return {each.name: found.needed_bytes <= each.memory_gib * GIB for each in GPUS.values()}


def figures(
    plan: Plan, card: Gpu, spending: dict[str, float] | None, num_parameters: int
) -> dict[str, Any]:
    """Everything a plan says, as values that JSON can hold."""
    scenario, usage, found = plan
    return {
        "scenario": {**asdict(scenario), "offload": sorted(scenario.offload)},
        "parameters": num_parameters,
        "peak": {"place": usage.peak.place, "bytes": usage.peak.by_category},
        "places": [{"place": each.place, "bytes": each.total} for each in usage.peaks],
        "host_bytes": usage.host_bytes,
        "bytes_sent": [
            {"collective": kind, "ranks": size, "link": link_of(size, card), "bytes": num_bytes}
            for (kind, size), num_bytes in usage.bytes_sent.items()
        ],
        "flops": usage.flops,
        "gpu": asdict(card),
        "estimate": asdict(found) | {"fits": found.fits},
        "fits_on": fits_on(found),
        "budget": private_figures(spending, scenario, found),
        "assumptions": assumptions(scenario, card),
    }


def private_figures(
    spending: dict[str, float] | None, scenario: Scenario, found: Estimate
) -> dict[str, float] | None:
    """What a private run costs, with the time of all its steps."""
    if spending is None:
        return None
    hours = spending["steps"] * found.step_seconds * scenario.world_size / 3600
    return spending | {"gpu_hours": hours}


def plain_screen() -> Console:
    """A console that prints names as they are: a GPU's and a block's are the user's own text."""
    return Console(markup=False, emoji=False, highlight=False)


def counted(number: int, one: str, many: str = "") -> str:
    """A number of things, in words.

    >>> counted(1, "row"), counted(2, "row"), counted(0, "pass", "passes")
    ('1 row', '2 rows', '0 passes')
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def link_of(size: int, card: Gpu) -> str:
    """What a collective over so many ranks goes through."""
    return "inside a machine" if is_inside(size, card) else "between machines"


def show(
    screen: Console, plan: Plan, card: Gpu, spending: dict[str, float] | None, num_parameters: int
) -> None:
    """Print a plan for a person."""
    scenario, usage, found = plan
    peak = usage.peak
    kind = "private, " if scenario.clipping else ("K-FAC, " if scenario.kfac else "")
    kind += f"LoRA of rank {scenario.lora}, " if scenario.lora else ""
    kind += f"{scenario.shard}, {scenario.precision}, "
    kind += "compiled, " if scenario.compiled else ""
    kind += "activations computed again, " if scenario.checkpoint_activations else ""
    kind += f"{' and '.join(sorted(scenario.offload))} offloaded, " if scenario.offload else ""
    screen.print(
        f"{num_parameters:,} parameters on {counted(scenario.world_size, 'GPU')}: {kind}"
        f"{counted(scenario.rows, 'row')} of {counted(scenario.row_length, 'token')} on each GPU, "
        f"{counted(scenario.passes, 'pass', 'passes')} a step"
    )
    table = plain_table(f"memory at the peak, in {peak.place}", "GiB", numbers=["GiB"])
    for name in CATEGORIES:
        if peak.by_category.get(name):
            table.add_row(name, f"{peak.by_category[name] / GIB:,.3f}")
    table.add_row("all tensors", f"{peak.total / GIB:,.3f}", style="bold")
    table.add_row("with the safety margin", f"{found.needed_bytes / GIB:,.3f}")
    if usage.host_bytes:
        table.add_row("in the host's memory, for each GPU", f"{usage.host_bytes / GIB:,.3f}")
    screen.print(table)
    screen.print()
    table = plain_table("one step", "", numbers=[""])
    for (name, size), num_bytes in sorted(usage.bytes_sent.items()):
        if size > 1:
            label = f"{name} of {size}, {link_of(size, card)}: sent by each GPU"
            table.add_row(label, f"{num_bytes / GIB:,.4f} GiB")
    table.add_row("arithmetic of each GPU", f"{usage.flops / 1e12:,.2f} TFLOP")
    table.add_row("kernels of the GPU", f"{found.compute_seconds:,.3f} s")
    table.add_row("its host calling them, beside", f"{found.host_seconds:,.3f} s")
    if scenario.world_size > 1:
        table.add_row("collectives, beside", f"{found.network_seconds:,.3f} s")
    if scenario.offload:
        table.add_row("optimizer on the host", f"{found.update_seconds:,.3f} s")
    table.add_row("all together", f"{found.step_seconds:,.3f} s", style="bold")
    costs = private_figures(spending, scenario, found)
    if costs is not None:
        table.add_row("", "")
        table.add_row(
            f"private run: {counted(int(costs['num_rows']), 'row')}, {costs['batch_size']:,} a "
            f"step, {costs['epochs']:g} epoch{'' if costs['epochs'] == 1 else 's'}",
            counted(int(costs["steps"]), "step"),
        )
        table.add_row(f"ε at δ = {costs['delta']:g}", f"{costs['epsilon']:.4f}")
        table.add_row("noise multiplier σ", f"{costs['noise_multiplier']:.4f}")
        table.add_row("GPU-hours", f"{costs['gpu_hours']:,.1f}")
    screen.print(table)
    screen.print()
    verdict = "fits" if found.fits else "does not fit"
    screen.print(
        f"{verdict}: {found.needed_bytes / GIB:,.1f} GiB of the {card.memory_gib:g} GiB of "
        f"{card.name}",
        style="bold green" if found.fits else "bold red",
    )
    others = [
        f"{'fits' if is_enough else 'does not fit'} the {GPUS[name].memory_gib:g} GiB of {name}"
        for name, is_enough in fits_on(found).items()
        if GPUS[name] != card
    ]
    screen.print(f"the same step {', '.join(others)}")
    for line in assumptions(scenario, card):
        screen.print(f"  {line}", style="dim")
