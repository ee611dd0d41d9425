"""The ledger on several ranks: the first one writes it, and all of them count."""

import json
import os

import torch
import torch.distributed as dist

from unison.errors import BadInput
from unison.privacy.ledger import DataSalt, Ledger, commit_to_data
from unison.privacy.ledger_file import Session
from unison.privacy.mechanism import Mechanism
from unison.shard.digest import fingerprint
from unison.shard.ranks import Ranks
from unison.shard.sharded_tensor import show_shards

__all__ = ["Ranks", "fingerprint", "open_on_ranks", "show_shards"]


def open_on_ranks(
    path: str | os.PathLike[str] | None,
    mechanism: Mechanism,
    accountant: str,
    ranks: Ranks,
    session: Session,
    *,
    data_salt: DataSalt | None = None,
    data_id: str | None = None,
) -> Ledger:
    """Open the ledger on the first rank, and copies of what it holds on the others; a collective.

    All ranks know what was spent, so that they decide alike whether a step fits the budget.

    Args:
        path: The file; only the first rank touches it.
        mechanism: What the session applies.
        accountant: The accountant.
        ranks: The ranks that train together.
        session: What the session says of itself.
        data_salt: See `commit_to_data`; only the first rank looks at it.
        data_id: The same.

    Raises:
        BadInput: On every rank, if the first one cannot open the file.
    """
    ledger, error = None, ""
    if ranks.rank == 0:
        try:
            session = commit_to_data(session, salt=data_salt, data_id=data_id, ledger=path)
            ledger = Ledger.open(path, mechanism=mechanism, accountant=accountant, session=session)
        except Exception as found:
            if ranks.size == 1:
                raise
            error = str(found)
    if ranks.size == 1:
        assert ledger is not None
        return ledger
    state = {"error": error} if ledger is None else ledger.state_dict()
    told = [json.dumps(state) if ranks.rank == 0 else ""]
    dist.broadcast_object_list(told, group=ranks.group, group_src=0, device=device_of(ranks))
    state = json.loads(told[0])
    if "error" in state:
        raise BadInput(f"the first rank could not open the ledger: {state['error']}")
    if ledger is None:
        ledger = Ledger.open(None, mechanism=mechanism, accountant=accountant, session=session)
        ledger.load_state_dict(state)
        ledger.is_copy = not state["is_in_memory"]
    return ledger


def device_of(ranks: Ranks) -> torch.device:
    """Where small objects must be to go over the ranks' network."""
    is_nccl = dist.get_backend(ranks.group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")
