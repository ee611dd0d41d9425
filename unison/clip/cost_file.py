"""What methods took on a device, in a small file: timed once per GPU and version.

A file holds what it was made by (GPU, versions, kernels), and seconds by kind of layer and by part.
It is a cache: whatever is wrong with it is said, and then it counts as empty.
"""

import json
import math
import os
import tempfile
import warnings
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

FORMAT = 1
FOLDER_VARIABLE = "UNISON_CACHE_DIR"

Seconds = dict[str, dict[str, float]]
"""By kind of layer, by part."""


def cache_folder() -> Path:
    """Return where caches lie: `UNISON_CACHE_DIR`, or `unison` in the user's cache folder."""
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named)
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "unison"


class CostFile:
    """One file for one GPU and set of versions.

    Args:
        folder: Where it lies; made when something is written.
        made_by: What seconds depend on beside shapes: another value is another file.
    """

    def __init__(self, folder: Path, made_by: Mapping[str, str]) -> None:
        self.made_by = dict(made_by)
        digest = sha256(json.dumps(self.made_by, sort_keys=True).encode()).hexdigest()
        self.path = folder / f"clipping-costs-{digest[:16]}.json"

    def read(self) -> Seconds:
        """Return what the file holds: nothing, if there is none or it cannot be used."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        except (OSError, UnicodeDecodeError) as error:
            self._warn(f"cannot be read ({error})")
            return {}
        try:
            return self._seconds(json.loads(text))
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            self._warn(f"is not what was written ({type(error).__name__}: {error})")
            return {}

    def add(self, seconds: Mapping[str, Mapping[str, float]]) -> None:
        """Add kinds of layers to the file; what another process has added meanwhile stays."""
        known = self.read() | {kind: dict(each) for kind, each in seconds.items()}
        content = {"format": FORMAT, "made_by": self.made_by, "seconds": known}
        written: str | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # A reader sees the old file or the new one, and never a part of it.
            handle, written = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1, sort_keys=True)
            os.replace(written, self.path)
        except OSError as error:
            if written is not None:
                Path(written).unlink(missing_ok=True)
            self._warn(f"cannot be written ({error}): methods are timed again in the next run")

    def _seconds(self, content: Any) -> Seconds:
        """Return the seconds of a file's content.

        Raises:
            ValueError: If it was not made by the same, or holds what seconds cannot be.
        """
        if content["format"] != FORMAT or content["made_by"] != self.made_by:
            raise ValueError(f"made by {content['made_by']}, expected {self.made_by}")
        found: Seconds = {}
        for kind, parts in content["seconds"].items():
            found[kind] = {str(part): float(value) for part, value in parts.items()}
            if not all(math.isfinite(value) and value > 0 for value in found[kind].values()):
                raise ValueError(f"seconds of {kind!r}: {parts}")
        return found

    def _warn(self, what: str) -> None:
        warnings.warn(
            f"the cache of clipping costs {self.path} {what}. It is not used; "
            f"{FOLDER_VARIABLE} names another folder",
            RuntimeWarning,
            stacklevel=4,
        )
