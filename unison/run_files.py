"""What the files of a run's folder are called and hold, and their one reader.

Training writes them; going on with a run, `unison verify runs` and `unison account` read them back.
Whatever is wrong with one is said as one sentence that names the file and the field.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from unison.config import TrainConfig
from unison.errors import BadInput, CheckpointFailed
from unison.schema import build, cut, is_a, parse, read_bytes, read_json, short

CONFIG_FILE = "config.json"
RESULT_FILE = "result.json"
METRICS_FILE = "metrics.jsonl"
CURVE_FILE = "loss.png"
ENVIRONMENT_FILE = "environment.json"
PARAMETERS_FILE = "model.safetensors"
CHECKPOINTS_FOLDER = "checkpoints"
COUNTERFACTUAL_FILE = "counterfactual.json"  # marks a model that no training gave
_TENSOR = "__tensor__"  # marks the place of one in a state that `write_state` wrote


@dataclass(frozen=True, kw_only=True)
class SavedConfig(TrainConfig):
    """What config.json holds: the settings with which the run began, and what they came to.

    Attributes:
        model: Fields of the model's config.
        fingerprint: What the bits depend on besides; see `unison.fingerprint`.
        rows: What is known of the data, to notice that it changed.
        launch: What torchrun calls the job that began the run; None without one. Its ranks may be
            started again, and then go on.
    """

    model: dict[str, Any]
    fingerprint: dict[str, Any]
    rows: dict[str, Any]
    launch: str | None = None


def read_config(run: Path) -> SavedConfig:
    """Read the settings of a run.

    Raises:
        BadInput: If the file is missing or damaged, or the unison of another version wrote it.
    """
    path = run / CONFIG_FILE
    saved = build(SavedConfig, read_json(path), path)
    for name, value in saved.mechanism.overrides.items():
        if saved.model.get(name) != value:
            raise BadInput(
                f"{path}: mechanism.overrides.{cut(name)} is {short(value)}, but the model's is "
                f"{short(saved.model.get(name))}"
            )
    return saved


Metrics = dict[str, Any]
"""One record: its `step`, and numbers by name."""


def read_metrics(run: Path, *, until: int | None = None) -> list[Metrics]:
    """Read the records of a run.

    Args:
        run: The folder.
        until: The last step that counts, for a run that may have been cut short: later records are
            left out, and so is a last line that has no end.

    Raises:
        BadInput: If the file is missing or damaged.
    """
    path = run / METRICS_FILE
    lines = read_bytes(path).split(b"\n")
    end = lines.pop()
    if until is None and end:
        lines.append(end)
    found = []
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        record = build(dict[str, float | None], parse(line, where), where)
        step = record.get("step")
        if step is None or not (step >= 0 and step.is_integer()):
            raise BadInput(f"{where}: step must be a whole number, found {short(step)}")
        record["step"] = int(step)
        if until is None or step <= until:
            found.append(record)
    return found


@dataclass(frozen=True, kw_only=True)
class PrivacyResult:
    """What a private run applied and spent. All of it is public.

    Attributes:
        epsilon: ε of everything that the ledger counts; infinite if the key came from a seed.
        epsilon_if_secret: What it would be under a secret key, which is what a budget bounds.
        delta: The δ it is taken at.
        accountant: Whose bound it is.
        target_epsilon: ε that the noise was chosen for; None if the noise was given.
        noise_multiplier: σ.
        max_grad_norm: C.
        clip_rule: How gradients were brought below C.
        sampling: How rows were drawn, in words.
        batch_size: Rows that a step draws, as expected.
        num_rows: Rows to draw from; each is one record.
        num_counted: Steps that the ledger counts, repeated ones included.
        is_secure: Whether noise and sampling came from a secret key.
        budget_sentence: Why the run ended before its last step, if the budget did that.
        ledger: The file.
    """

    epsilon: float
    epsilon_if_secret: float
    delta: float
    accountant: str
    target_epsilon: float | None
    noise_multiplier: float
    max_grad_norm: float
    clip_rule: str
    sampling: str
    batch_size: int
    num_rows: int
    num_counted: int
    is_secure: bool
    budget_sentence: str | None
    ledger: str


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a run came to. Losses are in nats per token, before the first and after the last step.

    `train_loss_*` and `eval_loss_*` are both measured on fixed rows, with the same code.
    `unigram_entropy` is the loss of the best model that ignores context. `digest` is one hash of
    all parameters; with the ordered reducer it does not depend on the number of ranks. `steps` are
    those that were taken. `privacy` is what a private run applied and spent; its `train_loss_*` are
    None unless unsafe diagnostics were asked for.
    """

    folder: str
    preset: str
    parameters: int
    world_size: int
    shard: str
    reducer: str
    digest: str
    steps: int
    train_loss_before: float | None
    train_loss_after: float | None
    eval_loss_before: float
    eval_loss_after: float
    unigram_entropy: float
    tokens_per_second: float
    seconds: float
    privacy: PrivacyResult | None = None

    def published(self, config: TrainConfig) -> "TrainResult":
        """The same without what must not leave the terminal."""
        if self.privacy is None or config.output.unsafe_diagnostics:
            return self
        return replace(self, train_loss_before=None, train_loss_after=None)

    def to_fields(self) -> dict[str, Any]:
        """The result as values that JSON can hold; it has no number for infinity."""
        found = asdict(self)
        if self.privacy is not None and self.privacy.epsilon == math.inf:
            found["privacy"]["epsilon"] = "inf"
        return found


def read_result(run: Path) -> TrainResult:
    """Read what a run came to.

    Raises:
        BadInput: If the file is missing or damaged, or the unison of another version wrote it.
    """
    saved = read_json(run / RESULT_FILE)
    privacy = saved.get("privacy") if is_a(saved, dict) else None
    if isinstance(privacy, dict) and privacy.get("epsilon") == "inf":
        privacy["epsilon"] = math.inf
    return build(TrainResult, saved, run / RESULT_FILE)


# ---- nested state in one file: safetensors, with the rest as JSON in their metadata --------------


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state of dictionaries, lists, plain values and tensors on the CPU.

    Raises:
        CheckpointFailed: If it could not be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}

    def taken_out(value: Tensor) -> dict[str, Any]:
        name = str(len(tensors))
        tensors[name] = value.detach().contiguous()
        return {_TENSOR: name, "strides": list(value.stride())}

    metadata = {"state": json.dumps(tree_map_only(Tensor, taken_out, state))}
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:  # what it makes of a full disk
        raise CheckpointFailed(f"{path} could not be written: {error}") from error


def read_state(path: Path) -> dict[str, Any]:
    """Read what `write_state` wrote.

    Raises:
        BadInput: If it is no such file.
    """
    from safetensors import SafetensorError, safe_open

    def is_tensor(value: Any) -> bool:
        return isinstance(value, dict) and _TENSOR in value

    def put_back(value: Any) -> Any:
        if not is_tensor(value):
            return value
        found = tensors[value[_TENSOR]]
        placed = torch.empty_strided(found.shape, value["strides"], dtype=found.dtype)
        return placed.copy_(found)

    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            state = parse((file.metadata() or {}).get("state", ""), path)
        return tree_map(put_back, state, is_leaf=is_tensor)
    except BadInput:
        raise
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise BadInput(f"{path} is damaged: {cut(str(error))}") from None
