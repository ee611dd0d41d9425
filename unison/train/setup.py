"""From settings to the objects of a run: model, rows, and every check that needs them."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from unison.config import Mechanism, TrainConfig
from unison.data import (
    RowDataset,
    Tokenizer,
    build_rows,
    open_corpus,
    open_tokenizer,
    unigram_entropy,
)
from unison.errors import BadInput
from unison.models import ModelConfig, preset
from unison.train.run_folder import check_free
from unison.train.world import World

MOST_EXACT = 1024  # outputs for which `unison.KFAC` goes through all labels


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a run, and the loss of the best model that ignores context.

    In a private run the latter is that of the held-out rows: of the others it would be a figure
    that no ε covers.
    """

    train: RowDataset
    eval: RowDataset
    unigram_entropy: float


def plan_model(mechanism: Mechanism) -> tuple[ModelConfig, int]:
    """Decide the model's config and the length of a row.

    Raises:
        BadInput: If the row does not fit the context, or the vocabulary the settings of K-FAC.
    """
    config = preset(mechanism.preset, **mechanism.overrides)
    row_length = mechanism.row_length or config.context_length
    if row_length > config.context_length:
        raise BadInput(
            f"a row of {row_length} tokens is longer than the context of {mechanism.preset!r}, "
            f"{config.context_length}; lower --row-length or raise --context-length"
        )
    _check_fisher(mechanism, config)
    return config, row_length


def _check_fisher(mechanism: Mechanism, config: ModelConfig) -> None:
    """Refuse to go through all labels of a large vocabulary.

    Raises:
        BadInput: With what to use instead.
    """
    is_exact = mechanism.kfac is not None and mechanism.kfac.fisher == "exact"
    if is_exact and config.vocab_size > MOST_EXACT:
        raise BadInput(
            f"--fisher exact sends a gradient back for each of {config.vocab_size:,} tokens of the "
            f"vocabulary, at most {MOST_EXACT:,}; use --fisher mc, which draws one"
        )


def fitting_tokenizer(mechanism: Mechanism, config: ModelConfig) -> Tokenizer:
    """Open the tokenizer and check that the model's vocabulary holds it."""
    tokenizer = open_tokenizer(mechanism.tokenizer)
    if tokenizer.vocab_size > config.vocab_size:
        raise BadInput(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the vocabulary of "
            f"{mechanism.preset!r} holds {config.vocab_size}; add "
            f"--vocab-size {tokenizer.vocab_size}"
        )
    return tokenizer


@contextmanager
def open_rows(
    mechanism: Mechanism, config: ModelConfig, row_length: int, world: World
) -> Iterator[Rows]:
    """Tokenise the corpus once per machine and open its rows on every rank.

    The tokens lie in a private temporary folder that is gone when the run is over: protected text
    is not copied to a place where nobody expects it.
    """
    with ExitStack() as stack:

        def tokenise() -> tuple[int, str]:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="unison-rows-"))
            build_rows(
                open_corpus(mechanism.data, text_field=mechanism.text_field, seed=mechanism.seed),
                fitting_tokenizer(mechanism, config),
                row_length=row_length,
                layout=mechanism.layout,
                directory=folder,
                eval_fraction=mechanism.eval_fraction,
                seed=mechanism.seed,
                long_documents=mechanism.long_documents,
            )
            return world.node, folder

        made = world.agree(tokenise, when=world.local_rank == 0)
        folder = dict(entry for entry in made if entry is not None)[world.node]
        train, held_out = RowDataset.open(folder, "train"), RowDataset.open(folder, "eval")
        known = train if mechanism.privacy is None else held_out
        yield Rows(train=train, eval=held_out, unigram_entropy=unigram_entropy(known))
        world.agree(lambda: None)  # nobody removes the folder under another rank's feet


def check_before_launch(config: TrainConfig) -> None:
    """Find what is wrong with the input cheaply, before any process is started.

    Raises:
        BadInput: If the folder, the data, the tokenizer or the model cannot be what was asked for.
    """
    config.check_privacy()
    config.check_kfac()
    mechanism = config.mechanism
    if not config.output.resume:
        check_free(Path(config.output.folder), overwrite=config.output.overwrite)
    model_config, _ = plan_model(mechanism)
    fitting_tokenizer(mechanism, model_config)
    open_corpus(mechanism.data, text_field=mechanism.text_field, seed=mechanism.seed)
