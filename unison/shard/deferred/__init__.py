"""Deferred initialisation: modules built without memory, filled where they end up."""

from unison.shard.deferred.api import materialize, meta_init, register_init

__all__ = ["materialize", "meta_init", "register_init"]
