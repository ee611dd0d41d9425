"""Private training by CUDA graphs: what `PrivacyEngine.capture_graph` returns."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unison.errors import BadInput
from unison.privacy.graph import LossOf
from unison.privacy.mechanism import Grid
from unison.privacy.running import LogicalBatch
from unison.privacy.step_graph import StepGraph
from unison.privacy.training import PrivateTraining


class RecordedPass:
    """Runs a recorded pass on batches of the loader; see `PrivacyEngine.capture_graph`."""

    def __init__(
        self,
        training: PrivateTraining,
        loss_of: LossOf,
        example: Sequence[Tensor],
        *,
        with_optimizer: bool,
    ) -> None:
        self._training = training
        self._step = StepGraph(training.optimizer, training.owned) if with_optimizer else None
        self._pass = training.record(loss_of, example)

    def __call__(self, *batch: Tensor) -> Tensor:
        """Run the pass on the batch in the user's hands, and return its loss."""
        training, recorded = self._training, self._pass
        current = training.loader.current
        if current is None:
            raise BadInput("expected a batch of the loader that make_private returned")
        running = training.running(current)
        if running.release.max_grad_norm != recorded.clip_norm:
            raise BadInput(
                f"the graph was recorded for max_grad_norm={recorded.clip_norm}, and this step has "
                f"{running.release.max_grad_norm}: record another"
            )
        release, size = running.release, current.logical_size
        grid = Grid.of_pass(release, size, recorded.num_rows)
        recorded.check(batch, grid)
        if current.is_last:
            training.check_trained()
            training.open_release(running)
        recorded.replay(batch, current.num_samples, grid)
        running.norms.append(recorded.norms[: current.num_samples].clone())
        first = current.first_position
        running.positions.append(torch.arange(first, first + current.num_samples))
        is_only = current.is_last and running.next_pass == 0
        own: Mapping[str, tuple[Tensor, Tensor]] = recorded.shares
        if not is_only:
            own = recorded.added(Grid.of(release, size), is_first=running.next_pass == 0)
        running.next_pass += 1
        if current.is_last:
            self._release(running, current.logical_size, own)
        return recorded.loss.clone()

    def _release(
        self, running: LogicalBatch, num_samples: int, own: Mapping[str, tuple[Tensor, Tensor]]
    ) -> None:
        """Noise, division, `.grad`; and the optimizer's step, if that is asked for."""
        training, step = self._training, self._step
        terms, releasing = training.terms(running, num_samples), training.releasing
        if step is not None and step.has_begun:
            training.release(running, num_samples, releasing.step(step, own, terms))
        else:
            training.release(running, num_samples, releasing.gradients(own, terms))
        if step is not None:
            if not step.has_begun:
                training.optimizer.step()
                step.has_begun = True
            training.commit(is_by_graph=True)
