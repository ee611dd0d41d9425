"""Recurrent networks as the linear maps they are made of, step by step.

Their fused kernels return no gradients of single steps. What goes in is multiplied for all steps at
once, what goes round at every step; uses of one matrix join on the token axis.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unison.ops.registry import Rule, Tap, rule

State = Sequence[Tensor]  # h, or h and c
Step = Callable[[Tensor, Tensor, State], State]  # gates from input and from state [batch, gates]


def lstm_step(from_input: Tensor, from_state: Tensor, state: State) -> State:
    """One step of an LSTM."""
    i, f, g, o = (from_input + from_state).chunk(4, dim=-1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru_step(from_input: Tensor, from_state: Tensor, state: State) -> State:
    """One step of a GRU."""
    r_in, z_in, n_in = from_input.chunk(3, dim=-1)
    r_state, z_state, n_state = from_state.chunk(3, dim=-1)
    r, z = (r_in + r_state).sigmoid(), (z_in + z_state).sigmoid()
    n = (n_in + r * n_state).tanh()
    return (n + z * (state[0] - n),)


def tanh_step(from_input: Tensor, from_state: Tensor, state: State) -> State:
    """One step of an Elman network."""
    return ((from_input + from_state).tanh(),)


def relu_step(from_input: Tensor, from_state: Tensor, state: State) -> State:
    """The same with a ReLU."""
    return ((from_input + from_state).relu(),)


def run_layer(
    tap: Tap,
    step: Step,
    x: Tensor,  # [time, batch, features], or [rows, features] of a packed sequence
    sizes: Sequence[int] | None,
    state: State,  # each [batch, hidden]
    weights: Sequence[Any],
    *,
    is_biased: bool,
    is_reversed: bool,
) -> tuple[Tensor, State]:
    """Run one direction of one layer.

    Args:
        tap: What the rule was given.
        step: The cell.
        x: What goes in.
        sizes: Of a packed sequence, how many sequences have not ended at each time; they are
            sorted, so that it is the first ones.
        state: What it starts with.
        weights: `w_ih, w_hh`, then `b_ih, b_hh` if biased, then `w_hr` if h is projected.
        is_biased: Whether it has biases.
        is_reversed: Whether time runs backwards.

    Returns:
        Outputs [time, batch, hidden], or [rows, hidden], and the last state.
    """
    w_ih, w_hh = weights[:2]
    b_ih, b_hh = weights[2:4] if is_biased else (None, None)
    projection = weights[4 if is_biased else 2 :]
    from_input = F.linear(x, w_ih, b_ih)  # [time, batch, gates * hidden]
    steps = from_input.unbind(0) if sizes is None else from_input.split(list(sizes))
    state = tuple(tap.align(each, steps[0]) for each in state)
    outputs: list[Tensor] = []
    for now in reversed(steps) if is_reversed else steps:
        rest: State = ()  # of sequences that have ended, or begin later
        if len(now) < len(state[0]):
            rest = tuple(each[len(now) :] for each in state)
            state = tuple(each[: len(now)] for each in state)
        state = step(now, F.linear(state[0], w_hh, b_hh), state)
        if projection:
            state = (F.linear(state[0], projection[0]), *state[1:])
        outputs.append(state[0])
        if rest:
            state = tuple(torch.cat(pair) for pair in zip(state, rest, strict=True))
    outputs = outputs[::-1] if is_reversed else outputs
    return torch.stack(outputs) if sizes is None else torch.cat(outputs), state


def network(step: Step) -> Rule:
    """The rule of all layers at once: outputs, and the last states as they came."""

    def run(tap: Tap, x: Any, hx: Any, *args: Any) -> Any:
        if tap.tracks(x):
            return NotImplemented
        sizes = None
        if isinstance(hx, Tensor) and not hx.is_floating_point():  # a packed sequence
            sizes, hx, args = hx.tolist(), args[0], args[1:]
        weights, is_biased, num_layers, dropout, is_training, is_bidirectional, *rest = args
        is_batch_first = bool(rest and rest[0])
        states = (
            (hx,) if isinstance(hx, Tensor) else hx
        )  # each [layers * directions, batch, hidden]
        x = x.transpose(0, 1) if is_batch_first else x  # [time, batch, features]
        num_directions = 2 if is_bidirectional else 1
        per_direction = len(weights) // (num_layers * num_directions)
        last: list[State] = []
        for layer in range(num_layers):
            outputs = []
            for direction in range(num_directions):
                place = len(last)
                own = weights[place * per_direction : (place + 1) * per_direction]
                state = tuple(each[place] for each in states)
                output, state = run_layer(
                    tap, step, x, sizes, state, own, is_biased=is_biased, is_reversed=direction == 1
                )
                outputs.append(output)
                last.append(state)
            x = torch.cat(outputs, dim=-1) if is_bidirectional else outputs[0]
            if layer + 1 < num_layers:
                x = F.dropout(x, dropout, is_training)
        output = x.transpose(0, 1) if is_batch_first else x
        return output, *(torch.stack(each) for each in zip(*last, strict=True))

    return run


def cell(step: Step) -> Rule:
    """The rule of one step."""

    def run(
        tap: Tap, x: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None
    ) -> Any:
        if tap.tracks(x):
            return NotImplemented
        state = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        from_input = F.linear(x, w_ih, b_ih)
        state = tuple(tap.align(each, from_input) for each in state)
        after = step(from_input, F.linear(state[0], w_hh, b_hh), state)
        return tuple(after) if len(after) > 1 else after[0]

    return run


rule(torch.lstm)(network(lstm_step))
rule(torch.gru)(network(gru_step))
rule(torch.rnn_tanh)(network(tanh_step))
rule(torch.rnn_relu)(network(relu_step))
rule(torch.lstm_cell)(cell(lstm_step))
rule(torch.gru_cell)(cell(gru_step))
rule(torch.rnn_tanh_cell)(cell(tanh_step))
rule(torch.rnn_relu_cell)(cell(relu_step))
