"""The list: what a wrong central line would look like, by package.

A name that moves to another file keeps its mutants; one that is renamed, or a line that is written
anew, needs its entry to follow (`test_mutants.py` says which).
"""

from tests.mutants.places import Mutant

_OPS = [
    ("of_kernel", "reversed(padding)", "padding"),
    ("_padding", "total - total // 2", "total // 2"),
    ("of_channels", ".sum(dim=2)", ".mean(dim=2)"),
    ("of_gain", "normalise(wide(x))", "wide(x)"),
    ("of_divisor", "-wide(g) * x", "wide(g) * x"),
    ("of_subtracted", "-wide(g)", "wide(g)"),
    ("of_chosen", "condition.logical_not()", "condition"),
    ("_without", "padding % shape[0]", "padding"),
    ("of_bags", "right=True", "right=False"),
    ("of_bags", "each / sizes.clamp(min=1)[bags]", "each / sizes.clamp(min=len(ids))[bags]"),
    ("rows_by_id", "index.remainder(len(tap.plain(table)))", "index"),
    ("embedding", "max_norm is not None or scale_grad_by_freq", "max_norm is not None"),
    ("addmm", "beta != 1 or ", ""),
    ("of_experts", "right=True", "right=False"),
    ("multi_head_attention", "dropout_p if training else 0.0", "dropout_p"),
    ("Layout.rows", "value.movedim(self.axis, 0).reshape", "value.reshape"),
    ("Layout.check_nobodys", "self.index == NOBODY", "self.index < NOBODY"),
    ("per_sample", "torch.where(counts, wide(record.g), 0.0)", "wide(record.g)"),
    ("in_rows", "record.ids + start", "record.ids"),
    ("part_of", "ids = record.ids - start", "ids = record.ids"),
    ("gru_step", "z * (state[0] - n)", "z * (n - state[0])"),
]
_CAPTURE = [
    ("_Tap.forward", "output.clone()", "output"),
    ("refuse_gradient", "gradient is not None", "False"),
    ("OperationUse.records", "layout.check_nobodys(g)", "pass"),
    ("RowResults.differs", "bool(differ[kept].any())", "False"),
    ("RowResults.differs", "differ[:, kept]", "differ[:, ~kept]"),
    ("_differ", "<= tolerance", "<= tolerance + 1.0"),
    ("_add_sketch", "+= values", "= values"),
    ("MixingCheck.report", "self._parameters_written(rows)", "None"),
    ("MixingCheck._compare", "base.differs(other, kept, tolerance)", "None"),
    ("MixingCheck._compare", "remembered is not None", "False"),
    ("MixingCheck._compare", "in written & of_data", "in set()"),
    ("MixingCheck._compare_sizes", "self.agree(has_drawn) or", "True or"),
    ("MixingCheck._compare_draws", "first.differs(second, kept, tolerance)", "None"),
    ("with_others", "torch.where(_rowwise(kept, leaf), leaf, other)", "leaf"),
    ("combined", "(left == right), left, MIXED", "(left == right), left, left"),
    ("reduced", "torch.where(low == high, high, MIXED)", "high"),
    ("RecomputeQueue.check", "not torch.equal(then, now)", "False"),
    ("buffers_unchanged", "each._version != version", "False"),
]
_CLIP = [
    ("flat", "upper.clamp(min=max_norm)", "upper"),
    ("flat", "norms.upper.sqrt()", "norms.upper"),
    ("flat", "* _MARGIN", "* 0.999"),
    ("automatic", "(upper + gamma)", "upper"),
    ("per_layer", "math.sqrt(max(1, count))", "1.0"),
    ("per_group", ".where(is_finite, 0.0)", ""),
    ("total_sensitivity", "bound**2", "bound"),
    ("_is_finite", "< math.inf", "<= math.inf"),
    ("NormTable.scaled", "self.upper * factor**2", "self.upper * factor"),
    ("NormTable.total", "self.upper.sum(0)", "self.upper.amax(0)"),
    ("bounded", "norm + rho * total_mass", "norm"),
    ("tile_squared_norms", "total[samples] += tile", "total[samples] = tile"),
    ("materialize", "part.zero_()", "part.fill_(0.01)"),
    ("rank_one_squared_norms", "a.square().sum(-1) *", "a.square().sum(-1) +"),
    ("_of_products", "(1 if i == j else 2)", "1"),
    ("_squared_norms", "2 * _lookup_product(", "_lookup_product("),
    ("_squared_norms", "2 * _dense_product(", "_dense_product("),
    ("lookup_squared_norms", "!= in_order[:, :-1]", "!= in_order[:, 1:]"),
    ("lookup_squared_norms", "(ids < 0)", "(ids < -1)"),
    ("_add_product", ".mul_(c.view(-1, 1, 1))", ""),
    ("_add_lookup", "(ids < 0)", "(ids < -1)"),
    ("_selected", "is_out = coefficients == 0", "is_out = coefficients < 0"),
    ("Grid.weights", "coefficients / self.spacing", "coefficients * self.spacing"),
]
_PRIVACY = [
    ("PrivateTraining.coefficients", "each.where(is_real, 0.0)", "each"),
    ("PrivateTraining.coefficients", "each * factor", "each"),
    ("PrivateTraining.coefficients", ".scaled(factor)", ""),
    (
        "PrivateTraining.add_sums",
        """running = self._open(sums)
        # Where a pass is all there is of its logical batch, nothing is to be added.
        is_all = batch.is_last and running.next_pass == 0 and self.owner.is_alone
        own = sums.shares() if is_all and takes(*self._parameters.values()) else None
        if own is None:
            granules = [part.granule for part in self._dealing.parts]
            make_sums, dtype = self._maker_of(sums)
            self.owner.add(make_sums, plan, granules, dtype)
""",
        """running = self.running(batch)
        # Where a pass is all there is of its logical batch, nothing is to be added.
        is_all = batch.is_last and running.next_pass == 0 and self.owner.is_alone
        own = sums.shares() if is_all and takes(*self._parameters.values()) else None
        if own is None:
            granules = [part.granule for part in self._dealing.parts]
            make_sums, dtype = self._maker_of(sums)
            self.owner.add(make_sums, plan, granules, dtype)
        self._open(sums)
""",
    ),
    ("PrivateTraining.open_release", "self.ledger.intend(running.release)", "pass"),
    ("PrivateTraining.terms", "release.expected_batch_size if", "num_samples if"),
    ("PrivateTraining.commit", "self.ledger.commit(self._uncommitted)", "pass"),
    ("PrivateTraining.release", "<= release.max_grad_norm", ">= release.max_grad_norm"),
    ("finalise", "release.noise_std > 0", "False"),
    ("finalise", ".div_(divisor)", ""),
    ("recipes_for", "secure_floats(std,", "secure_floats(std / 2,"),
    ("noisy_count", "on_grid + noise", "on_grid"),
    ("Release.noise_std", "self.noise_multiplier * self.max_grad_norm", "self.noise_multiplier"),
    (
        "Release.effective_noise_multiplier",
        "self.noise_multiplier / self.sensitivity_factor",
        "self.noise_multiplier",
    ),
    ("Release.effective_noise_multiplier", "0.5 / self.count_noise_multiplier", "0.0"),
    ("sensitivity_factor", "math.sqrt(rounded_elements)", "1"),
    ("Mechanism.begin", "self._current is not None", "False"),
    ("_finest", "exponent - 30", "exponent - 33"),
    ("grid_of", "finer <= spacing * FINER", "finer <= spacing"),
    ("Ledger.intend", "self.spending.add(release)", "pass"),
    ("Ledger.intend", "release.step <= self._last_step", "release.step < self._last_step"),
    ("Ledger._append", '"previous": self.head.sha256', '"previous": "0" * 64'),
    ("Ledger._append", "os.fsync(self._descriptor)", "pass"),
    ("Spending.add", "self.num_seeded += self._is_seeded", "pass"),
    ("Spending.add", "release.effective_noise_multiplier,", "release.noise_multiplier,"),
    ("Spending._add_shuffled", "z < begun.noise_multiplier", "False"),
    ("Spending._add_shuffled", "step <= begun.last_step", "False"),
    ("BudgetGuard.check", "trial.add(upcoming(step))", "pass"),
    ("BudgetGuard._fits", "<= self.budget.epsilon", "<= 2 * self.budget.epsilon"),
    ("AdaptiveClipping.updated", "-self.learning_rate", "self.learning_rate"),
    ("noisy_fraction", "+ 0.5", ""),
    ("require_given", " or gradient is not own()", ""),
    ("BatchDealer.loss_factor", "max(1, self.plan.num_samples)", "max(1, part.num_rows)"),
    (
        "Draws.records",
        "priorities.argsort(stable=True)[: sampling.capacity]",
        "slice(sampling.capacity)",
    ),
    ("cut_passes", "each * num_granules // num_ranks", "num_granules // num_ranks * each"),
    ("PrivateLoader._hand_out", "each.step + 1", "each.step"),
    ("GroupSums._add", "before.add_(part.view(-1))", "before"),
    ("LossCheck.judge", "_refuse_reads(program)", "pass"),
    ("LossCheck.judge", "_refuse_changed(*known, rows.num_rows, numbers)", "pass"),
    ("LossCheck._refuse_uneven", "counts != counts[0]", "counts != counts"),
]
_SHARD = [
    ("FastReducer.__init__", "like.new_zeros(", "like.new_ones("),
    ("FastReducer.take", "used or gradient is not None", "gradient is not None"),
    ("FastReducer.finish", "self._axes.replicas.sum_(self._gradient)", "pass"),
    ("OrderedReducer.put", "granule < self._mine[1]", "granule <= self._mine[1]"),
    ("SubtreeSum.fill", "set(range(self._low, self._high)) - self.seen", "()"),
    ("OrderedReducer._across_replicas", "padded.view(replicas.size, width)", "padded[:width]"),
    ("SubtreeSum.take", "item[0][1] << item[0][0]", "item[0]"),
    ("tree_sum", "== stack[-2][0]", "<= stack[-2][0]"),
    ("plan_batch", "rank * num_granules // ranks.size", "num_granules // ranks.size * rank"),
    ("plan_batch", "index == num_passes - 1", "index == 0"),
    ("BatchPlan.sample_ids", "(ids < self.num_samples) & ", ""),
    ("_BatchMean.forward", "weight / count", "weight"),
    ("_BatchMean.forward", "torch.where(weights > 0, flat.double(), 0.0)", "flat.double()"),
    ("sum_over_granules", "plan.ranks.sum_(slots.add_(0.0))", "pass"),
    ("_check_same_batch", "not same_on_every_rank(", "None is same_on_every_rank("),
    ("_map", "of_granule(index, draws)", "of_granule(0, draws)"),
    ("FlatLayout.pieces", "(rank + 1) * length", "(rank + 1) * length - 1"),
    (
        "FlatLayout.shard_length",
        "aligned(-(-self.length // world_size), self.alignment)",
        "-(-self.length // world_size)",
    ),
    ("FlatGroup.start_gather", "self.is_alias or self.gathered_versions == versions", "True"),
    ("FlatGroup.start_gather", "self._kept.get(versions)", "[*self._kept.values(), None][0]"),
    ("Unit.finish_reduce", "torch._foreach_div_(present, self.options.gradient_divisor)", "pass"),
    ("Unit.give_unused", "(group, slot) in used_by_any", "True"),
    ("clip_grad_norm_", ".clamp(max=1.0)", ""),
    ("_nodes", "sorted(nodes, key=lambda node: node[0])", "nodes"),
]
_RNG = [
    ("open_sealed_key", "made_for.hex() != data", "False"),
    ("Key.check_process", "os.getpid() != self._process", "False"),
    ("NoiseClock.advance", "step <= last", "step < last"),
    ("Stream.__post_init__", "self.name, self.step", "self.name, 0"),
    ("Stream.__post_init__", "self.purpose, self.name", "self.name, self.name"),
    ("words_of_streams", "name, step, size", "name, 0, size"),
    ("Box.rows", "dtype=torch.int64) * stride", "dtype=torch.int64)"),
    ("noise_spacing", "- (mantissa == 0.5)", ""),
    ("round_to_grid", "scaled.abs() < 2.0**51", "scaled.abs() < 2.0**60"),
    ("add_noise_", "round_to_grid(part, spacing) +", "part.double() +"),
    ("secure_normal", "stream.cipher is not Cipher.CHACHA20", "False"),
    ("poisson_sample", ".view(-1) + at", ".view(-1)"),
    ("limit_and_scale", "1.0 / (1.0 - p)", "1.0"),
    ("limit_and_scale", "int(p * 2.0**63)", "int((1 - p) * 2.0**63)"),
    ("drop_rows", "own * positions, positions", "own, positions"),
    ("BatchDraws.words", "(last + number)", "last"),
    ("BatchDraws.seed", "self.step, sample", "self.step, 0"),
    ("BatchDraws.next_number", "return self.counts[is_shared] - 1", "return 0"),
    ("samples_dim", "shape[0] % num_rows == 0", "shape[0] == num_rows"),
    ("attend_whole", ".triu(1)", ".triu(0)"),
    ("Permutation.__init__", "half + half % 2", "half"),
]
_KFAC = [
    ("update_layers", "max(num_tokens, 1)", "num_labels"),
    ("LayerState._add_columns", "* self._decay**0.5", "* self._decay"),
    ("join", "(kept - tail)", "kept"),
    ("_by_softmax", "(part / d) @ part.T", "part @ part.T"),
    ("PartSums.take_head", "p.sum(dim=0).diag() - _gram(p)", "p.sum(dim=0).diag()"),
    ("blocks_of", "block[:, : len(block)]", "block[: len(block), : len(block)] * 2"),
    ("ring_factor", "(wide @ sent.T) @ sent", "wide * 0"),
    ("Graft.uncount", "self._counts[name] -= 1", "pass"),
    ("update_layers", "decay * state._weight + (1 - decay)", "1.0"),
    ("update_layers", "torch._foreach_mul_(before, group[0][0]._decay)", "pass"),
    ("token_rows", " / lengths.clamp(min=1)", ""),
    ("PartSums._ones_of_bias", "ones.unsqueeze(-1)", "torch.ones_like(ones).unsqueeze(-1)"),
    ("_counted", "torch.where(weights.unsqueeze(-1), value, 0.0)", "value"),
    ("token_weights", "any_of[:, None]", "all_of[:, None]"),
    ("diagonal_sums", "gradients.square().sum(dim=0)", "gradients.sum(dim=0).square()"),
    ("_squared_rows", "of_key.square()", "of_key"),
    ("_dampings", "(mean_a / mean_g) ** 0.5", "(mean_a / mean_g)"),
    ("_dampings", "on_g / pi", "on_g * pi"),
    ("_least_damping", "(most - 1)", "most"),
    (
        "_of_diagonals",
        "torch._foreach_add(list(diagonals.values()), added)",
        "torch._foreach_add(list(diagonals.values()), 0.0)",
    ),
    ("_by_eigen", "products + joint", "products"),
    (
        "_by_eigen",
        'values["g"][:, None] * values["a"][None, :]',
        'values["g"][:, None] + values["a"]',
    ),
    ("_try", "damping + jitter", "jitter"),
    ("Graft._foreach", "1 - self._beta1**count", "1.0"),
    ("Preconditioner._stretch", "wanted / lengths.clamp(min=1e-300)", "wanted"),
    ("_draw_categorical", "gradient.new_full((), -1.0)", "gradient.new_full((), 0.0)"),
    ("_categorical_column", "column[..., c : c + 1].sqrt()", "column[..., c : c + 1].clone()"),
    ("_draw_bernoulli", "(u < p)", "(u > p)"),
    ("drawn_classes", "place - (below - sums).gather", "place - below.gather"),
    ("PartSums.end_column", "self._is_first = False", "pass"),
    ("KFAC._update_factors", "+= part.num_terms", "+= 1"),
    ("unpacked", "upper.triu(diagonal=1).T", "upper.triu(diagonal=0).T"),
    ("assign", "busy + costs[index]", "busy"),
    ("OwnerSums.take", "before.add_(vector)", "before"),
    ("KFAC._clip", "(bound / change) ** 0.5", "(bound / change)"),
    ("KFAC._is_due", "self.num_steps - last >=", "self.num_steps - last >"),
]
BY_PACKAGE = {
    "ops": _OPS,
    "capture": _CAPTURE,
    "clip": _CLIP,
    "privacy": _PRIVACY,
    "shard": _SHARD,
    "rng": _RNG,
    "kfac": _KFAC,
}
MUTANTS = [Mutant(*each) for of_package in BY_PACKAGE.values() for each in of_package]

SURVIVORS: dict[tuple[str, str], str] = {
    ("PartSums.end_column", "self._is_first = False"): (
        "products of the inputs are then added once per column, and divided by as many more tokens"
    ),
}
"""(function, fragment) of mutants that may live, and why."""
