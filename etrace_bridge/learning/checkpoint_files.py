"""The two files of a checkpoint: written, replaced as one, and checked when they are read.

The weights file contains the name and the SHA-256 of its state file; each save gives the state file
a new name. Replacing the weights file, one atomic rename, turns the old checkpoint into the new
one. A process that is killed before or after it leaves one of them intact. Each file also contains
its own SHA-256 and a list of its arrays (`checkpoint_packing`).
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from etrace_bridge._errors import CheckpointError, InputError
from etrace_bridge.learning.checkpoint_packing import SUFFIX, Tensors, pack, read_metadata, unpack

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK_SECONDS = 30.0
READ_ATTEMPTS = 10


def weights_file(path: str | os.PathLike) -> Path:
    """Return the path of the weights file: `path`, with `.safetensors` added if it is missing."""
    path = Path(path)
    if path.is_dir():
        return path / f"model{SUFFIX}"
    return path if path.suffix == SUFFIX else path.with_name(path.name + SUFFIX)


# -- packing --------------------------------------------------------------------------------------


# -- writing --------------------------------------------------------------------------------------


def write_checkpoint(
    path: str | os.PathLike, weights: Tensors, arrays: Tensors, facts: Mapping[str, Any]
) -> Path:
    """Write both files; return the path of the weights file.

    If this raises, the checkpoint that was there before is intact.
    """
    target = weights_file(path)
    stem = target.name.removesuffix(SUFFIX)
    state = target.with_name(f"{stem}.{secrets.token_hex(4)}.state{SUFFIX}")
    passing = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    rest = pack(arrays, {"facts": facts})
    first = pack(weights, {"state": state.name, "state_sha256": hashlib.sha256(rest).hexdigest()})
    try:
        _make_folder(target.parent)
        with _only_writer(target.parent) as alone:
            before = None if alone else _state_named_in(target)
            try:
                _write(state, rest)
                _write(passing, first)
                os.replace(passing, target)
            except OSError:
                for unfinished in (passing, state):
                    with contextlib.suppress(OSError):
                        unfinished.unlink(missing_ok=True)
                raise
            _sync_folder(target.parent)
            # The new checkpoint is complete; the next one removes what is left over
            with contextlib.suppress(OSError):
                _remove_left_over(target, state, before, alone)
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint {str(target)!r} cannot be written: {error.strerror or error}. What "
            "was saved there before is unchanged."
        ) from error
    return target


def check_writable(target: Path) -> None:
    """Raise if a file could not be written there; leave nothing behind but the folder."""
    probe = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        _make_folder(target.parent)
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        _write(probe, b"can this be written?")
    except OSError as error:
        raise CheckpointError(
            f"{str(target)!r} cannot be written: {error.strerror or error}."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None


@contextlib.contextmanager
def _only_writer(folder: Path) -> Iterator[bool]:
    """Wait until no other process writes a checkpoint in this folder.

    The value is False where folders cannot be locked.
    """
    if fcntl is None:
        yield False
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield _lock(handle)
    finally:
        os.close(handle)  # this also releases the lock


def _lock(handle: int) -> bool:
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # pyright: ignore[reportOptionalMemberAccess]
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise OSError(
                    errno.EAGAIN,
                    f"another process has been saving in that folder for {LOCK_SECONDS:.0f} seconds",
                ) from None
            time.sleep(0.01)
        except OSError:  # a file system without locks
            return False


def _state_named_in(target: Path) -> str | None:
    """Return the state file of the checkpoint that is about to be replaced; None if unreadable."""
    try:
        return json.loads(read_metadata(target.read_bytes())["etrace_bridge"])["state"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _remove_left_over(target: Path, state: Path, before: str | None, alone: bool) -> None:
    """Remove files of older checkpoints.

    Where another process may be writing, only the file of the replaced checkpoint is removed.
    """
    stem = glob.escape(target.name.removesuffix(SUFFIX))
    known = f"{stem}.????????.state{SUFFIX}"
    for old in target.parent.glob(known):
        if old != state and (alone or old.name == before):
            old.unlink(missing_ok=True)
    for old in target.parent.glob(f".{glob.escape(target.name)}.????????.part") if alone else ():
        old.unlink(missing_ok=True)


def _write(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":
        return  # folders cannot be opened there
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- reading --------------------------------------------------------------------------------------


def read_checkpoint(path: str | os.PathLike) -> tuple[Tensors, Tensors, dict[str, Any]]:
    """Return weights, other arrays and facts, all as they were saved."""
    target = weights_file(path)
    if not target.is_file():
        raise InputError(f"There is no checkpoint {str(target)!r}. Check the path.")
    try:
        return _read_both(target)
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{str(error.filename)!r} cannot be read: {reason}.") from error


def _read_both(target: Path) -> tuple[Tensors, Tensors, dict[str, Any]]:
    # another process may replace the checkpoint between the reading of its two files
    for _ in range(READ_ATTEMPTS):
        weights, about = unpack(target.read_bytes(), target)
        name, digest = about.get("state"), about.get("state_sha256")
        if not isinstance(name, str) or not isinstance(digest, str) or Path(name).name != name:
            raise CheckpointError(
                f"{str(target)!r} is damaged: it does not name its state file. Use "
                "an older checkpoint."
            )
        state = target.with_name(name)
        with contextlib.suppress(FileNotFoundError):
            content = state.read_bytes()
            break
    else:
        raise CheckpointError(
            f"The checkpoint {str(target)!r} needs the file {name!r} beside it, which is missing. "
            "Copy both files of a checkpoint, or use an older one."
        )
    if hashlib.sha256(content).hexdigest() != digest:
        raise CheckpointError(
            f"{str(state)!r} is damaged, or belongs to another checkpoint: its checksum is not the "
            f"one in {target.name!r}. Use an older checkpoint."
        )
    arrays, about = unpack(content, state)
    facts = about.get("facts")
    if not isinstance(facts, dict):
        raise CheckpointError(
            f"{str(state)!r} is damaged: it has no facts about the learner. Use an older checkpoint."
        )
    return weights, arrays, facts
