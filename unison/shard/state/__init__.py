"""The state of sharded models: as one plain dictionary, or as a checkpoint of all ranks' parts."""
