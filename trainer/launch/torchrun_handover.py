"""Hands the assignment from torchrun's rank 0 to the other ranks, as JSON that no other program can replace.

torchrun's store listens on every interface without a password, so its content is not trusted. On one host the
assignment is a file in the private folder that torchrun's agent makes for its ranks. Over several hosts it is a message
in the store, encrypted and authenticated with ``TRAINER_RUN_SECRET``, which torchrun passes to its ranks.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import RunFailed, UserError
from trainer.host import json_text, private
from trainer.host.notes_board import FolderBoard, OwnBoard, SealedBoard
from trainer.host.patience import Patience
from trainer.planning.run_secret import LEAST as LEAST_SECRET
from trainer.planning.run_secret import VARIABLE as SECRET

if TYPE_CHECKING:
    from torch.distributed import Store

PATIENCE_S = 3600.0
POLL_S = 0.1
NAME = "handover.json"


class Handover(ABC):
    """Base class: passes one message from torchrun's rank 0 to the other ranks: a payload, or a reason to stop."""

    def give(self, payload: Mapping[str, Any]) -> None:
        """On rank 0: hand the payload over.

        Raises:
            RunFailed: JSON cannot hold it.
        """
        try:
            text = json.dumps({"payload": payload})
        except TypeError as error:
            raise RunFailed(f"under torchrun the config travels as JSON: {error}") from error
        self.write(text)

    def stop(self, why: str) -> None:
        """On rank 0: tell the other ranks to stop, and why ('' if nothing failed)."""
        self.write(json.dumps({"stop": why}))

    def take(self) -> dict[str, Any] | str:
        """On the other ranks: wait for the payload, or for the reason to stop.

        Raises:
            RunFailed: no message came, or one that is not rank 0's.
        """
        message = json_text.loads(self.read())
        return message["payload"] if "payload" in message else str(message["stop"])

    @abstractmethod
    def board(self) -> OwnBoard:
        """The board on which these ranks leave notes for each other."""

    @abstractmethod
    def write(self, text: str) -> None:
        """Write the message to where the other ranks read it."""

    @abstractmethod
    def read(self) -> str:
        """Wait for the message and return it."""


class InFolder(Handover):
    """A handover on one host: the message is a file in a private folder."""

    def __init__(self, folder: Path, patience_s: float = PATIENCE_S) -> None:
        self.path = folder / NAME
        self.patience_s = patience_s

    def board(self) -> OwnBoard:
        folder = self.path.with_name("board")
        folder.mkdir(mode=0o700, exist_ok=True)
        return FolderBoard(folder)

    def write(self, text: str) -> None:
        private.write(self.path, text)  # ``stop`` replaces the config, so no secret stays after the run

    def read(self) -> str:
        patience = Patience(self.patience_s, time.monotonic)
        while not self.path.exists():  # torchrun ends this process when rank 0 dies
            if patience.left() <= 0.0:
                raise RunFailed(f"rank 0 handed nothing over within {self.patience_s:g} s")
            time.sleep(POLL_S)
        return private.read(self.path)


class Sealed(Handover):
    """A handover between hosts: the message is in torchrun's store, encrypted with the user's secret.

    Args:
        run: identifies the run; a message of another run is refused.
    """

    KEY = "handover"

    def __init__(self, store: Store, secret: str, run: str) -> None:
        from cryptography.fernet import Fernet  # AES-128-CBC and HMAC-SHA256; mlflow needs the package anyway

        self.store = store
        self.run = run
        digest = hashlib.sha256(secret.encode()).digest()
        self.box = Fernet(base64.urlsafe_b64encode(digest))
        self.secret = hashlib.blake2b(run.encode(), key=digest, digest_size=32).digest()
        self.written = False

    def board(self) -> OwnBoard:
        return SealedBoard(self.store, self.secret)

    def write(self, text: str) -> None:
        if not self.written:
            self.store.set(self.KEY, self.box.encrypt(json.dumps([self.run, text]).encode()).decode())
        self.written = True

    def read(self) -> str:
        from cryptography.fernet import InvalidToken

        try:
            run, text = json_text.loads(self.box.decrypt(self.store.get(self.KEY)))
        except InvalidToken:
            raise RunFailed(
                f"the config in torchrun's store is not from rank 0 of this run: somebody else writes there, "
                f"or {SECRET} "
                "differs between the hosts. Nothing of it was used."
            ) from None
        if run != self.run:
            raise RunFailed(f"the config in torchrun's store is of another run ({run}): {SECRET} was used twice")
        return str(text)


def handover(store: Store, environment: Mapping[str, str] = os.environ) -> Handover:
    """The handover for this torchrun run: sealed in the store if there is a secret, else through a folder on one host.

    Raises:
        UserError: the ranks share neither a private folder nor a secret.
    """
    size, here = int(environment["WORLD_SIZE"]), int(environment["LOCAL_WORLD_SIZE"])
    if secret := environment.get(SECRET, ""):
        if len(secret) < LEAST_SECRET:
            raise UserError(
                SECRET,
                f"is shorter than {LEAST_SECRET} characters and could be guessed",
                f"{SECRET}=$(openssl rand -hex 32) on all hosts",
            )
        run = (environment.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"))
        return Sealed(store, secret, " ".join([*run, str(size)]))
    if size == here and (folder := agents_folder(environment)):
        return InFolder(folder)
    where = "over several hosts" if size > here else "without a log folder of torchrun's own"
    raise UserError(
        SECRET,
        f"is not set; {where} the ranks know rank 0 by a secret, because anybody can write to torchrun's store",
        f"export {SECRET}=..., the same on all hosts, such as openssl rand -hex 32 gives",
    )


def agents_folder(environment: Mapping[str, str]) -> Path | None:
    """The folder that torchrun's agent has made for its ranks in this attempt; None if others can enter it.

    Each rank's variables name a file for errors, ``RUN/attempt_N/RANK/error.json``; RUN is new, with mode 0700.
    """
    error_file = environment.get("TORCHELASTIC_ERROR_FILE", "")
    if not error_file:
        return None
    attempt = Path(error_file).absolute().parents[1]
    return attempt if private.is_private(attempt.parent) and private.is_own(attempt) else None
