"""The ordered reducer for models under torch's own FSDP2."""

from unison.shard.fsdp2.attach import stop_ordered_reduction, use_ordered_reduction

__all__ = ["stop_ordered_reduction", "use_ordered_reduction"]
